//! Reading compressed clusters. Inflating is the codec pool's work: several clusters are inflated at once, and the worker
//! goes on meanwhile.

use crate::compress::{Outcome, Packing, Work};
use crate::qcow2::cache::inflated_clusters::{Inflated, Inflation};
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::CompressedRange;
use zebu_storage::{IoBuf, IoBufs, Worker};

impl Qcow2 {
    /// The inflated content of the guest cluster that `guest` lies in, whose stream is `stream`.
    pub(crate) async fn read_compressed(
        self: &Arc<Self>,
        worker: &Worker,
        stream: CompressedRange,
        guest: u64,
    ) -> Result<Inflated> {
        let ticket = match self.inflated.lookup(worker, stream).await {
            Inflation::Ready(bytes) => return Ok(bytes),
            Inflation::Mine(ticket) => ticket,
        };
        let cluster = guest >> self.geometry().cluster_bits;
        let (input, skip) = match self.packed_bytes(worker, cluster, stream.offset.0).await? {
            Some(bytes) => (IoBuf::copy_of(&bytes).into(), 0),
            None => self.read_stream(worker, stream.offset.0..stream.end().0, guest).await?,
        };
        let (compression, cluster) =
            (self.header.opened().compression(), self.geometry().cluster_size() as usize);
        let packing = Packing::Cluster(compression);
        let work = Work::Inflate { packing, input, skip, cluster, output: self.inflated.buffer() };
        let mut done = self.compressed.options().pool.run(worker, work).await;
        if let Outcome::Damaged(why) = done.outcome {
            let message = format!("compressed cluster can't be decompressed: {why}");
            return Err(Error::new(ErrorKind::Corrupt, message)
                .on(self.path())
                .at_guest(guest)
                .at_host(stream.offset.0)
                .in_guest_data());
        }
        let bytes = Arc::new(done.take_output());
        self.inflated.insert(stream, bytes.clone());
        drop(ticket);
        Ok(bytes)
    }

    /// The bytes of a stream in the file (host offsets), behind some that don't belong to it.
    pub(super) async fn read_stream(
        &self,
        worker: &Worker,
        stream: Range<u64>,
        guest: u64,
    ) -> Result<(IoBufs, usize)> {
        // Whole blocks of the file, so that O_DIRECT needs no second buffer.
        let block = u64::from(self.file().alignment().offset.max(self.file().alignment().length)).max(1);
        let start = stream.start / block * block;
        let end = stream.end.next_multiple_of(block);
        self.file().announce("read_compressed");
        let (result, bufs) =
            worker.read(self.file(), start, worker.buffer((end - start) as usize).into()).await;
        result.map_err(|e| Error::from(e).on(self.path()).at_guest(guest))?;
        Ok((bufs, (stream.start - start) as usize))
    }
}
