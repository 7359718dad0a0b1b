//! `zebu backup` to a store: the next point, with what changed since the last one.

use super::{BackupArgs, options};
use crate::commands::stores::new_point::{Unpublished, follow};
use crate::commands::stores::point_options::{BaseChoice, MissingBitmap, PointOptions};
use crate::commands::stores::point_report::{PUBLISHED, Report};
use crate::default_cache_mode::DefaultCacheMode;
use crate::failure::Failure;
use crate::output::{json, stdout};
use crate::sector_size::{unusual, warn_of_lost};
use crate::session::Session;
use crate::snapshot_name::snapshot_name;
use crate::values::OutputFormat;
use crate::watch::Watch;
use std::io::IsTerminal;
use std::path::Path;
use zebu_disks::Context;
use zebu_disks::packed::{Order, Reader};
use zebu_engine::{Access, CacheMode, Compression, Image};
use zebu_store::points::{PointName, PointStore};

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
    let options = point_options(args, context, &watch);
    let (store, made) = session.with_image(&spec, |image| {
        warn_of_lost(unusual(image.logical_sector_size()), args.target.as_os_str());
        check_source(args, image)?;
        // Nothing is made for a source that can't be had.
        let store = PointStore::open_or_create(name, &http)?;
        let made = Unpublished::make(&options, &session, &store, image);
        let made = made.and_then(|point| point.publish(context.dialect, &store));
        watch.finish();
        made.map(|made| (store, made))
    })?;
    if let Some(source) = source {
        source.clean_up();
    }
    let followed = follow(&store, &args.keep.rules());
    let report = Report::telling(context.dialect, "", made, followed);
    if !args.quiet {
        let text = match args.output {
            OutputFormat::Human if std::io::stdout().is_terminal() && !args.engine.verbose => {
                report.summary()
            }
            OutputFormat::Human => report.human_text(),
            OutputFormat::Json => json::to_text(context.dialect, &report)?,
        };
        stdout::print(&text).map_err(|failure| failure.with_exit(PUBLISHED))?;
    }
    Ok(report.code())
}

fn point_options(args: &BackupArgs, context: &Context, watch: &Watch) -> PointOptions {
    let mut layer = options(args, context, Path::new(""), watch);
    if args.compression_type.is_none() {
        layer.compression = Compression::Zstd;
    }
    PointOptions {
        layer,
        base: if args.full { BaseChoice::None } else { BaseChoice::Last },
        missing_bitmap: if args.create_bitmap { MissingBitmap::Add } else { MissingBitmap::Refuse },
        moment: args.moment.clone(),
    }
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
