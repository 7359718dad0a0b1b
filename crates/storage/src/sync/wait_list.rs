//! Lists of tasks that wait for one thing.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

/// The wakers of tasks that wait for a change of what the same lock guards.
///
/// A task looks, adds its waker, and returns `Pending`, all under the lock. Whoever makes the change takes all wakers
/// under the lock and wakes them after it: a waker is foreign code. All are woken and look again, so that a task that
/// is not polled any more holds nobody up.
#[derive(Debug, Default)]
pub struct WaitList(Vec<Waker>);

/// Wakers that were taken from a [`WaitList`].
#[derive(Debug, Default)]
#[must_use = "tasks that are not woken wait for ever"]
pub struct Wakers(Vec<Waker>);

/// The wakers of tasks that wait for an event which most of them do not live to see, as the end of a server.
///
/// A [`WaitList`] would keep those that are gone until the event comes. Here each task has a place, and leaves it when it
/// waits no more.
#[derive(Debug, Default)]
pub struct WaitRoom {
    /// Places that were ever given.
    given: u64,
    wakers: BTreeMap<u64, Waker>,
}

/// The place of a task in a [`WaitRoom`]; by default it has none yet.
#[derive(Debug, Default)]
pub struct WaitPlace(Option<u64>);

impl WaitRoom {
    /// Has the task of this place woken when the event comes.
    pub fn wait(&mut self, place: &mut WaitPlace, waker: &Waker) {
        let number = place.0.unwrap_or_else(|| {
            self.given += 1;
            self.given
        });
        place.0 = Some(number);
        match self.wakers.get_mut(&number) {
            Some(known) => known.clone_from(waker),
            None => drop(self.wakers.insert(number, waker.clone())),
        }
    }

    /// Ends the wait of a task. The waker is to be dropped without any lock.
    pub fn leave(&mut self, place: &mut WaitPlace) -> Option<Waker> {
        self.wakers.remove(&place.0.take()?)
    }

    /// Takes all wakers: the event has come.
    pub fn take(&mut self) -> Wakers {
        Wakers(std::mem::take(&mut self.wakers).into_values().collect())
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.wakers.is_empty()
    }
}

impl WaitList {
    /// Adds the waker of a task. A task that is in the list already is not added again.
    pub fn add(&mut self, waker: &Waker) {
        if !self.0.iter().any(|other| other.will_wake(waker)) {
            self.0.push(waker.clone());
        }
    }

    /// Takes all wakers.
    pub fn take(&mut self) -> Wakers {
        Wakers(std::mem::take(&mut self.0))
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Wakers {
    /// Adds those of another list.
    pub fn and(mut self, other: Wakers) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Wakes them all, though one of them panics. No lock may be held.
    pub fn wake(self) {
        for waker in self.0 {
            // Whoever makes the change must not end halfway for it. The panic was reported when it happened.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// A faulty [`Wakers::wake`]: only the first is woken.
    #[doc(hidden)]
    pub fn wake_first(self) {
        self.0.into_iter().take(1).for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    #[test]
    fn a_task_is_woken_once_however_often_it_was_added() {
        let counts: [Arc<Count>; 2] = Default::default();
        let mut list = WaitList::default();
        for count in counts.iter().chain(&counts) {
            list.add(&Waker::from(Arc::clone(count)));
        }
        list.take().wake();
        assert!(list.is_empty());
        assert_eq!(counts.map(|count| count.0.load(SeqCst)), [1, 1]);
    }

    #[test]
    fn a_room_has_those_who_wait_and_no_others() {
        let counts: [Arc<Count>; 3] = Default::default();
        let mut room = WaitRoom::default();
        let mut places: [WaitPlace; 3] = Default::default();
        for (count, place) in counts.iter().zip(&mut places) {
            room.wait(place, &Waker::from(Arc::clone(count)));
            room.wait(place, &Waker::from(Arc::clone(count)));
        }
        drop(room.leave(&mut places[1]));
        room.take().wake();
        assert!(room.is_empty());
        assert_eq!(counts.map(|count| count.0.load(SeqCst)), [1, 0, 1]);
        // A place from before the event takes nobody's away.
        let mut later = WaitPlace::default();
        room.wait(&mut later, Waker::noop());
        assert!(room.leave(&mut places[0]).is_none() && !room.is_empty());
        assert!(room.leave(&mut later).is_some() && room.is_empty());
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("as intended");
        }
    }

    #[test]
    fn a_waker_that_panics_keeps_no_other_from_being_woken() {
        let count = Arc::<Count>::default();
        let mut list = WaitList::default();
        list.add(&Waker::from(Arc::new(Panics)));
        list.add(&Waker::from(Arc::clone(&count)));
        list.take().wake();
        assert_eq!(count.0.load(SeqCst), 1);
    }
}
