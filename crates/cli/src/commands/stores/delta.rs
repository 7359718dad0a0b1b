//! `zebu delta`: the ranges in which two points or images differ.

use super::shared::{open_store, store_argument};
use crate::arguments::{EngineArgs, ImageArgs};
use crate::failure::Failure;
use crate::output::{json, stdout};
use crate::session::Session;
use crate::temporary_directory::TemporaryDirectory;
use crate::values::OutputFormat;
use serde::Serialize;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use zebu_disks::Context;
use zebu_engine::storage::Worker;
use zebu_engine::{Access, CacheMode, Image};
use zebu_store::points::{ChangedRange, PointName, differences};

/// Bytes of images that are compared at once.
const PIECE: u64 = 1 << 20;
/// Bytes of a range of images.
const GRAIN: usize = 64 << 10;

/// Arguments of `zebu delta`.
#[derive(Debug, clap::Args)]
pub(crate) struct DeltaArgs {
    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// A point (store:DIR/NAME@POINT) or an image
    #[arg(value_name = "A")]
    a: OsString,

    /// Another
    #[arg(value_name = "B")]
    b: OsString,
}

#[derive(Serialize)]
struct Report {
    ranges: Vec<Line>,
    changed: u64,
}

#[derive(Serialize)]
struct Line {
    offset: u64,
    length: u64,
}

/// Runs the command.
pub(crate) fn run(args: &DeltaArgs, context: &Context) -> Result<u8, Failure> {
    args.image.network.apply(&context.disks);
    let ranges = match (store_argument(&args.a)?, store_argument(&args.b)?) {
        (Some(a), Some(b)) => of_points(context, &a, &b)?,
        _ => of_images(args, context)?,
    };
    let changed = ranges.iter().map(|range| range.length).sum();
    stdout::print(&match args.output {
        OutputFormat::Human => {
            let mut text = format!("{:<16} {}\n", "Offset", "Length");
            for range in &ranges {
                let _ = writeln!(text, "{:<#16x} {:#x}", range.offset, range.length);
            }
            text
        }
        OutputFormat::Json => {
            let ranges =
                ranges.iter().map(|range| Line { offset: range.offset, length: range.length }).collect();
            json::to_text(context.dialect, &Report { ranges, changed })?
        }
    })?;
    Ok(0)
}

fn of_points(context: &Context, a: &PointName, b: &PointName) -> Result<Vec<ChangedRange>, Failure> {
    let scratch = TemporaryDirectory::new()?;
    let open = |name: &PointName, place: &str| {
        let store = open_store(context, name)?;
        let point = store.point(name.point())?;
        let top = point.top().ok_or_else(|| Failure::new(format!("{name}: the point has no layers")))?;
        let own = scratch.path().join(place);
        std::fs::create_dir(&own).map_err(|error| Failure::new(format!("{}: {error}", own.display())))?;
        let path = store.hashes_file(top, &own)?;
        let file = File::open(&path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        Ok::<_, Failure>(BufReader::new(file))
    };
    let mut ranges = Vec::new();
    differences(open(a, "a")?, open(b, "b")?, |range| ranges.push(range))
        .map_err(|reason| Failure::new(format!("could not compare '{a}' and '{b}': {reason}")))?;
    Ok(ranges)
}

fn of_images(args: &DeltaArgs, context: &Context) -> Result<Vec<ChangedRange>, Failure> {
    let spec = |name: &OsStr| args.image.resolve(context, name, None, CacheMode::default(), Access::ReadOnly);
    let (a, b) = (spec(&args.a)?, spec(&args.b)?);
    let session = Session::start(context, &args.engine, a.aio.or(b.aio))?;
    session.with_image(&a, |a| {
        session.with_image(&b, |b| {
            let worker = session.worker();
            worker
                .block_on(compare(worker, a, b))
                .map_err(|error| Failure::during("error while comparing the images", &error))
        })
    })
}

async fn compare(worker: &Worker, a: &Image, b: &Image) -> Result<Vec<ChangedRange>, zebu_engine::Error> {
    let (short, long) = (a.virtual_size().min(b.virtual_size()), a.virtual_size().max(b.virtual_size()));
    let mut ranges: Vec<ChangedRange> = Vec::new();
    let mut note = |offset: u64, length: u64| match ranges.last_mut() {
        Some(last) if last.offset + last.length == offset => last.length += length,
        _ => ranges.push(ChangedRange { offset, length }),
    };
    let mut at = 0;
    while at < short {
        let (one, other) = (a.extent(worker, at, short - at).await?, b.extent(worker, at, short - at).await?);
        let both_zero = if one.is_zero() && other.is_zero() { one.len.min(other.len) } else { 0 };
        if both_zero >= PIECE || (both_zero > 0 && at + both_zero == short) {
            at += both_zero;
            continue;
        }
        let len = PIECE.min(short - at);
        let (one, other) = (read(worker, a, at, len).await?, read(worker, b, at, len).await?);
        for (number, (one, other)) in one.chunks(GRAIN).zip(other.chunks(GRAIN)).enumerate() {
            if one != other {
                note(at + (number * GRAIN) as u64, one.len() as u64);
            }
        }
        at += len;
    }
    if long > short {
        note(short, long - short);
    }
    Ok(ranges)
}

async fn read(worker: &Worker, image: &Image, at: u64, len: u64) -> Result<Vec<u8>, zebu_engine::Error> {
    let (result, bufs) = image.read(worker, at, worker.buffer(len as usize).into()).await;
    result?;
    let mut bytes = vec![0; len as usize];
    bufs.copy_to(0, &mut bytes);
    Ok(bytes)
}
