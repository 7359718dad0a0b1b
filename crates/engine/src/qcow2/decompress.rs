//! Compressed clusters: reading, inflating, and a small cache of the result.
//!
//! A cluster that is read piece by piece is inflated once: the first reader inflates, others wait for it, and the
//! result stays in a bounded cache. Entries are dropped when the host space of their stream is released.

use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use zebu_qcow2::{CompressedRange, Compression};
use zebu_storage::Worker;

/// Bytes of inflated clusters kept.
const CAPACITY: usize = 4 << 20;

/// Inflated clusters by the place of their stream.
#[derive(Debug, Default)]
pub(crate) struct ClusterCache {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ready: VecDeque<(CompressedRange, Arc<[u8]>)>,
    loading: HashMap<CompressedRange, Vec<Waker>>,
}

enum Lookup<'a> {
    Ready(Arc<[u8]>),
    Mine(Ticket<'a>),
}

/// The duty to inflate a cluster; others wait until it is dropped.
struct Ticket<'a> {
    cache: &'a ClusterCache,
    stream: CompressedRange,
}

impl ClusterCache {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn lookup(&self, stream: CompressedRange) -> Lookup<'_> {
        poll_fn(|cx| {
            let mut state = self.state();
            if let Some(at) = state.ready.iter().position(|(s, _)| *s == stream) {
                let found = state.ready.remove(at);
                if let Some((stream, bytes)) = found {
                    state.ready.push_back((stream, bytes.clone()));
                    return Poll::Ready(Lookup::Ready(bytes));
                }
            }
            if let Some(waiting) = state.loading.get_mut(&stream) {
                waiting.push(cx.waker().clone());
                return Poll::Pending;
            }
            state.loading.insert(stream, Vec::new());
            Poll::Ready(Lookup::Mine(Ticket { cache: self, stream }))
        })
        .await
    }

    fn insert(&self, stream: CompressedRange, bytes: Arc<[u8]>) {
        let mut state = self.state();
        let keep = (CAPACITY / bytes.len().max(1)).max(1);
        while state.ready.len() >= keep {
            state.ready.pop_front();
        }
        state.ready.push_back((stream, bytes));
    }

    /// Forgets streams that touch these host clusters.
    pub(crate) fn forget(&self, clusters: &Range<u64>, cluster_bits: u32) {
        let (start, end) = (clusters.start << cluster_bits, clusters.end << cluster_bits);
        self.state().ready.retain(|(stream, _)| stream.offset.0 >= end || stream.end().0 <= start);
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        for waker in self.cache.state().loading.remove(&self.stream).into_iter().flatten() {
            waker.wake();
        }
    }
}

impl Qcow2 {
    /// The inflated content of the guest cluster at `guest`, whose stream is `stream`.
    pub(crate) async fn read_compressed(
        &self,
        worker: &Worker,
        stream: CompressedRange,
        guest: u64,
    ) -> Result<Arc<[u8]>> {
        let ticket = match self.clusters.lookup(stream).await {
            Lookup::Ready(bytes) => return Ok(bytes),
            Lookup::Mine(ticket) => ticket,
        };
        // Whole blocks of the file, so that O_DIRECT needs no second buffer.
        let block = u64::from(self.file.alignment().offset.max(self.file.alignment().length)).max(1);
        let start = stream.offset.0 / block * block;
        let end = stream.end().0.next_multiple_of(block);
        let skip = (stream.offset.0 - start) as usize;
        let len = (end - start) as usize;
        let (result, bufs) = worker.read(&self.file, start, worker.buffer(len).into()).await;
        result.map_err(|e| Error::from(e).on(&self.path).at_guest(guest))?;
        let mut input = vec![0; stream.len as usize];
        bufs.copy_to(skip, &mut input);
        let (compression, cluster) = (self.compression, self.geometry.cluster_size() as usize);
        let inflated = worker.run_blocking(move || inflate(compression, &input, cluster)).await;
        let bytes: Arc<[u8]> = inflated
            .map_err(|why| {
                let message = format!("compressed cluster can't be decompressed: {why}");
                Error::new(ErrorKind::Corrupt, message)
                    .on(&self.path)
                    .at_guest(guest)
                    .at_host(stream.offset.0)
            })?
            .into();
        self.clusters.insert(stream, bytes.clone());
        drop(ticket);
        Ok(bytes)
    }
}

/// Inflates exactly `cluster` bytes; what follows the stream is ignored. Work and memory are bounded by `cluster`.
fn inflate(compression: Compression, input: &[u8], cluster: usize) -> Result<Vec<u8>, &'static str> {
    let mut out = vec![0; cluster];
    match compression {
        Compression::Zlib => {
            thread_local! {
                static INFLATER: std::cell::RefCell<libdeflater::Decompressor> =
                    std::cell::RefCell::new(libdeflater::Decompressor::new());
            }
            let inflated = INFLATER.with_borrow_mut(|inflater| inflater.deflate_decompress(input, &mut out));
            match inflated {
                Ok(len) if len == cluster => Ok(out),
                Ok(_) => Err("the deflate stream ends before the cluster is full"),
                Err(libdeflater::DecompressionError::BadData) => Err("the deflate stream is damaged"),
                Err(libdeflater::DecompressionError::InsufficientSpace) => {
                    Err("the deflate stream holds more than a cluster")
                }
            }
        }
        Compression::Zstd => inflate_zstd(input, out),
    }
}

#[cfg(feature = "zstd")]
fn inflate_zstd(input: &[u8], mut out: Vec<u8>) -> Result<Vec<u8>, &'static str> {
    thread_local! {
        static CONTEXT: std::cell::RefCell<zstd_safe::DCtx<'static>> =
            std::cell::RefCell::new(zstd_safe::DCtx::create());
    }
    CONTEXT.with_borrow_mut(|context| {
        context
            .reset(zstd_safe::ResetDirective::SessionOnly)
            .map_err(|_| "the zstd decoder can't be reset")?;
        let cluster = out.len();
        let mut source = zstd_safe::InBuffer::around(input);
        let mut target = zstd_safe::OutBuffer::around(&mut out[..]);
        // A cluster may be several frames; each turn makes progress or ends.
        while target.pos() < cluster {
            let before = (source.pos, target.pos());
            context.decompress_stream(&mut target, &mut source).map_err(zstd_safe::get_error_name)?;
            if (source.pos, target.pos()) == before {
                return Err("the zstd stream ends before the cluster is full");
            }
        }
        Ok(())
    })?;
    Ok(out)
}

#[cfg(not(feature = "zstd"))]
fn inflate_zstd(_: &[u8], _: Vec<u8>) -> Result<Vec<u8>, &'static str> {
    Err("zstd was left out of this build")
}
