//! A file that grows ahead of the writes to it.

use crate::sync::AsyncMutex;
use crate::transfer::{FileRange, Transfer, transfer};
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_storage::{File, FileKind, IoBuf, IoBufs, Worker};

/// Bytes by which the file grows at once: holes, which the end takes back. It grows to its greatest length at most, and without
/// them where the system allows no such length.
const STEP: u64 = 64 << 20;

/// Parts of one write: the system takes no more than 1024.
const MOST_PARTS: usize = 512;

/// A place in a file, and what belongs there.
#[derive(Debug, Clone)]
pub(crate) enum FilePlace {
    /// `len` bytes of a buffer, from `at` on.
    OfDisk { host: u64, at: usize, len: usize },
    /// A table, or what else lies between the parts of a disk.
    Table { host: u64, bytes: Vec<u8> },
}

impl FilePlace {
    /// Adds a part of a disk. It becomes one with the last part if it goes on there.
    pub(crate) fn add_part(places: &mut Vec<Self>, host: u64, at: usize, len: usize) {
        match places.last_mut() {
            Some(Self::OfDisk { host: last, at: begin, len: before })
                if *last + *before as u64 == host && *begin + *before == at =>
            {
                *before += len;
            }
            _ => places.push(Self::OfDisk { host, at, len }),
        }
    }

    /// Whether the other one is next to it in the file.
    fn is_before(&self, other: &Self) -> bool {
        self.host() + self.len() as u64 == other.host()
    }

    fn host(&self) -> u64 {
        match self {
            Self::OfDisk { host, .. } | Self::Table { host, .. } => *host,
        }
    }

    /// The part of it that belongs to a part of the buffer, counted from the start of that.
    pub(crate) fn within(&self, part: &Range<usize>) -> Option<Self> {
        let Self::OfDisk { host, at, len } = self else { return None };
        let (start, end) = (part.start.max(*at), part.end.min(at + len));
        let host = host + start.saturating_sub(*at) as u64;
        (start < end).then(|| Self::OfDisk { host, at: start - part.start, len: end - start })
    }

    fn len(&self) -> usize {
        match self {
            Self::OfDisk { len, .. } => *len,
            Self::Table { bytes, .. } => bytes.len(),
        }
    }
}

/// A regular file, or a device. Several writes at a time may go beyond its end; it is made longer first, because no two requests may
/// extend a file at once. Clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct GrowingFile {
    file: File,
    /// Bytes that it ever needs.
    most: u64,
    growing: Arc<AsyncMutex>,
}

impl GrowingFile {
    pub(crate) fn new(file: File, most: u64) -> Self {
        Self { file, most, growing: Arc::default() }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) async fn write(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        if let Err(error) = self.reserve(worker, offset.saturating_add(bufs.len() as u64)).await {
            return (Err(error), bufs);
        }
        let (written, bufs) = worker.write(&self.file, offset, bufs).await;
        (written.map_err(|e| Error::from(e).on(self.file.path())), bufs)
    }

    /// Writes the parts of `bufs` that have places, in ascending order, and tables between them. What is next to each other in
    /// the file is one write.
    pub(crate) async fn write_placed(
        &self,
        worker: &Worker,
        places: &[FilePlace],
        mut bufs: IoBufs,
    ) -> (Result<()>, IoBufs) {
        let mut done = IoBufs::new();
        let mut taken = 0;
        let mut result = Ok(());
        for run in places.chunk_by(FilePlace::is_before).flat_map(|run| run.chunks(MOST_PARTS)) {
            let mut whole = IoBufs::new();
            let mut gaps = Vec::with_capacity(run.len());
            for place in run {
                match place {
                    FilePlace::OfDisk { at, len, .. } => {
                        gaps.push(bufs.split_to(at - taken));
                        whole.append(bufs.split_to(*len));
                        taken = at + len;
                    }
                    FilePlace::Table { bytes, .. } => {
                        let mut table = worker.buffer(bytes.len());
                        table.as_mut_slice().copy_from_slice(bytes);
                        gaps.push(IoBufs::new());
                        whole.push_part(table);
                    }
                }
            }
            let host = run.first().map_or(0, FilePlace::host);
            (result, whole) = self.write(worker, host, whole).await;
            for (place, gap) in run.iter().zip(gaps) {
                done.append(gap);
                let part = whole.split_to(place.len());
                if matches!(place, FilePlace::OfDisk { .. }) {
                    done.append(part);
                }
            }
            if result.is_err() {
                break;
            }
        }
        done.append(bufs);
        (result, done)
    }

    /// Has the kernel move a range of a file to the parts of a disk in `places`: how many bytes were moved, from its start on, and if
    /// not all, why not.
    pub(crate) async fn transfer(
        &self,
        worker: &Worker,
        how: Transfer,
        source: &FileRange,
        places: &[FilePlace],
    ) -> (u64, Option<Error>) {
        let mut done = 0;
        let places: Vec<FilePlace> =
            places.iter().filter(|place| matches!(place, FilePlace::OfDisk { .. })).cloned().collect();
        for run in places.chunk_by(FilePlace::is_before) {
            let len: u64 = run.iter().map(|place| place.len() as u64).sum();
            let host = run.first().map_or(0, FilePlace::host);
            let moved = match self.reserve(worker, host.saturating_add(len)).await {
                Ok(()) => transfer(worker, how, &source.from(done).first(len), &self.file, host).await,
                Err(error) => Err(error),
            };
            if let Err(refusal) = moved {
                return (done, Some(refusal));
            }
            done += len;
        }
        (done, None)
    }

    pub(crate) async fn write_bytes(&self, worker: &Worker, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut buffer = worker.buffer(bytes.len());
        buffer.as_mut_slice().copy_from_slice(bytes);
        self.write(worker, offset, IoBuf::into(buffer)).await.0
    }

    async fn reserve(&self, worker: &Worker, end: u64) -> Result<()> {
        if end <= self.file.len() {
            return Ok(());
        }
        let _growing = self.growing.lock().await;
        if end > self.file.len() {
            let ahead = end.saturating_add(STEP).min(self.most);
            if ahead <= end || self.set_len(worker, ahead).await.is_err() {
                self.set_len(worker, end).await?;
            }
        }
        Ok(())
    }

    /// Cuts the file, or makes it longer. No write is under way beyond that length. A device stays as long as it is.
    pub(crate) async fn set_len(&self, worker: &Worker, len: u64) -> Result<()> {
        if self.file.kind() == FileKind::BlockDevice {
            if len <= self.file.len() {
                return Ok(());
            }
            let message = format!("the device holds {} bytes, and more are needed", self.file.len());
            return Err(Error::new(ErrorKind::NoSpace, message).on(self.file.path()));
        }
        worker.set_len(&self.file, len).await.map_err(|e| Error::from(e).on(self.file.path()))
    }

    pub(crate) async fn flush(&self, worker: &Worker) -> Result<()> {
        worker.flush(&self.file).await.map_err(|e| Error::from(e).on(self.file.path()))
    }
}
