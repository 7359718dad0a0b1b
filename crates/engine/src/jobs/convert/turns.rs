//! Turns of the pieces of a conversion: what lies first on the disk gets its place in the file first, whatever is read first.

use crate::sync::Mutex;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

/// Turns in the order of the disk. Each part of the disk is passed exactly once, by whoever deals with it.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// All before it was passed.
    next: u64,
    /// Parts behind that which were passed, their ends by their starts. No two of them are neighbours.
    passed: BTreeMap<u64, u64>,
    /// Waiting tasks, by the offset of their part.
    waiting: BTreeMap<u64, Waker>,
    given_up: bool,
}

impl Turns {
    /// Waits until all that lies before `offset` was passed; false: nobody waits any more.
    pub(super) async fn wait(&self, offset: u64) -> bool {
        poll_fn(|context| {
            let mut state = self.0.lock();
            if state.given_up || offset <= state.next {
                return Poll::Ready(!state.given_up);
            }
            state.waiting.insert(offset, context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Passes a part of the disk.
    pub(super) fn pass(&self, part: Range<u64>) {
        if !part.is_empty() {
            let woken = self.0.lock().pass(part);
            woken.into_iter().for_each(Waker::wake);
        }
    }

    /// Ends all waiting, now and later.
    pub(super) fn give_up(&self) {
        let mut state = self.0.lock();
        state.given_up = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_values().for_each(Waker::wake);
    }
}

impl State {
    /// Notes a part, and gives those whose turn it is.
    fn pass(&mut self, mut part: Range<u64>) -> Vec<Waker> {
        let mut woken = Vec::new();
        if part.start > self.next {
            let before = self.passed.range(..=part.start).next_back().map(|(start, end)| (*start, *end));
            if let Some((start, end)) = before
                && end == part.start
            {
                part.start = start;
            }
            if let Some(end) = self.passed.remove(&part.end) {
                part.end = end;
            }
            self.passed.insert(part.start, part.end);
            return woken;
        }
        self.next = self.next.max(part.end);
        while let Some(first) = self.passed.first_entry()
            && *first.key() <= self.next
        {
            self.next = self.next.max(first.remove());
        }
        while let Some(first) = self.waiting.first_entry()
            && *first.key() <= self.next
        {
            woken.push(first.remove());
        }
        woken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn may_go(turns: &Turns, offset: u64) -> Option<bool> {
        turns.wait(offset).now_or_never()
    }

    #[test]
    fn parts_get_their_turns_in_the_order_of_the_disk() {
        let turns = Turns::default();
        assert_eq!((may_go(&turns, 0), may_go(&turns, 10)), (Some(true), None));
        turns.pass(20..30);
        turns.pass(40..50);
        turns.pass(30..40);
        turns.pass(0..10);
        assert_eq!((may_go(&turns, 10), may_go(&turns, 50)), (Some(true), None));
        turns.pass(10..20);
        assert_eq!((may_go(&turns, 50), may_go(&turns, 51)), (Some(true), None));
        assert!(turns.0.lock().passed.is_empty());
    }

    #[test]
    fn any_order_of_passing_ends_at_the_end() {
        for step in [1, 3, 7, 9, 11, 13] {
            let turns = Turns::default();
            // No step has a factor in common with 100, so that each part comes once.
            for part in (0..100u64).map(|n| n * step % 100) {
                turns.pass(part * 5..part * 5 + 5);
            }
            assert_eq!(may_go(&turns, 500), Some(true), "step {step}");
            assert!(turns.0.lock().passed.is_empty());
        }
    }

    #[test]
    fn nobody_waits_for_a_job_that_has_stopped() {
        let turns = Turns::default();
        let mut waiting = Box::pin(turns.wait(10));
        assert_eq!((&mut waiting).now_or_never(), None);
        turns.give_up();
        assert_eq!(waiting.now_or_never(), Some(false));
    }
}
