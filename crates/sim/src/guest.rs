//! The content that a guest is entitled to find on its virtual disk: now, and after a crash.

use crate::counts::Tally;
use crate::guest_history::{Entries, Entry, GuestResult, close, mark_durable, possible, settled, survive};
use crate::guest_tag::{Found, GUEST_SECTOR, Value, recognise};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// In flight: no end yet.
const OPEN: u64 = u64::MAX;

/// The content that a discard may leave behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscardLeaves {
    /// Zeroes.
    Zero,
    /// The old content, or zeroes.
    ZeroOrOld,
    /// The old content, zeroes, or the content of the backing image.
    Anything,
}

/// How a [`GuestModel`] begins.
#[derive(Debug, Clone)]
pub struct GuestConfig {
    /// Length of the virtual disk in bytes, a multiple of 512.
    pub len: u64,
    /// Bytes from 0 that hold [`crate::backing_pattern`] at first, a multiple of 512; the rest is zero.
    pub backing_len: u64,
    /// The content that a discard may leave.
    pub discard: DiscardLeaves,
}

/// A request of the guest that has begun. Offsets and lengths are multiples of 512.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum GuestRequest {
    Write { offset: u64, len: u64 },
    Zero { offset: u64, len: u64 },
    Discard { offset: u64, len: u64 },
    Resize { len: u64 },
    Flush,
    Read,
}

/// Names a request between its beginning and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GuestOp {
    number: u32,
    value: Value,
}

impl GuestOp {
    /// The value that a write writes: fill its buffer with [`Value::fill`].
    pub fn value(self) -> Value {
        self.value
    }
}

#[derive(Debug, Clone)]
struct Run {
    /// First sector after it.
    end: u64,
    entries: Entries<Value>,
}

#[derive(Debug, Clone)]
struct OpenRequest {
    request: GuestRequest,
    begin: u64,
}

/// A sector that holds what it must not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Guest offset of the sector in bytes.
    pub offset: u64,
    /// The content found.
    pub got: Found,
    /// The contents allowed.
    pub allowed: Vec<Value>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guest offset {:#x} holds {}; allowed:", self.offset, self.got)?;
        for value in &self.allowed {
            write!(f, " [{value}]")?;
        }
        Ok(())
    }
}

impl std::error::Error for Violation {}

/// The set of contents that a virtual disk may have.
///
/// Sectors are old or new as a whole, and say who wrote them ([`Value`]), so that a torn or misplaced one is seen.
/// A flush covers what ended before the flush began. After a crash, a sector holds its latest covered value or any
/// newer one; with a value that was in flight when another ended, either may have come last.
///
/// Memory: a few words per run of sectors with one history, and per value that may still show in it.
#[derive(Debug, Clone)]
pub struct GuestModel {
    config: GuestConfig,
    clock: u64,
    next_op: u32,
    /// By first sector; they cover every sector number.
    runs: BTreeMap<u64, Run>,
    lengths: Entries<u64>,
    open: BTreeMap<u32, OpenRequest>,
    tally: Tally,
}

fn sectors(offset: u64, len: u64) -> Range<u64> {
    assert!(
        offset.is_multiple_of(GUEST_SECTOR) && len.is_multiple_of(GUEST_SECTOR),
        "guest requests are in whole sectors: {offset} {len}"
    );
    offset / GUEST_SECTOR..(offset + len) / GUEST_SECTOR
}

impl GuestModel {
    /// A disk whose whole content is durable.
    pub fn new(config: GuestConfig) -> Self {
        let backed = sectors(0, config.backing_len.min(config.len)).end;
        let mut runs = BTreeMap::new();
        if backed > 0 {
            runs.insert(0, Run { end: backed, entries: settled(Value::Backing) });
        }
        runs.insert(backed, Run { end: u64::MAX, entries: settled(Value::Zero) });
        let lengths = settled(config.len);
        Self { config, clock: 0, next_op: 1, runs, lengths, open: BTreeMap::new(), tally: Tally::default() }
    }

