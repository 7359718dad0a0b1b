//! Copying what is about to be changed: the disk as it was at one moment, while guests go on to write.
//!
//! As long as a [`CopyBeforeWrite`] is set on an image, every request that changes the image first has the chunks copied
//! that it touches and that were not copied yet; it waits for that copy only. The disk is dealt with in chunks. One is
//! *to do*, *busy* (one task reads and writes it, others that need it wait), or *done*; once it is done, it may change.

use super::frozen_bitmap::{Copied, FrozenBitmap, LiveBitmap};
use crate::before_change::HookOf;
use crate::compress::Bursts;
use crate::image::Clusters;
use crate::jobs::convert::TargetClusters;
use crate::jobs::fate::Fate;
use crate::jobs::pace::{Kind, Pace};
use crate::node::Node;
use crate::qcow2::bitmaps::{BackupEnd, Bits};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard, WaitList};
use crate::{Durability, Error, ErrorKind, Image, Result, ZeroMode};
use futures_util::future::join;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;
use zebu_storage::{IoBuf, IoBufs, Worker};

/// The effect of a failure to copy on the request that wanted to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnCopyError {
    /// Nothing: the backup fails, the guest goes on.
    #[default]
    FailBackup,
    /// The guest's request fails, the backup goes on.
    FailRequest,
}

/// The content of the copy where nothing was written into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beneath {
    Zeroes,
    /// An earlier copy.
    Earlier,
}

/// A copy of a disk as it was at one moment, while guests change the disk.
pub(super) struct CopyBeforeWrite {
    pub(super) source: Arc<Node>,
    target: Image,
    /// Bytes of the disk at the moment that is copied.
    pub(super) size: u64,
    /// Bytes of a chunk: whole clusters of the target.
    pub(super) chunk: u64,
    clusters: TargetClusters,
    beneath: Beneath,
    on_error: OnCopyError,
    /// Copies in flight at most, each with a buffer of a chunk.
    most_copies: usize,
    pub(super) pace: Pace,
    chunks: Mutex<Chunks>,
    /// Bytes that are dealt with.
    done: AtomicU64,
    /// Bytes that were copied because a guest was about to change them.
    for_guests: AtomicU64,
    frozen: Option<FrozenBitmap>,
    fate: Fate,
}

impl std::fmt::Debug for CopyBeforeWrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CopyBeforeWrite").field("target", &self.target.path()).finish_non_exhaustive()
    }
}

struct Chunks {
    done: Bits,
    /// The busy ones, from first to end.
    busy: BTreeMap<u64, u64>,
    copies: usize,
    waiting: WaitList,
}

impl Chunks {
    /// Of a disk of `size` bytes in chunks of `chunk`: all are to do, or those that `marked` touches.
    fn new(size: u64, chunk: u64, marked: Option<&Bits>) -> Self {
        let chunk_bits = chunk.trailing_zeros() as u8;
        let done = Bits::new(size, chunk_bits);
        if let Some(marked) = marked {
            let to_do = Bits::new(size, chunk_bits);
            to_do.merge(marked);
            let mut at = 0;
            while at < size {
                let (is_to_do, end) = to_do.run_at(at);
                if !is_to_do {
                    done.mark(at..end);
                }
                at = end;
            }
        }
        Self { done, busy: BTreeMap::new(), copies: 0, waiting: WaitList::default() }
    }

    fn is_busy(&self, chunk: u64) -> bool {
        self.busy.range(..=chunk).next_back().is_some_and(|(_, end)| chunk < *end)
    }
}

/// The chunks of a range, by the mapping.
pub(super) struct Survey {
    /// The chunks that have to be copied.
    pub(super) wanted: Vec<u64>,
    /// Bytes of the others.
    pub(super) settled: u64,
    /// The chunk behind them all.
    pub(super) behind: u64,
}

/// Chunks that one task deals with; those that are not done when it is dropped are to do again.
struct Claim<'a> {
    copy: &'a CopyBeforeWrite,
    chunks: Range<u64>,
    holds_buffer: bool,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut chunks = self.copy.chunks();
        chunks.busy.remove(&self.chunks.start);
        if self.holds_buffer {
            chunks.copies -= 1;
        }
        let waiting = chunks.waiting.take();
        drop(chunks);
        waiting.wake();
    }
}

