//! Carrying out packed writes: references, then bytes, then links.
//!
//! An entry is set when its stream's bytes are written and its references are in the refcount cache. A commit that freezes
//! the entry thus freezes the references. Its first barrier makes the bytes durable (I1, I3). A write that fails keeps what it
//! has not done yet. Until it succeeds, the file shows the old content of its guest clusters (I4). The next flush tries again,
//! and says why not.

use crate::Remedy;
use crate::image_worker::vanished;
use crate::qcow2::compressed::pack_buffer::{PackRules, PackedWrite};
use crate::qcow2::compressed::stream_packer::StreamPacker;
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::{HostOffset, L2Entry, refcount};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBufs, Worker};

/// Bytes of a block that is written once: the largest block of a disk.
const BLOCK: u64 = 4096;

/// The target of packed writes: the image, or a file in memory when schedules are explored.
pub(crate) trait PackSink {
    /// Counts so many streams more in a host cluster.
    async fn add_references(&self, cluster: u64, count: u64) -> Result<()>;
    /// Writes bytes at a host offset; the first stream of them is of this guest cluster. What could not be written comes
    /// back.
    async fn write_bytes(&self, host: u64, guest: u64, bytes: IoBufs) -> Result<(), (Error, IoBufs)>;
    /// Gives back host clusters without streams.
    fn give_back(&self, clusters: Range<u64>, then: FreeMode);
    /// Makes the guest cluster refer to its stream, and tells the packer.
    async fn link(&self, guest: u64) -> Result<()>;
}

/// Does what of a write is not done yet.
pub(crate) async fn carry_out(
    write: &mut PackedWrite,
    packer: &StreamPacker,
    to: &impl PackSink,
) -> Result<()> {
    while let Some((cluster, count)) = write.next_reference() {
        to.add_references(cluster, count).await?;
        packer.referenced(write);
    }
    let bytes = write.take_bytes();
    let len = bytes.len();
    if len > 0 {
        if let Err((error, bytes)) = to.write_bytes(write.host(), write.first_guest(), bytes).await {
            write.give_bytes_back(bytes);
            return Err(error);
        }
        packer.written(len);
    }
    if !sabotage::is(Fault::CloseEarly) {
        poll_fn(|cx| packer.poll_closable(write, cx.waker())).await?;
    }
    for (clusters, then) in write.take_unused() {
        to.give_back(clusters, then);
    }
    packer.complete(write);
    while let Some(guest) = write.next_complete() {
        to.link(guest).await?;
        write.note_linked();
    }
    Ok(())
}

struct OnDisk<'a> {
    image: &'a Arc<Qcow2>,
    worker: &'a Worker,
}

impl PackSink for OnDisk<'_> {
    async fn add_references(&self, cluster: u64, count: u64) -> Result<()> {
        self.image.add_references(self.worker, cluster, count).await
    }

    async fn write_bytes(&self, host: u64, guest: u64, bytes: IoBufs) -> Result<(), (Error, IoBufs)> {
        let Self { image, worker } = self;
        let guest = guest << image.geometry().cluster_bits;
        if let Err(error) = image.space.check_overlap(host, bytes.len() as u64, guest) {
            return Err((error, bytes));
        }
        image.file().announce("write_compressed");
        let (result, bytes) = worker.write(image.file(), host, bytes).await;
        result.map_err(|error| (Error::from(error).on(image.path()).at_host(host), bytes))
    }

    fn give_back(&self, clusters: Range<u64>, then: FreeMode) {
        self.image.space.quarantine().push(clusters, then);
    }

    async fn link(&self, guest: u64) -> Result<()> {
        self.image.link_stream(self.worker, guest).await
    }
}

/// A write that is under way. One that vanishes takes acknowledged streams with it: nothing is written any more, and the
/// next flush says so.
struct BegunWrite {
    image: Arc<Qcow2>,
    number: u64,
    has_ended: bool,
}

impl BegunWrite {
    fn end(mut self, write: PackedWrite, result: Result<()>) {
        self.has_ended = true;
        self.image.compressed.packer().end(write, result);
    }
}

