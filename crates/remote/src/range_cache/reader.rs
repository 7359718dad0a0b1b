//! A read that waits for its blocks.

use super::record::BLOCK;
use zebu_storage::sync::Mutex;
use zebu_storage::{Completer, StorageDone, StorageOp};

/// A read that waits for its blocks, some from the local disk and some from the network.
pub(super) struct Reader(Mutex<Waiting>);

struct Waiting {
    /// `None` once answered.
    done: Option<Completer>,
    /// Blocks that are missing.
    missing: u64,
}

impl Reader {
    /// A read that has `blocks` blocks, not 0.
    pub(super) fn new(done: Completer, blocks: u64) -> Self {
        Self(Mutex::new(Waiting { done: Some(done), missing: blocks }))
    }

    /// Takes the bytes of block `number` from `from` on, counted from the block's beginning.
    pub(super) fn take(&self, number: u64, from: usize, bytes: &[u8]) {
        let mut waiting = self.0.lock();
        let Some(done) = &mut waiting.done else { return };
        let StorageOp::Read { offset, len } = done.op() else { return };
        let start = number * BLOCK + from as u64;
        let (first, last) = (offset.max(start), (offset + len).min(start + bytes.len() as u64));
        if first < last {
            let bytes = &bytes[(first - start) as usize..(last - start) as usize];
            done.bufs_mut().copy_from((first - offset) as usize, bytes);
        }
        waiting.missing = waiting.missing.saturating_sub(1);
        if waiting.missing == 0
            && let Some(done) = waiting.done.take()
        {
            drop(waiting);
            done.finish(Ok(StorageDone::Moved(len)));
        }
    }

    pub(super) fn fail(&self, errno: i32) {
        let done = self.0.lock().done.take();
        if let Some(done) = done {
            done.finish(Err(errno));
        }
    }

    /// Whether nobody waits any more.
    pub(super) fn is_cancelled(&self) -> bool {
        self.0.lock().done.as_ref().is_none_or(Completer::is_cancelled)
    }
}
