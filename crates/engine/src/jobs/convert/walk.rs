//! Walks the sources' mappings and decides what is done with each range.

use super::job::{Job, Part};
use super::offload::{Offload, Offloader};
use super::options::ReadErrors;
use super::piece::Piece;
use super::source_range::SourceRange;
use crate::jobs::queue::Queue;
use crate::transfer::FileRange;
use crate::{Extent, ExtentKind, Result};
use zebu_storage::Worker;

/// Most bytes of a piece that is zeroed, and most clusters where each has an entry of its own: so many pass between two looks at a
/// cancellation.
const MAX_ZERO: u64 = 1 << 30;
const MAX_ZERO_CLUSTERS: u64 = 1 << 14;
/// Longest run of zeroes between two ranges of data that is read along with them: two more requests cost more than so
/// many bytes. The scan finds the zeroes again, so the target gets no byte more.
const MAX_GAP: u64 = 32 << 10;

/// The treatment of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Nothing: the target shows the right bytes already.
    Skip,
    /// It is made to read as zero.
    Zero,
    /// Its bytes are moved.
    Copy,
}

/// The facts that the treatment depends on.
#[derive(Debug, Clone, Copy)]
struct Rules {
    /// The target reads as zero where nothing is written.
    target_is_zero: bool,
    /// The target shows a backing file that holds what the source's backing file holds.
    target_shares_backing: bool,
    /// The source has a backing file.
    source_has_backing: bool,
    /// The target is what shows through the source here.
    shows_target: bool,
    /// Zeroes are written out.
    write_zeroes: bool,
}

impl Rules {
    fn action(self, extent: &Extent) -> Action {
        let from_backing =
            self.source_has_backing && (extent.depth > 0 || extent.kind == ExtentKind::Unallocated);
        if self.target_shares_backing && from_backing || self.shows_target {
            Action::Skip
        } else if !extent.is_zero() || self.write_zeroes {
            Action::Copy
        } else if self.target_is_zero {
            Action::Skip
        } else {
            Action::Zero
        }
    }
}

/// Where clusters are compressed, or hide the backing file, one that is moved in part is moved whole; `end` is as far as the source goes.
fn whole_clusters(job: &Job, action: Action, start: u64, until: u64, end: u64) -> (Action, u64) {
    let Some(cluster) = job.whole else { return (action, until) };
    let up = |offset: u64| offset.checked_next_multiple_of(cluster.get()).map_or(end, |up| up.min(end));
    let down = until / cluster * cluster.get();
    match action {
        Action::Copy => (Action::Copy, up(until)),
        other if until == end => (other, until),
        other if down > start => (other, down),
        _ => (Action::Copy, up(start + 1)),
    }
}

/// Queues everything that is to be done in the regions that this thread gets, in order of offset.
pub(super) async fn walk(worker: &Worker, job: &Job, queue: &Queue<Piece>) -> Result<()> {
    let mut walker = Walker { worker, job, queue, pending: None, offloader: Offloader::new() };
    while let Some(region) = job.claim() {
        for (index, part) in job.parts.iter().enumerate() {
            let (start, end) = (region.start.max(part.start), region.end.min(part.end()));
            if start < end {
                walker.walk_part(index, part, start, end).await?;
            }
        }
    }
    walker.emit_pending().await;
    Ok(())
}

struct Walker<'a> {
    worker: &'a Worker,
    job: &'a Job,
    queue: &'a Queue<Piece>,
    /// A copy that the next range may still extend.
    pending: Option<PendingCopy>,
    offloader: Offloader,
}

#[derive(Debug, Clone, Copy)]
struct PendingCopy {
    part: usize,
    offset: u64,
    len: usize,
    /// Bytes behind it that are zero and become part of it if data follows.
    gap: usize,
}

impl PendingCopy {
    /// Offset just past the copy and its gap.
    fn end(&self) -> u64 {
        self.offset + (self.len + self.gap) as u64
    }
}

