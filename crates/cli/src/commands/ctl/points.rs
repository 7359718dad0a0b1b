//! `zebu ctl backup-start --to STORE`: points of disks in use, all of one moment.
//!
//! The points are made here, of a checkpoint that the server shows: it has no credentials of stores, and its sandbox no way to them.

use super::backup::BackupStartArgs;
use super::checkpoint;
use super::nbd_place::NbdPlace;
use super::server::Server;
use crate::arguments::EngineArgs;
use crate::commands::stores::moment_points::{DiskPoint, DiskReport, MadePoints, PublishedPoints, stores_of};
use crate::commands::stores::point_options::{BaseChoice, MissingBitmap, PointOptions};
use crate::commands::stores::point_report::PUBLISHED;
use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::lock_patience::lock_wait;
use crate::output::{json, stdout};
use crate::serve::control_request::{CheckpointStart, Command, CompressionName};
use crate::session::Session;
use crate::values::OutputFormat;
use crate::watch::Watch;
use serde::Serialize;
use serde_json::Value;
use std::ffi::OsStr;
use std::num::NonZeroU64;
use zebu_disks::Context;
use zebu_engine::jobs::BackupOptions;
use zebu_engine::{Access, Compression, Format, Image, OpenOptions};
use zebu_store::points::{PointMoment, PointName, readable_time};

/// Bytes of a cluster of a point.
const CLUSTER: u64 = 64 << 10;

/// The JSON report.
#[derive(Serialize)]
struct Report {
    /// The id that the points share.
    moment: String,
    time: String,
    points: Vec<DiskReport>,
    /// Why not all points are published.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

/// Makes the next points.
pub(super) fn back_up(server: &mut Server, args: &BackupStartArgs, to: &PointName) -> Result<u8, Failure> {
    let context = server.context.clone();
    let exports = args.exports()?;
    let exports = if exports.is_empty() { vec![server.export(None)?] } else { exports };
    let exports = exports.into_iter().map(|export| checked(server, export)).collect::<Result<Vec<_>, _>>()?;
    let stores = stores_of(&context, to, &exports)?;
    let place = match &args.nbd {
        Some(place) => place.clone(),
        None => NbdPlace::told(server)?,
    };
    let mut watch = Watch::start(args.progress.beside(args.output).mode(false))?;
    let session = Session::start(&context, &EngineArgs { aio: None, verbose: false }, None)?;
    let moment = PointMoment::begin();
    let name = format!("zebu-{}", moment.id());
    let start = CheckpointStart {
        exports: exports.clone(),
        serve: name.clone(),
        bitmap: None,
        from: None,
        spill: None,
        limit: checkpoint::limit(args.limit)?,
        timeout: NonZeroU64::new(args.timeout),
        // If this command is killed, its clients have left.
        until_idle: true,
    };
    let shown = match checkpoint::begin(server, start, args.spill.as_deref()) {
        Ok(shown) => shown,
        Err(failure) => {
            if !server.has_refused() {
                end(server, &name, Outcome::Failed);
            }
            return Err(failure);
        }
    };
    let mut images = Vec::new();
    let mut options = point_options(args, &context, &watch, &moment);
    let made = open(&session, &place, &shown, &mut images).and_then(|()| {
        let disks = exports.iter().zip(&images).zip(&stores);
        let disks: Vec<_> =
            disks.map(|((export, image), store)| DiskPoint { export, image, store }).collect();
        MadePoints::make(&session, &mut options, &disks, &watch)
    });
    // Nothing of it is read any more, and the guests' writes need not wait for it any longer.
    let why = end(server, &name, if made.is_ok() { Outcome::Complete } else { Outcome::Failed });
    for image in &images {
        let _ = session.close(image, Access::ReadOnly);
    }
    watch.finish();
    let made = made.map_err(|failure| match why {
        Some(why) if failure.exit != EXIT_INTERRUPTED => failure.adding(&format!("; {why}")),
        _ => failure,
    })?;
    if watch.cancel().is_cancelled() {
        made.give_up();
        return Err(Failure::interrupted());
    }
    tell(args, &context, &moment, made.publish(context.dialect, &args.keep.rules()))
}

/// The name of an export of which points can be made.
fn checked(server: &mut Server, export: String) -> Result<String, Failure> {
    let stats = server.ask(Command::Stats { export: Some(export.clone()) })?;
    let name = stats["name"].as_str().map_or(export, str::to_owned);
    if stats["encrypted"] == true {
        return Err(Failure::new(format!(
            "the disk of the export '{name}' is encrypted, and a point of it would hold its plain text: back its image up while nobody \
             uses it ('zebu backup --decrypt' allows that)"
        )));
    }
    Ok(name)
}

fn point_options(
    args: &BackupStartArgs,
    context: &Context,
    watch: &Watch,
    moment: &PointMoment,
) -> PointOptions {
    let compression = match args.compression_type {
        Some(CompressionName::Zlib) => Compression::Zlib,
        Some(CompressionName::Zstd) | None => Compression::Zstd,
    };
    let layer = BackupOptions::new("")
        .lock_wait(lock_wait(context.dialect))
        .cluster_size(args.cluster_size.unwrap_or(CLUSTER))
        .compression(compression)
        .speed(args.speed.speed())
        .control(watch.control().rate_limit(args.rate.and_then(|rate| rate.0)));
    PointOptions {
        layer,
        base: if args.full { BaseChoice::None } else { BaseChoice::Last },
        missing_bitmap: MissingBitmap::Refuse,
        moment: Some(moment.clone()),
    }
}

/// Opens the disks of a checkpoint, all before the first is read: so it ends by itself when this process does.
fn open(session: &Session, place: &NbdPlace, shown: &Value, images: &mut Vec<Image>) -> Result<(), Failure> {
    let context = session.context();
    for served in shown["exports"].as_array().into_iter().flatten() {
        let url = place.url(served["serve"].as_str().unwrap_or_default());
        // The guest may have written anything, even what looks like an image.
        let options = OpenOptions::default().format(Some(Format::Raw)).access(Access::ReadOnly);
        let options = context.with_references(options, &[])?;
        let opened = context.describe(OsStr::new(&url), options).map_err(Failure::from);
        let opened = opened.and_then(|spec| session.open(&spec));
        images.push(opened.map_err(|failure| {
            failure.adding(" (the disks are read over NBD: --nbd says where, if not as the server tells)")
        })?);
    }
    Ok(())
}

/// The end of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Complete,
    Failed,
}

