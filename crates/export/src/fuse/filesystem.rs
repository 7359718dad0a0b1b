//! The file and what the kernel asks of it.

use super::device::{Answer, Arrival, Requests};
use super::extents::{Wanted, seek};
use super::wire::{self, Ask, Attributes, Request};
use crate::export::Export;
use crate::inflight_limit::{InflightLimit, Load};
use crate::log::{Level, Log};
use crate::memory_budget::Account;
use crate::metrics::RequestKind;
use crate::pool::{PoolHandle, Seat};
use crate::stop::Stop;
use rustix::io::Errno;
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use zebu_engine::{Access, Durability, ErrorKind, Format, Image, ZeroMode};
use zebu_storage::{IoBuf, Socket};

/// Bytes of data in flight; the kernel's further requests wait.
const MAX_BYTES: u64 = 64 << 20;
/// How long the kernel may believe what it was told of the file.
const TTL: Duration = Duration::from_secs(1);
/// Requests that are taken before what they set going has its turn.
const BATCH: usize = 64;
/// Access mode in the flags of open(2).
const ACCESS_MODE: u32 = 3;
/// fallocate's modes (fallocate(2)).
const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 16;
/// lseek's (lseek(2)).
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// Why a file is no longer served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// It was told to stop, or could not go on.
    Stopped,
    /// It was unmounted.
    Unmounted,
}

/// An image as a file.
pub(super) struct ImageFile {
    export: Arc<Export>,
    pool: PoolHandle,
    threads: usize,
    owner: (u32, u32),
    since: SystemTime,
    log: Log,
}

impl ImageFile {
    pub(super) fn new(export: &Arc<Export>, pool: &PoolHandle, threads: usize, log: &Log) -> Self {
        let owner = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let (export, pool, log) = (Arc::clone(export), pool.clone(), log.clone());
        Self { export, pool, threads, owner, since: SystemTime::now(), log }
    }

    /// Does what the kernel asks until the file is unmounted, or until it is told to stop. Requests that it took may go on
    /// afterwards.
    pub(super) async fn serve(self, seat: Seat, device: Socket, account: Account, stop: Stop) -> Ended {
        let (export, log) = (Arc::clone(&self.export), self.log.clone());
        self.serve_until(seat, device, account, stop).await.unwrap_or_else(|error| {
            let name = export.name();
            log.write(Level::Error, format_args!("the file of '{name}' can't be served: {error}"));
            Ended::Stopped
        })
    }

    async fn serve_until(
        self,
        seat: Seat,
        device: Socket,
        account: Account,
        stop: Stop,
    ) -> io::Result<Ended> {
        let mut requests = Requests::new(&seat.worker, &device)?;
        let limit = InflightLimit::new(Load { requests: usize::MAX, bytes: MAX_BYTES }, account);
        let server = FileServer { file: self, seat, limit: Arc::new(limit), next: Cell::new(0) };
        // What is taken and waits for memory in the end is answered with an error.
        // Where more is always there, `or` would never look at the switch.
        while !stop.is_thrown() {
            match stop.or(server.take_some(&mut requests)).await.transpose()? {
                Some(true) => {}
                Some(false) => return Ok(Ended::Unmounted),
                None => break,
            }
            match stop.or(requests.wait()).await {
                Some(result) => result?,
                None => break,
            }
        }
        Ok(Ended::Stopped)
    }

    fn is_read_only(&self) -> bool {
        self.export.access() == Access::ReadOnly
    }

    fn size(&self) -> u64 {
        self.export.image().virtual_size()
    }

    fn attributes(&self) -> Vec<u8> {
        let image = self.export.image();
        let size = image.virtual_size();
        let attributes = Attributes {
            size,
            allocated: allocated(&image).min(size),
            permissions: if self.is_read_only() { 0o400 } else { 0o600 },
            owner: self.owner,
            time: self.since,
            block_size: u32::try_from(image.cluster_size()).unwrap_or(65536),
        };
        wire::attributes(&attributes, TTL)
    }
}

/// Takes requests, on one worker.
struct FileServer {
    file: ImageFile,
    seat: Seat,
    limit: Arc<InflightLimit>,
    /// The thread for the next request.
    next: Cell<usize>,
}

