//! Host clusters that streams are packed into.

use crate::Result;
use crate::compress::Bursts;
use crate::qcow2::compressed::pack_buffer::Room;
use crate::qcow2::space::alloc::WindowFor;
use crate::qcow2::space::free::Allocated;
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use std::sync::Arc;
use zebu_storage::Worker;

/// Bytes of a buffer: more in one write gain nothing.
const BUFFER: u64 = 512 << 10;
/// Bytes of a buffer of a job that gives way to others: a request of theirs does not wait behind a long write.
const SHORT_BUFFER: u64 = 64 << 10;
/// Bytes to which the places of buffers are aligned if clusters are smaller than that.
const BUFFER_ALIGNMENT: u64 = 4096;

impl Qcow2 {
    /// Clusters of a buffer.
    fn buffer_clusters(&self, bursts: Bursts) -> u64 {
        let half = (self.compressed.options().gather_memory / 2) as u64;
        let most = match bursts {
            Bursts::Whole => BUFFER,
            Bursts::Short => SHORT_BUFFER,
        };
        (most.min(half) >> self.geometry().cluster_bits).max(1)
    }

    /// Host clusters for a buffer, if the window has some.
    pub(crate) fn room(&self, worker: &Worker, bursts: Bursts) -> Option<Room> {
        let (range, content) = self.space.try_allocate_compressed(self.buffer_clusters(bursts))?.into_parts();
        // Buffers begin and end where blocks do, so that no block belongs to two of them. A run too short for that is taken as
        // it is.
        let unit = (BUFFER_ALIGNMENT >> self.geometry().cluster_bits).max(1);
        let aligned = range.start.next_multiple_of(unit)..range.end / unit * unit;
        let range = if aligned.is_empty() {
            range
        } else {
            self.space.quarantine().push(range.start..aligned.start, FreeMode::unused(content));
            self.space.quarantine().push(aligned.end..range.end, FreeMode::unused(content));
            aligned
        };
        let buf = worker.buffer(((range.end - range.start) << self.geometry().cluster_bits) as usize);
        Some(Room::new(Allocated::new(range, content), buf))
    }

    /// Sees to it that the window has host clusters.
    pub(crate) async fn make_room(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.on_own_worker(worker, |me, on| async move {
            let _turn = me.compressed.packer().hold_room().await;
            if me.space.has_compressed_window() {
                return Ok(());
            }
            me.refill(&on, WindowFor::Compressed, me.buffer_clusters(Bursts::Whole)).await
        })
        .await
    }
}
