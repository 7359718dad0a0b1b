//! `zebu backup`: a disk into a new compressed image, with nothing left in the page cache.

mod nbd;
mod points;
mod store;

use crate::arguments::{EngineArgs, ForceShareArg, ImageArgs};
use crate::blob_digests;
use crate::commands::stores::shared::{KeepArgs, store_argument};
use crate::compression::CompressionArgs;
use crate::default_cache_mode::DefaultCacheMode;
use crate::dry_run;
use crate::failure::Failure;
use crate::local_argument::{path_argument, target_argument};
use crate::lock_patience::lock_wait;
use crate::output::summary::summary;
use crate::output::{json, stderr, stdout};
use crate::packed::PackedArgs;
use crate::sector_size::{unusual, warn_of_lost};
use crate::session::Session;
use crate::snapshot_name::snapshot_name;
use crate::store_target::store_name;
use crate::unreadable::{self, UnreadableRange};
use crate::values::{NamedFormat, OutputFormat, Rate, SpeedName, caches, formats, rate_argument};
use crate::watch::{ProgressArg, Watch};
use serde::Serialize;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zebu_disks::packed::{Order, Reader, Unpacking, unpacking_of};
use zebu_disks::size::size_argument;
use zebu_disks::{Context, Disks, ImageSpec, RemoteTransfers};
use zebu_engine::jobs::{
    BackupOptions, BackupReport, Decryption, Interrupted, PreviousBackup, SourceErrors, UnaskedWrites,
    backup, drop_pages,
};
use zebu_engine::{Access, CacheMode, Compression};
use zebu_oci::Readers;
use zebu_store::points::PointMoment;

/// Arguments of `zebu backup`.
#[derive(Debug, clap::Args)]
pub(crate) struct BackupArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the source [default: probed]
    #[arg(short = 'f', long, value_name = "FMT", value_parser = formats())]
    source_format: Option<NamedFormat>,

    /// Back this internal snapshot up, given by its id or name
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    source_snapshot: Option<String>,

    /// Cache mode of the source [default: none where its file system can, else writeback without pages that stay]
    #[arg(short = 'T', long, value_name = "CACHE", value_parser = caches())]
    source_cache: Option<CacheMode>,

    /// Cache mode of the backup [default: none where its file system can, else writeback without pages that stay]
    #[arg(short = 't', long, value_name = "CACHE", value_parser = caches())]
    target_cache: Option<CacheMode>,

    /// Bytes of a cluster of the backup: a power of two from 512 to 2M
    #[arg(long, value_name = "SIZE", value_parser = size_argument, default_value = "64k")]
    cluster_size: u64,

    /// How clusters are compressed [default: zlib; zstd in a store of points]
    #[arg(long, value_enum, value_name = "zlib|zstd", hide_possible_values = true)]
    compression_type: Option<Kind>,

    #[command(flatten)]
    compression: CompressionArgs,

    /// Write the hashes of all clusters to this file, for zebu verify and for increments
    #[arg(long, value_name = "FILE", value_parser = path_argument())]
    manifest: Option<PathBuf>,

    /// Make an increment: an overlay of this earlier backup, with what has changed since
    #[arg(long, value_name = "IMAGE", value_parser = path_argument())]
    previous: Option<PathBuf>,

    /// The manifest of the earlier backup
    #[arg(long, value_name = "FILE", requires = "previous", value_parser = path_argument())]
    previous_manifest: Option<PathBuf>,

    /// Have this dirty bitmap of the source say what has changed since the earlier backup: nothing else is read. When the
    /// backup is complete it is cleared, unless something could not be read; a full backup adds it if there is none
    #[arg(long, value_name = "NAME", conflicts_with_all = ["source_snapshot", "force_share"])]
    bitmap: Option<String>,

    /// For a store: add the bitmap although another one goes on from the last point
    #[arg(hide_short_help = true, long, requires = "bitmap")]
    create_bitmap: bool,

    /// For a store: make a full point, which stands on no earlier one
    #[arg(long)]
    full: bool,

    /// For a store: the moment at which the disk was so, as `zebu ctl` tells it for points of several disks; the point gets its time
    #[arg(hide_short_help = true, long, value_name = "TIME-ID")]
    moment: Option<PointMoment>,

    /// Memory for buffers, at least 4M and 4 clusters
    #[arg(hide_short_help = true, long, value_name = "SIZE", value_parser = memory_argument, default_value = "64M")]
    buffer_memory: usize,

    /// Read at most so many bytes a second; 0: no limit
    #[arg(short = 'r', long, value_name = "RATE", value_parser = rate_argument)]
    rate_limit: Option<Rate>,

    /// How fast it goes: as the disk's latency allows, so that others who use it wait little longer, or at full speed
    #[arg(hide_short_help = true, long, value_enum, default_value_t = SpeedName::Full, value_name = "adaptive|full", hide_possible_values = true)]
    speed: SpeedName,

    /// Go on with a backup to the same target that was interrupted; the source must not have changed since
    #[arg(long)]
    resume: bool,

    /// Go on where the source can't be read: such ranges become zero, and are listed
    #[arg(hide_short_help = true, long)]
    skip_errors: bool,

    /// Back an encrypted disk up in plain text; without this it is refused
    #[arg(hide_short_help = true, long)]
    decrypt: bool,

    /// Say what a full backup would read, and write nothing
    #[arg(long, conflicts_with_all = ["bitmap", "previous", "resume"])]
    dry_run: bool,

    #[command(flatten)]
    keep: KeepArgs,

    #[command(flatten)]
    packed: PackedArgs,

    #[command(flatten)]
    force_share: ForceShareArg,

    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image to back up
    #[arg(value_name = "SOURCE")]
    source: OsString,

    /// The backup, which must not exist; or a store, store:DIR/NAME or store:s3://BUCKET/PREFIX/NAME, which gets its next point
    #[arg(value_name = "TARGET", value_parser = target_argument())]
    target: PathBuf,
}

