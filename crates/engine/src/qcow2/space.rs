//! Free host space and the windows that are cut from it. Pure bookkeeping, in host clusters; no I/O.
//!
//! A host cluster is in one of these states: free (in [`FreeSpace`]), window (in a [`Window`], its refcount already
//! raised), quarantined (unlinked, waiting for a commit and a grace period; not known here), metadata, or referenced.

use std::collections::BTreeMap;
use std::ops::Range;
use zebu_storage::sabotage::{self, Fault};

/// What host space holds before its first write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Content {
    /// Anything: it was used before.
    Recycled,
    /// Zeroes: a hole was punched and the punch has completed, but may not be durable yet.
    Punched,
    /// Zeroes: nobody wrote it since this opening grew the file by it.
    Fresh,
}

impl Content {
    /// Whether it reads as zero now.
    pub(crate) fn reads_zero(self) -> bool {
        self != Content::Recycled || sabotage::is(Fault::RecycledIsFresh)
    }
}

/// Free runs, by start; runs of equal content that touch are one.
#[derive(Debug, Default)]
pub(crate) struct FreeSpace {
    runs: BTreeMap<u64, (u64, Content)>,
    /// Runs left out of the search, because no request so far could use them.
    parked: Vec<(Range<u64>, Content)>,
    total: u64,
}

impl FreeSpace {
    /// Clusters in all runs.
    #[cfg(test)]
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Adds a run that is in no other.
    pub(crate) fn insert(&mut self, run: Range<u64>, content: Content) {
        if run.is_empty() {
            return;
        }
        let Range { mut start, mut end } = run;
        self.total += end - start;
        if let Some((&before, &(before_end, before_content))) = self.runs.range(..start).next_back() {
            debug_assert!(before_end <= start, "cluster {start} freed twice");
            if before_end == start && before_content == content {
                self.runs.remove(&before);
                start = before;
            }
        }
        if let Some(&(after_end, after_content)) = self.runs.get(&end)
            && after_content == content
        {
            self.runs.remove(&end);
            end = after_end;
        }
        self.runs.insert(start, (end, content));
    }

    /// Adds what of `run` is not free yet.
    pub(crate) fn insert_missing(&mut self, run: Range<u64>, content: Content) {
        let before = self.runs.range(..run.start).next_back().map(|(_, &(end, _))| end);
        let mut at = before.map_or(run.start, |end| end.clamp(run.start, run.end));
        let inside: Vec<(u64, u64)> = self.runs.range(at..run.end).map(|(&s, &(e, _))| (s, e)).collect();
        for (start, end) in inside {
            self.insert(at..start.max(at), content);
            at = end.clamp(at, run.end);
        }
        self.insert(at..run.end, content);
    }

    /// Sets a run aside until [`FreeSpace::unpark`].
    pub(crate) fn insert_parked(&mut self, run: Range<u64>, content: Content) {
        self.parked.push((run, content));
    }

    /// Brings the runs set aside back; false if there were none.
    pub(crate) fn unpark(&mut self) -> bool {
        let parked = std::mem::take(&mut self.parked);
        let any = !parked.is_empty();
        for (run, content) in parked {
            self.insert(run, content);
        }
        any
    }

    /// Takes up to `want` clusters: the lowest run that holds them all, else the longest run.
    pub(crate) fn take(&mut self, want: u64, min: u64) -> Option<(Range<u64>, Content)> {
        const LOOK_AT: usize = 4096;
        let mut best: Option<(u64, u64)> = None;
        for (&start, &(end, _)) in self.runs.iter().take(LOOK_AT) {
            let len = end - start;
            if len >= want {
                best = Some((start, len));
                break;
            }
            if len >= min && best.is_none_or(|(_, best_len)| len > best_len) {
                best = Some((start, len));
            }
        }
        let (start, len) = best?;
        let (end, content) = self.runs.remove(&start)?;
        let cut = start + len.min(want);
        if cut < end {
            self.runs.insert(cut, (end, content));
        }
        self.total -= cut - start;
        Some((start..cut, content))
    }

