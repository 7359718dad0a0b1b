//! Options and report of a conversion.

use super::source_end::SourceEnd;
use crate::progress::JobControl;
use crate::{CompressOptions, CreateOptions, Error, Format, Image, NewForeign, OpenOptions};
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;
use zebu_storage::{File, WorkerConfig};

/// How data gets from the source to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CopyMode {
    /// Reflink where files and offsets allow it, buffers elsewhere.
    #[default]
    Auto,
    /// Reflink; an error where the file system can't. What no reflink can express (compressed clusters, edges that
    /// are not block-aligned) still goes through buffers.
    Reflink,
    /// copy_file_range, with the same exceptions as for `Reflink`; buffers where the kernel does not copy from one file to
    /// the other.
    Range,
    /// Reads and writes.
    Buffers,
}

/// How clusters of the target are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum TargetClusters {
    /// As they are.
    #[default]
    Plain,
    /// Compressed (`-c`), as the image's header and [`crate::CompressOptions`] of its opening say. Clusters that don't
    /// become shorter are plain, and so may be those in which one source ends and another begins.
    Compressed,
}

/// The order in which clusters or blocks of a new target get their places in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PlaceOrder {
    /// That of the disk, whatever is read or written first: a disk makes the same file every time, and lies in one piece. Not in
    /// what this engine opens to write it: encrypted images, those with an external data file, in devices or on servers, and
    /// targets that exist.
    #[default]
    OfDisk,
    /// That in which they come (`-W`).
    AsTheyCome,
}

/// Identities of a new image, in formats that have such.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Identities {
    /// Derived from that of the source, if it is one image that has one; else drawn.
    #[default]
    OfSource,
    /// Derived from this number (`--seed`): the same number makes the same identities.
    Seed(u64),
}

/// The answer to a source that can't be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReadErrors {
    /// The job fails.
    #[default]
    Fail,
    /// The smallest unreadable ranges become zero in the target, and are reported (`--salvage`). All is read, so nothing is
    /// shared: a block that can't be read would be none the better for it.
    Zero,
}

/// The treatment of the persistent dirty bitmaps of the source, which is one image then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CopyBitmaps {
    /// The target has none of them.
    #[default]
    No,
    /// All are copied; an inconsistent one is an error, before anything is copied.
    All,
    /// Copies the consistent ones.
    Sound,
}

/// How images are converted.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Threads that copy, each with a worker of its own; the caller's is the first. At least 1. Default: 1.
    pub workers: usize,
    /// How the workers of further threads are made. Default: that of [`WorkerConfig`].
    pub worker_config: WorkerConfig,
    /// Pieces of work in flight, over all threads (`-m`). At least 1; more than 1024 count as 1024. Default: 8.
    pub requests: usize,
    /// Most bytes of copy buffers, over all threads. At least 64 KiB. Default: 64 MiB.
    pub buffer_memory: usize,
    /// Runs of zeroes of at least so many bytes in the source's data are not written (`-S`): 0, or a multiple of
    /// 512. 0 writes everything, so that the target is fully allocated. Default: 4096.
    pub sparse_size: u64,
    /// How data is moved. Default: [`CopyMode::Auto`].
    pub copy: CopyMode,
    /// How clusters of the target are written. Default: [`TargetClusters::Plain`].
    pub clusters: TargetClusters,
    /// The order of places in a new target. Default: [`PlaceOrder::OfDisk`].
    pub order: PlaceOrder,
    /// Identities of a new target. Default: [`Identities::OfSource`].
    pub identities: Identities,
    /// The answer to a source that can't be read. Default: [`ReadErrors::Fail`].
    pub read_errors: ReadErrors,
    /// The part of each source that is copied, in bytes of its disk; what lies past its end does not count. All of it
    /// if `None`. Default: `None`.
    pub range: Option<Range<u64>>,
    /// The treatment of the source's bitmaps. Default: [`CopyBitmaps::No`].
    pub bitmaps: CopyBitmaps,
    /// The end of the one source, if its length shows when it has been read. A new target, raw or qcow2 and without
    /// preallocation, gets that length at the end; an existing one keeps what it has behind it. One thread copies. Default:
    /// `None`: all sources are as long as they say.
    pub source_end: Option<SourceEnd>,
    /// Watching, slowing and stopping. Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(ConvertOptions {
    workers: usize,
    worker_config: WorkerConfig,
    requests: usize,
    buffer_memory: usize,
    sparse_size: u64,
    copy: CopyMode,
    clusters: TargetClusters,
    order: PlaceOrder,
    identities: Identities,
    read_errors: ReadErrors,
    range: impl Into<Option<Range<u64>>>,
    bitmaps: CopyBitmaps,
    source_end: impl Into<Option<SourceEnd>>,
    control: JobControl,
});

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            workers: 1,
            worker_config: WorkerConfig::default(),
            requests: 8,
            buffer_memory: 64 << 20,
            sparse_size: 4096,
            copy: CopyMode::Auto,
            clusters: TargetClusters::Plain,
            order: PlaceOrder::OfDisk,
            identities: Identities::OfSource,
            read_errors: ReadErrors::Fail,
            range: None,
            bitmaps: CopyBitmaps::default(),
            source_end: None,
            control: JobControl::default(),
        }
    }
}

