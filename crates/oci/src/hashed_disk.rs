//! A blob that is read by ranges, and compared with its hashes, or with its digest once all of it was read.

use crate::digest::Digest;
use crate::hashes::Hashes;
use crate::whole::{Filling, Readers, Whole};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::channel;
use zebu_storage::sync::Mutex;
use zebu_storage::{Completer, FileId, IoBuf, Storage, StorageAbilities, StorageDone, StorageOp};

/// Blocks that were compared and are kept, so that small reads of one compare it once.
const KEPT: usize = 4;
/// Bytes that are asked for at once to compare the rest of a blob.
const AT_ONCE: u64 = 16 << 20;

/// While what it returns lives, reads below are not answered from copies.
type Afresh = Box<dyn Fn() -> Box<dyn Any + Send> + Send + Sync>;

/// A blob of which every block is compared with its hash before anybody gets a byte of it. A block that is not what its hash says
/// is read again, past all copies, and is EIO if it is the same then.
///
/// Of a blob without hashes, the digest is compared as soon as all of it was read; if it is another one, all later reads are EIO.
pub struct HashedDisk(Arc<Shared>);

/// The knowledge by which a blob is judged.
enum Known {
    Hashes(Hashes),
    Digest(Box<Whole>),
}

impl Known {
    /// Bytes of a block.
    fn block(&self) -> u64 {
        match self {
            Self::Hashes(hashes) => hashes.block(),
            Self::Digest(whole) => whole.block(),
        }
    }

    /// Judges blocks whose bytes begin at `offset`.
    fn judge(&self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        match self {
            Self::Hashes(hashes) => hashes.wrong_block(offset, bytes).map_or(Ok(()), |wrong| {
                Err(format!("the block at {wrong} is not what its hash says, read twice: reads of it fail"))
            }),
            Self::Digest(whole) => whole.take(offset, bytes),
        }
    }
}

struct Shared {
    below: Arc<dyn Storage>,
    known: Known,
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
        Self::of(below, Known::Hashes(hashes), afresh)
    }

    /// The blob in `below` that has no hashes, of which all must have `digest`. `readers` says how much of it will be wanted.
    pub fn without_hashes<G: Send + 'static>(
        below: Arc<dyn Storage>,
        digest: Digest,
        readers: Readers,
        afresh: impl Fn() -> G + Send + Sync + 'static,
    ) -> Self {
        let whole = Whole::new(digest, below.len(), readers);
        Self::of(below, Known::Digest(Box::new(whole)), afresh)
    }

    fn of<G: Send + 'static>(
        below: Arc<dyn Storage>,
        known: Known,
        afresh: impl Fn() -> G + Send + Sync + 'static,
    ) -> Self {
        let afresh: Afresh = Box::new(move || Box::new(afresh()));
        let (kept, failure) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Shared { below, known, afresh, kept, failure }))
    }

    /// The first reason why a read failed though there was an answer to it.
    pub fn failure(&self) -> Option<String> {
        self.0.failure.lock().clone()
    }

    /// Reads what nobody has read of a blob without hashes, and compares its digest. With hashes, there is nothing to do. `on`
    /// hears of bytes that are done and of how many there are, and may end the work (`false`).
    ///
    /// # Errors
    /// The digest is another one, or the rest can't be read: the reason, `None` if `on` ended the work.
    pub fn compare_rest(&self, on: &dyn Fn(u64, u64) -> bool) -> Result<(), Option<String>> {
        let Known::Digest(whole) = &self.0.known else { return Ok(()) };
        while let Some(first) = whole.next_missing() {
            if !on(whole.front(), self.len()) {
                return Err(None);
            }
            let until = self.len().min(first.start.saturating_add(AT_ONCE));
            let mut pieces = Vec::new();
            let mut start = first.start;
            while start < until {
                let len = (first.end - first.start).max(whole.block()).min(until - start);
                let (sender, receiver) = channel();
                let op = StorageOp::Read { offset: start, len };
                let done = Completer::new(op, IoBuf::zeroed(len as usize).into(), move |_, result| {
                    // Whoever has given up does not hear it.
                    let _ = sender.send(result.err());
                });
                // Past the blocks that are kept: of those, the digest may have dropped one.
                Arc::clone(&self.0).read(Wanted { offset: start, len, start, end: start + len }, None, done);
                pieces.push(receiver);
                start += len;
            }
            for piece in pieces {
                if let Some(errno) = piece.recv().unwrap_or(Some(libc::EIO)) {
                    let reason = whole.wrong().or_else(|| self.failure());
                    let unread = || {
                        let error = std::io::Error::from_raw_os_error(errno);
                        format!("the rest of the blob can't be read, so its digest is not known: {error}")
                    };
                    return Err(Some(reason.unwrap_or_else(unread)));
                }
            }
            if whole.front() <= first.start && whole.wrong().is_none() {
                return Err(Some(format!(
                    "the blob's digest is not known: reading it at {} leads nowhere",
                    first.start
                )));
            }
        }
        whole.wrong().map_or(Ok(()), |wrong| Err(Some(wrong)))
    }
}

