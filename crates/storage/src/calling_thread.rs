//! A worker for the thread that calls: one piece of work is done to its end where it was asked for, without a hop to another
//! thread and back.
//!
//! Each thread keeps such a worker from one call to the next. It has no descriptors, no threads, and no memory to speak of: the
//! buffers that they all need for requests out of alignment come from one pool. Operations are plain system calls, which are
//! done when the worker would start them. So they come one after the other: work with much to do at once is better off on a
//! worker with a ring.
//!
//! Nothing is left behind. A call ends when every task that it began is over, whether it waits for its value or not. It makes no
//! promise to drive ([`Worker::promise_to_drive`]), so what others wait for, such as a commit, runs elsewhere.

use crate::background::Vanished;
use crate::memory::FreeList;
use crate::sabotage::{self, Fault};
use crate::worker::Worker;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Bytes of free buffers that the workers of all calling threads keep.
const POOL_BYTES: usize = 4 << 20;
/// How long one look at what a call has left may wait for other threads; the next look follows.
const LOOK: Duration = Duration::from_secs(60);

thread_local!(static KEPT: Cell<Option<Worker>> = const { Cell::new(None) });

/// The worker of the thread that calls, for one piece of work.
pub struct CallingThread(Worker);

impl CallingThread {
    /// Takes the thread's worker. None if the thread is at its end.
    ///
    /// Within the work of another call there is one as well, of its own.
    pub fn take() -> Option<Self> {
        let kept = KEPT.try_with(Cell::take).ok()?;
        // Dropping that of a parent process leaves alone what belongs to the parent.
        Some(Self(kept.filter(Worker::is_of_this_process).unwrap_or_else(|| Worker::in_place(pool()))))
    }

    /// Does `work`, and returns when all that it began is over.
    ///
    /// # Errors
    /// It panicked, or a task that it began did.
    pub fn run<T>(self, work: impl AsyncFnOnce(Worker) -> T) -> Result<T, Vanished> {
        let Self(worker) = self;
        // After a panic the worker is driven to its end here.
        let value = call(&worker, work)?;
        let _ = KEPT.try_with(|kept| kept.set(Some(worker)));
        Ok(value)
    }

    /// As [`CallingThread::run`], on a worker of a simulated world.
    ///
    /// # Errors
    /// As of [`CallingThread::run`].
    #[cfg(feature = "simulated")]
    pub fn run_simulated<T>(worker: &Worker, work: impl AsyncFnOnce(Worker) -> T) -> Result<T, Vanished> {
        call(worker, work)
    }
}

/// Does `work` and all that it begins.
fn call<T>(worker: &Worker, work: impl AsyncFnOnce(Worker) -> T) -> Result<T, Vanished> {
    let done = catch_unwind(AssertUnwindSafe(|| {
        let value = worker.block_on(work(worker.uncounted()));
        while !worker.is_idle() && !sabotage::is(Fault::LeaveBehind) {
            worker.drain(LOOK);
        }
        value
    }));
    done.map_err(|_| Vanished)
}

