//! The local executor: runs tasks of one thread, and takes wake-ups from any thread.
//!
//! It knows nothing of I/O. A task is one allocation that holds the future and, later, its value; its waker is an
//! `Arc` of a small header that is reused by later tasks. Wakers may be cloned, dropped and woken anywhere: on the
//! executor's own thread a wake is a push to a plain queue, elsewhere one to a locked queue and a notification.

use crate::notify::Notifier;
use crate::sync::Mutex;
use slab::Slab;
use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// A number for each thread, never used twice.
#[cfg(all(test, shuttle))]
fn thread_number() -> Option<u64> {
    Some(usize::from(shuttle::current::me()) as u64)
}

/// A number for each thread, never used twice.
#[cfg(not(all(test, shuttle)))]
fn thread_number() -> Option<u64> {
    use std::sync::atomic::AtomicU64;
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    // None while the thread's locals are being destroyed; a wake then takes the way of other threads.
    NUMBER.try_with(|&number| number).ok()
}

/// Where woken tasks are queued.
struct Mailbox {
    owner: u64,
    /// Touched by the thread `owner` only, and never across a call of foreign code.
    local: UnsafeCell<VecDeque<Arc<Header>>>,
    /// `None` when the executor is gone.
    remote: Mutex<Option<Vec<Arc<Header>>>>,
    notifier: Arc<Notifier>,
    /// Whether the executor is gone.
    closed: AtomicBool,
}

// SAFETY: `local` is accessed only by the thread `owner` (checked by number in `push`; `Executor`, which does the
// rest, is not `Send`) or by whoever drops the mailbox last; everything else in it is `Sync`.
unsafe impl Sync for Mailbox {}
// SAFETY: as above, and `Arc<Header>` may be dropped on any thread.
unsafe impl Send for Mailbox {}

impl Mailbox {
    fn push(&self, header: Arc<Header>) {
        if thread_number() == Some(self.owner) {
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            // SAFETY: this is the owner's thread, and no other reference to the queue exists during the call:
            // all accesses are single operations of `VecDeque` that call no foreign code.
            unsafe { (*self.local.get()).push_back(header) };
            self.notifier.notify_event_loop();
        } else {
            match &mut *self.remote.lock() {
                Some(remote) => remote.push(header),
                None => return,
            }
            self.notifier.notify();
        }
    }
}

/// The shared part of a task: all that a waker needs.
struct Header {
    /// Index of the task; [`ROOT`] for a future that `block_on` runs.
    slot: usize,
    /// Whether it lies in a queue already (for a root: whether it is to be polled).
    queued: AtomicBool,
    mailbox: Arc<Mailbox>,
}

const ROOT: usize = usize::MAX;

impl Wake for Header {
    fn wake(self: Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            let mailbox = Arc::clone(&self.mailbox);
            mailbox.push(self);
        }
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.mailbox.push(Arc::clone(self));
        }
    }
}

/// A task, as its executor sees it.
trait Run {
    /// Polls the future; true when it is over.
    fn run(&self) -> bool;
    /// Drops the future.
    fn cancel(&self);
}

/// A task, as its [`JoinHandle`] sees it.
trait Join<T> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<T>;
}

enum Stage<F: Future> {
    Running(F),
    Done(F::Output),
    /// The value was taken, or there will be none (a panic, the end of the worker).
    Over,
}

struct Task<F: Future> {
    header: Arc<Header>,
    waker: Waker,
    /// Borrowed during a poll. The future in it is never moved.
    stage: RefCell<Stage<F>>,
    /// Whether it was woken while it was being polled further up the stack (by a nested `block_on`).
    again: Cell<bool>,
    joiner: RefCell<Option<Waker>>,
}

/// Ends a task whose poll panicked, so that nobody waits for it for ever.
struct OverOnPanic<'a, F: Future> {
    task: &'a Task<F>,
    polled: bool,
}

impl<F: Future> Drop for OverOnPanic<'_, F> {
    fn drop(&mut self) {
        if !self.polled {
            self.task.finish(Stage::Over);
        }
    }
}

