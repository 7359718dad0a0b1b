//! `zebu backup` to a store: the next point, with what changed since the last one.

mod base;

use self::base::{Base, Choice, Marks, choose, marks, stand_on};
use super::{BackupArgs, options};
use crate::commands::stores::shared::{tell_damaged, texts};
use crate::default_cache_mode::DefaultCacheMode;
use crate::failure::Failure;
use crate::output::units::size_short;
use crate::output::{json, stderr, stdout};
use crate::sector_size::{unusual, warn_of_lost};
use crate::session::Session;
use crate::snapshot_name::snapshot_name;
use crate::unreadable;
use crate::values::OutputFormat;
use crate::watch::Watch;
use serde::Serialize;
use std::io::IsTerminal;
use zebu_disks::Context;
use zebu_disks::packed::{Order, Reader};
use zebu_engine::jobs::{BackupIdentity, BackupReport, BitmapUse, backup};
use zebu_engine::{Access, CacheMode, Compression, ErrorKind, Image};
use zebu_store::points::{Claim, Layer, Point, PointName, PointStore, PointsErrorKind, readable_time};

/// How often a point is begun anew because its base went meanwhile.
const TRIES: u32 = 5;
/// The exit code where the point is published, and something that was to follow failed.
const PUBLISHED: u8 = 3;

/// The file of hashes of a layer that is being made.
const HASHES: &str = "layer.hashes";

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

impl Way {
    /// The file of a layer that is being made so. One that was begun another way is none to go on with.
    fn file(self) -> &'static str {
        match self {
            Self::Full => "full.qcow2",
            Self::Bitmap => "increment.qcow2",
            Self::Scan => "compared.qcow2",
        }
    }
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
    /// Manifests of other points that can't be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    damaged: Vec<String>,
    /// Why not all was done that was to follow the point, which is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

/// A point that is made and not published yet.
struct Made {
    report: BackupReport,
    point: Point,
    way: Way,
    reason: Option<String>,
    /// Manifests of other points that can't be read.
    damaged: Vec<String>,
}

/// A point that is published, and what followed it.
struct Published {
    made: Made,
    point: Point,
    forgotten: Vec<String>,
    damaged: Vec<String>,
    failed: Option<String>,
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
    let http = context.disks.remote.http_options();
    // A source may have to be unpacked first.
    PointStore::find(name, &http)?;
    let reader = || Ok(Reader { order: Order::Any, target_size: None });
    args.packed.prepare(context, &mut spec, &[], reader, &watch)?;
    let (store, made, point) = session.with_image(&spec, |image| {
        warn_of_lost(unusual(image.logical_sector_size()), args.target.as_os_str());
        check_source(args, image)?;
        // Nothing is made for a source that can't be had.
        let store = PointStore::open_or_create(name, &http)?;
        let made = next_point(args, &session, &store, image, &watch);
        watch.finish();
        made.map(|(made, point)| (store, made, point))
    })?;
    if let Some(source) = source {
        source.clean_up();
    }
    tell(args, context, follow(args, &store, made, point))
}

/// Does what is to follow a point.
fn follow(args: &BackupArgs, store: &PointStore, made: Made, point: Point) -> Published {
    let damaged = made.damaged.clone();
    let mut published = Published { made, point, forgotten: Vec::new(), damaged, failed: None };
    if !args.keep.is_given() {
        return published;
    }
    match store.forget(&args.keep.rules(), None) {
        Ok(forgotten) => {
            published.forgotten = forgotten.removed;
            published.damaged = texts(&forgotten.damaged);
            if let Some(first) = published.damaged.first() {
                published.failed =
                    Some(format!("the rules do not count a point that can't be read: {first}"));
            }
        }
        Err(error) => published.failed = Some(format!("points were not forgotten: {error}")),
    }
    published
}

