//! Free host space. Pure bookkeeping, in host clusters; no I/O.
//!
//! A host cluster is in one of these states: free (in [`FreeSpace`]), window (in a [`super::windows::Window`], its refcount
//! already raised), quarantined (unlinked, waiting for a commit and a grace period; not known here), metadata, or referenced.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use zebu_storage::sabotage::{self, Fault, Limit};

/// The content of host space before its first write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SpaceContent {
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

impl SpaceContent {
    /// Whether it reads as zero now.
    pub(crate) fn reads_zero(self) -> bool {
        self != SpaceContent::Recycled || sabotage::is(Fault::RecycledIsFresh)
    }

    /// Whether it reads as zero after a crash as well.
    pub(crate) fn is_fresh(self) -> bool {
        matches!(self, SpaceContent::Fresh | SpaceContent::Reserved)
    }
}

/// Clusters handed out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Allocated {
    /// Host clusters.
    pub(super) range: Range<u64>,
    /// Their content.
    pub(super) content: SpaceContent,
}

impl Allocated {
    /// Host clusters with this content.
    pub(crate) fn new(range: Range<u64>, content: SpaceContent) -> Self {
        Self { range, content }
    }

    /// The host clusters.
    pub(crate) fn into_range(self) -> Range<u64> {
        self.range
    }

    /// The host clusters and their content.
    pub(crate) fn into_parts(self) -> (Range<u64>, SpaceContent) {
        (self.range, self.content)
    }
}

/// Free runs at most: memory does not grow with how scattered free space is. The shortest are forgotten beyond them, and
/// found again by their counts.
const MAX_RUNS: usize = 1 << 15;
/// The part of a file, as a divisor, that has to be forgotten before it is worth a look at all counts.
const WORTH_A_LOOK: u64 = 16;

/// Free runs that were forgotten since the counts were looked at from the beginning.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Forgotten {
    /// Clusters of the longest run.
    longest: u64,
    /// Clusters of those that were known otherwise than by their counts.
    clusters: u64,
}

/// Free runs, by start and by length; runs of equal content that touch are one.
#[derive(Debug, Default)]
pub(crate) struct FreeSpace {
    /// By the first cluster: the end, and the content.
    runs: BTreeMap<u64, (u64, SpaceContent)>,
    /// Length and first cluster of each run.
    by_len: BTreeSet<(u64, u64)>,
    /// Runs left out of the search, because no request so far could use them.
    aside: Vec<(Range<u64>, SpaceContent)>,
    forgotten: Forgotten,
}

impl FreeSpace {
    /// Free runs at most.
    fn max_runs() -> usize {
        sabotage::at_most(Limit::FreeRuns, MAX_RUNS as u64) as usize
    }

    /// Clusters in all runs.
    #[cfg(test)]
    pub(crate) fn total(&self) -> u64 {
        self.by_len.iter().map(|(len, _)| len).sum()
    }

    fn put(&mut self, run: Range<u64>, content: SpaceContent) {
        self.by_len.insert((run.end - run.start, run.start));
        self.runs.insert(run.start, (run.end, content));
    }

    /// Takes out the run that begins at `start`.
    fn pull(&mut self, start: u64) -> Option<(Range<u64>, SpaceContent)> {
        let (end, content) = self.runs.remove(&start)?;
        self.by_len.remove(&(end - start, start));
        Some((start..end, content))
    }

    /// Adds a run that is in no other.
    pub(crate) fn insert(&mut self, run: Range<u64>, content: SpaceContent) {
        if run.is_empty() {
            return;
        }
        let Range { mut start, mut end } = run;
        if let Some((&before, &(before_end, before_content))) = self.runs.range(..start).next_back() {
            debug_assert!(before_end <= start, "cluster {start} freed twice");
            if before_end == start && before_content == content {
                self.pull(before);
                start = before;
            }
        }
        if let Some(&(after_end, after_content)) = self.runs.get(&end)
            && after_content == content
        {
            self.pull(end);
            end = after_end;
        }
        self.put(start..end, content);
        while self.runs.len() > Self::max_runs() {
            self.forget_shortest();
        }
    }

