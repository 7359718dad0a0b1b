//! The simulated disk proper: what reads see, what is durable, and what lies between.
//!
//! The state is a function of the log alone: a world and a cursor over its log feed the same events to the same code.
//!
//! Rules, per file:
//! - Reads see the *volatile* content: every applied operation, in order of application.
//! - A flush that succeeds makes durable what *completed* before the flush was submitted. Operations applied by then
//!   but completed later may be durable or not, as may everything newer.
//! - What a sector holds after a crash is a value that it had in the volatile view at some time since the last value
//!   that is known to be durable, or what an operation in flight would make of it.
//! - Changes of length are ordered among themselves, as in a file system's journal: if one `set_len` is durable, all
//!   earlier ones are, and what a cut took away cannot come back behind a later growth. Growth by writes is like
//!   data: it may be lost while the data is not (which hides the data), and the other way round (zeroes).
//! - A flush that fails takes away the guarantee for everything that it might have covered: no later flush gives it
//!   back (Linux marks the pages clean; fsync(2), "the errors will be reported" once).

use crate::content::{Content, Space};
use crate::log::LogEvent;
use crate::op::{FileNumber, OpNumber, SimOp};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that a disk writes as a whole or not at all.
pub const SECTOR: u64 = 512;

/// The content that an operation gives to sectors.
#[derive(Debug, Clone)]
pub(crate) enum Image {
    /// These bytes, from `start` on.
    Bytes { data: Arc<[u8]>, start: usize },
    /// Zero, without data behind it.
    Clear(Space),
    /// The same bytes, with space reserved for them.
    Reserve,
}

/// Whole sectors and what they become. Bytes are after-images: they hold what the sector held after the operation
/// in the volatile view, so that a partial overwrite of a sector can't land without what was in the sector before.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) range: Range<u64>,
    pub(crate) image: Image,
}

impl Piece {
    /// The part of the piece that lies in `range`, which is in whole sectors.
    pub(crate) fn part(&self, range: &Range<u64>) -> Option<Self> {
        let start = self.range.start.max(range.start);
        let end = self.range.end.min(range.end);
        (start < end).then(|| {
            let image = match &self.image {
                Image::Bytes { data, start: first } => {
                    Image::Bytes { data: data.clone(), start: first + (start - self.range.start) as usize }
                }
                other => other.clone(),
            };
            Self { range: start..end, image }
        })
    }

    /// Brings the piece into `content`. The length of `content` is the caller's to put right afterwards.
    pub(crate) fn land(&self, content: &mut Content) {
        match &self.image {
            Image::Bytes { data, start } => {
                let len = (self.range.end - self.range.start) as usize;
                content.write(self.range.start, &data[*start..][..len]);
            }
            Image::Clear(space) => content.clear(self.range.clone(), *space),
            Image::Reserve => content.allocate(self.range.clone()),
        }
    }
}

/// The content that a copy found in its source, by ranges of the target: bytes, or a hole.
pub(crate) type CopiedRuns = Vec<(Range<u64>, Option<Arc<[u8]>>)>;

/// The effect of an operation on the length of the file.
#[derive(Debug, Clone)]
pub(crate) enum LengthStep {
    /// At least this long afterwards.
    Grow(u64),
    /// This long afterwards; the bytes of `cut` went away.
    Set { len: u64, cut: Range<u64> },
}

/// A change that took effect and is not known to be durable.
#[derive(Debug, Clone)]
pub(crate) struct Applied {
    pub(crate) op: OpNumber,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) length: Option<LengthStep>,
    /// When the operation completed, if it did: a count of completions on this disk.
    completed: Option<u64>,
    /// A failed flush was responsible for it.
    lost: bool,
}

impl Applied {
    pub(crate) fn is_set_len(&self) -> bool {
        matches!(self.length, Some(LengthStep::Set { .. }))
    }
}

fn sectors_around(range: &Range<u64>) -> Range<u64> {
    range.start / SECTOR * SECTOR..range.end.div_ceil(SECTOR) * SECTOR
}

/// One file of the disk.
#[derive(Debug, Clone)]
pub(crate) struct FileState {
    pub(crate) name: String,
    pub(crate) volatile: Content,
    /// The content that is surely on disk. Later changes of the same sectors may have replaced it.
    pub(crate) durable: Content,
    /// In the order of application.
    pub(crate) uncovered: Vec<Applied>,
    pub(crate) in_flight: BTreeMap<OpNumber, SimOp>,
}

impl FileState {
    fn new(name: String, content: Content) -> Self {
        Self {
            name,
            durable: content.clone(),
            volatile: content,
            uncovered: Vec::new(),
            in_flight: BTreeMap::new(),
        }
    }

