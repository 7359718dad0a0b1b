//! A blob in zstd whose frames are read and unpacked one by one.

use crate::failure::Failure;
use crate::seek_table::{FOOTER, Frame, SeekTable};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::channel;
use zebu_remote::RemoteError;
use zebu_storage::sync::Mutex;
use zebu_storage::{Completer, FileId, IoBuf, Storage, StorageAbilities, StorageDone, StorageOp};
use zstd_safe::DCtx;

/// Bytes of unpacked frames that are kept.
const KEPT: usize = 32 << 20;

/// The unpacked content of a blob. Each frame must have as many bytes as the blob's seek table says, or its reads are EIO.
pub struct FramesDisk(Arc<Shared>);

struct Shared {
    below: Arc<dyn Storage>,
    table: SeekTable,
    identity: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    kept: VecDeque<(usize, Arc<[u8]>)>,
    kept_bytes: usize,
    /// Requests that wait for a frame which is on its way.
    waiting: HashMap<usize, Vec<Arc<Request>>>,
    failure: Option<String>,
}

/// A read that needs so many more frames.
struct Request {
    offset: u64,
    len: u64,
    state: Mutex<Unfinished>,
}

struct Unfinished {
    done: Option<Completer>,
    missing: usize,
    errno: Option<i32>,
}

impl Request {
    /// Takes a frame, or that it can't be had.
    fn take(&self, frame: &Frame, bytes: Result<&[u8], i32>) {
        let mut state = self.state.lock();
        match bytes {
            Ok(bytes) => {
                let start = frame.unpacked.start.max(self.offset);
                let end = frame.unpacked.end.min(self.offset + self.len);
                let from = (start - frame.unpacked.start) as usize;
                if let Some(done) = &mut state.done {
                    let part = &bytes[from..from + (end - start) as usize];
                    done.bufs_mut().copy_from((start - self.offset) as usize, part);
                }
            }
            Err(errno) => state.errno = Some(errno),
        }
        state.missing -= 1;
        if state.missing == 0
            && let Some(done) = state.done.take()
        {
            let errno = state.errno;
            drop(state);
            done.finish(errno.map_or(Ok(StorageDone::Moved(self.len)), Err));
        }
    }
}

impl FramesDisk {
    /// The content of the blob in `below`, whose name is `name`.
    ///
    /// # Errors
    /// It has no seek table, or a wrong one, or frames that are too large or too small to be unpacked one by one.
    pub fn open(below: Arc<dyn Storage>, name: &str) -> Result<Self, RemoteError> {
        let fail = |failure: Failure| RemoteError::new(name, failure.errno, failure.reason);
        let len = below.len();
        let footer = read(&*below, len.saturating_sub(FOOTER), len).map_err(fail)?;
        let table = SeekTable::range(&footer, len).map_err(fail)?;
        let table = table.ok_or_else(|| fail(Failure::wrong("its seek table is gone")))?;
        let table = read(&*below, table.start, table.end).and_then(|bytes| SeekTable::read(&bytes, len));
        let table = table.map_err(fail)?;
        if !table.is_usable() {
            return Err(fail(Failure::unsupported(
                "its frames are too large or too small to be read one by one",
            )));
        }
        let identity = below.identity();
        Ok(Self(Arc::new(Shared { below, table, identity, state: Mutex::default() })))
    }

    /// The first reason why a frame could not be unpacked.
    pub fn failure(&self) -> Option<String> {
        self.0.state.lock().failure.clone()
    }
}

/// Reads and waits.
fn read(below: &dyn Storage, from: u64, until: u64) -> Result<Vec<u8>, Failure> {
    let len = until - from;
    let (sender, receiver) = channel();
    let op = StorageOp::Read { offset: from, len };
    let done = Completer::new(op, IoBuf::zeroed(len as usize).into(), move |bufs, result| {
        let mut bytes = vec![0; len as usize];
        bufs.copy_to(0, &mut bytes);
        // Whoever has given up does not hear it.
        let _ = sender.send(result.map(|_| bytes));
    });
    below.submit(op, done);
    let bytes = receiver.recv().unwrap_or(Err(libc::EIO));
    bytes.map_err(|errno| Failure::new(errno, "its seek table can't be read"))
}

fn unpack(frame: &Frame, packed: &[u8]) -> Result<Arc<[u8]>, String> {
    let len = (frame.unpacked.end - frame.unpacked.start) as usize;
    // One more, so that a frame with more than that is found out.
    let mut bytes = vec![0; len + 1];
    let at = frame.packed.start;
    let unpacked = DCtx::create().decompress(&mut bytes[..], packed).map_err(|code| {
        format!("the frame at {at} can't be unpacked: zstd: {}", zstd_safe::get_error_name(code))
    })?;
    if unpacked != len {
        return Err(format!("the frame at {at} has not the {len} bytes that the seek table says"));
    }
    bytes.truncate(len);
    Ok(bytes.into())
}

impl Shared {
    /// Has a frame fetched.
    fn fetch(self: Arc<Self>, number: usize, frame: Frame) {
        let len = frame.packed.end - frame.packed.start;
        let op = StorageOp::Read { offset: frame.packed.start, len };
        let below = Arc::clone(&self.below);
        let done = Completer::new(op, IoBuf::zeroed(len as usize).into(), move |mut bufs, result| {
            let unpacked = match (result, bufs.pop_part()) {
                (Ok(_), Some(packed)) => unpack(&frame, packed.as_slice()).map_err(Some),
                (Err(errno), _) => return self.hand_out(number, &frame, Err(errno)),
                (Ok(_), None) => Err(None),
            };
            match unpacked {
                Ok(bytes) => self.hand_out(number, &frame, Ok(bytes)),
                Err(reason) => {
                    if let Some(reason) = reason {
                        self.state.lock().failure.get_or_insert(reason);
                    }
                    self.hand_out(number, &frame, Err(libc::EIO));
                }
            }
        });
        below.submit(op, done);
    }