    /// Forgets the shortest run. Long ones are worth the most: what the file has just grown by is one.
    fn forget_shortest(&mut self) {
        // Of equal ones the last: what is low in the file is used first.
        let Some(&(len, _)) = self.by_len.first() else { return };
        let Some(&(_, start)) = self.by_len.range(..(len + 1, 0)).next_back() else { return };
        self.pull(start);
        self.forgotten.longest = self.forgotten.longest.max(len);
        self.forgotten.clusters += len;
    }

    /// True if a run was forgotten since the counts were looked at from the beginning.
    pub(crate) fn has_forgotten(&self) -> bool {
        self.forgotten.longest > 0 && !sabotage::is(Fault::ForgetForGood)
    }

    /// True if a look at the counts of a file of `clusters` is worth its time, for a request of `least` clusters in a row.
    /// So many runs were used up or forgotten since the last look that the next one costs little beside them.
    pub(crate) fn has_forgotten_much(&self, least: u64, clusters: u64) -> bool {
        let Forgotten { longest, clusters: forgotten } = self.forgotten;
        self.has_forgotten() && (longest >= least || forgotten > clusters / WORTH_A_LOOK)
    }

    /// Notes that the counts are looked at from the beginning.
    pub(crate) fn looked_at_again(&mut self) {
        self.forgotten = Forgotten::default();
    }

    /// Adds what of `run` is not free yet and was found by its counts.
    pub(crate) fn insert_found(&mut self, run: Range<u64>) {
        let before = self.forgotten.clusters;
        self.insert_missing(run, SpaceContent::Recycled);
        self.forgotten.clusters = before;
    }

    /// Adds what of `run` is not free yet. What is set aside is free already.
    pub(crate) fn insert_missing(&mut self, run: Range<u64>, content: SpaceContent) {
        let mut pieces = vec![run];
        if !sabotage::is(Fault::ForgetSetAside) {
            for (aside, _) in &self.aside {
                pieces = pieces.into_iter().flat_map(|piece| without(piece, aside)).collect();
            }
        }
        for piece in pieces {
            self.insert_what_is_in_no_run(piece, content);
        }
    }

    fn insert_what_is_in_no_run(&mut self, run: Range<u64>, content: SpaceContent) {
        let before = self.runs.range(..run.start).next_back().map(|(_, &(end, _))| end);
        let mut at = before.map_or(run.start, |end| end.clamp(run.start, run.end));
        let inside: Vec<(u64, u64)> = self.runs.range(at..run.end).map(|(&s, &(e, _))| (s, e)).collect();
        for (start, end) in inside {
            self.insert(at..start.max(at), content);
            at = end.clamp(at, run.end);
        }
        self.insert(at..run.end, content);
    }

    /// Sets a run aside until [`FreeSpace::restore`].
    pub(crate) fn set_aside(&mut self, run: Range<u64>, content: SpaceContent) {
        self.aside.push((run, content));
    }

    /// Sets aside what is free from cluster `first` on.
    pub(crate) fn set_aside_from(&mut self, first: u64) {
        let behind = self.runs.iter().filter(|(_, (end, _))| *end > first);
        let runs: Vec<_> = behind.map(|(&start, &(end, content))| (start.max(first)..end, content)).collect();
        for (run, content) in runs {
            self.remove(run.clone());
            self.set_aside(run, content);
        }
    }

    /// Brings the runs set aside back; false if there were none.
    pub(crate) fn restore(&mut self) -> bool {
        let aside = std::mem::take(&mut self.aside);
        let any = !aside.is_empty();
        for (run, content) in aside {
            self.insert(run, content);
        }
        any
    }

