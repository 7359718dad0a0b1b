//! A file as the bottom of a stack of drivers.

use crate::call::{answer, take_bufs};
use zebu_storage::{
    Alignment, Background, Completer, Engine, File, FileId, FileKind, IoError, IoErrorKind, Storage,
    StorageAbilities, StorageDone, StorageOp, Worker,
};

/// A file of the system, or of another storage, on a worker of its own.
pub struct FileDisk {
    file: File,
    worker: Background,
}

impl FileDisk {
    /// Starts the worker.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn new(file: File, engine: Engine) -> Result<Self, IoError> {
        Ok(Self { file, worker: Background::small(engine)? })
    }
}

/// The errno of a failure; that something is not supported is one, too.
pub(crate) fn errno(error: &IoError) -> i32 {
    match error.kind {
        IoErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => error.errno(),
    }
}

async fn run(worker: &Worker, file: &File, op: StorageOp, mut done: Completer) {
    let bufs = take_bufs(&mut done);
    let (result, bufs) = match op {
        StorageOp::Read { offset, len } => {
            let (result, bufs) = worker.read(file, offset, bufs).await;
            (result.map(|()| StorageDone::Moved(len)), bufs)
        }
        StorageOp::Write { offset, len } => {
            let (result, bufs) = worker.write(file, offset, bufs).await;
            (result.map(|()| StorageDone::Moved(len)), bufs)
        }
        StorageOp::ExtentAt { offset } => {
            let found = worker.extent_at(file, offset).await;
            (found.map(|extent| StorageDone::Extent { len: extent.len.max(1), hole: extent.hole }), bufs)
        }
        op => {
            let result = match op {
                StorageOp::Flush => worker.flush(file).await,
                StorageOp::Punch { offset, len } => worker.punch_hole(file, offset, len).await,
                StorageOp::ZeroRange { offset, len } => worker.zero_range(file, offset, len).await,
                StorageOp::Allocate { offset, len } => worker.allocate(file, offset, len).await,
                StorageOp::SetLen { len } => worker.set_len(file, len).await,
                _ => return answer(done, bufs, Err(libc::EOPNOTSUPP)),
            };
            (result.map(|()| StorageDone::Done), bufs)
        }
    };
    answer(done, bufs, result.map_err(|error| errno(&error)));
}

impl Storage for FileDisk {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn files(&self) -> Vec<FileId> {
        self.file.files()
    }

    fn identity(&self) -> u64 {
        let id = self.file.id();
        // The same file below two stacks is the same disk.
        id.dev.rotate_left(32) ^ id.ino
    }

    fn alignment(&self) -> Alignment {
        self.file.alignment()
    }

    fn abilities(&self) -> StorageAbilities {
        let mut abilities = StorageAbilities::EXTENTS;
        let mut add = |has, ability| abilities.set(ability, has);
        let writes = self.file.is_writable();
        add(writes, StorageAbilities::WRITE);
        add(writes && self.file.can_punch(), StorageAbilities::PUNCH);
        add(writes && self.file.can_zero_range(), StorageAbilities::ZERO_RANGE);
        add(writes && self.file.can_allocate(), StorageAbilities::ALLOCATE);
        add(writes && self.file.kind() != FileKind::BlockDevice, StorageAbilities::SET_LEN);
        abilities
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let file = self.file.clone();
        drop(self.worker.run(move |worker| async move { run(&worker, &file, op, done).await }));
    }
}