/// `--compression-type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    Zlib,
    Zstd,
}

fn memory_argument(text: &str) -> Result<usize, String> {
    let bytes = size_argument(text).map_err(|error| error.to_string())?;
    usize::try_from(bytes).map_err(|_| "that is more than there can be".to_owned())
}

/// The JSON report. Figures are bytes of the virtual disk, but for the length of the file.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    /// The source is encrypted, and the backup holds its plain text.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    decrypted: bool,
    total: u64,
    resumed_at: u64,
    read: u64,
    written: u64,
    zero: u64,
    unchanged: u64,
    unreadable: u64,
    unreadable_ranges: Vec<UnreadableRange>,
    /// Where those are not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    unreadable_range_count: Option<u64>,
    /// Compared with the previous backup, because the bitmap did not tell that it goes on from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    compared: Option<u64>,
    /// It was not cleared.
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_bitmap: Option<String>,
    file_length: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_hash: Option<String>,
    /// Counts of what went over the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    remote: Option<RemoteTransfers>,
}

/// Runs the command.
pub(crate) fn run(args: &BackupArgs, context: &Context) -> Result<u8, Failure> {
    if args.previous.is_some() && args.previous_manifest.is_none() && args.bitmap.is_none() {
        return Err(Failure::usage("--previous needs --bitmap or --previous-manifest"));
    }
    if let Some(store) = store_argument(args.target.as_os_str())? {
        return points::run(args, context, &store);
    }
    if args.keep.is_given() {
        return Err(Failure::usage(
            "--keep-last, --keep-daily, --keep-weekly and --keep-monthly are for stores (store:DIR/NAME)",
        ));
    }
    if args.full || args.create_bitmap || args.moment.is_some() {
        return Err(Failure::usage("--full, --create-bitmap and --moment are for stores (store:DIR/NAME)"));
    }
    // The bitmap is cleared in the end.
    let access = if args.bitmap.is_some() { Access::ReadWrite } else { Access::ReadOnly };
    let cache = args.source_cache.unwrap_or_default();
    context.disks.remote.expect(Readers::All);
    let mut spec = args.image.resolve(context, &args.source, args.source_format.as_ref(), cache, access)?;
    args.force_share.apply(&mut spec);
    spec.options.snapshot = args.source_snapshot.as_deref().map(snapshot_name).transpose()?;
    let mut session = Session::start(context, &args.engine, spec.aio)?;
    let source = DefaultCacheMode::unless_asked(args.source_cache, CacheMode::default(), &session, &mut spec);
    if args.source_cache.is_none() && args.skip_errors {
        DefaultCacheMode::for_damaged_source(&session, &mut spec);
    }
    if let Some(source) = &source {
        session.read_uncached();
        if args.engine.verbose {
            source.tell(context.dialect, "the source");
        }
    }
    if args.dry_run {
        return session.with_image(&spec, |image| {
            dry_run::tell(&session, std::slice::from_ref(image), args.output).map(|()| 0)
        });
    }
    let mut watch = Watch::start(args.progress.beside(args.output).mode(args.quiet))?;
    let mut options = options(args, context, &args.target, &watch);
    let object = store_name(args.target.as_os_str())?;
    let disk = if object.is_none() { nbd::disk_on_server(context, args.target.as_os_str())? } else { None };
    if object.is_some() {
        store::check(args)?;
    }
    if disk.is_some() {
        nbd::check(args)?;
    }
    // Packed clusters are gathered and written together, whatever their size.
    let size = args.cluster_size.max(64 << 10);
    let unasked = (args.target_cache.is_none() && object.is_none() && disk.is_none())
        .then(|| UnaskedWrites::of(&args.target, size));
    options.cache = match (args.target_cache, unasked) {
        (Some(asked), _) => asked,
        (None, Some(UnaskedWrites::Direct)) => CacheMode::None,
        (None, _) => CacheMode::Writeback,
    };
    if args.engine.verbose
        && let Some(unasked) = unasked
    {
        stderr::tell(context.dialect, &format!("writes to the target: {unasked}"));
    }
    options.manifest.clone_from(&args.manifest);
    options.previous = args
        .previous
        .as_ref()
        .map(|image| PreviousBackup::new(image.clone()).manifest(args.previous_manifest.clone()));
    options.refs = spec.options.refs.clone();
    options.interrupted = if args.resume { Interrupted::Resume } else { Interrupted::Restart };
    let order = if args.skip_errors { Order::Any } else { Order::Once };
    let first = back_up(args, &session, spec.clone(), options.clone(), &mut watch, order);
    let report = match (first, unpacking_of(&context.disks, std::slice::from_ref(&spec))) {
        (Err(_), Unpacking::Failed(error)) => Err(error.into()),
        (Err(_), Unpacking::Again) => back_up(args, &session, spec, options, &mut watch, Order::Any),
        (made, _) => made,
    }?;
    if !args.skip_errors {
        let made = [Some(&args.target), args.manifest.as_ref()];
        blob_digests::compare(context, &watch, made.into_iter().flatten().map(PathBuf::as_path))?;
    }
    if let Some(source) = source {
        source.clean_up();
    }
    if unasked == Some(UnaskedWrites::OneBuffered) {
        drop_pages(&args.target);
    }
    tell(args, context, &report, watch.elapsed())
}