    /// Takes out whatever of `range` is free (the range came into use by other means).
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        let first = self.runs.range(..range.start).next_back().map_or(range.start, |(&start, _)| start);
        let touched: Vec<(u64, u64, Content)> =
            self.runs.range(first..range.end).map(|(&s, &(e, c))| (s, e, c)).collect();
        for (start, end, content) in touched {
            if end <= range.start {
                continue;
            }
            self.runs.remove(&start);
            let mut removed = end - start;
            if start < range.start {
                self.runs.insert(start, (range.start, content));
                removed -= range.start - start;
            }
            if end > range.end {
                self.runs.insert(range.end, (end, content));
                removed -= end - range.end;
            }
            self.total -= removed;
        }
    }

    /// Everything that is free at the end: the start of the run that reaches `end`, or `end`.
    pub(crate) fn tail(&self, end: u64) -> u64 {
        let mut tail = end;
        for (&start, &(run_end, _)) in self.runs.iter().rev() {
            if run_end != tail {
                break;
            }
            tail = start;
        }
        tail
    }
}

/// What a stream of allocations is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Guest data; the guest cluster that follows the last allocation.
    Data {
        /// Guest cluster number.
        next_guest_cluster: u64,
    },
    /// L2 tables and other tables.
    Metadata,
    /// Streams of compressed clusters, packed one behind the other.
    Compressed,
}

/// Space set aside for one stream; the refcounts of its clusters are raised already.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) stream: Stream,
    /// What is left.
    pub(crate) range: Range<u64>,
    pub(crate) content: Content,
    /// Clusters of the next window of this stream.
    pub(crate) next_size: u64,
    last_used: u64,
}

/// Data windows at most: as many streams stay contiguous.
const MAX_DATA_WINDOWS: usize = 8;

/// All windows.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    windows: Vec<Window>,
    clock: u64,
}

/// Clusters handed out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Allocated {
    /// Host clusters.
    pub(crate) range: Range<u64>,
    /// What they hold.
    pub(crate) content: Content,
}

impl Windows {
    /// Hands out up to `count` clusters that follow each other, for guest data from `guest_cluster` on. `None`: the
    /// stream needs a new window.
    pub(crate) fn take_data(&mut self, guest_cluster: u64, count: u64) -> Option<Allocated> {
        let index = self.data_window(guest_cluster)?;
        self.clock += 1;
        let clock = self.clock;
        let window = self.windows.get_mut(index)?;
        let allocated = cut(window, count)?;
        let taken = allocated.range.end - allocated.range.start;
        window.stream = Stream::Data { next_guest_cluster: guest_cluster + taken };
        window.last_used = clock;
        Some(allocated)
    }

    /// The window whose stream `guest_cluster` continues, else the one that any other allocation shares.
    fn data_window(&self, guest_cluster: u64) -> Option<usize> {
        let continues = self.windows.iter().position(|w| {
            w.stream == Stream::Data { next_guest_cluster: guest_cluster } && !w.range.is_empty()
        });
        continues.or_else(|| {
            let follows_an_empty_one =
                self.windows.iter().any(|w| w.stream == Stream::Data { next_guest_cluster: guest_cluster });
            if follows_an_empty_one {
                return None;
            }
            self.windows
                .iter()
                .enumerate()
                .filter(|(_, w)| matches!(w.stream, Stream::Data { .. }) && !w.range.is_empty())
                .min_by_key(|(_, w)| w.next_size)
                .map(|(index, _)| index)
        })
    }

    /// Hands out up to `count` clusters that follow each other, for streams. `None`: a new window is needed.
    pub(crate) fn take_compressed(&mut self, count: u64) -> Option<Allocated> {
        let window = self.windows.iter_mut().find(|w| w.stream == Stream::Compressed)?;
        cut(window, count)
    }

