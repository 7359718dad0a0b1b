//! Sets of guest clusters that take memory for what they hold, and none for the size of the disk.

use std::collections::BTreeMap;
use std::ops::Range;

/// Clusters of a part.
const PART: u64 = 4096;
const WORDS: usize = PART as usize / 64;

/// A set of guest clusters. Parts of 4,096 clusters that are wholly in it are kept as runs, others as a bit for each cluster.
#[derive(Debug, Clone, Default)]
pub struct ClusterSet {
    /// Runs of whole parts, which neither meet nor overlap: the first part, and the one behind the last.
    whole: BTreeMap<u64, u64>,
    /// Other parts. What a part within a run has here does not count.
    parts: BTreeMap<u64, Box<[u64; WORDS]>>,
}

impl ClusterSet {
    /// Adds clusters.
    pub fn insert(&mut self, clusters: Range<u64>) {
        let Range { start, end } = clusters;
        let (first, behind) = (start.div_ceil(PART), end / PART);
        if first >= behind {
            let middle = behind.saturating_mul(PART).clamp(start, end.max(start));
            self.insert_bits(start..middle);
            self.insert_bits(middle..end);
            return;
        }
        self.insert_bits(start..first.saturating_mul(PART));
        self.insert_whole(first..behind);
        self.insert_bits(behind.saturating_mul(PART)..end);
    }

    /// Adds clusters of one part.
    fn insert_bits(&mut self, clusters: Range<u64>) {
        if clusters.is_empty() || self.end_of_run(clusters.start / PART).is_some() {
            return;
        }
        let part = self.parts.entry(clusters.start / PART).or_insert_with(|| Box::new([0; WORDS]));
        for cluster in clusters {
            if let Some(word) = part.get_mut((cluster % PART / 64) as usize) {
                *word |= 1 << (cluster % 64);
            }
        }
    }

    fn insert_whole(&mut self, parts: Range<u64>) {
        let Range { mut start, mut end } = parts;
        while let Some((&first, &behind)) = self.whole.range(..=end).next_back().filter(|run| *run.1 >= start)
        {
            self.whole.remove(&first);
            (start, end) = (start.min(first), end.max(behind));
        }
        self.whole.insert(start, end);
    }

    /// The part behind the run that has this one.
    fn end_of_run(&self, part: u64) -> Option<u64> {
        let run = self.whole.range(..=part).next_back();
        run.map(|(_, behind)| *behind).filter(|behind| part < *behind)
    }

    /// The first part from this one on that may have clusters.
    fn next_part(&self, part: u64) -> Option<u64> {
        let run = self.whole.range(part..).next().map(|(first, _)| *first);
        let other = self.parts.range(part..).next().map(|(part, _)| *part);
        run.into_iter().chain(other).min()
    }

    /// Clusters of the set in a range, in ascending order.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        let end = range.end;
        let mut at = range.start;
        // Clusters before this one, from `at` on, are all in the set.
        let mut held_until = 0;
        std::iter::from_fn(move || {
            while at < end {
                let part = at / PART;
                if at >= held_until
                    && let Some(behind) = self.end_of_run(part)
                {
                    held_until = behind.saturating_mul(PART);
                }
                let found = if at < held_until {
                    Some(at)
                } else {
                    let bits = self.parts.get(&part);
                    bits.and_then(|bits| next_bit(bits, at % PART)).map(|bit| part.saturating_mul(PART) | bit)
                };
                if let Some(found) = found {
                    at = found.saturating_add(1);
                    return (found < end).then_some(found);
                }
                at = self.next_part(part.saturating_add(1))?.saturating_mul(PART);
            }
            None
        })
    }

    /// How many clusters the set has.
    pub fn count(&self) -> u64 {
        let whole =
            self.whole.iter().map(|(first, behind)| behind.saturating_sub(*first).saturating_mul(PART));
        let parts = self.parts.iter().filter(|(part, _)| self.end_of_run(**part).is_none());
        let bits = parts.flat_map(|(_, bits)| bits.iter()).map(|word| u64::from(word.count_ones()));
        whole.chain(bits).fold(0, u64::saturating_add)
    }
}

/// The first bit from this one on.
fn next_bit(bits: &[u64; WORDS], from: u64) -> Option<u64> {
    let mut at = from;
    while let Some(word) = bits.get((at / 64) as usize) {
        let rest = word >> (at % 64);
        if rest != 0 {
            return Some(at.saturating_add(u64::from(rest.trailing_zeros())));
        }
        at = (at / 64).saturating_add(1).saturating_mul(64);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_whole_disk_is_one_run() {
        let mut set = ClusterSet::default();
        set.insert(0..u64::MAX);
        set.insert(5..1 << 40);
        assert_eq!((set.whole.len(), set.parts.len()), (1, 1));
        assert_eq!(set.count(), u64::MAX);
        assert_eq!(set.within(1 << 50..u64::MAX).next(), Some(1 << 50));
        assert_eq!(set.within(u64::MAX..u64::MAX).next(), None);
    }

    #[test]
    fn one_cluster_takes_one_part_wherever_it_lies() {
        let mut set = ClusterSet::default();
        set.insert(1 << 55..(1 << 55) + 1);
        assert_eq!((set.whole.len(), set.parts.len(), set.count()), (0, 1, 1));
        assert_eq!(set.within(0..u64::MAX).collect::<Vec<_>>(), [1 << 55]);
    }

    proptest! {
        #[test]
        fn a_set_has_what_was_inserted(
            ranges in prop::collection::vec((0u64..40_000, prop_oneof![0u64..200, 4000u64..13_000]), 0..8),
            from in 0u64..50_000,
        ) {
            let mut set = ClusterSet::default();
            let mut model = std::collections::BTreeSet::new();
            for (start, len) in ranges {
                set.insert(start..start + len);
                model.extend(start..start + len);
            }
            let found: Vec<u64> = set.within(from..45_000).collect();
            prop_assert_eq!(found, model.range(from..45_000.max(from)).copied().collect::<Vec<_>>());
            prop_assert_eq!(set.count(), model.len() as u64);
        }
    }
}
