//! A part of a file as a file of its own, for reading: a member of a tar file, in place.

use super::pieces::Pieces;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use zebu_drivers::fresh_identity;
use zebu_engine::storage::{Completer, Storage, StorageAbilities, StorageDone, StorageOp};
use zebu_storage::sync::Mutex;

/// Threads that read.
const THREADS: usize = 4;

/// The window.
pub(crate) struct Window {
    bytes: Arc<Pieces>,
    identity: u64,
    work: Mutex<Sender<Completer>>,
}

impl Window {
    /// The window on pieces that lie within the file.
    pub(crate) fn new(file: Arc<File>, bytes: Arc<Pieces>) -> io::Result<Arc<Self>> {
        let (work, queue) = channel::<Completer>();
        let queue = Arc::new(Mutex::new(queue));
        for number in 0..THREADS {
            let (file, bytes, queue) = (Arc::clone(&file), Arc::clone(&bytes), Arc::clone(&queue));
            std::thread::Builder::new().name(format!("zebu-member-{number}")).spawn(move || {
                loop {
                    let next = queue.lock().recv();
                    // The window was closed.
                    let Ok(request) = next else { return };
                    serve(&file, &bytes, request);
                }
            })?;
        }
        let identity = fresh_identity();
        Ok(Arc::new(Self { bytes, identity, work: Mutex::new(work) }))
    }
}

fn serve(file: &File, bytes: &Pieces, mut request: Completer) {
    let done = match request.op() {
        StorageOp::Read { offset, len } if offset.checked_add(len).is_some_and(|end| end <= bytes.len()) => {
            let mut at = offset;
            let read = request.bufs_mut().parts_mut().iter_mut().try_for_each(|buffer| {
                bytes.read_exact_at(file, buffer.as_mut_slice(), at)?;
                at += buffer.len() as u64;
                Ok::<(), io::Error>(())
            });
            read.map(|()| StorageDone::Moved(len)).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))
        }
        StorageOp::Read { .. } => Err(libc::EINVAL),
        StorageOp::ExtentAt { offset } => {
            let (len, hole) = bytes.run_at(offset);
            Ok(StorageDone::Extent { len, hole })
        }
        StorageOp::Flush => Ok(StorageDone::Done),
        _ => Err(libc::EROFS),
    };
    request.finish(done);
}

impl Storage for Window {
    fn len(&self) -> u64 {
        self.bytes.len()
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn abilities(&self) -> StorageAbilities {
        if self.bytes.has_holes() { StorageAbilities::EXTENTS } else { StorageAbilities::empty() }
    }

    fn submit(&self, _: StorageOp, done: Completer) {
        // A request that nobody takes fails when it is dropped.
        let _ = self.work.lock().send(done);
    }
}
