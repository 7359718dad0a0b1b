//! Writing guest clusters compressed: compress, gather; writing out and linking come later (`write_out.rs`).
//!
//! A stream is gathered and its guest cluster marked in flight in one critical section, under the lock of its slice.
//! From then on reads are served from the gatherer, and whoever else wants to change the cluster has it written out
//! first.

use crate::compress::{Method, Outcome, Work};
use crate::node::Node;
use crate::options::ZeroMode;
use crate::qcow2::gather::Added;
use crate::qcow2::segment::{Part, Room};
use crate::qcow2::space::{Allocated, Stream};
use crate::qcow2::state::{AfterFree, Qcow2};
use crate::{Error, ErrorKind, Result};
use futures_util::future::join_all;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::Arc;
use zebu_qcow2::Version;
use zebu_storage::{IoBufs, Worker};

/// Bytes of a segment: more in one write gain nothing.
const SEGMENT: u64 = 512 << 10;
/// Bytes to which the places of segments are aligned if clusters are smaller than that.
const SEGMENT_ALIGNMENT: u64 = 4096;

/// What stands in the way of a stream.
enum Obstacle {
    /// The slice is not there, or its table is not the image's own.
    Slice,
    /// Another request changes this guest cluster.
    InFlight,
    /// There are no host clusters to pack into.
    Room,
}

/// How a stream was placed.
enum Placed {
    /// It is gathered; the part, if any, is to be written.
    Gathered(Option<Box<Part>>),
    /// It has to be written plain.
    Plain,
}

/// The clusters of a request.
struct Clusters {
    guest: u64,
    /// Of each, until it is taken; then those that are given back.
    pieces: RefCell<Vec<IoBufs>>,
    next: Cell<usize>,
    failed: RefCell<Option<Error>>,
}

impl Clusters {
    fn take(&self) -> Option<(usize, IoBufs)> {
        let index = self.next.get();
        if self.failed.borrow().is_some() {
            return None;
        }
        let mut pieces = self.pieces.borrow_mut();
        let piece = std::mem::take(pieces.get_mut(index)?);
        self.next.set(index + 1);
        Some((index, piece))
    }

    fn give_back(&self, index: usize, bufs: IoBufs) {
        if let Some(piece) = self.pieces.borrow_mut().get_mut(index) {
            *piece = bufs;
        }
    }
}

impl Qcow2 {
    /// Makes everything that completed before the call durable.
    pub(crate) async fn flush(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if !self.gatherer.is_empty() {
            self.write_out(worker).await?;
        }
        self.commit(worker).await
    }

    /// Writes `bufs` at `guest` as compressed clusters; the range lies on the disk.
    pub(crate) async fn write_compressed(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        guest: u64,
        mut bufs: IoBufs,
    ) -> (Result<()>, IoBufs) {
        let method = match self.check_compressed(guest, bufs.len() as u64) {
            Ok(method) => method,
            Err(error) => return (Err(error.on(&self.path).at_guest(guest)), bufs),
        };
        let cluster = self.geometry.cluster_size() as usize;
        let mut pieces = Vec::with_capacity(bufs.len().div_ceil(cluster));
        while !bufs.is_empty() {
            pieces.push(bufs.split_to(bufs.len().min(cluster)));
        }
        let lanes = pieces.len().min(self.compress.pool.parallelism());
        let clusters =
            Clusters { guest, pieces: RefCell::new(pieces), next: Cell::new(0), failed: RefCell::new(None) };
        join_all((0..lanes).map(|_| self.compress_lane(node, worker, method, &clusters))).await;
        let mut done = IoBufs::new();
        for piece in clusters.pieces.into_inner() {
            done.append(piece);
        }
        self.relieve(worker).await;
        (clusters.failed.into_inner().map_or(Ok(()), Err), done)
    }

