//! `zebu convert`: copies images into a new or an existing one.

mod args;
mod destination;
mod packed_source;
mod pipe;
mod report;
mod store;
mod to_registry;
mod written_once;

use crate::arguments::ImageArgs;
use crate::backing::{self, CheckName};
use crate::blob_digests;
use crate::create_opts::{CreateOpts, ParsedOpts};
use crate::default_cache_mode::DefaultCacheMode;
use crate::dry_run;
use crate::encrypted_file::refuse_plain_text;
use crate::failure::Failure;
use crate::new_file::{refuse_raw_over_image, settle_format};
use crate::output::{json, stderr, stdout};
use crate::qemu_names::option_lists::{self, FileOptions};
use crate::sector_size::warn_of_lost;
use crate::session::Session;
use crate::snapshot_name::snapshot_name;
use crate::unreadable;
use crate::values::{Aio, OutputFormat};
use crate::watch::Watch;
pub(crate) use args::ConvertArgs;
use args::Copy;
use destination::Destination;
use packed_source::{PackedSources, Pass, size_of_device};
use report::{human_text, json_report};
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use zebu_disks::packed::{Order, Reader, Unpacking, unpacking_of};
use zebu_disks::{Context, ImageSpec, Sources, errno_text, given_only, local_path};
use zebu_engine::jobs::{
    ConvertOptions, ConvertReport, ConvertTarget, CopyBitmaps, CopyMode, Identities, NewTarget, PlaceOrder,
    ReadErrors, TargetClusters, TargetContent, UnaskedWrites, convert, drop_pages,
};
use zebu_engine::{Access, CacheMode, Format, Image, NewForeign, Preallocation};
use zebu_oci::Readers;

/// Bytes of zeroes that become a hole, unless the command line says another number.
const SPARSE_SIZE: u64 = 4096;

/// Runs the command.
pub(crate) fn run(args: &mut ConvertArgs, context: &Context) -> Result<u8, Failure> {
    if let Some(name) = to_registry::target(context.dialect, args)? {
        return to_registry::run(args, context, name);
    }
    option_lists::check(context.dialect, &args.target_options)?;
    let is_named = args.target_format.is_some();
    let makes_a_file = !args.no_create && !args.target_image_opts && !args.dry_run;
    if let Some(target) = args.files.last().filter(|_| makes_a_file && args.files.len() > 1) {
        settle_format(context.dialect, &mut args.target_format, target, "-O")?;
    }
    let args = &*args;
    let of_file = if args.files.is_empty() { FileOptions::NotKnown } else { FileOptions::Listed };
    let opts = CreateOpts::parse(context.dialect, &args.target_options, args.target_format(), of_file);
    let opts = match opts.map_err(Failure::new)? {
        ParsedOpts::Help(text) => {
            stdout::print(&text)?;
            return Ok(0);
        }
        ParsedOpts::Use(opts) => opts,
    };
    let opts = if context.dialect.is_qemu() { as_qemu(args, opts)? } else { opts };
    if !args.compress
        && let Some(option) = args.compression.given()
    {
        return Err(Failure::usage(format!("{option} needs -c")));
    }
    if args.backing_keys.is_given() && args.backing.is_none() && opts.backing_file.is_none() {
        return Err(Failure::usage("--backing-key-secret needs a backing file (-B)"));
    }
    if args.bitmaps && args.files.len() > 2 {
        return Err(Failure::usage("Copying bitmaps only possible with single source"));
    }
    if args.bitmaps && args.source_snapshot.is_some() {
        return Err(Failure::usage(
            "Copying bitmaps not possible from a snapshot: they are about the disk as it is now",
        ));
    }
    if args.bitmaps && args.target_format() != Format::Qcow2 && !args.no_create {
        let format = args.target_format().name();
        return Err(Failure::new(format!("Format driver '{format}' does not support bitmaps")));
    }
    let Some((target, sources)) = args.files.split_last().filter(|(_, sources)| !sources.is_empty()) else {
        return Err(Failure::usage("Must specify image file name: at least one source, and the target"));
    };
    if let Some(named) = args.target_format.as_ref().filter(|_| !args.no_create) {
        named.check_new(target).map_err(Failure::new)?;
    }
    if !is_named && !args.target_image_opts && !args.dry_run && !pipe::is_pipe(context.dialect, target) {
        refuse_plain_text(Path::new(target))?;
    }
    let spool = if sources.iter().any(|source| pipe::is_pipe(context.dialect, source)) {
        Some(pipe::Spool::new()?)
    } else {
        None
    };
    let spooled = spool.as_ref().map(pipe::Spool::path);
    let sources = pipe::with_spooled(context.dialect, sources, spooled.as_deref())?;
    context.disks.remote.expect(Readers::All);
    let specs = source_specs(args, context, &sources)?;
    context.disks.names.allow_streams();
    let destination = Destination::of(args, &opts, context, target)?;
    for written in new_files(&opts, &destination).iter().filter(|_| !args.dry_run) {
        args.force.check(context.dialect, written)?;
    }
    let engines: Vec<Aio> = specs.iter().filter_map(|spec| spec.aio).collect();
    if engines.iter().any(|engine| *engine != engines[0]) {
        return Err(Failure::usage("all images are read by one I/O engine: their 'aio' options contradict"));
    }
    let mut session = Session::start(context, &args.engine, engines.first().copied())?;
    if let Destination::Existing(name) = &destination
        && let Ok(path) = local_path(name)
        && !is_named
        && !args.target_image_opts
        && !args.dry_run
        && !context.dialect.is_qemu()
    {
        refuse_raw_over_image(&session, &path)?;
    }
    if args.source_cache.is_none() {
        session.read_uncached();
    }
    // Where the image goes to standard output, nothing else does.
    let beside = match destination {
        Destination::Pipe => OutputFormat::Json,
        _ => args.output.unwrap_or_default(),
    };
    let mut watch = Watch::start(args.progress.beside(beside).mode(args.quiet))?;
    if let Some(spool) = &spool {
        spool.fill(&watch, args.packed.most_of_disk())?;
    }
    if args.packed.has_member() && specs.len() > 1 {
        return Err(Failure::usage("--member names a part of one source, and there are several"));
    }
    let first = copy_sources(args, &opts, &session, &mut watch, specs.clone(), &destination, Pass::First);
    let Err(failure) = first else { return first };
    match unpacking_of(&context.disks, &specs) {
        Unpacking::Sound => Err(failure),
        Unpacking::Failed(error) => Err(error.into()),
        Unpacking::Again => copy_sources(args, &opts, &session, &mut watch, specs, &destination, Pass::Again),
    }
}

