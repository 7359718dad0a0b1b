//! `zebu compare`: whether two images show a guest the same bytes.

use crate::arguments::InspectArgs;
use crate::blob_digests;
use crate::failure::{Failure, FailureKind};
use crate::output::{json, stderr, stdout};
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, caches, formats};
use crate::watch::{ProgressArg, Watch};
use serde::Serialize;
use std::ffi::OsString;
use zebu_disks::{Context, ImageSpec, Program, errno_text};
use zebu_engine::jobs::{
    CompareError, CompareOptions, CompareReport, CompareStage, Comparison, Strictness, compare,
};
use zebu_engine::{Access, CacheMode, ErrorKind};
use zebu_oci::Readers;

/// The images differ.
const EXIT_DIFFERENT: u8 = 1;
/// An image can't be opened.
pub(crate) const EXIT_OPEN: u8 = 2;
/// It can't be found out what is allocated.
const EXIT_STATUS: u8 = 3;
/// An image can't be read.
const EXIT_READ: u8 = 4;

/// Arguments of `zebu compare`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompareArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the first image [default: probed]
    #[arg(short = 'f', long, value_name = "FMT", value_parser = formats())]
    a_format: Option<NamedFormat>,

    /// Format of the second image [default: probed]
    #[arg(short = 'F', long, value_name = "FMT", value_parser = formats())]
    b_format: Option<NamedFormat>,

    /// Sizes and allocated ranges must be equal too
    #[arg(short, long)]
    strict: bool,

    /// Cache mode of both images
    #[arg(
        short = 'T',
        long,
        value_name = "CACHE",
        value_parser = caches(),
        default_value = "writeback"
    )]
    cache: CacheMode,

    #[command(flatten)]
    inspect: InspectArgs,

    /// The first image
    #[arg(value_name = "FILENAME1")]
    first: OsString,

    /// The second image
    #[arg(value_name = "FILENAME2")]
    second: OsString,
}

/// The JSON report.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    virtual_sizes: [u64; 2],
}

/// Runs the command.
pub(crate) fn run(args: &CompareArgs, context: &Context) -> Result<u8, Failure> {
    context.disks.remote.expect(Readers::All);
    let resolve = |name, format: Option<&NamedFormat>| {
        args.inspect.image.resolve(context, name, format, args.cache, Access::ReadOnly).map_err(|failure| {
            match failure.kind {
                FailureKind::Runtime => failure.with_exit(EXIT_OPEN),
                FailureKind::Usage | FailureKind::Option => failure,
            }
        })
    };
    let mut specs =
        [resolve(&args.first, args.a_format.as_ref())?, resolve(&args.second, args.b_format.as_ref())?];
    if !args.inspect.image.image_opts {
        specs[1].called_raw = "-F raw";
    }
    for spec in &mut specs {
        args.inspect.force_share.apply(spec);
    }
    if let (Some(first), Some(second)) = (specs[0].aio, specs[1].aio)
        && first != second
    {
        return Err(Failure::usage("both images are read by one I/O engine: their 'aio' options contradict"));
    }
    let session = Session::start(context, &args.inspect.engine, specs[0].aio.or(specs[1].aio))?;
    let mut watch = Watch::start(args.progress.beside(args.inspect.output).mode(args.quiet))?;
    let open = |index: usize| session.open(&specs[index]).map_err(|failure| failure.with_exit(EXIT_OPEN));
    let (first, second) = (open(0)?, open(1)?);
    let options = CompareOptions::default()
        .strictness(if args.strict { Strictness::Allocation } else { Strictness::Content })
        .control(watch.control());
    let worker = session.worker();
    let result = worker.block_on(compare(worker, &first, &second, &options));
    watch.finish();
    for image in [&first, &second] {
        session.close(image, Access::ReadOnly)?;
    }
    let sizes = [first.virtual_size(), second.virtual_size()];
    let report = match result {
        Err(error) if error.stage == CompareStage::Read && context.dialect.is_qemu() => {
            return tell_as_qemu(context.dialect, &error, &specs, sizes, args.quiet);
        }
        result => result.map_err(|error| failure(&error))?,
    };
    // What differs may be left early.
    if report.result == Comparison::Identical {
        blob_digests::compare(context, &watch, []).map_err(|failure| failure.with_exit(EXIT_READ))?;
    }
    if !args.quiet {
        stdout::print(&match args.inspect.output {
            OutputFormat::Human => human_text(&report),
            OutputFormat::Json => json::to_text(context.dialect, &json_report(&report))?,
        })?;
    }
    Ok(if report.result == Comparison::Identical { 0 } else { EXIT_DIFFERENT })
}

/// Tells of a read that failed in the words of qemu-img, which then tells of sizes that differ, if it came so far.
fn tell_as_qemu(
    dialect: Program,
    error: &CompareError,
    specs: &[ImageSpec; 2],
    sizes: [u64; 2],
    quiet: bool,
) -> Result<u8, Failure> {
    let offset = error.error.guest_offset().unwrap_or(0);
    let name = error.image.as_ref().unwrap_or(&specs[0].path);
    let failure = Failure::new(format!(
        "Error while reading offset {offset} of {}: {}",
        name.display(),
        errno_text(error.error.errno())
    ));
    stderr::warn(failure.text(dialect, None).trim_end());
    if sizes[0] != sizes[1] && offset >= sizes[0].min(sizes[1]) && !quiet {
        stdout::print("Warning: Image size mismatch!\n")?;
    }
    Ok(EXIT_READ)
}

fn failure(error: &CompareError) -> Failure {
    if error.error.kind() == ErrorKind::Cancelled {
        return Failure::interrupted();
    }
    let failure = match &error.image {
        Some(image) => Failure::from(error.error.clone().on(image)),
        None => Failure::from(error.error.clone()),
    };
    failure.with_exit(match error.stage {
        CompareStage::Status => EXIT_STATUS,
        CompareStage::Read => EXIT_READ,
        CompareStage::Control => EXIT_OPEN,
    })
}

fn human_text(report: &CompareReport) -> String {
    let [first, second] = report.sizes;
    let warning = "Warning: Image size mismatch!\n";
    match report.result {
        Comparison::Identical if first == second => "Images are identical.\n".to_owned(),
        Comparison::Identical => format!("{warning}Images are identical.\n"),
        Comparison::ContentMismatch { offset } if offset >= first.min(second) => {
            format!("{warning}Content mismatch at offset {offset}!\n")
        }
        Comparison::ContentMismatch { offset } => format!("Content mismatch at offset {offset}!\n"),
        Comparison::SizeMismatch => "Strict mode: Image size mismatch!\n".to_owned(),
        Comparison::StatusMismatch { offset } => {
            format!("Strict mode: Offset {offset} block status mismatch!\n")
        }
    }
}

fn json_report(report: &CompareReport) -> Report {
    let (result, offset) = match report.result {
        Comparison::Identical => ("identical", None),
        Comparison::ContentMismatch { offset } => ("content-mismatch", Some(offset)),
        Comparison::SizeMismatch => ("size-mismatch", None),
        Comparison::StatusMismatch { offset } => ("status-mismatch", Some(offset)),
    };
    Report { result, offset, virtual_sizes: report.sizes }
}
