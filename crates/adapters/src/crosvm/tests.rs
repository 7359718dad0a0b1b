//! A block device as crosvm runs it: a thread with an executor for each queue, a task for each request.

use super::*;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Wake, Waker};
use std::time::Instant;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use zebu::check::CheckOptions;
use zebu::{Access, CreateOptions};

/// Requests of a round.
const BATCH: u64 = 16;

/// The memory of a guest.
struct Guest(GuestMemoryMmap);

// SAFETY: the mappings live as long as the value, and are readable and writable.
unsafe impl BackingMemory for Guest {
    fn get_volatile_slice(&self, region: MemRegion) -> io::Result<VolatileSlice<'_>> {
        self.0.get_slice(GuestAddress(region.offset), region.len).map_err(io::Error::other)
    }
}

/// Puts its task into the line again.
struct TaskWaker {
    task: usize,
    line: Arc<Mutex<VecDeque<usize>>>,
    event: Arc<OwnedFd>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.line.lock().unwrap().push_back(self.task);
        rustix::io::write(&*self.event, &1u64.to_ne_bytes()).unwrap();
    }
}

/// An executor on epoll: a descriptor is watched once each time that somebody waits for it, as crosvm's does.
struct Epoll {
    epoll: OwnedFd,
    event: Arc<OwnedFd>,
    line: Arc<Mutex<VecDeque<usize>>>,
    tasks: RefCell<BTreeMap<usize, LocalFuture<'static, ()>>>,
    next: Cell<usize>,
    readers: RefCell<BTreeMap<u64, Waker>>,
    sleepers: RefCell<Vec<(Instant, Waker)>>,
}

impl Epoll {
    fn new() -> Rc<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).unwrap();
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
        epoll::add(&epoll, &*event, EventData::new_u64(u64::MAX), EventFlags::IN).unwrap();
        Rc::new(Self {
            epoll,
            event,
            line: Arc::default(),
            tasks: RefCell::default(),
            next: Cell::new(1),
            readers: RefCell::default(),
            sleepers: RefCell::default(),
        })
    }

    fn waker(&self, task: usize) -> Waker {
        Waker::from(Arc::new(TaskWaker { task, line: self.line.clone(), event: self.event.clone() }))
    }

    /// Runs until `main` is done; task 0 is `main`.
    fn run_until<T>(&self, main: impl Future<Output = T>) -> T {
        let mut main = pin!(main);
        self.line.lock().unwrap().push_back(0);
        loop {
            while let Some(task) = { self.line.lock().unwrap().pop_front() } {
                let waker = self.waker(task);
                let mut cx = Context::from_waker(&waker);
                if task == 0 {
                    if let Poll::Ready(value) = main.as_mut().poll(&mut cx) {
                        return value;
                    }
                    continue;
                }
                let Some(mut future) = self.tasks.borrow_mut().remove(&task) else { continue };
                if future.as_mut().poll(&mut cx).is_pending() {
                    self.tasks.borrow_mut().insert(task, future);
                }
            }
            let next = self.sleepers.borrow().iter().map(|(at, _)| *at).min();
            let left =
                next.map_or(Duration::from_secs(600), |at| at.saturating_duration_since(Instant::now()));
            let mut events = Vec::with_capacity(8);
            let timeout = Timespec::try_from(left).unwrap();
            rustix::io::retry_on_intr(|| {
                epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))
            })
            .unwrap();
            assert!(!events.is_empty() || next.is_some(), "nothing happens");
            for event in events {
                if event.data.u64() == u64::MAX {
                    let _ = rustix::io::read(&*self.event, &mut [0; 8]);
                } else if let Some(waker) = self.readers.borrow_mut().remove(&event.data.u64()) {
                    waker.wake();
                }
            }
            let now = Instant::now();
            for (_, waker) in self.sleepers.borrow_mut().extract_if(.., |(at, _)| *at <= now) {
                waker.wake();
            }
        }
    }
}

impl Executor for Epoll {
    fn spawn_local(&self, task: LocalFuture<'static, ()>) {
        let number = self.next.replace(self.next.get() + 1);
        self.tasks.borrow_mut().insert(number, task);
        self.waker(number).wake();
    }