impl<F: Future> Run for Task<F> {
    fn run(&self) -> bool {
        // Declared before the borrow, so that it is dropped after it.
        let mut guard = OverOnPanic { task: self, polled: false };
        let Ok(mut stage) = self.stage.try_borrow_mut() else {
            guard.polled = true;
            self.again.set(true);
            return false;
        };
        let Stage::Running(future) = &mut *stage else {
            guard.polled = true;
            return true;
        };
        // SAFETY: the future lives in the task's own allocation, is never moved out of the stage while it runs, and
        // is dropped in place by the assignment of another stage.
        let future = unsafe { Pin::new_unchecked(future) };
        let polled = future.poll(&mut Context::from_waker(&self.waker));
        guard.polled = true;
        drop(stage);
        match polled {
            Poll::Ready(value) => {
                self.finish(Stage::Done(value));
                true
            }
            Poll::Pending => {
                if self.again.take() {
                    self.header.wake_by_ref();
                }
                false
            }
        }
    }

    fn cancel(&self) {
        if self.stage.try_borrow().is_ok_and(|stage| matches!(*stage, Stage::Running(_))) {
            self.finish(Stage::Over);
        }
    }
}

impl<F: Future> Task<F> {
    fn finish(&self, end: Stage<F>) {
        if let Ok(mut stage) = self.stage.try_borrow_mut() {
            *stage = end;
        }
        if let Some(waker) = self.joiner.take() {
            waker.wake();
        }
    }
}

impl<F: Future> Join<F::Output> for Task<F> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<F::Output> {
        // A task that waits for itself finds its stage borrowed, and waits on.
        if let Ok(mut stage) = self.stage.try_borrow_mut()
            && !matches!(*stage, Stage::Running(_))
        {
            match std::mem::replace(&mut *stage, Stage::Over) {
                Stage::Done(value) => return Poll::Ready(value),
                Stage::Running(_) | Stage::Over => {
                    panic!("the task panicked, was cancelled with its worker, or was joined before")
                }
            }
        }
        let mut joiner = self.joiner.borrow_mut();
        if joiner.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            *joiner = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// The value of a task spawned with [`crate::Worker::spawn`]. Dropping it lets the task run on, detached.
///
/// # Panics
/// Awaiting it panics if the task panicked, or was cancelled because its worker ended.
pub struct JoinHandle<T> {
    task: Rc<dyn Join<T>>,
}

impl<T> Future for JoinHandle<T> {
    type Output = T;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        self.task.poll_join(cx)
    }
}

/// A future that `block_on` runs: polled by its caller, woken through the executor.
pub(crate) struct Root {
    header: Arc<Header>,
    waker: Waker,
}

impl Root {
    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Whether it is to be polled; clears that.
    pub(crate) fn take_woken(&self) -> bool {
        self.header.queued.swap(false, Ordering::AcqRel)
    }

    /// Whether it is to be polled.
    pub(crate) fn is_woken(&self) -> bool {
        self.header.queued.load(Ordering::Acquire)
    }
}

/// At least as many tasks run in one go before the worker looks at its completions again.
const RUN_AT_LEAST: usize = 256;

/// The tasks of one thread.
pub(crate) struct Executor {
    mailbox: Arc<Mailbox>,
    tasks: RefCell<Slab<Rc<dyn Run>>>,
    /// The header of the latest task of each slot, for reuse by the next.
    headers: RefCell<Vec<Arc<Header>>>,
}

impl Executor {
    pub(crate) fn new(notifier: Arc<Notifier>) -> Self {
        let mailbox = Mailbox {
            owner: thread_number().unwrap_or(0),
            local: UnsafeCell::new(VecDeque::new()),
            remote: Mutex::new(Some(Vec::new())),
            notifier,
            closed: AtomicBool::new(false),
        };
        Self { mailbox: Arc::new(mailbox), tasks: RefCell::default(), headers: RefCell::default() }
    }