/// The one who waits for the copy of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyFor {
    /// A guest's request: the copy keeps to no pace.
    Guest,
    Backup,
}

/// How a copy is set up.
pub(super) struct CopySetup {
    pub(super) target: Image,
    pub(super) chunk: u64,
    pub(super) clusters: TargetClusters,
    pub(super) on_error: OnCopyError,
    pub(super) most_copies: usize,
    pub(super) bitmap: Option<LiveBitmap>,
    pub(super) pace: Pace,
}

impl CopyBeforeWrite {
    /// Takes the disk as it is when all requests that change it and have begun are done. What changes the source's
    /// metadata must not be left half-way: the caller runs this to its end.
    pub(super) async fn start(worker: &Worker, source: &Image, setup: CopySetup) -> Result<Arc<Self>> {
        source.0.while_alone(worker, async || Self::start_alone(worker, source, setup).await).await
    }

    async fn start_alone(worker: &Worker, source: &Image, setup: CopySetup) -> Result<Arc<Self>> {
        let node = &source.0;
        if node.before_change.has(HookOf::Backup) {
            let message = "another backup of this image is under way";
            return Err(Error::new(ErrorKind::Exists, message).on(source.path()));
        }
        let size = source.virtual_size();
        let CopySetup { target, chunk, clusters, on_error, most_copies, bitmap, pace } = setup;
        if target.virtual_size() != size {
            let message =
                format!("the disk has {size} bytes, and that of the copy {}", target.virtual_size());
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(source.path()));
        }
        let beneath = match &bitmap {
            Some(LiveBitmap { copied: Copied::Marked, .. }) => Beneath::Earlier,
            _ => Beneath::Zeroes,
        };
        let frozen = match bitmap {
            Some(bitmap) => Some(FrozenBitmap::take(worker, source, &target, bitmap).await?),
            None => None,
        };
        let marked = frozen.as_ref().filter(|_| beneath == Beneath::Earlier).map(FrozenBitmap::bits);
        let chunks = Chunks::new(size, chunk, marked);
        let done = chunks.done.dirty_bytes();
        let copy = Arc::new(Self {
            source: node.clone(),
            target,
            size,
            chunk,
            clusters,
            beneath,
            frozen,
            on_error,
            most_copies: most_copies.max(1),
            pace,
            chunks: Mutex::new(chunks),
            done: AtomicU64::new(done),
            for_guests: AtomicU64::new(0),
            fate: Fate::default(),
        });
        node.before_change.set(HookOf::Backup, copy.clone(), |copy, worker, range| {
            Box::pin(async move { copy.protect(&worker, range).await })
        });
        Ok(copy)
    }

    /// Marks the copy, which is whole, as the backup that the bitmap goes on from.
    pub(super) async fn mark(&self, worker: &Worker) -> Result<()> {
        match &self.frozen {
            Some(frozen) => frozen.mark(worker, &self.target).await,
            None => Ok(()),
        }
    }

    /// Tells the bitmap what became of the copy, which has ended.
    pub(super) async fn give_back(&self, outcome: BackupEnd) {
        if let Some(frozen) = &self.frozen {
            frozen.give_back(outcome).await;
        }
    }

    /// Lets requests go without copying from now on.
    pub(super) fn end(&self) {
        self.fate.end();
        self.let_go();
    }

    /// Takes its hook away from the image, and wakes who waits for a chunk.
    fn let_go(&self) {
        self.source.before_change.clear(self);
        let waiting = self.chunks().waiting.take();
        waiting.wake();
    }

    /// Waits until no copy is in flight; after the end no further one begins.
    pub(super) async fn idle(&self) {
        poll_fn(|cx| {
            let mut chunks = self.chunks();
            if chunks.copies == 0 {
                return Poll::Ready(());
            }
            chunks.waiting.add(cx.waker());
            Poll::Pending
        })
        .await;
    }

    /// Why the copy can't become whole.
    pub(super) fn failure(&self) -> Option<Error> {
        self.fate.failure()
    }

    /// Ends it because it can't become whole.
    pub(super) fn fail(&self, error: Error) {
        self.fate.fail(error);
        self.let_go();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.fate.has_ended()
    }

    /// Bytes that are dealt with.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Relaxed)
    }

    /// Bytes that were copied because a guest was about to change them.
    pub(super) fn copied_for_guests(&self) -> u64 {
        self.for_guests.load(Relaxed)
    }

    fn chunks(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock()
    }

    /// Has everything copied that a request on `range` is about to change.
    pub(super) async fn protect(self: &Arc<Self>, worker: &Worker, range: Range<u64>) -> Result<()> {
        let end = range.end.min(self.size);
        if range.start >= end {
            return Ok(());
        }
        for chunk in range.start / self.chunk..end.div_ceil(self.chunk) {
            // After the end, it does not wait for a target that does not answer.
            let Some(copied) = self.fate.or(self.copy_chunk(worker, chunk, CopyFor::Guest)).await else {
                return Ok(());
            };
            match copied {
                Ok(0) => {}
                // Nobody wants it any more.
                Err(_) if self.has_ended() => return Ok(()),
                Ok(bytes) => drop(self.for_guests.fetch_add(bytes, Relaxed)),
                Err(error) if self.on_error == OnCopyError::FailRequest => {
                    let message = format!(
                        "the backup to '{}' failed: {}",
                        self.target.path().display(),
                        error.message()
                    );
                    return Err(Error::new(error.kind(), message).with_errno(error.errno()));
                }
                Err(error) => {
                    self.fail(error);
                    return Ok(());
                }
            }
            if self.has_ended() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Copies a chunk if it is still to do; gives the bytes copied. When this returns without an error, the chunk is done, or
    /// everything has ended. The source's own worker does it: other requests may come to wait for the same chunk.
    pub(super) async fn copy_chunk(
        self: &Arc<Self>,
        worker: &Worker,
        chunk: u64,
        who: CopyFor,
    ) -> Result<u64> {
        if self.chunks().done.has(chunk) || self.has_ended() {
            return Ok(0);
        }
        let me = self.clone();
        let copied = move |on: Worker| async move { me.copy_chunk_on(&on, chunk, who).await };
        self.source.own_worker().run(worker, &self.source.path, copied).await
    }

    async fn copy_chunk_on(&self, worker: &Worker, chunk: u64, who: CopyFor) -> Result<u64> {
        let turn = match who {
            CopyFor::Guest => None,
            CopyFor::Backup => Some(self.pace.turn().await),
        };
        let Some(claim) = self.claim(chunk, who).await else { return Ok(0) };
        let start = chunk * self.chunk;
        let len = self.chunk.min(self.size - start);
        let source = Image(self.source.clone());
        let reader = worker.reading_uncached();
        let reading = source.read_source(&reader, start, IoBuf::zeroed(len as usize).into());
        let (read, bufs) = self.pace.timed(Kind::Read, len, reading).await;
        read?;
        let writing = async {
            let bytes = self.write_chunk(worker, start, bufs, who).await?;
            // A guest that waits for the chunk does not wait for the pause.
            self.finish(&claim, chunk..chunk + 1);
            drop(claim);
            Ok(bytes)
        };
        let pause = async {
            if let Some(turn) = turn {
                turn.end(worker).await;
            }
        };
        match self.clusters {
            TargetClusters::Plain => {
                let bytes = writing.await?;
                pause.await;
                Ok(bytes)
            }
            // Packing leaves the disk alone; it is written to behind its back.
            TargetClusters::Compressed => join(writing, pause).await.0,
        }
    }

    /// Writes a chunk into the copy; gives the bytes written.
    async fn write_chunk(&self, worker: &Worker, start: u64, bufs: IoBufs, who: CopyFor) -> Result<u64> {
        let len = bufs.len() as u64;
        if bufs.is_zero() {
            return match self.beneath {
                Beneath::Zeroes => Ok(0),
                Beneath::Earlier => {
                    self.target.write_zeroes(worker, start, len, ZeroMode::Unmap).await.map(|()| len)
                }
            };
        }
        let write = |clusters| self.target.write_as(worker, clusters, start, bufs, Durability::Volatile);
        let (written, _) = match (self.clusters, who) {
            (TargetClusters::Plain, _) => self.pace.timed(Kind::Write, len, write(Clusters::Plain)).await,
            (TargetClusters::Compressed, CopyFor::Guest) => write(Clusters::Compressed(Bursts::Whole)).await,
            (TargetClusters::Compressed, CopyFor::Backup) => {
                write(Clusters::Compressed(self.pace.bursts())).await
            }
        };
        written.map(|()| len)
    }

    fn finish(&self, claim: &Claim<'_>, done: Range<u64>) {
        debug_assert!(claim.chunks.start <= done.start && done.end <= claim.chunks.end);
        self.chunks().done.set_bits(done.clone());
        self.done.fetch_add(self.bytes_of(done), Relaxed);
    }

    /// Waits until a chunk is done, or until it can be dealt with.
    async fn claim(&self, chunk: u64, who: CopyFor) -> Option<Claim<'_>> {
        // One copy is left to guests.
        let most = match who {
            CopyFor::Guest => self.most_copies,
            CopyFor::Backup => (self.most_copies - 1).max(1),
        };
        let mut hurry = None;
        poll_fn(|cx| {
            let mut chunks = self.chunks();
            if chunks.done.has(chunk) || self.has_ended() {
                return Poll::Ready(None);
            }
            if chunks.is_busy(chunk) || chunks.copies >= most {
                chunks.waiting.add(cx.waker());
                drop(chunks);
                if who == CopyFor::Guest && hurry.is_none() {
                    hurry = self.target.hurry_compression();
                }
                return Poll::Pending;
            }
            chunks.busy.insert(chunk, chunk + 1);
            chunks.copies += 1;
            Poll::Ready(Some(Claim { copy: self, chunks: chunk..chunk + 1, holds_buffer: true }))
        })
        .await
    }

    /// Looks at the mapping of chunks from `first` on, at most `most` of them, and marks those done that are known
    /// to be zero. Requests that want to change one of them meanwhile wait for the mapping only.
    pub(super) async fn survey(self: &Arc<Self>, worker: &Worker, first: u64, most: u64) -> Result<Survey> {
        let me = self.clone();
        let looked = move |on: Worker| async move { me.survey_on(&on, first, most).await };
        self.source.own_worker().run(worker, &self.source.path, looked).await
    }

    async fn survey_on(&self, worker: &Worker, first: u64, most: u64) -> Result<Survey> {
        let count = self.size.div_ceil(self.chunk);
        let claim = {
            let mut chunks = self.chunks();
            let next = chunks.done.next_clear(first).unwrap_or(count);
            if next > first {
                return Ok(Survey { wanted: Vec::new(), settled: self.bytes_of(first..next), behind: next });
            }
            let free = |chunks: &Chunks, chunk| !chunks.done.has(chunk) && !chunks.is_busy(chunk);
            let mut end = first;
            while end < count.min(first + most) && free(&chunks, end) {
                end += 1;
            }
            // Somebody else may have it in hand: copying it finds out.
            let has_nothing_to_tell = end == first || self.beneath == Beneath::Earlier;
            if has_nothing_to_tell {
                let behind = end.max(first + 1);
                return Ok(Survey { wanted: (first..behind).collect(), settled: 0, behind });
            }
            chunks.busy.insert(first, end);
            Claim { copy: self, chunks: first..end, holds_buffer: false }
        };
        let source = Image(self.source.clone());
        let end = (claim.chunks.end * self.chunk).min(self.size);
        let start = first * self.chunk;
        let mut extents = source.source_extents(start..end);
        let (mut wanted, mut zero_from) = (Vec::new(), start);
        // Chunks that lie in `zero_from..until` as a whole are done; those that the data behind it touches are not.
        let settle = |from: u64, until: u64| {
            let first = from.div_ceil(self.chunk);
            let last = if until >= self.size { count } else { until / self.chunk };
            if first < last {
                self.finish(&claim, first..last);
            }
        };
        while let Some(extent) = extents.next(worker).await? {
            if !extent.is_zero() {
                settle(zero_from, extent.offset);
                for chunk in extent.offset / self.chunk..extent.end().div_ceil(self.chunk) {
                    if wanted.last().is_none_or(|last| *last < chunk) {
                        wanted.push(chunk);
                    }
                }
                zero_from = extent.end();
            }
        }
        settle(zero_from, end);
        let to_copy: u64 = wanted.iter().map(|&chunk| self.bytes_of(chunk..chunk + 1)).sum();
        let settled = self.bytes_of(claim.chunks.clone()) - to_copy;
        Ok(Survey { wanted, settled, behind: claim.chunks.end })
    }

    /// Bytes of chunks; the disk's end may cut the last one short.
    pub(super) fn bytes_of(&self, chunks: Range<u64>) -> u64 {
        (chunks.end * self.chunk).min(self.size) - chunks.start * self.chunk
    }
}
