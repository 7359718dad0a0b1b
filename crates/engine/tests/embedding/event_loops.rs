//! Programs with a loop of their own, and what their workers leave behind.

use super::ENGINES;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::retry_on_intr;
use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use zebu_engine::storage::{Engine, IoBuf, Worker, WorkerConfig};
use zebu_engine::{Access, CreateOptions, Durability, Image, OpenOptions, Queue, Request};

/// Longer than anything here takes on a machine with other work.
const AGES: Duration = Duration::from_secs(600);

pub(super) fn worker(engine: Engine) -> Worker {
    Worker::new(&WorkerConfig::default().engine(engine)).unwrap()
}

fn new_image(worker: &Worker, path: &Path) -> Image {
    worker
        .block_on(async {
            let create = CreateOptions::default().size(Some(64 << 20));
            Image::create(worker, path, &create).await?;
            let open = OpenOptions::default().access(Access::ReadWrite);
            Image::open(worker, path, &open).await
        })
        .unwrap()
}

async fn write(worker: &Worker, image: &Image, offset: u64) {
    let data = IoBuf::copy_of(&[1; 4096]).into();
    image.write(worker, offset, data, Durability::Volatile).await.0.unwrap();
}

/// The future's value, unless it takes ages.
fn soon<T>(worker: &Worker, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut over = pin!(worker.sleep(AGES));
    worker.block_on(std::future::poll_fn(|cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(value));
        }
        over.as_mut().poll(cx).map(|()| None)
    }))
}

#[test]
fn a_flush_whose_worker_is_dropped_does_not_hold_up_the_next() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (worker(engine), worker(engine));
        let image = new_image(&second, &dir.path().join("f"));
        second.block_on(write(&second, &image, 0));
        let mut flush = Box::pin(image.flush(&first));
        assert!(flush.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        first.poll();
        drop(flush);
        drop(first);
        let flushed = soon(&second, image.flush(&second));
        flushed.expect("the commit of the worker that has gone is over").unwrap();
        second.block_on(image.close(&second)).unwrap();
    }
}

/// Descriptors, each registered once.
fn epoll_of(fds: &[BorrowedFd<'_>]) -> OwnedFd {
    let epoll = epoll::create(CreateFlags::CLOEXEC).unwrap();
    for (number, fd) in fds.iter().enumerate() {
        epoll::add(&epoll, fd, EventData::new_u64(number as u64), EventFlags::IN).unwrap();
    }
    epoll
}

/// The numbers of the descriptors that are readable, when one is; none after `timeout`.
fn shown(epoll: &OwnedFd, timeout: Duration) -> Vec<u64> {
    let mut events = Vec::with_capacity(4);
    let timeout = Timespec::try_from(timeout).unwrap();
    // The work that a ring has in this thread may interrupt the wait.
    retry_on_intr(|| epoll::wait(epoll, spare_capacity(&mut events), Some(&timeout))).unwrap();
    events.iter().map(|event| event.data.u64()).collect()
}

#[test]
fn the_descriptor_of_a_queue_registered_once_shows_every_completion() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..20u64 {
            let worker = worker(engine);
            let image = new_image(&worker, &dir.path().join("f"));
            let queue = Queue::new(&image, &worker);
            let epoll = epoll_of(&[queue.as_fd()]);
            let mut done = Vec::new();
            for i in 0..64 {
                let bufs = IoBuf::copy_of(&[i as u8; 4096]).into();
                let write = Request::Write { offset: i * 65536, bufs, durability: Durability::Volatile };
                queue.submit(write, i);
            }
            if round % 2 == 0 {
                queue.poll(&mut done);
            }
            queue.submit(Request::Flush, 64);
            while queue.pending() > 0 {
                let pending = queue.pending();
                assert!(!shown(&epoll, AGES).is_empty(), "{engine:?}: nothing shows of {pending}");
                // As users of eventfds do; each second time, since it need not be.
                if round % 4 < 2 {
                    let _ = rustix::io::read(queue.as_fd(), &mut [0; 8]);
                }
                queue.poll(&mut done);
            }
            assert_eq!(done.len(), 65);
            assert!(done.iter().all(|completion| completion.result.is_ok()));
            worker.block_on(image.close(&worker)).unwrap();
        }
    }
}

/// An executor that knows nothing of workers: tasks, and an eventfd that wakes its loop.
struct Executor {
    woken: Arc<Woken>,
    tasks: RefCell<Vec<Option<LocalTask>>>,
}

type LocalTask = Pin<Box<dyn Future<Output = ()>>>;

struct Woken {
    event: OwnedFd,
    tasks: Mutex<Vec<usize>>,
}

struct TaskWaker(Arc<Woken>, usize);

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.0.tasks.lock().unwrap().push(self.1);
        rustix::io::write(&self.0.event, &1u64.to_ne_bytes()).unwrap();
    }
}

impl Executor {
    fn new() -> Self {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        Self { woken: Arc::new(Woken { event, tasks: Mutex::default() }), tasks: RefCell::default() }
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        Arc::new(TaskWaker(self.woken.clone(), tasks.len())).wake();
        tasks.push(Some(Box::pin(task)));
    }

    fn run_woken(&self) {
        let _ = rustix::io::read(&self.woken.event, &mut [0; 8]);
        let woken = std::mem::take(&mut *self.woken.tasks.lock().unwrap());
        for number in woken {
            let Some(mut task) = self.tasks.borrow_mut()[number].take() else { continue };
            let waker = Waker::from(Arc::new(TaskWaker(self.woken.clone(), number)));
            if task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                self.tasks.borrow_mut()[number] = Some(task);
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.tasks.borrow().iter().all(Option::is_none)
    }
}

#[test]
fn futures_of_an_image_run_on_a_foreign_executor() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let (worker, executor) = (worker(engine), Rc::new(Executor::new()));
        let epoll = epoll_of(&[worker.as_fd(), executor.woken.event.as_fd()]);
        let (on, tasks) = (worker.clone(), executor.clone());
        executor.spawn(async move {
            let create = CreateOptions::default().size(Some(64 << 20));
            Image::create(&on, &path, &create).await.unwrap();
            let open = OpenOptions::default().access(Access::ReadWrite);
            let image = Image::open(&on, &path, &open).await.unwrap();
            for i in 0..100 {
                let (image, on) = (image.clone(), on.clone());
                tasks.spawn(async move {
                    write(&on, &image, i * 65536 + 512).await;
                    image.flush(&on).await.unwrap();
                    let read = image.read(&on, i * 65536 + 512, IoBuf::zeroed(4096).into()).await;
                    read.0.unwrap();
                    assert!(read.1.parts().iter().all(|buf| buf.as_slice().iter().all(|&byte| byte == 1)));
                });
            }
        });
        while !executor.is_idle() {
            let shown = shown(&epoll, worker.next_timer().unwrap_or(AGES));
            assert!(!shown.is_empty() || worker.next_timer().is_some(), "{engine:?}: nothing shows");
            worker.poll();
            executor.run_woken();
        }
    }
}
