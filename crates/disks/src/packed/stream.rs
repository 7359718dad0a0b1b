//! A packed disk as a storage that is read in order: unpacked while it is read, with no file for what was unpacked.
//!
//! Reads may come a little out of order, because the last blocks are kept. For one that goes further back, unpacking begins
//! anew; if that happens again and again, the reader is no such reader, and the storage fails.

use super::decoding::{Decoding, Fault, Length, Source};
use super::recent::{BLOCK, Recent};
use std::io;
use std::sync::Arc;
use zebu_drivers::fresh_identity;
use zebu_engine::jobs::SourceEnd;
use zebu_engine::storage::{Completer, Storage, StorageAbilities, StorageDone, StorageOp};
use zebu_storage::sync::{Condvar, Mutex};

/// Bytes that are unpacked before somebody asks for them.
const AHEAD: u64 = 8 << 20;
/// How often unpacking begins anew.
const MOST_PASSES: usize = 8;

/// The storage.
pub(super) struct PackedStream {
    shared: Arc<Shared>,
    identity: u64,
}

struct Shared {
    length: Length,
    /// Learns where the end is.
    end: Option<SourceEnd>,
    state: Mutex<State>,
    /// Something was asked for, or nobody will ask any more.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Vec<Completer>,
    recent: Recent,
    /// Offset up to which bytes were asked for.
    asked: u64,
    end: Option<u64>,
    fault: Option<Fault>,
    is_closed: bool,
}

/// The range of a read.
fn range_of(request: &Completer) -> Option<(u64, u64)> {
    match request.op() {
        StorageOp::Read { offset, len } => Some((offset, len)),
        _ => None,
    }
}

/// Answers a read whose bytes are in the buffers.
fn answer(request: Completer) {
    let len = range_of(&request).map_or(0, |(_, len)| len);
    request.finish(Ok(StorageDone::Moved(len)));
}

impl State {
    /// Answers a request from what is in memory, or gives it back.
    fn serve(&mut self, mut request: Completer) -> Option<Completer> {
        let Some((offset, len)) = range_of(&request) else { return Some(request) };
        let end = self.end.unwrap_or(u64::MAX);
        let bytes = len.min(end.saturating_sub(offset)) as usize;
        if bytes > 0 && !self.recent.has(offset, bytes) {
            return Some(request);
        }
        self.recent.copy(offset, bytes, request.bufs_mut());
        request.bufs_mut().fill(bytes, len as usize - bytes, 0);
        answer(request);
        None
    }

    /// The next task, if there is one, once `position` bytes are unpacked.
    fn next(&mut self, position: u64) -> Option<Task> {
        for request in std::mem::take(&mut self.waiting) {
            if let Some(request) = self.serve(request) {
                self.waiting.push(request);
            }
        }
        let offset = |request: &Completer| range_of(request).map_or(0, |(offset, _)| offset);
        if let Some(at) = self.waiting.iter().position(|request| offset(request) == position) {
            return Some(Task::Direct(self.waiting.swap_remove(at)));
        }
        let is_gone = |at: u64| at < position && !self.recent.has(at, (position - at) as usize);
        if self.waiting.iter().any(|request| !is_gone(offset(request))) {
            return Some(Task::Ahead(self.recent.room()));
        }
        if !self.waiting.is_empty() {
            return Some(Task::Again);
        }
        let is_wanted = self.end.is_none() && position < self.asked.saturating_add(AHEAD);
        is_wanted.then(|| Task::Ahead(self.recent.room()))
    }
}

/// The next work of the thread that unpacks.
enum Task {
    /// Unpack into the memory of a read that begins where unpacking is.
    Direct(Completer),
    /// Unpack a block, to be kept.
    Ahead(Vec<u8>),
    /// Begin at the start again.
    Again,
}

impl PackedStream {
    /// The storage of what is in `source`. `end` learns the length, if that is not known. The first read starts unpacking.
    pub(super) fn new(source: Source, length: Length, end: Option<SourceEnd>) -> io::Result<Arc<Self>> {
        let shared = Shared { length, end, state: Mutex::default(), changed: Condvar::new() };
        let shared = Arc::new(shared);
        let own = Arc::clone(&shared);
        std::thread::Builder::new().name("zebu-unpack".to_owned()).spawn(move || {
            let closing = CloseOnDrop(&own);
            if let Err(fault) = work(&own, &source) {
                own.state.lock().fault.get_or_insert(fault);
            }
            drop(closing);
        })?;
        Ok(Arc::new(Self { shared, identity: fresh_identity() }))
    }

    /// Why reads fail, if they do.
    pub(super) fn fault(&self) -> Option<Fault> {
        self.shared.state.lock().fault.clone()
    }
}

