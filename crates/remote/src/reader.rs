//! A read that waits for parts of it.

use zebu_storage::sync::Mutex;
use zebu_storage::{Completer, StorageDone, StorageOp};

/// A read that waits for its parts, which come from anywhere, in any order.
pub(crate) struct Reader(Mutex<Waiting>);

struct Waiting {
    /// `None` once answered.
    done: Option<Completer>,
    /// Parts that are missing.
    missing: usize,
}

impl Reader {
    /// A read of which so many parts are missing, not 0.
    pub(crate) fn new(done: Completer, missing: usize) -> Self {
        Self(Mutex::new(Waiting { done: Some(done), missing }))
    }

    /// Takes a part of which it wants some bytes; they begin at `start` of the disk.
    pub(crate) fn take(&self, start: u64, bytes: &[u8]) {
        let mut waiting = self.0.lock();
        let Some(done) = &mut waiting.done else { return };
        copy(done, start, bytes);
        waiting.missing = waiting.missing.saturating_sub(1);
        if waiting.missing == 0
            && let Some(done) = waiting.done.take()
        {
            drop(waiting);
            let StorageOp::Read { len, .. } = done.op() else { return };
            done.finish(Ok(StorageDone::Moved(len)));
        }
    }

    pub(crate) fn fail(&self, errno: i32) {
        let done = self.0.lock().done.take();
        if let Some(done) = done {
            done.finish(Err(errno));
        }
    }

    /// Whether nobody waits any more.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.lock().done.as_ref().is_none_or(Completer::is_cancelled)
    }
}

/// Copies what a read wants of bytes that begin at `start` of the disk.
pub(crate) fn copy(done: &mut Completer, start: u64, bytes: &[u8]) {
    let StorageOp::Read { offset, len } = done.op() else { return };
    let (from, to) = (offset.max(start), (offset + len).min(start + bytes.len() as u64));
    if from < to {
        let bytes = &bytes[(from - start) as usize..(to - start) as usize];
        done.bufs_mut().copy_from((from - offset) as usize, bytes);
    }
}
