//! A blob that is read by ranges, and compared with its hashes.

use crate::hashes::Hashes;
use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use zebu_storage::{Completer, FileId, IoBuf, Storage, StorageAbilities, StorageDone, StorageOp};

/// Blocks that were compared and are kept, so that small reads of one compare it once.
const KEPT: usize = 4;

/// While what it returns lives, reads below are not answered from copies.
type Afresh = Box<dyn Fn() -> Box<dyn Any + Send> + Send + Sync>;

/// A blob of which every block is compared with its hash before anybody gets a byte of it. A block that is not what its hash says
/// is read again, past all copies, and is EIO if it is the same then.
pub struct HashedDisk(Arc<Shared>);

struct Shared {
    below: Arc<dyn Storage>,
    hashes: Hashes,
    afresh: Afresh,
    kept: Mutex<VecDeque<(u64, Arc<[u8]>)>>,
    failure: Mutex<Option<String>>,
}

/// A range that is read, and the blocks that it lies in.
#[derive(Clone, Copy)]
struct Wanted {
    offset: u64,
    len: u64,
    start: u64,
    end: u64,
}

impl HashedDisk {
    /// The blob in `below`. While the value that `afresh` returns lives, reads below are not answered from copies that were fetched
    /// before.
    pub fn new<G: Send + 'static>(
        below: Arc<dyn Storage>,
        hashes: Hashes,
        afresh: impl Fn() -> G + Send + Sync + 'static,
    ) -> Self {
        let afresh: Afresh = Box::new(move || Box::new(afresh()));
        let (kept, failure) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Shared { below, hashes, afresh, kept, failure }))
    }

    /// The first block that was not what its hash says, read twice.
    pub fn failure(&self) -> Option<String> {
        locked(&self.0.failure).clone()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Answers from a block that was compared before, if that has all.
    fn answer_from_kept(&self, wanted: Wanted, done: &mut Completer) -> bool {
        let kept = locked(&self.kept);
        let Some((_, bytes)) = kept
            .iter()
            .find(|(start, bytes)| *start == wanted.start && wanted.start + bytes.len() as u64 == wanted.end)
        else {
            return false;
        };
        let from = (wanted.offset - wanted.start) as usize;
        done.bufs_mut().copy_from(0, &bytes[from..from + wanted.len as usize]);
        true
    }

    /// Reads the blocks; once more, with what `guard` is, if they are wrong at first.
    fn read(self: Arc<Self>, wanted: Wanted, guard: Option<Box<dyn Any + Send>>, done: Completer) {
        let op = StorageOp::Read { offset: wanted.start, len: wanted.end - wanted.start };
        let memory = IoBuf::zeroed((wanted.end - wanted.start) as usize);
        let below = Arc::clone(&self.below);
        let whole = Completer::new(op, memory.into(), move |mut bufs, result| {
            self.judge(wanted, guard, done, bufs.pop_part(), result.err());
        });
        below.submit(op, whole);
    }

    fn judge(
        self: Arc<Self>,
        wanted: Wanted,
        guard: Option<Box<dyn Any + Send>>,
        mut done: Completer,
        bytes: Option<IoBuf>,
        errno: Option<i32>,
    ) {
        let (Some(bytes), None) = (bytes, errno) else {
            done.finish(Err(errno.unwrap_or(libc::EIO)));
            return;
        };
        let bytes = bytes.as_slice();
        let Some(wrong) = self.hashes.wrong_block(wanted.start, bytes) else {
            let from = (wanted.offset - wanted.start) as usize;
            done.bufs_mut().copy_from(0, &bytes[from..from + wanted.len as usize]);
            self.keep_last(wanted, bytes);
            done.finish(Ok(StorageDone::Moved(wanted.len)));
            return;
        };
        if guard.is_none() {
            let guard = (self.afresh)();
            self.read(wanted, Some(guard), done);
            return;
        }
        locked(&self.failure).get_or_insert_with(|| {
            format!("the block at {wrong} is not what its hash says, read twice: reads of it fail")
        });
        done.finish(Err(libc::EIO));
    }

    /// Keeps the last block, which a reader that goes forward wants next.
    fn keep_last(&self, wanted: Wanted, bytes: &[u8]) {
        let block = self.hashes.block();
        let start = (wanted.end - 1) / block * block;
        let mut kept = locked(&self.kept);
        kept.retain(|(known, _)| *known != start);
        kept.push_front((start, bytes[(start - wanted.start) as usize..].into()));
        kept.truncate(KEPT);
    }
}

impl Storage for HashedDisk {
    fn len(&self) -> u64 {
        self.0.below.len()
    }

    fn identity(&self) -> u64 {
        self.0.below.identity()
    }

