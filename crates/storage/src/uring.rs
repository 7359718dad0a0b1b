//! The io_uring backend: one ring per worker.
//!
//! Submissions are queued in the ring's memory and handed over by the `io_uring_enter` that waits as well, or before it
//! as soon as they outnumber what the disk still has to do: a disk that completes a whole queue at once must not stand
//! idle until the tasks of all completions have run (30 % of the rate of small writes, measured). At most as many
//! operations are in the ring as it has entries (so neither of its queues can overflow). No disk has all of them, as it
//! may stand still; what comes beyond waits (see the module `fair_queue`). Files and the pool's slabs are registered
//! where the kernel lets us. What has no opcode (ftruncate, lseek, copying between files) is done by a few helper
//! threads. The worker's notifier is polled in the ring, so that waiting on the ring is waiting on everything.
//!
//! For event loops the ring raises the notifier's signal. (The ring's own descriptor will not do: work that the kernel
//! keeps until this thread asks for it, `IORING_SETUP_DEFER_TASKRUN`, wakes nobody who polls it.) The ring's part of it
//! is off during turns, when the worker looks by itself; outside of turns the notifier raises the signal, not the ring
//! by its poll of the notifier (see the module `notify`).

use crate::blocking;
use crate::closed_files::ClosedFiles;
use crate::fair_queue::{FairQueue, NO_DISK, disk_of};
use crate::file::File;
use crate::file_types::FileId;
use crate::fresh_number::fresh_number;
use crate::memory::{FixedBuffer, Region};
use crate::notify::Notifier;
use crate::request::{Completion, Job, OpDone, OpId, OpKind, OpRequest};
use crate::socket::{SocketCompletion, SocketOp, SocketRequest};
use crate::threads::Threads;
use crate::uring_rights::restrict;
use crate::uring_sockets::{CANCELLATION, SOCKET, UringSockets};
use crate::worker_types::WorkerConfig;
use foldhash::HashMap;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{Fd, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// Marks completions of the poll of the notifier; operations are numbered from 0.
const NOTIFIED: u64 = u64::MAX;
/// Places in the table of registered files; files beyond are used by their descriptors.
const FILES: u32 = 256;
/// Places in the table of registered buffers.
const BUFFERS: u32 = 64;
/// Helper threads for what has no opcode.
const HELPERS: usize = 4;
/// Reads through the page cache of so many bytes are given to a thread of the kernel's at once.
const LONG_CACHED_READ: usize = 128 << 10;
/// The fewest submissions that are handed over before the worker waits.
const EARLY_BATCH: usize = 4;

/// An operation in the ring.
#[derive(Default)]
struct Slot {
    request: Option<Box<OpRequest>>,
    /// Bytes transferred so far.
    done: usize,
    /// Arrays from which the kernel reads the addresses when it takes the submission; kept for their capacity.
    vectors: Vec<libc::iovec>,
}

// SAFETY: the pointers in `vectors` are to the buffers of `request`, which may be sent along.
unsafe impl Send for Slot {}

/// The file as the ring knows it.
#[derive(Clone, Copy)]
enum Target {
    Registered(Fixed),
    Descriptor(Fd),
}

/// Whether an event loop watches the notifier's signal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watched {
    No,
    /// The kernel raises the signal.
    ByKernel,
    /// The kernel refused to: the signal stays readable while anything is under way.
    ByHand,
}

/// How long to wait for a completion.
enum Wait {
    No,
    AtMost(Duration),
    Forever,
}

/// A ring and what is in it.
pub(crate) struct Uring {
    ring: IoUring,
    /// Tells rings apart: the index of a registered buffer means something to its own ring only.
    number: u64,
    notifier: Arc<Notifier>,
    helpers: Threads,
    slots: Vec<Slot>,
    /// Operations in the ring, and those that wait for a place in it.
    places: FairQueue<usize>,
    /// Operations in the ring that were not handed over yet.
    queued: usize,
    sockets: UringSockets,
    /// Whether the poll of the notifier is in the ring.
    polling: bool,
    /// Whether the kernel keeps a poll in place after it fired (since 5.13).
    multishot: bool,
    files: FileTable,
    /// Whether buffers can be registered, and how many are.
    can_register_buffers: bool,
    buffers: u32,
    watched: Watched,
    calls: u64,
}

