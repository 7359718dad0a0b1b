//! `zebu backup` to a store: the next point, with what changed since the last one.

use super::{BackupArgs, options};
use crate::commands::stores::shared::{open_layers, tell_damaged};
use crate::default_cache_mode::DefaultCacheMode;
use crate::failure::Failure;
use crate::output::{json, stderr, stdout};
use crate::sector_size::{unusual, warn_of_lost};
use crate::session::Session;
use crate::snapshot_name::snapshot_name;
use crate::unreadable;
use crate::values::OutputFormat;
use crate::watch::Watch;
use serde::Serialize;
use zebu::jobs::{BackupIdentity, BackupOptions, BackupReport, BitmapUse, PreviousBackup, backup};
use zebu::{Access, BackupId, CacheMode, Compression, Image};
use zebu_disks::Context;
use zebu_disks::packed::{Order, Reader};
use zebu_store::points::{
    Claim, LAYERS_AT_MOST, Point, PointName, PointStore, PointsErrorKind, readable_time,
};

/// How often a point is begun anew because its base went meanwhile.
const TRIES: u32 = 5;

/// How a point came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    /// All of the disk was read and stored.
    Full,
    /// Only marks of the bitmap were read.
    Bitmap,
    /// All of the disk was read, and what differs from the last point stored.
    Scan,
}

/// The JSON report. Figures are bytes.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    point: String,
    sequence: u64,
    time: String,
    way: Way,
    /// Why it is not by the bitmap, or not on the last point.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    disk_size: u64,
    read: u64,
    written: u64,
    unreadable: u64,
    added: u64,
    forgotten: Vec<String>,
}

/// The point that the next one stands on.
struct Base {
    point: Point,
    id: Option<BackupId>,
}

/// A point that is made and not published yet.
struct Made {
    report: BackupReport,
    point: Point,
    way: Way,
    reason: Option<String>,
}

/// Runs the command.
pub(super) fn run(args: &BackupArgs, context: &Context, name: &PointName) -> Result<u8, Failure> {
    check(args, name)?;
    let access = if args.bitmap.is_some() { Access::ReadWrite } else { Access::ReadOnly };
    let cache = args.source_cache.unwrap_or_default();
    let mut spec = args.image.resolve(context, &args.source, args.source_format.as_ref(), cache, access)?;
    args.force_share.apply(&mut spec);
    spec.options.snapshot = args.source_snapshot.as_deref().map(snapshot_name).transpose()?;
    let mut session = Session::start(context, &args.engine, spec.aio)?;
    let source = DefaultCacheMode::unless_asked(args.source_cache, CacheMode::default(), &session, &mut spec);
    if source.is_some() {
        session.read_uncached();
    }
    let mut watch = Watch::start(args.progress.beside(args.output).mode(args.quiet))?;
    let store = PointStore::open_or_create(name, &context.disks.remote.http_options())?;
    let reader = || Ok(Reader { order: Order::Any, target_size: None });
    args.packed.prepare(context, &mut spec, &[], reader, &watch)?;
    let published = session.with_image(&spec, |image| {
        warn_of_lost(unusual(image.logical_sector_size()), args.target.as_os_str());
        let made = next_point(args, &session, &store, image, &watch);
        watch.finish();
        made
    });
    let (made, point) = published?;
    if let Some(source) = source {
        source.clean_up();
    }
    let forgotten =
        if args.keep.is_given() { store.forget(&args.keep.rules(), None)?.removed } else { Vec::new() };
    tell(args, context, made, point, forgotten)
}

