//! Workers themselves: wake-ups, event loops, small rings, the ends of workers and files, refused rings.

mod storages;

use std::cell::Cell;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};
use zebu_storage::{
    Access, Create, Engine, File, IoBuf, LockMode, OpenFlags, Worker, WorkerConfig, WorkerKind,
};

const ENGINES: [Engine; 2] = [Engine::Threads, Engine::IoUring];

fn worker(engine: Engine) -> Worker {
    Worker::new(&WorkerConfig::default().engine(engine)).unwrap()
}

fn open_new(path: &Path) -> File {
    let flags = OpenFlags::default().access(Access::ReadWrite).create(Create::New).lock(LockMode::Write);
    File::open(path, &flags).unwrap()
}

fn readable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) == 1 }
}

#[test]
fn the_kind_is_the_one_asked_for() {
    assert_eq!(worker(Engine::IoUring).kind(), WorkerKind::IoUring);
    assert_eq!(worker(Engine::Threads).kind(), WorkerKind::Threads);
    let auto = worker(Engine::Auto);
    assert_eq!((auto.kind(), auto.fallback_reason()), (WorkerKind::IoUring, None));
}

#[test]
fn ids_are_small_and_differ() {
    let (a, b) = (worker(Engine::Threads), worker(Engine::Threads));
    assert_ne!(a.id(), b.id());
    assert!(a.id() < 100 && b.id() < 100);
}

#[test]
fn an_event_loop_drives_a_worker_through_its_descriptor() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let file = open_new(&dir.path().join("f"));
        let worker = worker(engine);
        assert!(!readable(worker.as_fd(), Duration::ZERO));
        let (inner, opened) = (worker.clone(), file.clone());
        let mut handle = Box::pin(worker.spawn(async move {
            let mut written = 0;
            for i in 0..50u64 {
                let buf = inner.buffer(8192);
                inner.write(&opened, i * 8192, buf.into()).await.0.unwrap();
                inner.flush(&opened).await.unwrap();
                written += 8192;
            }
            written
        }));
        assert!(readable(worker.as_fd(), Duration::ZERO), "a new task is something to do");
        let mut turns = 0;
        let written = loop {
            while worker.poll() {}
            let polled = worker.block_on(std::future::poll_fn(|cx| Poll::Ready(handle.as_mut().poll(cx))));
            if let Poll::Ready(written) = polled {
                break written;
            }
            assert!(readable(worker.as_fd(), AGES), "{engine:?}: completions show");
            turns += 1;
            assert!(turns < 10_000, "the descriptor must not stay readable for nothing");
        };
        assert_eq!((written, file.len()), (50 * 8192, 50 * 8192));
        // The kernel may signal once more, late; but it comes to rest.
        let rests = (0..10).any(|_| {
            while worker.poll() {}
            !readable(worker.as_fd(), Duration::from_millis(20))
        });
        assert!(rests, "{engine:?}: nothing is left to do");
    }
}

/// An epoll descriptor that knows other descriptors by their numbers, each registered once.
struct Epoll(OwnedFd);

impl Epoll {
    fn new(fds: &[BorrowedFd<'_>]) -> Self {
        // SAFETY: a plain system call whose result nobody else owns.
        let epoll = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        for fd in fds {
            let mut event = libc::epoll_event {
                events: libc::EPOLLIN as u32,
                u64: fd.as_raw_fd().cast_unsigned().into(),
            };
            // SAFETY: `event` lives through the call.
            let added = unsafe {
                libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event)
            };
            assert_eq!(added, 0);
        }
        Self(epoll)
    }

    /// The descriptors that are readable, when one is.
    fn wait(&self, timeout: Duration) -> Vec<RawFd> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let timeout = timeout.as_millis() as i32;
        let count = loop {
            // SAFETY: room for 4 events.
            let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), 4, timeout) };
            // The work that a ring has in this thread may interrupt the wait.
            if count >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
                break count;
            }
        };
        events[..count.max(0) as usize].iter().map(|event| event.u64 as RawFd).collect()
    }
}