/// Which file has which place in the ring's table.
struct FileTable {
    usable: bool,
    places: HashMap<u64, u32>,
    /// The file of the latest operation, which is likely that of the next.
    latest: (u64, u32),
    free: Vec<u32>,
    closed: Arc<ClosedFiles>,
}

/// Why there is no ring.
pub(crate) struct Refused {
    pub(crate) errno: i32,
    pub(crate) reason: String,
}

impl Refused {
    fn new(what: &str, error: &io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let why = match errno {
            libc::ENOSYS => "the kernel has none".to_owned(),
            libc::EPERM | libc::EACCES => {
                "not permitted (a seccomp filter, or kernel.io_uring_disabled)".to_owned()
            }
            libc::ENOMEM => "not enough lockable memory (RLIMIT_MEMLOCK)".to_owned(),
            errno => crate::error::errno_text(errno),
        };
        Self { errno, reason: format!("{what}: {why}") }
    }
}

/// Which thread submits to a ring.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Submitter {
    /// The one that makes it, which the kernel is told.
    Maker,
    /// Some other one, later.
    Other,
}

impl Uring {
    /// A ring for about as many operations at a time as `config` says.
    pub(crate) fn new(
        config: &WorkerConfig,
        notifier: Arc<Notifier>,
        submitter: Submitter,
    ) -> Result<Self, Refused> {
        // A disk alone has half of the places.
        let entries = config.depth.clamp(8, 16_384).next_power_of_two() * 2;
        let mut ring = build(entries, submitter).map_err(|error| Refused::new("io_uring_setup", &error))?;
        let features = ring.params();
        // Waiting with a timeout (5.11); completions are never dropped, vectors are read at submission (5.5).
        if !(features.is_feature_ext_arg()
            && features.is_feature_nodrop()
            && features.is_feature_submit_stable())
        {
            return Err(Refused {
                errno: libc::ENOSYS,
                reason: "io_uring_setup: the kernel's is too old".to_owned(),
            });
        }
        let most_in_ring = ring.params().sq_entries();
        have_threads(&ring, most_in_ring);
        restrict(&ring, config.commands).map_err(|error| Refused::new("io_uring_register", &error))?;
        let usable = ring.submitter().register_files_sparse(FILES).is_ok();
        let can_register_buffers = ring.submitter().register_buffers_sparse(BUFFERS).is_ok();
        if submitter == Submitter::Maker {
            // Only a shortcut for the kernel, and for this thread.
            let _ = ring.submitter().register_ring_fd();
        }
        ring.submitter()
            .register_enable_rings()
            .map_err(|error| Refused::new("io_uring_register", &error))?;
        let _ = ring.completion();
        let sockets = UringSockets::new(ring.params().is_feature_skip_cqe_on_success());
        let mut uring = Self {
            ring,
            number: fresh_number(),
            helpers: Threads::new(HELPERS, Arc::clone(&notifier)),
            slots: Vec::new(),
            places: FairQueue::new(most_in_ring as usize - 2),
            queued: 0,
            sockets,
            polling: false,
            multishot: true,
            files: FileTable {
                usable,
                places: HashMap::default(),
                latest: (0, 0),
                free: (0..FILES).rev().collect(),
                closed: Arc::new(ClosedFiles::new(Arc::clone(&notifier))),
            },
            notifier,
            can_register_buffers,
            buffers: 0,
            watched: Watched::No,
            calls: 0,
        };
        if submitter == Submitter::Maker {
            uring.poll_notifier();
        }
        // A filter may allow the set-up and refuse this.
        uring.ring.submit().map_err(|error| Refused::new("io_uring_enter", &error))?;
        Ok(uring)
    }

    /// Hands a request to a storage that a program brought.
    pub(crate) fn submit_to_storage(&mut self, id: OpId, request: Box<OpRequest>) {
        self.helpers.submit_to_storage(id, request);
    }

    pub(crate) fn cancel_storages(&mut self) {
        self.helpers.cancel_storages();
    }

