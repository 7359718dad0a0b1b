//! An image that keeps what is read from its backing files.

use crate::call::{answer, call, take_bufs};
use std::sync::Arc;
use zebu_engine::{ExtentKind, Image};
use zebu_storage::sync::Mutex;
use zebu_storage::{
    Alignment, Background, Completer, Engine, FileId, IoBuf, IoBufs, IoError, Storage, StorageAbilities,
    StorageOp, Worker,
};

/// Bytes that are copied at once.
const STEP: u64 = 1 << 20;

/// An image into which reads copy what it has not itself. All of its requests must come this way.
pub struct CopyOnRead {
    shared: Arc<Shared>,
    worker: Background,
}

struct Shared {
    /// For looks at what is allocated.
    image: Image,
    below: Arc<dyn Storage>,
    busy: Mutex<Busy>,
}

/// Ranges of requests under way. A copy must not land on what a write brought after it was read.
#[derive(Default)]
struct Busy {
    ranges: Vec<(u64, u64)>,
}

impl CopyOnRead {
    /// A filter above `below`, which is `image` or other filters above it.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn new(image: Image, below: Arc<dyn Storage>, engine: Engine) -> Result<Self, IoError> {
        let worker = Background::small(engine)?;
        let shared = Arc::new(Shared { image, below, busy: Mutex::default() });
        Ok(Self { shared, worker })
    }
}

impl Shared {
    fn cluster(&self) -> u64 {
        self.image.cluster_size().max(512)
    }

    /// Waits until no other request touches the clusters of the range, and takes them.
    async fn take(&self, worker: &Worker, offset: u64, len: u64) -> (u64, u64) {
        let start = offset / self.cluster() * self.cluster();
        let end = (offset + len).next_multiple_of(self.cluster());
        loop {
            {
                let mut busy = self.busy.lock();
                if busy.ranges.iter().all(|&(from, to)| to <= start || end <= from) {
                    busy.ranges.push((start, end));
                    return (start, end);
                }
            }
            worker.sleep(std::time::Duration::from_micros(100)).await;
        }
    }

    fn release(&self, taken: (u64, u64)) {
        let mut busy = self.busy.lock();
        if let Some(at) = busy.ranges.iter().position(|range| *range == taken) {
            busy.ranges.swap_remove(at);
        }
    }

    /// Copies into the image what it has not of a range of whole clusters.
    async fn fill(&self, worker: &Worker, start: u64, end: u64) -> Result<(), i32> {
        let end = end.min(self.image.virtual_size());
        let mut at = start;
        while at < end {
            let extent = self.image.extent(worker, at, end - at).await.map_err(|error| error.errno())?;
            let next = extent.end();
            if extent.depth == 0 && extent.kind != ExtentKind::Unallocated {
                at = next;
            } else if extent.is_zero() && self.below.abilities().contains(StorageAbilities::ZERO_RANGE) {
                self.below.announce("cor_write");
                let op = StorageOp::ZeroRange { offset: at, len: next - at };
                call(&*self.below, op, IoBufs::new()).await.1?;
                at = next;
            } else {
                let len = (next - at).min(STEP);
                let read = StorageOp::Read { offset: at, len };
                let (bufs, read) = call(&*self.below, read, IoBuf::zeroed(len as usize).into()).await;
                read?;
                self.below.announce("cor_write");
                call(&*self.below, StorageOp::Write { offset: at, len }, bufs).await.1?;
                at += len;
            }
        }
        Ok(())
    }

    async fn run(&self, worker: &Worker, op: StorageOp, mut done: Completer) {
        let bufs = take_bufs(&mut done);
        let (bufs, result) = match op {
            StorageOp::Read { offset, len } => {
                let taken = self.take(worker, offset, len).await;
                let (bufs, read) = call(&*self.below, op, bufs).await;
                let filled = match read {
                    Ok(_) => self.fill(worker, taken.0, taken.1).await,
                    Err(_) => Ok(()),
                };
                self.release(taken);
                (bufs, filled.and(read))
            }
            StorageOp::Write { offset, len }
            | StorageOp::Punch { offset, len }
            | StorageOp::ZeroRange { offset, len } => {
                let taken = self.take(worker, offset, len).await;
                let ended = call(&*self.below, op, bufs).await;
                self.release(taken);
                ended
            }
            op => call(&*self.below, op, bufs).await,
        };
        answer(done, bufs, result);
    }
}

impl Storage for CopyOnRead {
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

    fn discard_granularity(&self) -> u64 {
        self.shared.below.discard_granularity()
    }

    fn announce(&self, purpose: &'static str) {
        self.shared.below.announce(purpose);
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let shared = Arc::clone(&self.shared);
        drop(self.worker.run(move |worker| async move { shared.run(&worker, op, done).await }));
    }

    fn cancel(&self) {
        self.shared.below.cancel();
    }
}