/// Has nobody wait for a thread that has ended.
struct CloseOnDrop<'a>(&'a Shared);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_closed = true;
        // Dropped, they fail.
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        drop(waiting);
    }
}

/// Unpacks what is asked for, and a little more, until nobody can ask.
fn work(shared: &Shared, source: &Source) -> Result<(), Fault> {
    let mut passes = 0;
    'passes: loop {
        passes += 1;
        if passes > MOST_PASSES {
            return Err(Fault::NeedsPlaces);
        }
        let mut decoding: Option<Decoding> = None;
        loop {
            let position = decoding.as_ref().map_or(0, Decoding::position);
            let Some(task) = wait(shared, position) else { return Ok(()) };
            let decoding = match &mut decoding {
                Some(decoding) => decoding,
                none => none.insert(Decoding::new(source, shared.length.clone())?),
            };
            match task {
                Task::Again => {
                    shared.state.lock().recent.clear();
                    continue 'passes;
                }
                Task::Direct(request) => direct(shared, decoding, request)?,
                Task::Ahead(mut block) => {
                    block.resize(BLOCK, 0);
                    let filled = decoding.fill(&mut block)?;
                    block.truncate(filled);
                    shared.state.lock().recent.push(position, block);
                }
            }
            if let Some(end) = &shared.end {
                end.expect(decoding.likely_end());
            }
            if let Some(end) = decoding.end() {
                note_end(shared, end);
            }
        }
    }
}

/// Waits for work. `None` if there will be none.
fn wait(shared: &Shared, position: u64) -> Option<Task> {
    let mut state = shared.state.lock();
    loop {
        if state.is_closed {
            return None;
        }
        // Nothing is unpacked unasked before the first read.
        if state.asked > 0
            && let Some(task) = state.next(position)
        {
            return Some(task);
        }
        state = shared.changed.wait(state);
    }
}

/// Unpacks into the memory of a read; past the end, it is zero.
fn direct(shared: &Shared, decoding: &mut Decoding, mut request: Completer) -> Result<(), Fault> {
    let filled = request.bufs_mut().parts_mut().iter_mut().try_for_each(|part| {
        let out = part.as_mut_slice();
        let filled = decoding.fill(out)?;
        out[filled..].fill(0);
        Ok(())
    });
    if let Err(fault) = filled {
        // Before the read fails, so that whoever learns of that finds the reason.
        shared.state.lock().fault = Some(Fault::clone(&fault));
        return Err(fault);
    }
    if let Some(end) = decoding.end() {
        note_end(shared, end);
    }
    answer(request);
    Ok(())
}

fn note_end(shared: &Shared, end: u64) {
    if let Some(learns) = &shared.end {
        learns.set(end.next_multiple_of(512));
    }
    shared.state.lock().end = Some(end);
}

