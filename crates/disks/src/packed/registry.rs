//! Packed files that were unpacked, by the name that the command line gave.

use super::decoding::Fault;
use super::stream::PackedStream;
use super::window::Window;
use std::collections::HashMap;
use std::fs::File as StdFile;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_engine::storage::{File, IoError, IoErrorKind, Op, OpenFlags, Storage};
use zebu_storage::sync::Mutex;

/// The bytes of what a packed file holds.
pub(super) enum Unpacked {
    /// A file of its own.
    Whole(Arc<StdFile>),
    /// A part of another.
    Window(Arc<Window>),
    /// Read in order.
    Stream(Arc<PackedStream>),
}

/// Packed files, by their names.
#[derive(Default)]
pub(crate) struct UnpackedFiles(Mutex<HashMap<PathBuf, Unpacked>>);

impl UnpackedFiles {
    /// Has `name` lead to these bytes from now on.
    pub(super) fn note(&self, name: &Path, unpacked: Unpacked) {
        self.0.lock().insert(name.to_owned(), unpacked);
    }

    /// Why what was noted under a name can't be read, if it was found out.
    pub(super) fn fault(&self, name: &Path) -> Option<Fault> {
        match self.0.lock().get(name)? {
            Unpacked::Stream(stream) => stream.fault(),
            Unpacked::Whole(_) | Unpacked::Window(_) => None,
        }
    }

    /// Opens what was noted under a name; `None` if nothing was.
    pub(crate) fn open(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>> {
        Some(match self.0.lock().get(name)? {
            // It has no name, so nobody else can have it open, and its pages are as near as they can be.
            Unpacked::Whole(file) => match file.try_clone() {
                Ok(file) => {
                    let flags = flags.clone().direct(false);
                    File::from_descriptor(OwnedFd::from(file), name, &flags)
                }
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    Err(IoError::of_file(Op::Open, IoErrorKind::Os(errno), name))
                }
            },
            Unpacked::Window(window) => from_storage(Arc::clone(window) as Arc<dyn Storage>, name, flags),
            Unpacked::Stream(stream) => from_storage(Arc::clone(stream) as Arc<dyn Storage>, name, flags),
        })
    }
}

fn from_storage(storage: Arc<dyn Storage>, name: &Path, flags: &OpenFlags) -> Result<File, IoError> {
    File::from_storage(storage, &name.to_string_lossy(), flags)
}
