//! `zebu convert` to standard output (`-`).
//!
//! A raw image goes out as it is read. A plain qcow2 image goes out behind its tables, for which the sources' mappings are walked
//! before. Everything else is made in a temporary file first.

use super::args::ConvertArgs;
use super::written_once::{failed, write_raw};
use crate::create_opts::CreateOpts;
use crate::failure::Failure;
use crate::output_pipe::OutputPipe;
use crate::session::Session;
use crate::temporary_directory::unnamed_file;
use crate::watch::Watch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use zebu_disks::{Context, Program};
use zebu_engine::jobs::{ConvertOptions, ConvertReport, ConvertTarget, StreamedTarget, TablePlaces, convert};
use zebu_engine::{Format, Image, Preallocation};

/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;
/// How often is looked whether the job was cancelled, where nothing comes.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Whether a target is standard output. Under QEMU's names, it is a file of that name.
pub(super) fn is_pipe(dialect: Program, target: &OsStr) -> bool {
    target == "-" && !dialect.is_qemu()
}

/// The sources, with the place of the spooled one instead of `-`.
pub(super) fn with_spooled(
    dialect: Program,
    sources: &[OsString],
    place: Option<&Path>,
) -> Result<Vec<OsString>, Failure> {
    let is_input = |source: &&OsString| is_pipe(dialect, source);
    if sources.iter().filter(is_input).count() > 1 {
        return Err(Failure::usage("standard input ('-') is one source, and can be read once"));
    }
    let named = |source: &OsString| match place {
        Some(place) if is_pipe(dialect, source) => place.as_os_str().to_owned(),
        _ => source.clone(),
    };
    Ok(sources.iter().map(named).collect())
}

/// The way that an image takes to standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Raw,
    Qcow2,
    /// By a temporary file.
    Spooled,
}

/// Chooses the way, and refuses options that a pipe can't have.
pub(super) fn way(dialect: Program, args: &ConvertArgs, opts: &CreateOpts) -> Result<Way, Failure> {
    let refused = [
        (args.no_create, "-n: it is always a new image"),
        (
            args.backing.is_some() || opts.backing_file.is_some(),
            "a backing file (-B): its name depends on the place of the image",
        ),
        (args.target_cache.is_some(), "a cache mode (-t)"),
        (opts.data_file.is_some(), "an external data file"),
        (args.output.is_some(), "--output: the image goes there"),
    ];
    if let Some((_, what)) = refused.iter().find(|(is_given, _)| *is_given) {
        return Err(Failure::usage(format!("standard output ('-') can't have {what}")));
    }
    let create = opts.create_options(dialect, args.target_format());
    let is_plain = create.preallocation == Preallocation::Off && !args.salvage;
    Ok(match args.target_format() {
        Format::Raw if is_plain => Way::Raw,
        Format::Qcow2
            if is_plain
                && !args.compress
                && !args.bitmaps
                && !create.lazy_refcounts
                && !opts.has_encryption() =>
        {
            Way::Qcow2
        }
        _ => Way::Spooled,
    })
}

/// Converts without a temporary file.
pub(super) fn convert_to_pipe(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    watch: &Watch,
    images: &[Image],
    mut options: ConvertOptions,
    way: Way,
) -> Result<ConvertReport, Failure> {
    let create = opts.create_options(session.dialect(), args.target_format());
    let total: u64 = images.iter().map(Image::virtual_size).sum();
    let size = create.size.unwrap_or(total).next_multiple_of(512);
    if size < total {
        return Err(Failure::new("standard output: output file is smaller than input file"));
    }
    options.workers = 1;
    let worker = session.worker();
    let len = (way == Way::Raw).then_some(size);
    let output = OutputPipe::begin(len, watch.cancel().clone())?;
    let file = output.file()?;
    let done = if way == Way::Raw {
        worker.block_on(write_raw(worker, images, file, size, &options))
    } else {
        let new = StreamedTarget::new(file).create(create).tables(TablePlaces::InFront);
        worker.block_on(convert(worker, images, ConvertTarget::Stream(Box::new(new)), &options))
    };
    // What the job saw is only that a write failed.
    done.map_err(|error| output.failure().unwrap_or_else(|| failed(images, &error)))
}

/// A temporary image without a name, for what comes from standard input or goes to standard output.
pub(super) struct Spool {
    file: File,
}

impl Spool {
    pub(super) fn new() -> Result<Self, Failure> {
        Ok(Self { file: unnamed_file()?.into() })
    }

    /// A name under which this process can read the image.
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// A name under which this process can make the image.
    pub(super) fn target(&self, context: &Context) -> Result<PathBuf, Failure> {
        let file =
            self.file.try_clone().map_err(|error| Failure::new(format!("temporary image: {error}")))?;
        context.disks.names.note_open(self.path(), file.into()).map_err(Failure::new)
    }

    /// Has all bytes of standard input in the image, `most` of them at most.
    pub(super) fn fill(&self, watch: &Watch, most: u64) -> Result<(), Failure> {
        let fail = |what: &str, error: std::io::Error| Failure::new(format!("could not {what}: {error}"));
        let input = std::io::stdin();
        let mut piece = vec![0; PIECE];
        let mut done = 0u64;
        loop {
            watch.cancel().check().map_err(|error| Failure::during("standard input", &error))?;
            let mut ready = [PollFd::new(&input, PollFlags::IN)];
            match poll(&mut ready, Some(&LOOK)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(fail("read standard input", error.into())),
            }
            let len = match rustix::io::read(&input, &mut piece) {
                Ok(0) => break,
                Ok(len) => len,
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(error) => return Err(fail("read standard input", error.into())),
            };
            done += len as u64;
            if done > most {
                return Err(Failure::new(format!(
                    "standard input holds more than {most} bytes: allow more with --max-size"
                )));
            }
            (&self.file)
                .write_all(&piece[..len])
                .map_err(|error| fail("write a temporary file (TMPDIR chooses another place)", error))?;
        }
        Ok(())
    }

    /// Writes the image to standard output.
    pub(super) fn copy_out(&self, session: &Session, watch: &Watch) -> Result<(), Failure> {
        let fail =
            |error: std::io::Error| Failure::new(format!("could not read the temporary image: {error}"));
        let len = self.file.metadata().map_err(fail)?.len();
        let output = OutputPipe::begin(Some(len), watch.cancel().clone())?;
        let target = output.file()?;
        let worker = session.worker();
        let mut at = 0;
        while at < len {
            let mut buffer = worker.buffer((len - at).min(PIECE as u64) as usize);
            self.file.read_exact_at(buffer.as_mut_slice(), at).map_err(fail)?;
            let bytes = buffer.len() as u64;
            let (written, _) = worker.block_on(worker.write(&target, at, buffer.into()));
            written.map_err(|error| {
                output.failure().unwrap_or_else(|| Failure::new(format!("standard output: {error}")))
            })?;
            at += bytes;
        }
        Ok(())
    }
}
