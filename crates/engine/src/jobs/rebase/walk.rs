//! Walks both mappings and decides what has to be looked at.

use super::job::Job;
use crate::jobs::queue::Queue;
use crate::jobs::two_disks::{Step, TwoDisks};
use crate::{Extent, ExtentKind, Result};
use zebu_storage::Worker;

/// Most bytes of a piece that is zeroed: so many pass between two looks at a cancellation.
const MAX_ZERO: u64 = 1 << 30;

/// Which chains have to be read for a range; the other one is known to be zero there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sides {
    Both,
    Old,
    New,
}

/// A piece of work. Offsets and lengths are multiples of the job's unit, but for the end of the disk.
#[derive(Debug, Clone, Copy)]
pub(super) enum Piece {
    /// Read, compare, and write what differs.
    Compare { offset: u64, len: usize, sides: Sides },
    /// The old chain is zero, and the new one is not.
    Zero { offset: u64, len: u64 },
}

/// The need of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Nothing,
    Zero,
    Compare(Sides),
}

/// A comparison that the next range may still extend.
#[derive(Debug, Clone, Copy)]
struct Pending {
    offset: u64,
    len: usize,
    sides: Sides,
}

impl Job {
    /// Queues everything that is to be done, in order of offset.
    pub(super) async fn walk(&self, worker: &Worker, queue: &Queue<Piece>) -> Result<()> {
        let mut walker = Walker { job: self, queue, pending: None };
        let new = self.new.as_ref().unwrap_or(&self.image).source_extents(0..self.new_size);
        let mut disks = TwoDisks::new([self.image.source_extents(0..self.total), new], self.total);
        while !self.is_stopped()
            && let Some(Step { start: at, end: until, extents }) =
                disks.next(worker).await.map_err(|(_, error)| error)?
        {
            let end = match self.need(&extents) {
                Need::Nothing => {
                    self.skip(until - at);
                    until
                }
                Need::Compare(sides) => walker.compare(at, until, sides).await,
                Need::Zero => {
                    let (start, end) = (self.unit_end(at), self.unit_start(until));
                    if at != self.unit_start(at) {
                        walker.compare(at, start.min(until), Sides::New).await
                    } else if end > at {
                        walker.zero(at, end).await;
                        end
                    } else {
                        walker.compare(at, until, Sides::New).await
                    }
                }
            };
            disks.go_on_at(end);
        }
        walker.emit_pending().await;
        Ok(())
    }

    fn skip(&self, len: u64) {
        self.count(|report| report.skipped += len);
        self.tracker.advance(len);
    }

    fn unit_start(&self, offset: u64) -> u64 {
        // The disk's end may cut the last unit short.
        if offset == self.total { offset } else { offset / self.unit * self.unit }
    }

    fn unit_end(&self, offset: u64) -> u64 {
        offset.checked_next_multiple_of(self.unit).map_or(self.total, |end| end.min(self.total))
    }

    fn need(&self, [old, new]: &[Option<Extent>; 2]) -> Need {
        let Some(old) = old else { return Need::Nothing };
        if old.depth == 0 && old.kind != ExtentKind::Unallocated {
            return Need::Nothing;
        }
        let new_shows = new.as_ref().is_some_and(|extent| !extent.is_zero());
        match (!old.is_zero(), new_shows) {
            (false, false) => Need::Nothing,
            (true, true) if self.have_one_owner(old, new.as_ref()) => Need::Nothing,
            (true, true) => Need::Compare(Sides::Both),
            (true, false) => Need::Compare(Sides::Old),
            (false, true) if self.has_zero_clusters => Need::Zero,
            (false, true) => Need::Compare(Sides::New),
        }
    }

    /// Whether both chains show what one image holds for this range.
    fn have_one_owner(&self, old: &Extent, new: Option<&Extent>) -> bool {
        let owner = |side: usize, extent: &Extent| self.owners[side].get(extent.depth as usize);
        new.is_some_and(|new| owner(0, old).is_some_and(|old| owner(1, new) == Some(old)))
    }
}

struct Walker<'a> {
    job: &'a Job,
    queue: &'a Queue<Piece>,
    pending: Option<Pending>,
}

impl Walker<'_> {
    /// Queues the comparison of the units that the range touches; gives the end of the last one.
    async fn compare(&mut self, start: u64, until: u64, sides: Sides) -> u64 {
        let (first, end) = (self.job.unit_start(start), self.job.unit_end(until));
        // What was taken along may be anything.
        let sides = if (first, end) == (start, until) { sides } else { Sides::Both };
        let chunk = self.job.chunk as u64;
        let mut at = first;
        while at < end && !self.job.is_stopped() {
            let boundary = (at / chunk + 1).saturating_mul(chunk);
            let len = (end.min(boundary) - at) as usize;
            match &mut self.pending {
                Some(pending)
                    if pending.sides == sides
                        && pending.offset + pending.len as u64 == at
                        && !at.is_multiple_of(chunk) =>
                {
                    pending.len += len;
                }
                _ => {
                    self.emit_pending().await;
                    self.pending = Some(Pending { offset: at, len, sides });
                }
            }
            at += len as u64;
        }
        end
    }

    async fn zero(&mut self, start: u64, end: u64) {
        self.emit_pending().await;
        let mut at = start;
        while at < end && !self.job.is_stopped() {
            let len = (end - at).min(MAX_ZERO);
            self.queue.push(Piece::Zero { offset: at, len }).await;
            at += len;
        }
    }

    async fn emit_pending(&mut self) {
        if let Some(Pending { offset, len, sides }) = self.pending.take() {
            self.queue.push(Piece::Compare { offset, len, sides }).await;
        }
    }
}