/// Opens the sources, copies them and tells what was done. Returns the exit code.
fn copy_sources(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    watch: &mut Watch,
    mut specs: Vec<ImageSpec>,
    destination: &Destination,
    pass: Pass,
) -> Result<u8, Failure> {
    let dialect = session.dialect();
    let written = written_files(args, opts, session.context(), destination);
    let written: Vec<&Path> = written.iter().map(PathBuf::as_path).collect();
    let mut packed = PackedSources { pass, is_stream: false, end: None };
    for spec in &mut specs {
        let reader = || packed_reader(args, opts, session, destination, pass);
        let prepared = args.packed.prepare(session.context(), spec, &written, reader, watch)?;
        packed.is_stream |= prepared.is_stream;
        packed.end = packed.end.or(prepared.end);
        match args.source_cache {
            None if args.salvage => DefaultCacheMode::for_damaged_source(session, spec),
            None => DefaultCacheMode::for_source(session, spec),
            Some(_) => {}
        }
    }
    let images = specs.iter().map(|spec| session.open(spec)).collect::<Result<Vec<Image>, _>>()?;
    if args.dry_run {
        watch.finish();
        let told = dry_run::tell(session, &images, args.output.unwrap_or_default());
        for image in &images {
            session.close(image, Access::ReadOnly)?;
        }
        return told.map(|()| 0);
    }
    if dialect.is_qemu() && args.bitmaps && !images.iter().all(may_have_bitmaps) {
        for image in &images {
            session.close(image, Access::ReadOnly)?;
        }
        return Err(Failure::new("Source lacks bitmap support"));
    }
    let skipped = skipped_bitmaps(args, &images);
    if dialect.is_qemu()
        && args.bitmaps
        && !args.skip_broken_bitmaps
        && let Some(broken) = broken_bitmaps(&images).first()
    {
        stderr::tell(dialect, &format!("Cannot copy inconsistent bitmap '{broken}'"));
        stderr::warn("Try --skip-broken-bitmaps, or use 'qemu-img bitmap --remove' to delete it");
        for image in &images {
            session.close(image, Access::ReadOnly)?;
        }
        return Ok(1);
    }
    let report = convert_to(args, opts, session, watch, &images, destination, &packed);
    for image in &images {
        session.close(image, Access::ReadOnly)?;
    }
    let report = report?;
    if !args.salvage {
        let made = new_files(opts, destination);
        blob_digests::compare(session.context(), watch, made.iter().map(PathBuf::as_path))?;
    }
    for name in &skipped {
        stderr::tell(dialect, &format!("warning: Skipping inconsistent bitmap '{name}'"));
    }
    // QEMU's program keeps quiet about them if it is asked to.
    if !(dialect.is_qemu() && args.quiet) {
        unreadable::tell(
            dialect,
            &report.unreadable_ranges,
            report.unreadable_range_count,
            report.unreadable,
        );
    }
    let shown = destination.shown();
    warn_of_lost(report.lost_logical_sector, shown.as_os_str());
    match args.output {
        Some(OutputFormat::Json) => {
            stdout::print(&json::to_text(
                dialect,
                &json_report(&session.context().disks, &report, skipped),
            )?)?;
        }
        Some(OutputFormat::Human) if !args.quiet => stdout::print(&human_text(&report))?,
        _ => {}
    }
    Ok(0)
}

