//! Loops of epoll alone that only another thread wakes: no I/O of their own is under way that would.
//!
//! 100 rounds of each, or as many as `ZEBU_EMBEDDING_ROUNDS` says.

use super::rounds::rounds;
use super::{ENGINES, create, must_be_clean, open};
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::retry_on_intr;
use std::cell::Cell;
use std::future::poll_fn;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use zebu_engine::storage::{Engine, IoBuf, Worker, WorkerConfig};
use zebu_engine::{Disk, Durability, Request};

/// A wait without an event takes longer than anything on a machine with other work.
const AGES: Duration = Duration::from_secs(600);
/// Tasks of a round.
const TASKS: u64 = 8;

/// A descriptor that is registered once.
struct Shown(OwnedFd);

impl Shown {
    fn new(fd: BorrowedFd<'_>) -> Self {
        let epoll = epoll::create(CreateFlags::CLOEXEC).unwrap();
        epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::IN).unwrap();
        Self(epoll)
    }

    /// Whether it is readable within `timeout`.
    fn within(&self, timeout: Duration) -> bool {
        let mut events = Vec::with_capacity(1);
        let timeout = Timespec::try_from(timeout).unwrap();
        retry_on_intr(|| epoll::wait(&self.0, spare_capacity(&mut events), Some(&timeout))).unwrap();
        !events.is_empty()
    }
}

/// News of one thread for a task of another.
#[derive(Default)]
struct News(Mutex<(bool, Option<Waker>)>);

impl News {
    fn tell(&self) {
        let waker = {
            let mut state = self.0.lock().unwrap();
            state.0 = true;
            state.1.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    async fn wait(&self) {
        poll_fn(|cx| {
            let mut state = self.0.lock().unwrap();
            state.1 = Some(cx.waker().clone());
            if state.0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

/// A thread that tells what it is handed, at once or a little later.
fn teller() -> (mpsc::Sender<(Arc<News>, Duration)>, std::thread::JoinHandle<u64>) {
    let (sender, told) = mpsc::channel::<(Arc<News>, Duration)>();
    let thread = std::thread::spawn(move || {
        let mut times = 0;
        for (news, after) in told {
            let until = Instant::now() + after;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            news.tell();
            times += 1;
        }
        times
    });
    (sender, thread)
}

/// Each task waits for the other thread twice, and does a request in between.
fn tasks_are_woken(engine: Engine) {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(engine, &path);
    let worker = Worker::new(&WorkerConfig::default().engine(engine)).unwrap();
    let shown = Shown::new(worker.as_fd());
    let (told, thread) = teller();
    for round in 0..rounds() {
        let ended = Rc::new(Cell::new(0));
        for i in 0..TASKS {
            let (image, on, ended, told) =
                (disk.image().clone(), worker.clone(), ended.clone(), told.clone());
            drop(worker.spawn(async move {
                // From none to some twenty turns of the loop.
                let after = Duration::from_micros((round * 7 + i * 13) % 61);
                for place in [0, 32 << 20] {
                    let news = Arc::new(News::default());
                    told.send((news.clone(), after)).unwrap();
                    news.wait().await;
                    let bufs = IoBuf::copy_of(&[round as u8; 512]).into();
                    let at = place + i * 65536 + round % 128 * 512;
                    image.write(&on, at, bufs, Durability::Volatile).await.0.unwrap();
                }
                ended.set(ended.get() + 1);
            }));
        }
        worker.poll();
        while ended.get() < TASKS {
            let timeout = worker.next_timer().unwrap_or(AGES);
            let is_shown = shown.within(timeout);
            assert!(
                is_shown || timeout < AGES,
                "{engine:?}, round {round}: {} of {TASKS} ended",
                ended.get()
            );
            worker.poll();
        }
    }
    drop((told, worker));
    assert_eq!(thread.join().unwrap(), rounds() * TASKS * 2);
    drop(disk);
    must_be_clean(&path);
}

/// Allocates, and gives up again, what another thread does as well: whoever comes second waits for the first one's worker.
fn queue_of(disk: &Disk, engine: Engine, others: &Barrier, number: u64) -> u64 {
    let queue = disk.queue().engine(engine).build().unwrap();
    let shown = Shown::new(std::os::fd::AsFd::as_fd(&queue));
    let (mut done, mut ended) = (Vec::new(), 0);
    for round in 0..rounds() {
        others.wait();
        for i in 0..TASKS {
            let offset = i * 65536;
            queue.submit(Request::Discard { offset, len: 65536 }, round);
            let bufs = IoBuf::copy_of(&[number as u8; 4096]).into();
            let offset = offset + number * 4096;
            queue.submit(Request::Write { offset, bufs, durability: Durability::Volatile }, round);
        }
        queue.poll(&mut done);
        while queue.pending() > 0 {
            let timeout = queue.next_timer().unwrap_or(AGES);
            let is_shown = shown.within(timeout);
            assert!(is_shown || timeout < AGES, "{engine:?}, round {round}: {} pending", queue.pending());
            queue.poll(&mut done);
        }
        for completion in done.drain(..) {
            completion.result.unwrap();
            ended += 1;
        }
    }
    ended
}

#[test]
fn tasks_that_another_thread_wakes_lose_nothing() {
    ENGINES.into_iter().for_each(tasks_are_woken);
}

#[test]
fn queues_that_wait_for_each_other_lose_nothing() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let (ended, others) = (AtomicU64::new(0), Barrier::new(2));
        std::thread::scope(|scope| {
            for number in 0..2 {
                let (disk, ended, others) = (&disk, &ended, &others);
                scope.spawn(move || ended.fetch_add(queue_of(disk, engine, others, number), SeqCst));
            }
        });
        assert_eq!(ended.into_inner(), 2 * rounds() * TASKS * 2);
        drop(disk);
        must_be_clean(&path);
    }
}
