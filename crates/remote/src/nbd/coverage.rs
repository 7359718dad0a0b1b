//! Which bytes of a read have arrived.

use std::collections::BTreeMap;
use std::ops::Range;

/// The most ranges: a server that sends a read in more pieces, and not in their order, takes memory without need.
const MOST_RANGES: usize = 1 << 16;

/// Disjoint ranges, neighbours joined.
#[derive(Debug, Default)]
pub(super) struct Coverage(BTreeMap<u64, u64>);

impl Coverage {
    /// Adds a range; false if a part of it is there already, or if there would be too many.
    pub(super) fn add(&mut self, range: Range<u64>) -> bool {
        let before = self.0.range(..=range.start).next_back().map(|(start, end)| (*start, *end));
        let after = self.0.range(range.start..).next().map(|(start, end)| (*start, *end));
        if before.is_some_and(|(_, end)| end > range.start)
            || after.is_some_and(|(start, _)| start < range.end)
        {
            return false;
        }
        let start = match before {
            Some((start, end)) if end == range.start => start,
            _ => range.start,
        };
        let end = match after {
            Some((start, end)) if start == range.end => {
                self.0.remove(&start);
                end
            }
            _ => range.end,
        };
        self.0.insert(start, end);
        self.0.len() <= MOST_RANGES
    }

    /// Whether it is exactly this range.
    pub(super) fn is(&self, range: &Range<u64>) -> bool {
        range.is_empty() || (self.0.len() == 1 && self.0.get(&range.start) == Some(&range.end))
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::Coverage;

    #[test]
    fn ranges_join_and_never_overlap() {
        let mut covered = Coverage::default();
        assert!(covered.add(10..20) && covered.add(30..40) && covered.add(0..10));
        for twice in [0..1, 15..25, 25..31, 39..50, 10..20, 0..100] {
            assert!(!covered.add(twice.clone()), "{twice:?}");
        }
        assert!(!covered.is(&(0..40)));
        assert!(covered.add(20..30));
        assert!(covered.is(&(0..40)));
        assert!(!covered.is(&(0..41)) && !covered.is(&(1..40)));
    }

    /// A server could fill the memory of its client with the places of single bytes.
    #[test]
    fn there_are_no_more_ranges_than_a_server_needs() {
        let mut covered = Coverage::default();
        let block = 512;
        // Every other block of the longest read, and then the rest.
        assert!((0..32 << 20).step_by(2 * block).all(|at| covered.add(at..at + block as u64)));
        assert!((block as u64..32 << 20).step_by(2 * block).all(|at| covered.add(at..at + block as u64)));
        assert!(covered.is(&(0..32 << 20)));
        covered.clear();
        assert!((0..32u64 << 20).step_by(2).any(|at| !covered.add(at..at + 1)));
        assert!(covered.0.len() < 100_000);
    }
}