/// Refuses what a point can't have, before anything is opened.
fn check(args: &BackupArgs, name: &PointName) -> Result<(), Failure> {
    if name.point().is_some() {
        return Err(Failure::usage(format!("'{name}': a new point gets its name by itself: leave '@' out")));
    }
    let refused = [
        (args.previous.is_some(), "--previous: the store knows its last point"),
        (args.manifest.is_some(), "--manifest: the store has hashes of its own"),
        (args.target_cache.is_some(), "a cache mode (-t)"),
        (args.resume, "--resume: what was cut off is begun anew"),
        (args.dry_run, "--dry-run"),
    ];
    match refused.iter().find(|(is_wanted, _)| *is_wanted) {
        None => Ok(()),
        Some((_, what)) => Err(Failure::usage(format!("'{name}': a point of a store can't have {what}"))),
    }
}

/// Makes the next point, and publishes it.
fn next_point(
    args: &BackupArgs,
    session: &Session,
    store: &PointStore,
    image: &Image,
    watch: &Watch,
) -> Result<(Made, Point), Failure> {
    let context = session.context();
    let mut tries = 1;
    loop {
        let (points, damaged) = store.points()?;
        tell_damaged(context, &damaged);
        let (base, reason) = base_of(args, session, store, image, points);
        let mut claim = match store.claim(base.as_ref().map(|base| &base.point)) {
            Err(error) if error.kind() == PointsErrorKind::Busy && tries < TRIES => {
                tries += 1;
                continue;
            }
            claim => claim?,
        };
        let made = make(args, session, store, image, (base, reason), &mut claim, watch).and_then(|made| {
            let lost = |key: &str| {
                stderr::tell(
                    context.dialect,
                    &format!(
                        "{}: {key}: another backup came first; this one is published after it",
                        store.name()
                    ),
                );
            };
            let point = store.publish(made.point.clone(), lost)?;
            Ok((made, point))
        });
        claim.end();
        return made;
    }
}

/// The point to go on from, or why there is none.
fn base_of(
    args: &BackupArgs,
    session: &Session,
    store: &PointStore,
    image: &Image,
    mut points: Vec<Point>,
) -> (Option<Base>, Option<String>) {
    let Some(point) = points.pop() else { return (None, None) };
    let name = &point.name;
    let size = image.virtual_size();
    if point.disk_size != size {
        let reason = format!("the disk has {size} bytes, that of point {name} {}", point.disk_size);
        return (None, Some(reason));
    }
    if point.cluster_size != args.cluster_size {
        return (None, Some(format!("point {name} has clusters of {} bytes", point.cluster_size)));
    }
    if point.layers.len() >= LAYERS_AT_MOST {
        let count = point.layers.len();
        return (None, Some(format!("point {name} stands on {count} layers ('zebu compact' merges them)")));
    }
    match open_layers(session.context(), session.worker(), store, &point.layers) {
        Ok((found, _)) => {
            let id = found.backup_id();
            // Nothing was written.
            let _ = session.close(&found, Access::ReadOnly);
            (Some(Base { point, id }), None)
        }
        Err(error) => (None, Some(format!("point {name} can't be gone on from: {error}"))),
    }
}

/// Why the bitmap can't tell what changed since the base; `None`: it can.
fn bitmap_fault(image: &Image, bitmap: &str, base: &Base) -> Option<String> {
    let found = image.bitmaps().into_iter().find(|found| found.name == bitmap);
    let Some(found) = found else { return Some(format!("there was no bitmap '{bitmap}', which begins now")) };
    if found.in_use {
        return Some(format!("bitmap '{bitmap}' was inconsistent (after a crash), and begins anew"));
    }
    if found.base.is_some() && found.base == base.id {
        return None;
    }
    Some(format!("bitmap '{bitmap}' does not go on from point {}, and begins anew", base.point.name))
}

