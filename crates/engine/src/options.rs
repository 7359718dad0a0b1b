//! How images are opened, created and changed: plain structs, filled in once.

use crate::compress::CompressOptions;
use crate::crypt::{Keys, NewEncryption};
use crate::remote::Remote;
use std::path::PathBuf;
use std::time::Duration;
use zebu_storage::LockWait;

/// The format of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// qcow2, versions 2 and 3.
    Qcow2,
    /// The bytes of the disk.
    Raw,
    /// A LUKS header (version 1 or 2) and the encrypted bytes of the disk behind it, in one file.
    Luks,
    /// A format of another program; guests only read such images.
    Foreign(ForeignFormat),
}

/// Formats of other programs.
pub use zebu_foreign::Format as ForeignFormat;
/// New images of other programs: what there is to choose.
pub use zebu_foreign::write::{
    Allocation, NewImage as NewForeign, NewVdi, NewVhdx, NewVmdk, NewVpc, VmdkAdapter, VmdkKind, VpcSize,
};

impl Format {
    /// The name that QEMU's options and JSON use.
    pub fn name(self) -> &'static str {
        match self {
            Format::Qcow2 => "qcow2",
            Format::Raw => "raw",
            Format::Luks => "luks",
            Format::Foreign(format) => format.name(),
        }
    }

    /// The format of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "qcow2" => Some(Format::Qcow2),
            "raw" => Some(Format::Raw),
            "luks" => Some(Format::Luks),
            _ => ForeignFormat::ALL.into_iter().find(|format| format.name() == name).map(Format::Foreign),
        }
    }

    /// Whether images in the format can be written by a guest.
    pub fn is_writable(self) -> bool {
        !matches!(self, Format::Foreign(_))
    }

    /// Whether images in the format can be made, by [`crate::Image::create`] and [`crate::jobs::convert`].
    pub fn can_be_made(self) -> bool {
        match self {
            Format::Qcow2 | Format::Raw | Format::Luks => true,
            Format::Foreign(format) => NewForeign::of(format).is_some(),
        }
    }
}

pub use zebu_storage::Access;

/// Caches between a write and the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CacheMode {
    /// O_DIRECT.
    None,
    /// Page cache.
    #[default]
    Writeback,
    /// Page cache, every write is followed by a flush.
    Writethrough,
    /// O_DIRECT, every write is followed by a flush.
    Directsync,
    /// Page cache, flushes do nothing.
    Unsafe,
}

impl CacheMode {
    /// Whether files are opened with O_DIRECT.
    pub fn is_direct(self) -> bool {
        matches!(self, CacheMode::None | CacheMode::Directsync)
    }
    /// Whether every write is followed by a flush.
    pub fn is_writethrough(self) -> bool {
        matches!(self, CacheMode::Writethrough | CacheMode::Directsync)
    }
}

/// Which files that an image names (backing file, data file) may be opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RefPolicy {
    /// None.
    None,
    /// Plain paths within the directory of the naming image.
    #[default]
    Local,
    /// As `Local`, and plain paths within these directories.
    Within(Vec<PathBuf>),
    /// Any plain path. (Names with a protocol are no plain paths: [`crate::RemoteRefs`] has them.)
    All,
}

/// How a recycled cluster, of which a request writes a part, gets its zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ZeroPolicy {
    /// By size of the padding and file system.
    #[default]
    Auto,
    /// One padded write.
    Write,
    /// Zero-range, then the write.
    Fallocate,
}

/// Whether locks are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// QEMU's lock bytes are taken.
    #[default]
    Locked,
    /// No lock is taken (reading only).
    Unlocked,
}

/// Whether the backing files are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Chain {
    /// The whole chain, as the policy allows.
    #[default]
    Follow,
    /// Only this image (`info`, `check`): what is not allocated in it reads as zero.
    TopOnly,
}

/// The purpose of an opening.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Purpose {
    /// Reading and, with [`Access::ReadWrite`], writing guest data.
    #[default]
    Io,
    /// Looking at the header only: no guest data is read, no other file opened.
    Inspect,
}

/// Whether runs of clusters that follow each other, and who owns what in a chain, are indexed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExtentIndex {
    /// They are.
    #[default]
    On,
    /// Every lookup goes to the slices of the tables, image by image (to measure those alone).
    Off,
}

/// How the name of a base is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BaseName {
    /// As seen from the working directory, or as the image above it names it.
    #[default]
    FromEither,
    /// As the image above it names it: relative names begin at that image.
    FromImage,
}

/// Bytes by which the format of an image is found out that nobody named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Probe {
    /// The first ones of the file, and the last ones.
    #[default]
    BothEnds,
    /// The first ones, as QEMU does. The last ones count only for a name that ends with `.dmg`: the owner of a raw disk
    /// can't choose the format by its last sector.
    Start,
}

