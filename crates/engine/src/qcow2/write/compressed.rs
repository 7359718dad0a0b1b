//! Writing guest clusters compressed: they are compressed and packed; writing out and linking come later (`write_out.rs`).
//!
//! A stream is packed and its guest cluster marked in flight in one critical section, under the lock of its slice.
//! From then on reads are served from the packer, and whoever else wants to change the cluster has it written out
//! first.

use crate::compress::{Bursts, Hurry, Method, Outcome, Work};
use crate::node::Node;
use crate::options::ZeroMode;
use crate::qcow2::compressed::pack_buffer::PackedWrite;
use crate::qcow2::compressed::stream_packer::Added;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use futures_util::future::join_all;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::Arc;
use zebu_qcow2::Version;
use zebu_storage::{IoBufs, Worker};

/// An obstacle to packing a stream.
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
    /// It is packed; the write, if any, is to be written.
    Packed(Option<Box<PackedWrite>>),
    /// It has to be written plain; the write of earlier streams, if any, is to be written.
    Plain(Option<Box<PackedWrite>>),
}

/// The clusters of a request.
struct Clusters {
    guest: u64,
    method: Method,
    bursts: Bursts,
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
    /// Writes `bufs` at `guest` as compressed clusters; the range lies on the disk.
    pub(crate) async fn write_compressed(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        bursts: Bursts,
        guest: u64,
        mut bufs: IoBufs,
    ) -> (Result<()>, IoBufs) {
        let method = match self.check_compressed(guest, bufs.len() as u64) {
            Ok(method) => method,
            Err(error) => return (Err(error.on(self.path()).at_guest(guest)), bufs),
        };
        let cluster = self.geometry().cluster_size() as usize;
        let mut pieces = Vec::with_capacity(bufs.len().div_ceil(cluster));
        while !bufs.is_empty() {
            pieces.push(bufs.split_to(bufs.len().min(cluster)));
        }
        let lanes = pieces.len().min(self.compressed.options().pool.parallelism());
        let clusters = Clusters {
            guest,
            method,
            bursts,
            pieces: RefCell::new(pieces),
            next: Cell::new(0),
            failed: RefCell::new(None),
        };
        join_all((0..lanes).map(|_| self.compress_lane(node, worker, &clusters))).await;
        let mut done = IoBufs::new();
        for piece in clusters.pieces.into_inner() {
            done.append(piece);
        }
        self.wait_if_too_dirty(worker).await;
        (clusters.failed.into_inner().map_or(Ok(()), Err), done)
    }

    /// Has work in short bursts done without further sleep, as long as the result lives.
    pub(crate) fn hurry_compression(&self) -> Hurry {
        self.compressed.options().pool.hurry()
    }

