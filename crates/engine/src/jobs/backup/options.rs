//! Options and report of a backup.

use crate::jobs::convert::SkippedRange;
use crate::jobs::pace::Speed;
use crate::progress::JobControl;
use crate::{CacheMode, CompressOptions, Compression, Format, RefPolicy, Remote};
use std::path::PathBuf;
use zebu_qcow2::BackupId;
use zebu_storage::LockWait;

/// Where a backup that was interrupted goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Interrupted {
    /// It begins anew.
    #[default]
    Restart,
    /// It goes on from what was durable. The source must not have changed since.
    Resume,
}

/// Whether the copy of an encrypted disk may be one in plain text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Decryption {
    /// It may not: the job fails before it makes anything.
    #[default]
    Refuse,
    /// It may.
    Allow,
}

/// The answer to a source that can't be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SourceErrors {
    /// The backup fails.
    #[default]
    Stop,
    /// The smallest unreadable ranges become zero in the backup, and are reported.
    Skip,
}

/// The use that is made of the bitmap that the options name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BitmapUse {
    /// An increment reads only what it marks.
    #[default]
    Believe,
    /// It is not asked. It starts at this backup: one that is inconsistent is removed at the beginning, and one that is missing is
    /// added at the end. An increment needs the manifest of the previous backup.
    Restart,
}

/// The id that a backup is marked with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BackupIdentity {
    /// A new one, if there is a bitmap that goes on from it.
    #[default]
    WithBitmap,
    /// A new one.
    New,
    /// That of a backup that it takes the place of.
    Same(BackupId),
}

/// The backup that an increment stands on.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PreviousBackup {
    /// The image; the increment names it as its backing file.
    pub image: PathBuf,
    /// Its manifest. By a bitmap, an increment is made without one too; then it has none itself.
    pub manifest: Option<PathBuf>,
    /// All qcow2 images below it, the next one first, in place of those that the images name. Default: `None`.
    pub below: Option<Vec<PathBuf>>,
    /// The name of the backing file that the increment gets. Default: `None`, which is the path from the target to `image`.
    pub name: Option<String>,
    /// The opener of `image` and `below`, where they are no local files. Default: there is none.
    pub remote: Remote,
}

zebu_storage::option_setters!(PreviousBackup {
    manifest: impl Into<Option<PathBuf>>,
    below: impl Into<Option<Vec<PathBuf>>>,
    name: impl Into<Option<String>>,
    remote: Remote,
});

impl PreviousBackup {
    /// The backup in this file, whose manifest is not known.
    pub fn new(image: impl Into<PathBuf>) -> Self {
        Self { image: image.into(), manifest: None, below: None, name: None, remote: Remote::default() }
    }

    /// Backing files of the images from `image` on, where the caller gives all of them.
    pub(super) fn given_below(&self) -> Vec<Option<(PathBuf, Option<Format>)>> {
        let Some(below) = &self.below else { return Vec::new() };
        let images = below.iter().map(|path| Some((path.clone(), Some(Format::Qcow2))));
        // Below the lowest there is nothing.
        images.chain([Some((PathBuf::new(), None))]).collect()
    }
}

