//! `zebu rebase`: puts an image onto another backing file.

use crate::arguments::{BackingKeyArgs, EngineArgs, ImageArgs};
use crate::backing::{self, BackingSpec, CheckName};
use crate::compression::CompressionArgs;
use crate::default_cache_mode::DefaultCacheMode;
use crate::failure::Failure;
use crate::image_failure::backing_key_remedy;
use crate::output::stderr;
use crate::sector_size::{unusual, warn_of_lost};
use crate::session::Session;
use crate::values::{NamedFormat, caches, formats};
use crate::watch::{ProgressArg, Watch};
use std::ffi::OsString;
use std::path::Path;
use zebu_disks::{Context, ImageSpec};
use zebu_engine::jobs::{RebaseOptions, TargetClusters, rebase};
use zebu_engine::{Access, BackingReference, CacheMode, Chain, Format, Image};

/// Arguments of `zebu rebase`.
#[derive(Debug, clap::Args)]
pub(crate) struct RebaseArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Cache mode of the image and of what it stands on [default: none where their file systems can, else writeback
    /// without pages that stay]
    #[arg(short = 't', long, value_name = "CACHE", value_parser = caches())]
    cache: Option<CacheMode>,

    /// The new backing file, as seen from the image; an empty name: none
    #[arg(short = 'b', long, value_name = "FILENAME")]
    backing: Option<String>,

    /// Format of the new backing file
    #[arg(short = 'F', long, value_name = "FMT", value_parser = formats())]
    backing_format: Option<NamedFormat>,

    /// Cache mode of the new backing file [default: as -t]
    #[arg(short = 'T', long, value_name = "CACHE", value_parser = caches())]
    backing_cache: Option<CacheMode>,

    /// Change the name only: the new backing file must hold what the old one holds, or the disk becomes a mixture
    #[arg(short = 'u', long)]
    backing_unsafe: bool,

    /// Compress the clusters that are written into the image
    #[arg(short = 'c', long)]
    compress: bool,

    #[command(flatten)]
    compression: CompressionArgs,

    /// Refused: an image that is opened without locks can't be written
    #[arg(short = 'U', long, hide = true)]
    force_share: bool,

    #[command(flatten)]
    backing_keys: BackingKeyArgs,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,
}

/// Runs the command.
pub(crate) fn run(args: &RebaseArgs, context: &Context) -> Result<u8, Failure> {
    let check = if args.backing_unsafe { CheckName::Unsafe } else { CheckName::AnyPlace };
    let name = &backing::found_as(context, args.backing.as_deref().unwrap_or_default(), check)?;
    if args.backing.is_none() && !args.backing_unsafe {
        return Err(Failure::usage("Must specify backing file (-b) or use unsafe mode (-u)"));
    }
    if name.is_empty() && args.backing_format.is_some() {
        return Err(Failure::usage("a backing format is given, but no backing file"));
    }
    if args.backing_keys.is_given() && (args.backing_unsafe || name.is_empty()) {
        return Err(Failure::usage(
            "--backing-key-secret is for a new backing file that is opened: not with -u, or an empty name",
        ));
    }
    // QEMU takes both, and neither has an effect there.
    let is_qemu = context.dialect.is_qemu();
    if args.force_share && !is_qemu {
        return Err(Failure::usage(
            "-U can't be used: an image that is opened without locks can't be written",
        ));
    }
    if let Some(option) = args.compression.given().filter(|_| !args.compress) {
        return Err(Failure::usage(format!("{option} needs -c")));
    }
    if args.compress && args.backing_unsafe && !is_qemu {
        return Err(Failure::usage("-c can't be used with -u: nothing is copied"));
    }
    let mut spec = args.image.resolve(
        context,
        &args.filename,
        args.format.as_ref(),
        args.cache.unwrap_or_default(),
        Access::ReadWrite,
    )?;
    spec.options.compress = args.compression.options();
    if args.backing_unsafe {
        spec.options.chain = Chain::TopOnly;
    }
    let mut session = Session::start(context, &args.engine, spec.aio)?;
    let mut unasked = Vec::new();
    if let Some(chosen) =
        DefaultCacheMode::unless_asked(args.cache, CacheMode::default(), &session, &mut spec)
    {
        session.read_uncached();
        if args.engine.verbose {
            chosen.tell(context.dialect, "the image");
        }
        unasked.push(chosen);
    }
    let mut watch = Watch::start(args.progress.mode(args.quiet))?;
    let reference = reference(args, &session, &spec.path, name)?;
    let worker = session.worker();
    if args.backing_unsafe {
        session.with_image(&spec, |image| {
            worker.block_on(image.set_backing(worker, reference)).map_err(|error| {
                Failure::during(&format!("Could not change the backing file to '{name}'"), &error)
            })
        })?;
        return Ok(0);
    }
    // First, so that a chain with the image in it is found before its lock is in the way.
    let new = match &reference {
        Some(reference) => {
            let mut backing = backing_spec(args, context, &spec, name)?;
            let asked = args.backing_cache.or(args.cache);
            if let Some(chosen) =
                DefaultCacheMode::unless_asked(asked, CacheMode::default(), &session, &mut backing)
            {
                if args.engine.verbose {
                    chosen.tell(context.dialect, "the new backing file");
                }
                unasked.push(chosen);
            }
            Some((open_backing(&session, &backing, name)?, reference.clone()))
        }
        None => None,
    };
    let mut sectors = (0, 0);
    let result = session.with_image(&spec, |image| {
        let new_sector = new.as_ref().map_or(512, |(backing, _)| backing.logical_sector_size());
        sectors = (image.logical_sector_size(), new_sector);
        if args.compress && image.format() == Format::Raw {
            return Err(Failure::new("Compression not supported for this file format"));
        }
        if !is_qemu && !args.quiet && image.backing().is_some() && !image.snapshots().is_empty() {
            stderr::tell(
                context.dialect,
                &format!(
                    "warning: '{}' has internal snapshots: where they read from the old backing file, they \
                     will read from the new one",
                    image.path().display()
                ),
            );
        }
        let options = RebaseOptions::default()
            .clusters(if args.compress { TargetClusters::Compressed } else { TargetClusters::Plain })
            .control(watch.control());
        let new = new.as_ref().map(|(backing, reference)| (backing, reference.clone()));
        let done = worker.block_on(rebase(worker, image, new, &options));
        watch.finish();
        done.map_err(|error| Failure::during("could not rebase", &error))
    });
    if let Some((backing, _)) = &new {
        session.close(backing, Access::ReadOnly)?;
    }
    unasked.iter().for_each(DefaultCacheMode::clean_up);
    result?;
    warn_of_lost(unusual(sectors.0).filter(|_| sectors.1 < sectors.0), spec.path.as_os_str());
    Ok(0)
}

