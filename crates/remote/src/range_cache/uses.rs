//! Ranges in the order of their latest use.

use std::collections::{BTreeSet, HashMap};

/// A range of one of the objects that this process has open.
pub(super) type BlockOfObject = (usize, u64);

/// The ranges that have blocks.
#[derive(Debug, Default)]
pub(super) struct Uses {
    order: BTreeSet<(u32, BlockOfObject)>,
    times: HashMap<BlockOfObject, u32>,
}

impl Uses {
    /// Notes that a range was used at `time`; the time that was noted before.
    pub(super) fn note(&mut self, place: BlockOfObject, time: u32) -> Option<u32> {
        let before = self.times.get(&place).copied();
        if before == Some(time) {
            return before;
        }
        if let Some(before) = before {
            self.order.remove(&(before, place));
        }
        self.times.insert(place, time);
        self.order.insert((time, place));
        before
    }

    /// Takes out the range that was not used for longest; when it was used.
    pub(super) fn take_oldest(&mut self) -> Option<(BlockOfObject, u32)> {
        let (time, place) = self.order.pop_first()?;
        self.times.remove(&place);
        Some((place, time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first() {
        let mut uses = Uses::default();
        for (place, time) in [((0, 1), 5), ((0, 2), 3), ((1, 1), 4), ((0, 2), 9)] {
            uses.note(place, time);
        }
        assert_eq!(uses.note((0, 1), 5), Some(5));
        let order: Vec<_> = std::iter::from_fn(|| uses.take_oldest()).collect();
        assert_eq!(order, [((1, 1), 4), ((0, 1), 5), ((0, 2), 9)]);
        assert!(uses.times.is_empty());
    }
}
