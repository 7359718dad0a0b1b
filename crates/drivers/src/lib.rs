//! Block drivers that stand between an image and its file, or between a program and its image: each is a
//! [`zebu_storage::Storage`].
//!
//! | driver | |
//! |---|---|
//! | [`FileDisk`], [`ImageDisk`] | a file, or an image of any format, as the bottom of a stack |
//! | [`NullDisk`] | no bytes at all (`null-co`, `null-aio`) |
//! | [`Blkdebug`] | errors, stops and limits on purpose |
//! | [`Blkverify`] | two disks that must stay the same |
//! | [`Part`] | a part of a disk (`raw` with an offset and a size) |
//! | [`Preallocate`] | space ahead of what is written |
//! | [`Verified`] | an image of which only what a manifest says is read |
//! | [`CopyOnRead`], [`Compress`] | an image that keeps what is read, or compresses what is written |
//!
//! None of this is in the way of an image that has no such driver.

mod blkdebug;
mod blkverify;
mod call;
mod compress;
mod copy_on_read;
mod file_disk;
mod image_disk;
mod null;
mod part;
mod preallocate;
mod verified;

pub use blkdebug::{Action, Blkdebug, BlkdebugConfig, IoTypes, Limits, Rule, event};
pub use blkverify::Blkverify;
pub use compress::Compress;
pub use copy_on_read::CopyOnRead;
pub use file_disk::FileDisk;
pub use image_disk::ImageDisk;
pub use null::NullDisk;
pub use part::Part;
pub use preallocate::{Preallocate, PreallocateConfig};
pub use verified::{Verified, VerifiedCounts, VerifiedHooks};

/// A number for a disk that is like no other.
pub fn fresh_identity() -> u64 {
    // Apart from those that storages make of their names.
    (1 << 63) | zebu_storage::fresh_number()
}
