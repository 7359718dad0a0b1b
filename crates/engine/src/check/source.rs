//! The image file as a check sees it: the header, tables read ahead in order, small synchronous writes.

use super::options::CheckOptions;
use crate::error::format_error;
use crate::progress::Throttle;
use crate::qcow2::fork_seal::sealed_error;
use crate::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use zebu_qcow2::{Autoclear, Geometry, Header, Incompatible, Purpose};
use zebu_storage::{File, FileExtent, FileKind, IoBuf, IoBufs, IoError, JoinHandle, Worker};

/// Bytes that suffice for [`Header::prefix`].
const PREFIX_BYTES: usize = 512;

/// An open image file and its header.
pub(super) struct Source<'a> {
    pub(super) worker: &'a Worker,
    pub(super) file: &'a File,
    pub(super) options: &'a CheckOptions,
    pub(super) header: Header,
    pub(super) geometry: Geometry,
    throttle: Throttle,
}

impl<'a> Source<'a> {
    /// Reads the header.
    pub(super) async fn open(worker: &'a Worker, file: &'a File, options: &'a CheckOptions) -> Result<Self> {
        let failed = |e: IoError| Error::from(e).on(file.path());
        let prefix = read(worker, file, 0, PREFIX_BYTES).await.map_err(failed)?;
        let prefix = Header::prefix(prefix.as_slice()).map_err(|e| format_error(file.path(), &e))?;
        let first = read(worker, file, 0, prefix.cluster_size() as usize).await.map_err(failed)?;
        let (header, _) =
            Header::parse(first.as_slice(), Purpose::Check).map_err(|e| format_error(file.path(), &e))?;
        let geometry = header.geometry();
        let throttle = Throttle::new(&options.control);
        Ok(Self { worker, file, options, header, geometry, throttle })
    }

    /// Fails if the image is sealed, and so only read.
    pub(super) fn refuse_sealed(&self) -> Result<()> {
        let seal = self.header.seal();
        if seal.is_sealed() { Err(sealed_error(self.file.path(), &seal)) } else { Ok(()) }
    }

    /// Waits until `bytes` may be read under the rate limit.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`].
    pub(super) async fn take_turn(&self, bytes: u64) -> Result<()> {
        self.throttle.wait(self.worker, bytes).await
    }

    /// Bytes of the file.
    pub(super) fn file_len(&self) -> u64 {
        self.file.len()
    }

    /// Clusters of the file, the last one perhaps in part.
    pub(super) fn file_clusters(&self) -> u64 {
        self.geometry.host_clusters(self.file_len())
    }

    /// Whether bytes from `offset` on reach at least a cluster past the end of the file. A region may end in the
    /// last cluster's part that the file does not have: it reads as zero.
    pub(super) fn is_past_end(&self, offset: u64, size: u64) -> bool {
        let end = u128::from(offset) + u128::from(size);
        end >= u128::from(self.file_len()) + u128::from(self.geometry.cluster_size())
    }

    /// Reads `len` bytes; what lies past the end of the file is zero.
    pub(super) async fn read(&self, offset: u64, len: usize) -> Result<IoBuf, IoError> {
        read(self.worker, self.file, offset, len).await
    }

    /// Writes `bytes`.
    pub(super) async fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let bufs = IoBufs::from(IoBuf::copy_of(bytes));
        self.file.announce("metadata");
        let (result, _) = self.worker.write(self.file, offset, bufs).await;
        result.map_err(|e| Error::from(e).on(self.file.path()))
    }

    /// Writes the parts of `new` that differ from `old`, in blocks of at most 4096 bytes aligned in the file, so
    /// that each is written whole or not at all.
    pub(super) async fn write_changes(&self, offset: u64, old: &[u8], new: &[u8]) -> Result<()> {
        const BLOCK: usize = 4096;
        debug_assert_eq!(old.len(), new.len());
        for (index, (old, new)) in old.chunks(BLOCK).zip(new.chunks(BLOCK)).enumerate() {
            if old != new {
                self.write(offset + (index * BLOCK) as u64, new).await?;
            }
        }
        Ok(())
    }

    /// Makes what was written durable.
    pub(super) async fn flush(&self) -> Result<()> {
        self.worker.flush(self.file).await.map_err(|e| Error::from(e).on(self.file.path()))
    }

    /// Clears the autoclear bits that are not known, before the first write, as the format asks.
    pub(super) async fn clear_unknown_autoclear(&mut self) -> Result<()> {
        let known = self.header.autoclear & Autoclear::KNOWN;
        if known != self.header.autoclear {
            self.write(88, &known.bits().to_be_bytes()).await?;
            self.flush().await?;
            self.header.autoclear = known;
        }
        Ok(())
    }

    /// Clears the dirty and the corrupt bit, after everything else is durable.
    pub(super) async fn clear_dirty_and_corrupt(&mut self) -> Result<()> {
        let old = self.header.incompatible();
        let new = old - (Incompatible::DIRTY | Incompatible::CORRUPT);
        if new != old {
            self.flush().await?;
            self.write(72, &new.bits().to_be_bytes()).await?;
            self.flush().await?;
            self.header
                .set_incompatible(new)
                .map_err(|e| Error::new(ErrorKind::Corrupt, e.to_string()).on(self.file.path()))?;
        }
        Ok(())
    }

    /// The tables of `len` bytes at the offsets of `items`, in that order, the next ones being read meanwhile.
    /// `total_bytes` of all of them tells whether looking for holes pays.
    pub(super) fn tables<T, I: Iterator<Item = (u64, T)>>(
        &self,
        len: usize,
        items: I,
        total_bytes: u64,
    ) -> Tables<'_, T, I> {
        // A file with fewer blocks than its tables have bytes must have tables in holes, which are not read. In
        // any other file, the tables are at most as large as what is stored, and no look for holes is needed.
        let look_for_holes = self.file.kind() == FileKind::Regular
            && self.file.disk_usage().is_ok_and(|usage| usage < total_bytes);
        Tables {
            source: self,
            len,
            items,
            in_flight: VecDeque::new(),
            free: Vec::new(),
            extent: None,
            look_for_holes,
        }
    }
}

