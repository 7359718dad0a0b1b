//! Packed sources: files in gzip, xz, zstd, bzip2 and lz4, and members of tar files such as OVAs, found by their first bytes.
//!
//! A raw disk is unpacked while it is read in order. Other images are read at any place, so they are unpacked into a file
//! without a name first. A member of a tar file is read where it lies.

mod choice;
mod decode;
mod decoding;
mod manifest;
mod ovf;
mod parts;
mod pieces;
mod range_reader;
mod recent;
mod recorded_length;
mod registry;
#[cfg(test)]
mod samples;
mod spill;
mod stream;
mod tar;
mod window;
mod xz;

use crate::context::Context;
use crate::disks::Disks;
use crate::error::DiskError;
use crate::image_spec::ImageSpec;
use crate::watch::Watch;
use decode::Packing;
use decoding::{Fault, Length, Source, Tail};
use pieces::{Pieces, Range};
use range_reader::RangeReader;
use registry::Unpacked;
pub(crate) use registry::UnpackedFiles;
use spill::Stopped;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stream::PackedStream;
use window::Window;
use zebu_engine::jobs::SourceEnd;
use zebu_engine::{Access, Format, PackedFormat, looks_raw};

/// Packings around each other that are taken away: a disk in xz in an OVA in gzip has three.
const MOST_LAYERS: usize = 4;
/// Bytes that packings are known by.
const SNIFFED: u64 = 4096;
/// Bytes that are unpacked where neither an option nor the target bounds them.
const MOST_UNPACKED: u64 = 256 << 30;
/// Bytes of an image beside those of its disk, at most as many.
const BESIDE_DISK: u64 = 64 << 20;

/// The wishes of a caller about a packed source.
#[derive(Debug, Clone, Default)]
pub struct PackedChoice {
    /// The disk in a tar file or OVA, if it is not the one that its OVF names.
    pub member: Option<String>,
    /// Bytes that are unpacked at most, if not as the target's size allows.
    pub max_size: Option<u64>,
}

/// The order in which a source is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Any.
    Any,
    /// Once, from the start to the end.
    Once,
    /// The same, and its length need not be known before.
    OpenEnded,
}

/// The reader of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    /// The order in which it reads.
    pub order: Order,
    /// Bytes of the target's disk, if they are known before the source's.
    pub target_size: Option<u64>,
}

/// A source that is ready to be opened.
#[derive(Debug, Default)]
pub struct Prepared {
    /// Whether it is unpacked while it is read, on one thread.
    pub is_stream: bool,
    /// Its end, if that shows when it has been read.
    pub end: Option<SourceEnd>,
}

impl PackedChoice {
    /// Bytes of a disk that is unpacked while it is read.
    pub fn most_of_disk(&self) -> u64 {
        self.max_size.unwrap_or(MOST_UNPACKED)
    }

    /// Bytes of an image that is unpacked. It may be somewhat larger than its disk.
    fn most_of_image(&self, target_size: Option<u64>) -> u64 {
        let by_target = || target_size.map(|size| size.saturating_mul(2).saturating_add(BESIDE_DISK));
        self.max_size.or_else(by_target).unwrap_or(MOST_UNPACKED)
    }
}

/// Where unpacked bytes come to lie: in `TMPDIR` if that is set, else beside the target.
fn spill_directory(target: &Path) -> PathBuf {
    match std::env::var_os("TMPDIR").filter(|directory| !directory.is_empty()) {
        Some(directory) => PathBuf::from(directory),
        None => match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        },
    }
}