    pub(crate) fn submit(&mut self, id: OpId, request: Box<OpRequest>) {
        match request.kind {
            OpKind::Read
            | OpKind::Write
            | OpKind::Flush
            | OpKind::Punch
            | OpKind::ZeroRange
            | OpKind::Allocate => {}
            OpKind::SetLen | OpKind::ExtentAt | OpKind::CopyRange { .. } | OpKind::CloneRange { .. } => {
                self.helpers.submit(id, request);
                return;
            }
        }
        if self.slots.len() <= id.0 {
            self.slots.resize_with(id.0 + 1, Slot::default);
        }
        let slot = &mut self.slots[id.0];
        slot.request = Some(request);
        slot.done = 0;
        self.place(id.0);
    }

    /// Queues the operation's next submission in the ring, or has it wait for a place.
    fn place(&mut self, index: usize) {
        let disk = self.disk_of(index);
        if !self.places.enter(disk) {
            self.places.wait(disk, index);
            return;
        }
        let Some(entry) = self.prepare(index) else {
            self.places.leave(disk);
            return;
        };
        // SAFETY: the entry's addresses are of buffers in `slots[index].request` and of `slots[index].vectors`, which
        // stay as they are until the completion of this entry arrives; the descriptor is kept open by the request's
        // file.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            self.queued += 1;
            let with_the_disk = self.places.taken() - self.queued;
            if self.queued >= EARLY_BATCH.max(with_the_disk) {
                self.enter(Wait::No);
            }
        } else {
            // Places are counted, so this happens only if the kernel took fewer than it was offered.
            self.places.leave(disk);
            self.places.wait(disk, index);
        }
    }

    /// The disk of an operation.
    fn disk_of(&self, index: usize) -> FileId {
        self.slots[index].request.as_ref().map_or(NO_DISK, |request| disk_of(&request.file))
    }

    /// The entry for what is left to do of the operation.
    fn prepare(&mut self, index: usize) -> Option<Entry> {
        let slot = &mut self.slots[index];
        let request = slot.request.as_mut()?;
        #[cfg(debug_assertions)]
        assert_aligned(request, slot.done);
        let target = target_of(&mut self.files, &self.ring, &request.file);
        let at = request.offset + slot.done as u64;
        let is_read = matches!(request.kind, OpKind::Read);
        let rw = request.transfer_flags();
        macro_rules! on_target {
            ($target:ident => $entry:expr) => {
                match target {
                    Target::Registered($target) => $entry,
                    Target::Descriptor($target) => $entry,
                }
            };
        }
        let entry = match request.kind {
            OpKind::Read | OpKind::Write => {
                if let [buf] = &mut request.bufs.0[..] {
                    let len = (buf.len() - slot.done).min(blocking::MAX_BYTES) as u32;
                    let fixed =
                        buf.region().and_then(Region::fixed).filter(|fixed| fixed.ring == self.number);
                    let base = buf.as_mut_ptr().wrapping_add(slot.done);
                    match (is_read, fixed) {
                        (true, Some(FixedBuffer { index, .. })) => {
                            on_target!(t => opcode::ReadFixed::new(t, base, len, index).offset(at).rw_flags(rw).build())
                        }
                        (false, Some(FixedBuffer { index, .. })) => {
                            on_target!(t => opcode::WriteFixed::new(t, base, len, index).offset(at).rw_flags(rw).build())
                        }
                        (true, None) => {
                            on_target!(t => opcode::Read::new(t, base, len).offset(at).rw_flags(rw).build())
                        }
                        (false, None) => {
                            on_target!(t => opcode::Write::new(t, base, len).offset(at).rw_flags(rw).build())
                        }
                    }
                } else {
                    slot.vectors.clear();
                    slot.vectors.extend(blocking::vectors(&mut request.bufs, slot.done));
                    let (base, count) = (slot.vectors.as_ptr(), slot.vectors.len() as u32);
                    if is_read {
                        on_target!(t => opcode::Readv::new(t, base, count).offset(at).rw_flags(rw).build())
                    } else {
                        on_target!(t => opcode::Writev::new(t, base, count).offset(at).rw_flags(rw).build())
                    }
                }
            }
            OpKind::Flush => on_target!(t => opcode::Fsync::new(t).flags(FsyncFlags::DATASYNC).build()),
            _ => {
                let mode = blocking::fallocate_mode(&request.kind);
                on_target!(t => opcode::Fallocate::new(t, request.len).offset(at).mode(mode).build())
            }
        };
        let flags = if is_long_cached_read(request, slot.done) { Flags::ASYNC } else { Flags::empty() };
        Some(entry.flags(flags).user_data(index as u64))
    }

    pub(crate) fn submit_socket(
        &mut self,
        id: usize,
        mut request: SocketRequest,
    ) -> Option<SocketCompletion> {
        // There is room to send, as a rule. In the ring it would take another turn to learn that it was sent.
        let is_lazy = request.op == SocketOp::SendLazily && self.sockets.can_be_lazy(&request);
        if request.op.sends() && !is_lazy {
            self.calls += 1;
            if let Some(result) = request.attempt() {
                return Some(SocketCompletion { id, request, result });
            }
        }
        self.sockets.submit(&mut self.ring, id, request);
        None
    }

    pub(crate) fn cancel_socket(&mut self, id: usize) {
        self.sockets.cancel(&mut self.ring, id);
    }

    pub(crate) fn hurry_sockets(&mut self) {
        self.sockets.hurry();
    }

    pub(crate) fn reap_sockets(&mut self, done: &mut Vec<SocketCompletion>) {
        self.sockets.reap(done);
    }

    pub(crate) fn run_blocking(&mut self, job: Job) {
        self.helpers.run_blocking(job);
    }

    /// Fills the ring with what waits for it, and starts the helpers.
    fn queue_all(&mut self) {
        self.helpers.submit_queued();
        while let Some((_, index)) = self.places.next() {
            let before = self.places.taken();
            self.place(index);
            if self.places.taken() == before {
                break;
            }
        }
        if !self.polling {
            self.poll_notifier();
        }
    }

    fn poll_notifier(&mut self) {
        let fd = Fd(self.notifier.as_fd().as_raw_fd());
        let entry =
            opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(self.multishot).build().user_data(NOTIFIED);
        // SAFETY: the entry has no pointers; the notifier outlives the ring.
        self.polling = unsafe { self.ring.submission().push(&entry) }.is_ok();
    }

    pub(crate) fn submit_queued(&mut self) {
        self.queue_all();
        if !self.ring.submission().is_empty() || self.kernel_has_work() {
            self.enter(Wait::No);
        }
    }

    pub(crate) fn wait(&mut self, timeout: Option<Duration>, done: &mut Vec<Completion>) {
        self.queue_all();
        if self.sockets.take_hurry() {
            self.enter(Wait::No);
        } else {
            self.enter(timeout.map_or(Wait::Forever, Wait::AtMost));
        }
        self.reap(done);
    }

    /// Hands over what is queued, and waits for a completion.
    fn enter(&mut self, wait: Wait) {
        self.calls += 1;
        self.queued = 0;
        let (want, time) = match wait {
            Wait::No => (0, None),
            Wait::Forever => (1, None),
            Wait::AtMost(time) => (1, Some(Timespec::from(time))),
        };
        let mut args = SubmitArgs::new();
        if let Some(time) = &time {
            args = args.timespec(time);
        }
        match self.ring.submitter().submit_with_args(want, &args) {
            Ok(_) => {}
            Err(error) => match error.raw_os_error() {
                // Over time; interrupted; short of memory or with completions to reap first: the callers come again.
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {}
                // Nothing that is in flight could ever be completed, and its memory never be freed.
                _ => panic!("io_uring_enter: {error}"),
            },
        }
    }

    /// Takes what the kernel completed.
    pub(crate) fn reap(&mut self, done: &mut Vec<Completion>) {
        loop {
            // One at a time: what was cut short goes back to the submission queue.
            let Some(entry) = self.ring.completion().next() else { break };
            let (index, result, flags) = (entry.user_data(), entry.result(), entry.flags());
            if index == NOTIFIED {
                self.polling = cqueue::more(flags);
                if result == -libc::EINVAL {
                    self.multishot = false;
                }
                continue;
            }
            if index == CANCELLATION {
                continue;
            }
            if index & SOCKET != 0 {
                self.sockets.complete(&mut self.ring, index, result);
                continue;
            }
            let disk = self.disk_of(index as usize);
            self.places.leave(disk);
            if let Some(completion) = self.finish(index as usize, result) {
                done.push(completion);
            }
        }
        if self.sockets.has_lazy() {
            let submission = self.ring.submission();
            // The kernel has taken all that was queued, and all its completions were noted above.
            let is_over = submission.is_empty() && !submission.cq_overflow();
            drop(submission);
            if is_over {
                self.sockets.confirm();
            }
        }
        self.helpers.reap(done);
        for number in self.files.closed.take() {
            self.forget_file(number);
        }
    }

    /// The completion of the operation, or `None` if it goes on.
    fn finish(&mut self, index: usize, result: i32) -> Option<Completion> {
        let slot = &mut self.slots[index];
        let request = slot.request.as_mut()?;
        let outcome = match usize::try_from(result) {
            Ok(moved) if matches!(request.kind, OpKind::Read | OpKind::Write) => {
                blocking::after_transfer(request, &mut slot.done, moved).transpose()
            }
            Ok(_) => Some(Ok(OpDone::Done)),
            Err(_) if result == -libc::EINTR || result == -libc::EAGAIN => None,
            Err(_) => Some(Err(-result)),
        };
        let Some(result) = outcome else {
            self.place(index);
            return None;
        };
        Some(Completion { id: OpId(index), request: slot.request.take()?, result })
    }

    /// Operations without a completion.
    pub(crate) fn in_flight(&self) -> usize {
        self.places.taken() + self.places.len() + self.helpers.in_flight()
    }

    pub(crate) fn now(&self) -> Duration {
        self.helpers.now()
    }

    pub(crate) fn syscalls(&self) -> u64 {
        self.calls + self.helpers.syscalls()
    }

    /// The ring's descriptor.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    pub(crate) fn watch(&mut self) {
        if self.watched == Watched::No {
            let signal = self.notifier.signal().as_raw_fd();
            let registered = self.ring.submitter().register_eventfd(signal).is_ok();
            self.watched = if registered { Watched::ByKernel } else { Watched::ByHand };
            self.signal_on();
        }
    }

    /// Begins a turn: whatever made the signal readable is looked at now.
    pub(crate) fn signal_off(&mut self) {
        if self.watched == Watched::ByKernel {
            self.ring.completion().disable_eventfd();
        }
    }

    /// Ends a turn: what comes from now on makes the signal readable, as does what came already.
    pub(crate) fn signal_on(&mut self) {
        if self.watched == Watched::No {
            return;
        }
        self.ring.completion().enable_eventfd();
        // Either the kernel sees the signal on, or the completion is seen here.
        fence(Ordering::SeqCst);
        let by_hand = self.watched == Watched::ByHand && self.in_flight() + self.sockets.in_ring() > 0;
        if by_hand
            || !self.ring.completion().is_empty()
            || self.kernel_has_work()
            || self.helpers.has_completions()
            || self.sockets.has_completions()
        {
            self.notifier.raise_signal();
        }
    }

    /// Whether the kernel keeps completions back until it is asked for them.
    fn kernel_has_work(&mut self) -> bool {
        let submission = self.ring.submission();
        submission.taskrun() || submission.cq_overflow()
    }

    /// Registers memory for `ReadFixed` and `WriteFixed`, if the kernel lets us. Only worth it for memory that is
    /// used often: the kernel keeps it locked as long as the ring lives.
    pub(crate) fn register_buffer(&mut self, start: *mut u8, len: usize) -> Option<FixedBuffer> {
        if !self.can_register_buffers || self.buffers == BUFFERS {
            return None;
        }
        let vector = libc::iovec { iov_base: start.cast(), iov_len: len };
        // SAFETY: the kernel only pins the pages. The index is used for memory of this allocation only, through
        // requests that own it.
        let registered =
            unsafe { self.ring.submitter().register_buffers_update(self.buffers, &[vector], None) };
        if registered.is_err() {
            // The limit on locked memory: it will not get better.
            self.can_register_buffers = false;
            return None;
        }
        let index = self.buffers as u16;
        self.buffers += 1;
        Some(FixedBuffer { ring: self.number, index })
    }

    /// Drops the ring's reference to a closed file.
    fn forget_file(&mut self, number: u64) {
        if let Some(place) = self.files.places.remove(&number) {
            if self.files.latest.0 == number {
                self.files.latest = (0, 0);
            }
            if self.ring.submitter().register_files_update(place, &[-1]).is_ok() {
                self.files.free.push(place);
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The worker has driven everything to its end; but if a panic came in between, the kernel may still write to
        // buffers, which must not be freed before it is done.
        self.places.clear();
        let mut done = Vec::new();
        self.sockets.cancel_all(&mut self.ring);
        while self.places.taken() + self.sockets.in_ring() > 0 {
            self.enter(Wait::Forever);
            self.reap(&mut done);
            self.places.clear();
        }
        self.sockets.leave_commands();
    }
}

/// Lets the kernel have a thread for each operation of the ring that blocks.
///
/// By itself it has four for each processor, and all stand still with the disk of a few syncs.
/// It makes one only when the others are busy, and ends those that are not.
fn have_threads(ring: &IoUring, most: u32) {
    // The second number is of sockets' threads; none leaves it as it is. Kernels before 5.15 know neither.
    let mut threads = [0, 0];
    let known = ring.submitter().register_iowq_max_workers(&mut threads).is_ok();
    if known && threads[0] < most {
        // Without it, fewer disks can stand still.
        let _ = ring.submitter().register_iowq_max_workers(&mut [most, 0]);
    }
}

/// A ring with as many of the wished-for properties as the kernel has, not enabled yet.
fn build(entries: u32, submitter: Submitter) -> io::Result<IoUring> {
    if submitter == Submitter::Maker {
        let mut builder = IoUring::builder();
        builder.setup_r_disabled().setup_submit_all().setup_clamp();
        // 6.1: completions are processed in this thread, when it asks; and nobody else submits.
        builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        match builder.build(entries) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            result => return result,
        }
    }
    // 5.19: completions do not interrupt this thread.
    let mut builder = IoUring::builder();
    builder.setup_r_disabled().setup_submit_all().setup_clamp().setup_coop_taskrun().setup_taskrun_flag();
    match builder.build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().setup_r_disabled().setup_clamp().build(entries)
        }
        result => result,
    }
}