impl Drop for PackedStream {
    fn drop(&mut self) {
        self.shared.state.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl Storage for PackedStream {
    fn len(&self) -> u64 {
        self.shared.length.most()
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::empty()
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        match op {
            StorageOp::Read { offset, len } => {
                let mut state = self.shared.state.lock();
                if state.is_closed {
                    drop(state);
                    return done.finish(Err(libc::EIO));
                }
                state.asked = state.asked.max(offset.saturating_add(len));
                let left = state.serve(done);
                state.waiting.extend(left);
                drop(state);
                self.shared.changed.notify_all();
            }
            StorageOp::Flush => done.finish(Ok(StorageDone::Done)),
            _ => done.finish(Err(libc::EROFS)),
        }
    }

    fn cancel(&self) {
        let mut state = self.shared.state.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let (ended, kept) = waiting.into_iter().partition(Completer::is_cancelled);
        state.waiting = kept;
        drop(state);
        let ended: Vec<Completer> = ended;
        for request in ended {
            request.finish(Err(libc::ECANCELED));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::samples::{content, pack, source};
    use std::sync::mpsc::{Receiver, channel};
    use zebu_engine::storage::{IoBuf, IoBufs};

    type Answer = Result<Vec<u8>, i32>;

    /// Begins a read, into memory of two parts.
    fn begin(stream: &PackedStream, offset: u64, len: usize) -> Receiver<Answer> {
        let (sender, receiver) = channel();
        let mut bufs = IoBufs::from(IoBuf::copy_of(&vec![0xaa; len / 3]));
        bufs.push_part(IoBuf::copy_of(&vec![0xaa; len - len / 3]));
        let op = StorageOp::Read { offset, len: len as u64 };
        let done = Completer::new(op, bufs, move |bufs, result| {
            let mut bytes = vec![0; len];
            bufs.copy_to(0, &mut bytes);
            let _ = sender.send(result.map(|_| bytes));
        });
        stream.submit(op, done);
        receiver
    }

    fn read(stream: &PackedStream, offset: u64, len: usize) -> Answer {
        begin(stream, offset, len).recv().expect("every read is answered")
    }

    fn stream(packed: &[u8], length: Length) -> (Arc<PackedStream>, SourceEnd) {
        let end = SourceEnd::new();
        (PackedStream::new(source(packed), length, Some(end.clone())).unwrap(), end)
    }

    fn most(bytes: u64) -> Length {
        Length::AtMost(bytes, "too much".to_owned())
    }

    #[test]
    fn reads_in_any_order_see_the_same_and_zeroes_past_the_end() {
        let content = content(21 * BLOCK + 5000);
        let packed = pack("zstd -c -q -1", &content);
        let (stream, end) = stream(&packed, most(64 << 20));
        let len = content.len();
        let expected = |at: usize, len: usize| -> Vec<u8> {
            (at..at + len).map(|at| content.get(at).copied().unwrap_or(0)).collect()
        };
        // Several at once, out of order and over blocks.
        let at = |number: usize| number * 300_000;
        let order = [2, 0, 1, 4, 3, 6, 5, 7];
        let begun: Vec<_> =
            order.iter().map(|number| (at(*number), begin(&stream, at(*number) as u64, 300_000))).collect();
        for (at, answer) in begun {
            assert!(answer.recv().unwrap().unwrap() == expected(at, 300_000), "{at}");
        }
        for (at, len) in [(at(8), 4 * BLOCK), (len - 100, 200), (0, 512), (len - 4096, 4096), (len + 9, 50)] {
            assert!(read(&stream, at as u64, len).unwrap() == expected(at, len), "{at}");
        }
        assert_eq!(end.get(), Some(content.len().next_multiple_of(512) as u64));
        assert_eq!(stream.fault(), None);
    }

    #[test]
    fn a_reader_that_goes_back_again_and_again_is_told_off() {
        let content = content(40 * BLOCK);
        let (stream, _) = stream(&pack("lz4 -c -q", &content), most(64 << 20));
        let passes = (0..2 * MOST_PASSES).take_while(|_| {
            read(&stream, 39 * BLOCK as u64, BLOCK).is_ok() && read(&stream, 0, BLOCK).is_ok()
        });
        assert!((2..=MOST_PASSES).contains(&passes.count()));
        assert_eq!(stream.fault(), Some(Fault::NeedsPlaces));
        assert!(read(&stream, 0, 10).is_err());
    }

    #[test]
    fn what_is_wrong_is_known_when_the_read_fails() {
        let content = content(3 * BLOCK);
        let packed = pack("gzip -c", &content);
        let told = |packed: &[u8], length: Length| {
            let (stream, end) = stream(packed, length);
            assert!(read(&stream, 0, 2 * BLOCK).is_ok());
            assert_eq!(read(&stream, 2 * BLOCK as u64, BLOCK + 1).err(), Some(libc::EIO));
            assert_eq!(end.get(), None);
            match stream.fault() {
                Some(Fault::Told(reason)) => reason,
                other => panic!("{other:?}"),
            }
        };
        let len = content.len() as u64;
        assert!(told(&packed[..packed.len() - 3], most(len)).contains("can't unpack the gzip file"));
        assert_eq!(told(&packed, most(len - 1)), "too much");
        assert!(told(&packed, Length::Known(len - 1)).contains("more than the"));
        assert!(told(&packed, Length::Known(len + 1)).contains("bytes that it says"));
        let mut sum = packed.clone();
        let at = sum.len() - 6;
        sum[at] ^= 1;
        assert!(told(&sum, most(len)).contains("can't unpack the gzip file"));
    }

    #[test]
    fn an_image_that_is_known_by_its_end_is_none_to_be_read_in_order() {
        for (magic, len) in [(b"conectix", 512), (b"conectix", 511), (b"kolykoly", 512)] {
            let mut content = content(2 * BLOCK);
            let at = content.len() - len;
            content[at..at + 8].copy_from_slice(magic);
            let (stream, _) = stream(&pack("gzip -c -1", &content), most(64 << 20));
            assert!(read(&stream, 0, 2 * BLOCK + 1).is_err());
            assert_eq!(stream.fault(), Some(Fault::NeedsPlaces));
        }
    }

    #[test]
    fn reads_that_nobody_waits_for_any_more_are_answered() {
        let (stream, _) = stream(&pack("gzip -c", &content(BLOCK)), most(64 << 20));
        let answer = begin(&stream, 0, 512);
        drop(stream);
        answer.recv_timeout(std::time::Duration::from_secs(600)).expect("answered").ok();
    }
}