    /// Whether there are host clusters for streams.
    pub(crate) fn has_compressed(&self) -> bool {
        self.windows.iter().any(|w| w.stream == Stream::Compressed && !w.range.is_empty())
    }

    /// Hands out exactly `count` clusters for tables.
    pub(crate) fn take_metadata(&mut self, count: u64) -> Option<Allocated> {
        let window = self
            .windows
            .iter_mut()
            .find(|w| w.stream == Stream::Metadata && w.range.end - w.range.start >= count)?;
        cut(window, count)
    }

    /// Clusters that the next window for guest data from `guest_cluster` on should have.
    pub(crate) fn next_data_size(&self, guest_cluster: u64, start: u64) -> u64 {
        self.windows
            .iter()
            .filter(|w| matches!(w.stream, Stream::Data { .. }))
            .find(|w| w.stream == Stream::Data { next_guest_cluster: guest_cluster })
            .or_else(|| {
                self.windows
                    .iter()
                    .filter(|w| matches!(w.stream, Stream::Data { .. }))
                    .min_by_key(|w| w.next_size)
            })
            .map_or(start, |w| w.next_size)
    }

    /// Clusters that the next window of a stream other than guest data should have.
    pub(crate) fn next_size(&self, stream: Stream, start: u64) -> u64 {
        self.windows.iter().find(|w| w.stream == stream).map_or(start, |w| w.next_size)
    }

    /// Sets a new window up for `stream`; gives back what is left of the window it replaces, to be freed.
    pub(crate) fn install(&mut self, stream: Stream, space: Allocated, max: u64) -> Option<Allocated> {
        self.clock += 1;
        let len = space.range.end - space.range.start;
        let window = Window {
            stream,
            range: space.range,
            content: space.content,
            next_size: (len * 2).min(max).max(1),
            last_used: self.clock,
        };
        let same_stream = self.windows.iter().position(|w| w.stream == stream);
        let is_data = |w: &Window| matches!(w.stream, Stream::Data { .. });
        let empty = || self.windows.iter().position(|w| is_data(w) && w.range.is_empty());
        let replaced = match stream {
            Stream::Metadata | Stream::Compressed => same_stream,
            Stream::Data { .. } => same_stream.or_else(empty).or_else(|| {
                let data = self.windows.iter().enumerate().filter(|(_, w)| is_data(w));
                if data.clone().count() < MAX_DATA_WINDOWS {
                    return None;
                }
                data.min_by_key(|(_, w)| w.last_used).map(|(index, _)| index)
            }),
        };
        if let Some(slot) = replaced.and_then(|index| self.windows.get_mut(index)) {
            let old = std::mem::replace(slot, window);
            (!old.range.is_empty()).then_some(Allocated { range: old.range, content: old.content })
        } else {
            self.windows.push(window);
            None
        }
    }

    /// Takes everything back from all windows (before out-of-space is given, and at close).
    pub(crate) fn drain(&mut self) -> Vec<Allocated> {
        self.windows
            .drain(..)
            .filter(|w| !w.range.is_empty())
            .map(|w| Allocated { range: w.range, content: w.content })
            .collect()
    }

    /// Gives up to `count` clusters out of any window (out of space otherwise).
    pub(crate) fn take_any(&mut self, count: u64) -> Option<Allocated> {
        let window = self.windows.iter_mut().find(|w| !w.range.is_empty())?;
        cut(window, count)
    }
}

fn cut(window: &mut Window, count: u64) -> Option<Allocated> {
    let start = window.range.start;
    let end = window.range.end.min(start + count);
    if start == end {
        return None;
    }
    window.range.start = end - u64::from(sabotage::is(Fault::WindowOffByOne));
    Some(Allocated { range: start..end, content: window.content })
}

