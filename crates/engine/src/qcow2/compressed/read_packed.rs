//! Streams that are packed and not linked yet: where they are, and their bytes.

use crate::image_worker::vanished;
use crate::qcow2::compressed::stream_packer::StreamPlace;
use crate::qcow2::map::mapping::Run;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use std::future::poll_fn;
use std::sync::Arc;
use zebu_qcow2::{CompressedRange, EntryError, HostOffset};
use zebu_storage::Worker;

impl Qcow2 {
    /// The mapping of `guest`, and for how many bytes it holds (at most `max_len`).
    pub(crate) async fn map(
        self: &Arc<Self>,
        worker: &Worker,
        guest: u64,
        max_len: u64,
    ) -> Result<(Run, u64)> {
        let (packed, max_len) = self.packed_run(guest, max_len)?;
        if let Some(run) = packed {
            return Ok((run, max_len));
        }
        self.map_tables(worker, guest, max_len).await
    }

    /// The stream of the cluster at `guest`, if it is not linked yet, and for how many bytes of `max_len` that holds.
    fn packed_run(&self, guest: u64, max_len: u64) -> Result<(Option<Run>, u64)> {
        let bits = self.geometry().cluster_bits;
        let first = guest >> bits;
        let last = guest.saturating_add(max_len.saturating_sub(1)) >> bits;
        let Some((cluster, stream)) = self.compressed.packer().first_in(first..last + 1) else {
            return Ok((None, max_len));
        };
        if cluster > first {
            return Ok((None, max_len.min((cluster << bits) - guest)));
        }
        let corrupt =
            |e: EntryError| Error::new(ErrorKind::Corrupt, e.to_string()).on(self.path()).at_guest(guest);
        let word = CompressedRange::encode(HostOffset(stream.offset()), stream.len(), self.geometry())
            .map_err(corrupt)?;
        let stream = CompressedRange::decode(word, self.geometry()).map_err(corrupt)?;
        let rest = self.geometry().cluster_size() - (guest & (self.geometry().cluster_size() - 1));
        Ok((Some(Run::Compressed { stream }), max_len.min(rest)))
    }

    /// Whether something in the range was packed and is not linked yet: the tables, and what is derived from them,
    /// say what was there before.
    #[inline]
    pub(crate) fn has_packed(&self, guest: u64, len: u64) -> bool {
        let bits = self.geometry().cluster_bits;
        let last = guest.saturating_add(len.saturating_sub(1)) >> bits;
        self.compressed.packer().first_in(guest >> bits..last + 1).is_some()
    }

    /// The bytes of a stream that is still in memory, or a part of it; `None` if it is in the file.
    pub(crate) async fn packed_bytes(
        self: &Arc<Self>,
        worker: &Worker,
        guest: u64,
        offset: u64,
    ) -> Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        loop {
            match self.compressed.packer().copy_stream(guest, offset, &mut bytes) {
                StreamPlace::Memory => return Ok(Some(bytes)),
                StreamPlace::File => return Ok(None),
                StreamPlace::Lost => {
                    let guest = guest << self.geometry().cluster_bits;
                    return Err(vanished(self.path()).at_guest(guest));
                }
                StreamPlace::Split(in_file) => {
                    let at = (in_file.start - offset) as usize;
                    let len = (in_file.end - in_file.start) as usize;
                    let (bufs, skip) =
                        self.read_stream(worker, in_file, guest << self.geometry().cluster_bits).await?;
                    if let Some(gap) = bytes.get_mut(at..at + len) {
                        bufs.copy_to(skip, gap);
                    }
                    return Ok(Some(bytes));
                }
                StreamPlace::BeingWritten => {
                    let mut seen = false;
                    poll_fn(|cx| self.compressed.packer().poll_change(&mut seen, cx.waker())).await;
                }
            }
        }
    }
}
