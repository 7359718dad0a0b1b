//! How images are looked for and opened.

use crate::mirror::Mirror;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use zebu_remote::http::HttpOptions;

/// Bytes that are unpacked where nothing else is said.
const MOST_UNPACKED: u64 = 256 << 30;

/// How images are looked for and opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OciOptions {
    /// Certificates, timeouts, redirects and the network.
    pub http: HttpOptions,
    /// Places that are asked before the registries themselves, in this order.
    pub mirrors: Vec<Mirror>,
    /// A directory with a `REGISTRY/hosts.toml` for each registry that has mirrors, as containerd reads it.
    pub hosts: Option<PathBuf>,
    /// The platform that is chosen from an index. Default: Linux on the processor of this machine.
    pub platform: Option<Platform>,
    /// The disk that is meant in an image of several: its name, or the digest of its blob.
    pub disk: Option<String>,
    /// Registries (`HOST[:PORT]`) that are asked without TLS. On this machine, they are if TLS fails.
    pub plain_http: Vec<String>,
    /// Whether reading a blob by ranges is refused where it has no hashes: nothing of it can be compared then.
    pub only_verified: bool,
    /// The directory of files without a name that images are unpacked into. Default: `TMPDIR`, or `/tmp`.
    pub directory: Option<PathBuf>,
    /// The most bytes of one of them. Default: 256 GiB.
    pub most_unpacked: Option<u64>,
}

zebu_storage::option_setters!(OciOptions {
    http: HttpOptions,
    mirrors: Vec<Mirror>,
    hosts: impl Into<Option<PathBuf>>,
    platform: impl Into<Option<Platform>>,
    disk: impl Into<Option<String>>,
    plain_http: Vec<String>,
    only_verified: bool,
    directory: impl Into<Option<PathBuf>>,
    most_unpacked: impl Into<Option<u64>>,
});

impl OciOptions {
    pub(crate) fn most_unpacked_bytes(&self) -> u64 {
        self.most_unpacked.unwrap_or(MOST_UNPACKED)
    }

    pub(crate) fn wanted_platform(&self) -> Platform {
        self.platform.clone().unwrap_or_else(Platform::of_this_machine)
    }

    pub(crate) fn spool_directory(&self) -> PathBuf {
        self.directory.clone().unwrap_or_else(std::env::temp_dir)
    }
}

/// An operating system and a processor, in the words of Go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    pub(crate) os: String,
    pub(crate) architecture: String,
    pub(crate) variant: Option<String>,
}

impl Platform {
    /// Linux on the processor of this machine.
    pub fn of_this_machine() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" => "ppc64le",
            other => other,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('/').collect();
        let fits = |part: &&str| {
            !part.is_empty()
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        };
        if !parts.iter().all(fits) {
            return Err("a platform is OS/ARCHITECTURE[/VARIANT], such as linux/arm64".to_owned());
        }
        match parts[..] {
            [os, architecture] => {
                Ok(Self { os: os.to_owned(), architecture: architecture.to_owned(), variant: None })
            }
            [os, architecture, variant] => Ok(Self {
                os: os.to_owned(),
                architecture: architecture.to_owned(),
                variant: Some(variant.to_owned()),
            }),
            _ => Err("a platform is OS/ARCHITECTURE[/VARIANT], such as linux/arm64".to_owned()),
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.as_ref().map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}