impl FileServer {
    /// Takes what there is; false at the end.
    async fn take_some(&self, requests: &mut Requests) -> Result<bool, Errno> {
        for _ in 0..BATCH {
            match requests.take()? {
                Arrival::None => break,
                Arrival::End => return Ok(false),
                Arrival::Request(request, data, memory) => {
                    let answer = Answer::to(requests, request);
                    self.start(request, answer, data, memory).await;
                }
            }
        }
        Ok(true)
    }

    async fn start(&self, Request { ask, .. }: Request, answer: Answer, mut data: IoBuf, memory: u64) {
        let file = &self.file;
        match ask {
            Ask::Forget => answer.none(),
            Ask::Close => answer.ok(&[]),
            Ask::Unknown => answer.error(Errno::NOSYS),
            Ask::GetAttr => answer.ok(&file.attributes()),
            Ask::SetAttr { size, others } => {
                // A disk keeps its size, and its owner; times come with every write and mean nothing.
                if others || size.is_some_and(|size| size != file.size()) {
                    answer.error(Errno::PERM);
                } else {
                    answer.ok(&file.attributes());
                }
            }
            Ask::Statfs => answer.ok(&wire::statfs(file.size())),
            Ask::Open { flags } if file.is_read_only() && flags & ACCESS_MODE != 0 => {
                answer.error(Errno::ROFS);
            }
            // The page cache holds the image already, or is not wanted (O_DIRECT); other clients write, too.
            Ask::Open { .. } => answer.ok(&wire::opened()),
            Ask::Read { offset, len } => {
                let len = u64::from(len).min(file.size().saturating_sub(offset));
                if len == 0 {
                    answer.ok(&[]);
                    return;
                }
                let work = move |job: Job| job.read(answer, offset, len);
                self.run(RequestKind::Read, len, work).await;
            }
            Ask::Write { .. } | Ask::Fallocate { .. } if file.is_read_only() => answer.error(Errno::ROFS),
            Ask::Write { len, .. } if data.len() != len as usize => answer.error(Errno::INVAL),
            Ask::Write { offset, .. } => {
                // Of what crosses the end, a disk takes what fits (write(2)).
                let fits = file.size().saturating_sub(offset);
                if (1..data.len() as u64).contains(&fits) {
                    data = data.split_to(fits as usize);
                }
                let work = move |job: Job| job.write(answer, offset, data);
                self.run(RequestKind::Write, memory, work).await;
            }
            Ask::Sync => self.run(RequestKind::Flush, 0, move |job: Job| job.flush(answer)).await,
            Ask::Fallocate { offset, len, mode } => self.fallocate(answer, offset, len, mode).await,
            Ask::Seek { offset, whence } => {
                let wanted = match whence {
                    SEEK_DATA => Wanted::Data,
                    SEEK_HOLE => Wanted::Hole,
                    _ => return answer.error(Errno::INVAL),
                };
                self.run(RequestKind::Other, 0, move |job: Job| job.seek(answer, offset, wanted)).await;
            }
        }
    }

    async fn fallocate(&self, answer: Answer, offset: u64, len: u64, mode: i32) {
        let size = self.file.size();
        let is_within = offset.checked_add(len).is_some_and(|end| end <= size);
        let (kind, zero_mode) = match mode {
            m if m == PUNCH_HOLE | KEEP_SIZE => (RequestKind::Discard, ZeroMode::Unmap),
            m if m & !KEEP_SIZE == ZERO_RANGE => (RequestKind::WriteZeroes, ZeroMode::Keep),
            // To set space aside for data that is there already is nothing that an image can do.
            _ => return answer.error(Errno::OPNOTSUPP),
        };
        // Holes past the end are there already; a disk does not grow.
        let len = match (is_within, mode & KEEP_SIZE != 0) {
            (true, _) => len,
            (false, true) => len.min(size.saturating_sub(offset)),
            (false, false) => return answer.error(Errno::NOSPC),
        };
        if len == 0 {
            return answer.ok(&[]);
        }
        self.run(kind, 0, move |job: Job| job.zero(answer, offset, len, zero_mode)).await;
    }