/// The content of an existing target before the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum TargetContent {
    /// Anything: zeroes are written too.
    #[default]
    Unknown,
    /// It reads as zero everywhere (`--target-is-zero`): zeroes are skipped, unless the target is encrypted.
    Zero,
    /// It is an empty overlay, and its backing file holds what the backing file of the source holds: what the
    /// source's own file does not hold is skipped (`-B`).
    SharedBacking,
    /// It is what the lowest image of each source stands on, and the sources were opened without it: what none of
    /// their images holds is skipped, zeroes are written.
    Base,
}

impl TargetContent {
    /// The content of this target. What was never written on an encrypted disk decrypts to noise, whatever its owner believes.
    pub(super) fn on(self, target: &Image) -> Self {
        if self == Self::Zero && target.is_encrypted() { Self::Unknown } else { self }
    }
}

/// A target that the job makes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NewTarget {
    /// Its name. Where nothing has that name, the image is written under a temporary name in the same directory
    /// and renamed when it is complete and durable; on an error, or when cancelled, nothing stays. So is the file that a
    /// symbolic link leads to, if there is none. What exists (a file, a device, a link to one) is made anew in place, without
    /// fsync if `open.cache` is `Unsafe`.
    pub path: PathBuf,
    /// How it is made. `size`: of the sources together if `None`; may be more, not less. With `backing`, what the source's
    /// own file does not hold is left to that backing file ([`TargetContent::SharedBacking`]).
    pub create: CreateOptions,
    /// How it is opened for writing (`format` and `access` are set by the job).
    pub open: OpenOptions,
}

zebu_storage::option_setters!(NewTarget { create: CreateOptions, open: OpenOptions });

impl NewTarget {
    /// An image at this path, made and opened with the default options.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), create: CreateOptions::default(), open: OpenOptions::default() }
    }
}

/// A new qcow2 image in a file that takes each byte once, nearly in order, such as an upload. The data comes in the order of
/// the disk, with the tables behind it; the first cluster is written last, so that before the end there is no image. The
/// memory of tables is bounded.
#[derive(Clone)]
#[non_exhaustive]
pub struct StreamedTarget {
    /// The file, which is empty.
    pub file: File,
    /// How the image is made. `size`: of the sources together if `None`; may be more, not less. Backing files, external data
    /// files, encryption, lazy refcounts and preallocation are refused.
    pub create: CreateOptions,
    /// How clusters are compressed, if [`ConvertOptions::clusters`] says so.
    pub compress: CompressOptions,
    /// Where the tables lie. Default: behind what they map.
    pub tables: TablePlaces,
}

zebu_storage::option_setters!(StreamedTarget {
    create: CreateOptions,
    compress: CompressOptions,
    tables: TablePlaces
});

/// The places of the tables of an image in a file that can't be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum TablePlaces {
    /// Behind what they map. The header is written last, at the beginning of the file.
    #[default]
    Behind,
    /// In front: the file is written from its first byte to its last, as a pipe takes it. The sources' mappings are walked before, and
    /// clusters are not compressed.
    InFront,
}

impl StreamedTarget {
    /// An image in this file, with the default options.
    pub fn new(file: File) -> Self {
        let create = CreateOptions { format: Format::Qcow2, ..CreateOptions::default() };
        Self { file, create, compress: CompressOptions::default(), tables: TablePlaces::default() }
    }
}

/// Where a conversion writes to.
#[derive(Clone)]
#[non_exhaustive]
pub enum ConvertTarget {
    /// A new image.
    New(Box<NewTarget>),
    /// A new image in a file of the caller's that can't be changed.
    Stream(Box<StreamedTarget>),
    /// An image that the caller opened for writing, and closes (`-n`). It is flushed at the end.
    Existing {
        /// The image; at least as large as the sources together.
        image: Image,
        /// Its content.
        content: TargetContent,
    },
}

impl ConvertTarget {
    /// Whether it is written in the order of the disk.
    pub(super) fn is_stream(&self) -> bool {
        match self {
            Self::New(new) => new.create.foreign.as_ref().is_some_and(NewForeign::is_stream),
            Self::Stream(_) => true,
            Self::Existing { .. } => false,
        }
    }

    /// Bytes of its clusters; `None`: the format has none.
    pub(super) fn cluster_size(&self) -> Option<NonZeroU64> {
        let (format, bytes) = match self {
            Self::New(new) => (new.create.format, new.create.cluster_size),
            Self::Stream(new) => (Format::Qcow2, new.create.cluster_size),
            Self::Existing { image, .. } => (image.format(), image.cluster_size()),
        };
        NonZeroU64::new(bytes).filter(|_| format == Format::Qcow2)
    }
}

/// A range of the source that could not be read.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SkippedRange {
    /// Offset in bytes on the target's disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Why.
    pub error: Error,
}

/// The result of a conversion. All figures in bytes of the virtual disk.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ConvertReport {
    /// Of the sources together.
    pub total: u64,
    /// Read into buffers.
    pub read: u64,
    /// Written from buffers.
    pub written: u64,
    /// Shared by reflink.
    pub reflinked: u64,
    /// Copied by the kernel.
    pub range_copied: u64,
    /// Not written, because it is zero, or left to the backing file.
    pub skipped: u64,
    /// Made to read as zero in a target that was not known to be zero.
    pub zeroed: u64,
    /// Unreadable, zero in the target.
    pub unreadable: u64,
    /// How many unreadable ranges there are; neighbours are one.
    pub unreadable_range_count: u64,
    /// The first of them (at most 1024), in order.
    pub unreadable_ranges: Vec<SkippedRange>,
    /// Bytes of the source's logical sector ([`Image::logical_sector_size`]), if the target does not say that its own is as
    /// large: its partition table counts in them.
    pub lost_logical_sector: Option<u32>,
}
