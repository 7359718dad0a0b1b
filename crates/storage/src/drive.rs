//! The driving of workers, as those see it who wait for them, and waits that end only if what they wait for can never come.
//!
//! A worker goes on when its thread takes turns with it. A disk may take minutes for an operation, and a process may be
//! stopped for hours; the worker is driven all the same, and who waits for it goes on waiting. A thread that has promised to
//! drive its worker ([`Worker::promise_to_drive`](crate::Worker::promise_to_drive)) is believed.
//!
//! So a wait is not ended by time, but by what is seen. Who waits looks now and then at the workers that it waits for, and
//! asks those for a turn that have not promised any. One that was never driven at so many looks one after the other
//! ([`LOOKS`]) is given up. A leap of the clock, or a sleep of the machine, is one look.

use crate::notify::Notifier;
use crate::sabotage::{self, Fault};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::task::Poll;
use std::time::Duration;

/// Looks in a row at which a worker is not driven, after which nobody waits for it.
pub const LOOKS: u32 = 30;

/// The time between two looks.
pub const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// Knowledge that others have of the driving of a worker.
pub struct Drive {
    number: usize,
    /// Odd while the worker is within a turn.
    turns: AtomicU64,
    has_promised: AtomicBool,
    is_asked: AtomicBool,
    has_ended: AtomicBool,
    notifier: Option<Arc<Notifier>>,
}

impl fmt::Debug for Drive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drive").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Drive {
    pub(crate) fn new(number: usize, notifier: Arc<Notifier>) -> Arc<Self> {
        Arc::new(Self { notifier: Some(notifier), ..Self::unknown(number) })
    }

    /// That of a worker of this number which nobody has seen take a turn, for tests.
    #[doc(hidden)]
    pub fn unknown(number: usize) -> Self {
        Self {
            number,
            turns: AtomicU64::new(0),
            has_promised: AtomicBool::new(false),
            is_asked: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            notifier: None,
        }
    }

    /// The number of the worker ([`Worker::id`](crate::Worker::id)).
    #[inline]
    pub fn number(&self) -> usize {
        self.number
    }

    pub(crate) fn promise(&self) {
        self.has_promised.store(true, SeqCst);
    }

    pub(crate) fn has_promised(&self) -> bool {
        self.has_promised.load(SeqCst)
    }

    /// A turn begins.
    #[inline]
    pub(crate) fn begin_turn(&self) {
        // Nobody else writes it.
        self.turns.store(self.turns.load(SeqCst) + 1, SeqCst);
        if self.is_asked.load(SeqCst) {
            self.is_asked.store(false, SeqCst);
        }
    }

    /// The turn ends.
    #[inline]
    pub(crate) fn end_turn(&self) {
        self.turns.store(self.turns.load(SeqCst) + 1, SeqCst);
    }

    /// Whether somebody has asked for a turn since the last one.
    #[cfg(any(test, feature = "simulated"))]
    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked.load(SeqCst)
    }

    /// No promise holds any more: its thread has ended, or nobody has the worker.
    pub(crate) fn end_promise(&self) {
        self.has_promised.store(false, SeqCst);
    }

    /// The worker is gone.
    pub(crate) fn end(&self) {
        self.has_ended.store(true, SeqCst);
    }

    /// Whether the worker is gone.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(SeqCst)
    }

    /// The turns until now, or `None` if the worker is driven for sure. Asks for another turn.
    fn look(&self) -> Option<u64> {
        let turns = self.turns.load(SeqCst);
        if self.has_promised() && !sabotage::is(Fault::DoubtPromise) || turns % 2 == 1 {
            return None;
        }
        self.is_asked.store(true, SeqCst);
        if let Some(notifier) = &self.notifier {
            notifier.notify();
        }
        Some(turns)
    }
}

/// Workers one of which is waited for, and it is not known which.
pub type OneOf = Vec<Arc<Drive>>;

/// Looks of one who waits: what it has seen of the workers that it waits for.
#[derive(Debug, Default)]
struct Looks(Vec<Seen>);

#[derive(Debug)]
struct Seen {
    drive: Arc<Drive>,
    /// At the last look.
    turns: Option<u64>,
    /// Looks one after the other at which it was not driven.
    still: u32,
}