/// Unpacks a source, if it is packed, or begins to: the name in `spec` leads to what it holds from then on. `targets` are
/// the files that will be written, that of the image first. `reader` is asked for if the source is packed.
///
/// # Errors
/// It can't be unpacked, or the caller's choice does not fit it; what `reader` says.
pub fn prepare<E: From<DiskError>>(
    context: &Context,
    choice: &PackedChoice,
    spec: &mut ImageSpec,
    targets: &[&Path],
    reader: impl Fn() -> Result<Reader, E>,
    watch: &Watch<'_>,
) -> Result<Prepared, E> {
    let path = &spec.path.clone();
    let fail = |reason: &str| E::from(DiskError::of_name(path, reason));
    let cancelled = || E::from(DiskError::Cancelled);
    let failed = |reason: String| if watch.is_cancelled() { cancelled() } else { fail(&reason) };
    let no_member = |why: &str| match &choice.member {
        Some(_) => Err(fail(&format!("--member names a part of a tar file, {why}"))),
        None => Ok(Prepared::default()),
    };
    if spec.options.format == Some(Format::Raw) {
        return no_member("and with the format raw the very bytes of the file are the disk");
    }
    // QEMU's programs unpack nothing; and what is to be changed can't be.
    if context.dialect.is_qemu()
        || spec.options.access == Access::ReadWrite
        || context.disks.names.is_remote(path)
    {
        return no_member("which this is not read as");
    }
    // Not opened if it is none: a pipe would block.
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file()) {
        return no_member("and this is no regular file");
    }
    let Ok(file) = File::open(path) else { return Ok(Prepared::default()) };
    let original = file.metadata().map_err(|e| fail(&e.to_string()))?;
    let bytes = Arc::new(Pieces::of(Range { start: 0, len: original.len() }));
    let mut layer = Layer { bytes, file: Arc::new(file), is_whole: false };
    let (mut layers, mut member_found) = (0, false);
    let is_original = |target: &&Path| {
        std::fs::metadata(target)
            .is_ok_and(|found| (found.dev(), found.ino()) == (original.dev(), original.ino()))
    };
    let mut streamed = None;
    loop {
        let first = layer.first_bytes().map_err(|e| fail(&e.to_string()))?;
        let packing = Packing::of(&first);
        if packing.is_some() && layer.bytes.has_holes() {
            return Err(fail("it is packed within a sparse member of a tar file: unpack that first"));
        }
        if let Some(packing) = packing {
            let reader = reader()?;
            let source = layer.source(packing, Tail::of(context.disks.notices.clone(), path.clone()), watch);
            if is_raw_stream(spec, reader.order, &source).map_err(&failed)? {
                streamed = Some((source, reader));
                layers += 1;
                break;
            }
            let (directory, most) = (
                spill_directory(targets.first().unwrap_or(&Path::new(""))),
                choice.most_of_image(reader.target_size),
            );
            layer = Layer::unpack(&source, &directory, most, watch).map_err(|reason| match reason {
                Some(reason) => fail(&reason),
                None => cancelled(),
            })?;
        } else if PackedFormat::of(&first) == Some(PackedFormat::Tar) {
            let chosen = choice::choose(&layer.file, &layer.bytes, choice.member.as_deref(), watch);
            member_found = true;
            layer.bytes = Arc::new(chosen.map_err(&failed)?);
            layer.is_whole = false;
        } else {
            break;
        }
        layers += 1;
        if layers > MOST_LAYERS {
            return Err(fail(&format!("it is packed more than {MOST_LAYERS} times: unpack it first")));
        }
    }
    if !member_found {
        no_member("and this is none")?;
    }
    if layers == 0 {
        return Ok(Prepared::default());
    }
    if targets.iter().any(is_original) {
        return Err(fail(
            "it is a file of the target, too, and writing it would destroy it: give another target",
        ));
    }
    let mut prepared = Prepared::default();
    let unpacked = if let Some((source, reader)) = streamed {
        let length = length_of(choice, &source, reader).map_err(&failed)?;
        prepared.is_stream = true;
        prepared.end = matches!(length, Length::AtMost(..)).then(SourceEnd::new);
        spec.options.format = Some(Format::Raw);
        let stream = PackedStream::new(source, length, prepared.end.clone());
        Unpacked::Stream(stream.map_err(|e| fail(&e.to_string()))?)
    } else if layer.is_whole {
        Unpacked::Whole(layer.file)
    } else {
        Unpacked::Window(Window::new(layer.file, layer.bytes).map_err(|e| fail(&e.to_string()))?)
    };
    context.disks.unpacked.note(path, unpacked);
    Ok(prepared)
}

/// Outcome of unpacking sources that are read in order.
#[derive(Debug)]
pub enum Unpacking {
    /// It did not fail.
    Sound,
    /// It failed, which is why the command did.
    Failed(DiskError),
    /// A source must be read at any place: it is to be prepared again for such a reader.
    Again,
}

