//! One disk as it was at the moment of a checkpoint, while guests change it.
//!
//! Before a request changes the disk, the chunks that it touches are kept, each once: a chunk is *as it was*, *busy* (one
//! task keeps it, others that need it wait) or *kept*. Once it is kept, it may change. A chunk that was zero is kept without a byte.

use super::spill::{Kept, Part, Spill};
use crate::before_change::HookOf;
use crate::jobs::fate::Fate;
use crate::node::Node;
use crate::qcow2::bitmaps::Bits;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::sync::{Mutex, WaitList};
use crate::{Error, ErrorKind, Image, Result};
use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBuf, IoBufs, Worker};

/// Bytes of a chunk.
pub(super) const CHUNK: u64 = 1 << CHUNK_BITS;
const CHUNK_BITS: u8 = 16;
/// Chunks that are in hand for one request at once.
const MOST_AT_ONCE: u64 = 1024;
/// Chunks whose bytes are in memory on their way into the spill.
const MOST_COPIES: usize = 64;
/// Chunks that one look at the states tells of.
const LOOK: u64 = 4096;

/// The disk of an image as it was.
pub(super) struct Frozen {
    pub(super) source: Arc<Node>,
    /// Bytes of the disk at the moment.
    pub(super) size: u64,
    chunks: Mutex<Chunks>,
    spill: Arc<Spill>,
    pub(super) fate: Arc<Fate>,
    /// Bytes that were kept because a guest was about to change them, zeroes included.
    copied: AtomicU64,
}

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frozen")
            .field("source", &self.source.path)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

struct Chunks {
    kept: Bits,
    /// Where the bytes of those are that were not zero.
    places: HashMap<u64, Kept>,
    /// The busy ones, from first to end.
    busy: BTreeMap<u64, u64>,
    copies: usize,
    waiting: WaitList,
}

/// The state of neighbours that are alike.
enum Run {
    /// They are as they were.
    AsItWas,
    /// They were zero, and are kept.
    Zero,
    /// One that is kept.
    Kept(Kept),
}

impl Chunks {
    fn is_busy(&self, chunk: u64) -> bool {
        self.busy.range(..=chunk).next_back().is_some_and(|(_, end)| chunk < *end)
    }

    /// The state of the chunks from `first` on, and where the run of those like it ends, `end` at most.
    fn run(&self, first: u64, end: u64) -> (Run, u64) {
        let end = end.min(first + LOOK);
        if let Some(kept) = self.places.get(&first) {
            return (Run::Kept(kept.clone()), first + 1);
        }
        let end = self.kept.alike_until(first, end);
        if !self.kept.has(first) {
            return (Run::AsItWas, end);
        }
        let zeroes = (first..end).take_while(|chunk| !self.places.contains_key(chunk)).count() as u64;
        (Run::Zero, first + zeroes)
    }
}

/// Chunks that one task has in hand; those that are not kept when it is dropped are as they were.
struct Claim<'a> {
    disk: &'a Frozen,
    chunks: Range<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut chunks = self.disk.chunks.lock();
        chunks.busy.remove(&self.chunks.start);
        chunks.copies -= 1;
        let waiting = chunks.waiting.take();
        drop(chunks);
        waiting.wake();
    }
}

impl Frozen {
    /// The disk of `source` as it is now. The caller is alone with it.
    pub(super) fn take(source: &Image, spill: &Arc<Spill>, fate: &Arc<Fate>) -> Arc<Self> {
        let size = source.virtual_size();
        let frozen = Arc::new(Self {
            source: source.0.clone(),
            size,
            chunks: Mutex::new(Chunks {
                kept: Bits::new(size, CHUNK_BITS),
                places: HashMap::new(),
                busy: BTreeMap::new(),
                copies: 0,
                waiting: WaitList::default(),
            }),
            spill: spill.clone(),
            fate: fate.clone(),
            copied: AtomicU64::new(0),
        });
        source.0.before_change.set(HookOf::Checkpoint, frozen.clone(), |frozen, worker, range| {
            Box::pin(async move { frozen.protect(&worker, range).await })
        });
        frozen
    }

    /// Takes its hook away from the image, and gives up what was kept: the checkpoint has ended. Guests don't even ask any more, and
    /// whoever reads is told of the end.
    pub(super) fn let_go(&self) {
        self.source.before_change.clear(self);
        let (waiting, places) = {
            let mut chunks = self.chunks.lock();
            (chunks.waiting.take(), std::mem::take(&mut chunks.places))
        };
        waiting.wake();
        drop(places);
    }

    /// Bytes that were kept because a guest was about to change them, zeroes included.
    pub(super) fn copied(&self) -> u64 {
        self.copied.load(Relaxed)
    }