async fn read(worker: &Worker, file: &File, offset: u64, len: usize) -> Result<IoBuf, IoError> {
    file.announce("metadata");
    let (result, mut bufs) = worker.read(file, offset, IoBufs::from(worker.buffer(len))).await;
    result?;
    match bufs.pop_part() {
        Some(buf) if bufs.parts().is_empty() && buf.len() == len => Ok(buf),
        _ => unreachable!("a read returns the buffers that it was given"),
    }
}

/// The content of a table.
pub(super) enum Content {
    /// Nothing but zeroes.
    Zero,
    /// These bytes.
    Bytes(IoBuf),
    /// It could not be read.
    Failed(IoError),
}

enum Reading {
    Zero,
    Started(JoinHandle<(Result<(), IoError>, IoBufs)>),
}

/// Tables that are read at once, at most: each takes a cluster of memory.
const MOST_READS: usize = 1024;

/// Tables in order, read ahead.
pub(super) struct Tables<'s, T, I> {
    source: &'s Source<'s>,
    len: usize,
    items: I,
    in_flight: VecDeque<(T, Reading)>,
    free: Vec<IoBuf>,
    extent: Option<FileExtent>,
    look_for_holes: bool,
}

impl<T, I: Iterator<Item = (u64, T)>> Tables<'_, T, I> {
    /// The next table.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`].
    pub(super) async fn next(&mut self) -> Result<Option<(T, Content)>> {
        self.source.options.control.cancel.check()?;
        while self.in_flight.len() < self.source.options.parallel.clamp(1, MOST_READS) {
            let Some((offset, tag)) = self.items.next() else { break };
            let reading = if self.is_zero(offset).await {
                Reading::Zero
            } else {
                self.source.take_turn(self.len as u64).await?;
                self.start(offset)
            };
            self.in_flight.push_back((tag, reading));
        }
        let Some((tag, reading)) = self.in_flight.pop_front() else { return Ok(None) };
        let content = match reading {
            Reading::Zero => Content::Zero,
            Reading::Started(handle) => match handle.await {
                (Ok(()), mut bufs) => bufs.pop_part().map_or(Content::Zero, Content::Bytes),
                (Err(error), _) => Content::Failed(error),
            },
        };
        Ok(Some((tag, content)))
    }

    /// Gives a buffer back for reuse.
    pub(super) fn recycle(&mut self, buf: IoBuf) {
        self.free.push(buf);
    }

    fn start(&mut self, offset: u64) -> Reading {
        let (worker, file) = (self.source.worker.uncounted(), self.source.file.clone());
        let buf = self.free.pop().unwrap_or_else(|| worker.buffer(self.len));
        Reading::Started(
            self.source.worker.spawn(async move { worker.read(&file, offset, IoBufs::from(buf)).await }),
        )
    }

    async fn is_zero(&mut self, offset: u64) -> bool {
        if offset >= self.source.file_len() {
            return true;
        }
        if !self.look_for_holes {
            return false;
        }
        let known = self.extent.filter(|e| e.offset <= offset && offset - e.offset < e.len);
        let extent = if let Some(extent) = known {
            extent
        } else if let Ok(extent) = self.source.worker.extent_at(self.source.file, offset).await {
            extent
        } else {
            self.look_for_holes = false;
            return false;
        };
        self.extent = Some(extent);
        let hole_end = extent.offset.saturating_add(extent.len);
        let end = (offset + self.len as u64).min(self.source.file_len());
        extent.hole && end <= hole_end
    }
}