/// Treatment of metadata that a change finds damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DamageMark {
    /// The change fails; the image stays as it is.
    #[default]
    Leave,
    /// The image is marked as corrupt as well (a bit in the header of version 3), and nothing more is written in this opening.
    /// Until a repair, it can be opened for reading only, by other programs too.
    Set,
}

/// How an image is opened.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Bytes by which a format that is not given is probed.
    pub probe: Probe,
    /// The format; probed if `None`. A raw image that was probed is only opened for reading, and what looks like an image
    /// of another format or like a packed file is refused ([`crate::ErrorKind::ForeignFormat`]).
    pub format: Option<Format>,
    /// Reading or writing.
    pub access: Access,
    /// Cache mode.
    pub cache: CacheMode,
    /// Which named files may be opened.
    pub refs: RefPolicy,
    /// The opener of names that lead to no local file, and which of them an image may name.
    pub remote: Remote,
    /// Whether locks are taken.
    pub sharing: Sharing,
    /// Patience with the writes of a program that had a file locked and is gone.
    pub lock_wait: LockWait,
    /// Whether backing files are opened.
    pub chain: Chain,
    /// Purpose.
    pub purpose: Purpose,
    /// An internal snapshot to show instead of the active state (by id, then by name); reading only.
    pub snapshot: Option<String>,
    /// Bytes for the mapping of the whole chain in memory: slices, index, tables. By the disk's size if `None`: all
    /// of it up to 32 MiB. Less than the tables and a slice for each queue (two at least) is refused.
    pub cache_size: Option<u64>,
    /// By how many queues (workers) the image will be used at once: the cache has room for a slice of each. 0 and 1 are taken
    /// for two: a change needs a slice of a table and one of refcounts.
    pub queues: u32,
    /// How long cached mapping is kept that is not used; 10 minutes if `None`, without end if 0.
    pub cache_clean_interval: Option<Duration>,
    /// Whether long runs are kept in an index of their own.
    pub extent_index: ExtentIndex,
    /// Bytes of one L2 slice; a power of two from 512 to the cluster size; 4096 (or the cluster) if `None`.
    pub slice_size: Option<u32>,
    /// How recycled clusters are zeroed.
    pub zero_policy: ZeroPolicy,
    /// Backing file to use instead of the one that the image names (and its format). An empty path is none.
    pub backing: Option<(PathBuf, Option<Format>)>,
    /// The same for the images below, one step down the chain after the other. `None` is what that image names.
    pub backing_below: Vec<Option<(PathBuf, Option<Format>)>>,
    /// Formats of the backing files that images name, in place of the formats they name: one step down the chain after the
    /// other. A file given in `backing` or `backing_below` brings its own.
    pub backing_formats: Vec<Option<Format>>,
    /// External data file to use instead of the one that the image names.
    pub data_file: Option<PathBuf>,
    /// How clusters are compressed.
    pub compress: CompressOptions,
    /// Keys of the encrypted images of the chain.
    pub keys: Keys,
    /// Treatment of metadata that a change finds damaged.
    pub damage: DamageMark,
}

impl OpenOptions {
    /// Costs that the header of an encrypted image may ask for. Nothing is computed for an image that is only looked at.
    pub(crate) fn header_limits(&self) -> zebu_luks::Limits {
        if self.purpose == Purpose::Inspect { zebu_luks::Limits::NONE } else { self.keys.limits() }
    }

    /// The format of the backing file that the top image names, if the caller gave it.
    pub(crate) fn backing_format(&self) -> Option<Format> {
        self.backing_formats.first().copied().flatten()
    }

    /// Options of the image so many steps below the top.
    pub(crate) fn at_depth(&self, depth: usize) -> Self {
        let Some(above) = depth.checked_sub(1) else { return self.clone() };
        Self {
            access: Access::ReadOnly,
            snapshot: None,
            backing: self.backing_below.get(above).cloned().flatten(),
            backing_below: self.backing_below.iter().skip(depth).cloned().collect(),
            backing_formats: self.backing_formats.iter().skip(depth).copied().collect(),
            data_file: None,
            ..self.clone()
        }
    }
}

zebu_storage::option_setters!(OpenOptions {
    format: impl Into<Option<Format>>,
    access: Access,
    cache: CacheMode,
    refs: RefPolicy,
    remote: Remote,
    sharing: Sharing,
    lock_wait: LockWait,
    chain: Chain,
    purpose: Purpose,
    snapshot: impl Into<Option<String>>,
    cache_size: impl Into<Option<u64>>,
    queues: u32,
    cache_clean_interval: impl Into<Option<Duration>>,
    extent_index: ExtentIndex,
    slice_size: impl Into<Option<u32>>,
    zero_policy: ZeroPolicy,
    backing: impl Into<Option<(PathBuf, Option<Format>)>>,
    backing_below: Vec<Option<(PathBuf, Option<Format>)>>,
    backing_formats: Vec<Option<Format>>,
    data_file: impl Into<Option<PathBuf>>,
    compress: CompressOptions,
    keys: Keys,
    damage: DamageMark,
    probe: Probe,
});