    /// Runs `work` on one of the workers. `bytes` of memory are taken for it.
    async fn run<F: Future<Output = ()> + 'static>(
        &self,
        kind: RequestKind,
        bytes: u64,
        work: impl FnOnce(Job) -> F + Send + 'static,
    ) {
        if self.file.export.is_closed() {
            // Dropped, the work answers with an error.
            return;
        }
        let share = Share { load: self.limit.enter(bytes).await, limit: Arc::clone(&self.limit) };
        let thread = self.next.get() % self.file.threads;
        self.next.set(thread + 1);
        let (export, since) = (Arc::clone(&self.file.export), Instant::now());
        let begin = move |seat: Seat| {
            export.metrics().start(seat.thread);
            let job = Job { export, seat, kind, since, _share: share };
            async move {
                job.export.admit(&job.seat.worker, kind, bytes).await;
                work(job).await;
            }
        };
        if thread == self.seat.thread {
            drop(self.seat.worker.spawn(begin(self.seat.clone())));
        } else {
            self.file.pool.spawn_on(thread, begin);
        }
    }
}

/// Room for a request, given back when this is dropped.
struct Share {
    limit: Arc<InflightLimit>,
    load: Load,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.limit.leave(self.load);
    }
}

/// A request under way.
struct Job {
    export: Arc<Export>,
    seat: Seat,
    kind: RequestKind,
    since: Instant,
    _share: Share,
}

impl Drop for Job {
    fn drop(&mut self) {
        self.export.close_if_panicking();
    }
}

impl Job {
    fn image(&self) -> Image {
        self.export.image()
    }

    async fn read(self, answer: Answer, offset: u64, len: u64) {
        let bufs = self.seat.worker.buffer(len as usize).into();
        let (result, bufs) = self.export.read(&self.seat.worker, offset, bufs).await;
        match self.end(len, result) {
            Ok(()) => answer.data(&bufs),
            Err(errno) => answer.error(errno),
        }
    }

    async fn write(self, answer: Answer, offset: u64, data: IoBuf) {
        let len = data.len();
        let result = self.image().write(&self.seat.worker, offset, data.into(), Durability::Volatile).await.0;
        match self.end(len as u64, result) {
            Ok(()) => answer.ok(&wire::written(len as u32)),
            Err(errno) => answer.error(errno),
        }
    }

    async fn flush(self, answer: Answer) {
        let result = self.export.flush(&self.seat.worker).await;
        self.finish(answer, 0, result);
    }

    async fn zero(self, answer: Answer, offset: u64, len: u64, mode: ZeroMode) {
        let result = self.image().write_zeroes(&self.seat.worker, offset, len, mode).await;
        self.finish(answer, len, result);
    }

    async fn seek(self, answer: Answer, offset: u64, wanted: Wanted) {
        let result = seek(&self.image(), &self.seat.worker, offset, wanted).await;
        match self.end(0, result) {
            Ok(Some(at)) => answer.ok(&at.to_ne_bytes()),
            Ok(None) => answer.error(Errno::NXIO),
            Err(errno) => answer.error(errno),
        }
    }

    fn finish(&self, answer: Answer, len: u64, result: zebu_engine::Result<()>) {
        match self.end(len, result) {
            Ok(()) => answer.ok(&[]),
            Err(errno) => answer.error(errno),
        }
    }

    /// Counts the request, and puts an error into the kernel's words.
    fn end<T>(&self, len: u64, result: zebu_engine::Result<T>) -> Result<T, Errno> {
        self.export.metrics().end(self.seat.thread, self.kind, len, result.is_ok(), self.since.elapsed());
        result.map_err(|error| match (error.kind(), error.errno()) {
            (ErrorKind::OutOfRange, _) => Errno::NOSPC,
            (_, errno @ 1..=4095) => Errno::from_raw_os_error(errno),
            _ => Errno::IO,
        })
    }
}

/// Bytes of disk that the image takes.
fn allocated(image: &Image) -> u64 {
    let own = image.info().map_or(u64::MAX, |info| info.actual_size);
    // What comes from backing files counts as well; programs only look whether it is less than the size.
    match (image.format(), image.backing()) {
        (Format::Raw | Format::Luks, _) | (_, None) => own,
        (_, Some(backing)) => own.saturating_add(backing.info().map_or(u64::MAX, |i| i.actual_size)),
    }
}