/// Outcome of unpacking the sources of a command that has failed.
pub fn unpacking_of(disks: &Disks, specs: &[ImageSpec]) -> Unpacking {
    let faults = specs.iter().filter_map(|spec| Some((spec, disks.unpacked.fault(&spec.path)?)));
    let mut found = Unpacking::Sound;
    for (spec, fault) in faults {
        match fault {
            Fault::Told(reason) => {
                return Unpacking::Failed(DiskError::of_name(&spec.path, reason));
            }
            Fault::Cancelled => return Unpacking::Failed(DiskError::Cancelled),
            Fault::NeedsPlaces => found = Unpacking::Again,
        }
    }
    found
}

/// Whether `source` holds a raw disk that can be unpacked while it is read.
fn is_raw_stream(spec: &ImageSpec, order: Order, source: &Source) -> Result<bool, String> {
    if order == Order::Any
        || spec.options.format.is_some()
        || spec.described.is_some()
        || !spec.filters.is_empty()
    {
        return Ok(false);
    }
    let first = source.first_bytes(SNIFFED);
    let first = first.map_err(|e| format!("can't unpack the {} file: {e}", source.packing.name()))?;
    if first.is_empty() || !looks_raw(&first, &[]) {
        return Ok(false);
    }
    Ok(order == Order::OpenEnded || source.recorded_length().is_some())
}

/// The length of a raw disk that is unpacked while it is read.
fn length_of(choice: &PackedChoice, source: &Source, reader: Reader) -> Result<Length, String> {
    let packing = source.packing.name();
    let by_option =
        |most: u64| format!("the {packing} file holds more than {most} bytes: allow more with --max-size");
    let most = choice.most_of_disk();
    // The frames of zstd are scattered over the file: to look at them all is to read it.
    if (reader.order == Order::Once || source.packing == Packing::Xz)
        && let Some(len) = source.recorded_length()
    {
        return if len > most { Err(by_option(most)) } else { Ok(Length::Known(len)) };
    }
    Ok(match reader.target_size {
        Some(size) if size < most => {
            let reason = format!(
                "output file is smaller than input file: the {packing} file holds more than the {size} bytes of the target"
            );
            Length::AtMost(size, reason)
        }
        _ => Length::AtMost(most, by_option(most)),
    })
}

/// A file without the packings that were taken away around it.
struct Layer {
    file: Arc<File>,
    bytes: Arc<Pieces>,
    /// Whether it is all of the file, which has no name.
    is_whole: bool,
}

impl Layer {
    fn first_bytes(&self) -> io::Result<Vec<u8>> {
        let mut first = Vec::new();
        RangeReader::new(&*self.file, &*self.bytes).take(SNIFFED).read_to_end(&mut first)?;
        Ok(first)
    }

    fn source(&self, packing: Packing, tail: Tail, watch: &Watch<'_>) -> Source {
        let (file, bytes) = (Arc::clone(&self.file), Arc::clone(&self.bytes));
        Source { file, bytes, packing, cancel: watch.cancel().clone(), tail }
    }

    /// Unpacks a source. The error has a reason unless it was cancelled.
    fn unpack(
        source: &Source,
        directory: &Path,
        limit: u64,
        watch: &Watch<'_>,
    ) -> Result<Self, Option<String>> {
        let beside = format!("the unpacked bytes need a file in '{}' (or TMPDIR)", directory.display());
        let out = spill::unnamed_file(directory).map_err(|e| Some(format!("{beside}: {e}")))?;
        let packing = source.packing;
        let unpacked =
            spill::unpack(source, &out, limit, |done| watch.note("unpacking", done, limit.max(done)));
        let len = unpacked.map_err(|stopped| match stopped {
            Stopped::Cancelled => None,
            Stopped::TooLarge => Some(format!(
                "the {} file holds more than {limit} bytes: allow more with --max-size",
                packing.name()
            )),
            Stopped::Source(error) => Some(format!("can't unpack the {} file: {error}", packing.name())),
            Stopped::Target(error) => Some(format!("{beside}: {error}")),
        })?;
        let bytes = Arc::new(Pieces::of(Range { start: 0, len }));
        Ok(Self { file: Arc::new(out), bytes, is_whole: true })
    }
}
