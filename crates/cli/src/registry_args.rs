//! Options for images of registries.

use clap::Args;
use std::path::PathBuf;
use zebu_oci::{Mirror, OciOptions, Platform};

const REGISTRIES: &str = "Images of registries";

/// Where images of registries are looked for, and which is meant.
#[derive(Debug, Clone, Args)]
pub(crate) struct RegistryArgs {
    /// Ask this place before the registry (of that name); may be given more than once
    #[arg(long, help_heading = REGISTRIES, hide_short_help = true, value_name = "[REGISTRY=]URL")]
    mirror: Vec<Mirror>,

    /// Ask the mirrors that REGISTRY/hosts.toml in this directory has, as containerd reads it
    #[arg(long, help_heading = REGISTRIES, hide_short_help = true, value_name = "DIR")]
    hosts_dir: Option<PathBuf>,

    /// Platform of the image in an index [default: linux on the processor of this machine]
    #[arg(long, help_heading = REGISTRIES, hide_short_help = true, value_name = "OS/ARCH[/VARIANT]")]
    platform: Option<Platform>,

    /// Disk of an image that has several, by its name or digest
    #[arg(long, help_heading = REGISTRIES, hide_short_help = true, value_name = "NAME")]
    oci_disk: Option<String>,

    /// Ask this registry without TLS; may be given more than once
    ///
    /// A registry of this machine (localhost, 127.0.0.1) is asked without TLS if it has none.
    #[arg(long, help_heading = REGISTRIES, hide_short_help = true, value_name = "HOST[:PORT]")]
    plain_http: Vec<String>,

    /// Refuse to read an image by ranges if it has no hashes with which they can be compared
    #[arg(long, help_heading = REGISTRIES, hide_short_help = true)]
    require_verified: bool,
}

impl RegistryArgs {
    /// The options, without those of the network.
    pub(crate) fn options(&self) -> OciOptions {
        OciOptions::default()
            .mirrors(self.mirror.clone())
            .hosts(self.hosts_dir.clone())
            .platform(self.platform.clone())
            .disk(self.oci_disk.clone())
            .plain_http(self.plain_http.clone())
            .only_verified(self.require_verified)
    }
}