/// A file that the caller has opened, and locked as it sees fit, to be an image of a chain.
#[derive(Clone)]
#[non_exhaustive]
pub struct OpenedFile {
    /// The image file.
    pub file: zebu_storage::File,
    /// Its external data file, if it has one.
    pub data_file: Option<zebu_storage::File>,
    /// Its format.
    pub format: Format,
}

zebu_storage::option_setters!(OpenedFile { data_file: impl Into<Option<zebu_storage::File>> });

impl OpenedFile {
    /// The image file and its format, without an external data file.
    pub fn new(file: zebu_storage::File, format: Format) -> Self {
        Self { file, data_file: None, format }
    }
}

/// How space is set aside when an image is made or grown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// Not.
    #[default]
    Off,
    /// The tables; the data stays sparse.
    Metadata,
    /// Tables, and space reserved with fallocate.
    Falloc,
    /// Tables, and zeroes written.
    Full,
}

/// Whether clusters are compressed with deflate or zstd.
pub use zebu_qcow2::Compression;

/// How an image is created.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CreateOptions {
    /// Format.
    pub format: Format,
    /// Bytes of the virtual disk; rounded up to 512. From the backing file if `None`.
    pub size: Option<u64>,
    /// Bytes of a cluster: a power of two, 512 to 2 MiB.
    pub cluster_size: u64,
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// Bits of a refcount: 1, 2, 4, ... 64.
    pub refcount_bits: u32,
    /// Extended L2 entries (subclusters).
    pub extended_l2: bool,
    /// Compression of compressed clusters.
    pub compression: Compression,
    /// Sets the lazy-refcounts flag (kept for other programs; zebu never enters that mode).
    pub lazy_refcounts: bool,
    /// Backing file, as written into the image, and its format. An empty name is none.
    pub backing: Option<(String, Format)>,
    /// External data file, as written into the image.
    pub data_file: Option<String>,
    /// The data file is a valid raw image by itself.
    pub data_file_raw: bool,
    /// Preallocation.
    pub preallocation: Preallocation,
    /// XFS extent size hint in bytes: a multiple of the file system's block size. 0 takes away what the directory
    /// hands down. `None`: 1 MiB on XFS. Other file systems have none and refuse any but 0.
    pub extent_size_hint: Option<u32>,
    /// Turns copy-on-write of the files off on btrfs; no effect on other file systems.
    pub nocow: bool,
    /// Cache mode used while creating.
    pub cache: CacheMode,
    /// Which files may be opened to look up the backing file's size.
    pub refs: RefPolicy,
    /// Patience with the writes of a program that had a file locked and is gone, if one exists that is overwritten.
    pub lock_wait: LockWait,
    /// How the image is encrypted. Needed for the format luks; raw images can't be.
    pub encryption: Option<NewEncryption>,
    /// How an image of another program is made; as its format usually is if `None`. Of the other options, `size`, `cache`,
    /// `extent_size_hint` and `nocow` apply to it.
    pub foreign: Option<NewForeign>,
    /// The opener of names that lead to no local file. A disk of theirs is overwritten, as a block device is.
    pub remote: Remote,
}

zebu_storage::option_setters!(CreateOptions {
    format: Format,
    size: impl Into<Option<u64>>,
    cluster_size: u64,
    version: u32,
    refcount_bits: u32,
    extended_l2: bool,
    compression: Compression,
    lazy_refcounts: bool,
    backing: impl Into<Option<(String, Format)>>,
    data_file: impl Into<Option<String>>,
    data_file_raw: bool,
    preallocation: Preallocation,
    extent_size_hint: impl Into<Option<u32>>,
    nocow: bool,
    cache: CacheMode,
    refs: RefPolicy,
    lock_wait: LockWait,
    encryption: impl Into<Option<NewEncryption>>,
    foreign: impl Into<Option<NewForeign>>,
    remote: Remote,
});

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            format: Format::Qcow2,
            size: None,
            cluster_size: 65536,
            version: 3,
            refcount_bits: 16,
            extended_l2: false,
            compression: Compression::Zlib,
            lazy_refcounts: false,
            backing: None,
            data_file: None,
            data_file_raw: false,
            preallocation: Preallocation::Off,
            extent_size_hint: None,
            nocow: false,
            cache: CacheMode::Writeback,
            refs: RefPolicy::All,
            lock_wait: LockWait::default(),
            encryption: None,
            foreign: None,
            remote: Remote::default(),
        }
    }
}

/// Whether a write is durable when it completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// After the next flush.
    #[default]
    Volatile,
    /// When it completes (FUA).
    Durable,
}

/// The treatment of allocated space when zeroing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroMode {
    /// The space stays allocated.
    Keep,
    /// The space may be given back.
    #[default]
    Unmap,
}

/// Whether a disk may become smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Shrink {
    /// It may not.
    #[default]
    Refuse,
    /// It may; what lies past the new end is lost.
    Allow,
}