/// The options that hold wherever the backup goes.
fn options(args: &BackupArgs, context: &Context, target: &Path, watch: &Watch) -> BackupOptions {
    let mut options = BackupOptions::new(target).lock_wait(lock_wait(context.dialect));
    options.cluster_size = args.cluster_size;
    options.compression = match args.compression_type {
        None | Some(Kind::Zlib) => Compression::Zlib,
        Some(Kind::Zstd) => Compression::Zstd,
    };
    options.compress = args.compression.options();
    options.bitmap.clone_from(&args.bitmap);
    options.buffer_memory = args.buffer_memory;
    options.source_errors = if args.skip_errors { SourceErrors::Skip } else { SourceErrors::Stop };
    options.decryption = if args.decrypt { Decryption::Allow } else { Decryption::Refuse };
    options.speed = args.speed.speed();
    options.control = watch.control();
    options.control.rate_limit = args.rate_limit.and_then(|rate| rate.0);
    options
}

/// Makes the backup, wherever it goes.
fn back_up(
    args: &BackupArgs,
    session: &Session,
    mut spec: ImageSpec,
    options: BackupOptions,
    watch: &mut Watch,
    order: Order,
) -> Result<BackupReport, Failure> {
    let reader = || Ok(Reader { order, target_size: None });
    args.packed.prepare(session.context(), &mut spec, &[&args.target], reader, watch)?;
    if let Some(name) = store_name(args.target.as_os_str())? {
        return session.with_image(&spec, |image| {
            warn_of_lost(unusual(image.logical_sector_size()), args.target.as_os_str());
            let report = store::back_up(session, image, name, options);
            watch.finish();
            report
        });
    }
    if let Some(disk) = nbd::disk_on_server(session.context(), args.target.as_os_str())? {
        return session.with_image(&spec, |image| {
            warn_of_lost(unusual(image.logical_sector_size()), args.target.as_os_str());
            let report = nbd::back_up(session, image, &disk, &options);
            watch.finish();
            report
        });
    }
    if args.target == spec.path {
        let message = format!("'{}' is the source: give the backup another name", args.target.display());
        return Err(Failure::new(message));
    }
    session.with_image(&spec, |image| {
        warn_of_lost(unusual(image.logical_sector_size()), args.target.as_os_str());
        let worker = session.worker();
        let result = worker.block_on(backup(worker, image, &options));
        watch.finish();
        result.map_err(|error| {
            if error.image() == Some(spec.path.as_path()) {
                Failure::during("error while reading the source", &error)
            } else {
                Failure::during(&format!("error while making the backup '{}'", args.target.display()), &error)
            }
        })
    })
}