    fn check_compressed(&self, guest: u64, len: u64) -> Result<Method> {
        let whole = self.geometry.is_cluster_aligned(guest)
            && (self.geometry.is_cluster_aligned(len) || guest + len == self.virtual_size());
        if !whole {
            let message = format!(
                "compressed writes consist of whole clusters of {} bytes: {len} bytes can't be written here",
                self.geometry.cluster_size()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        if self.geometry.external_data {
            let message = "an image with an external data file can't hold compressed clusters";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        self.compress.method(self.compression)
    }

    /// Writes clusters one after the other, until there are no more or one failed.
    async fn compress_lane(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        method: Method,
        clusters: &Clusters,
    ) {
        while let Some((index, piece)) = clusters.take() {
            let guest = clusters.guest + ((index as u64) << self.geometry.cluster_bits);
            let (result, piece) = self.compress_cluster(node, worker, method, guest, piece).await;
            clusters.give_back(index, piece);
            if let Err(error) = result {
                clusters.failed.borrow_mut().get_or_insert(error.on(&self.path).at_guest(guest));
            }
        }
    }

    async fn compress_cluster(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        method: Method,
        guest: u64,
        input: IoBufs,
    ) -> (Result<()>, IoBufs) {
        if let Err(error) = self.wait_for_memory(worker).await {
            return (Err(error), input);
        }
        // Version 2 has no entry for zeroes in front of a backing image: there a stream of them is as short as any.
        if (self.geometry.version == Version::V3 || !self.has_backing()) && input.is_zero() {
            let len = input.len() as u64;
            return (self.write_zeroes(node, worker, guest, len, ZeroMode::Unmap).await, input);
        }
        let cluster = self.geometry.cluster_size() as usize;
        let mut done = self.compress.pool.run(worker, Work::Compress { method, input, cluster }).await;
        let input = std::mem::take(&mut done.input);
        match done.outcome {
            Outcome::Bytes(_) => {}
            Outcome::Incompressible => {
                drop(done);
                return self.write(node, worker, guest, input).await;
            }
            Outcome::Damaged(why) => return (Err(Error::new(ErrorKind::Io, why)), input),
        }
        let placed = match self.try_place(worker, guest, done.output()) {
            Ok(Err(obstacle)) => {
                // The slot is not kept while something else is waited for.
                let stream = done.output().to_vec();
                drop(done);
                self.place(worker, guest, &stream, obstacle).await
            }
            Ok(Ok(placed)) => {
                drop(done);
                Ok(placed)
            }
            Err(error) => Err(error),
        };
        match placed {
            Ok(Placed::Gathered(part)) => {
                if let Some(part) = part {
                    self.start_part(worker, *part);
                }
                (Ok(()), input)
            }
            Ok(Placed::Plain) => self.write(node, worker, guest, input).await,
            Err(error) => (Err(error), input),
        }
    }

    /// Waits until the gatherer may take more memory. A part that failed has to succeed first.
    async fn wait_for_memory(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let limit = self.compress.gather_memory;
        while poll_fn(|cx| self.gatherer.poll_memory(limit, cx.waker())).await {
            self.write_out(worker).await?;
        }
        Ok(())
    }

    /// Places a stream, whatever is in the way.
    async fn place(
        self: &Arc<Self>,
        worker: &Worker,
        guest: u64,
        stream: &[u8],
        mut obstacle: Obstacle,
    ) -> Result<Placed> {
        loop {
            match obstacle {
                Obstacle::Slice => self.prepare_slice(worker, guest).await?,
                Obstacle::InFlight => {
                    self.wait_for_flight(worker, guest >> self.geometry.cluster_bits).await?;
                }
                Obstacle::Room => self.make_room(worker).await?,
            }
            match self.try_place(worker, guest, stream)? {
                Ok(placed) => return Ok(placed),
                Err(next) => obstacle = next,
            }
        }
    }

    fn try_place(
        self: &Arc<Self>,
        worker: &Worker,
        guest: u64,
        stream: &[u8],
    ) -> Result<Result<Placed, Obstacle>> {
        let cluster = guest >> self.geometry.cluster_bits;
        let Some((mut shard, ..)) = self.try_lock_slice(guest)? else { return Ok(Err(Obstacle::Slice)) };
        if shard.in_flight.contains(cluster) {
            return Ok(Err(Obstacle::InFlight));
        }
        Ok(match self.gatherer.add(cluster, stream, &self.gather_rules(), || self.room(worker)) {
            Added::Done(part) => {
                shard.in_flight.begin(cluster);
                Ok(Placed::Gathered(part))
            }
            Added::NeedsRoom => Err(Obstacle::Room),
            Added::OutOfReach => Ok(Placed::Plain),
        })
    }

    /// Clusters of a segment.
    fn segment_clusters(&self) -> u64 {
        let half = (self.compress.gather_memory / 2) as u64;
        (SEGMENT.min(half) >> self.geometry.cluster_bits).max(1)
    }

    /// Host clusters for a segment, if the window has some.
    fn room(&self, worker: &Worker) -> Option<Room> {
        let Allocated { range, content } = self.try_allocate_compressed(self.segment_clusters())?;
        // Segments begin and end where blocks do, so that no block belongs to two of them.
        let unit = (SEGMENT_ALIGNMENT >> self.geometry.cluster_bits).max(1);
        let aligned = range.start.next_multiple_of(unit)..range.end / unit * unit;
        let range = if aligned.is_empty() {
            range
        } else {
            self.push_freed(range.start..aligned.start, AfterFree::unused(content));
            self.push_freed(aligned.end..range.end, AfterFree::unused(content));
            aligned
        };
        let buf = worker.buffer(((range.end - range.start) << self.geometry.cluster_bits) as usize);
        Some(Room { allocated: Allocated { range, content }, buf })
    }

    /// Sees to it that the window has host clusters.
    pub(crate) async fn make_room(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let _turn = self.gatherer.room_gate.enter().await;
        if self.space().windows.has(Stream::Compressed) {
            return Ok(());
        }
        self.refill_compressed(worker, self.segment_clusters()).await
    }
}