/// Ends a checkpoint; why it has ended before, if it has.
fn end(server: &Server, name: &str, outcome: Outcome) -> Option<String> {
    // Whoever can't be reached has ended, or ends it when nobody is connected.
    let mut server = server.again().ok()?;
    let state = server.ask(Command::CheckpointQuery { name: Some(name.to_owned()) }).ok()?;
    match (state["status"].as_str(), state["ended-by"].as_str()) {
        (Some("failed"), _) => {
            let error = state["error"].as_str().unwrap_or("for an unknown reason");
            Some(format!("the checkpoint of the disks has failed: {error}"))
        }
        (Some("ended"), Some("timeout")) => {
            Some("the time of the checkpoint of the disks was over (--timeout)".to_owned())
        }
        (Some("running"), _) => {
            let failed = outcome == Outcome::Failed;
            let _ = server.ask(Command::CheckpointEnd { name: name.to_owned(), failed });
            None
        }
        _ => None,
    }
}

fn tell(
    args: &BackupStartArgs,
    context: &Context,
    moment: &PointMoment,
    published: PublishedPoints,
) -> Result<u8, Failure> {
    published.tell_failed(context.dialect)?;
    let code = published.code();
    let text = match args.output {
        OutputFormat::Human => published.human_text(),
        OutputFormat::Json => {
            let report = Report {
                moment: moment.id().to_owned(),
                time: readable_time(moment.time()),
                failed: published.failed.and_then(|failure| failure.message),
                points: published.points,
            };
            json::to_text(context.dialect, &report)?
        }
    };
    stdout::print(&text).map_err(|failure| failure.with_exit(PUBLISHED))?;
    Ok(code)
}