fn pool() -> Arc<FreeList> {
    static POOL: OnceLock<Arc<FreeList>> = OnceLock::new();
    Arc::clone(POOL.get_or_init(|| FreeList::new(POOL_BYTES)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::background::Background;
    use crate::worker_types::Engine;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    fn here<T>(work: impl AsyncFnOnce(Worker) -> T) -> Result<T, Vanished> {
        CallingThread::take().unwrap().run(work)
    }

    #[test]
    fn a_call_is_done_here_and_ends_with_all_that_it_began() {
        let thread = std::thread::current().id();
        let ended = Arc::new(AtomicU32::new(0));
        for call in 1..=3 {
            let theirs = ended.clone();
            let other = Background::small(Engine::Threads).unwrap();
            let value = here(async |worker| {
                drop(worker.spawn_with(|on| async move {
                    assert_eq!(std::thread::current().id(), thread);
                    // News from another thread.
                    other.run(|on| async move { on.sleep(Duration::from_millis(5)).await }).await.unwrap();
                    on.sleep(Duration::from_millis(5)).await;
                    theirs.fetch_add(1, SeqCst);
                }));
                worker.run_blocking(|| std::thread::current().id()).await
            });
            assert_eq!((value, ended.load(SeqCst)), (Ok(thread), call));
        }
    }

    #[test]
    fn a_call_within_a_call_has_a_worker_of_its_own() {
        let value = here(async |outer| {
            let inner = here(async |inner| (inner.id(), inner.run_blocking(|| 7).await)).unwrap();
            assert_ne!(inner.0, outer.id());
            inner.1
        });
        assert_eq!(value, Ok(7));
    }

    #[test]
    fn a_panic_ends_the_call_and_not_the_thread() {
        for in_task in [false, true] {
            let result = here(async |worker| {
                assert!(in_task, "as intended");
                worker.spawn(async { panic!("as intended") }).await
            });
            assert_eq!(result, Err(Vanished));
            assert_eq!(here(async |worker| worker.run_blocking(|| 7).await), Ok(7));
        }
    }

    #[test]
    fn a_child_of_fork_has_workers_of_its_own() {
        here(async |worker| drop(worker.buffer(4096))).unwrap();
        // SAFETY: the child makes a worker, for which it allocates; glibc makes that work after a fork. It then ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let value = here(async |worker| worker.run_blocking(|| 7).await);
            // SAFETY: plain system call.
            unsafe { libc::_exit(i32::from(value != Ok(7))) };
        }
        let mut status = -1;
        // SAFETY: plain system call with a place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_thread_at_its_end_is_told() {
        struct AtTheEnd;
        impl Drop for AtTheEnd {
            fn drop(&mut self) {
                if let Some(own) = CallingThread::take() {
                    assert_eq!(own.run(async |worker| worker.run_blocking(|| 7).await), Ok(7));
                }
            }
        }
        thread_local!(static FIRST: AtTheEnd = const { AtTheEnd });
        thread_local!(static LAST: AtTheEnd = const { AtTheEnd });
        std::thread::spawn(|| {
            FIRST.with(|_| ());
            here(async |worker| worker.run_blocking(|| 7).await).unwrap();
            LAST.with(|_| ());
        })
        .join()
        .unwrap();
    }
}

/// Threads under schedules that shuttle chooses, for `cargo xtask interleave`.
#[cfg(all(test, shuttle, feature = "test-faults"))]
mod interleavings {
    use super::*;
    use crate::file_types::OpenFlags;
    use crate::sabotage::under;
    use crate::sync::Mutex;
    use crate::{File, IoBuf};
    use shuttle::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::path::Path;
    use std::task::{Poll, Waker};

    /// Schedules within which each fault is caught.
    const WITHIN: usize = 1000;

    fn schedules() -> usize {
        std::env::var("ZEBU_SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(1000)
    }

    /// News of one thread for another.
    #[derive(Default)]
    struct News(Mutex<(bool, Option<Waker>)>);

    impl News {
        fn tell(&self) {
            let waker = {
                let mut state = self.0.lock();
                state.0 = true;
                state.1.take()
            };
            waker.into_iter().for_each(Waker::wake);
        }

        async fn wait(&self) {
            std::future::poll_fn(|cx| {
                let mut state = self.0.lock();
                state.1 = Some(cx.waker().clone());
                if state.0 { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
    }

    /// Two threads call twice. Each call reads a file and tells the other thread; a task that it leaves waits for the other's
    /// news, and reads as well.
    fn two_threads_that_call() {
        let pool = FreeList::new(0);
        let file = File::open(Path::new("/proc/self/exe"), &OpenFlags::default()).unwrap();
        let news: [[Arc<News>; 2]; 2] = Default::default();
        let threads: Vec<_> = (0..2)
            .map(|me| {
                let (pool, file, news) = (pool.clone(), file.clone(), news.clone());
                shuttle::thread::spawn(move || {
                    let worker = Worker::in_place(pool);
                    for [ours, theirs] in news.map(|[a, b]| if me == 0 { [a, b] } else { [b, a] }) {
                        let ended = Arc::new(AtomicU32::new(0));
                        let (count, left) = (ended.clone(), file.clone());
                        let value = call(&worker, async |on| {
                            drop(on.spawn_with(|on| async move {
                                theirs.wait().await;
                                on.read(&left, 0, IoBuf::zeroed(4).into()).await.0.unwrap();
                                count.fetch_add(1, SeqCst);
                            }));
                            on.read(&file, 0, IoBuf::zeroed(4).into()).await.0.unwrap();
                            ours.tell();
                            7
                        });
                        assert_eq!((value, ended.load(SeqCst)), (Ok(7), 1), "a task is left behind");
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_call_ends_with_all_that_it_began_whoever_wakes_it() {
        shuttle::check_random(two_threads_that_call, schedules());
        shuttle::check_pct(two_threads_that_call, schedules(), 3);
    }

    /// Shows that a schedule finds a deliberate fault.
    fn is_caught(fault: Fault, within: usize) {
        let (caught, felt) = under(Some(fault), || {
            catch_unwind(|| shuttle::check_random(two_threads_that_call, within)).is_err()
        });
        assert!(caught, "{fault:?} survives {within} schedules ({felt} times passed)");
    }

    #[test]
    fn a_call_that_leaves_a_task_or_sleeps_in_vain_is_caught() {
        is_caught(Fault::LeaveBehind, WITHIN);
        is_caught(Fault::SleepOnDone, WITHIN);
        is_caught(Fault::SleepOnWake, WITHIN);
    }
}
