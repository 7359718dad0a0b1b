//! Cloud Hypervisor: a disk that makes an asynchronous queue for each virtqueue.
//!
//! Its device makes the queues on the thread that activates it, then moves each to a thread of its own. There it registers
//! the notifier once, and at each event reads the notifier before it takes completions. A filter of system calls is active
//! on that thread by then. It lacks some that a queue makes: [`zebu::storage::SYSTEM_CALLS`] has to be added to it.

use crate::seat::Seat;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use zebu::storage::{Engine, GuestBuffers};
use zebu::{Completion, Disk, Durability, OpenOptions, Request, Shrink, ZeroMode};

/// A request with its data in the guest's memory.
#[derive(Debug)]
pub enum AsyncIoOperation {
    /// Fill parts of the memory.
    ReadToMemory {
        /// Bytes from the start of the disk.
        offset: u64,
        /// Addresses and lengths in bytes.
        target: Vec<(GuestAddress, usize)>,
        /// Given back with the completion.
        user_data: u64,
    },
    /// Write parts of the memory.
    WriteFromMemory {
        /// Bytes from the start of the disk.
        offset: u64,
        /// Addresses and lengths in bytes.
        target: Vec<(GuestAddress, usize)>,
        /// Given back with the completion.
        user_data: u64,
    },
}

/// A request that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncIoCompletion {
    /// As given.
    pub user_data: u64,
    /// Bytes, or a negative errno.
    pub result: i32,
}

/// The queue of one virtqueue.
pub trait AsyncIo: Send {
    /// Becomes readable when something has ended.
    fn notifier(&self) -> BorrowedFd<'_>;
    /// Begins a read or a write.
    ///
    /// # Errors
    /// A part is not in the guest's memory.
    fn submit_data_operation(&mut self, operation: AsyncIoOperation) -> io::Result<()>;
    /// Begins several.
    ///
    /// # Errors
    /// As of [`AsyncIo::submit_data_operation`].
    fn submit_batch_requests(&mut self, operations: Vec<AsyncIoOperation>) -> io::Result<()>;
    /// Whether [`AsyncIo::submit_batch_requests`] is to be used.
    fn batch_requests_enabled(&self) -> bool;
    /// Begins a flush; without `user_data` nobody is told of its end.
    ///
    /// # Errors
    /// None here.
    fn fsync(&mut self, user_data: Option<u64>) -> io::Result<()>;
    /// Begins giving a range up.
    ///
    /// # Errors
    /// None here.
    fn punch_hole(&mut self, offset: u64, length: u64, user_data: u64) -> io::Result<()>;
    /// Begins making a range zero.
    ///
    /// # Errors
    /// None here.
    fn write_zeroes(&mut self, offset: u64, length: u64, user_data: u64) -> io::Result<()>;
    /// The next request that has ended.
    fn next_completed_request(&mut self) -> Option<AsyncIoCompletion>;
    /// Alignment of memory in bytes.
    fn alignment(&self) -> u64;
}

/// A disk as the device has it.
pub trait AsyncDiskFile: Send + Sync {
    /// Bytes of the disk.
    ///
    /// # Errors
    /// None here.
    fn logical_size(&self) -> io::Result<u64>;
    /// Bytes that its file takes.
    ///
    /// # Errors
    /// The file system does not answer.
    fn physical_size(&self) -> io::Result<u64>;
    /// Another handle.
    ///
    /// # Errors
    /// None here.
    fn try_clone(&self) -> io::Result<Box<dyn AsyncDiskFile>>;
    /// A queue with room for `ring_depth` requests.
    ///
    /// # Errors
    /// The system gives no descriptor.
    fn create_async_io(&self, ring_depth: u32) -> io::Result<Box<dyn AsyncIo>>;
    /// Changes the size.
    ///
    /// # Errors
    /// As of [`Disk::resize`].
    fn resize(&mut self, size: u64) -> io::Result<()>;
    /// Makes all that was written durable.
    ///
    /// # Errors
    /// As of [`Disk::flush`].
    fn sync_metadata(&self) -> io::Result<()>;
}

/// A disk of zebu, and the memory of the guest that uses it.
#[derive(Debug, Clone)]
pub struct ZebuDisk {
    disk: Disk,
    engine: Engine,
    guest: GuestBuffers,
}

impl ZebuDisk {
    /// Opens an image.
    ///
    /// # Errors
    /// As of [`Disk::open`].
    pub fn open(path: &Path, options: &OpenOptions, memory: Arc<GuestMemoryMmap>) -> io::Result<Self> {
        Self::open_on(Engine::Auto, path, options, memory)
    }

