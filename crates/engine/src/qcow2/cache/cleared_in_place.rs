//! Guest clusters that were cleared and kept their host clusters, while earlier writes may still reach these.

use crate::sync::Moment;
use std::ops::Range;
use zebu_storage::sabotage::{self, Limit};

/// Ranges that are told apart; more are joined, and waited for by more than need to.
const MOST: usize = 64;

/// The clusters of a shard that were cleared in their place, each with the moment of that.
///
/// A write that was under way at that moment may reach the host cluster until it ends. If another was linked there
/// before, what the first one left would be seen after the zeroes. So the other takes a new place, or waits until the
/// moment has passed.
#[derive(Debug, Default)]
pub(crate) struct ClearedInPlace {
    ranges: Vec<(Range<u64>, Moment)>,
}

impl ClearedInPlace {
    /// Notes that guest clusters were cleared at `moment`. Those of moments that have passed are forgotten.
    pub(crate) fn note(&mut self, clusters: Range<u64>, moment: Moment, has_passed: impl Fn(Moment) -> bool) {
        self.ranges.retain(|(_, moment)| !has_passed(*moment));
        self.ranges.push((clusters, moment));
        if self.ranges.len() > sabotage::at_most(Limit::ClearedRanges, MOST as u64) as usize {
            self.join_neighbours();
        }
    }

    /// Makes one of the two ranges that are nearest to each other.
    fn join_neighbours(&mut self) {
        self.ranges.sort_unstable_by_key(|(range, _)| range.start);
        let gap = |pair: &[(Range<u64>, Moment)]| pair[1].0.start.saturating_sub(pair[0].0.end);
        let nearest = self.ranges.windows(2).enumerate().min_by_key(|(_, pair)| gap(pair));
        let Some((index, _)) = nearest else { return };
        let (next, moment) = self.ranges.remove(index + 1);
        if let Some((range, latest)) = self.ranges.get_mut(index) {
            range.end = range.end.max(next.end);
            *latest = moment.max(*latest);
        }
    }

    /// The moment that has to pass before any of `clusters` is written in its place.
    pub(crate) fn latest(
        &self,
        clusters: &Range<u64>,
        has_passed: impl Fn(Moment) -> bool,
    ) -> Option<Moment> {
        let meets = |range: &Range<u64>| range.start < clusters.end && clusters.start < range.end;
        let met = self.ranges.iter().filter(|(range, _)| meets(range)).map(|(_, moment)| *moment);
        met.max().filter(|moment| !has_passed(*moment))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{ReadEpochs, Standing, drive};
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    #[test]
    fn what_is_cleared_is_told_until_its_moment_has_passed() {
        let epochs = ReadEpochs::default();
        let inside = epochs.enter(&drive(0));
        let moment = epochs.moment().unwrap();
        let has_passed = |moment| epochs.has_passed(moment);
        let mut cleared = ClearedInPlace::default();
        cleared.note(10..20, moment, has_passed);
        assert_eq!(cleared.latest(&(20..30), has_passed), None);
        assert_eq!(cleared.latest(&(5..11), has_passed), Some(moment));
        for number in 0..1000 {
            cleared.note(100 * number..100 * number + 1, moment, has_passed);
        }
        assert!(cleared.ranges.len() <= MOST);
        assert_eq!(cleared.latest(&(19..20), has_passed), Some(moment));
        assert_eq!(cleared.latest(&(99_900..99_901), has_passed), Some(moment));
        drop(inside);
        assert!(pin!(epochs.wait(&Standing)).poll(&mut Context::from_waker(Waker::noop())).is_ready());
        assert_eq!(cleared.latest(&(19..20), has_passed), None);
        cleared.note(0..1, moment, has_passed);
        assert_eq!(cleared.ranges.len(), 1);
    }
}
