//! A disk without bytes.

use std::time::Duration;
use zebu_storage::{
    Background, Completer, Engine, IoError, Storage, StorageAbilities, StorageDone, StorageOp,
};

/// A disk that takes everything and keeps nothing. It always reads as zero, since memory of other requests is nobody's to
/// see; it says so beforehand only if it is told to.
pub struct NullDisk {
    size: u64,
    reads_zeroes: bool,
    latency: Duration,
    identity: u64,
    clock: Option<Background>,
}

impl NullDisk {
    /// Size that such a disk has if nobody says another, in bytes.
    pub const DEFAULT_SIZE: u64 = 1 << 30;

    /// A disk of `size` bytes whose answers take `latency`.
    ///
    /// # Errors
    /// With a latency: the system gives no thread.
    pub fn new(size: u64, reads_zeroes: bool, latency: Duration) -> Result<Self, IoError> {
        let clock = if latency.is_zero() { None } else { Some(Background::small(Engine::Threads)?) };
        Ok(Self { size, reads_zeroes, latency, identity: crate::fresh_identity(), clock })
    }
}

impl Storage for NullDisk {
    fn len(&self) -> u64 {
        self.size
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn abilities(&self) -> StorageAbilities {
        let all = StorageAbilities::all() - StorageAbilities::SET_LEN - StorageAbilities::ALLOCATE;
        // Holes are what is known to read as zero.
        if self.reads_zeroes { all } else { all - StorageAbilities::EXTENTS }
    }

    fn submit(&self, op: StorageOp, mut done: Completer) {
        let result = match op {
            StorageOp::Read { len, .. } => {
                let all = done.bufs().len();
                done.bufs_mut().fill(0, all, 0);
                StorageDone::Moved(len)
            }
            StorageOp::Write { len, .. } => StorageDone::Moved(len),
            StorageOp::ExtentAt { offset } => {
                StorageDone::Extent { len: self.size.saturating_sub(offset).max(1), hole: true }
            }
            _ => StorageDone::Done,
        };
        match &self.clock {
            None => done.finish(Ok(result)),
            Some(clock) => {
                let latency = self.latency;
                drop(clock.run(move |worker| async move {
                    worker.sleep(latency).await;
                    done.finish(Ok(result));
                }));
            }
        }
    }
}