fn target_of(files: &mut FileTable, ring: &IoUring, file: &File) -> Target {
    let number = file.rings().number();
    if files.latest.0 == number {
        return Target::Registered(Fixed(files.latest.1));
    }
    let descriptor = file.os().map_or(-1, |os| os.raw_fd());
    if let Some(&place) = files.places.get(&number) {
        files.latest = (number, place);
        return Target::Registered(Fixed(place));
    }
    if !files.usable {
        return Target::Descriptor(Fd(descriptor));
    }
    let Some(place) = files.free.pop() else { return Target::Descriptor(Fd(descriptor)) };
    if ring.submitter().register_files_update(place, &[descriptor]).is_err() {
        files.free.push(place);
        files.usable = false;
        return Target::Descriptor(Fd(descriptor));
    }
    files.places.insert(number, place);
    files.latest = (number, place);
    file.rings().add(&files.closed);
    Target::Registered(Fixed(place))
}

/// Whether this is a long read through the page cache. The ring would try it in this thread, again and again as
/// read-ahead brings the pages in, a few at a time; a thread of the kernel's (io-wq) reads it in one go.
fn is_long_cached_read(request: &OpRequest, done: usize) -> bool {
    matches!(request.kind, OpKind::Read)
        && !request.file.is_direct()
        && request.bufs.len() - done >= LONG_CACHED_READ
}

/// Checks that the kernel gets what O_DIRECT asks for.
#[cfg(debug_assertions)]
fn assert_aligned(request: &OpRequest, done: usize) {
    for buf in &request.bufs.0 {
        if let Some(region) = buf.region() {
            assert!(
                (region.start().as_ptr() as usize).is_multiple_of(crate::memory::PAGE),
                "own buffers are page-aligned"
            );
        }
    }
    if !request.file.is_direct() || !matches!(request.kind, OpKind::Read | OpKind::Write) {
        return;
    }
    let need = request.file.alignment();
    let at = request.offset + done as u64;
    assert!(at.is_multiple_of(need.offset.into()), "offset {at} of a direct request, {need:?}");
    for buf in &request.bufs.0 {
        let (address, len) = (buf.as_ptr() as usize, buf.len());
        assert!(
            address.is_multiple_of(need.memory as usize),
            "address {address:#x} of a direct request, {need:?}"
        );
        assert!(len.is_multiple_of(need.length as usize), "length {len} in a direct request, {need:?}");
    }
}
