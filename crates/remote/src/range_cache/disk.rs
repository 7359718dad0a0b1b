//! A disk with a cache before it.

use super::directory::RangeCache;
use super::object::{Look, ObjectFiles};
use super::record::{BLOCK, BLOCKS, RANGE};
use super::version::ObjectVersion;
use super::workers::Work;
use crate::afresh::{Afresh, AfreshCount};
use crate::error::RemoteError;
use crate::reader::Reader;
use crate::streaks::{Found, Streaks};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use zebu_storage::sync::Mutex;
use zebu_storage::{Alignment, Completer, IoBuf, IoBufs, Storage, StorageAbilities, StorageDone, StorageOp};

/// The most blocks of one fetch.
const RUN: u64 = 16;
/// The most bytes ahead of a reader that goes forward.
const MOST_AHEAD: u64 = 8 << 20;
/// How often a block is looked for again that came while it was looked for.
const TURNS: usize = 4;

/// A disk over the network whose blocks are kept in a [`RangeCache`].
pub struct CachedDisk(Arc<Inner>);

struct Inner {
    cache: Arc<RangeCache>,
    object: Arc<ObjectFiles>,
    /// Of the object among those that the process has open.
    number: usize,
    below: Arc<dyn Storage>,
    name: String,
    len: u64,
    /// Bytes that are fetched at once, and that wait to be stored.
    memory: u64,
    state: Mutex<State>,
    afresh: AfreshCount,
}

struct State {
    /// Blocks on their way to the local disk.
    loading: HashMap<u64, Loading>,
    /// Fetches to come: those that somebody waits for, and those ahead of readers.
    wanted: VecDeque<Range<u64>>,
    ahead: VecDeque<Range<u64>>,
    /// Bytes that are being fetched.
    fetching: u64,
    streaks: Streaks,
}

enum Loading {
    /// These wait for it.
    Fetching(Vec<Arc<Reader>>),
    /// It is here, and not yet stored.
    Arrived(Arc<[u8]>),
}

impl RangeCache {
    /// `below` with this cache before it, for reading. `version` must be that of what `below` reads.
    ///
    /// `memory` bounds what is fetched at once, and what waits to be stored, in bytes each.
    ///
    /// # Errors
    /// The object's files can't be made or opened.
    pub fn disk(
        self: &Arc<Self>,
        below: Arc<dyn Storage>,
        version: &ObjectVersion,
        memory: u64,
    ) -> Result<CachedDisk, RemoteError> {
        let (number, object) = self.object(version)?;
        let state = State {
            loading: HashMap::new(),
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            fetching: 0,
            streaks: Streaks::new(MOST_AHEAD.min(memory / 2)),
        };
        let len = below.len();
        Ok(CachedDisk(Arc::new(Inner {
            cache: Arc::clone(self),
            object,
            number,
            below,
            name: version.name().to_owned(),
            len,
            memory,
            state: Mutex::new(state),
            afresh: AfreshCount::default(),
        })))
    }
}

impl CachedDisk {
    /// Has reads go past the cache, and the cache give up what they read, while the value lives.
    pub fn reads_afresh(&self) -> Afresh {
        self.0.afresh.add()
    }
}

impl Inner {
    /// Reads a range from below. What the cache has of it is given up.
    fn read_afresh(&self, range: &Range<u64>, done: Completer) {
        for number in range.start / RANGE..range.end.div_ceil(RANGE) {
            self.cache.give_up(&self.object, number);
        }
        self.below.submit(done.op(), done);
    }

    /// Answers a read of a range within the object, not empty.
    fn read(self: &Arc<Self>, range: &Range<u64>, done: Completer) {
        let numbers = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let reader = Arc::new(Reader::new(done, (numbers.end - numbers.start) as usize));
        let is_here = numbers.clone().all(|number| self.object.has(number));
        let found = if is_here { Found::Here } else { Found::Away };
        let ahead = self.state.lock().streaks.note(range, found);
        let mut buffer = vec![0; BLOCK.min(range.end - range.start) as usize];
        let mut missing = Vec::new();
        let mut last_range = None;
        for number in numbers {
            let start = number * BLOCK;
            let from = (range.start.max(start) - start) as usize;
            let len = (range.end.min(start + BLOCK) - start) as usize - from;
            let Some(bytes) = buffer.get_mut(..len) else { continue };
            if self.read_block(number, from, bytes, &reader) {
                missing.push(number);
            }
            if last_range != Some(number / BLOCKS) {
                last_range = Some(number / BLOCKS);
                self.cache.note_use(self.number, &self.object, number / BLOCKS);
            }
        }
        let mut state = self.state.lock();
        state.wanted.extend(runs(&missing));
        if let Some(ahead) = ahead {
            let coming = self.mark_ahead(&mut state, &ahead);
            state.ahead.extend(runs(&coming));
        }
        drop(state);
        self.fetch_more();
    }