impl Shared {
    /// Answers from a block that was compared before, if that has all.
    fn answer_from_kept(&self, wanted: Wanted, done: &mut Completer) -> bool {
        let kept = self.kept.lock();
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
        let Err(wrong) = self.known.judge(wanted.start, bytes) else {
            let from = (wanted.offset - wanted.start) as usize;
            done.bufs_mut().copy_from(0, &bytes[from..from + wanted.len as usize]);
            self.keep_last(wanted, bytes);
            done.finish(Ok(StorageDone::Moved(wanted.len)));
            self.fill();
            return;
        };
        // Where the digest of all is wrong, nobody knows which block it is.
        let is_final = matches!(&self.known, Known::Digest(whole) if whole.wrong().is_some());
        if guard.is_none() && !is_final {
            let guard = (self.afresh)();
            self.read(wanted, Some(guard), done);
            return;
        }
        self.failure.lock().get_or_insert(wrong);
        done.finish(Err(libc::EIO));
    }

    /// Reads what the digest lacks, if it is time for that.
    fn fill(self: Arc<Self>) {
        let Known::Digest(whole) = &self.known else { return };
        let range = match whole.begin_filling() {
            Some(Filling::Range(range)) => range,
            Some(Filling::Rest) => {
                let disk = HashedDisk(Arc::clone(&self));
                let thread = std::thread::Builder::new().name("zebu-digest".to_owned());
                // Without a thread, what was read stays as it is: not compared.
                drop(thread.spawn(move || disk.compare_rest(&|_, _| true)));
                return;
            }
            None => return,
        };
        let len = range.end - range.start;
        let wanted = Wanted { offset: range.start, len, start: range.start, end: range.end };
        let op = StorageOp::Read { offset: range.start, len };
        let own = Arc::clone(&self);
        // What can't be read now is read by `compare_rest`, which tells why not.
        let done = Completer::new(op, IoBuf::zeroed(len as usize).into(), move |_, _| {
            if let Known::Digest(whole) = &own.known {
                whole.end_filling();
            }
        });
        self.read(wanted, None, done);
    }

    /// Keeps the last block, which a reader that goes forward wants next.
    fn keep_last(&self, wanted: Wanted, bytes: &[u8]) {
        let block = self.known.block();
        let start = (wanted.end - 1) / block * block;
        let mut kept = self.kept.lock();
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
        let block = self.0.known.block();
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
    fn a_blob_without_hashes_is_compared_when_all_of_it_was_read() {
        let bytes: Vec<u8> = (0..500_001u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
        let len = bytes.len() as u64;
        let disk = |wrong, readers| {
            let is_mended = Arc::new(AtomicBool::new(false));
            let memory = Memory { bytes: bytes.clone(), wrong, is_mended, reads: Arc::default() };
            HashedDisk::without_hashes(Arc::new(memory), Digest::of(&bytes), readers, || ())
        };
        for readers in [Readers::Some, Readers::All] {
            let right = disk(None, readers);
            assert!(read(&right, 1_000_000, 100_000).as_deref() == Ok(&bytes[1_000_000..1_100_000]));
            assert_eq!(right.compare_rest(&|_, _| false), Err(None));
            assert_eq!(right.compare_rest(&|done, all| done <= all), Ok(()));
            assert!(read(&right, 0, len).as_deref() == Ok(&bytes[..]));
            let wrong = disk(Some(70_000), readers);
            assert!(read(&wrong, 0, len - 1).is_err() && wrong.failure().unwrap().contains("another digest"));
            let wrong = disk(Some(70_000), readers);
            assert!(read(&wrong, 1_000_000, 10).is_ok());
            let told = wrong.compare_rest(&|_, _| true).unwrap_err().unwrap();
            assert!(told.contains("sha256:") && told.contains("another digest"), "{told}");
            assert!(read(&wrong, 500_000, 10).is_err());
        }
        // All was read, from the end: the rest is read again.
        let wrong = disk(Some(70_000), Readers::Some);
        for start in (0..len).step_by(65_536).collect::<Vec<_>>().into_iter().rev() {
            let _ = read(&wrong, start, 65_536.min(len - start));
        }
        assert!(wrong.failure().is_some_and(|told| told.contains("another digest")));
    }

    #[test]
    fn a_block_that_the_digest_dropped_is_read_again_though_it_is_kept() {
        const BLOCK: u64 = 64 << 10;
        // As many blocks as wait for those before them, one before, and one behind.
        const BLOCKS: u64 = (32 << 20) / BLOCK + 2;
        let bytes: Vec<u8> = (0..(BLOCKS * BLOCK / 4) as u32).flat_map(u32::to_le_bytes).collect();
        let memory =
            Memory { bytes: bytes.clone(), wrong: None, is_mended: Arc::default(), reads: Arc::default() };
        let disk = HashedDisk::without_hashes(Arc::new(memory), Digest::of(&bytes), Readers::Some, || ());
        for block in (1..BLOCKS).chain([0]) {
            let start = block * BLOCK;
            let expected = &bytes[start as usize..][..BLOCK as usize];
            assert!(read(&disk, start, BLOCK).as_deref() == Ok(expected), "{block}");
        }
        let rounds = AtomicUsize::new(0);
        let goes_on = |_: u64, _: u64| rounds.fetch_add(1, Ordering::SeqCst) < 100;
        assert_eq!(disk.compare_rest(&goes_on), Ok(()));
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