    fn wait_readable<'a>(&'a self, descriptor: BorrowedFd<'a>) -> LocalFuture<'a, io::Result<()>> {
        let number = self.next.replace(self.next.get() + 1) as u64;
        let watched = Watched { epoll: self, descriptor, number, added: Cell::new(false) };
        Box::pin(std::future::poll_fn(move |cx| watched.poll(cx)))
    }

    fn sleep(&self, time: Duration) -> LocalFuture<'_, io::Result<()>> {
        let end = Instant::now() + time;
        Box::pin(std::future::poll_fn(move |cx| {
            if Instant::now() >= end {
                return Poll::Ready(Ok(()));
            }
            self.sleepers.borrow_mut().push((end, cx.waker().clone()));
            Poll::Pending
        }))
    }
}

/// A descriptor for which somebody waits.
struct Watched<'a> {
    epoll: &'a Epoll,
    descriptor: BorrowedFd<'a>,
    number: u64,
    added: Cell<bool>,
}

impl Watched<'_> {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut readers = self.epoll.readers.borrow_mut();
        if self.added.get() && !readers.contains_key(&self.number) {
            return Poll::Ready(Ok(()));
        }
        readers.insert(self.number, cx.waker().clone());
        if !self.added.replace(true) {
            let data = EventData::new_u64(self.number);
            epoll::add(&self.epoll.epoll, self.descriptor, data, EventFlags::IN).unwrap();
        }
        Poll::Pending
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.epoll.readers.borrow_mut().remove(&self.number);
        if self.added.get() {
            epoll::delete(&self.epoll.epoll, self.descriptor).unwrap();
        }
    }
}

