//! Remedies for errors, as values: a program has its own words and options for them.

use std::path::PathBuf;

/// A choice of the caller that would let a refused request succeed. The message of the error says it in plain words.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// [`crate::jobs::Decryption::Allow`], or an encrypted copy made by [`crate::jobs::convert`].
    AllowDecryption,
    /// [`crate::HeaderCosts::Unbounded`], for a header that is trusted.
    AllowHeaderCosts,
    /// [`crate::OpenOptions::backing`] with the format that the backing file has, or raw.
    NameFormatOfBase,
    /// The image repaired: [`crate::check::check`] with [`crate::check::Repair`].
    Repair,
    /// Unreadable parts passed over: [`crate::jobs::ReadErrors::Zero`], [`crate::jobs::SourceErrors::Skip`].
    PassOver,
    /// Leaked space given back: [`crate::check::check`] with [`crate::check::Repair::Leaks`].
    RepairLeaks,
    /// [`crate::Shrink::Allow`].
    AllowShrinking,
    /// [`crate::RefPolicy::Local`].
    AllowLocalReferences,
    /// [`crate::RefPolicy::Within`] this directory.
    AllowReferencesWithin(PathBuf),
    /// [`crate::RemoteRefs`] with this name's beginning.
    AllowRemoteReferences,
    /// The file that the image names, named by the caller: [`crate::OpenOptions::backing`],
    /// [`crate::OpenOptions::data_file`].
    NameFile,
    /// [`crate::jobs::Interrupted::Restart`].
    RestartBackup,
    /// A full backup without [`crate::jobs::BackupOptions::bitmap`].
    BackupWithoutBitmap,
    /// [`crate::jobs::CopyMode::Auto`].
    CopyData,
    /// [`crate::jobs::CopyBitmaps`] without those that are not consistent.
    SkipBrokenBitmaps,
    /// The bitmap emptied: [`crate::Image::clear_bitmap`].
    ClearBitmap,
    /// The bitmap removed: [`crate::Image::remove_bitmap`].
    RemoveBitmap,
    /// The bitmap made to record writes: [`crate::Image::set_bitmap_recording`].
    EnableBitmap,
    /// [`crate::OpenOptions::format`] with [`crate::Format::Raw`].
    NameFormatRaw,
    /// The seal taken away: [`crate::jobs::unseal`]. Of [`crate::ErrorKind::Exists`], with [`crate::jobs::Unsealing::Force`].
    Unseal,
    /// Another try once the disk has answered: until then, writes of a program that is gone may land.
    WaitForWrites,
}
