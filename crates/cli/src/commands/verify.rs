//! `zebu verify`: reads every cluster of an image, and compares it with a manifest.

use crate::arguments::InspectArgs;
use crate::commands::stores;
use crate::commands::stores::shared::store_argument;
use crate::failure::Failure;
use crate::local_argument::path_argument;
use crate::output::units::size_short;
use crate::output::{json, stderr, stdout};
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, caches, formats};
use crate::watch::{ProgressArg, Watch};
use serde::Serialize;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use zebu_disks::Context;
use zebu_engine::jobs::{VerifyOptions, VerifyReport, verify};
use zebu_engine::{Access, CacheMode};

/// The exit code for an image whose content is damaged, as that of `check`.
const DAMAGED: u8 = 2;

/// Arguments of `zebu verify`.
#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the image [default: probed]
    #[arg(short = 'f', long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Cache mode
    #[arg(short = 'T', long, value_name = "CACHE", value_parser = caches(), default_value = "none")]
    cache: CacheMode,

    /// Compare with this manifest, as zebu backup wrote it
    #[arg(long, value_name = "FILE", value_parser = path_argument())]
    manifest: Option<PathBuf>,

    #[command(flatten)]
    inspect: InspectArgs,

    /// The image, or a store of points: store:DIR/NAME, or one point: store:DIR/NAME@POINT
    #[arg(value_name = "FILENAME")]
    file: OsString,
}

/// The JSON report. Figures are bytes of the virtual disk.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    total: u64,
    read: u64,
    bad: u64,
    bad_ranges: Vec<BadRange>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gave_up_at: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_hash: Option<String>,
}

#[derive(Serialize)]
struct BadRange {
    start: u64,
    length: u64,
    error: String,
}

/// Runs the command.
pub(crate) fn run(args: &VerifyArgs, context: &Context) -> Result<u8, Failure> {
    if let Some(store) = store_argument(&args.file)? {
        if args.manifest.is_some() || args.format.is_some() {
            return Err(Failure::usage(
                "a store of points has hashes and formats of its own: leave --manifest and -f out",
            ));
        }
        return stores::verify::run(&store, &args.inspect, args.progress, args.quiet, context);
    }
    let mut spec = args.inspect.image.resolve(
        context,
        &args.file,
        args.format.as_ref(),
        args.cache,
        Access::ReadOnly,
    )?;
    args.inspect.force_share.apply(&mut spec);
    let session = Session::start(context, &args.inspect.engine, spec.aio)?;
    let mut watch = Watch::start(args.progress.beside(args.inspect.output).mode(args.quiet))?;
    let options = VerifyOptions::default().manifest(args.manifest.clone()).control(watch.control());
    let report = session.with_image(&spec, |image| {
        let worker = session.worker();
        let result = worker.block_on(verify(worker, image, &options));
        watch.finish();
        result
            .map_err(|error| Failure::during(&format!("could not verify '{}'", spec.path.display()), &error))
    })?;
    for range in &report.bad_ranges {
        stderr::tell(
            context.dialect,
            &format!("{} bytes at offset {}: {}", range.len, range.offset, range.error),
        );
    }
    if !args.quiet {
        stdout::print(&match args.inspect.output {
            // As of a backup: programs have read the exact figures so far.
            OutputFormat::Human if std::io::stdout().is_terminal() && !args.inspect.engine.verbose => {
                summary(&report) + "\n"
            }
            OutputFormat::Human => human_text(&report),
            OutputFormat::Json => json::to_text(context.dialect, &json_report(report.clone()))?,
        })?;
    }
    Ok(if report.bad == 0 { 0 } else { DAMAGED })
}

fn json_report(report: VerifyReport) -> Report {
    Report {
        total: report.total,
        read: report.read,
        bad: report.bad,
        bad_ranges: report
            .bad_ranges
            .into_iter()
            .map(|range| BadRange { start: range.offset, length: range.len, error: range.error.to_string() })
            .collect(),
        gave_up_at: report.gave_up_at,
        disk_hash: report.disk_hash,
    }
}

/// The same for people.
fn summary(report: &VerifyReport) -> String {
    let (read, total) = (size_short(report.read), size_short(report.total));
    let mut text = match report.bad {
        0 => format!("no damage in {read} of data, of a disk of {total}"),
        bad => format!("{} of a disk of {total} are bad: they can't be read, or differ", size_short(bad)),
    };
    if report.gave_up_at.is_some() {
        text += "; gave up there: too much of it is bad";
    }
    if report.bad == 0 && report.disk_hash.is_some() {
        text += ", as the manifest says";
    }
    text
}

fn human_text(report: &VerifyReport) -> String {
    let mut text =
        format!("total {}, read {}, bad {} (bytes of the disk)", report.total, report.read, report.bad);
    if let Some(offset) = report.gave_up_at {
        text += &format!("; gave up at offset {offset}: too much of it is bad");
    }
    if let Some(hash) = &report.disk_hash {
        text += &format!("; disk hash {hash}, as the manifest says");
    }
    text + "\n"
}
