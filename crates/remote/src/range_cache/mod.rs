//! Ranges of objects over the network on a local disk, so that each is fetched once.
//!
//! A [`RangeCache`] is a directory that several processes may share. [`RangeCache::disk`] stands above another storage,
//! and answers from the directory what was fetched before. Only an object whose version is known has a place there: its
//! [`ObjectVersion`] is the key.
//!
//! A block counts as present only if its bytes have the sum that is noted for it. That is looked at when a process reads
//! the block for the first time, so nothing needs a sync, and no crash can leave a wrong block that is shown.

mod directory;
mod disk;
mod object;
mod record;
mod uses;
mod version;
mod workers;

pub use directory::{CacheStats, RangeCache, RangeCacheOptions};
pub use disk::CachedDisk;
pub use version::ObjectVersion;