/// Refuses a source of which no point can be made, before there is a store.
fn check_source(args: &BackupArgs, image: &Image) -> Result<(), Failure> {
    let refuse = |reason: &str| {
        Err(Failure::new(format!("error while reading the source: {}: {reason}", image.path().display())))
    };
    if image.is_chain_encrypted() && !args.decrypt {
        return refuse(
            "the disk is encrypted, and a backup of it would hold its plain text (--decrypt allows it)",
        );
    }
    match image.info()?.qcow2 {
        _ if args.bitmap.is_none() => Ok(()),
        None => refuse("the format raw has no bitmaps (leave --bitmap out)"),
        Some(qcow2) if qcow2.version < 3 => {
            refuse("version 2 of qcow2 has no bitmaps (leave --bitmap out, or zebu amend -o compat=1.1)")
        }
        Some(_) => Ok(()),
    }
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
        (args.resume, "--resume: an interrupted backup starts again"),
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
        if tries == 1 {
            tell_damaged(context, &damaged);
        }
        let choice = choose(args, session, store, image, points)?;
        let bitmap = args.bitmap.as_deref().map(|bitmap| marks(args, image, bitmap, &choice)).transpose()?;
        let mut claim = match store.claim(choice.base.as_ref().map(|base| &base.point)) {
            Err(error) if error.kind() == PointsErrorKind::Busy && tries < TRIES => {
                tries += 1;
                continue;
            }
            claim => claim?,
        };
        let made = Making { args, session, store, image, watch };
        let made = made.run(choice, bitmap, &mut claim).and_then(|mut made| {
            made.damaged = texts(&damaged);
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

/// A layer that was made, or why it has to be made another way.
enum Tried {
    Made(BackupReport),
    /// The bitmap does not tell the truth.
    NotByBitmap(String),
    /// The base can't be used.
    NotOnBase(String),
}

/// The making of a point.
struct Making<'a> {
    args: &'a BackupArgs,
    session: &'a Session,
    store: &'a PointStore,
    image: &'a Image,
    watch: &'a Watch,
}

impl Making<'_> {
    /// Makes the point, by the bitmap if that tells, else on the base if that can be, else a full one.
    fn run(&self, choice: Choice, bitmap: Option<Marks>, claim: &mut Claim) -> Result<Made, Failure> {
        let Choice { mut base, mut reason, .. } = choice;
        let mut way = if base.is_some() { Way::Scan } else { Way::Full };
        match &bitmap {
            Some(Marks::Tell) => way = Way::Bitmap,
            Some(Marks::BeginAnew(why) | Marks::LeftAlone(why)) if way == Way::Scan => {
                reason = Some(why.clone());
            }
            Some(Marks::LeftAlone(why)) => stderr::tell(self.session.dialect(), why),
            _ => {}
        }
        let bitmap = self.args.bitmap.clone().filter(|_| !matches!(bitmap, Some(Marks::LeftAlone(_))));
        loop {
            match self.attempt(way, base.as_ref(), bitmap.clone(), claim)? {
                Tried::Made(report) => {
                    let layer =
                        claim.add(&claim.directory().join(way.file()), &claim.directory().join(HASHES))?;
                    return Ok(self.point(report, layer, way, reason, base));
                }
                Tried::NotByBitmap(why) => {
                    reason = Some(format!("{why}; it begins anew"));
                    way = Way::Scan;
                }
                Tried::NotOnBase(why) => {
                    let name = base.take().map(|base| base.point.name).unwrap_or_default();
                    reason = Some(format!("a new point can't stand on point {name}: {why}"));
                    way = Way::Full;
                }
            }
        }
    }

    fn attempt(
        &self,
        way: Way,
        base: Option<&Base>,
        bitmap: Option<String>,
        claim: &Claim,
    ) -> Result<Tried, Failure> {
        let (session, image) = (self.session, self.image);
        let mut options =
            options(self.args, session.context(), &claim.directory().join(way.file()), self.watch);
        options.cache = CacheMode::Writeback;
        options.manifest = Some(claim.directory().join(HASHES));
        options.identity = BackupIdentity::New;
        options.bitmap = bitmap;
        if self.args.compression_type.is_none() {
            options.compression = Compression::Zstd;
        }
        let mut files = None;
        if let Some(base) = base {
            match stand_on(session, self.store, claim.directory(), &base.point, &mut options)? {
                Ok(found) => files = Some(found),
                Err(reason) => return Ok(Tried::NotOnBase(reason)),
            }
        }
        options.bitmap_use = if way == Way::Bitmap { BitmapUse::Believe } else { BitmapUse::Restart };
        let worker = session.worker();
        let error = match worker.block_on(backup(worker, image, &options)) {
            Ok(report) => return Ok(Tried::Made(report)),
            Err(error) => error,
        };
        let is_source = error.image() == Some(image.path());
        if way == Way::Bitmap && is_source && error.kind() == ErrorKind::InvalidArgument {
            return Ok(Tried::NotByBitmap(error.message().to_owned()));
        }
        if files.is_some_and(|files| files.are_why(self.store, &error)) {
            return Ok(Tried::NotOnBase(error.to_string()));
        }
        Err(if is_source {
            Failure::during("error while reading the source", &error)
        } else {
            Failure::during(&format!("error while making a point of '{}'", self.store.name()), &error)
        })
    }

    fn point(
        &self,
        report: BackupReport,
        layer: Layer,
        way: Way,
        reason: Option<String>,
        base: Option<Base>,
    ) -> Made {
        let (parent, mut layers) = match base {
            Some(base) => (Some(base.point.name), base.point.layers),
            None => (None, Vec::new()),
        };
        let added = if layers.contains(&layer) { 0 } else { layer.size + layer.hashes_size };
        if added > 0 {
            layers.insert(0, layer);
        }
        let point = Point {
            version: 0,
            sequence: 0,
            name: String::new(),
            time: 0,
            disk_size: self.image.virtual_size(),
            cluster_size: self.args.cluster_size,
            parent,
            added,
            layers,
        };
        Made { report, point, way, reason, damaged: Vec::new() }
    }
}

/// Prints what was done.
fn tell(args: &BackupArgs, context: &Context, published: Published) -> Result<u8, Failure> {
    let Published { made: Made { report, way, reason, .. }, point, forgotten, damaged, failed } = published;
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
    let code = if failed.is_some() { PUBLISHED } else { 0 };
    if let Some(failed) = &failed {
        let told = format!("point {} is published, but a later step failed: {failed}", point.name);
        stderr::tell(context.dialect, &told);
    }
    if args.quiet {
        return Ok(code);
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
        damaged,
        failed,
    };
    let text = match args.output {
        OutputFormat::Human if std::io::stdout().is_terminal() && !args.engine.verbose => summary(&report),
        OutputFormat::Human => human_text(&report),
        OutputFormat::Json => json::to_text(context.dialect, &report)?,
    };
    stdout::print(&text).map_err(|failure| failure.with_exit(PUBLISHED))?;
    Ok(code)
}

fn way_text(way: Way) -> &'static str {
    match way {
        Way::Full => "full",
        Way::Bitmap => "by the bitmap",
        Way::Scan => "compared",
    }
}

/// The report for people.
fn summary(report: &Report) -> String {
    let unreadable = match report.unreadable {
        0 => String::new(),
        bytes => format!(", {} could not be read", size_short(bytes)),
    };
    let mut text = format!(
        "point {} ({}): {} read{unreadable}, {} added to the store\n",
        report.point,
        way_text(report.way),
        size_short(report.read),
        size_short(report.added)
    );
    text.extend(report.forgotten.iter().map(|name| format!("forgotten: {name}\n")));
    text
}

fn human_text(report: &Report) -> String {
    let way = way_text(report.way);
    let mut text = format!(
        "point {} ({way}): read {}, written {}, unreadable {} (bytes of the disk); {} bytes added to the store\n",
        report.point, report.read, report.written, report.unreadable, report.added
    );
    text.extend(report.forgotten.iter().map(|name| format!("forgotten: {name}\n")));
    text
}