    /// Has requests from now on, of this model and of its clones, be counted there.
    pub fn count_in(&mut self, tally: &Tally) {
        self.tally = tally.clone();
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Makes `at` the beginning of a run.
    fn split(&mut self, at: u64) {
        if let Some((&start, run)) = self.runs.range_mut(..=at).next_back()
            && start < at
            && at < run.end
        {
            let tail = Run { end: run.end, entries: run.entries.clone() };
            run.end = at;
            self.runs.insert(at, tail);
        }
    }

    fn add(&mut self, range: Range<u64>, entries: &[Entry<Value>]) {
        if range.is_empty() {
            return;
        }
        self.split(range.start);
        self.split(range.end);
        for (_, run) in self.runs.range_mut(range) {
            run.entries.extend_from_slice(entries);
        }
    }

    /// A request begins.
    ///
    /// # Panics
    /// If offset or length is not a multiple of 512, or after 2^24 requests.
    pub fn begin(&mut self, request: GuestRequest) -> GuestOp {
        let begin = self.tick();
        let number = self.next_op;
        self.next_op += 1;
        assert!(number < 1 << 24, "too many requests for one model");
        self.tally.change(|counts| counts.requests += 1);
        let entry = |value, settles| Entry { op: number, value, begin, end: OPEN, settles, durable: false };
        let mut written = Value::Zero;
        match request {
            GuestRequest::Write { offset, len } => {
                written = Value::Write(number);
                self.add(sectors(offset, len), &[entry(written, true)]);
            }
            GuestRequest::Zero { offset, len } => {
                self.add(sectors(offset, len), &[entry(Value::Zero, true)]);
            }
            GuestRequest::Discard { offset, len } => {
                let range = sectors(offset, len);
                match self.config.discard {
                    DiscardLeaves::Zero => self.add(range, &[entry(Value::Zero, true)]),
                    DiscardLeaves::ZeroOrOld => self.add(range, &[entry(Value::Zero, false)]),
                    DiscardLeaves::Anything => {
                        let backed = sectors(0, self.config.backing_len).end;
                        let low = range.start..range.end.min(backed).max(range.start);
                        self.add(low, &[entry(Value::Backing, false)]);
                        self.add(range, &[entry(Value::Zero, false)]);
                    }
                }
            }
            GuestRequest::Resize { len } => {
                let settles = true;
                self.lengths.push(Entry {
                    op: number,
                    value: len,
                    begin,
                    end: OPEN,
                    settles,
                    durable: false,
                });
                // What lies past the end comes back as zero if the disk grows again.
                self.add(sectors(len, 0).end..u64::MAX, &[entry(Value::Zero, true)]);
            }
            GuestRequest::Flush | GuestRequest::Read => {}
        }
        self.open.insert(number, OpenRequest { request, begin });
        GuestOp { number, value: written }
    }

    /// A request ends. Unknown ones (ended before, or lost in a crash) are ignored.
    pub fn end(&mut self, op: GuestOp, result: GuestResult) {
        let Some(open) = self.open.remove(&op.number) else { return };
        let end = self.tick();
        let range = match open.request {
            GuestRequest::Read => return,
            GuestRequest::Flush => {
                if matches!(result, GuestResult::Done | GuestResult::Durable) {
                    self.cover(open.begin);
                }
                return;
            }
            GuestRequest::Write { offset, len }
            | GuestRequest::Zero { offset, len }
            | GuestRequest::Discard { offset, len } => sectors(offset, len),
            GuestRequest::Resize { len } => {
                close(&mut self.lengths, op.number, end, result);
                len / GUEST_SECTOR..u64::MAX
            }
        };
        for (_, run) in self.runs.range_mut(range) {
            close(&mut run.entries, op.number, end, result);
        }
    }

    /// A write that begins and ends at once. Returns what it writes.
    pub fn write(&mut self, offset: u64, len: u64) -> Value {
        let op = self.begin(GuestRequest::Write { offset, len });
        self.end(op, GuestResult::Done);
        op.value
    }

    /// A request other than a write that begins and ends at once.
    pub fn apply(&mut self, request: GuestRequest) {
        let op = self.begin(request);
        self.end(op, GuestResult::Done);
    }

    /// Everything that ended before `begin` is durable.
    fn cover(&mut self, begin: u64) {
        let oldest_reader = self.open.values().map(|open| open.begin).min().unwrap_or(OPEN);
        for run in self.runs.values_mut() {
            mark_durable(&mut run.entries, begin, oldest_reader);
        }
        mark_durable(&mut self.lengths, begin, oldest_reader);
        self.join_runs();
    }

    /// Joins neighbours with one history.
    fn join_runs(&mut self) {
        let mut joined: BTreeMap<u64, Run> = BTreeMap::new();
        for (start, run) in std::mem::take(&mut self.runs) {
            match joined.last_entry() {
                Some(mut last) if last.get().entries == run.entries => last.get_mut().end = run.end,
                _ => {
                    joined.insert(start, run);
                }
            }
        }
        self.runs = joined;
    }

    fn check_with(
        &self,
        offset: u64,
        bytes: &[u8],
        counts: impl Fn(&Entry<Value>) -> bool + Copy,
    ) -> Result<(), Violation> {
        let range = sectors(offset, bytes.len() as u64);
        let mut sector = range.start;
        let runs = self.runs.range(..range.end).rev();
        let mut overlapping: Vec<&Run> =
            runs.take_while(|(_, run)| run.end > range.start).map(|(_, r)| r).collect();
        overlapping.reverse();
        for run in overlapping {
            let allowed: SmallVec<[Value; 4]> = possible(&run.entries, counts).map(|e| e.value).collect();
            while sector < run.end.min(range.end) {
                let at = ((sector - range.start) * GUEST_SECTOR) as usize;
                let got = recognise(&bytes[at..at + GUEST_SECTOR as usize], sector);
                if !matches!(got, Found::Value(value) if allowed.contains(&value)) {
                    let mut allowed = allowed.to_vec();
                    allowed.sort_unstable();
                    allowed.dedup();
                    return Err(Violation { offset: sector * GUEST_SECTOR, got, allowed });
                }
                sector += 1;
            }
        }
        Ok(())
    }

    /// Whether `bytes` may be found at `offset` after a crash at this moment.
    pub fn check(&self, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        self.check_with(offset, bytes, |e| e.durable)
    }

    /// Whether the sector at `offset` has but one content after a crash at this moment.
    pub fn is_settled(&self, offset: u64) -> bool {
        let sector = sectors(offset, 0).start;
        let Some((_, run)) = self.runs.range(..=sector).next_back() else { return true };
        let mut values = possible(&run.entries, |entry| entry.durable).map(|entry| entry.value);
        let first = values.next();
        values.all(|value| Some(value) == first)
    }

    /// Whether a read that began as `read` (see [`GuestRequest::Read`]) and is just over may have got `bytes`.
    /// Call it before [`GuestModel::end`].
    pub fn check_read(&self, read: GuestOp, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let begin = self.open.get(&read.number).map_or(0, |open| open.begin);
        self.check_with(offset, bytes, move |e| e.end < begin)
    }

    /// A number that grows with every beginning and every end: while it stays, what is allowed stays.
    pub fn moment(&self) -> u64 {
        self.clock
    }

    /// Whether the disk may have this length after a crash at this moment.
    pub fn may_have_len(&self, len: u64) -> bool {
        possible(&self.lengths, |e| e.durable).any(|e| e.value == len)
    }

    /// The length as the guest knows it: that of the latest resize that succeeded.
    pub fn len(&self) -> u64 {
        let ended = self.lengths.iter().filter(|e| e.end != OPEN && e.settles);
        ended.max_by_key(|e| e.end).map_or(self.config.len, |e| e.value)
    }

    /// Whether the disk has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The crash happened: requests in flight are lost, and what may be on disk is. Tell the model what was found
    /// with [`GuestModel::adopt_len`] and [`GuestModel::adopt`] (all of the disk), and the guest can go on.
    pub fn crash(&mut self) {
        self.open.clear();
        let now = self.tick();
        for run in self.runs.values_mut() {
            survive(&mut run.entries, now);
        }
        survive(&mut self.lengths, now);
    }

    /// Checks what a read found and takes it for settled and durable. To be used while nothing is in flight.
    pub fn adopt(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        self.check(offset, bytes)?;
        let now = self.tick();
        let range = sectors(offset, bytes.len() as u64);
        self.split(range.start);
        self.split(range.end);
        let mut settled: Vec<(u64, Run)> = Vec::new();
        for (sector, content) in range.clone().zip(bytes.chunks(GUEST_SECTOR as usize)) {
            let Found::Value(value) = recognise(content, sector) else { continue };
            match settled.last_mut() {
                Some((_, run)) if run.entries[0].value == value => run.end = sector + 1,
                _ => {
                    let entry = Entry { op: 0, value, begin: now, end: now, settles: true, durable: true };
                    settled.push((sector, Run { end: sector + 1, entries: smallvec![entry] }));
                }
            }
        }
        let old: Vec<u64> = self.runs.range(range).map(|(&start, _)| start).collect();
        for start in old {
            self.runs.remove(&start);
        }
        self.runs.extend(settled);
        Ok(())
    }

    /// Checks the length that was found and takes it for settled and durable.
    ///
    /// # Errors
    /// The lengths that were possible.
    pub fn adopt_len(&mut self, len: u64) -> Result<(), Vec<u64>> {
        if !self.may_have_len(len) {
            return Err(possible(&self.lengths, |e| e.durable).map(|e| e.value).collect());
        }
        let now = self.tick();
        self.lengths =
            smallvec![Entry { op: 0, value: len, begin: now, end: now, settles: true, durable: true }];
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;

    fn model() -> GuestModel {
        GuestModel::new(GuestConfig {
            len: 64 * KIB,
            backing_len: 16 * KIB,
            discard: DiscardLeaves::Anything,
        })
    }

    fn holds(value: Value, offset: u64) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        value.fill(offset, &mut bytes);
        bytes
    }

    /// The values that the model allows in a sector after a crash, found by trying all.
    fn allowed(model: &GuestModel, offset: u64) -> Vec<Value> {
        let mut all = vec![Value::Zero, Value::Backing];
        all.extend((1..model.next_op).map(Value::Write));
        all.retain(|value| model.check(offset, &holds(*value, offset)).is_ok());
        all
    }

    #[test]
    fn unflushed_writes_are_old_or_new_and_flushed_ones_new() {
        let mut model = model();
        assert_eq!(allowed(&model, 0), [Value::Backing]);
        assert_eq!(allowed(&model, 16 * KIB), [Value::Zero]);
        let a = model.write(0, 4096);
        let b = model.write(512, 512);
        assert_eq!(allowed(&model, 0), [Value::Backing, a]);
        assert_eq!(allowed(&model, 512), [Value::Backing, a, b]);
        model.apply(GuestRequest::Flush);
        assert_eq!(allowed(&model, 0), [a]);
        assert_eq!(allowed(&model, 512), [b]);
        model.apply(GuestRequest::Zero { offset: 0, len: 1024 });
        assert_eq!(allowed(&model, 512), [Value::Zero, b]);
        model.apply(GuestRequest::Flush);
        assert_eq!(allowed(&model, 512), [Value::Zero]);
        assert_eq!(model.runs.len(), 4, "histories were joined: {:?}", model.runs);
    }

    #[test]
    fn a_flush_covers_what_ended_before_it_began() {
        let mut model = model();
        let in_flight = model.begin(GuestRequest::Write { offset: 0, len: 512 });
        let flush = model.begin(GuestRequest::Flush);
        assert!(!model.is_settled(0) && model.is_settled(512));
        model.end(in_flight, GuestResult::Done);
        model.end(flush, GuestResult::Done);
        assert_eq!(allowed(&model, 0), [Value::Backing, in_flight.value()]);
        let failed = model.begin(GuestRequest::Flush);
        model.end(failed, GuestResult::Failed);
        assert_eq!(allowed(&model, 0), [Value::Backing, in_flight.value()]);
        model.apply(GuestRequest::Flush);
        assert_eq!(allowed(&model, 0), [in_flight.value()]);
        assert!(model.is_settled(0));
        let fua = model.begin(GuestRequest::Write { offset: 0, len: 512 });
        model.end(fua, GuestResult::Durable);
        assert_eq!(allowed(&model, 0), [fua.value()]);
    }

    #[test]
    fn writes_that_overlap_in_time_end_as_either() {
        let mut model = model();
        let a = model.begin(GuestRequest::Write { offset: 0, len: 512 });
        let b = model.begin(GuestRequest::Write { offset: 0, len: 512 });
        model.end(b, GuestResult::Done);
        model.apply(GuestRequest::Flush);
        assert_eq!(allowed(&model, 0), [a.value(), b.value()], "one is durable, the other in flight");
        model.end(a, GuestResult::Done);
        model.apply(GuestRequest::Flush);
        assert_eq!(allowed(&model, 0), [a.value(), b.value()]);
        let c = model.write(0, 512);
        model.apply(GuestRequest::Flush);
        assert_eq!(allowed(&model, 0), [c]);
    }

    #[test]
    fn reads_see_what_was_there_at_some_time_while_they_ran() {
        let mut model = model();
        let before = model.write(0, 512);
        let read = model.begin(GuestRequest::Read);
        let during = model.write(0, 512);
        model.apply(GuestRequest::Flush);
        let late = model.begin(GuestRequest::Read);
        assert!(model.check_read(read, 0, &holds(before, 0)).is_ok(), "pruned under a reader");
        assert!(model.check_read(read, 0, &holds(during, 0)).is_ok());
        let violation = model.check_read(late, 0, &holds(before, 0)).unwrap_err();
        assert_eq!(violation.allowed, [during]);
        assert_eq!(violation.got, Found::Value(before));
        assert!(model.check_read(late, 0, &holds(during, 0)).is_ok());
    }

    #[test]
    fn failed_writes_and_discards_leave_both() {
        let mut model = model();
        let old = model.write(0, 512);
        model.apply(GuestRequest::Flush);
        let failed = model.begin(GuestRequest::Write { offset: 0, len: 512 });
        model.end(failed, GuestResult::Failed);
        model.apply(GuestRequest::Flush);
        assert_eq!(allowed(&model, 0), [old, failed.value()]);
        let clean = model.begin(GuestRequest::Write { offset: 0, len: 512 });
        model.end(clean, GuestResult::FailedUnchanged);
        assert_eq!(allowed(&model, 0), [old, failed.value()]);
        model.apply(GuestRequest::Discard { offset: 0, len: 512 });
        assert_eq!(allowed(&model, 0), [Value::Zero, Value::Backing, old, failed.value()]);
        model.crash();
        model.adopt(0, &holds(old, 0)).unwrap();
        assert_eq!(allowed(&model, 0), [old]);
        assert!(model.adopt(0, &holds(failed.value(), 0)).is_err());
    }

    #[test]
    fn a_cut_disk_comes_back_as_zero() {
        let mut model = model();
        let old = model.write(32 * KIB, 512);
        model.apply(GuestRequest::Flush);
        model.apply(GuestRequest::Resize { len: 8 * KIB });
        assert!(model.may_have_len(8 * KIB) && model.may_have_len(64 * KIB) && !model.may_have_len(0));
        assert_eq!(allowed(&model, 32 * KIB), [Value::Zero, old]);
        assert_eq!(model.len(), 8 * KIB);
        model.apply(GuestRequest::Resize { len: 64 * KIB });
        model.apply(GuestRequest::Flush);
        assert!(!model.may_have_len(8 * KIB));
        assert_eq!(allowed(&model, 32 * KIB), [Value::Zero]);
        assert_eq!(allowed(&model, 8 * KIB), [Value::Zero], "the backing image must not shine through");
        assert_eq!(allowed(&model, 4 * KIB), [Value::Backing]);
    }

    #[test]
    fn torn_and_misplaced_sectors_are_violations() {
        let mut model = model();
        let a = model.write(0, 1024);
        let mut torn = holds(a, 0);
        torn[256..].fill(0);
        assert!(matches!(model.check(0, &torn).unwrap_err().got, Found::Torn(_)));
        let misplaced = holds(a, 512);
        assert!(matches!(model.check(0, &misplaced).unwrap_err().got, Found::Misplaced { sector: 1, .. }));
        let violation = model.check(1024, &holds(a, 1024)).unwrap_err();
        assert_eq!(violation.to_string(), "guest offset 0x400 holds write 1; allowed: [backing]");
    }
}