    pub(crate) fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let mut tasks = self.tasks.borrow_mut();
        let entry = tasks.vacant_entry();
        let header = self.header_for(entry.key());
        let task = Rc::new(Task {
            waker: Waker::from(Arc::clone(&header)),
            header: Arc::clone(&header),
            stage: RefCell::new(Stage::Running(future)),
            again: Cell::new(false),
            joiner: RefCell::new(None),
        });
        entry.insert(Rc::clone(&task) as Rc<dyn Run>);
        drop(tasks);
        header.wake();
        JoinHandle { task }
    }

    /// The slot's old header if no waker of an old task refers to it any more, else a new one. (A wake-up through
    /// an old header finds that it isn't the slot's header now, and is ignored.)
    fn header_for(&self, slot: usize) -> Arc<Header> {
        let mut headers = self.headers.borrow_mut();
        if let Some(header) = headers.get(slot)
            && Arc::strong_count(header) == 1
        {
            header.queued.store(false, Ordering::Release);
            return Arc::clone(header);
        }
        let header = self.new_header(slot);
        match headers.get_mut(slot) {
            Some(old) => *old = Arc::clone(&header),
            // Slab keys grow by one.
            None => headers.push(Arc::clone(&header)),
        }
        header
    }

    fn new_header(&self, slot: usize) -> Arc<Header> {
        Arc::new(Header { slot, queued: AtomicBool::new(false), mailbox: Arc::clone(&self.mailbox) })
    }

    /// A root, to be polled at once.
    pub(crate) fn root(&self) -> Root {
        let header = self.new_header(ROOT);
        header.queued.store(true, Ordering::Release);
        Root { waker: Waker::from(Arc::clone(&header)), header }
    }

    /// Tasks that are not over.
    pub(crate) fn live_tasks(&self) -> usize {
        self.tasks.borrow().len()
    }

    /// Whether a task is to be polled.
    pub(crate) fn has_ready(&self) -> bool {
        // SAFETY: the owner's thread (`Executor` is not `Send`), a single operation.
        unsafe { !(*self.mailbox.local.get()).is_empty() }
    }

    /// Tells an event loop if tasks are ready.
    pub(crate) fn show_ready(&self) {
        if self.has_ready() {
            self.mailbox.notifier.notify_event_loop();
        }
    }

    /// Takes over what other threads have woken. To be called when the notifier was signalled.
    pub(crate) fn absorb_remote(&self) {
        let mut remote = self.mailbox.remote.lock();
        if let Some(remote) = &mut *remote {
            // SAFETY: the owner's thread, a single operation; `drain` of a vector calls no foreign code.
            unsafe { (*self.mailbox.local.get()).extend(remote.drain(..)) };
        }
    }

    /// Polls the tasks that are ready, and those that become so, until none is or a good number ran. True if any
    /// ran.
    pub(crate) fn run_ready(&self) -> bool {
        // SAFETY: the owner's thread, a single operation.
        let queued = unsafe { (*self.mailbox.local.get()).len() };
        let mut ran = false;
        for _ in 0..queued.max(RUN_AT_LEAST) {
            // SAFETY: as above.
            let Some(header) = (unsafe { (*self.mailbox.local.get()).pop_front() }) else { break };
            if header.slot == ROOT {
                // Its owner looks at the flag.
                continue;
            }
            // A swap, not a store: what the poll reads must not be read before this is seen, or a wake-up in between
            // would find the task queued still, and be lost.
            header.queued.swap(false, Ordering::AcqRel);
            if self.headers.borrow().get(header.slot).is_none_or(|current| !Arc::ptr_eq(current, &header)) {
                continue;
            }
            let task = self.tasks.borrow().get(header.slot).map(Rc::clone);
            if let Some(task) = task {
                ran = true;
                let mut slot = SlotOnPanic { executor: self, slot: header.slot, over: true };
                slot.over = task.run();
            }
        }
        ran
    }

    /// Drops all futures. Tasks that their destructors spawn are dropped too.
    pub(crate) fn cancel_all(&self) {
        loop {
            let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
            if tasks.is_empty() {
                return;
            }
            for (_, task) in &tasks {
                task.cancel();
            }
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.cancel_all();
        self.mailbox.closed.store(true, Ordering::Release);
        let remote = self.mailbox.remote.lock().take();
        // SAFETY: the owner's thread, a single operation.
        let local = unsafe { std::mem::take(&mut *self.mailbox.local.get()) };
        // Headers refer to the mailbox: whoever still holds a waker must not find a queue to put it into.
        drop((remote, local));
    }
}

/// Removes a task from its slot when it is over, also by a panic.
struct SlotOnPanic<'a> {
    executor: &'a Executor,
    slot: usize,
    over: bool,
}