    /// Lets the part `range` of an operation take effect in `volatile`, and says what it did.
    pub(crate) fn perform(
        volatile: &mut Content,
        op: OpNumber,
        what: &SimOp,
        range: &Range<u64>,
        copied: Option<&CopiedRuns>,
    ) -> Applied {
        let mut pieces = Vec::new();
        let mut length = None;
        let grown = |length: &mut Option<LengthStep>| {
            if range.start < range.end {
                *length = Some(LengthStep::Grow(range.end));
            }
        };
        match what {
            SimOp::Read { .. } | SimOp::Flush | SimOp::ExtentAt { .. } => {}
            SimOp::Write { offset, data } => {
                let start = (range.start - offset) as usize;
                volatile.write(range.start, &data[start..(range.end - offset) as usize]);
                grown(&mut length);
                Self::image_of_bytes(volatile, range, Some((data, start)), &mut pieces);
            }
            SimOp::Copy { .. } | SimOp::Clone { .. } => {
                // What was found in the source decides how far it goes.
                if let Some((last, _)) = copied.and_then(|runs| runs.last()) {
                    if volatile.len() < last.end {
                        volatile.set_len(last.end);
                    }
                    length = Some(LengthStep::Grow(last.end));
                }
                for (run, data) in copied.into_iter().flatten() {
                    if let Some(data) = data {
                        volatile.write(run.start, data);
                        Self::image_of_bytes(volatile, run, Some((data, 0)), &mut pieces);
                    } else {
                        Self::clear(volatile, run, Space::Hole, &mut pieces);
                    }
                }
            }
            SimOp::Punch { .. } => {
                let end = range.end.min(volatile.len());
                Self::clear(volatile, &(range.start..end), Space::Hole, &mut pieces);
            }
            SimOp::ZeroRange { .. } => {
                if volatile.len() < range.end {
                    volatile.set_len(range.end);
                }
                grown(&mut length);
                Self::clear(volatile, range, Space::Reserved, &mut pieces);
            }
            SimOp::Allocate { .. } => {
                volatile.allocate(range.clone());
                grown(&mut length);
                pieces.push(Piece { range: sectors_around(range), image: Image::Reserve });
            }
            SimOp::SetLen { len } => {
                let cut = *len..volatile.len().max(*len);
                if !cut.is_empty() {
                    Self::clear(volatile, &cut, Space::Hole, &mut pieces);
                }
                volatile.set_len(*len);
                length = Some(LengthStep::Set { len: *len, cut });
            }
        }
        Applied { op, pieces, length, completed: None, lost: false }
    }

    fn image_of_bytes(
        volatile: &Content,
        range: &Range<u64>,
        source: Option<(&Arc<[u8]>, usize)>,
        pieces: &mut Vec<Piece>,
    ) {
        let around = sectors_around(range);
        if range.is_empty() {
            return;
        }
        let image = match source {
            Some((data, start)) if around == *range => Image::Bytes { data: data.clone(), start },
            _ => Image::Bytes { data: volatile.bytes(around.clone()).into(), start: 0 },
        };
        pieces.push(Piece { range: around, image });
    }

    fn clear(volatile: &mut Content, range: &Range<u64>, space: Space, pieces: &mut Vec<Piece>) {
        if range.start >= range.end {
            return;
        }
        let at_end = range.end == volatile.len();
        volatile.clear(range.clone(), space);
        let around = sectors_around(range);
        let first_whole = range.start.div_ceil(SECTOR) * SECTOR;
        let last_whole = if at_end { around.end } else { range.end / SECTOR * SECTOR };
        let edge = |from: u64, pieces: &mut Vec<Piece>| {
            let sector = from..from + SECTOR;
            let data = volatile.bytes(sector.clone()).into();
            pieces.push(Piece { range: sector, image: Image::Bytes { data, start: 0 } });
        };
        if around.start < first_whole {
            edge(around.start, pieces);
        }
        if first_whole < last_whole {
            pieces.push(Piece { range: first_whole..last_whole, image: Image::Clear(space) });
        }
        let tail = last_whole.max(first_whole);
        if tail < around.end {
            edge(tail, pieces);
        }
    }

    /// Makes durable what `covered` says, and what that implies.
    fn cover(&mut self, covered: impl Fn(&Applied) -> bool) {
        let mut flags: Vec<bool> = self.uncovered.iter().map(covered).collect();
        // Changes of length are journalled in order: a later one takes earlier `set_len`s along.
        let last_length = (0..flags.len()).rev().find(|&i| flags[i] && self.uncovered[i].length.is_some());
        if let Some(last) = last_length {
            for (flag, applied) in flags[..last].iter_mut().zip(&self.uncovered) {
                *flag |= applied.is_set_len();
            }
        }
        let all = std::mem::take(&mut self.uncovered);
        let mut len = self.durable.len();
        for (applied, covered) in all.into_iter().zip(flags) {
            if !covered {
                self.uncovered.push(applied);
                continue;
            }
            match &applied.length {
                Some(LengthStep::Grow(to)) => len = len.max(*to),
                Some(LengthStep::Set { len: to, cut }) => {
                    len = *to;
                    self.forget_older(cut);
                    // Growth before a cut that is durable is over.
                    for older in &mut self.uncovered {
                        if matches!(older.length, Some(LengthStep::Grow(_))) {
                            older.length = None;
                        }
                    }
                }
                None => {}
            }
            for piece in &applied.pieces {
                if !matches!(piece.image, Image::Reserve) {
                    self.forget_older(&piece.range);
                }
                piece.land(&mut self.durable);
            }
        }
        self.durable.set_len(len);
        self.uncovered.retain(|a| !a.pieces.is_empty() || a.length.is_some());
    }

