//! The place of what guests overwrite: memory up to a bound, then a file.

use crate::sync::Mutex;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use zebu_storage::{File, IoBuf, IoBufs, Worker};

/// Where the old bytes of a chunk are.
#[derive(Debug, Clone)]
pub(super) enum Kept {
    Memory(Arc<[u8]>),
    /// In the file, from this offset on.
    File(u64),
}

/// Bytes that are kept, for all disks of a checkpoint.
#[derive(Debug)]
pub(super) struct Spill {
    /// `None`: there is none, or the checkpoint has ended.
    file: Mutex<Option<File>>,
    most_in_memory: u64,
    limit: u64,
    /// The unit of the limit, in words.
    unit: &'static str,
    used: Mutex<Used>,
}

/// Bytes in use.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Used {
    pub(super) in_memory: u64,
    pub(super) in_file: u64,
}

impl Used {
    pub(super) fn all(self) -> u64 {
        self.in_memory + self.in_file
    }
}

impl Spill {
    /// At most `limit` bytes, of which `most_in_memory` are in memory and the others in `file`.
    pub(super) fn new(file: Option<File>, most_in_memory: u64, limit: u64) -> Self {
        let limit = if file.is_some() { limit } else { limit.min(most_in_memory) };
        let unit = if file.is_some() { "bytes" } else { "bytes of memory" };
        Self { file: Mutex::new(file), most_in_memory, limit, unit, used: Mutex::default() }
    }

    /// Gives the file up: nobody reads what is in it any more.
    pub(super) fn end(&self) {
        let file = self.file.lock().take();
        drop(file);
    }

    fn file(&self) -> Option<File> {
        self.file.lock().clone()
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn used(&self) -> Used {
        *self.used.lock()
    }

    /// Keeps bytes. Room in the file is given in whole multiples of them.
    pub(super) async fn keep(&self, worker: &Worker, bufs: IoBufs) -> Result<Kept> {
        let len = bufs.len() as u64;
        let Some(offset) = self.take_room(len)? else {
            let mut bytes = vec![0; bufs.len()];
            bufs.copy_to(0, &mut bytes);
            return Ok(Kept::Memory(bytes.into()));
        };
        let Some(file) = self.file() else { return Err(self.full()) };
        let (written, _) = worker.write(&file, offset, bufs).await;
        written.map_err(|error| {
            let error = Error::from(error);
            let message = format!(
                "what guests overwrite could not be kept: {}; make the checkpoint anew with a spill that has room",
                error.message()
            );
            Error::new(error.kind(), message).with_errno(error.errno()).on(file.path())
        })?;
        Ok(Kept::File(offset))
    }

    /// Takes room for `len` bytes: in memory, or from the offset of the file that it gives.
    fn take_room(&self, len: u64) -> Result<Option<u64>> {
        let mut used = self.used.lock();
        if used.all().saturating_add(len) > self.limit {
            drop(used);
            return Err(self.full());
        }
        if used.in_memory + len <= self.most_in_memory {
            used.in_memory += len;
            return Ok(None);
        }
        let offset = used.in_file;
        used.in_file += len;
        Ok(Some(offset))
    }

    fn full(&self) -> Error {
        let (limit, unit) = (self.limit, self.unit);
        let message = format!(
            "guests have overwritten more than the spill may keep, {limit} {unit}: make the checkpoint anew with a larger \
             limit or a file for the spill, or have its client pull faster"
        );
        Error::new(ErrorKind::NoSpace, message)
    }

    /// Puts a part of what is kept into `bufs`: `bufs` from `at` on gets `len` bytes of the chunk from `from` on.
    pub(super) async fn read(
        &self,
        worker: &Worker,
        kept: &Kept,
        part: Part,
        bufs: &mut IoBufs,
    ) -> Result<()> {
        let Part { from, len, at } = part;
        match (kept, self.file()) {
            (Kept::Memory(bytes), _) => {
                let bytes = bytes.get(from..from + len).ok_or_else(lost)?;
                bufs.copy_from(at, bytes);
            }
            (Kept::File(offset), Some(file)) => {
                let (read, bytes) = worker.read(&file, offset + from as u64, IoBuf::zeroed(len).into()).await;
                read.map_err(|error| Error::from(error).on(file.path()))?;
                let mut copied = vec![0; len];
                bytes.copy_to(0, &mut copied);
                bufs.copy_from(at, &copied);
            }
            (Kept::File(_), None) => return Err(lost()),
        }
        Ok(())
    }
}

/// A part of a chunk, and its place in a buffer. In bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) from: usize,
    pub(super) len: usize,
    pub(super) at: usize,
}

fn lost() -> Error {
    Error::new(ErrorKind::Io, "the spill does not hold what it has kept")
}

#[cfg(test)]
mod tests {
    use super::*;
    use zebu_storage::WorkerConfig;

    #[test]
    fn memory_is_used_first_and_the_limit_is_for_both() {
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        worker.promise_to_drive();
        let spill = Spill::new(None, 8192, u64::MAX);
        assert_eq!(spill.limit(), 8192);
        worker.block_on(async {
            for _ in 0..2 {
                let kept = spill.keep(&worker, IoBuf::copy_of(&[7; 4096]).into()).await.unwrap();
                let mut bufs = IoBuf::zeroed(16).into();
                let part = Part { from: 4088, len: 8, at: 8 };
                spill.read(&worker, &kept, part, &mut bufs).await.unwrap();
                let mut bytes = [0; 16];
                bufs.copy_to(0, &mut bytes);
                assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7]);
            }
            let full = spill.keep(&worker, IoBuf::copy_of(&[7; 4096]).into()).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::NoSpace);
            assert_eq!(spill.used().all(), 8192);
        });
    }
}