    /// Takes up to `want` clusters: the shortest run that holds them all, else the longest run, if it has `min`.
    pub(crate) fn take(&mut self, want: u64, min: u64) -> Option<(Range<u64>, SpaceContent)> {
        if sabotage::is(Fault::LookAtFirstRuns) {
            return self.take_of_first(want, min);
        }
        let fits = self.by_len.range((want, 0)..).next();
        let (_, start) = *fits.or_else(|| {
            let (longest, _) = self.by_len.last().filter(|(len, _)| *len >= min.max(1))?;
            self.by_len.range((*longest, 0)..).next()
        })?;
        self.take_at(start, want)
    }

    fn take_of_first(&mut self, want: u64, min: u64) -> Option<(Range<u64>, SpaceContent)> {
        let first =
            self.runs.iter().take(Self::max_runs() / 8).map(|(start, (end, _))| (end - start, *start));
        let (_, start) = first.filter(|(len, _)| *len >= min).max_by_key(|(len, _)| (*len).min(want))?;
        self.take_at(start, want)
    }

    /// Takes up to `want` clusters of the run in which `cluster` lies, from its beginning on.
    pub(crate) fn take_at(&mut self, cluster: u64, want: u64) -> Option<(Range<u64>, SpaceContent)> {
        let (&start, _) = self.runs.range(..=cluster).next_back().filter(|(_, (end, _))| *end > cluster)?;
        let (run, content) = self.pull(start)?;
        let cut = start + (run.end - start).min(want);
        if cut < run.end {
            self.put(cut..run.end, content);
        }
        Some((start..cut, content))
    }

