//! Parts that are being filled by writes, within a bound of memory.

use super::ranges::Ranges;
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use zebu_storage::{Completer, StorageDone, StorageOp};

/// A part with all its bytes.
pub(super) type Full = (u64, Bytes);
/// The answer to an operation.
type Answer = Result<StorageDone, i32>;

/// The result of moving bytes.
#[derive(Default)]
pub(super) struct Step {
    pub(super) answered: Vec<(Completer, Answer)>,
    pub(super) full: Vec<Full>,
}

/// Parts in memory, and the writes that wait for them.
pub(super) struct Filling {
    size: u64,
    /// The object's length, if it is known.
    len: Option<u64>,
    /// Buffers that are not in use.
    free: usize,
    parts: BTreeMap<u64, Part>,
    /// Parts that are full or were, up to the first that is not, but for the first one of an object that grows.
    frontier: u64,
    /// Those behind it.
    ahead: std::collections::BTreeSet<u64>,
    /// The first one was full.
    first_is_full: bool,
    waiting: VecDeque<Waiting>,
    /// Memory of parts that were sent.
    spare: Vec<Vec<u8>>,
}

struct Part {
    bytes: Vec<u8>,
    ranges: Ranges,
}

struct Waiting {
    done: Completer,
    /// Bytes of it that are in parts.
    moved: u64,
}

/// What there is of an object when its writer is ready.
pub(super) struct Rest {
    /// How many parts there are in all.
    pub(super) parts: u64,
    /// Those that were not sent.
    pub(super) full: Vec<Full>,
}