    /// Keeps what a request is about to change. It fails for no reason of the checkpoint's: that ends instead.
    async fn protect(self: &Arc<Self>, worker: &Worker, range: Range<u64>) -> Result<()> {
        let end = range.end.min(self.size);
        if range.start >= end || self.fate.has_ended() {
            return Ok(());
        }
        let wanted = range.start / CHUNK..end.div_ceil(CHUNK);
        if self.are_kept(&wanted) {
            return Ok(());
        }
        let me = self.clone();
        if sabotage::is(Fault::KeepAfterWrite) {
            let on = worker.uncounted();
            drop(worker.spawn(async move { me.keep(&on, wanted).await }));
            return Ok(());
        }
        let keeping = move |on: Worker| async move {
            me.keep(&on, wanted).await;
            Ok(())
        };
        // The source's own worker does it: other requests may come to wait for the same chunk.
        let kept = self.source.own_worker().run(worker, &self.source.path, keeping);
        if let Some(Err(error)) = self.fate.or(kept).await {
            self.fate.fail(error);
        }
        match self.fate.failure() {
            Some(error) if sabotage::is(Fault::FailGuestForSpill) => Err(error),
            _ => Ok(()),
        }
    }

    fn are_kept(&self, wanted: &Range<u64>) -> bool {
        self.chunks.lock().kept.are_marked(&(wanted.start * CHUNK..wanted.end * CHUNK))
    }

    async fn keep(&self, worker: &Worker, wanted: Range<u64>) {
        let mut next = wanted.start;
        while next < wanted.end {
            let Some(claim) = self.claim(next..wanted.end).await else {
                if self.fate.has_ended() {
                    return;
                }
                next += 1;
                continue;
            };
            next = claim.chunks.end;
            if let Err(error) = self.keep_claimed(worker, &claim).await {
                return self.fate.fail(error);
            }
        }
    }

