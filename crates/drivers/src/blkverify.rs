//! Two disks that must stay the same.

use crate::call::{answer, call, take_bufs};
use std::sync::Arc;
use zebu_storage::{
    Alignment, Background, Completer, Engine, FileId, IoBuf, IoBufs, IoError, Storage, StorageAbilities,
    StorageOp,
};

/// Requests go to the disk under test and to a raw reference. A read that shows a difference is told and ends the
/// process, as QEMU's driver does.
pub struct Blkverify {
    raw: Arc<dyn Storage>,
    test: Arc<dyn Storage>,
    differs: Arc<dyn Fn(&str) + Send + Sync>,
    worker: Background,
}

impl Blkverify {
    /// `differs` is called with a message if the disks differ.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn new(
        raw: Arc<dyn Storage>,
        test: Arc<dyn Storage>,
        differs: impl Fn(&str) + Send + Sync + 'static,
        engine: Engine,
    ) -> Result<Self, IoError> {
        Ok(Self { raw, test, differs: Arc::new(differs), worker: Background::small(engine)? })
    }
}

fn copy_of(bufs: &IoBufs) -> IoBufs {
    let mut bytes = vec![0; bufs.len()];
    bufs.copy_to(0, &mut bytes);
    IoBuf::copy_of(&bytes).into()
}

/// The first byte in which they differ.
fn difference(left: &IoBufs, right: &IoBufs) -> Option<usize> {
    let bytes = |bufs: &IoBufs| {
        let mut bytes = vec![0; bufs.len()];
        bufs.copy_to(0, &mut bytes);
        bytes
    };
    let (left, right) = (bytes(left), bytes(right));
    left.iter().zip(&right).position(|(left, right)| left != right)
}

async fn run(
    raw: Arc<dyn Storage>,
    test: Arc<dyn Storage>,
    differs: Arc<dyn Fn(&str) + Send + Sync>,
    op: StorageOp,
    mut done: Completer,
) {
    let bufs = take_bufs(&mut done);
    let beside = copy_of(&bufs);
    if op == StorageOp::Flush {
        // The reference need not survive.
        let (bufs, result) = call(&*test, op, bufs).await;
        return answer(done, bufs, result);
    }
    if matches!(op, StorageOp::ExtentAt { .. }) {
        let (bufs, result) = call(&*test, op, bufs).await;
        return answer(done, bufs, result);
    }
    let (beside, of_raw) = call(&*raw, op, beside).await;
    let (bufs, of_test) = call(&*test, op, bufs).await;
    let (verb, offset, len) = match op {
        StorageOp::Read { offset, len } => ("read", offset, len),
        StorageOp::Write { offset, len } => ("write", offset, len),
        StorageOp::Punch { offset, len } | StorageOp::ZeroRange { offset, len } => ("zero", offset, len),
        _ => ("other", 0, 0),
    };
    if of_raw != of_test {
        differs(&format!("blkverify: {verb} offset {offset} bytes {len} return value mismatch"));
    }
    if verb == "read"
        && of_test.is_ok()
        && let Some(at) = difference(&beside, &bufs)
    {
        let at = offset + at as u64;
        differs(&format!("blkverify: {verb} offset {offset} bytes {len} contents mismatch at offset {at}"));
    }
    answer(done, bufs, of_test);
}

impl Storage for Blkverify {
    fn len(&self) -> u64 {
        self.test.len()
    }

    fn files(&self) -> Vec<FileId> {
        [self.raw.files(), self.test.files()].concat()
    }

    fn identity(&self) -> u64 {
        self.test.identity()
    }

    fn alignment(&self) -> Alignment {
        let (raw, test) = (self.raw.alignment(), self.test.alignment());
        Alignment {
            memory: raw.memory.max(test.memory),
            offset: raw.offset.max(test.offset),
            length: raw.length.max(test.length),
        }
    }

    fn abilities(&self) -> StorageAbilities {
        // Space is the business of one disk at a time; sizes are looked at once.
        (self.raw.abilities() & self.test.abilities())
            - StorageAbilities::SET_LEN
            - StorageAbilities::ALLOCATE
            - StorageAbilities::EXTENTS
    }

    fn announce(&self, purpose: &'static str) {
        self.test.announce(purpose);
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let (raw, test, differs) = (Arc::clone(&self.raw), Arc::clone(&self.test), Arc::clone(&self.differs));
        drop(self.worker.run(move |_| run(raw, test, differs, op, done)));
    }

    fn cancel(&self) {
        self.raw.cancel();
        self.test.cancel();
    }
}
