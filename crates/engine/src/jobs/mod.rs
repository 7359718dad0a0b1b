//! Jobs: work on whole images, built from [`crate::Image`]'s requests.
//!
//! Every job is an `async fn` that runs on the [`crate::storage::Worker`] it is given, takes its options in one
//! struct with sensible defaults, can be watched and cancelled through a [`JobControl`], and keeps to a bound of
//! memory that its options state.

mod amend;
mod backing_name;
mod backup;
mod buffers;
mod checkpoint;
mod clone;
mod commit;
mod compare;
mod convert;
mod disk_hash;
mod fate;
mod file_snapshot;
mod fork;
mod hydrate;
mod key_slots;
mod live_backup;
mod manifest;
mod map;
mod measure;
mod origin;
mod pace;
mod page_cache;
mod pipeline;
mod queue;
mod rebase;
mod reset;
mod seals;
mod staging;
mod status;
mod two_disks;
mod unfinished;
mod unseal;
mod verify;
mod zeros;

pub use crate::new_files::remove_unfinished_files;
pub use crate::progress::{Cancel, JobControl, Phase, Progress};
pub use amend::{AmendOptions, amend};
pub use backing_name::backing_name;
pub use backup::{
    BackupIdentity, BackupOptions, BackupReport, BitmapUse, Decryption, Interrupted, PreviousBackup,
    SourceErrors, StreamedBackup, backup, backup_streamed,
};
pub use checkpoint::{Checkpoint, CheckpointOptions, CheckpointReport, CheckpointSource, FrozenDisk};
pub use clone::{CloneMethod, CloneMode, CloneOptions, CloneReport, clone_image};
pub use commit::{AfterCommit, CommitOptions, CommitReport, commit, commit_images};
pub use compare::{
    CompareError, CompareOptions, CompareReport, CompareStage, Comparison, Strictness, compare,
};
pub use convert::{
    ConvertOptions, ConvertReport, ConvertTarget, CopyBitmaps, CopyMode, Identities, NewTarget, PlaceOrder,
    ReadErrors, SkippedRange, SourceEnd, StreamedTarget, TablePlaces, TargetClusters, TargetContent, convert,
};
pub use file_snapshot::{NewFile, file_snapshot};
pub use fork::{ForkDisk, ForkError, ForkReport, fork};
pub use hydrate::{AfterHydration, HydrateOptions, HydrateReport, hydrate, read_tables_ahead};
pub use key_slots::{change_key_slots, change_key_slots_in};
pub use live_backup::{
    BackupEnd, Copied, LiveBackup, LiveBackupOptions, LiveBackupReport, LiveBitmap, OnCopyError,
};
pub use manifest::{ManifestIndex, ManifestRun};
pub use map::{MapEntry, MapOptions, Mapper};
pub use measure::{Measurement, measure_image, measure_size};
pub use pace::Speed;
pub use page_cache::{UnaskedWrites, drop_pages, reads_best_direct};
pub use rebase::{RebaseOptions, RebaseReport, rebase};
pub use reset::reset;
pub use seals::follow_seals;
pub use unfinished::UnfinishedImage;
pub use unseal::{Unsealing, unseal};
pub use verify::{BadRange, VerifyOptions, VerifyReport, verify};
