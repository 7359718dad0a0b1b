//! The disk that a guest sees: its size, and how it is written.

use crate::options::{CacheMode, ZeroPolicy};
use crate::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use zebu_storage::sabotage::{self, Fault};

/// The disk as its guest sees it.
///
/// Sizes are `SeqCst`, as the counters of [`crate::sync::ReadEpochs`] are: a reader that enters after a shrink began to wait
/// sees the smaller size.
#[derive(Debug)]
pub(crate) struct GuestDisk {
    size: AtomicU64,
    /// The size for requests. It is smaller only while the disk grows: what is added may still show a backing file.
    visible_size: AtomicU64,
    has_backing: AtomicBool,
    cache_mode: CacheMode,
    zero_policy: ZeroPolicy,
}

impl GuestDisk {
    pub(crate) fn new(size: u64, has_backing: bool, cache_mode: CacheMode, zero_policy: ZeroPolicy) -> Self {
        let (visible_size, has_backing) = (AtomicU64::new(size), AtomicBool::new(has_backing));
        Self { size: AtomicU64::new(size), visible_size, has_backing, cache_mode, zero_policy }
    }

    /// Bytes of the virtual disk.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size.load(SeqCst)
    }

    /// Bytes of the virtual disk that requests may use.
    #[inline]
    pub(crate) fn visible_size(&self) -> u64 {
        self.visible_size.load(SeqCst)
    }

    pub(crate) fn set_size(&self, size: u64) {
        self.size.store(size, SeqCst);
        self.visible_size.store(size, SeqCst);
    }

    /// Adds space that requests may not use before [`GuestDisk::set_size`].
    pub(crate) fn extend(&self, size: u64) {
        self.size.store(size, SeqCst);
        if sabotage::is(Fault::ShowGrowthEarly) {
            self.visible_size.store(size, SeqCst);
        }
    }

    /// Has the disk reach to `size` for whoever is alone with the image; requests may use what they could before.
    pub(crate) fn reach(&self, size: u64) {
        self.size.store(size, SeqCst);
    }

    /// Whether something shows, or is to show, where nothing is allocated.
    #[inline]
    pub(crate) fn has_backing(&self) -> bool {
        self.has_backing.load(Relaxed)
    }

    /// Announces a backing file: what has to be zero must be allocated as such from now on.
    pub(crate) fn expect_backing(&self) {
        self.has_backing.store(true, Relaxed);
    }

    pub(crate) fn cache_mode(&self) -> CacheMode {
        self.cache_mode
    }

    #[inline]
    pub(crate) fn zero_policy(&self) -> ZeroPolicy {
        self.zero_policy
    }
}