    /// Waits until the first of `wanted` is kept, or until it and those behind it that are free are in hand.
    async fn claim(&self, wanted: Range<u64>) -> Option<Claim<'_>> {
        poll_fn(|cx| {
            let mut chunks = self.chunks.lock();
            let first = wanted.start;
            if chunks.kept.has(first) || self.fate.has_ended() {
                return Poll::Ready(None);
            }
            let is_busy = chunks.is_busy(first);
            if is_busy && sabotage::is(Fault::WriteBesideKeeping) {
                return Poll::Ready(None);
            }
            if is_busy || chunks.copies >= MOST_COPIES {
                chunks.waiting.add(cx.waker());
                return Poll::Pending;
            }
            let is_free = |chunk: &u64| !chunks.kept.has(*chunk) && !chunks.is_busy(*chunk);
            let end = wanted.end.min(first + MOST_AT_ONCE);
            let count = (first..end).take_while(is_free).count() as u64;
            chunks.busy.insert(first, first + count);
            chunks.copies += 1;
            Poll::Ready(Some(Claim { disk: self, chunks: first..first + count }))
        })
        .await
    }

    async fn keep_claimed(&self, worker: &Worker, claim: &Claim<'_>) -> Result<()> {
        let source = Image(self.source.clone());
        let worker = &worker.reading_uncached();
        let mut chunk = claim.chunks.start;
        while chunk < claim.chunks.end && !self.fate.has_ended() {
            let zeroes = if claim.chunks.end - chunk > 1 {
                self.zero_chunks(worker, &source, chunk..claim.chunks.end).await?
            } else {
                0
            };
            if zeroes > 0 {
                self.finish(chunk..chunk + zeroes, None);
                chunk += zeroes;
                continue;
            }
            let bytes = self.bytes_of(chunk..chunk + 1);
            let buf = IoBuf::zeroed((bytes.end - bytes.start) as usize);
            let (read, bufs) = source.read(worker, bytes.start, buf.into()).await;
            read?;
            let kept = if bufs.is_zero() { None } else { Some(self.spill.keep(worker, bufs).await?) };
            self.finish(chunk..chunk + 1, kept);
            chunk += 1;
        }
        Ok(())
    }

    /// How many chunks, from the first of `chunks` on, are zero by the mapping.
    async fn zero_chunks(&self, worker: &Worker, source: &Image, chunks: Range<u64>) -> Result<u64> {
        let bytes = self.bytes_of(chunks.clone());
        let extent = source.extent(worker, bytes.start, bytes.end - bytes.start).await?;
        if !extent.is_zero() {
            return Ok(0);
        }
        let end = if extent.end() >= bytes.end { chunks.end } else { extent.end() / CHUNK };
        Ok(end.saturating_sub(chunks.start))
    }

    fn finish(&self, done: Range<u64>, kept: Option<Kept>) {
        let bytes = self.bytes_of(done.clone());
        let mut chunks = self.chunks.lock();
        if let Some(kept) = kept.filter(|_| !self.fate.has_ended()) {
            chunks.places.insert(done.start, kept);
        }
        chunks.kept.set_bits(done);
        let waiting = chunks.waiting.take();
        drop(chunks);
        self.copied.fetch_add(bytes.end - bytes.start, Relaxed);
        waiting.wake();
    }

    /// Bytes of chunks; the disk's end may cut the last one short.
    fn bytes_of(&self, chunks: Range<u64>) -> Range<u64> {
        chunks.start * CHUNK..(chunks.end * CHUNK).min(self.size)
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.size) {
            return Ok(());
        }
        let message = format!("{len} bytes reach past the end of the disk at {}", self.size);
        Err(Error::new(ErrorKind::OutOfRange, message).on(&self.source.path).at_guest(offset))
    }

    /// Fails if the checkpoint has ended.
    fn check_end(&self) -> Result<()> {
        if !self.fate.has_ended() {
            return Ok(());
        }
        let why = self.fate.failure().map_or_else(String::new, |error| format!(": {}", error.message()));
        Err(Error::new(ErrorKind::Cancelled, format!("the checkpoint has ended{why}")))
    }

    fn run(&self, offset: u64, end: u64) -> (Run, u64) {
        let (run, last) = self.chunks.lock().run(offset / CHUNK, end.div_ceil(CHUNK));
        (run, (last * CHUNK).min(end))
    }

    /// Reads the disk as it was.
    pub(super) async fn read(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        let len = bufs.len() as u64;
        if let Err(error) = self.check_range(offset, len).and_then(|()| self.check_end()) {
            return (Err(error), bufs);
        }
        let worker = &worker.reading_uncached();
        let (mut rest, mut read) = (bufs, IoBufs::new());
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (run, until) = self.run(at, end);
            let mut part = rest.split_to((until - at) as usize);
            let result = match run {
                Run::Zero => {
                    part.fill(0, (until - at) as usize, 0);
                    Ok(())
                }
                Run::Kept(kept) => {
                    let from = (at % CHUNK) as usize;
                    let piece = Part { from, len: (until - at) as usize, at: 0 };
                    self.spill.read(worker, &kept, piece, &mut part).await
                }
                Run::AsItWas => {
                    let result;
                    (result, part) = self.read_source(worker, at, part).await;
                    result
                }
            };
            read.append(part);
            if let Err(error) = result {
                read.append(rest);
                return (Err(error), read);
            }
            at = until;
        }
        // What a guest was let to write at the end may have been read.
        let ended = if sabotage::is(Fault::ReadPastCheckpoint) { Ok(()) } else { self.check_end() };
        (ended, read)
    }

    /// Reads from the image what was as it was, and then from the spill what is not any more: a chunk changes after it is kept.
    async fn read_source(&self, worker: &Worker, offset: u64, part: IoBufs) -> (Result<()>, IoBufs) {
        let (result, mut part) = Image(self.source.clone()).read(worker, offset, part).await;
        if let Err(error) = result {
            return (Err(error), part);
        }
        if sabotage::is(Fault::TrustSourceRead) {
            return (Ok(()), part);
        }
        let (mut at, end) = (offset, offset + part.len() as u64);
        while at < end {
            let (run, until) = self.run(at, end);
            let (to, len) = ((at - offset) as usize, (until - at) as usize);
            match run {
                Run::AsItWas => {}
                Run::Zero => part.fill(to, len, 0),
                Run::Kept(kept) => {
                    let piece = Part { from: (at % CHUNK) as usize, len, at: to };
                    if let Err(error) = self.spill.read(worker, &kept, piece, &mut part).await {
                        return (Err(error), part);
                    }
                }
            }
            at = until;
        }
        (Ok(()), part)
    }

    /// The run from `offset` on that was data, or zeroes: its bytes, and whether it reads as zero.
    pub(super) async fn extent(&self, worker: &Worker, offset: u64) -> Result<(u64, bool)> {
        self.check_range(offset, 1)?;
        loop {
            let (run, until) = self.run(offset, self.size);
            // What was kept goes with the checkpoint.
            self.check_end()?;
            match run {
                Run::Zero => return Ok((until - offset, true)),
                Run::Kept(_) => return Ok((until - offset, false)),
                Run::AsItWas => {}
            }
            let extent = Image(self.source.clone()).extent(worker, offset, until - offset).await?;
            self.check_end()?;
            // What was kept meanwhile may have changed: only what lies before it is known.
            if let (Run::AsItWas, until) = self.run(offset, extent.end().min(until)) {
                return Ok((until - offset, extent.is_zero()));
            }
        }
    }
}
