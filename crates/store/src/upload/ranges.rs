//! Which bytes of a part are there.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges that do not touch each other.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range; whether none of it was there.
    pub(super) fn add(&mut self, range: Range<u64>) -> bool {
        let (mut start, mut end) = (range.start, range.end);
        if let Some((before, its_end)) = self.0.range(..=start).next_back().map(|(start, end)| (*start, *end))
        {
            if its_end > start {
                return false;
            }
            if its_end == start {
                start = before;
            }
        }
        if let Some((next, its_end)) = self.0.range(range.start..).next().map(|(start, end)| (*start, *end)) {
            if next < end {
                return false;
            }
            if next == end {
                self.0.remove(&next);
                end = its_end;
            }
        }
        self.0.insert(start, end);
        true
    }

    /// Whether all of `0..len` is there.
    pub(super) fn is_whole(&self, len: u64) -> bool {
        self.0.get(&0).is_some_and(|end| *end >= len)
    }

    /// Bytes from the start that are there.
    pub(super) fn len_from_start(&self) -> u64 {
        self.0.get(&0).copied().unwrap_or(0)
    }

    /// How many ranges there are.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_comes_once() {
        let mut ranges = Ranges::default();
        assert!(ranges.add(10..20) && ranges.add(0..5) && !ranges.is_whole(20));
        for twice in [0..1, 4..6, 9..11, 10..20, 15..16, 0..30] {
            assert!(!ranges.add(twice.clone()), "{twice:?}");
        }
        assert!(ranges.add(5..10) && ranges.is_whole(20) && !ranges.is_whole(21));
        assert!(ranges.add(20..21) && ranges.is_whole(21) && ranges.0.len() == 1);
    }
}