/// Prints what was done.
fn tell(args: &BackupArgs, context: &Context, report: &BackupReport, time: Duration) -> Result<u8, Failure> {
    unreadable::tell(
        context.dialect,
        &report.unreadable_ranges,
        report.unreadable_range_count,
        report.unreadable,
    );
    if let (Some(bitmap), Some(previous), 1..) = (&args.bitmap, &args.previous, report.compared) {
        stderr::tell(
            context.dialect,
            &format!(
                "bitmap '{bitmap}' does not record that it goes on from '{}', so all that it marks as \
                 unchanged was compared with that backup, and is the same ({} bytes)",
                previous.display(),
                report.compared
            ),
        );
    }
    if let Some(name) = &report.kept_bitmap {
        stderr::tell(
            context.dialect,
            &format!(
                "bitmap '{name}' was not cleared: what could not be read is dirty in it, so that the next increment reads \
             it again"
            ),
        );
    }
    if !args.quiet {
        stdout::print(&match args.output {
            // Programs have read the exact figures so far.
            OutputFormat::Human if std::io::stdout().is_terminal() && !args.engine.verbose => {
                summary(report.total, Some(report.file_length), time) + "\n"
            }
            OutputFormat::Human => human_text(report),
            OutputFormat::Json => json::to_text(context.dialect, &json_report(&context.disks, report))?,
        })?;
    }
    Ok(0)
}

fn json_report(disks: &Disks, report: &BackupReport) -> Report {
    Report {
        decrypted: report.decrypted,
        total: report.total,
        resumed_at: report.resumed_at,
        read: report.read,
        written: report.written,
        zero: report.zero,
        unchanged: report.unchanged,
        unreadable: report.unreadable,
        unreadable_ranges: unreadable::list(&report.unreadable_ranges),
        unreadable_range_count: unreadable::count_in_all(
            &report.unreadable_ranges,
            report.unreadable_range_count,
        ),
        compared: (report.compared > 0).then_some(report.compared),
        kept_bitmap: report.kept_bitmap.clone(),
        file_length: report.file_length,
        disk_hash: report.disk_hash.clone(),
        remote: disks.remote.transfers(&disks.uploads),
    }
}

fn human_text(report: &BackupReport) -> String {
    let decrypted = if report.decrypted { "in plain text: the source is encrypted\n" } else { "" };
    format!(
        "{decrypted}total {}, resumed at {}, read {}, written {}, zero {}, unchanged {}, unreadable {} (bytes of the disk); file \
         of {} bytes; {}{}\n",
        report.total,
        report.resumed_at,
        report.read,
        report.written,
        report.zero,
        report.unchanged,
        report.unreadable,
        report.file_length,
        report
            .disk_hash
            .as_ref()
            .map_or("disk hash not known".to_owned(), |hash| format!("disk hash {hash}")),
        match report.unreadable_range_count {
            0 => String::new(),
            count => format!("; unreadable ranges: {count}"),
        }
    )
}