/// Reads it as an eventfd is read; must not wait.
fn read_counter(fd: BorrowedFd<'_>) -> Option<u64> {
    let mut counter = 0u64;
    // SAFETY: 8 writable bytes.
    let read = unsafe { libc::read(fd.as_raw_fd(), (&raw mut counter).cast(), 8) };
    (read == 8).then_some(counter)
}

/// Longer than anything here takes on a machine with other work.
const AGES: Duration = Duration::from_secs(600);

/// A thread that does something else for a moment and wakes.
fn waking_thread() -> (mpsc::Sender<async_pair::To>, std::thread::JoinHandle<()>) {
    let (to_thread, waiting) = mpsc::channel::<async_pair::To>();
    let thread = std::thread::spawn(move || {
        for to in waiting {
            to.put(1);
        }
    });
    (to_thread, thread)
}

#[test]
fn a_descriptor_registered_once_shows_everything() {
    const ROUNDS: u64 = 1000;
    for engine in ENGINES {
        for reads_descriptor in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let file = open_new(&dir.path().join("f"));
            let worker = worker(engine);
            worker.block_on(worker.set_len(&file, 64 * 4096)).unwrap();
            let epoll = Epoll::new(&[worker.as_fd()]);
            let (to_thread, thread) = waking_thread();
            let ended = Rc::new(Cell::new(0));
            for round in 0..ROUNDS {
                ended.set(0);
                let writes = if round % 50 == 0 { 64 } else { 1 + round % 3 };
                for i in 0..writes {
                    let (file, ended) = (file.clone(), ended.clone());
                    drop(worker.spawn_with(|on| async move {
                        let data = IoBuf::copy_of(&[round as u8; 4096]);
                        on.write(&file, i * 4096, data.into()).await.0.unwrap();
                        ended.set(ended.get() + 1);
                    }));
                }
                let (to_task, from_thread) = async_pair::pair();
                to_thread.send(to_task).unwrap();
                let (file, others) = (file.clone(), ended.clone());
                drop(worker.spawn_with(|on| async move {
                    from_thread.take().await;
                    // By a helper thread.
                    on.set_len(&file, 64 * 4096).await.unwrap();
                    others.set(others.get() + 1);
                }));
                while ended.get() <= writes {
                    let shown = epoll.wait(AGES);
                    assert!(!shown.is_empty(), "{engine:?}: nothing shows in round {round}");
                    if reads_descriptor {
                        read_counter(worker.as_fd());
                    }
                    worker.poll();
                }
            }
            drop(to_thread);
            thread.join().unwrap();
        }
    }
}

#[test]
fn a_descriptor_may_be_read_at_any_time() {
    for engine in ENGINES {
        let worker = worker(engine);
        let epoll = Epoll::new(&[worker.as_fd()]);
        assert_eq!(read_counter(worker.as_fd()), None, "{engine:?}: it does not wait");
        let (to_thread, thread) = waking_thread();
        for _ in 0..300 {
            let (to_task, from_thread) = async_pair::pair();
            let mut task = Box::pin(worker.spawn(async move { from_thread.take().await }));
            worker.poll();
            to_thread.send(to_task).unwrap();
            // Until the wake-up is there.
            while !epoll.wait(AGES).is_empty() && read_counter(worker.as_fd()).is_none() {}
            assert!(epoll.wait(Duration::ZERO).is_empty());
            worker.poll();
            let polled = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert_eq!(polled, Poll::Ready(1), "{engine:?}: a poll finds what was read before");
        }
        drop(to_thread);
        thread.join().unwrap();
    }
}

/// Wakes an event loop through a descriptor of its own.
struct LoopWaker(OwnedFd);