    /// Gives the reader its bytes of a block, or has it wait; whether the block is to be fetched for that.
    fn read_block(&self, number: u64, from: usize, bytes: &mut [u8], reader: &Arc<Reader>) -> bool {
        for turn in 0..TURNS {
            let mut state = self.state.lock();
            match state.loading.get_mut(&number) {
                Some(Loading::Fetching(readers)) => {
                    readers.push(Arc::clone(reader));
                    return false;
                }
                Some(Loading::Arrived(block)) => {
                    let block = Arc::clone(block);
                    drop(state);
                    reader.take(number * BLOCK, &block);
                    return false;
                }
                None => drop(state),
            }
            let look = self.object.read(number, from, bytes);
            if look == Look::Hit {
                self.cache.counters.hits.fetch_add(bytes.len() as u64, Relaxed);
                reader.take(number * BLOCK + from as u64, bytes);
                return false;
            }
            let mut state = self.state.lock();
            // It may have come meanwhile, and be stored already.
            let is_there = look == Look::Absent && turn + 1 < TURNS && self.object.has(number);
            if is_there || state.loading.contains_key(&number) {
                continue;
            }
            state.loading.insert(number, Loading::Fetching(vec![Arc::clone(reader)]));
            drop(state);
            if look == Look::Bad {
                self.cache.note_bad(&self.name, number);
            }
            return true;
        }
        // Others load it each time it is looked for.
        let mut state = self.state.lock();
        match state.loading.get_mut(&number) {
            Some(Loading::Fetching(readers)) => readers.push(Arc::clone(reader)),
            Some(Loading::Arrived(block)) => {
                let block = Arc::clone(block);
                drop(state);
                reader.take(number * BLOCK, &block);
            }
            None => {
                state.loading.insert(number, Loading::Fetching(vec![Arc::clone(reader)]));
                return true;
            }
        }
        false
    }

    /// Marks blocks ahead of a reader as loading that are not there, as far as memory allows.
    fn mark_ahead(&self, state: &mut State, range: &Range<u64>) -> Vec<u64> {
        let mut coming = Vec::new();
        let most = self.memory / 2 / BLOCK;
        let end = range.end.min(self.len).div_ceil(BLOCK);
        for number in range.start / BLOCK..end {
            if state.loading.len() as u64 >= most {
                break;
            }
            if !state.loading.contains_key(&number) && !self.object.has(number) {
                state.loading.insert(number, Loading::Fetching(Vec::new()));
                coming.push(number);
            }
        }
        coming
    }