/// Starts a task for each request at once, and waits for all.
async fn all(executor: &Rc<Epoll>, requests: Vec<LocalFuture<'static, io::Result<usize>>>) {
    let left = Rc::new(Cell::new(requests.len()));
    let waker: Rc<RefCell<Option<Waker>>> = Rc::default();
    for request in requests {
        let (left, waker) = (left.clone(), waker.clone());
        executor.spawn_local(Box::pin(async move {
            request.await.unwrap();
            left.set(left.get() - 1);
            if let Some(waker) = waker.take() {
                waker.wake();
            }
        }));
    }
    std::future::poll_fn(|cx| {
        *waker.borrow_mut() = Some(cx.waker().clone());
        if left.get() == 0 { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// A request of a device: its parts live as long as its task, as a descriptor chain does.
fn transfer(
    disk: &Rc<Box<dyn AsyncDisk>>,
    guest: &Arc<Guest>,
    write: bool,
    offset: u64,
    address: u64,
) -> LocalFuture<'static, io::Result<usize>> {
    let (disk, guest) = (disk.clone(), Arc::clone(guest) as Arc<dyn BackingMemory>);
    Box::pin(async move {
        let parts = [(0, 1000), (1000, 3096)].map(|(at, len)| MemRegion { offset: address + at, len });
        if write {
            disk.write_from_mem(offset, guest, &parts).await
        } else {
            disk.read_to_mem(offset, guest, &parts).await
        }
    })
}

/// The thread of a queue: the guest's kick is awaited, then the requests of a round are in flight at once.
fn queue(file: Box<dyn DiskFile>, guest: &Arc<Guest>, queue: u64, rounds: u64) -> Box<dyn DiskFile> {
    let executor = Epoll::new();
    let mut disk = file.to_async_disk(executor.clone()).unwrap();
    assert_eq!(disk.allocate(0, 512).unwrap_err().kind(), io::ErrorKind::Unsupported);
    let disk = Rc::new(disk);
    let kick = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
    let place = |i: u64| (queue * 64 + i * 2) * 4096 + 16;
    executor.run_until(async {
        for round in 0..rounds {
            rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
            executor.wait_readable(kick.as_fd()).await.unwrap();
            rustix::io::read(&kick, &mut [0; 8]).unwrap();
            let at = |i: u64| (queue * 16 + i) * 65536 + (round % 13) * 4096;
            for i in 0..BATCH {
                guest.0.write_slice(&[(round + i) as u8; 4096], GuestAddress(place(i))).unwrap();
            }
            let transfer = |write, i, address| transfer(&disk, guest, write, at(i), address);
            all(&executor, (0..BATCH).map(|i| transfer(true, i, place(i))).collect()).await;
            match round % 4 {
                0 => disk.fdatasync().await.unwrap(),
                1 => disk.fsync().await.unwrap(),
                2 => {
                    disk.punch_hole(at(0) + (32 << 20), 65536).await.unwrap();
                    disk.write_zeroes_at(at(1) + (32 << 20), 5000).await.unwrap();
                }
                _ => {}
            }
            all(&executor, (0..BATCH).map(|i| transfer(false, i, place(i) + 4096)).collect()).await;
            for i in 0..BATCH {
                let mut back = [0; 4096];
                guest.0.read_slice(&mut back, GuestAddress(place(i) + 4096)).unwrap();
                assert!(back == [(round + i) as u8; 4096], "queue {queue}, round {round}, request {i}");
            }
        }
        let outside = [MemRegion { offset: u64::MAX - 10, len: 5 }];
        let memory = Arc::clone(guest) as Arc<dyn BackingMemory>;
        assert!(disk.read_to_mem(0, memory.clone(), &outside).await.is_err());
        let inside = [MemRegion { offset: 0, len: 512 }];
        let end = disk.get_len().unwrap();
        assert!(disk.read_to_mem(end, memory, &inside).await.is_err());
    });
    // The device is reset: the disk goes back to the main process.
    Rc::try_unwrap(disk).unwrap_or_else(|_| panic!("a task has kept the disk")).into_inner()
}

/// 100 rounds on each engine, or as many as `ZEBU_EMBEDDING_ROUNDS` says.
#[test]
fn disks_that_go_to_threads_and_back_lose_nothing() {
    let rounds = std::env::var("ZEBU_EMBEDDING_ROUNDS").map_or(100, |rounds| rounds.parse().unwrap());
    for engine in [Engine::Threads, Engine::IoUring] {
        disks_lose_nothing(engine, rounds);
    }
}

fn disks_lose_nothing(engine: Engine, rounds: u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    Disk::create(&path, &CreateOptions::default().size(64 << 20)).unwrap();
    let guest = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
    let guest = Arc::new(Guest(guest));
    let options = OpenOptions::default().access(Access::ReadWrite);
    let disk: Box<dyn DiskFile> = Box::new(ZebuDisk::open_on(engine, &path, &options).unwrap());
    let mut files: Vec<_> = (0..2).map(|_| disk.try_clone().unwrap()).collect();
    // Twice: a device that was reset starts again with the disks that came back.
    for _ in 0..2 {
        let threads: Vec<_> = files
            .drain(..)
            .zip(0..)
            .map(|(file, number)| {
                // The image's file and that of its locks, then those of the worker.
                assert!(file.as_raw_descriptors().len() >= 3);
                let guest = guest.clone();
                std::thread::spawn(move || queue(file, &guest, number, rounds / 2))
            })
            .collect();
        files = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    }
    // With no request under way, as the device sees to, the main process changes the size, and reads and writes by itself.
    disk.set_len(128 << 20).unwrap();
    assert_eq!(disk.set_len(64 << 20).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert_eq!(files[0].get_len().unwrap(), 128 << 20);
    let mut bytes = [7; 600];
    let end = (128 << 20) - 500;
    assert_eq!(disk.write_at_volatile(VolatileSlice::from(&mut bytes[..]), end).unwrap(), 500);
    bytes = [0; 600];
    assert_eq!(files[1].read_at_volatile(VolatileSlice::from(&mut bytes[..]), end).unwrap(), 500);
    assert_eq!((bytes[499], bytes[500]), (7, 0));
    drop((disk, files));
    let report = Disk::check(&path, &CheckOptions::default()).unwrap();
    assert!(report.is_clean() && report.counts.leaks == 0);
}