impl LoopWaker {
    fn new() -> Arc<Self> {
        // SAFETY: a plain system call whose result nobody else owns.
        Arc::new(Self(unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_NONBLOCK)) }))
    }
}

impl Wake for LoopWaker {
    fn wake(self: Arc<Self>) {
        let one = 1u64;
        // SAFETY: 8 readable bytes.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

#[test]
fn a_foreign_executor_needs_only_the_descriptor() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = open_new(&path);
        let worker = worker(engine);
        let woken = LoopWaker::new();
        let epoll = Epoll::new(&[worker.as_fd(), woken.0.as_fd()]);
        let mut future = Box::pin(async {
            for i in 0..100u64 {
                worker.write(&file, i * 4096, IoBuf::copy_of(&[i as u8; 4096]).into()).await.0.unwrap();
                worker.set_len(&file, (i + 2) * 4096).await.unwrap();
                assert_eq!(worker.run_blocking(move || i + 1).await, i + 1);
                if i % 10 == 0 {
                    worker.sleep(Duration::from_millis(1)).await;
                }
            }
        });
        let waker = Waker::from(woken.clone());
        waker.wake_by_ref();
        'ended: loop {
            let timer = worker.next_timer().map(|left| left + Duration::from_millis(1));
            let shown = epoll.wait(timer.unwrap_or(AGES));
            assert!(timer.is_some() || !shown.is_empty(), "{engine:?}: nothing shows");
            if shown.is_empty() || shown.contains(&worker.as_fd().as_raw_fd()) {
                worker.poll();
            }
            if shown.contains(&woken.0.as_raw_fd()) {
                read_counter(woken.0.as_fd());
                if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                    break 'ended;
                }
            }
        }
        let bytes = fs::read(&path).unwrap();
        assert!(
            bytes.chunks(4096).take(100).enumerate().all(|(i, block)| block.iter().all(|&b| b == i as u8))
        );
    }
}

#[test]
fn a_wake_from_another_thread_reaches_a_waiting_worker() {
    for engine in ENGINES {
        for watched in [false, true] {
            let worker = worker(engine);
            if watched {
                let _ = worker.as_fd();
            }
            let (to_thread, wakers) = mpsc::channel::<(std::task::Waker, mpsc::Sender<()>)>();
            let thread = std::thread::spawn(move || {
                for (waker, done) in wakers {
                    std::thread::sleep(Duration::from_micros(300));
                    done.send(()).unwrap();
                    waker.wake();
                }
            });
            worker.block_on(async {
                for _ in 0..300 {
                    let (done, is_done) = mpsc::channel();
                    let mut asked = None;
                    std::future::poll_fn(|cx| {
                        if asked.is_none() {
                            to_thread.send((cx.waker().clone(), done.clone())).unwrap();
                            asked = Some(());
                        }
                        if is_done.try_recv().is_ok() { Poll::Ready(()) } else { Poll::Pending }
                    })
                    .await;
                }
            });
            drop(to_thread);
            thread.join().unwrap();
        }
    }
}

#[test]
fn workers_wake_each_other() {
    // A token goes round between threads; each hand-over is a wake of another worker.
    const ROUNDS: usize = 500;
    for engine in ENGINES {
        let (to_a, from_b) = async_pair::pair();
        let (to_b, from_a) = async_pair::pair();
        let other = std::thread::spawn(move || {
            worker(engine).block_on(async {
                for i in 0..ROUNDS {
                    assert_eq!(from_a.take().await, i);
                    to_a.put(i + 1);
                }
            });
        });
        worker(engine).block_on(async {
            for i in 0..ROUNDS {
                to_b.put(i);
                assert_eq!(from_b.take().await, i + 1);
            }
        });
        other.join().unwrap();
    }
}

mod async_pair {
    use std::sync::{Arc, Mutex};
    use std::task::{Poll, Waker};