    /// Older changes of these sectors that are not durable never will be.
    fn forget_older(&mut self, range: &Range<u64>) {
        for older in &mut self.uncovered {
            if older.pieces.iter().any(|p| p.range.start < range.end && range.start < p.range.end) {
                older.pieces = older
                    .pieces
                    .iter()
                    .flat_map(|p| [p.part(&(0..range.start)), p.part(&(range.end..u64::MAX))])
                    .flatten()
                    .collect();
            }
        }
    }

    /// The effects of the operations in flight if they took effect now, in this order.
    pub(crate) fn unfinished(
        &self,
        order: &[OpNumber],
        copied: &BTreeMap<OpNumber, CopiedRuns>,
    ) -> Vec<Applied> {
        let mut scratch = self.volatile.clone();
        order
            .iter()
            .filter_map(|op| Some((*op, self.in_flight.get(op)?)))
            .filter(|(_, what)| what.changes_file())
            .map(|(op, what)| Self::perform(&mut scratch, op, what, &what.range(), copied.get(&op)))
            .filter(|applied| !applied.pieces.is_empty() || applied.length.is_some())
            .collect()
    }
}

/// All files, fed by the events of a log.
#[derive(Debug, Clone, Default)]
pub(crate) struct DiskState {
    pub(crate) files: Vec<FileState>,
    file_of_op: BTreeMap<OpNumber, FileNumber>,
    completions: u64,
    /// Flushes in flight, and how many completions there had been when each was submitted.
    flushes: BTreeMap<OpNumber, u64>,
}

impl DiskState {
    /// Brings the state up to date with one more event.
    pub(crate) fn follow(&mut self, event: &LogEvent) {
        match event {
            LogEvent::File { name, content, .. } => {
                self.files.push(FileState::new(name.clone(), content.clone()));
            }
            LogEvent::Submitted { op, file, what, .. } => {
                self.file_of_op.insert(*op, *file);
                self.files[file.0].in_flight.insert(*op, what.clone());
                if *what == SimOp::Flush {
                    self.flushes.insert(*op, self.completions);
                }
            }
            LogEvent::Applied { op, range } => {
                let Some(file) = self.file_of_op.get(op).copied() else { return };
                let Some(what) = self.files[file.0].in_flight.get(op).cloned() else { return };
                let copied = self.source_bytes(&what, range);
                let state = &mut self.files[file.0];
                let applied = FileState::perform(&mut state.volatile, *op, &what, range, copied.as_ref());
                if !applied.pieces.is_empty() || applied.length.is_some() {
                    state.uncovered.push(applied);
                }
            }
            LogEvent::Completed { op, result } => self.completed(*op, result.is_ok()),
            LogEvent::Mark(_) => {}
        }
    }

    fn completed(&mut self, op: OpNumber, success: bool) {
        let Some(file) = self.file_of_op.remove(&op) else { return };
        let state = &mut self.files[file.0];
        state.in_flight.remove(&op);
        self.completions += 1;
        for applied in state.uncovered.iter_mut().rev().filter(|a| a.op == op) {
            applied.completed = Some(self.completions);
        }
        if let Some(begin) = self.flushes.remove(&op) {
            if success {
                state.cover(|a| !a.lost && a.completed.is_some_and(|done| done <= begin));
            } else {
                for applied in &mut state.uncovered {
                    applied.lost = true;
                }
            }
        }
    }

    /// The bytes that a copy reads for the part `range` of its target.
    pub(crate) fn source_bytes(&self, what: &SimOp, range: &Range<u64>) -> Option<CopiedRuns> {
        let (SimOp::Copy { source, source_offset, offset, .. }
        | SimOp::Clone { source, source_offset, offset, .. }) = what
        else {
            return None;
        };
        let content = &self.files[source.0].volatile;
        let mut at = range.start;
        let mut runs = CopiedRuns::new();
        while at < range.end {
            let from = source_offset + (at - offset);
            // Nothing is copied from past the end.
            let Some((len, hole)) = content.run_at(from) else { break };
            let end = range.end.min(at.saturating_add(len));
            runs.push((at..end, (!hole).then(|| content.bytes(from..from + (end - at)).into())));
            at = end;
        }
        Some(runs)
    }
}