    fn check_compressed(&self, guest: u64, len: u64) -> Result<Method> {
        let whole = self.geometry().is_cluster_aligned(guest)
            && (self.geometry().is_cluster_aligned(len) || guest + len == self.virtual_size());
        if !whole {
            let message = format!(
                "compressed writes consist of whole clusters of {} bytes: {len} bytes can't be written here",
                self.geometry().cluster_size()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        if !self.protection().is_none() {
            let message = "an encrypted image can't hold compressed clusters";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        if self.geometry().external_data {
            let message = "an image with an external data file can't hold compressed clusters";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        self.compressed.options().method(self.header.opened().compression())
    }

    /// Writes clusters one after the other, until there are no more or one failed.
    async fn compress_lane(self: &Arc<Self>, node: &Node, worker: &Worker, clusters: &Clusters) {
        while let Some((index, piece)) = clusters.take() {
            let guest = clusters.guest + ((index as u64) << self.geometry().cluster_bits);
            let (result, piece) = self.compress_cluster(node, worker, clusters, guest, piece).await;
            clusters.give_back(index, piece);
            if let Err(error) = result {
                clusters.failed.borrow_mut().get_or_insert(error.on(self.path()).at_guest(guest));
            }
        }
    }

    async fn compress_cluster(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        clusters: &Clusters,
        guest: u64,
        input: IoBufs,
    ) -> (Result<()>, IoBufs) {
        if let Err(error) = self.wait_for_memory(worker).await {
            return (Err(error), input);
        }
        // Version 2 has no entry for zeroes in front of a backing image: there a stream of them is as short as any.
        if (self.geometry().version == Version::V3 || !self.has_backing()) && input.is_zero() {
            let len = input.len() as u64;
            return (self.write_zeroes(node, worker, guest, len, ZeroMode::Unmap).await, input);
        }
        let cluster = self.geometry().cluster_size() as usize;
        let work = Work::Compress { method: clusters.method, bursts: clusters.bursts, input, cluster };
        let mut done = self.compressed.options().pool.run(worker, work).await;
        let input = std::mem::take(&mut done.input);
        match done.outcome {
            Outcome::Bytes(_) => {}
            Outcome::Incompressible => {
                drop(done);
                return self.write(node, worker, guest, input).await;
            }
            Outcome::Damaged(why) => return (Err(Error::new(ErrorKind::Io, why)), input),
        }
        let placed = match self.try_place(worker, clusters.bursts, guest, done.output()) {
            Ok(Err(obstacle)) => {
                // The slot is not kept while something else is waited for.
                let stream = done.output().to_vec();
                drop(done);
                self.place(worker, clusters.bursts, guest, &stream, obstacle).await
            }
            Ok(Ok(placed)) => {
                drop(done);
                Ok(placed)
            }
            Err(error) => Err(error),
        };
        let (write, is_packed) = match placed {
            Ok(Placed::Packed(write)) => (write, true),
            Ok(Placed::Plain(write)) => (write, false),
            Err(error) => return (Err(error), input),
        };
        if let Some(write) = write {
            self.start_write(worker, *write);
        }
        if is_packed { (Ok(()), input) } else { self.write(node, worker, guest, input).await }
    }

    /// Waits until the packer may take more memory. A write that failed has to succeed first.
    async fn wait_for_memory(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let limit = self.compressed.options().gather_memory;
        while poll_fn(|cx| self.compressed.packer().poll_memory(limit, cx.waker())).await {
            self.write_out(worker).await?;
        }
        Ok(())
    }

    /// Places a stream, whatever is in the way.
    async fn place(
        self: &Arc<Self>,
        worker: &Worker,
        bursts: Bursts,
        guest: u64,
        stream: &[u8],
        mut obstacle: Obstacle,
    ) -> Result<Placed> {
        // As in a plan: another may have placed the cluster in the last room there was.
        let mut no_space = None;
        loop {
            let mut pin = None;
            match obstacle {
                Obstacle::Slice => pin = Some(self.prepare_slice(worker, guest).await?),
                Obstacle::InFlight => {
                    self.wait_for_flight(worker, guest >> self.geometry().cluster_bits).await?;
                    no_space = None;
                }
                Obstacle::Room => match no_space {
                    Some(error) => return Err(error),
                    None => no_space = self.make_room(worker).await.err(),
                },
            }
            let placed = self.try_place(worker, bursts, guest, stream)?;
            drop(pin);
            match placed {
                Ok(placed) => return Ok(placed),
                Err(next) => obstacle = next,
            }
        }
    }

    fn try_place(
        self: &Arc<Self>,
        worker: &Worker,
        bursts: Bursts,
        guest: u64,
        stream: &[u8],
    ) -> Result<Result<Placed, Obstacle>> {
        let cluster = guest >> self.geometry().cluster_bits;
        let Some((mut shard, ..)) = self.try_lock_slice(guest)? else { return Ok(Err(Obstacle::Slice)) };
        if shard.in_flight().contains(cluster) {
            return Ok(Err(Obstacle::InFlight));
        }
        let room = || self.room(worker, bursts);
        Ok(match self.compressed.packer().add(cluster, stream, &self.pack_rules(), room) {
            Added::Done(write) => {
                shard.in_flight().begin(cluster);
                Ok(Placed::Packed(write))
            }
            Added::NeedsRoom => Err(Obstacle::Room),
            Added::OutOfReach(write) => Ok(Placed::Plain(write)),
        })
    }
}