impl Drop for SlotOnPanic<'_> {
    fn drop(&mut self) {
        if self.over {
            let task = self.executor.tasks.borrow_mut().try_remove(self.slot);
            drop(task);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn executor() -> Executor {
        Executor::new(Arc::new(Notifier::new().unwrap()))
    }

    /// Gives way once.
    struct Yield(bool);
    impl Future for Yield {
        type Output = ();
        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            if std::mem::replace(&mut self.0, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    }

    fn now_or_never<T>(future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_task_runs_to_its_value() {
        let executor = executor();
        let mut handle = executor.spawn(async {
            Yield(false).await;
            Yield(false).await;
            Rc::new(5)
        });
        assert!(now_or_never(&mut handle).is_none());
        assert!(executor.run_ready());
        assert_eq!(executor.live_tasks(), 0);
        assert_eq!(now_or_never(&mut handle).map(|value| *value), Some(5));
        assert!(!executor.run_ready());
    }

    #[test]
    fn a_detached_task_runs_on_and_tasks_may_spawn() {
        let executor = Rc::new(executor());
        let count = Rc::new(Cell::new(0));
        let (inner, counted) = (Rc::downgrade(&executor), Rc::clone(&count));
        drop(executor.spawn(async move {
            for _ in 0..10 {
                let counted = Rc::clone(&counted);
                drop(inner.upgrade().unwrap().spawn(async move { counted.set(counted.get() + 1) }));
            }
        }));
        while executor.run_ready() {}
        assert_eq!(count.get(), 10);
    }

    #[test]
    fn headers_are_reused_unless_a_waker_is_left() {
        let executor = executor();
        let kept: Rc<RefCell<Option<Waker>>> = Rc::default();
        drop(executor.spawn(async {}));
        executor.run_ready();
        let first = Arc::as_ptr(&executor.headers.borrow()[0]);
        let keep = Rc::clone(&kept);
        drop(executor.spawn(std::future::poll_fn(move |cx| {
            *keep.borrow_mut() = Some(cx.waker().clone());
            Poll::Ready(())
        })));
        executor.run_ready();
        assert_eq!(Arc::as_ptr(&executor.headers.borrow()[0]), first);
        let polls = Rc::new(Cell::new(0));
        let counted = Rc::clone(&polls);
        drop(executor.spawn(std::future::poll_fn(move |_| {
            counted.set(counted.get() + 1);
            Poll::<()>::Pending
        })));
        executor.run_ready();
        assert_ne!(Arc::as_ptr(&executor.headers.borrow()[0]), first);
        // The waker of a task that is over must not wake the one that has its place.
        kept.take().unwrap().wake();
        executor.run_ready();
        assert_eq!(polls.get(), 1);
    }

    #[test]
    fn wakes_come_from_other_threads() {
        let executor = executor();
        let notifier = Arc::clone(&executor.mailbox.notifier);
        let mut handles = Vec::new();
        for _ in 0..20 {
            let mut thread = None;
            let flag = Arc::new(AtomicBool::new(false));
            handles.push(executor.spawn(std::future::poll_fn(move |cx| {
                if flag.load(Ordering::Acquire) {
                    return Poll::Ready(());
                }
                let (waker, flag) = (cx.waker().clone(), Arc::clone(&flag));
                thread.get_or_insert_with(|| {
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_millis(1));
                        flag.store(true, Ordering::Release);
                        waker.wake();
                    })
                });
                Poll::Pending
            })));
        }
        while executor.live_tasks() > 0 {
            executor.run_ready();
            if executor.live_tasks() > 0 && notifier.fall_asleep() {
                notifier.wait_notified(None);
            }
            notifier.begin_turn();
            executor.absorb_remote();
        }
        assert!(handles.into_iter().all(|handle| now_or_never(handle).is_some()));
    }

    #[test]
    fn a_panicking_task_is_over_and_the_others_run_on() {
        let executor = executor();
        let handle = executor.spawn(async { panic!("as intended") });
        let other = executor.spawn(async { 1 });
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| executor.run_ready()));
        assert!(caught.is_err());
        executor.run_ready();
        assert_eq!((executor.live_tasks(), now_or_never(other)), (0, Some(1)));
        let joined = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| now_or_never::<()>(handle)));
        assert!(joined.is_err());
    }

    #[test]
    fn the_end_of_the_executor_drops_futures_and_disarms_wakers() {
        struct Dropped(Rc<Cell<bool>>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.set(true);
            }
        }
        let executor = executor();
        let dropped = Rc::new(Cell::new(false));
        let waker: Rc<RefCell<Option<Waker>>> = Rc::default();
        let (witness, keep) = (Dropped(Rc::clone(&dropped)), Rc::clone(&waker));
        drop(executor.spawn(std::future::poll_fn(move |cx| {
            let _ = &witness;
            *keep.borrow_mut() = Some(cx.waker().clone());
            Poll::<()>::Pending
        })));
        executor.run_ready();
        let mailbox = Arc::downgrade(&executor.mailbox);
        drop(executor);
        assert!(dropped.get());
        let waker = waker.take().unwrap();
        waker.wake_by_ref();
        std::thread::spawn(move || waker.wake()).join().unwrap();
        assert!(mailbox.upgrade().is_none(), "no circle keeps the mailbox alive");
    }
}