impl Walker<'_> {
    async fn walk_part(&mut self, index: usize, part: &Part, start: u64, end: u64) -> Result<()> {
        let job = self.job;
        let source_has_backing = part.has_backing();
        let mut position = start;
        while position < end.min(job.end()) && !job.is_stopped() {
            // Where the target's backing file ends, the rules change.
            let target_shares_backing = position < job.shared_backing;
            let limit = if target_shares_backing { end.min(job.shared_backing) } else { end };
            let extent =
                match part.image.source_extent(self.worker, part.in_source(position), limit - position).await
                {
                    Ok(extent) => extent,
                    Err(error) if job.read_errors == ReadErrors::Fail => return Err(error),
                    // Whether it can be read shows when it is read, cluster by cluster.
                    Err(_) => {
                        let cluster = part.image.cluster_size();
                        let into_cluster = part.in_source(position) % cluster;
                        let until = limit.min(position.saturating_add(cluster - into_cluster));
                        self.copy(index, position, until).await;
                        position = until;
                        continue;
                    }
                };
            let until = limit.min(position.saturating_add(extent.len));
            let rules = Rules {
                target_is_zero: job.is_zero_unless_written(position),
                target_shares_backing,
                source_has_backing,
                shows_target: job.target_is_base() && part.shows_what_is_below(&extent),
                write_zeroes: job.sparse_size == 0,
            };
            let (action, until) = whole_clusters(job, rules.action(&extent), position, until, end);
            match action {
                Action::Skip => {
                    if !(extent.is_zero() && self.bridges(index, position, until)) {
                        self.skip(position, until - position);
                    }
                }
                Action::Zero => self.zero(position, until).await,
                Action::Copy => self.offload_or_copy(index, part, &extent, position, until).await?,
            }
            position = until;
        }
        Ok(())
    }

    /// Moves a range the cheapest way that is wanted and possible.
    async fn offload_or_copy(
        &mut self,
        index: usize,
        part: &Part,
        extent: &Extent,
        start: u64,
        end: u64,
    ) -> Result<()> {
        let job = self.job;
        let source = match extent.kind {
            ExtentKind::Data { host } if !extent.hole => part.image.data_file_at(extent.depth).map(|file| {
                let offset = part.in_source(start);
                let into_extent = offset.saturating_sub(extent.offset);
                // A cluster that is moved whole may reach beyond it.
                let len = (end - start).min(extent.len.saturating_sub(into_extent));
                let place = FileRange { file: file.clone(), offset: host.saturating_add(into_extent), len };
                SourceRange::new(&part.image, extent.depth, offset, place)
            }),
            _ => None,
        };
        let Some(source) = source else {
            self.copy(index, start, end).await;
            return Ok(());
        };
        // The edges that the way taken could not express go through buffers.
        match self.offloader.offload(self.worker, job, &source, start).await? {
            Offload::Nothing => self.copy(index, start, end).await,
            Offload::Shared(offloaded) => {
                let len = offloaded.end - offloaded.start;
                job.count(|report| report.reflinked += len);
                job.advance(len);
                self.copy(index, start, offloaded.start).await;
                self.copy(index, offloaded.end, end).await;
            }
            Offload::Range(offloaded, how, most) => {
                self.copy(index, start, offloaded.start).await;
                self.emit_pending().await;
                let mut at = offloaded.start;
                while at < offloaded.end && !job.is_stopped() {
                    let len = (offloaded.end - at).min(most);
                    let source = source.from(at - start).first(len);
                    self.queue.push(Piece::Range { part: index, source, offset: at, how }).await;
                    at += len;
                }
                self.copy(index, offloaded.end, end).await;
            }
        }
        Ok(())
    }

    fn skip(&self, start: u64, len: u64) {
        self.job.pass(start, len);
        self.job.count(|report| report.skipped += len);
        self.job.advance(len);
    }

    /// Takes a range that is zero as a gap that the pending copy may reach across, if it is small and the scan is sure
    /// to find it again.
    fn bridges(&mut self, part: usize, start: u64, end: u64) -> bool {
        let (chunk, block) = (self.job.sizing.chunk as u64, self.job.sparse_size as u64);
        let len = end - start;
        match &mut self.pending {
            Some(copy)
                if copy.part == part
                    && copy.end() == start
                    && copy.gap as u64 + len <= MAX_GAP
                    && start / chunk == end / chunk
                    && !start.is_multiple_of(chunk)
                    && start.is_multiple_of(block)
                    && end.is_multiple_of(block) =>
            {
                copy.gap += len as usize;
                true
            }
            _ => false,
        }
    }

    async fn zero(&mut self, start: u64, end: u64) {
        self.emit_pending().await;
        let clusters = self.job.whole.map(|cluster| cluster.get().saturating_mul(MAX_ZERO_CLUSTERS));
        let most = clusters.map_or(MAX_ZERO, |clusters| clusters.min(MAX_ZERO));
        let mut at = start;
        while at < end && !self.job.is_stopped() {
            let len = (end - at).min(most);
            self.queue.push(Piece::Zero { offset: at, len }).await;
            at += len;
        }
    }

    /// Queues a copy through buffers, in pieces that end at multiples of the chunk so that requests stay aligned.
    async fn copy(&mut self, part: usize, start: u64, end: u64) {
        let chunk = self.job.sizing.chunk as u64;
        let mut at = start;
        while at < end.min(self.job.end()) && !self.job.is_stopped() {
            let boundary = (at / chunk + 1).saturating_mul(chunk);
            let len = (end.min(boundary) - at) as usize;
            match &mut self.pending {
                Some(copy) if copy.part == part && copy.end() == at && !at.is_multiple_of(chunk) => {
                    copy.len += copy.gap + len;
                    copy.gap = 0;
                }
                _ => {
                    self.emit_pending().await;
                    self.pending = Some(PendingCopy { part, offset: at, len, gap: 0 });
                }
            }
            at += len as u64;
        }
    }

    async fn emit_pending(&mut self) {
        if let Some(PendingCopy { part, offset, len, gap }) = self.pending.take() {
            self.queue.push(Piece::Copy { part, offset, len }).await;
            self.skip(offset + len as u64, gap as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cases as qemu-img decides them: its convert skips what reads as zero in a target known to be zero, and with
    /// `-B` what the top image does not hold.
    #[test]
    fn ranges_are_skipped_only_where_the_target_shows_the_same() {
        let data = ExtentKind::Data { host: 0 };
        let zero = ExtentKind::Zero { host: None };
        let (none, compressed) = (ExtentKind::Unallocated, ExtentKind::Compressed);
        let new = Rules {
            target_is_zero: true,
            target_shares_backing: false,
            source_has_backing: true,
            shows_target: false,
            write_zeroes: false,
        };
        let existing = Rules { target_is_zero: false, ..new };
        let full = Rules { write_zeroes: true, ..new };
        let overlay = Rules { target_is_zero: false, target_shares_backing: true, ..new };
        let overlay_of_single = Rules { source_has_backing: false, ..overlay };
        let cases = [
            (data, 0, [Action::Copy, Action::Copy, Action::Copy, Action::Copy, Action::Copy]),
            (compressed, 0, [Action::Copy, Action::Copy, Action::Copy, Action::Copy, Action::Copy]),
            (data, 1, [Action::Copy, Action::Copy, Action::Copy, Action::Skip, Action::Copy]),
            (zero, 0, [Action::Skip, Action::Zero, Action::Copy, Action::Zero, Action::Zero]),
            (zero, 1, [Action::Skip, Action::Zero, Action::Copy, Action::Skip, Action::Zero]),
            (none, 1, [Action::Skip, Action::Zero, Action::Copy, Action::Skip, Action::Zero]),
        ];
        for (kind, depth, expected) in cases {
            let extent = Extent { offset: 0, len: 65536, depth, kind, hole: false };
            let seen = [new, existing, full, overlay, overlay_of_single].map(|rules| rules.action(&extent));
            assert_eq!(seen, expected, "{kind:?} at depth {depth}");
        }
        let hole = Extent { offset: 0, len: 65536, depth: 0, kind: data, hole: true };
        assert_eq!(new.action(&hole), Action::Skip);
        assert_eq!(full.action(&hole), Action::Copy);
    }
}