    fn hand_out(&self, number: usize, frame: &Frame, bytes: Result<Arc<[u8]>, i32>) {
        let mut state = self.state.lock();
        let waiting = state.waiting.remove(&number).unwrap_or_default();
        if let Ok(bytes) = &bytes {
            state.kept_bytes += bytes.len();
            state.kept.push_front((number, Arc::clone(bytes)));
            while state.kept_bytes > KEPT {
                let Some((_, old)) = state.kept.pop_back() else { break };
                state.kept_bytes -= old.len();
            }
        }
        drop(state);
        for request in waiting {
            request.take(frame, bytes.as_deref().map_err(|errno| *errno));
        }
    }
}

impl Storage for FramesDisk {
    fn len(&self) -> u64 {
        self.0.table.len()
    }

    fn identity(&self) -> u64 {
        self.0.identity
    }

    fn files(&self) -> Vec<FileId> {
        self.0.below.files()
    }

    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::empty()
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let (offset, len) = match op {
            StorageOp::Read { offset, len } => (offset, len),
            StorageOp::Flush => return done.finish(Ok(StorageDone::Done)),
            _ => return done.finish(Err(libc::EOPNOTSUPP)),
        };
        let Some(end) = offset.checked_add(len).filter(|end| *end <= self.len()) else {
            return done.finish(Err(libc::EINVAL));
        };
        if len == 0 {
            return done.finish(Ok(StorageDone::Moved(0)));
        }
        let first = self.0.table.frame_at(offset);
        let frames: Vec<(usize, Frame)> = (first..)
            .map_while(|number| Some((number, self.0.table.frame(number)?)))
            .take_while(|(_, frame)| frame.unpacked.start < end)
            .filter(|(_, frame)| !frame.unpacked.is_empty())
            .collect();
        let unfinished = Unfinished { done: Some(done), missing: frames.len(), errno: None };
        let request = Arc::new(Request { offset, len, state: Mutex::new(unfinished) });
        for (number, frame) in frames {
            let mut state = self.0.state.lock();
            if let Some((_, bytes)) = state.kept.iter().find(|(known, _)| *known == number) {
                let bytes = Arc::clone(bytes);
                drop(state);
                request.take(&frame, Ok(&bytes));
                continue;
            }
            let waiting = state.waiting.entry(number).or_default();
            waiting.push(Arc::clone(&request));
            let is_first = waiting.len() == 1;
            drop(state);
            if is_first {
                Arc::clone(&self.0).fetch(number, frame);
            }
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
    use crate::pack::pack;
    use std::os::unix::fs::FileExt;

    struct Memory(Vec<u8>);

    impl Storage for Memory {
        fn len(&self) -> u64 {
            self.0.len() as u64
        }

        fn identity(&self) -> u64 {
            1
        }

        fn abilities(&self) -> StorageAbilities {
            StorageAbilities::empty()
        }

        fn submit(&self, op: StorageOp, mut done: Completer) {
            let StorageOp::Read { offset, len } = op else { return done.finish(Err(libc::EOPNOTSUPP)) };
            done.bufs_mut().copy_from(0, &self.0[offset as usize..(offset + len) as usize]);
            done.finish(Ok(StorageDone::Moved(len)));
        }
    }

    fn content() -> Vec<u8> {
        (0..700_001u32).flat_map(|n| (n / 3).to_le_bytes()).collect()
    }

    fn packed(content: &[u8]) -> Vec<u8> {
        let (file, out) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        file.write_all_at(content, 0).unwrap();
        let len = pack(&file, content.len() as u64, &out).unwrap();
        let mut packed = vec![0; len as usize];
        out.read_exact_at(&mut packed, 0).unwrap();
        packed
    }

    fn part(disk: &FramesDisk, offset: u64, len: u64) -> Result<Vec<u8>, i32> {
        super::read(disk, offset, offset + len).map_err(|failure| failure.errno)
    }

    #[test]
    fn frames_are_unpacked_one_by_one() {
        let content = content();
        let disk = FramesDisk::open(Arc::new(Memory(packed(&content))), "x").unwrap();
        assert_eq!(disk.len(), content.len() as u64);
        for (offset, len) in [(0, disk.len()), (5, 1), (1_048_575, 2), (2_000_000, 800_004), (0, 0)] {
            let expected = &content[offset as usize..(offset + len) as usize];
            assert!(part(&disk, offset, len).as_deref() == Ok(expected), "{offset} {len}");
        }
        assert_eq!(part(&disk, disk.len(), 1), Err(libc::EINVAL));
        assert_eq!(disk.failure(), None);
    }

    #[test]
    fn damage_is_an_error_and_no_panic() {
        let content = content();
        let right = packed(&content);
        let open = |bytes: Vec<u8>| FramesDisk::open(Arc::new(Memory(bytes)), "x");
        // Every byte of the table, and some of the frames.
        let table = right.len() - 60;
        for at in (0..table).step_by(4099).chain(table..right.len()) {
            let mut wrong = right.clone();
            wrong[at] ^= 0x81;
            let Ok(disk) = open(wrong) else { continue };
            let all = part(&disk, 0, disk.len());
            assert!(all.is_err() || all.as_deref() == Ok(&content[..]), "{at}");
            assert!(all.is_ok() || disk.failure().is_some(), "{at}");
        }
        for cut in [0, 1, 8, 9, 20, right.len() / 2, right.len() - 1] {
            assert!(open(right[..cut].to_vec()).is_err(), "{cut}");
        }
    }
}
