//! Which parts of an image are holes, as librbd last reported.

use crate::ffi::Run;
use zebu_storage::sync::Mutex;

/// The latest answer, as long as nothing was changed.
#[derive(Debug, Default)]
pub(crate) struct KnownRuns {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Changes so far.
    changes: u64,
    known: Option<Window>,
}

/// Runs of data in a range; all between them are holes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Window {
    start: u64,
    end: u64,
    /// In order, without overlaps, within the range, and none beside the next.
    data: Vec<(u64, u64)>,
}

impl KnownRuns {
    /// Forgets what is known: the image changes.
    pub(crate) fn change(&self) {
        let mut state = self.state.lock();
        state.changes += 1;
        state.known = None;
    }

    /// Changes so far.
    pub(crate) fn changes(&self) -> u64 {
        self.state.lock().changes
    }

    /// Keeps what was looked up when there were so many changes.
    pub(crate) fn keep(&self, window: Window, changes: u64) {
        let mut state = self.state.lock();
        if state.changes == changes {
            state.known = Some(window);
        }
    }

    /// The length of the run at `offset`, and whether it is a hole, if that is known.
    pub(crate) fn at(&self, offset: u64) -> Option<(u64, bool)> {
        let state = self.state.lock();
        state.known.as_ref().and_then(|window| window.at(offset))
    }
}

impl Window {
    /// The range from `start` to `end`, of which librbd has told these runs, in order of their offsets.
    pub(crate) fn new(start: u64, end: u64, runs: &[Run]) -> Self {
        let mut data: Vec<(u64, u64)> = Vec::new();
        for run in runs.iter().filter(|run| run.is_data) {
            // By whole objects, a run may begin before the range.
            let (from, to) = (run.offset.max(start), run.offset.saturating_add(run.len).min(end));
            match data.last_mut() {
                _ if from >= to => {}
                Some((_, last)) if *last >= from => *last = to.max(*last),
                _ => data.push((from, to)),
            }
        }
        Self { start, end, data }
    }

    /// The length of the run at `offset`, and whether it is a hole. None outside of the range.
    pub(crate) fn at(&self, offset: u64) -> Option<(u64, bool)> {
        if !(self.start..self.end).contains(&offset) {
            return None;
        }
        let next = self.data.partition_point(|(_, end)| *end <= offset);
        Some(match self.data.get(next) {
            Some((start, end)) if *start <= offset => (end - offset, false),
            Some((start, _)) => (start - offset, true),
            None => (self.end - offset, true),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(offset: u64, len: u64, is_data: bool) -> Run {
        Run { offset, len, is_data }
    }

    #[test]
    fn what_lies_between_runs_of_data_is_a_hole() {
        let runs =
            [run(5, 10, true), run(15, 5, true), run(20, 10, false), run(40, 5, true), run(42, 90, true)];
        let window = Window::new(10, 100, &runs);
        for (offset, expected) in [
            (9, None),
            (10, Some((10, false))),
            (19, Some((1, false))),
            (20, Some((20, true))),
            (39, Some((1, true))),
            (40, Some((60, false))),
            (99, Some((1, false))),
            (100, None),
        ] {
            assert_eq!(window.at(offset), expected, "{offset}");
        }
        assert_eq!(Window::new(0, 10, &[]).at(3), Some((7, true)));
    }

    #[test]
    fn what_was_looked_up_before_a_change_is_not_kept() {
        let known = KnownRuns::default();
        let window = Window::new(0, 10, &[]);
        let changes = known.changes();
        known.keep(window.clone(), changes);
        assert_eq!(known.at(0), Some((10, true)));
        known.change();
        assert_eq!(known.at(0), None);
        known.keep(window, changes);
        assert_eq!(known.at(0), None);
    }
}