/// Bytes that a new image takes on its file system.
fn allocated(destination: &Destination) -> Option<u64> {
    let Destination::New(image) = destination else { return None };
    std::fs::metadata(image).ok().filter(Metadata::is_file).map(|found| found.blocks() * 512)
}

/// The files that are made.
fn new_files(opts: &CreateOpts, destination: &Destination) -> Vec<PathBuf> {
    let Destination::New(image) = destination else { return Vec::new() };
    let data_file = opts.data_file.as_deref().map(|name| backing::resolve(image, name));
    std::iter::once(image.clone()).chain(data_file).collect()
}

/// The local files that the target will have, that of the image first.
fn written_files(
    args: &ConvertArgs,
    opts: &CreateOpts,
    context: &Context,
    destination: &Destination,
) -> Vec<PathBuf> {
    let image = match destination {
        Destination::Pipe | Destination::Object(_) => None,
        Destination::New(path) => Some(path.clone()),
        // What is wrong with the options is told when the target is opened.
        Destination::Existing(name) if args.target_image_opts => {
            existing_target(args, opts, context, name).ok().map(|spec| spec.path)
        }
        Destination::Existing(name) => local_path(name).ok(),
    };
    let data_file = opts
        .data_file
        .as_deref()
        .map(|name| backing::resolve(image.as_deref().unwrap_or(Path::new("")), name));
    [image, data_file].into_iter().flatten().collect()
}

/// Whether the format of an image has bitmaps.
fn may_have_bitmaps(image: &Image) -> bool {
    image.info().ok().and_then(|info| info.qcow2).is_some_and(|qcow2| qcow2.version >= 3)
}

/// The bitmaps that `--skip-broken-bitmaps` leaves out.
fn skipped_bitmaps(args: &ConvertArgs, images: &[Image]) -> Vec<String> {
    if args.skip_broken_bitmaps { broken_bitmaps(images) } else { Vec::new() }
}

/// Bitmaps that a program left in use, the last of the directory first, as QEMU tells them.
fn broken_bitmaps(images: &[Image]) -> Vec<String> {
    let bitmaps = images.iter().flat_map(Image::bitmaps).rev();
    bitmaps.filter(|bitmap| bitmap.in_use).map(|bitmap| bitmap.name).collect()
}

/// Refuses what QEMU refuses, in its words, and leaves out what has no effect there.
fn as_qemu(args: &ConvertArgs, mut opts: Box<CreateOpts>) -> Result<Box<CreateOpts>, Failure> {
    if args.copy_range_offloading {
        check_offloading(args)?;
    }
    if args.target_image_opts && args.target_format.is_some() {
        return Err(Failure::new("--target-image-opts and -O are mutually exclusive"));
    }
    if args.files.len() > 2 && (args.backing.is_some() || opts.backing_file.is_some()) {
        return Err(Failure::new(
            "Having a backing file for the target makes no sense when concatenating multiple input images",
        ));
    }
    // The disk is as large as its sources.
    opts.size = None;
    Ok(opts)
}