fn make(
    args: &BackupArgs,
    session: &Session,
    store: &PointStore,
    image: &Image,
    (base, mut reason): (Option<Base>, Option<String>),
    claim: &mut Claim,
    watch: &Watch,
) -> Result<Made, Failure> {
    let context = session.context();
    let target = claim.directory().join("layer.qcow2");
    let hashes = claim.directory().join("layer.hashes");
    let mut options = options(args, context, &target, watch);
    options.cache = CacheMode::Writeback;
    options.manifest = Some(hashes.clone());
    options.identity = BackupIdentity::New;
    if args.compression_type.is_none() {
        options.compression = Compression::Zstd;
    }
    let mut way = Way::Full;
    let mut below = Vec::new();
    let mut parent = None;
    if let Some(base) = base {
        way = Way::Scan;
        if let Some(bitmap) = &args.bitmap {
            reason = bitmap_fault(image, bitmap, &base);
            if reason.is_none() {
                way = Way::Bitmap;
            }
        }
        stand_on(context, store, claim, &base.point, &mut options)?;
        below.clone_from(&base.point.layers);
        parent = Some(base.point.name);
    }
    options.bitmap_use = if way == Way::Bitmap { BitmapUse::Believe } else { BitmapUse::Restart };
    let worker = session.worker();
    let made = worker.block_on(backup(worker, image, &options));
    let report = made.map_err(|error| {
        if error.image() == Some(image.path()) {
            Failure::during("error while reading the source", &error)
        } else {
            Failure::during(&format!("error while making a point of '{}'", store.name()), &error)
        }
    })?;
    let layer = claim.add(&target, &hashes)?;
    let added = if below.contains(&layer) { 0 } else { layer.size + layer.hashes_size };
    if added > 0 {
        below.insert(0, layer);
    }
    let point = Point {
        version: 0,
        sequence: 0,
        name: String::new(),
        time: 0,
        disk_size: image.virtual_size(),
        cluster_size: args.cluster_size,
        parent,
        added,
        layers: below,
    };
    Ok(Made { report, point, way, reason })
}

/// Has the backup be an increment on a point.
fn stand_on(
    context: &Context,
    store: &PointStore,
    claim: &Claim,
    point: &Point,
    options: &mut BackupOptions,
) -> Result<(), Failure> {
    let Some(top) = point.top() else { return Ok(()) };
    let chain = context.disks.remote.point_chain(store, &point.layers)?;
    let previous = PreviousBackup::new(chain.top)
        .below(chain.below)
        .remote(chain.remote)
        .name(top.file_name())
        .manifest(store.hashes_file(top, claim.directory())?);
    options.previous = Some(previous);
    Ok(())
}

/// Prints what was done.
fn tell(
    args: &BackupArgs,
    context: &Context,
    made: Made,
    point: Point,
    forgotten: Vec<String>,
) -> Result<u8, Failure> {
    let Made { report, way, reason, .. } = made;
    unreadable::tell(
        context.dialect,
        &report.unreadable_ranges,
        report.unreadable_range_count,
        report.unreadable,
    );
    if let Some(reason) = &reason {
        let what = if way == Way::Full { "the point is a full one" } else { "the whole disk was read" };
        stderr::tell(context.dialect, &format!("{what}: {reason}"));
    }
    if args.quiet {
        return Ok(0);
    }
    let report = Report {
        point: point.name,
        sequence: point.sequence,
        time: readable_time(point.time),
        way,
        reason,
        parent: point.parent,
        disk_size: point.disk_size,
        read: report.read,
        written: report.written,
        unreadable: report.unreadable,
        added: point.added,
        forgotten,
    };
    stdout::print(&match args.output {
        OutputFormat::Human => human_text(&report),
        OutputFormat::Json => json::to_text(context.dialect, &report)?,
    })?;
    Ok(0)
}

fn human_text(report: &Report) -> String {
    let way = match report.way {
        Way::Full => "full",
        Way::Bitmap => "by the bitmap",
        Way::Scan => "compared",
    };
    let mut text = format!(
        "point {} ({way}): read {}, written {}, unreadable {} (bytes of the disk); {} bytes added to the store\n",
        report.point, report.read, report.written, report.unreadable, report.added
    );
    text.extend(report.forgotten.iter().map(|name| format!("forgotten: {name}\n")));
    text
}
