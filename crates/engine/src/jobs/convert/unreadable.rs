//! The ranges that a conversion could not read.

use super::options::{ConvertReport, SkippedRange};
use std::collections::BTreeMap;

/// How many ranges are reported one by one.
const MAX_REPORTED: usize = 1024;

/// The ranges that could not be read, noted in any order, none twice. Neighbours count as one.
#[derive(Default)]
pub(super) struct Unreadable {
    bytes: u64,
    /// The first ones, by their offsets: they are told one by one.
    first: BTreeMap<u64, SkippedRange>,
    /// Ends of the others, by their offsets.
    others: BTreeMap<u64, u64>,
}

impl Unreadable {
    /// Notes a range.
    pub(super) fn note(&mut self, range: SkippedRange) {
        self.bytes += range.len;
        let end = range.offset + range.len;
        if let Some(before) = before(&mut self.first, range.offset)
            && before.offset + before.len == range.offset
        {
            before.len += range.len;
            let start = before.offset;
            self.join_behind(start, end);
            return;
        }
        // All of the others lie behind the first ones.
        let is_other = match (self.others.first_key_value(), self.first.last_key_value()) {
            (Some((&other, _)), _) => other < range.offset,
            (None, Some((&last, _))) => self.first.len() == MAX_REPORTED && last < range.offset,
            (None, None) => false,
        };
        if is_other {
            self.note_other(range.offset, end);
            return;
        }
        let offset = range.offset;
        self.first.insert(offset, range);
        self.join_behind(offset, end);
        if self.first.len() > MAX_REPORTED
            && let Some((offset, range)) = self.first.pop_last()
        {
            self.note_other(offset, offset + range.len);
        }
    }

    /// Joins one of the first ranges, which begins at `start`, with the one that begins at its end.
    fn join_behind(&mut self, start: u64, end: u64) {
        let len = self.first.remove(&end).map(|next| next.len);
        let len = len.or_else(|| self.others.remove(&end).map(|next| next - end)).unwrap_or(0);
        if let Some(range) = self.first.get_mut(&start) {
            range.len += len;
        }
    }

    fn note_other(&mut self, offset: u64, end: u64) {
        let end = self.others.remove(&end).unwrap_or(end);
        match before(&mut self.others, offset) {
            Some(before) if *before == offset => *before = end,
            _ => drop(self.others.insert(offset, end)),
        }
    }

    /// Adds it to the report.
    pub(super) fn tell(&self, report: &mut ConvertReport) {
        report.unreadable = self.bytes;
        report.unreadable_range_count = (self.first.len() + self.others.len()) as u64;
        report.unreadable_ranges = self.first.values().cloned().collect();
    }
}

/// The last value before `offset`.
fn before<T>(map: &mut BTreeMap<u64, T>, offset: u64) -> Option<&mut T> {
    map.range_mut(..offset).next_back().map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, ErrorKind};

    fn told(ranges: impl IntoIterator<Item = (u64, u64)>) -> ConvertReport {
        let mut unreadable = Unreadable::default();
        for (offset, len) in ranges {
            unreadable.note(SkippedRange { offset, len, error: Error::new(ErrorKind::Io, "unreadable") });
        }
        let mut report = ConvertReport::default();
        unreadable.tell(&mut report);
        report
    }

    fn listed(report: &ConvertReport) -> Vec<(u64, u64)> {
        report.unreadable_ranges.iter().map(|range| (range.offset, range.len)).collect()
    }

    #[test]
    fn ranges_are_joined_in_order() {
        let report = told([(1024, 512), (0, 512), (1536, 512), (512, 256)]);
        assert_eq!(listed(&report), [(0, 768), (1024, 1024)]);
        assert_eq!((report.unreadable, report.unreadable_range_count), (1792, 2));
    }

    #[test]
    fn the_list_is_cut_and_nothing_else() {
        const MANY: u64 = 5000;
        let forward: Vec<u64> = (0..MANY).collect();
        let backward: Vec<u64> = (0..MANY).rev().collect();
        // 7919 and 5000 have no common factor, so that each number comes once.
        let mixed: Vec<u64> = (0..MANY).map(|n| n * 7919 % MANY).collect();
        for order in [forward, backward, mixed] {
            let report = told(order.iter().map(|n| (n * 2048, 512)));
            let first: Vec<_> = (0..MAX_REPORTED as u64).map(|n| (n * 2048, 512)).collect();
            assert_eq!(listed(&report), first);
            assert_eq!((report.unreadable, report.unreadable_range_count), (MANY * 512, MANY));
            // The gaps are noted too, in the same order.
            let all = order.iter().map(|n| (n * 2048, 512));
            let report = told(all.chain(order.iter().map(|n| (n * 2048 + 512, 1536))));
            assert_eq!(listed(&report), [(0, MANY * 2048)]);
            assert_eq!((report.unreadable, report.unreadable_range_count), (MANY * 2048, 1));
        }
    }
}
