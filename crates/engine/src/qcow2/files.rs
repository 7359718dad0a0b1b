//! The files of an open image, and whether they may still be written.

use crate::sync::Mutex;
use crate::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};
use crate::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, IoBuf, Worker};

/// Bytes of one write of a table at most.
const WRITE_AT_ONCE: usize = 1 << 20;

/// The image file, and the data file beside it if there is one. Clones are the same files.
#[derive(Debug, Clone)]
pub(crate) struct ImageFiles {
    path: Arc<PathBuf>,
    file: File,
    data_file: Option<File>,
    access: WriteAccess,
    poison: Arc<Poison>,
}

/// Whether the image was opened to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteAccess {
    ReadOnly,
    ReadWrite,
}

/// Why nothing can be written any more.
#[derive(Debug, Default)]
struct Poison {
    why: Mutex<Option<Error>>,
    is_set: AtomicBool,
}

impl ImageFiles {
    pub(crate) fn new(file: File, data_file: Option<File>, access: WriteAccess) -> Self {
        let path = Arc::new(file.path().to_owned());
        Self { path, file, data_file, access, poison: Arc::default() }
    }

    /// Path of the image file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The image file: it has all metadata.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The external data file.
    pub(crate) fn data_file(&self) -> Option<&File> {
        self.data_file.as_ref()
    }

    /// The file that guest data lies in.
    pub(crate) fn data(&self) -> &File {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    /// Whether the image was opened for writing.
    pub(crate) fn is_writable(&self) -> bool {
        self.access == WriteAccess::ReadWrite
    }

    /// Ends all writing of this opening. The first reason is kept.
    pub(crate) fn poison(&self, why: &Error) {
        let message =
            format!("writing has stopped after an earlier failure: {}; open the image again", why.message());
        self.refuse_changes(Error::new(ErrorKind::Poisoned, message).on(self.path()));
    }

    /// Has every change fail from now on, with this error unless there is an earlier one.
    pub(crate) fn refuse_changes(&self, error: Error) {
        self.poison.why.lock().get_or_insert(error);
        self.poison.is_set.store(!sabotage::is(Fault::ForgetPoison), Release);
    }

    /// Fails if the image can't be written.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if !self.is_writable() {
            return Err(
                Error::new(ErrorKind::ReadOnly, "the image was opened for reading only").on(self.path())
            );
        }
        self.check_not_poisoned()
    }

    /// Fails if writing has stopped. An image opened for reading has nothing that could be lost.
    pub(crate) fn check_not_poisoned(&self) -> Result<()> {
        if self.is_writable() && self.poison.is_set.load(Acquire) {
            let why = self.poison.why.lock();
            if let Some(error) = &*why {
                return Err(error.clone());
            }
        }
        Ok(())
    }

    /// Makes what was written to `file` durable. A failed sync leaves unknown what is durable, so writing stops. One that only
    /// takes long has not failed: it is waited for.
    pub(crate) async fn barrier(&self, worker: &Worker, file: &File) -> Result<()> {
        if sabotage::is(Fault::SkipDataFileBarrier)
            && self.data_file.as_ref().is_some_and(|d| d.id() == file.id())
        {
            return Ok(());
        }
        worker.flush(file).await.map_err(|e| {
            let error = Error::from(e).on(self.path());
            self.poison(&error);
            error
        })
    }

    /// Makes guest data durable where no metadata changed.
    pub(crate) async fn sync(&self, worker: &Worker) -> Result<()> {
        self.check_not_poisoned()?;
        self.barrier(worker, self.data()).await
    }

    /// Writes bytes of metadata.
    pub(crate) async fn write_at(&self, worker: &Worker, offset: u64, bytes: &[u8]) -> Result<()> {
        for (index, part) in bytes.chunks(WRITE_AT_ONCE).enumerate() {
            let at = offset + (index * WRITE_AT_ONCE) as u64;
            self.file.announce("metadata");
            let (result, _) = worker.write(&self.file, at, IoBuf::copy_of(part).into()).await;
            result.map_err(|e| Error::from(e).on(self.path()))?;
        }
        Ok(())
    }
}