/// Refuses what copy offloading goes together with nowhere, in QEMU's words.
fn check_offloading(args: &ConvertArgs) -> Result<(), Failure> {
    if args.sparse_size.is_some() {
        return Err(Failure::new("Cannot enable copy offloading when -S is used"));
    }
    if args.compress {
        return Err(Failure::new("Cannot enable copy offloading when -c is used"));
    }
    if args.salvage {
        return Err(Failure::new("Cannot use copy offloading in salvaging mode"));
    }
    Ok(())
}

fn source_specs(
    args: &ConvertArgs,
    context: &Context,
    sources: &[OsString],
) -> Result<Vec<ImageSpec>, Failure> {
    let snapshot = args.source_snapshot.as_deref().map(snapshot_name).transpose()?;
    if snapshot.is_some() && sources.len() > 1 {
        return Err(Failure::usage("No support for concatenating multiple snapshot"));
    }
    sources
        .iter()
        .map(|source| {
            let mut spec = args.image.resolve(
                context,
                source,
                args.source_format.as_ref(),
                args.source_cache.unwrap_or_default(),
                Access::ReadOnly,
            )?;
            args.force_share.apply(&mut spec);
            spec.options.snapshot.clone_from(&snapshot);
            Ok(spec)
        })
        .collect()
}

fn convert_to(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    watch: &mut Watch,
    images: &[Image],
    destination: &Destination,
    packed: &PackedSources,
) -> Result<ConvertReport, Failure> {
    let dialect = session.dialect();
    // Tables in the order of the disk take a cluster, which `check` finds unused where there is no disk.
    let is_empty = images.iter().all(|image| image.virtual_size() == 0);
    let mut options = ConvertOptions::default()
        .workers(if packed.is_stream { 1 } else { usize::from(args.workers) })
        .source_end(packed.end.clone())
        .worker_config(session.config().clone())
        .requests(usize::from(args.parallel.unwrap_or(8)))
        .buffer_memory(args.buffer_memory)
        .sparse_size(args.sparse_size.unwrap_or(SPARSE_SIZE))
        .copy(match args.copy {
            _ if args.copy_range_offloading => CopyMode::Range,
            Copy::Auto => CopyMode::Auto,
            Copy::Reflink => CopyMode::Reflink,
            Copy::Range => CopyMode::Range,
            Copy::Buffers => CopyMode::Buffers,
        })
        .clusters(if args.compress { TargetClusters::Compressed } else { TargetClusters::Plain })
        .order(if args.oob_writes || is_empty { PlaceOrder::AsTheyCome } else { PlaceOrder::OfDisk })
        .identities(args.seed.map_or(Identities::OfSource, Identities::Seed))
        .read_errors(if args.salvage { ReadErrors::Zero } else { ReadErrors::Fail })
        .range(None)
        .bitmaps(match (args.bitmaps, args.skip_broken_bitmaps) {
            (false, _) => CopyBitmaps::No,
            (true, false) => CopyBitmaps::All,
            (true, true) => CopyBitmaps::Sound,
        })
        .control(watch.control());
    options.control.rate_limit = args.rate.and_then(|rate| rate.0);
    let worker = session.worker();
    let result = match destination {
        Destination::Pipe => {
            let way = pipe::way(dialect, args, opts)?;
            if way != pipe::Way::Spooled {
                let report = pipe::convert_to_pipe(args, opts, session, watch, images, options, way);
                watch.finish();
                return report;
            }
            let spool = pipe::Spool::new()?;
            let place = Destination::New(spool.target(session.context())?);
            let report = convert_to(args, opts, session, watch, images, &place, packed)?;
            return spool.copy_out(session, watch).map(|()| report);
        }
        Destination::Object(name) => {
            let report = store::convert_to_object(args, opts, session, watch, images, name.clone(), options);
            watch.finish();
            return report;
        }
        Destination::Existing(name) => {
            let mut spec = existing_target(args, opts, session.context(), name)?;
            let unasked =
                DefaultCacheMode::unless_asked(args.target_cache, CacheMode::Unsafe, session, &mut spec);
            if let Some(unasked) = &unasked {
                if unasked.mode != CacheMode::None && args.parallel.is_none() {
                    options.requests = 1;
                }
                if args.engine.verbose {
                    unasked.tell(dialect, "the target");
                }
            }
            let content = match packed.pass {
                Pass::First if args.target_is_zero => TargetContent::Zero,
                Pass::First if args.backing.is_some() => TargetContent::SharedBacking,
                Pass::First | Pass::Again => TargetContent::Unknown,
            };
            let mut copied = None;
            let done = session.with_image(&spec, |image| {
                let target = ConvertTarget::Existing { image: image.clone(), content };
                copied = Some(worker.block_on(convert(worker, images, target, &options)));
                Ok(())
            });
            if let Some(unasked) = unasked {
                unasked.clean_up();
            }
            // What the job failed with is told, not that what it left can't be finished either.
            if !matches!(copied, Some(Err(_))) {
                done?;
            }
            copied.unwrap_or_else(|| Ok(ConvertReport::default()))
        }
        Destination::New(path) => {
            let disks = &session.context().disks;
            let mut target = new_target(args, opts, session, path)?;
            let unasked = args
                .target_cache
                .is_none()
                .then_some(())
                .filter(|()| !disks.names.is_remote(&target.path))
                .map(|()| {
                    UnaskedWrites::of(
                        &target.path,
                        opts.create_options(dialect, args.target_format()).cluster_size,
                    )
                });
            if let Some(unasked) = unasked {
                unasked.apply(&mut target);
                // What is packed is written in order whatever the number of requests, which read and pack.
                let is_stream = args.compress && !args.oob_writes
                    || target.create.foreign.as_ref().is_some_and(NewForeign::is_stream);
                if unasked == UnaskedWrites::OneBuffered && args.parallel.is_none() && !is_stream {
                    options.requests = 1;
                }
                if args.engine.verbose {
                    stderr::tell(dialect, &format!("writes to the target: {unasked}"));
                }
            }
            let data_file = target.open.data_file.clone();
            let converted =
                worker.block_on(convert(worker, images, ConvertTarget::New(Box::new(target)), &options));
            if converted.is_ok() && unasked == Some(UnaskedWrites::OneBuffered) {
                std::iter::once(path).chain(&data_file).for_each(|file| drop_pages(file));
            }
            converted
        }
    };
    match &result {
        Ok(report) if !dialect.is_qemu() => watch.finish_with(report.total, allocated(destination)),
        _ => watch.finish(),
    }
    let file = &destination.shown();
    result.map_err(|error| match error.image() {
        Some(image) if image != file && images.iter().any(|source| source.path() == image) => {
            Failure::during("error while reading the source", &error)
        }
        _ => Failure::during_on(
            session.context(),
            &format!("error while converting to '{}'", file.display()),
            file,
            &error,
        ),
    })
}

