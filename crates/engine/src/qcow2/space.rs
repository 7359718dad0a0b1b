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
    /// As fresh space, and the file system has set room aside for it. Only a window holds it: what it leaves over is
    /// punched.
    Reserved,
}

impl Content {
    /// Whether it reads as zero now.
    pub(crate) fn reads_zero(self) -> bool {
        self != Content::Recycled || sabotage::is(Fault::RecycledIsFresh)
    }

    /// Whether it reads as zero after a crash as well.
    pub(crate) fn is_fresh(self) -> bool {
        matches!(self, Content::Fresh | Content::Reserved)
    }
}

/// Free runs at most: memory does not grow with how scattered free space is. A run beyond them is forgotten until the image
/// is opened again.
pub(crate) const MAX_RUNS: usize = 1 << 15;

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
        let entries = self.runs.len();
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
        if entries < MAX_RUNS || self.runs.len() < entries || self.forget_shorter_than(end - start) {
            self.runs.insert(start, (end, content));
        } else {
            self.total -= end - start;
        }
    }

    /// Whether there are as many runs as there may be.
    pub(crate) fn is_full(&self) -> bool {
        self.runs.len() >= MAX_RUNS
    }

    /// Forgets a run of those that are looked at first if it is shorter than `clusters`. Long ones are worth the most:
    /// what the file has just grown by is one.
    fn forget_shorter_than(&mut self, clusters: u64) -> bool {
        let first = self.runs.iter().take(64).map(|(&start, &(end, _))| (end - start, start));
        let Some((len, start)) = first.min().filter(|(len, _)| *len < clusters) else { return false };
        self.runs.remove(&start);
        self.total -= len;
        true
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

    /// Sets aside what is free from cluster `first` on.
    pub(crate) fn park_from(&mut self, first: u64) {
        let behind = self.runs.iter().filter(|(_, (end, _))| *end > first);
        let runs: Vec<_> = behind.map(|(&start, &(end, content))| (start.max(first)..end, content)).collect();
        for (run, content) in runs {
            self.remove(run.clone());
            self.insert_parked(run, content);
        }
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
    /// Guest data that follows what was written last; the guest cluster that comes next.
    Data {
        /// Guest cluster number.
        next_guest_cluster: u64,
    },
    /// Guest data that follows nothing.
    Scattered,
    /// L2 tables and other tables.
    Metadata,
    /// Streams of compressed clusters, packed one behind the other.
    Compressed,
}

/// Space set aside for one stream; the refcounts of its clusters are raised already.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) stream: Stream,
    /// The first host cluster that it had.
    first: u64,
    /// What is left.
    pub(crate) range: Range<u64>,
    pub(crate) content: Content,
    /// Clusters of the next window of this stream.
    pub(crate) next_size: u64,
    last_used: u64,
}

/// Windows of sequential streams at most: as many stay contiguous at once.
const MAX_DATA_WINDOWS: usize = 8;
/// Ends of scattered allocations that are remembered: what goes on at one of them is a stream.
const RECENT_ENDS: usize = 32;
/// Guest clusters by which a request may be ahead of its stream, or behind: those of a queue don't come in order.
const NEAR_STREAM: u64 = 64;
/// The same for one that may begin a stream.
const NEAR_END: u64 = 4;

