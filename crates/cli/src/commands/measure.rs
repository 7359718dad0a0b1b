//! `zebu measure`: how large an image file would become.

use crate::arguments::InspectArgs;
use crate::create_opts::{CreateOpts, ParsedOpts};
use crate::failure::Failure;
use crate::output::{json, stdout};
use crate::qemu_names::option_lists::{self, FileOptions};
use crate::session::Session;
use crate::snapshot_name::snapshot_name;
use crate::values::{NamedFormat, OutputFormat, formats, measured_formats};
use crate::watch::{ProgressMode, Watch};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::Write as _;
use zebu_disks::Context;
use zebu_disks::size::size_argument;
use zebu_engine::jobs::{Measurement, measure_image, measure_size};
use zebu_engine::{Access, CacheMode, Format};

/// Arguments of `zebu measure`.
#[derive(Debug, clap::Args)]
pub(crate) struct MeasureArgs {
    /// Format of the image that would be made
    #[arg(short = 'O', long, value_name = "FMT", value_parser = measured_formats(), default_value = "raw")]
    target_format: Format,

    /// Options that it would be made with (-o help lists them)
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,

    /// Measure an empty disk of this size instead of an image
    #[arg(short, long, value_name = "SIZE", value_parser = size_argument, conflicts_with = "filename")]
    size: Option<u64>,

    /// Format of FILENAME [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Measure this internal snapshot of FILENAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", conflicts_with = "size")]
    snapshot: Option<String>,

    #[command(flatten)]
    inspect: InspectArgs,

    /// The image to convert from (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: Option<OsString>,
}

/// The JSON report.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    required: u64,
    fully_allocated: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bitmaps: Option<u64>,
}

/// Runs the command.
pub(crate) fn run(args: &MeasureArgs, context: &Context) -> Result<u8, Failure> {
    option_lists::check(context.dialect, &args.options)?;
    let opts =
        match CreateOpts::parse(context.dialect, &args.options, args.target_format, FileOptions::Listed)
            .map_err(Failure::new)?
        {
            ParsedOpts::Help(text) => {
                stdout::print(&text)?;
                return Ok(0);
            }
            ParsedOpts::Use(opts) => opts,
        };
    let create = opts.create_options_with(context.dialect, args.target_format, None).map_err(Failure::new)?;
    let measurement = match (&args.filename, args.size) {
        (None, Some(size)) => measure_size(size, &create)?,
        (Some(filename), None) => {
            let mut spec = args.inspect.image.resolve(
                context,
                filename,
                args.format.as_ref(),
                CacheMode::Writeback,
                Access::ReadOnly,
            )?;
            args.inspect.force_share.apply(&mut spec);
            spec.options.snapshot = args.snapshot.as_deref().map(snapshot_name).transpose()?;
            let session = Session::start(context, &args.inspect.engine, spec.aio)?;
            let watch = Watch::start(ProgressMode::None)?;
            session.with_image(&spec, |image| {
                let worker = session.worker();
                Ok(worker.block_on(measure_image(worker, image, &create, &watch.control()))?)
            })?
        }
        _ => return Err(Failure::usage("Either --size N or one filename must be specified.")),
    };
    stdout::print(&match args.inspect.output {
        OutputFormat::Human => human_text(&measurement),
        OutputFormat::Json => json::to_text(
            context.dialect,
            &Report {
                required: measurement.required,
                fully_allocated: measurement.fully_allocated,
                bitmaps: measurement.bitmaps,
            },
        )?,
    })?;
    Ok(0)
}

fn human_text(measurement: &Measurement) -> String {
    let mut text = format!(
        "required size: {}\nfully allocated size: {}\n",
        measurement.required, measurement.fully_allocated
    );
    if let Some(bytes) = measurement.bitmaps {
        let _ = writeln!(text, "bitmaps size: {bytes}");
    }
    text
}
