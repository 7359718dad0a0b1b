//! Parts that are being filled by writes, within a bound of memory.

use super::ranges::Ranges;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
    /// Full parts behind it.
    ahead: BTreeSet<u64>,
    /// The first one was full.
    first_is_full: bool,
    waiting: VecDeque<Waiting>,
    /// The only part of an object that has no others.
    only: Option<Full>,
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

/// The end of an object, when its writer is ready.
pub(super) struct Rest {
    /// How many parts there are in all.
    pub(super) parts: u64,
    /// Parts that were not sent.
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
            frontier: u64::from(len.is_none()),
            ahead: BTreeSet::new(),
            first_is_full: false,
            waiting: VecDeque::new(),
            only: None,
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
            if self.was_full(index) {
                // Each byte is written once: what was sent can't be changed.
                return Some(Err(libc::EIO));
            }
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

    /// Whether all bytes of a part were there once.
    fn was_full(&self, index: u64) -> bool {
        let is_behind = index < self.frontier && (index > 0 || self.len.is_some());
        is_behind || self.ahead.contains(&index) || index == 0 && self.first_is_full
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
        let whole = (index, part.bytes.into());
        // An object that is one part needs no upload in parts.
        if self.len.is_some_and(|len| len <= self.size) {
            self.only = Some(whole);
        } else {
            full.push(whole);
        }
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
            let full = self.only.take().into_iter().collect();
            return if is_whole { Ok(Rest { parts: all, full }) } else { Err(GAP) };
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::Mutex;
    use zebu_storage::{IoBuf, IoBufs};

    const SIZE: u64 = 100;

    fn byte(at: u64) -> u8 {
        (at % 241 + 1) as u8
    }

    /// `tasks` take writes in this order, and each submits its own some time later, in any order; parts are sent one after the
    /// other. What was sent.
    fn run(
        len: Option<u64>,
        buffers: usize,
        tasks: usize,
        ops: &[(u64, u64, bool)],
        seed: u64,
    ) -> Result<Vec<u8>, &'static str> {
        let mut random = random(seed);
        let mut filling = Filling::new(SIZE, buffers, len);
        let answers = Arc::new(Mutex::new(Vec::new()));
        let mut sent: BTreeMap<u64, Bytes> = BTreeMap::new();
        let mut sending: VecDeque<Full> = VecDeque::new();
        let (mut next, mut answered, mut submitted) = (0, 0, 0);
        let mut taken: Vec<(u64, u64, bool)> = Vec::new();
        while answered < ops.len() {
            while next < ops.len() && next - answered < tasks {
                taken.push(ops[next]);
                next += 1;
            }
            if !taken.is_empty() && random().is_multiple_of(2) {
                let (offset, len, is_zero) = taken.swap_remove(random() as usize % taken.len());
                let bytes: Vec<u8> = (offset..offset + len).map(byte).collect();
                let op = if is_zero {
                    StorageOp::ZeroRange { offset, len }
                } else {
                    StorageOp::Write { offset, len }
                };
                let bufs = if is_zero { IoBufs::new() } else { IoBuf::copy_of(&bytes).into() };
                let answers = Arc::clone(&answers);
                let done =
                    Completer::new(op, bufs, move |_, result| answers.lock().unwrap().push(result.is_ok()));
                filling.add(op, done);
                submitted += 1;
            }
            let step = filling.step();
            let moved = !step.answered.is_empty();
            for (done, result) in step.answered {
                answered += 1;
                done.finish(result);
            }
            sending.extend(step.full);
            let in_memory = filling.parts.len() + sending.len();
            assert!(in_memory <= buffers, "{in_memory} parts in memory");
            if !moved && (taken.is_empty() || random().is_multiple_of(3)) {
                let Some((index, part)) = sending.pop_front() else {
                    if taken.is_empty() && submitted == next {
                        return Err("a write waits for ever");
                    }
                    continue;
                };
                assert!(sent.insert(index, part.clone()).is_none());
                filling.give_back(part);
            }
        }
        if answers.lock().unwrap().iter().any(|ok| !ok) {
            return Err("a write failed");
        }
        sent.extend(sending);
        let rest = filling.finish()?;
        sent.extend(rest.full);
        assert_eq!(sent.len() as u64, rest.parts);
        assert!(sent.keys().copied().eq(0..rest.parts));
        Ok(sent.into_values().flat_map(|part| part.to_vec()).collect())
    }

    fn expected(ops: &[(u64, u64, bool)]) -> Vec<u8> {
        let end = ops.iter().map(|(offset, len, _)| offset + len).max().unwrap_or(0);
        let mut bytes: Vec<u8> = (0..end).map(byte).collect();
        for (offset, len, _) in ops.iter().filter(|(_, _, is_zero)| *is_zero) {
            bytes[*offset as usize..(offset + len) as usize].fill(0);
        }
        bytes
    }

    fn random(mut seed: u64) -> impl FnMut() -> u64 {
        move || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            seed >> 33
        }
    }

    /// Ranges that cover `from..to`.
    fn ranges(from: u64, to: u64, seed: u64) -> Vec<(u64, u64, bool)> {
        let mut random = random(seed);
        let (mut at, mut ops) = (from, Vec::new());
        while at < to {
            let len = (random() % 70 + 1).min(to - at);
            // A long run of zeroes now and then.
            let (len, is_zero) = if random().is_multiple_of(9) {
                (450.min(to - at), true)
            } else {
                (len, random().is_multiple_of(4))
            };
            ops.push((at, len, is_zero));
            at += len;
        }
        ops
    }

    #[test]
    fn nearly_ordered_writes_become_parts_within_the_memory() {
        for seed in 0..300 {
            for (buffers, tasks) in [(2, 1), (2, 8), (3, 4), (6, 16)] {
                let len = 1 + seed * 37 % 3000;
                let ops = ranges(0, len, seed);
                let made = run(Some(len), buffers, tasks, &ops, seed);
                assert!(made == Ok(expected(&ops)), "{seed} {buffers} {tasks} {:?}", made.err());
            }
            // The beginning comes last.
            let len = 10 + seed * 41 % 3000;
            let mut ops = ranges(7, len, seed);
            ops.push((0, 7, false));
            for tasks in [1, 2, 8] {
                let made = run(None, 3, tasks, &ops, seed);
                assert!(made == Ok(expected(&ops)), "{seed} {tasks} {:?}", made.err());
            }
        }
        assert_eq!(run(Some(0), 2, 1, &[], 0), Ok(Vec::new()));
        assert_eq!(run(None, 3, 1, &[], 0), Ok(Vec::new()));
    }

    #[test]
    fn gaps_and_bytes_that_come_twice_are_errors() {
        for (len, ops) in [
            (Some(300), &[(0, 100, false), (200, 100, false)][..]),
            (Some(300), &[(0, 299, false)]),
            (None, &[(0, 100, false), (200, 50, false)]),
            (None, &[(0, 50, false), (100, 50, false)]),
            (None, &[(0, 100, false), (100, 20, false), (130, 10, false)]),
            (None, &[(100, 100, false)]),
        ] {
            assert!(run(len, 5, 1, ops, 0).is_err_and(|why| why.contains("never written")), "{ops:?}");
        }
        for ops in
            [&[(0, 10, false), (5, 1, false)][..], &[(0, 100, false), (0, 1, true)], &[(290, 20, false)]]
        {
            let failed = run(Some(300), 5, 1, ops, 0);
            assert!(failed.is_err_and(|why| why.contains("failed")), "{ops:?}");
        }
    }
}