/// The reader of a packed source.
fn packed_reader(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    destination: &Destination,
    pass: Pass,
) -> Result<Reader, Failure> {
    if args.dry_run {
        return Ok(Reader { order: Order::Any, target_size: None });
    }
    let target_size = match destination {
        Destination::Existing(name) => Some(size_of_existing(args, opts, session, name)?),
        Destination::New(path) => opts.size.or_else(|| size_of_device(path)),
        Destination::Pipe | Destination::Object(_) => opts.size,
    };
    let order = if pass == Pass::Again || args.salvage || args.source_snapshot.is_some() {
        Order::Any
    } else if args.files.len() == 2 && takes_open_end(args, opts, session.context(), destination) {
        Order::OpenEnded
    } else {
        Order::Once
    };
    Ok(Reader { order, target_size })
}

/// Whether the target can be written before the length of its disk is known.
fn takes_open_end(
    args: &ConvertArgs,
    opts: &CreateOpts,
    context: &Context,
    destination: &Destination,
) -> bool {
    let path = match destination {
        Destination::Pipe | Destination::Object(_) => return false,
        Destination::Existing(_) => return !args.compress,
        Destination::New(path) => path,
    };
    let format = args.target_format();
    if context.disks.names.is_remote(path)
        || opts.data_file.is_some()
        || opts.preallocation.is_some_and(|mode| mode != Preallocation::Off)
    {
        return false;
    }
    // The first table of a qcow2 image is made for the largest disk. In one cluster, it is no larger than that of a small one.
    let cluster = opts.create_options(context.dialect, format).cluster_size;
    let most = cluster.saturating_pow(3) / 128;
    format == Format::Raw || format == Format::Qcow2 && args.packed.most_of_disk() <= most
}

fn size_of_existing(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    target: &OsStr,
) -> Result<u64, Failure> {
    let mut spec = existing_target(args, opts, session.context(), target)?;
    spec.options.access = Access::ReadOnly;
    session.with_image(&spec, |image| Ok(image.virtual_size()))
}