/// All windows.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    windows: Vec<Window>,
    clock: u64,
    /// A ring, and the place in it that is written next.
    recent_ends: Vec<u64>,
    next_end: usize,
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
    /// stream ([`Windows::stream_of`]) needs a new window.
    pub(crate) fn take_data(&mut self, guest_cluster: u64, count: u64) -> Option<Allocated> {
        let stream = self.stream_of(guest_cluster);
        self.clock += 1;
        let clock = self.clock;
        // A stream that catches up with another has two windows.
        let window = self.windows.iter_mut().find(|w| w.stream == stream && !w.range.is_empty())?;
        let allocated = cut(window, count)?;
        window.last_used = clock;
        let end = guest_cluster + (allocated.range.end - allocated.range.start);
        match &mut window.stream {
            Stream::Data { next_guest_cluster } => *next_guest_cluster = end.max(*next_guest_cluster),
            _ => self.remember(end),
        }
        Some(allocated)
    }

    /// The stream that guest data from `guest_cluster` on belongs to: one that has a window, or one that begins because
    /// it goes on where a scattered allocation ended.
    pub(crate) fn stream_of(&self, guest_cluster: u64) -> Stream {
        let known = self.windows.iter().filter_map(|w| match w.stream {
            Stream::Data { next_guest_cluster } => {
                Some((next_guest_cluster.abs_diff(guest_cluster), w.stream))
            }
            _ => None,
        });
        if let Some((_, stream)) = known.filter(|(by, _)| *by < NEAR_STREAM).min_by_key(|(by, _)| *by) {
            return stream;
        }
        if self.recent_ends.iter().any(|end| end.abs_diff(guest_cluster) < NEAR_END) {
            return Stream::Data { next_guest_cluster: guest_cluster };
        }
        Stream::Scattered
    }

    fn remember(&mut self, end: u64) {
        match self.recent_ends.get_mut(self.next_end) {
            Some(oldest) => *oldest = end,
            None => self.recent_ends.push(end),
        }
        self.next_end = (self.next_end + 1) % RECENT_ENDS;
    }

    /// Whether there is something left for `stream`.
    pub(crate) fn has(&self, stream: Stream) -> bool {
        self.windows.iter().any(|w| w.stream == stream && !w.range.is_empty())
    }

    /// Hands out up to `count` clusters that follow each other, for streams. `None`: a new window is needed.
    pub(crate) fn take_compressed(&mut self, count: u64) -> Option<Allocated> {
        let window = self.windows.iter_mut().find(|w| w.stream == Stream::Compressed)?;
        cut(window, count)
    }

    /// Hands out exactly `count` clusters for tables.
    pub(crate) fn take_metadata(&mut self, count: u64) -> Option<Allocated> {
        let window = self
            .windows
            .iter_mut()
            .find(|w| w.stream == Stream::Metadata && w.range.end - w.range.start >= count)?;
        cut(window, count)
    }

    /// Clusters that the next window of a stream should have.
    pub(crate) fn next_size(&self, stream: Stream, start: u64) -> u64 {
        self.windows.iter().find(|w| w.stream == stream).map_or(start, |w| w.next_size)
    }

    /// The first host cluster of the window that `stream` has, used up or not, and what it held.
    pub(crate) fn first_of(&self, stream: Stream) -> Option<(u64, Content)> {
        self.windows.iter().find(|w| w.stream == stream).map(|w| (w.first, w.content))
    }

    /// Sets a new window up for `stream`; gives back what is left of the window it replaces, to be freed.
    pub(crate) fn install(&mut self, stream: Stream, space: Allocated, max: u64) -> Option<Allocated> {
        self.clock += 1;
        let len = space.range.end - space.range.start;
        // A short run, the rest of something, is no reason to begin again with small ones.
        let next_size = (len * 2).max(self.next_size(stream, 1)).min(max).max(1);
        let window = Window {
            stream,
            first: space.range.start,
            range: space.range,
            content: space.content,
            next_size,
            last_used: self.clock,
        };
        let same_stream = self.windows.iter().position(|w| w.stream == stream);
        let replaced = match stream {
            Stream::Scattered | Stream::Metadata | Stream::Compressed => same_stream,
            Stream::Data { .. } => same_stream.or_else(|| {
                let is_data = |w: &Window| matches!(w.stream, Stream::Data { .. });
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

    /// Gives `min` to `count` clusters out of any window (out of space otherwise).
    pub(crate) fn take_any(&mut self, count: u64, min: u64) -> Option<Allocated> {
        let window = self.windows.iter_mut().find(|w| w.range.end - w.range.start >= min.max(1))?;
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
    fn memory_does_not_grow_with_how_scattered_free_space_is() {
        let mut free = FreeSpace::default();
        for cluster in 0..2 * MAX_RUNS as u64 {
            free.insert(2 * cluster..2 * cluster + 1, Content::Recycled);
        }
        assert_eq!((free.runs.len(), free.total()), (MAX_RUNS, MAX_RUNS as u64));
        // What the file has grown by is not forgotten for that, nor is what continues a run.
        let end = 1 << 40;
        free.insert(end..end + 1000, Content::Fresh);
        free.insert(end + 1000..end + 1001, Content::Fresh);
        assert_eq!((free.runs.len(), free.total()), (MAX_RUNS, MAX_RUNS as u64 - 1 + 1001));
        assert_eq!(free.runs.last_key_value(), Some((&end, &(end + 1001, Content::Fresh))));
    }

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
    fn the_longest_run_is_taken_where_none_fits() {
        let mut free = FreeSpace::default();
        for run in [1..4, 10..30, 40..45] {
            free.insert(run, Content::Recycled);
        }
        assert_eq!(free.take(100, 2), Some((10..30, Content::Recycled)));
        assert_eq!(free.take(100, 5), Some((40..45, Content::Recycled)));
        assert_eq!((free.take(100, 4), free.total()), (None, 3));
    }

    #[test]
    fn what_is_parked_is_not_found_until_it_is_brought_back() {
        let mut free = FreeSpace::default();
        assert!(!free.unpark());
        for run in [1..4, 6..20, 30..31] {
            free.insert(run, Content::Fresh);
        }
        free.park_from(10);
        free.insert_parked(50..52, Content::Recycled);
        assert_eq!((free.total(), free.take(10, 4)), (7, Some((6..10, Content::Fresh))));
        assert_eq!((free.take(10, 4), free.take(10, 1)), (None, Some((1..4, Content::Fresh))));
        assert!(free.unpark());
        assert!(!free.unpark());
        let runs: Vec<_> = std::iter::from_fn(|| free.take(100, 1)).collect();
        let fresh = |run| (run, Content::Fresh);
        assert_eq!(runs, [fresh(10..20), (50..52, Content::Recycled), fresh(30..31)]);
        assert_eq!(free.total(), 0);
    }

    #[test]
    fn of_the_first_runs_the_shortest_is_forgotten_for_a_longer_one() {
        let mut free = FreeSpace::default();
        for number in 0..MAX_RUNS as u64 {
            let len = if number == 7 { 2 } else { 3 };
            free.insert(number * 10..number * 10 + len, Content::Recycled);
        }
        let before = free.total();
        let beyond = 10 * MAX_RUNS as u64;
        free.insert(beyond..beyond + 2, Content::Recycled);
        assert_eq!((free.is_full(), free.total()), (true, before), "no longer than the shortest");
        free.insert(beyond..beyond + 5, Content::Recycled);
        assert_eq!(free.total(), before - 2 + 5);
        assert!(!free.runs.contains_key(&70));
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
        free.insert(0..10, Content::Recycled);
        free.insert(20..30, Content::Fresh);
        for edge in [0..5, 25..30, 10..20, 5..10, 20..25] {
            free.remove(edge);
        }
        assert!(free.runs.is_empty() && free.total() == 0);
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

    /// Allocates for `guest` as the engine does. Host clusters are taken in the order in which windows ask for them.
    fn allocate(windows: &mut Windows, end: &mut u64, guest: u64) -> u64 {
        allocate_many(windows, end, guest, 1).start
    }

    fn allocate_many(windows: &mut Windows, end: &mut u64, guest: u64, count: u64) -> Range<u64> {
        loop {
            if let Some(allocated) = windows.take_data(guest, count) {
                return allocated.range;
            }
            let stream = windows.stream_of(guest);
            assert!(!windows.has(stream), "nobody would make a window");
            let size = windows.next_size(stream, 1);
            let range = *end..*end + size;
            *end += size;
            windows.install(stream, Allocated { range, content: Content::Fresh }, 64);
            assert!(windows.has(stream));
        }
    }

    #[test]
    fn sequential_streams_in_turn_stay_contiguous_each() {
        for streams in [1u64, 2, 4, 8] {
            let (mut windows, mut end) = (Windows::default(), 100);
            let mut last = vec![None; streams as usize];
            let mut breaks = 0;
            for step in 0..500 {
                for (stream, last) in (0..).zip(&mut last) {
                    let host = allocate(&mut windows, &mut end, stream * 10_000 + step);
                    if *last != Some(host - 1) {
                        breaks += 1;
                    }
                    *last = Some(host);
                }
            }
            // Windows of 1, 2, 4 .. 64 clusters, then seven more of 64: fourteen, and what came before it was a stream.
            assert!(breaks <= 16 * streams, "{streams} streams: {breaks} breaks");
        }
    }

    #[test]
    fn a_stream_whose_requests_overtake_each_other_stays_in_its_windows() {
        let (mut windows, mut end) = (Windows::default(), 0);
        let order = (0..1000u64).map(|step| if step % 2 == 0 { step + 1 } else { step - 1 });
        for guest in order {
            allocate(&mut windows, &mut end, guest);
            // Scattered requests beside it.
            allocate(&mut windows, &mut end, 1_000_000 + (guest * 7919) % 100_000 * 64);
        }
        let data = windows.windows.iter().filter(|w| matches!(w.stream, Stream::Data { .. })).count();
        assert!(data <= 2, "{data} windows");
    }

    /// Both expect the same guest cluster next. What one of them has left is found when the other has nothing.
    #[test]
    fn a_stream_that_catches_up_with_another_uses_the_windows_of_both() {
        let mut windows = Windows::default();
        let window =
            |start: u64, count: u64| Allocated { range: start..start + count, content: Content::Fresh };
        windows.install(Stream::Data { next_guest_cluster: 1000 }, window(0, 10), 64);
        windows.install(Stream::Data { next_guest_cluster: 1100 }, window(500, 10), 64);
        for guest in (1000..1010).chain(1100..1101) {
            windows.take_data(guest, 1).expect("there is some");
        }
        // The first one is used up; its stream gets another window of exactly what brings it to 1101.
        windows.install(Stream::Data { next_guest_cluster: 1010 }, window(100, 91), 64);
        assert!(windows.take_data(1010, 91).is_some());
        let mut found = Vec::new();
        while let Some(allocated) = windows.take_data(1101 + found.len() as u64, 1) {
            found.push(allocated.range.start);
        }
        assert!(!windows.has(windows.stream_of(1101 + found.len() as u64)), "else nobody makes a new one");
        assert_eq!(found, (501..510).collect::<Vec<u64>>());
    }

    #[test]
    fn streams_that_cross_each_other_always_find_room() {
        let (mut windows, mut end) = (Windows::default(), 0);
        let mut next = [0u64, 3, 70, 130, 200, 1000, 1010, 5000, 5070, 9000];
        for step in 0..100_000u64 {
            let random = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            let at = &mut next[random as usize % 10];
            if random / 10 % 64 == 0 {
                *at = at.saturating_sub(60);
            }
            *at += allocate_many(&mut windows, &mut end, *at, random / 640 % 8 + 1).count() as u64;
        }
    }

    #[test]
    fn the_last_ends_of_scattered_requests_are_known_and_no_more() {
        let mut windows = Windows::default();
        let end = |number: u64| number * 1000;
        for number in 0..100 {
            windows.remember(end(number));
        }
        assert_eq!(windows.recent_ends.len(), RECENT_ENDS);
        let known = |number| matches!(windows.stream_of(end(number)), Stream::Data { .. });
        let known: Vec<u64> = (0..100).filter(|number| known(*number)).collect();
        assert!(known.into_iter().eq(100 - RECENT_ENDS as u64..100));
    }

    #[test]
    fn scattered_requests_share_a_window() {
        let (mut windows, mut end) = (Windows::default(), 0);
        for step in 0..1000u64 {
            let host = allocate(&mut windows, &mut end, (step * 7919) % 100_000 * 64);
            assert_eq!(host, step, "one behind the other");
        }
    }
}
