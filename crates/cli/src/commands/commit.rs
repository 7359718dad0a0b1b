//! `zebu commit`: writes what an image holds into its backing file.

use crate::arguments::{EngineArgs, ImageArgs};
use crate::default_cache_mode::DefaultCacheMode;
use crate::failure::Failure;
use crate::output::stdout;
use crate::session::Session;
use crate::values::{NamedFormat, Rate, caches, formats, rate_argument};
use crate::watch::{ProgressArg, Watch};
use std::ffi::OsString;
use std::path::Path;
use zebu_disks::{Context, errno_text};
use zebu_engine::jobs::{AfterCommit, CommitOptions, commit};
use zebu_engine::{Access, BaseName, CacheMode, ErrorKind};

/// Arguments of `zebu commit`.
#[derive(Debug, clap::Args)]
pub(crate) struct CommitArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Cache mode of the images [default: none where their file systems can, else writeback without pages that stay]
    #[arg(short = 't', long, value_name = "CACHE", value_parser = caches())]
    cache: Option<CacheMode>,

    /// The image of the backing chain to commit to; those in between are of no use afterwards (implies -d)
    #[arg(short, long, value_name = "FILENAME")]
    base: Option<OsString>,

    /// Leave the image as it is, instead of emptying it
    #[arg(short = 'd', long)]
    drop: bool,

    /// Most bytes a second; 0: no limit
    #[arg(short, long, value_name = "RATE", value_parser = rate_argument)]
    rate: Option<Rate>,

    /// Threads that copy
    #[arg(long, value_name = "NUM", value_parser = clap::value_parser!(u16).range(1..=64), default_value = "1")]
    workers: u16,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,
}

/// A commit that failed, under QEMU's name in the words of its job.
fn not_committed(context: &Context, path: &Path, error: &zebu_engine::Error) -> Failure {
    let is_qemu = context.dialect.is_qemu();
    match error.kind() {
        _ if is_qemu && is_of_opening(error.errno()) => Failure::opening(context, path, error),
        ErrorKind::Io | ErrorKind::NoSpace if is_qemu => {
            Failure::new(format!("Block job failed: {}", errno_text(error.errno())))
        }
        ErrorKind::InvalidArgument if is_qemu => Failure::new(error.message()),
        _ => Failure::during(&format!("Could not commit '{}'", path.display()), error),
    }
}

/// Whether an error is one that only opening a file ends with.
fn is_of_opening(errno: i32) -> bool {
    [libc::ENOENT, libc::EACCES, libc::EISDIR, libc::ENOTDIR, libc::ELOOP, libc::ENXIO].contains(&errno)
}

/// Runs the command.
pub(crate) fn run(args: &CommitArgs, context: &Context) -> Result<u8, Failure> {
    let mut spec = args.image.resolve(
        context,
        &args.filename,
        args.format.as_ref(),
        args.cache.unwrap_or_default(),
        Access::ReadWrite,
    )?;
    let mut session = Session::start(context, &args.engine, spec.aio)?;
    let unasked = DefaultCacheMode::unless_asked(args.cache, CacheMode::default(), &session, &mut spec);
    if let Some(unasked) = &unasked {
        session.read_uncached();
        if args.engine.verbose {
            unasked.tell(context.dialect, "the images");
        }
    }
    let base = args
        .base
        .as_deref()
        .map(|base| context.image_path(base).map_err(|reason| Failure::opening_name(base, &reason)));
    let mut watch = Watch::start(args.progress.mode(args.quiet))?;
    let mut options = CommitOptions::default()
        .base(base.transpose()?)
        .base_name(if context.dialect.is_qemu() { BaseName::FromImage } else { BaseName::FromEither })
        .after(if args.drop || args.base.is_some() { AfterCommit::Keep } else { AfterCommit::Empty })
        .workers(usize::from(args.workers))
        .worker_config(session.config().clone())
        .control(watch.control());
    options.control.rate_limit = args.rate.and_then(|rate| rate.0);
    let worker = session.worker();
    let result = worker.block_on(commit(worker, &spec.path, &spec.options, &options));
    watch.finish();
    if let Some(unasked) = unasked {
        unasked.clean_up();
    }
    result.map_err(|error| not_committed(context, &spec.path, &error))?;
    if !args.quiet {
        stdout::print("Image committed.\n")?;
    }
    Ok(0)
}