/// How a target is opened that exists.
fn existing_target(
    args: &ConvertArgs,
    opts: &CreateOpts,
    context: &Context,
    target: &OsStr,
) -> Result<ImageSpec, Failure> {
    if *opts != CreateOpts::default() {
        return Err(Failure::usage("-o can't be used with -n: the target exists, it is not made"));
    }
    if args.backing_format.is_some() && !context.dialect.is_qemu() {
        return Err(Failure::usage(
            "-F can't be used with -n: the target names the format of its backing file",
        ));
    }
    let image = ImageArgs { image_opts: args.target_image_opts, ..args.image.clone() };
    let raw = Format::Raw.into();
    let format = args.target_format.as_ref().unwrap_or(&raw);
    let format = (!args.target_image_opts).then_some(format);
    let mut spec = image.resolve(
        context,
        target,
        format,
        args.target_cache.unwrap_or(CacheMode::Unsafe),
        Access::ReadWrite,
    )?;
    spec.options.compress = args.compression.options();
    spec.options.keys = args.backing_keys.over(spec.options.keys, 1, &spec.secrets)?;
    if spec.aio.is_some() || spec.discard.is_some() {
        return Err(Failure::usage("'aio' and 'discard' can't be set for the target alone: use --aio"));
    }
    Ok(spec)
}

/// How a target is made and opened.
fn new_target(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    target: &Path,
) -> Result<NewTarget, Failure> {
    let dialect = session.dialect();
    let disks = &session.context().disks;
    let secrets = args.image.secrets.read(disks, Sources::All)?;
    let mut create =
        opts.create_options_with(dialect, args.target_format(), Some(&secrets)).map_err(Failure::new)?;
    if args.compress && create.encryption.is_some() {
        return Err(Failure::new("Compression and encryption not supported at the same time"));
    }
    if let Some(encryption) = &mut create.encryption {
        encryption.costs = args.image.costs.bounds();
    }
    create.cache = args.target_cache.unwrap_or(CacheMode::Unsafe);
    if disks.names.is_remote(target) && create.data_file.is_some() {
        return Err(Failure::creating_name(
            target.as_os_str(),
            "an image on a server can't have an external data file",
        ));
    }
    create.remote = given_only(session.context());
    let spec = args.image.clone();
    let mut open = ImageArgs { image_opts: false, ..spec }
        .resolve(
            session.context(),
            target.as_os_str(),
            Some(&args.target_format().into()),
            args.target_cache.unwrap_or(CacheMode::Unsafe),
            Access::ReadWrite,
        )?
        .options;
    let backing = backing::join(
        session.context(),
        args.backing.as_deref(),
        args.backing_format.as_ref(),
        opts.backing_file.as_deref(),
        opts.backing_format.as_deref(),
        CheckName::AnyPlace,
    )?;
    if let Some(backing) = backing {
        if args.target_format() != Format::Qcow2 {
            return Err(Failure::new(format!(
                "{}: Backing file not supported for file format '{}'",
                target.display(),
                args.target_format().name()
            )));
        }
        let format = backing::required_format(session, target, &backing)?;
        // The user gave this name, so it may be opened wherever it is; what that file names in turn may not.
        let path = backing::resolve_given(session.context(), target, &backing.name)?;
        if dialect.is_qemu() && !disks.names.is_remote(&path) {
            check_backing(target, &path)?;
        }
        create.refs = open.refs.clone();
        open.keys = args.backing_keys.over(open.keys, 1, &secrets)?;
        open.backing =
            Some((if disks.names.is_remote(&path) { path } else { absolute(&path)? }, Some(format)));
        create.backing = Some((backing.name, format));
    }
    if let Some(name) = &create.data_file {
        open.data_file = Some(absolute(&backing::resolve(target, name))?);
    }
    Ok(NewTarget::new(target.to_owned())
        .create(create)
        .open(open.snapshot(None).compress(args.compression.options())))
}

/// Whether the backing file of a new image can be opened; the failure is in QEMU's words.
fn check_backing(target: &Path, path: &Path) -> Result<(), Failure> {
    let Err(error) = File::open(path) else { return Ok(()) };
    let reason = error.raw_os_error().map_or_else(|| error.to_string(), errno_text);
    Err(Failure::new(format!(
        "Could not open '{}': Could not open backing file: Could not open '{}': {reason}",
        target.display(),
        path.display()
    )))
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|error| Failure::new(format!("'{}': {error}", path.display())))
}