    /// Takes out whatever of `range` is free (the range came into use by other means).
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        let aside = std::mem::take(&mut self.aside);
        for (run, content) in aside {
            self.aside.extend(without(run, &range).into_iter().map(|rest| (rest, content)));
        }
        let first = self.runs.range(..range.start).next_back().map_or(range.start, |(&start, _)| start);
        let touched: Vec<(u64, u64, SpaceContent)> =
            self.runs.range(first..range.end).map(|(&s, &(e, c))| (s, e, c)).collect();
        for (start, end, content) in touched {
            if end <= range.start {
                continue;
            }
            self.pull(start);
            for rest in without(start..end, &range) {
                self.put(rest, content);
            }
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

/// The parts of `run` that are not in `taken`.
fn without(run: Range<u64>, taken: &Range<u64>) -> impl IntoIterator<Item = Range<u64>> {
    let before = run.start..run.end.min(taken.start);
    let after = run.start.max(taken.end)..run.end;
    [before, after].into_iter().filter(|rest| rest.start < rest.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_does_not_grow_with_how_scattered_free_space_is() {
        let mut free = FreeSpace::default();
        for cluster in 0..2 * MAX_RUNS as u64 {
            free.insert(2 * cluster..2 * cluster + 1, SpaceContent::Recycled);
        }
        assert_eq!((free.runs.len(), free.total()), (MAX_RUNS, MAX_RUNS as u64));
        // What the file has grown by is not forgotten for that, nor is what continues a run.
        let end = 1 << 40;
        free.insert(end..end + 1000, SpaceContent::Fresh);
        free.insert(end + 1000..end + 1001, SpaceContent::Fresh);
        assert_eq!((free.runs.len(), free.total()), (MAX_RUNS, MAX_RUNS as u64 - 1 + 1001));
        assert_eq!(free.runs.last_key_value(), Some((&end, &(end + 1001, SpaceContent::Fresh))));
    }

    #[test]
    fn a_long_run_is_found_behind_many_short_ones() {
        let mut free = FreeSpace::default();
        for cluster in 0..10_000 {
            free.insert(2 * cluster..2 * cluster + 1, SpaceContent::Recycled);
        }
        free.insert(50_000..50_100, SpaceContent::Fresh);
        free.insert(60_000..60_200, SpaceContent::Fresh);
        assert_eq!(free.take(100, 13), Some((50_000..50_100, SpaceContent::Fresh)));
        assert_eq!(free.take(1000, 13), Some((60_000..60_200, SpaceContent::Fresh)));
        assert_eq!(free.take(1000, 13), None);
        assert_eq!(free.take(1000, 1), Some((0..1, SpaceContent::Recycled)));
    }

    #[test]
    fn what_is_forgotten_is_noted_until_the_counts_are_looked_at_again() {
        let mut free = FreeSpace::default();
        let clusters = 4 * MAX_RUNS as u64;
        for cluster in 0..MAX_RUNS as u64 {
            free.insert(4 * cluster..4 * cluster + 2, SpaceContent::Punched);
        }
        assert!(!free.has_forgotten());
        free.insert(clusters..clusters + 1, SpaceContent::Punched);
        assert!(free.has_forgotten() && free.has_forgotten_much(1, clusters));
        assert!(!free.has_forgotten_much(2, clusters), "no forgotten run has two");
        // What the counts show is no news: else every look would be followed by another.
        free.insert_found(clusters + 10..2 * clusters);
        free.insert_found(2 * clusters + 1..2 * clusters + 2);
        assert!(!free.has_forgotten_much(3, clusters));
        for cluster in 0..clusters / 16 {
            free.insert(9 * clusters + 2 * cluster..9 * clusters + 2 * cluster + 1, SpaceContent::Punched);
        }
        assert!(free.has_forgotten_much(3, clusters), "a sixteenth of the file");
        free.looked_at_again();
        assert!(!free.has_forgotten());
    }

    #[test]
    fn a_run_is_taken_where_it_lies() {
        let mut free = FreeSpace::default();
        free.insert(10..20, SpaceContent::Fresh);
        assert_eq!(free.take_at(9, 4), None);
        assert_eq!(free.take_at(20, 4), None);
        assert_eq!(free.take_at(15, 4), Some((10..14, SpaceContent::Fresh)));
        assert_eq!((free.take_at(14, 40), free.total()), (Some((14..20, SpaceContent::Fresh)), 0));
    }

    #[test]
    fn touching_runs_of_equal_content_become_one() {
        let mut free = FreeSpace::default();
        free.insert(10..12, SpaceContent::Recycled);
        free.insert(14..16, SpaceContent::Recycled);
        free.insert(12..14, SpaceContent::Recycled);
        assert_eq!(free.take(6, 1), Some((10..16, SpaceContent::Recycled)));
        free.insert(10..12, SpaceContent::Recycled);
        free.insert(12..14, SpaceContent::Fresh);
        assert_eq!(free.take(4, 1), Some((10..12, SpaceContent::Recycled)));
        assert_eq!(free.total(), 2);
    }

    #[test]
    fn a_run_that_fits_is_preferred_to_a_longer_one_that_comes_later() {
        let mut free = FreeSpace::default();
        free.insert(1..3, SpaceContent::Recycled);
        free.insert(5..9, SpaceContent::Recycled);
        free.insert(20..100, SpaceContent::Recycled);
        assert_eq!(free.take(4, 1), Some((5..9, SpaceContent::Recycled)));
        assert_eq!(free.take(1000, 3), Some((20..100, SpaceContent::Recycled)));
        assert_eq!(free.take(1000, 3), None);
    }

    #[test]
    fn the_longest_run_is_taken_where_none_fits() {
        let mut free = FreeSpace::default();
        for run in [1..4, 10..30, 40..45] {
            free.insert(run, SpaceContent::Recycled);
        }
        assert_eq!(free.take(100, 2), Some((10..30, SpaceContent::Recycled)));
        assert_eq!(free.take(100, 5), Some((40..45, SpaceContent::Recycled)));
        assert_eq!((free.take(100, 4), free.total()), (None, 3));
    }

    #[test]
    fn what_is_set_aside_is_not_found_until_it_is_brought_back() {
        let mut free = FreeSpace::default();
        assert!(!free.restore());
        for run in [1..4, 6..20, 30..31] {
            free.insert(run, SpaceContent::Fresh);
        }
        free.set_aside_from(10);
        free.set_aside(50..52, SpaceContent::Recycled);
        assert_eq!((free.total(), free.take(10, 4)), (7, Some((6..10, SpaceContent::Fresh))));
        assert_eq!((free.take(10, 4), free.take(10, 1)), (None, Some((1..4, SpaceContent::Fresh))));
        assert!(free.restore());
        assert!(!free.restore());
        let runs: Vec<_> = std::iter::from_fn(|| free.take(100, 1)).collect();
        let fresh = |run| (run, SpaceContent::Fresh);
        assert_eq!(runs, [fresh(10..20), (50..52, SpaceContent::Recycled), fresh(30..31)]);
        assert_eq!(free.total(), 0);
    }

    #[test]
    fn what_is_set_aside_is_not_free_a_second_time() {
        let mut free = FreeSpace::default();
        free.set_aside(10..20, SpaceContent::Fresh);
        free.insert_missing(0..30, SpaceContent::Recycled);
        assert_eq!(free.total(), 20);
        free.remove(12..14);
        assert!(free.restore());
        let runs: Vec<_> = std::iter::from_fn(|| free.take(100, 1)).map(|(run, _)| run).collect();
        assert_eq!(runs, [0..10, 20..30, 14..20, 10..12]);
    }

    #[test]
    fn of_the_first_runs_the_shortest_is_forgotten_for_a_longer_one() {
        let mut free = FreeSpace::default();
        for number in 0..MAX_RUNS as u64 {
            let len = if number == 7 { 2 } else { 3 };
            free.insert(number * 10..number * 10 + len, SpaceContent::Recycled);
        }
        let before = free.total();
        let beyond = 10 * MAX_RUNS as u64;
        free.insert(beyond..beyond + 2, SpaceContent::Recycled);
        assert_eq!((free.runs.len(), free.total()), (MAX_RUNS, before), "no longer than the shortest");
        free.insert(beyond..beyond + 5, SpaceContent::Recycled);
        assert_eq!(free.total(), before - 2 + 5);
        assert!(!free.runs.contains_key(&70));
    }

    #[test]
    fn a_scan_adds_only_what_is_not_known() {
        let mut free = FreeSpace::default();
        free.insert(3..5, SpaceContent::Punched);
        free.insert(8..12, SpaceContent::Punched);
        free.insert_missing(0..10, SpaceContent::Recycled);
        let mut runs = Vec::new();
        while let Some(run) = free.take(1, 1) {
            runs.push((run.0.start, run.1));
        }
        // The shortest run comes first.
        runs.sort_unstable();
        let expected: Vec<(u64, SpaceContent)> = (0..12)
            .map(|c| {
                (
                    c,
                    if (3..5).contains(&c) || c >= 8 {
                        SpaceContent::Punched
                    } else {
                        SpaceContent::Recycled
                    },
                )
            })
            .collect();
        assert_eq!(runs, expected);
        free.insert(0..4, SpaceContent::Recycled);
        free.insert_missing(2..6, SpaceContent::Fresh);
        assert_eq!(free.total(), 6);
    }

    #[test]
    fn removing_cuts_runs() {
        let mut free = FreeSpace::default();
        free.insert(0..10, SpaceContent::Recycled);
        free.insert(20..30, SpaceContent::Fresh);
        free.remove(5..25);
        assert_eq!(free.total(), 10);
        assert_eq!(free.take(100, 1), Some((0..5, SpaceContent::Recycled)));
        assert_eq!(free.take(100, 1), Some((25..30, SpaceContent::Fresh)));
        free.insert(0..10, SpaceContent::Recycled);
        free.insert(20..30, SpaceContent::Fresh);
        for edge in [0..5, 25..30, 10..20, 5..10, 20..25] {
            free.remove(edge);
        }
        assert!(free.runs.is_empty() && free.total() == 0);
    }

    #[test]
    fn the_tail_is_what_is_free_up_to_the_end() {
        let mut free = FreeSpace::default();
        free.insert(3..5, SpaceContent::Recycled);
        free.insert(6..8, SpaceContent::Recycled);
        free.insert(8..10, SpaceContent::Fresh);
        assert_eq!(free.tail(10), 6);
        assert_eq!(free.tail(11), 11);
    }
}