/// Free space, windows, and how far the file reaches.
#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) free: FreeSpace,
    pub(crate) windows: Windows,
    /// Clusters that the file holds now (a partial last one counts).
    pub(crate) file_clusters: u64,
    /// Clusters below this were examined for zero refcounts, or are known otherwise.
    pub(crate) scanned: u64,
    /// Clusters that the file held when it was opened: what lies below is never taken for fresh and never cut off.
    pub(crate) clusters_at_open: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_runs_of_equal_content_become_one() {
        let mut free = FreeSpace::default();
        free.insert(10..12, Content::Recycled);
        free.insert(14..16, Content::Recycled);
        free.insert(12..14, Content::Recycled);
        assert_eq!(free.take(6, 1), Some((10..16, Content::Recycled)));
        free.insert(10..12, Content::Recycled);
        free.insert(12..14, Content::Fresh);
        assert_eq!(free.take(4, 1), Some((10..12, Content::Recycled)));
        assert_eq!(free.total(), 2);
    }

    #[test]
    fn a_run_that_fits_is_preferred_to_a_longer_one_that_comes_later() {
        let mut free = FreeSpace::default();
        free.insert(1..3, Content::Recycled);
        free.insert(5..9, Content::Recycled);
        free.insert(20..100, Content::Recycled);
        assert_eq!(free.take(4, 1), Some((5..9, Content::Recycled)));
        assert_eq!(free.take(1000, 3), Some((20..100, Content::Recycled)));
        assert_eq!(free.take(1000, 3), None);
    }

    #[test]
    fn a_scan_adds_only_what_is_not_known() {
        let mut free = FreeSpace::default();
        free.insert(3..5, Content::Punched);
        free.insert(8..12, Content::Punched);
        free.insert_missing(0..10, Content::Recycled);
        let mut runs = Vec::new();
        while let Some(run) = free.take(1, 1) {
            runs.push((run.0.start, run.1));
        }
        let expected: Vec<(u64, Content)> = (0..12)
            .map(|c| (c, if (3..5).contains(&c) || c >= 8 { Content::Punched } else { Content::Recycled }))
            .collect();
        assert_eq!(runs, expected);
        free.insert(0..4, Content::Recycled);
        free.insert_missing(2..6, Content::Fresh);
        assert_eq!(free.total(), 6);
    }

    #[test]
    fn removing_cuts_runs() {
        let mut free = FreeSpace::default();
        free.insert(0..10, Content::Recycled);
        free.insert(20..30, Content::Fresh);
        free.remove(5..25);
        assert_eq!(free.total(), 10);
        assert_eq!(free.take(100, 1), Some((0..5, Content::Recycled)));
        assert_eq!(free.take(100, 1), Some((25..30, Content::Fresh)));
    }

    #[test]
    fn the_tail_is_what_is_free_up_to_the_end() {
        let mut free = FreeSpace::default();
        free.insert(3..5, Content::Recycled);
        free.insert(6..8, Content::Recycled);
        free.insert(8..10, Content::Fresh);
        assert_eq!(free.tail(10), 6);
        assert_eq!(free.tail(11), 11);
    }

    #[test]
    fn two_sequential_streams_stay_contiguous_each() {
        let mut windows = Windows::default();
        let fresh = |range| Allocated { range, content: Content::Fresh };
        windows.install(Stream::Data { next_guest_cluster: 0 }, fresh(100..104), 64);
        assert_eq!(windows.take_data(0, 1), Some(fresh(100..101)));
        windows.install(Stream::Data { next_guest_cluster: 1000 }, fresh(200..204), 64);
        assert_eq!(windows.take_data(1000, 1), Some(fresh(200..201)));
        assert_eq!(windows.take_data(1, 1), Some(fresh(101..102)));
        assert_eq!(windows.take_data(1001, 2), Some(fresh(201..203)));
        assert_eq!(windows.take_data(2, 8), Some(fresh(102..104)));
        assert_eq!(windows.take_data(4, 1), None, "the stream asks for its own next window");
        assert_eq!(windows.next_data_size(4, 1), 8);
    }
}