impl Drop for BegunWrite {
    fn drop(&mut self) {
        if !self.has_ended {
            let why = vanished(self.image.path());
            self.image.files.poison(&why);
            self.image.compressed.packer().forget(self.number, why);
        }
    }
}

impl Qcow2 {
    /// The rules by which this image packs streams.
    pub(crate) fn pack_rules(&self) -> PackRules {
        let alignment = self.file().alignment();
        PackRules::new(
            self.geometry().cluster_bits,
            self.geometry().refcount_max(),
            self.geometry().compressed_offset_end(),
            BLOCK.max(u64::from(alignment.offset)).max(u64::from(alignment.length)),
        )
    }

    /// Writes everything that was packed, and links it. A failed write is tried again; what fails stays packed.
    pub(crate) async fn write_out(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.check_writable()?;
        let (writes, last) = self.compressed.packer().take_all(&self.pack_rules());
        for write in writes {
            self.start_write(worker, write);
        }
        poll_fn(|cx| self.compressed.packer().poll_ended(last, cx.waker())).await?;
        self.check_writable()
    }

    /// Writes everything out and gives back what room there is left. The caller has no request under way.
    pub(crate) async fn end_packing(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.write_out(worker).await?;
        if let Some(write) = self.compressed.packer().take_rest(&self.pack_rules()) {
            self.start_write(worker, write);
        }
        self.write_out(worker).await
    }

    /// Has a write written by the image's worker, whatever becomes of the request that filled it.
    pub(crate) fn start_write(self: &Arc<Self>, worker: &Worker, mut write: PackedWrite) {
        let own = match self.own_worker.start(worker) {
            Ok(own) => own,
            Err(error) => return self.compressed.packer().end(write, Err(error.on(self.path()))),
        };
        let begun = BegunWrite { image: self.clone(), number: write.number(), has_ended: false };
        drop(own.run(move |on| async move {
            let image = &begun.image;
            let result =
                carry_out(&mut write, image.compressed.packer(), &OnDisk { image, worker: &on }).await;
            begun.end(write, result);
        }));
    }

    /// Raises the refcount of a cluster that has one, for `count` streams in it.
    async fn add_references(&self, worker: &Worker, cluster: u64, count: u64) -> Result<()> {
        let order = self.geometry().refcount_order;
        let raised = self
            .space
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
            "the refcount of a cluster of compressed data is larger than it can be; repair the image",
        )
        .on(self.path())
        .at_host(cluster << self.geometry().cluster_bits)
        .with_remedy(Remedy::Repair);
        self.files.poison(&error);
        Err(error)
    }

    /// Sets the entry of a guest cluster whose stream is written.
    async fn link_stream(self: &Arc<Self>, worker: &Worker, guest: u64) -> Result<()> {
        let Some(stream) = self.compressed.packer().stream(guest) else { return Ok(()) };
        let offset = guest << self.geometry().cluster_bits;
        let corrupt = |e: zebu_qcow2::EntryError| {
            Error::new(ErrorKind::Corrupt, e.to_string()).on(self.path()).at_guest(offset)
        };
        let entry = L2Entry::compressed(HostOffset(stream.offset()), stream.len(), self.geometry())
            .map_err(corrupt)?;
        let entry_size = self.geometry().l2_entry_size as usize;
        let (mut shard, key, index) = self.lock_slice(worker, offset).await?;
        // Under the lock and before the change: whichever commit freezes the change sees the flag.
        if !sabotage::is(Fault::ForgetStreamBarrier) {
            self.commit.need_data_barrier();
        }
        let old = self.entry_in(&mut shard, key, index);
        self.map.slices().change(&mut shard, key, index * entry_size, entry_size, |bytes| {
            let _ = entry.write(bytes, 0, self.geometry());
        });
        self.free_entry(old, offset, FreeMode::Reuse);
        self.compressed.packer().linked(guest);
        let waiting = shard.in_flight().end(guest);
        drop(shard);
        waiting.wake();
        Ok(())
    }
}
