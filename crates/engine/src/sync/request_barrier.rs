//! Requests that change an image, and operations that must be alone with it.

use crate::sync::while_driven;
use crate::sync::{AsyncMutex, AsyncMutexGuard, Clock, ClosedGate, EpochGuard, Gate, ReadEpochs};
use std::sync::Arc;
use zebu_storage::drive::{Drive, OneOf};
use zebu_storage::sabotage::{self, Fault};

/// A readers-writer lock between requests (together) and an operation (alone: a resize, a snapshot).
///
/// A request costs one counter in the worker's own cache line. An operation first waits, with the barrier open, for the
/// requests inside: one whose worker is not polled keeps the operation waiting, and nobody else. Then it closes the
/// barrier and waits for those that came meanwhile; later ones wait until it is over. If one of these takes long, it
/// opens the barrier again and begins anew.
#[derive(Debug, Default)]
pub(crate) struct RequestBarrier {
    inside: ReadEpochs,
    gate: Gate,
    one_alone: AsyncMutex,
}

/// A request that is inside.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    _counted: EpochGuard<'a>,
}

/// The operation that is alone.
#[derive(Debug)]
pub(crate) struct Alone<'a> {
    _closed: ClosedGate<'a>,
    _one: AsyncMutexGuard<'a>,
}

impl RequestBarrier {
    fn try_enter(&self, drive: &Arc<Drive>) -> Option<Inside<'_>> {
        let trusts_a_look_before = sabotage::is(Fault::LookBeforeCount) && self.gate.is_open();
        let inside = Inside { _counted: self.inside.enter(drive) };
        (trusts_a_look_before || self.gate.is_open()).then_some(inside)
    }

    /// Enters, as a request of the worker of `drive`; waits while an operation is alone. A request that is inside must not
    /// wait for anything that needs to be alone.
    pub(crate) async fn enter(&self, drive: &Arc<Drive>) -> Inside<'_> {
        if let Some(inside) = self.try_enter(drive) {
            return inside;
        }
        self.gate.pass(|| self.try_enter(drive)).await
    }

    /// Waits until those inside have left, then for its turn. Then closes the barrier until the guard is dropped, and waits for
    /// those inside and with `others` for the workers of `awaited`. `None`: nobody drives one of those that it has to wait for.
    pub(crate) async fn alone(
        &self,
        clock: &impl Clock,
        awaited: impl Fn() -> Vec<OneOf>,
        others: impl AsyncFn(),
    ) -> Option<Alone<'_>> {
        // Before the turn: several who wait for one request learn at once that it does not end.
        while_driven(clock, || self.inside.awaited(), self.inside.wait(clock)).await?;
        let turn = self.one_alone.lock_by(clock.drive());
        let one = while_driven(clock, || self.one_alone.awaited(), turn).await?;
        let leave = async || {
            self.inside.wait(clock).await;
            others().await;
        };
        let all = || self.inside.awaited().into_iter().chain(awaited()).collect();
        let closed = while_driven(clock, all, self.gate.close_after(clock, leave)).await?;
        Some(Alone { _closed: closed, _one: one })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use crate::sync::{Standing, drive};
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Wake, Waker};

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    async fn nothing() {}

    #[test]
    fn whoever_is_alone_waits_for_those_inside_and_keeps_newcomers_out() {
        let barrier = RequestBarrier::default();
        let Poll::Ready(first) = poll(pin!(barrier.enter(&drive(0)))) else { panic!("nobody is alone") };
        let mut alone = pin!(barrier.alone(&Standing, Vec::new, nothing));
        assert!(poll(alone.as_mut()).is_pending());
        let Poll::Ready(second) = poll(pin!(barrier.enter(&drive(17)))) else {
            panic!("it waits with the door open")
        };
        drop(first);
        assert!(poll(alone.as_mut()).is_pending());
        let other = drive(17);
        let mut late = pin!(barrier.enter(&other));
        drop(second);
        let Poll::Ready(alone) = poll(alone) else { panic!("everybody has left") };
        assert!(poll(late.as_mut()).is_pending());
        let mut another = pin!(barrier.alone(&Standing, Vec::new, nothing));
        assert!(poll(another.as_mut()).is_pending());
        drop(alone);
        let Poll::Ready(late) = poll(late) else { panic!("nobody is alone any more") };
        assert!(poll(another.as_mut()).is_pending());
        drop(late);
        assert!(poll(another.as_mut()).is_ready());
    }

    /// Patience is over as often as the count says.
    struct Hasty(std::cell::Cell<u32>);
    impl Clock for Hasty {
        async fn patience(&self) {
            match self.0.get().checked_sub(1) {
                Some(left) => self.0.set(left),
                None => std::future::pending().await,
            }
        }

        fn look(&self) -> impl Future<Output = ()> {
            std::future::pending()
        }

        fn drive(&self) -> Option<&Arc<Drive>> {
            None
        }
    }

    #[test]
    fn who_is_inside_for_long_keeps_nobody_else_out() {
        let barrier = RequestBarrier::default();
        let hasty = Hasty(std::cell::Cell::new(1));
        let is_held = std::cell::Cell::new(false);
        // The first wait is over at once; the second one, behind the closed door, is not.
        let held = async || {
            poll_fn(|cx| {
                if is_held.replace(true) && hasty.0.get() > 0 {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(())
            })
            .await;
        };
        let Poll::Ready(inside) = poll(pin!(barrier.enter(&drive(0)))) else { panic!("nobody is alone") };
        let mut alone = pin!(barrier.alone(&hasty, Vec::new, held));
        assert!(poll(alone.as_mut()).is_pending());
        assert!(poll(pin!(barrier.enter(&drive(1)))).is_ready());
        drop(inside);
        assert!(poll(alone.as_mut()).is_ready(), "it opened the door and began anew");
        assert_eq!(hasty.0.get(), 0);
    }

    #[test]
    fn a_wait_that_is_given_up_lets_the_others_in() {
        let barrier = RequestBarrier::default();
        let held = async || std::future::pending().await;
        let Poll::Ready(_inside) = poll(pin!(barrier.enter(&drive(0)))) else { panic!("nobody is alone") };
        {
            let mut alone = pin!(barrier.alone(&Standing, Vec::new, held));
            assert!(poll(alone.as_mut()).is_pending());
        }
        assert!(poll(pin!(barrier.enter(&drive(1)))).is_ready());
        assert!(poll(pin!(barrier.alone(&Standing, Vec::new, nothing))).is_pending());
    }

    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return value;
            }
            std::thread::park();
        }
    }

    #[test]
    fn threads_never_meet_the_one_who_is_alone() {
        let barrier = RequestBarrier::default();
        let (inside, alone) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for worker in 0..3 {
                let (barrier, inside, alone) = (&barrier, &inside, &alone);
                scope.spawn(move || {
                    for round in 0..2000 {
                        if round % 20 == worker {
                            let _alone = block_on(barrier.alone(&Standing, Vec::new, nothing));
                            alone.fetch_add(1, SeqCst);
                            assert_eq!((inside.load(SeqCst), alone.load(SeqCst)), (0, 1));
                            alone.fetch_sub(1, SeqCst);
                        } else {
                            let _inside = block_on(barrier.enter(&drive(worker)));
                            inside.fetch_add(1, SeqCst);
                            assert_eq!(alone.load(SeqCst), 0);
                            inside.fetch_sub(1, SeqCst);
                        }
                    }
                });
            }
        });
    }
}