    #[derive(Default)]
    struct Shared {
        value: Option<usize>,
        waker: Option<Waker>,
    }
    pub(crate) struct To(Arc<Mutex<Shared>>);
    pub(crate) struct From(Arc<Mutex<Shared>>);

    pub(crate) fn pair() -> (To, From) {
        let shared = Arc::<Mutex<Shared>>::default();
        (To(shared.clone()), From(shared))
    }
    impl To {
        pub(crate) fn put(&self, value: usize) {
            let waker = {
                let mut shared = self.0.lock().unwrap();
                shared.value = Some(value);
                shared.waker.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
    impl From {
        pub(crate) async fn take(&self) -> usize {
            std::future::poll_fn(|cx| {
                let mut shared = self.0.lock().unwrap();
                if let Some(value) = shared.value.take() {
                    return Poll::Ready(value);
                }
                shared.waker = Some(cx.waker().clone());
                Poll::Pending
            })
            .await
        }
    }
}

#[test]
fn more_operations_than_the_ring_holds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let file = open_new(&path);
    let worker = Worker::new(&WorkerConfig::default().engine(Engine::IoUring).depth(8)).unwrap();
    worker.block_on(async {
        worker.set_len(&file, 1000 * 4096).await.unwrap();
        let handles: Vec<_> = (0..1000u64)
            .map(|i| {
                let (worker, file) = (worker.clone(), file.clone());
                worker.clone().spawn(async move {
                    let mut buf = worker.buffer(4096);
                    buf.as_mut_slice().fill(i as u8);
                    worker.write(&file, i * 4096, buf.into()).await.0.unwrap();
                })
            })
            .collect();
        for handle in handles {
            handle.await;
        }
    });
    let bytes = fs::read(&path).unwrap();
    assert!(bytes.chunks(4096).enumerate().all(|(i, block)| block.iter().all(|&b| b == i as u8)));
}

#[test]
fn work_that_stands_still_leaves_threads_to_files() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let file = open_new(&dir.path().join("f"));
        let worker = Worker::new(&WorkerConfig::default().engine(engine).threads(2)).unwrap();
        let (end, standing) = mpsc::channel::<()>();
        let standing = Arc::new(std::sync::Mutex::new(standing));
        let jobs: Vec<_> = (0..20)
            .map(|_| {
                let (worker, standing) = (worker.clone(), Arc::clone(&standing));
                worker.clone().spawn(async move {
                    worker
                        .run_blocking(move || {
                            let _ = standing.lock().unwrap().recv();
                        })
                        .await;
                })
            })
            .collect();
        worker.block_on(async {
            for len in 1..50 {
                worker.set_len(&file, len * 4096).await.unwrap();
                worker.write(&file, 0, IoBuf::copy_of(&[len as u8; 4096]).into()).await.0.unwrap();
            }
        });
        drop(end);
        worker.block_on(async {
            for job in jobs {
                job.await;
            }
        });
    }
}

#[test]
fn a_worker_dropped_with_operations_and_tasks_finishes_them() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = open_new(&path);
        let first = worker(engine);
        first.block_on(first.set_len(&file, 200 * 4096)).unwrap();
        drop(first);
        let opened = file.clone();
        // The tasks hold handles: the end of the thread is the end of the worker.
        std::thread::spawn(move || {
            let worker = worker(engine);
            for i in 0..200u64 {
                let (inner, file) = (worker.clone(), opened.clone());
                drop(worker.spawn(async move {
                    let write = inner.write(&file, i * 4096, IoBuf::copy_of(&[1; 4096]).into()).await;
                    write.0.unwrap();
                    let (result, mut bufs) = inner.read(&file, i * 4096, IoBuf::zeroed(4096).into()).await;
                    result.unwrap();
                    bufs.fill(0, 1, 2);
                    inner.write(&file, i * 4096, bufs).await.0.unwrap();
                }));
            }
            worker.poll();
        })
        .join()
        .unwrap();
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.chunks(4096).all(|block| block[0] == 2 && block[1..].iter().all(|&b| b == 1)));
    }
}