    fn files(&self) -> Vec<FileId> {
        self.0.below.files()
    }

    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::empty()
    }

    fn submit(&self, op: StorageOp, mut done: Completer) {
        let (offset, len) = match op {
            StorageOp::Read { offset, len } => (offset, len),
            StorageOp::Flush => return done.finish(Ok(StorageDone::Done)),
            _ => return done.finish(Err(libc::EOPNOTSUPP)),
        };
        let all = self.len();
        let Some(end) = offset.checked_add(len).filter(|end| *end <= all) else {
            return done.finish(Err(libc::EINVAL));
        };
        if len == 0 {
            return done.finish(Ok(StorageDone::Moved(0)));
        }
        let block = self.0.hashes.block();
        let wanted =
            Wanted { offset, len, start: offset / block * block, end: end.next_multiple_of(block).min(all) };
        if self.0.answer_from_kept(wanted, &mut done) {
            done.finish(Ok(StorageDone::Moved(len)));
        } else {
            Arc::clone(&self.0).read(wanted, None, done);
        }
    }

    fn announce(&self, purpose: &'static str) {
        self.0.below.announce(purpose);
    }

    fn cancel(&self) {
        self.0.below.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hashes::hashes_of;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    /// A disk in memory that has one wrong byte, until it is read afresh if that mends it.
    struct Memory {
        bytes: Vec<u8>,
        wrong: Option<usize>,
        is_mended: Arc<AtomicBool>,
        reads: Arc<AtomicUsize>,
    }

    impl Storage for Memory {
        fn len(&self) -> u64 {
            self.bytes.len() as u64
        }

        fn identity(&self) -> u64 {
            1
        }

        fn abilities(&self) -> StorageAbilities {
            StorageAbilities::empty()
        }

        fn submit(&self, op: StorageOp, mut done: Completer) {
            let StorageOp::Read { offset, len } = op else { return done.finish(Err(libc::EOPNOTSUPP)) };
            self.reads.fetch_add(1, Ordering::SeqCst);
            let mut bytes = self.bytes[offset as usize..(offset + len) as usize].to_vec();
            if let Some(wrong) = self.wrong.filter(|_| !self.is_mended.load(Ordering::SeqCst))
                && let Some(byte) = wrong.checked_sub(offset as usize).and_then(|at| bytes.get_mut(at))
            {
                *byte ^= 1;
            }
            done.bufs_mut().copy_from(0, &bytes);
            done.finish(Ok(StorageDone::Moved(len)));
        }
    }

    fn read(disk: &HashedDisk, offset: u64, len: u64) -> Result<Vec<u8>, i32> {
        let (sender, receiver) = channel();
        let op = StorageOp::Read { offset, len };
        let done = Completer::new(op, IoBuf::zeroed(len as usize).into(), move |bufs, result| {
            let mut bytes = vec![0; len as usize];
            bufs.copy_to(0, &mut bytes);
            sender.send(result.map(|_| bytes)).unwrap();
        });
        disk.submit(op, done);
        receiver.recv().unwrap()
    }

    #[test]
    fn every_block_is_compared_and_a_wrong_one_is_read_again() {
        let bytes: Vec<u8> = (0..100_001u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
        let len = bytes.len() as u64;
        let disk = |wrong, mends| {
            let (is_mended, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
            let memory =
                Memory { bytes: bytes.clone(), wrong, is_mended: is_mended.clone(), reads: reads.clone() };
            let afresh = move || is_mended.store(mends, Ordering::SeqCst);
            (HashedDisk::new(Arc::new(memory), hashes_of(&bytes), afresh), reads)
        };
        let (right, reads) = disk(None, false);
        for (offset, size) in
            [(0, len), (0, 1), (len - 1, 1), (65_535, 2), (70_000, 200_000), (131_072, 65_536)]
        {
            let expected = &bytes[offset as usize..(offset + size) as usize];
            assert!(read(&right, offset, size).as_deref() == Ok(expected), "{offset} {size}");
        }
        let before = reads.load(Ordering::SeqCst);
        assert!(read(&right, 131_080, 10).is_ok() && reads.load(Ordering::SeqCst) == before);
        assert_eq!(read(&right, len, 1), Err(libc::EINVAL));
        assert_eq!(right.failure(), None);

        let (mended, _) = disk(Some(70_000), true);
        assert!(read(&mended, 0, len).as_deref() == Ok(&bytes[..]) && mended.failure().is_none());
        let (wrong, _) = disk(Some(70_000), false);
        assert!(read(&wrong, 0, 65_536).is_ok());
        assert_eq!(read(&wrong, 65_536, 1), Err(libc::EIO));
        assert!(wrong.failure().unwrap().contains("65536"));
    }
}