    /// As [`ZebuDisk::open`], with a choice of the way to do I/O: monitors have an option for hosts without io_uring.
    ///
    /// # Errors
    /// As of [`Disk::open`]; the system does not give the engine.
    pub fn open_on(
        engine: Engine,
        path: &Path,
        options: &OpenOptions,
        memory: Arc<GuestMemoryMmap>,
    ) -> io::Result<Self> {
        let disk = Disk::builder().engine(engine).open(path, options)?;
        Ok(Self { disk, engine, guest: GuestBuffers::new(memory) })
    }
}

impl AsyncDiskFile for ZebuDisk {
    fn logical_size(&self) -> io::Result<u64> {
        Ok(self.disk.virtual_size())
    }

    fn physical_size(&self) -> io::Result<u64> {
        Ok(self.disk.info()?.actual_size)
    }

    fn try_clone(&self) -> io::Result<Box<dyn AsyncDiskFile>> {
        Ok(Box::new(self.clone()))
    }

    fn create_async_io(&self, ring_depth: u32) -> io::Result<Box<dyn AsyncIo>> {
        let notifier = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // All that the filter of the queue's thread refuses is made here.
        let queue = self.disk.queue().engine(self.engine).depth(ring_depth);
        let queue = queue.event_fd(notifier.try_clone()?).detached()?;
        Ok(Box::new(ZebuIo {
            seat: Seat::new(queue),
            guest: self.guest.clone(),
            notifier,
            under_way: HashMap::new(),
            next: 0,
        }))
    }

    fn resize(&mut self, size: u64) -> io::Result<()> {
        Ok(self.disk.resize(size, Shrink::Refuse)?)
    }

    fn sync_metadata(&self) -> io::Result<()> {
        Ok(self.disk.flush()?)
    }
}

/// Parts of the guest's memory: addresses and lengths in bytes.
type Parts = Vec<(GuestAddress, usize)>;

/// The completion of a request, made up when it begins.
struct Told {
    user_data: Option<u64>,
    bytes: usize,
    /// The memory that a read has changed.
    changed: Parts,
}

/// A queue of zebu as a queue of Cloud Hypervisor.
struct ZebuIo {
    seat: Seat,
    guest: GuestBuffers,
    notifier: OwnedFd,
    under_way: HashMap<u64, Told>,
    next: u64,
}

impl ZebuIo {
    fn begin(&mut self, request: Request, told: Told) -> io::Result<()> {
        self.seat.queue()?.submit(request, self.next);
        self.under_way.insert(self.next, told);
        self.next += 1;
        Ok(())
    }

    fn begin_data(&mut self, operation: AsyncIoOperation) -> io::Result<()> {
        let (AsyncIoOperation::ReadToMemory { offset, target, user_data }
        | AsyncIoOperation::WriteFromMemory { offset, target, user_data }) = &operation;
        let outside = || io::Error::new(io::ErrorKind::InvalidInput, "not in the guest's memory");
        let bufs = self.guest.buffers(target.iter().copied()).ok_or_else(outside)?;
        let (offset, bytes, user_data) = (*offset, bufs.len(), Some(*user_data));
        match operation {
            AsyncIoOperation::ReadToMemory { target, .. } => {
                self.begin(Request::Read { offset, bufs }, Told { user_data, bytes, changed: target })
            }
            AsyncIoOperation::WriteFromMemory { .. } => {
                let write = Request::Write { offset, bufs, durability: Durability::Volatile };
                self.begin(write, Told { user_data, bytes, changed: Vec::new() })
            }
        }
    }

    /// Has what was begun start. What ends by the way is taken later: the notifier shows it.
    fn start(&mut self) -> io::Result<()> {
        self.seat.queue()?.start();
        Ok(())
    }

    fn begin_and_start(&mut self, request: Request, user_data: Option<u64>) -> io::Result<()> {
        self.begin(request, Told { user_data, bytes: 0, changed: Vec::new() })?;
        self.start()
    }
}

impl AsyncIo for ZebuIo {
    fn notifier(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }

    fn submit_data_operation(&mut self, operation: AsyncIoOperation) -> io::Result<()> {
        self.begin_data(operation)?;
        self.start()
    }

    fn submit_batch_requests(&mut self, operations: Vec<AsyncIoOperation>) -> io::Result<()> {
        for operation in operations {
            self.begin_data(operation)?;
        }
        self.start()
    }

    fn batch_requests_enabled(&self) -> bool {
        true
    }

    fn fsync(&mut self, user_data: Option<u64>) -> io::Result<()> {
        self.begin_and_start(Request::Flush, user_data)
    }