impl Filling {
    /// Parts of `size` bytes, of which `buffers` may be in memory.
    pub(super) fn new(size: u64, buffers: usize, len: Option<u64>) -> Self {
        Self {
            size,
            len,
            free: buffers,
            parts: BTreeMap::new(),
            frontier: if len.is_none() { 1 } else { 0 },
            ahead: std::collections::BTreeSet::new(),
            first_is_full: false,
            waiting: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, _op: StorageOp, done: Completer) {
        self.waiting.push_back(Waiting { done, moved: 0 });
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// A part was sent, and its memory is free: the next one has it.
    pub(super) fn give_back(&mut self, part: Bytes) {
        self.free += 1;
        if part.is_unique() {
            self.spare.push(part.into());
        }
    }

    /// Memory for a part of `len` bytes, all zero.
    fn buffer(&mut self, len: u64) -> Vec<u8> {
        let Some(mut spare) = self.spare.pop() else { return vec![0; len as usize] };
        spare.clear();
        spare.resize(len as usize, 0);
        spare
    }

    /// Everything is given up: those who wait.
    pub(super) fn give_up(&mut self) -> Vec<Completer> {
        self.parts.clear();
        self.spare.clear();
        self.waiting.drain(..).map(|waiting| waiting.done).collect()
    }

    /// Moves what there is memory for.
    pub(super) fn step(&mut self) -> Step {
        let mut step = Step::default();
        let mut waiting = std::mem::take(&mut self.waiting);
        for mut one in waiting.drain(..) {
            match self.advance(&mut one, &mut step.full) {
                None => self.waiting.push_back(one),
                Some(result) => step.answered.push((one.done, result)),
            }
        }
        step
    }

    /// Moves a write on; its answer if it is over.
    fn advance(&mut self, one: &mut Waiting, full: &mut Vec<Full>) -> Option<Answer> {
        let op = one.done.op();
        let (offset, len, is_zero) = match op {
            StorageOp::Write { offset, len } => (offset, len, false),
            StorageOp::ZeroRange { offset, len } | StorageOp::Punch { offset, len } => (offset, len, true),
            _ => return Some(Err(libc::EOPNOTSUPP)),
        };
        if self.len.is_some_and(|all| offset + len > all) {
            return Some(Err(libc::ENOSPC));
        }
        while one.moved < len {
            let at = offset + one.moved;
            let (index, within) = (at / self.size, at % self.size);
            let count = (len - one.moved).min(self.size - within);
            if !self.has_memory(index) {
                return None;
            }
            let whole = self.len_of(index);
            let size = self.size;
            if !self.parts.contains_key(&index) {
                let bytes = self.buffer(whole.unwrap_or(size));
                self.parts.insert(index, Part { bytes, ranges: Ranges::default() });
            }
            let Some(part) = self.parts.get_mut(&index) else { return Some(Err(libc::EIO)) };
            if !part.ranges.add(within..within + count) {
                // Each byte is written once: what was sent could not be changed.
                return Some(Err(libc::EIO));
            }
            if !is_zero {
                let place = &mut part.bytes[within as usize..(within + count) as usize];
                copy_from(&one.done, one.moved as usize, place);
            }
            one.moved += count;
            if part.ranges.is_whole(whole.unwrap_or(size)) {
                self.take_full(index, full);
            }
        }
        Some(Ok(if is_zero { StorageDone::Done } else { StorageDone::Moved(len) }))
    }

    /// Bytes of a part, if that is known.
    fn len_of(&self, index: u64) -> Option<u64> {
        self.len.map(|len| (len - index * self.size).min(self.size))
    }

    /// Whether there is memory for a part; takes it if so. The last buffer is for the first part that is missing, so that
    /// what all others wait for gets on.
    fn has_memory(&mut self, index: u64) -> bool {
        if self.parts.contains_key(&index) {
            return true;
        }
        let is_next = index <= self.frontier;
        let is_kept_free = usize::from(!is_next && !self.parts.contains_key(&self.frontier));
        // The first part of an object that grows is written last, and must have its place then.
        let of_first = usize::from(
            self.len.is_none() && index != 0 && !self.first_is_full && !self.parts.contains_key(&0),
        );
        if self.free <= is_kept_free + of_first {
            return false;
        }
        self.free -= 1;
        true
    }

    fn take_full(&mut self, index: u64, full: &mut Vec<Full>) {
        let Some(part) = self.parts.remove(&index) else { return };
        full.push((index, part.bytes.into()));
        if index == 0 {
            self.first_is_full = true;
        }
        self.ahead.insert(index);
        self.ahead.retain(|index| *index >= self.frontier);
        while self.ahead.remove(&self.frontier) {
            self.frontier += 1;
        }
    }

    /// Ends the object: what there is of it must have no gaps.
    pub(super) fn finish(&mut self) -> Result<Rest, &'static str> {
        const GAP: &str = "a part of the object was never written";
        let parts = std::mem::take(&mut self.parts);
        let first = parts.contains_key(&0) || self.first_is_full;
        if self.len == Some(0) || self.len.is_none() && !first && parts.is_empty() && self.frontier == 1 {
            return Ok(Rest { parts: 1, full: vec![(0, Bytes::new())] });
        }
        if self.len.is_some() || !first {
            let all = self.len.map_or(0, |len| len.div_ceil(self.size));
            let is_whole = parts.is_empty() && self.frontier == all && self.ahead.is_empty();
            return if is_whole { Ok(Rest { parts: all, full: Vec::new() }) } else { Err(GAP) };
        }
        if !self.ahead.is_empty() {
            return Err(GAP);
        }
        // Only the last one may be shorter.
        let last = if parts.contains_key(&self.frontier) { self.frontier } else { self.frontier - 1 };
        let mut full = Vec::new();
        for (index, mut part) in parts {
            let len = part.ranges.len_from_start();
            if index != last && len < self.size || part.ranges.count() > 1 {
                return Err(GAP);
            }
            part.bytes.truncate(len as usize);
            full.push((index, part.bytes.into()));
        }
        Ok(Rest { parts: last + 1, full })
    }
}

/// Copies bytes of a write from `skip` on.
fn copy_from(done: &Completer, mut skip: usize, mut place: &mut [u8]) {
    for buf in done.bufs().parts() {
        let bytes = buf.as_slice();
        if skip >= bytes.len() {
            skip -= bytes.len();
            continue;
        }
        let count = (bytes.len() - skip).min(place.len());
        let (now, later) = place.split_at_mut(count);
        now.copy_from_slice(&bytes[skip..skip + count]);
        place = later;
        skip = 0;
        if place.is_empty() {
            return;
        }
    }
}