/// Says that it was dropped.
struct Dropped(Rc<Cell<bool>>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

#[test]
fn the_last_counted_handle_drives_tasks_to_their_end() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = open_new(&path);
        let worker = worker(engine);
        worker.block_on(worker.set_len(&file, 200 * 4096)).unwrap();
        for i in 0..200u64 {
            let file = file.clone();
            drop(worker.spawn_with(|on| async move {
                // Clones of a task's handle hold nothing up either, nor do tasks of tasks.
                let inner = on.clone();
                on.spawn(async move {
                    inner.write(&file, i * 4096, IoBuf::copy_of(&[1; 4096]).into()).await.0.unwrap();
                    let (result, mut bufs) = inner.read(&file, i * 4096, IoBuf::zeroed(4096).into()).await;
                    result.unwrap();
                    bufs.fill(0, 1, 2);
                    inner.write(&file, i * 4096, bufs).await.0.unwrap();
                })
                .await;
            }));
        }
        drop(worker);
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 200 * 4096);
        assert!(bytes.chunks(4096).all(|block| block[0] == 2 && block[1..].iter().all(|&b| b == 1)));
    }
}

#[test]
fn the_end_of_a_worker_waits_for_other_threads() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = open_new(&path);
        let worker = worker(engine);
        let (to_task, from_thread) = async_pair::pair();
        drop(worker.spawn_with(|on| async move {
            let byte = from_thread.take().await as u8;
            on.write(&file, 0, IoBuf::copy_of(&[byte]).into()).await.0.unwrap();
        }));
        worker.poll();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            to_task.put(7);
        });
        drop(worker);
        assert_eq!(fs::read(&path).unwrap(), [7]);
        thread.join().unwrap();
    }
}

#[test]
fn handles_of_tasks_do_not_count_and_others_do() {
    for engine in ENGINES {
        let (first, is_over) = (worker(engine), Rc::new(Cell::new(false)));
        let (second, dropped) = (first.clone(), Dropped(is_over.clone()));
        let leaked = Rc::new(Cell::new(None));
        let place = leaked.clone();
        drop(first.spawn_with(|on| async move {
            let _dropped = dropped;
            place.set(Some(on.clone()));
            std::future::pending::<()>().await;
            drop(on);
        }));
        first.poll();
        drop(first);
        second.poll();
        assert!(!is_over.get(), "{engine:?}: the second handle counts");
        drop(second);
        assert!(is_over.get(), "{engine:?}: what never ends was dropped");
        // A handle that is left can be used.
        let left = leaked.take().unwrap();
        let task = left.spawn_with(|on| async move { on.buffer(512).len() });
        assert_eq!(left.block_on(task), 512);
    }
}

#[test]
fn a_task_may_hold_the_last_counted_handle() {
    for engine in ENGINES {
        let is_prompt = || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("f");
            let file = open_new(&path);
            let start = std::thread::spawn(move || {
                let start = Instant::now();
                let worker = worker(engine);
                let (counted, opened) = (worker.clone(), file.clone());
                drop(worker.spawn(async move {
                    counted.sleep(Duration::from_millis(1)).await;
                    let on = counted.uncounted();
                    drop(counted);
                    on.write(&opened, 0, IoBuf::copy_of(b"written").into()).await.0.unwrap();
                }));
                start
            })
            .join()
            .unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"written");
            start.elapsed() < Duration::from_secs(5)
        };
        // A wait for a task within itself lasts 5 s each time; a busy machine is late now and then.
        assert!((0..20).any(|_| is_prompt()), "{engine:?}: nobody waited for a task within itself");
    }
}

