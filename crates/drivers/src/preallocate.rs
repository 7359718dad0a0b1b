//! Space ahead of what is written.

use crate::call::{answer, call, take_bufs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zebu_storage::sync::Mutex;
use zebu_storage::{
    Alignment, Background, Completer, Engine, FileId, IoBufs, IoError, Storage, StorageAbilities, StorageOp,
};

/// How much is set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PreallocateConfig {
    /// The file's new length is a multiple of this, in bytes.
    pub align: u64,
    /// Bytes set aside beyond a write past the end.
    pub size: u64,
}

impl Default for PreallocateConfig {
    fn default() -> Self {
        Self { align: 1 << 20, size: 128 << 20 }
    }
}

/// A file that is longer on the disk than it says, so that writes past its end find space. What nobody wrote is cut off
/// when it is closed.
pub struct Preallocate {
    shared: Arc<Shared>,
    worker: Background,
}

struct Shared {
    below: Arc<dyn Storage>,
    config: PreallocateConfig,
    /// The length that is told.
    told: AtomicU64,
    /// The length that the file has.
    real: Mutex<u64>,
}

impl Preallocate {
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn new(below: Arc<dyn Storage>, config: PreallocateConfig, engine: Engine) -> Result<Self, IoError> {
        let len = below.len();
        let shared = Arc::new(Shared { below, config, told: AtomicU64::new(len), real: Mutex::new(len) });
        Ok(Self { shared, worker: Background::small(engine)? })
    }
}

impl Shared {
    fn real(&self) -> u64 {
        *self.real.lock()
    }

    fn set_real(&self, len: u64) {
        *self.real.lock() = len;
    }

    async fn run(&self, op: StorageOp, mut done: Completer) {
        let bufs = take_bufs(&mut done);
        if let StorageOp::Write { offset, len } | StorageOp::ZeroRange { offset, len } = op {
            let end = offset + len;
            let real = self.real();
            if end > real {
                let wanted = end.saturating_add(self.config.size).next_multiple_of(self.config.align.max(1));
                let ahead = StorageOp::Allocate { offset: real, len: wanted - real };
                // Without it, the write grows the file itself.
                if self.below.abilities().contains(StorageAbilities::ALLOCATE)
                    && call(&*self.below, ahead, IoBufs::new()).await.1.is_ok()
                {
                    self.set_real(wanted);
                }
            }
            self.told.fetch_max(end, Ordering::AcqRel);
        }
        let (bufs, result) = call(&*self.below, op, bufs).await;
        if let (StorageOp::SetLen { len }, true) = (op, result.is_ok()) {
            self.told.store(len, Ordering::Release);
            self.set_real(len);
        }
        answer(done, bufs, result);
    }
}

impl Drop for Preallocate {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let told = shared.told.load(Ordering::Acquire);
        if shared.real() > told {
            // A file that stays too long is no harm: an image knows its end.
            let cut = self.worker.run(move |_| async move {
                let _ = call(&*shared.below, StorageOp::SetLen { len: told }, IoBufs::new()).await;
            });
            let _ = cut.wait();
        }
    }
}

impl Storage for Preallocate {
    fn len(&self) -> u64 {
        self.shared.below.len()
    }

    fn files(&self) -> Vec<FileId> {
        self.shared.below.files()
    }

    fn identity(&self) -> u64 {
        self.shared.below.identity()
    }

    fn alignment(&self) -> Alignment {
        self.shared.below.alignment()
    }

    fn abilities(&self) -> StorageAbilities {
        self.shared.below.abilities()
    }

    fn announce(&self, purpose: &'static str) {
        self.shared.below.announce(purpose);
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let shared = Arc::clone(&self.shared);
        drop(self.worker.run(move |_| async move { shared.run(op, done).await }));
    }

    fn cancel(&self) {
        self.shared.below.cancel();
    }
}