    fn punch_hole(&mut self, offset: u64, length: u64, user_data: u64) -> io::Result<()> {
        self.begin_and_start(Request::Discard { offset, len: length }, Some(user_data))
    }

    fn write_zeroes(&mut self, offset: u64, length: u64, user_data: u64) -> io::Result<()> {
        let zero = Request::WriteZeroes { offset, len: length, mode: ZeroMode::Unmap };
        self.begin_and_start(zero, Some(user_data))
    }

    fn next_completed_request(&mut self) -> Option<AsyncIoCompletion> {
        let queue = self.seat.queue().ok()?;
        while let Some(Completion { user_data, result, .. }) = queue.next_completion() {
            let Some(told) = self.under_way.remove(&user_data) else { continue };
            self.guest.mark_dirty(told.changed);
            let Some(user_data) = told.user_data else { continue };
            let bytes = i32::try_from(told.bytes).unwrap_or(i32::MAX);
            return Some(AsyncIoCompletion {
                user_data,
                result: result.map_or_else(|e| -e.errno(), |()| bytes),
            });
        }
        None
    }

    fn alignment(&self) -> u64 {
        // Buffers that don't suit the file are copied by the library.
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::Timespec;
    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    use vm_memory::Bytes;
    use zebu::check::CheckOptions;
    use zebu::{Access, CreateOptions};

    /// Requests of a round.
    const BATCH: u64 = 16;

    /// The thread of a virtqueue: it waits for the notifier, which it registers once, reads it, and takes completions.
    fn virtqueue(mut io: Box<dyn AsyncIo>, memory: &GuestMemoryMmap, queue: u64, rounds: u64) {
        let epoll = epoll::create(CreateFlags::CLOEXEC).unwrap();
        epoll::add(&epoll, io.notifier(), EventData::new_u64(0), EventFlags::IN).unwrap();
        let place = |i: u64| GuestAddress((queue * 64 + i * 2) * 4096 + 16);
        for round in 0..rounds {
            let at = |i: u64| (queue * 16 + i) * 65536 + (round % 13) * 4096;
            let mut expected = BATCH;
            for i in 0..BATCH {
                memory.write_slice(&[(round + i) as u8; 4096], place(i)).unwrap();
            }
            let write = |i| AsyncIoOperation::WriteFromMemory {
                offset: at(i),
                target: vec![(place(i), 1000), (GuestAddress(place(i).0 + 1000), 3096)],
                user_data: i,
            };
            io.submit_batch_requests((0..BATCH).map(write).collect()).unwrap();
            match round % 4 {
                0 => io.fsync(None).unwrap(),
                1 => {
                    io.fsync(Some(100)).unwrap();
                    expected += 1;
                }
                2 => {
                    io.punch_hole(at(0) + (32 << 20), 65536, 101).unwrap();
                    io.write_zeroes(at(1) + (32 << 20), 5000, 102).unwrap();
                    expected += 2;
                }
                _ => {}
            }
            wait(io.as_mut(), &epoll, expected);
            let read = |i| AsyncIoOperation::ReadToMemory {
                offset: at(i),
                target: vec![(GuestAddress(place(i).0 + 4096), 4096)],
                user_data: i,
            };
            for i in 0..BATCH {
                io.submit_data_operation(read(i)).unwrap();
            }
            wait(io.as_mut(), &epoll, BATCH);
            for i in 0..BATCH {
                let mut back = [0; 4096];
                memory.read_slice(&mut back, GuestAddress(place(i).0 + 4096)).unwrap();
                assert!(back == [(round + i) as u8; 4096], "queue {queue}, round {round}, request {i}");
            }
        }
        let outside = vec![(GuestAddress(u64::MAX - 10), 5)];
        assert!(
            io.submit_data_operation(AsyncIoOperation::ReadToMemory {
                offset: 0,
                target: outside,
                user_data: 0
            })
            .is_err()
        );
    }

    fn wait(io: &mut dyn AsyncIo, epoll: &OwnedFd, mut expected: u64) {
        let ages = Timespec { tv_sec: 600, tv_nsec: 0 };
        while expected > 0 {
            let mut events = Vec::with_capacity(1);
            rustix::io::retry_on_intr(|| {
                epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), Some(&ages))
            })
            .unwrap();
            assert!(!events.is_empty(), "nothing shows of {expected}");
            rustix::io::read(io.notifier(), &mut [0; 8]).unwrap();
            while let Some(completion) = io.next_completed_request() {
                assert!(completion.result >= 0);
                expected -= 1;
            }
        }
    }

    /// 100 rounds on each engine, or as many as `ZEBU_EMBEDDING_ROUNDS` says.
    #[test]
    fn queues_that_are_made_on_one_thread_serve_on_theirs_and_lose_nothing() {
        let rounds = std::env::var("ZEBU_EMBEDDING_ROUNDS").map_or(100, |rounds| rounds.parse().unwrap());
        for engine in [Engine::Threads, Engine::IoUring] {
            queues_lose_nothing(engine, rounds);
        }
    }

    fn queues_lose_nothing(engine: Engine, rounds: u64) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        Disk::create(&path, &CreateOptions::default().size(Some(64 << 20))).unwrap();
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap());
        let options = OpenOptions::default().access(Access::ReadWrite);
        let disk = ZebuDisk::open_on(engine, &path, &options, memory.clone()).unwrap();
        let threads: Vec<_> = (0..2)
            .map(|queue| {
                let (io, memory) = (disk.create_async_io(64).unwrap(), memory.clone());
                std::thread::spawn(move || virtqueue(io, &memory, queue, rounds))
            })
            .collect();
        // The monitor's own thread.
        let mut other = disk.try_clone().unwrap();
        other.sync_metadata().unwrap();
        other.resize(128 << 20).unwrap();
        assert_eq!(disk.logical_size().unwrap(), 128 << 20);
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(disk.physical_size().unwrap() > 1 << 20);
        drop((disk, other));
        let report = Disk::check(&path, &CheckOptions::default()).unwrap();
        assert!(report.is_clean() && report.counts.leaks == 0);
    }

    /// System calls that the filter of its virtio-blk thread lets through (`virtio-devices/src/seccomp_filters.rs`); any
    /// other ends the process.
    const BLOCK_THREAD: &[libc::c_long] = &[
        libc::SYS_brk,
        libc::SYS_clock_gettime,
        libc::SYS_close,
        libc::SYS_dup,
        libc::SYS_epoll_create1,
        libc::SYS_epoll_ctl,
        libc::SYS_epoll_pwait,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait,
        libc::SYS_exit,
        libc::SYS_fallocate,
        libc::SYS_fcntl,
        libc::SYS_fdatasync,
        libc::SYS_fsync,
        libc::SYS_ftruncate,
        libc::SYS_futex,
        libc::SYS_getrandom,
        libc::SYS_gettid,
        libc::SYS_io_destroy,
        libc::SYS_io_getevents,
        libc::SYS_io_submit,
        libc::SYS_io_uring_enter,
        libc::SYS_lseek,
        libc::SYS_madvise,
        libc::SYS_mmap,
        libc::SYS_mprotect,
        libc::SYS_mremap,
        libc::SYS_munmap,
        libc::SYS_openat,
        libc::SYS_pread64,
        libc::SYS_preadv,
        libc::SYS_pwrite64,
        libc::SYS_pwritev,
        libc::SYS_read,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_setaffinity,
        libc::SYS_set_robust_list,
        libc::SYS_sigaltstack,
        libc::SYS_timerfd_settime,
        libc::SYS_write,
    ];

    /// In a process of its own, which a system call beyond the filter ends.
    #[test]
    fn a_queue_serves_under_the_filter_of_the_block_thread_and_the_calls_that_are_listed() {
        const CHILD: &str = "ZEBU_TEST_BLOCK_THREAD";
        const NAME: &str = "cloud_hypervisor::tests::a_queue_serves_under_the_filter_of_the_block_thread_and_the_calls_that_are_listed";
        if std::env::var_os(CHILD).is_none() {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", NAME])
                .env(CHILD, "1")
                .status()
                .unwrap();
            assert!(status.success(), "{status}");
            return;
        }
        // As the monitor has to extend its filter: a ring takes note of files when it meets them (io_uring_register), and
        // starts threads for what it can't do itself.
        let calls = BLOCK_THREAD.iter().chain(zebu::storage::SYSTEM_CALLS);
        let rules = calls.map(|&call| (call, Vec::new())).collect();
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filter: BpfProgram =
            SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)
                .unwrap()
                .try_into()
                .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        Disk::create(&path, &CreateOptions::default().size(64 << 20)).unwrap();
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap());
        let options = OpenOptions::default().access(Access::ReadWrite);
        let disk = ZebuDisk::open(&path, &options, memory.clone()).unwrap();
        let io = disk.create_async_io(64).unwrap();
        std::thread::spawn(move || {
            seccompiler::apply_filter(&filter).unwrap();
            virtqueue(io, &memory, 0, 100);
        })
        .join()
        .unwrap();
    }
}