/// How a backup is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BackupOptions {
    /// The backup; it must not exist. Until it is complete, it is written as `.NAME.zebu-partial` beside.
    pub target: PathBuf,
    /// Cache mode of the target. Default: [`CacheMode::None`], which is O_DIRECT.
    pub cache: CacheMode,
    /// Bytes of a cluster of the target. Default: 64 KiB.
    pub cluster_size: u64,
    /// How clusters are compressed. Default: [`Compression::Zlib`].
    pub compression: Compression,
    /// The same in detail. `gather_memory` is set by the job. Default: those of [`CompressOptions`].
    pub compress: CompressOptions,
    /// Where the hashes of all clusters are written to, if anywhere. Default: `None`.
    pub manifest: Option<PathBuf>,
    /// The persistent dirty bitmap that says what has changed since the previous backup; an increment reads nothing
    /// else. When the backup is complete it is cleared, or added by a full backup if there is none of this name: the
    /// source has to be open for writing, and nobody else writes to it meanwhile. Where something could not be read
    /// ([`SourceErrors::Skip`]) it is not cleared, and that is dirty in it. The backup is marked with an id
    /// ([`crate::Image::backup_id`]) that the bitmap goes on from. Default: `None`.
    pub bitmap: Option<String>,
    /// Whether the bitmap is believed. Default: [`BitmapUse::Believe`].
    pub bitmap_use: BitmapUse,
    /// The id that the backup is marked with. Default: [`BackupIdentity::WithBitmap`].
    pub identity: BackupIdentity,
    /// For an increment: what it stands on. Only clusters whose hash has changed are written.
    /// Default: `None`: a full backup.
    pub previous: Option<PreviousBackup>,
    /// Which files that the previous backup names in turn may be opened. Default: [`RefPolicy::Local`].
    pub refs: RefPolicy,
    /// Patience with the writes of an earlier backup to the same target whose process is gone. Default: about a second.
    pub lock_wait: LockWait,
    /// Bytes of buffers: of reads, and of what is gathered. At least 4 clusters and 4 MiB. Default: 64 MiB.
    pub buffer_memory: usize,
    /// The treatment of an earlier backup to the same target that was interrupted. Default: [`Interrupted::Restart`].
    pub interrupted: Interrupted,
    /// Whether the backup of an encrypted disk may hold its plain text. A backup is compressed, so it can't be encrypted.
    /// Default: [`Decryption::Refuse`].
    pub decryption: Decryption,
    /// The answer to a source that can't be read. Default: [`SourceErrors::Stop`].
    pub source_errors: SourceErrors,
    /// How fast it goes: [`Speed::Full`] at first. Its reads wait behind its own hashing, which looks like a busy disk.
    /// Default: [`Speed::Full`].
    pub speed: Speed,
    /// Watching, slowing and stopping. Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(BackupOptions {
    target: impl Into<PathBuf>,
    cache: CacheMode,
    cluster_size: u64,
    compression: Compression,
    compress: CompressOptions,
    manifest: impl Into<Option<PathBuf>>,
    bitmap: impl Into<Option<String>>,
    bitmap_use: BitmapUse,
    identity: BackupIdentity,
    previous: impl Into<Option<PreviousBackup>>,
    refs: RefPolicy,
    lock_wait: LockWait,
    buffer_memory: usize,
    interrupted: Interrupted,
    source_errors: SourceErrors,
    decryption: Decryption,
    speed: Speed,
    control: JobControl,
});

impl BackupOptions {
    /// A full backup to `target`, with O_DIRECT, in zlib clusters of 64 KiB, with 64 MiB of buffers.
    pub fn new(target: impl Into<PathBuf>) -> Self {
        Self {
            target: target.into(),
            cache: CacheMode::None,
            cluster_size: 64 << 10,
            compression: Compression::Zlib,
            compress: CompressOptions::default(),
            manifest: None,
            bitmap: None,
            bitmap_use: BitmapUse::default(),
            identity: BackupIdentity::default(),
            previous: None,
            refs: RefPolicy::default(),
            lock_wait: LockWait::default(),
            buffer_memory: 64 << 20,
            interrupted: Interrupted::default(),
            decryption: Decryption::default(),
            source_errors: SourceErrors::default(),
            speed: Speed::Full,
            control: JobControl::default(),
        }
    }
}

impl BackupOptions {
    /// Whether the hash of every cluster is known in the end.
    pub(super) fn knows_all_hashes(&self) -> bool {
        self.bitmap.is_none() || self.previous.as_ref().is_none_or(|previous| previous.manifest.is_some())
    }
}

/// The result of a backup. Figures in bytes of the virtual disk where nothing else is said.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct BackupReport {
    /// Whether the source is encrypted, so that the backup holds its plain text.
    pub decrypted: bool,
    /// Of the source.
    pub total: u64,
    /// Where it went on, if it was resumed.
    pub resumed_at: u64,
    /// Read from the source.
    pub read: u64,
    /// Written to the backup.
    pub written: u64,
    /// Left out because it is zero.
    pub zero: u64,
    /// Left out because the previous backup holds it.
    pub unchanged: u64,
    /// Unreadable, zero in the backup.
    pub unreadable: u64,
    /// The first unreadable ranges (at most 1024), in order. Those from before an interruption are among them.
    pub unreadable_ranges: Vec<SkippedRange>,
    /// How many there are in all.
    pub unreadable_range_count: u64,
    /// Compared with the previous backup, because the bitmap did not tell that it goes on from it: all that the bitmap calls
    /// unchanged. 0 otherwise.
    pub compared: u64,
    /// The bitmap that was not cleared because something could not be read: that is dirty in it, so that the next
    /// increment reads it again.
    pub kept_bitmap: Option<String>,
    /// Bytes of the backup's file.
    pub file_length: u64,
    /// The BLAKE3 hash of the disk (of the hashes of its clusters). None for an increment without a manifest of the
    /// previous backup: most of it was not read.
    pub disk_hash: Option<String>,
}
