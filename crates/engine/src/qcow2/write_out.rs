//! Writing gathered parts: references, then bytes, then links.
//!
//! An entry is set only when the stream's bytes are written and the references of its host clusters are in the
//! refcount cache, so a commit that freezes the entry freezes the references, too, and its first barrier makes the
//! bytes durable (invariants I1 and I3). A part that fails keeps what it has not done yet; the old content of its
//! guest clusters is what the file shows until it succeeds (I4), and the next flush tries again and says why not.

use crate::qcow2::gather::{Gatherer, Place};
use crate::qcow2::segment::{Part, Rules};
use crate::qcow2::state::{AfterFree, Qcow2};
use crate::{Error, ErrorKind, Result};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;
use zebu_qcow2::{HostOffset, L2Entry, refcount};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Bytes of a block that is written once: the largest block of a disk.
const BLOCK: u64 = 4096;

/// Where a part goes: the image, or what tests have in its place.
pub(crate) trait Destination {
    /// Counts so many streams more in a host cluster.
    async fn add_references(&self, cluster: u64, count: u64) -> Result<()>;
    /// Writes the part's bytes, and takes them out of it.
    async fn write_bytes(&self, part: &mut Part) -> Result<()>;
    /// Gives back host clusters without streams.
    fn give_back(&self, clusters: Range<u64>, then: AfterFree);
    /// Makes the guest cluster refer to its stream, and tells the gatherer.
    async fn link(&self, guest: u64) -> Result<()>;
}

/// Does what of a part is not done yet.
pub(crate) async fn settle(part: &mut Part, gatherer: &Gatherer, to: &impl Destination) -> Result<()> {
    while let Some((cluster, count)) = part.references.last().copied() {
        to.add_references(cluster, count).await?;
        gatherer.referenced(part);
    }
    let len = part.bytes.len();
    if len > 0 {
        to.write_bytes(part).await?;
        gatherer.written(len);
    }
    if !sabotage::is(Fault::CloseEarly) {
        poll_fn(|cx| gatherer.poll_closable(part, cx.waker())).await?;
    }
    for (clusters, then) in part.unused.drain(..) {
        to.give_back(clusters, then);
    }
    gatherer.complete(part);
    while let Some(guest) = part.complete.last().copied() {
        to.link(guest).await?;
        part.complete.pop();
    }
    Ok(())
}

struct OnDisk<'a> {
    image: &'a Arc<Qcow2>,
    worker: &'a Worker,
}

impl Destination for OnDisk<'_> {
    async fn add_references(&self, cluster: u64, count: u64) -> Result<()> {
        self.image.add_references(self.worker, cluster, count).await
    }

    async fn write_bytes(&self, part: &mut Part) -> Result<()> {
        let Self { image, worker } = self;
        let guest = part.streams.first().map_or(0, |cluster| cluster << image.geometry.cluster_bits);
        image.check_overlap(part.host, part.bytes.len() as u64, guest)?;
        let (result, bytes) = worker.write(&image.file, part.host, std::mem::take(&mut part.bytes)).await;
        result.map_err(|error| {
            part.bytes = bytes;
            Error::from(error).on(&image.path).at_host(part.host)
        })
    }

    fn give_back(&self, clusters: Range<u64>, then: AfterFree) {
        self.image.push_freed(clusters, then);
    }

    async fn link(&self, guest: u64) -> Result<()> {
        self.image.link_stream(self.worker, guest).await
    }
}

impl Qcow2 {
    /// How streams are packed in this image.
    pub(crate) fn gather_rules(&self) -> Rules {
        let alignment = self.file.alignment();
        Rules {
            cluster_bits: self.geometry.cluster_bits,
            refcount_max: self.geometry.refcount_max(),
            offset_end: self.geometry.compressed_offset_end(),
            block: BLOCK.max(u64::from(alignment.offset)).max(u64::from(alignment.length)),
        }
    }

    /// Writes everything that was gathered, and links it. A failed part is tried again; what fails stays gathered.
    pub(crate) async fn write_out(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let (parts, last) = self.gatherer.take_all(&self.gather_rules());
        for part in parts {
            self.start_part(worker, part);
        }
        poll_fn(|cx| self.gatherer.poll_ended(last, cx.waker())).await
    }