    /// Asks for what is missing, as far as memory allows.
    fn fetch_more(self: &Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            let next = state.wanted.front().or(state.ahead.front()).cloned();
            let Some(run) = next else { return };
            let range = run.start * BLOCK..(run.end * BLOCK).min(self.len);
            let len = range.end - range.start;
            if state.fetching > 0 && state.fetching + len > self.memory {
                return;
            }
            if state.wanted.pop_front().is_none() {
                state.ahead.pop_front();
            }
            state.fetching += len;
            drop(state);
            let op = StorageOp::Read { offset: range.start, len };
            let me = Arc::clone(self);
            let bufs = IoBuf::zeroed(len as usize).into();
            self.below.submit(
                op,
                Completer::new(op, bufs, move |bufs, result| me.arrived(run, len, &bufs, result.map(drop))),
            );
        }
    }

    /// Gives blocks that came to those who wait, and has them stored.
    fn arrived(self: &Arc<Self>, run: Range<u64>, len: u64, bufs: &IoBufs, result: Result<(), i32>) {
        let first = run.start;
        let mut blocks: Vec<Arc<[u8]>> = Vec::new();
        if result.is_ok() {
            self.cache.counters.fetched.fetch_add(len, Relaxed);
            for number in run.clone() {
                let mut block = vec![0; self.object.block_len(number)];
                bufs.copy_to(((number - first) * BLOCK) as usize, &mut block);
                blocks.push(block.into());
            }
        }
        let mut state = self.state.lock();
        state.fetching -= len;
        let mut waiting = Vec::new();
        for number in run.clone() {
            if let Some(Loading::Fetching(readers)) = state.loading.remove(&number) {
                waiting.extend(readers.into_iter().map(|reader| (number, reader)));
            }
            if let Some(block) = blocks.get((number - first) as usize) {
                state.loading.insert(number, Loading::Arrived(Arc::clone(block)));
            }
        }
        drop(state);
        // First, so that who got its bytes finds them when the cache has settled.
        let left = if result.is_ok() { self.keep(&run, len, &blocks) } else { None };
        for (number, reader) in waiting {
            match (result, blocks.get((number - first) as usize)) {
                (Ok(()), Some(block)) => reader.take(number * BLOCK, block),
                (Err(errno), _) => reader.fail(errno),
                (Ok(()), None) => reader.fail(libc::EIO),
            }
        }
        if let Some(work) = left {
            self.cache.workers.wait_for_room(len, self.memory);
            if self.cache.workers.store(len, self.memory, work).is_err() {
                self.leave_out(run, len);
            }
        }
        // Not here: what is below may answer at once, within its own call.
        let me = Arc::clone(self);
        self.cache.workers.read(move || me.fetch_more());
    }

    /// Has blocks stored, and forgotten then. The work is given back if there is no room for it.
    fn keep(self: &Arc<Self>, run: &Range<u64>, len: u64, blocks: &[Arc<[u8]>]) -> Option<Work> {
        if !self.cache.stores() {
            self.leave_out(run.clone(), len);
            return None;
        }
        let (me, numbers, blocks) = (Arc::clone(self), run.clone(), blocks.to_vec());
        let work = Box::new(move || {
            me.cache.store(me.number, &me.object, numbers.start, &blocks);
            me.forget(numbers);
        });
        self.cache.workers.store(len, self.memory, work).err()
    }

    fn leave_out(&self, run: Range<u64>, len: u64) {
        self.cache.counters.not_stored.fetch_add(len, Relaxed);
        self.forget(run);
    }

    fn forget(&self, run: Range<u64>) {
        let mut state = self.state.lock();
        for number in run {
            state.loading.remove(&number);
        }
    }
}

/// Runs of blocks that follow each other.
fn runs(numbers: &[u64]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some(run) if run.end == number && number - run.start < RUN => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}

impl Storage for CachedDisk {
    fn len(&self) -> u64 {
        self.0.len
    }

    fn identity(&self) -> u64 {
        self.0.below.identity()
    }

    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, offset: 1, length: 1 }
    }

    fn abilities(&self) -> StorageAbilities {
        self.0.below.abilities() & StorageAbilities::EXTENTS
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        match op {
            StorageOp::Read { len: 0, .. } => done.finish(Ok(StorageDone::Moved(0))),
            StorageOp::Read { offset, len } => match offset.checked_add(len) {
                Some(end) if end <= self.0.len => {
                    let me = Arc::clone(&self.0);
                    let range = offset..end;
                    self.0.cache.workers.read(move || {
                        if me.afresh.is_wanted() {
                            me.read_afresh(&range, done);
                        } else {
                            me.read(&range, done);
                        }
                    });
                }
                _ => done.finish(Err(libc::EINVAL)),
            },
            StorageOp::Flush => done.finish(Ok(StorageDone::Done)),
            StorageOp::ExtentAt { .. } => self.0.below.submit(op, done),
            _ => done.finish(Err(libc::EOPNOTSUPP)),
        }
    }

    fn cancel(&self) {
        self.0.below.cancel();
        let waiting: Vec<_> = self
            .0
            .state
            .lock()
            .loading
            .values()
            .filter_map(|loading| match loading {
                Loading::Fetching(readers) => Some(readers.clone()),
                Loading::Arrived(_) => None,
            })
            .flatten()
            .collect();
        for reader in waiting.iter().filter(|reader| reader.is_cancelled()) {
            reader.fail(libc::EIO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_follow_each_other_are_one_fetch() {
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[1, 2, 3, 5]), [1..4, 5..6]);
        let many: Vec<u64> = (0..40).collect();
        assert_eq!(runs(&many), [0..16, 16..32, 32..40]);
    }
}