/// The new reference to a backing file.
fn reference(
    args: &RebaseArgs,
    session: &Session,
    image: &Path,
    name: &str,
) -> Result<Option<BackingReference>, Failure> {
    if name.is_empty() {
        return Ok(None);
    }
    let is_image = |found: std::fs::Metadata| {
        use std::os::unix::fs::MetadataExt;
        image.metadata().is_ok_and(|image| (image.dev(), image.ino()) == (found.dev(), found.ino()))
    };
    let is_asked_for = args.backing_unsafe && session.dialect().is_qemu();
    if !is_asked_for && backing::resolve(image, name).metadata().is_ok_and(is_image) {
        return Err(Failure::new(format!("'{}': an image can't be its own backing file", image.display())));
    }
    let spec =
        BackingSpec { name: name.to_owned(), format: args.backing_format.as_ref().map(|named| named.format) };
    let format = backing::required_format(session, image, &spec)?;
    let format = args.backing_format.as_ref().map_or(format.name(), |named| named.name.as_str());
    Ok(Some(BackingReference::new(name, format)))
}

/// How the new backing file is opened.
fn backing_spec(
    args: &RebaseArgs,
    context: &Context,
    image: &ImageSpec,
    name: &str,
) -> Result<ImageSpec, Failure> {
    // Keys of the image, and of its old backing file, are none of the new one's.
    let keys = args.backing_keys.over(args.image.keys(context.dialect, &image.secrets), 0, &image.secrets)?;
    let options = image
        .options
        .clone()
        .keys(keys)
        .format(args.backing_format.as_ref().map(|named| named.format))
        .access(Access::ReadOnly)
        .cache(args.backing_cache.or(args.cache).unwrap_or_default())
        .snapshot(None)
        .backing(None)
        .data_file(None);
    Ok(ImageSpec { path: backing::resolve_given(context, &image.path, name)?, options, ..image.clone() })
}

/// Opens the new backing file, which the user named, wherever it is; what it names in turn, as the policy allows.
fn open_backing(session: &Session, backing: &ImageSpec, name: &str) -> Result<Image, Failure> {
    let worker = session.worker();
    worker.block_on(Image::open(worker, &backing.path, &backing.options)).map_err(|error| {
        let failure = match backing_key_remedy(session.dialect(), &error) {
            Some(remedy) => Failure::opening_with_remedy(session.context(), &backing.path, &error, remedy),
            None => Failure::opening(session.context(), &backing.path, &error),
        };
        Failure {
            message: failure.message.map(|text| format!("Could not open new backing file '{name}': {text}")),
            ..failure
        }
    })
}