#[test]
fn a_panic_in_a_task_ends_with_its_worker() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = open_new(&path);
        let thread = std::thread::spawn(move || {
            let worker = worker(engine);
            let inner = worker.clone();
            drop(worker.spawn(async move {
                inner.write(&file, 0, IoBuf::copy_of(b"written").into()).await.0.unwrap();
            }));
            drop(worker.spawn(async { panic!("as intended") }));
            drop(worker);
        });
        let _ = thread.join();
        assert_eq!(fs::read(&path).unwrap(), b"written");
    }
}

#[test]
fn the_end_of_a_worker_does_not_wait_for_ever() {
    for engine in ENGINES {
        let start = Instant::now();
        let worker = worker(engine);
        drop(worker.spawn(std::future::pending::<()>()));
        worker.poll();
        // A machine that stands still is late once, and hardly each time.
        let is_prompt = || {
            let start = Instant::now();
            assert!(!worker.drain(Duration::from_millis(10)));
            start.elapsed() < Duration::from_secs(3)
        };
        assert!((0..10).any(|_| is_prompt()), "{engine:?}: it waits longer than it was to");
        drop(worker);
        assert!(start.elapsed() < AGES);
    }
}

#[test]
fn a_closed_file_is_given_up_by_the_ring() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a-file-that-no-other-test-has");
    let worker = worker(Engine::IoUring);
    // A registered file shows in the ring's fdinfo, not among the descriptors. (Other tests have other rings and files.)
    let open_descriptors_and_places = |path: &Path| {
        let is_ring = |link: &Path| link.to_string_lossy().contains("io_uring");
        let entries = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let rings = entries.filter(|entry| fs::read_link(entry.path()).is_ok_and(|link| is_ring(&link)));
        let infos = rings.map(|entry| Path::new("/proc/self/fdinfo").join(entry.file_name()));
        let named = path.file_name().unwrap().to_str().unwrap().to_owned();
        let lines = infos.filter_map(|info| fs::read_to_string(info).ok()).collect::<String>();
        lines.lines().filter(|line| line.ends_with(&named)).count()
    };
    let file = open_new(&path);
    worker.block_on(async { worker.write(&file, 0, IoBuf::zeroed(4096).into()).await.0.unwrap() });
    let during = open_descriptors_and_places(&path);
    drop(file);
    while worker.poll() {}
    assert_eq!(open_descriptors_and_places(&path), 0);
    assert_eq!(during, 1);
    // A place is used again and again, and the operations reach the right file.
    for i in 0..600u32 {
        let path = dir.path().join(i.to_string());
        let file = open_new(&path);
        let data = i.to_le_bytes();
        worker.block_on(async { worker.write(&file, 0, IoBuf::copy_of(&data).into()).await.0.unwrap() });
        assert_eq!(fs::read(&path).unwrap(), data);
    }
}

#[test]
fn threads_stand_in_where_a_filter_refuses_the_ring() {
    for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES, libc::ENOMEM] {
        for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter] {
            std::thread::spawn(move || {
                refuse(call, errno);
                let config = WorkerConfig::default().engine(Engine::IoUring);
                let error = Worker::new(&config).err().expect("refused");
                assert_eq!(error.errno(), errno);
                let worker = worker(Engine::Auto);
                assert_eq!(worker.kind(), WorkerKind::Threads);
                let reason = worker.fallback_reason().unwrap();
                assert!(reason.starts_with("io_uring_"), "{reason}");
                let dir = tempfile::tempdir().unwrap();
                let file = open_new(&dir.path().join("f"));
                worker.block_on(async {
                    worker.write(&file, 0, IoBuf::copy_of(b"abc").into()).await.0.unwrap();
                });
                assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"abc");
            })
            .join()
            .unwrap();
        }
    }
}

/// Has the kernel refuse a system call of this thread.
fn refuse(call: libc::c_long, errno: i32) {
    let statement = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        // The number is the first field of `struct seccomp_data`.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter and its program live through the calls.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter)
    };
    assert_eq!(set, 0);
}