impl Looks {
    /// Looks once more, at those that are waited for now. Returns those of which nobody will come.
    fn look(&mut self, awaited: Vec<OneOf>) -> Vec<OneOf> {
        self.0.retain(|seen| awaited.iter().flatten().any(|drive| Arc::ptr_eq(drive, &seen.drive)));
        for seen in &mut self.0 {
            let turns = seen.drive.look();
            let is_still = (turns.is_some() && turns == seen.turns) || sabotage::is(Fault::GiveUpOnDriven);
            seen.still = if is_still { seen.still + 1 } else { 0 };
            seen.turns = turns;
        }
        for drive in awaited.iter().flatten() {
            if !self.0.iter().any(|seen| Arc::ptr_eq(&seen.drive, drive)) {
                self.0.push(Seen { drive: Arc::clone(drive), turns: drive.look(), still: 0 });
            }
        }
        let is_given_up = |drive: &Arc<Drive>| {
            self.0.iter().any(|seen| Arc::ptr_eq(&seen.drive, drive) && seen.still >= LOOKS)
        };
        awaited.into_iter().filter(|one_of| !one_of.is_empty() && one_of.iter().all(is_given_up)).collect()
    }
}

/// The result of `waits`, for which each of `awaited` is needed, unless one of these can never come.
///
/// # Errors
/// Those that were not driven at [`LOOKS`] looks one after the other, with a `pause` between each two, and have not promised
/// it.
pub async fn while_driven<T>(
    pause: impl AsyncFn(),
    awaited: impl Fn() -> Vec<OneOf>,
    waits: impl Future<Output = T>,
) -> Result<T, Vec<OneOf>> {
    let given_up = async {
        let mut looks = Looks::default();
        loop {
            pause().await;
            let given_up = looks.look(awaited());
            if !given_up.is_empty() && !sabotage::is(Fault::WaitWithoutBound) {
                return given_up;
            }
        }
    };
    // The looks begin with their first poll, when there is something to wait for.
    let (mut waits, mut given_up) = (pin!(waits), pin!(given_up));
    poll_fn(|cx| match waits.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Ok(value)),
        Poll::Pending => given_up.as_mut().poll(cx).map(Err),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};
    use std::task::{Context, Waker};

    fn waits_for(drive: &Arc<Drive>, at_each_look: impl Fn(u32)) -> Option<u32> {
        let looks = std::cell::Cell::new(0);
        let pause = async || {
            looks.set(looks.get() + 1);
            at_each_look(looks.get());
            if looks.get() > 10 * LOOKS {
                pending::<()>().await;
            }
        };
        let wait = pin!(while_driven(pause, || vec![vec![drive.clone()]], pending::<()>()));
        match wait.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(given_up)) => {
                assert!(Arc::ptr_eq(&given_up[0][0], drive));
                Some(looks.get())
            }
            Poll::Ready(Ok(())) => panic!("it waits for nothing"),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_worker_that_is_never_driven_is_given_up() {
        assert_eq!(waits_for(&Arc::new(Drive::unknown(0)), |_| {}), Some(LOOKS + 1));
    }

    #[test]
    fn one_that_takes_a_turn_now_and_then_is_waited_for() {
        let drive = Arc::new(Drive::unknown(0));
        let turn = |look| {
            if look % (LOOKS - 1) == 0 {
                assert!(drive.is_asked());
                drive.begin_turn();
                drive.end_turn();
            }
        };
        assert_eq!(waits_for(&drive, turn), None);
    }

    #[test]
    fn one_that_is_within_a_turn_is_waited_for() {
        let drive = Arc::new(Drive::unknown(0));
        drive.begin_turn();
        assert_eq!(waits_for(&drive, |_| {}), None);
    }

    #[test]
    fn a_promise_is_believed_until_its_worker_is_gone() {
        let drive = Arc::new(Drive::unknown(0));
        drive.promise();
        assert_eq!(waits_for(&drive, |_| {}), None);
        drive.end_promise();
        assert_eq!(waits_for(&drive, |_| {}), Some(LOOKS + 1));
    }

    #[test]
    fn of_several_that_may_be_meant_all_have_to_be_given_up() {
        let [still, driven] = [0, 1].map(|number| Arc::new(Drive::unknown(number)));
        driven.promise();
        let mut looks = Looks::default();
        for _ in 0..=2 * LOOKS {
            assert!(looks.look(vec![vec![still.clone(), driven.clone()]]).is_empty());
        }
        assert_eq!(looks.look(vec![vec![driven], vec![still]]).len(), 1);
    }

    #[test]
    fn what_is_there_is_not_looked_for() {
        let wait = while_driven(async || panic!("no look is needed"), Vec::new, ready(7));
        let Poll::Ready(Ok(7)) = pin!(wait).poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("it is there")
        };
    }
}
