//! `zebu pull`: a file, made of an image of a registry.

mod stack;

use crate::arguments::NetworkArgs;
use crate::failure::Failure;
use crate::local_argument::path_argument;
use crate::output::{json, stdout};
use crate::values::OutputFormat;
use crate::watch::{ProgressArg, Watch};
use serde::Serialize;
use std::path::PathBuf;
use zebu_disks::{Context, printable};
use zebu_oci::{OciName, Pulled, pull, stack_digest};
use zebu_remote::RemoteError;

/// Arguments of `zebu pull`.
#[derive(Debug, clap::Args)]
pub(crate) struct PullArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    network: NetworkArgs,

    /// oci://REGISTRY/NAME:TAG, oci://REGISTRY/NAME@DIGEST, or oci-layout:PATH:TAG
    #[arg(value_name = "IMAGE", value_parser = OciName::parse)]
    name: OciName,

    /// The file; it must not exist
    #[arg(value_name = "FILENAME", value_parser = path_argument())]
    target: PathBuf,
}

/// The JSON report.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    image: String,
    digest: String,
    filename: String,
    length: u64,
    resumed_at: u64,
}

/// Runs the command.
pub(crate) fn run(args: &PullArgs, context: &Context) -> Result<u8, Failure> {
    args.network.apply(&context.disks);
    let mut watch = Watch::start(args.progress.beside(args.output).mode(args.quiet))?;
    let on = |done: u64, total: u64| {
        watch.note("pulling", done, total);
        !watch.cancel().is_cancelled()
    };
    let failed = |error: &RemoteError| {
        if watch.cancel().is_cancelled() {
            return Failure::interrupted();
        }
        Failure::new(format!("could not pull '{}': {}", printable(error.name()), printable(error.reason())))
    };
    let oci = context.disks.remote.oci_options();
    let stack = stack_digest(&args.name, &oci).map_err(|error| failed(&error))?;
    let (digest, len, resumed_at) = if let Some(digest) = stack {
        let len = stack::pull(&args.name.pinned(&digest), &args.target, context, &watch)?;
        (digest, len, 0)
    } else {
        let Pulled { digest, len, resumed_at, .. } =
            pull(&args.name, &args.target, &oci, &on).map_err(|error| failed(&error))?;
        (digest, len, resumed_at)
    };
    watch.finish();
    if !args.quiet {
        stdout::print(&match args.output {
            OutputFormat::Human => {
                let before =
                    if resumed_at > 0 { format!(", {resumed_at} of them before") } else { String::new() };
                format!("{}: {digest}, {len} bytes{before}\n", args.name)
            }
            OutputFormat::Json => {
                let filename = args.target.display().to_string();
                let (image, digest) = (args.name.to_string(), digest.to_string());
                json::to_text(context.dialect, &Report { image, digest, filename, length: len, resumed_at })?
            }
        })?;
    }
    Ok(0)
}
