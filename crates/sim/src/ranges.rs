//! A set of bytes, kept as disjoint ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint, non-empty ranges that do not touch each other, by start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RangeSet {
    end_by_start: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// Adds a range; what was there already is counted once.
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        // Everything that overlaps or touches the new range melts into it.
        while let Some((&s, &e)) = self.end_by_start.range(..=end).next_back() {
            if e < start {
                break;
            }
            self.end_by_start.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.end_by_start.insert(start, end);
    }

    /// Takes a range out.
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&s, &e)) = self.end_by_start.range(..range.end).next_back() {
            if e <= range.start {
                break;
            }
            self.end_by_start.remove(&s);
            if s < range.start {
                self.end_by_start.insert(s, range.start);
            }
            if e > range.end {
                self.end_by_start.insert(range.end, e);
            }
        }
    }

    /// The parts of `range` that are in the set, in order.
    pub(crate) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let from = self.end_by_start.range(..=range.start).next_back().map_or(range.start, |(&s, _)| s);
        let (low, high) = (range.start, range.end);
        self.end_by_start
            .range(from..high.max(from))
            .map(move |(&s, &e)| s.max(low)..e.min(high))
            .filter(|r| r.start < r.end)
    }

    /// Bytes of `range` that are in the set.
    pub(crate) fn bytes_within(&self, range: Range<u64>) -> u64 {
        self.within(range).map(|r| r.end - r.start).sum()
    }

    /// Bytes in the set.
    pub(crate) fn bytes(&self) -> u64 {
        self.end_by_start.iter().map(|(s, e)| e - s).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SimRng;

    #[test]
    fn agrees_with_a_plain_array_of_bits() {
        let mut rng = SimRng::new(3);
        for _ in 0..50 {
            let mut set = RangeSet::default();
            let mut bits = [false; 64];
            for _ in 0..60 {
                let start = rng.below(64);
                let end = start + rng.below(65 - start);
                let add = rng.chance(1, 2);
                if add {
                    set.insert(start..end);
                } else {
                    set.remove(start..end);
                }
                bits[start as usize..end as usize].fill(add);
                assert_eq!(set.bytes() as usize, bits.iter().filter(|b| **b).count());
                let low = rng.below(64);
                let high = low + rng.below(65 - low);
                let listed: Vec<u64> = set.within(low..high).flatten().collect();
                let expected: Vec<u64> = (low..high).filter(|&i| bits[i as usize]).collect();
                assert_eq!(listed, expected, "{low}..{high}");
                assert_eq!(set.bytes_within(low..high) as usize, expected.len());
            }
            let ranges: Vec<_> = set.end_by_start.iter().map(|(s, e)| (*s, *e)).collect();
            assert!(ranges.windows(2).all(|w| w[0].1 < w[1].0), "ranges touch: {ranges:?}");
        }
    }
}