    /// Writes everything out and gives back what room there is left. The caller has no request under way.
    pub(crate) async fn end_gathering(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.write_out(worker).await?;
        if let Some(part) = self.gatherer.take_rest(&self.gather_rules()) {
            self.start_part(worker, part);
        }
        self.write_out(worker).await
    }

    /// Has a part written by a task of its own, whatever becomes of the request that filled it.
    pub(crate) fn start_part(self: &Arc<Self>, worker: &Worker, mut part: Part) {
        let (image, on) = (self.clone(), worker.clone());
        drop(worker.spawn(async move {
            let result = settle(&mut part, &image.gatherer, &OnDisk { image: &image, worker: &on }).await;
            image.gatherer.end(part, result);
        }));
    }

    /// Raises the refcount of a cluster that has one, for `count` streams in it.
    async fn add_references(&self, worker: &Worker, cluster: u64, count: u64) -> Result<()> {
        let order = self.geometry.refcount_order;
        let raised = self
            .with_refcounts(worker, cluster, |cache, shard, key, index| {
                let byte = (index << order) / 8;
                let index = index - ((byte * 8) >> order);
                let len = ((1_usize << order) / 8).max(1);
                let mut raised = false;
                let changed = cache.change(shard, key, byte, len, |bytes| {
                    let new = refcount::get(bytes, index, order).and_then(|old| old.checked_add(count));
                    raised = new.is_some_and(|new| refcount::set(bytes, index, order, new).is_ok());
                });
                changed.then_some(raised)
            })
            .await?;
        if raised {
            return Ok(());
        }
        let error = Error::new(
            ErrorKind::Corrupt,
            "the refcount of a cluster of compressed data is larger than it can be; run zebu check -r all",
        )
        .on(&self.path)
        .at_host(cluster << self.geometry.cluster_bits);
        self.poison(&error);
        Err(error)
    }

    /// Sets the entry of a guest cluster whose stream is written.
    async fn link_stream(self: &Arc<Self>, worker: &Worker, guest: u64) -> Result<()> {
        let Some(stream) = self.gatherer.stream(guest) else { return Ok(()) };
        let offset = guest << self.geometry.cluster_bits;
        let corrupt = |e: zebu_qcow2::EntryError| {
            Error::new(ErrorKind::Corrupt, e.to_string()).on(&self.path).at_guest(offset)
        };
        let entry =
            L2Entry::compressed(HostOffset(stream.offset), stream.len, &self.geometry).map_err(corrupt)?;
        let entry_size = self.geometry.l2_entry_size as usize;
        let (mut shard, key, index) = self.lock_slice(worker, offset).await?;
        // Under the lock and before the change: whichever commit freezes the change sees the flag.
        if !sabotage::is(Fault::ForgetStreamBarrier) {
            self.needs_data_barrier.store(true, Release);
        }
        let old = self.entry_in(&mut shard, key, index);
        self.l2.change(&mut shard, key, index * entry_size, entry_size, |bytes| {
            let _ = entry.write(bytes, 0, &self.geometry);
        });
        self.free_entry(old, offset, AfterFree::Reuse);
        self.gatherer.linked(guest);
        let waiting = shard.in_flight.end(guest);
        drop(shard);
        waiting.into_iter().for_each(std::task::Waker::wake);
        Ok(())
    }

    /// The bytes of a stream that is still in memory, or a part of it; `None` if it is in the file.
    pub(crate) async fn gathered_bytes(
        self: &Arc<Self>,
        worker: &Worker,
        guest: u64,
        offset: u64,
    ) -> Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        loop {
            match self.gatherer.copy_stream(guest, offset, &mut bytes) {
                Place::Memory => return Ok(Some(bytes)),
                Place::File => return Ok(None),
                Place::Split(in_file) => {
                    let at = (in_file.start - offset) as usize;
                    let len = (in_file.end - in_file.start) as usize;
                    let (bufs, skip) =
                        self.read_stream(worker, in_file, guest << self.geometry.cluster_bits).await?;
                    if let Some(gap) = bytes.get_mut(at..at + len) {
                        bufs.copy_to(skip, gap);
                    }
                    return Ok(Some(bytes));
                }
                Place::BeingWritten => {
                    let mut seen = false;
                    poll_fn(|cx| self.gatherer.poll_change(&mut seen, cx.waker())).await;
                }
            }
        }
    }
}
