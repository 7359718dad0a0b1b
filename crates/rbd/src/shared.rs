//! State that a disk, its threads and its requests share.

use crate::extents::KnownRuns;
use crate::ffi::{Call, Facts, Image, Library};
use crate::name::RbdName;
use crate::open::{self, Opened};
use crate::pending::{Kind, Pending, Ticket};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use zebu_storage::sync::Mutex;
use zebu_storage::{Access, Completer, StorageDone};

/// librbd may wait for so many answers before it gives its own.
const STEPS_OF_REQUEST: u32 = 2;

/// Counters of one disk since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RbdStats {
    /// Requests that were handed to librbd.
    pub requests: u64,
    /// Bytes of data that were read.
    pub read_bytes: u64,
    /// Bytes of data that were written.
    pub written_bytes: u64,
}

/// State that the disk, its thread and its requests share.
pub(crate) struct Shared {
    pub(crate) name: RbdName,
    pub(crate) library: &'static Library,
    pub(crate) image: Image,
    pub(crate) facts: Facts,
    pub(crate) identity: u64,
    pub(crate) access: Access,
    pub(crate) timeout: Duration,
    /// Bytes of the image, which may lie behind what the disk has.
    pub(crate) size: AtomicU64,
    /// Bytes of the disk: where its last write, or its length, ends.
    pub(crate) end: AtomicU64,
    pub(crate) runs: KnownRuns,
    pub(crate) pending: Arc<Pending>,
    requests: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    given_up: Mutex<Option<String>>,
}

impl Shared {
    /// The state of an image that is open.
    pub(crate) fn new(name: RbdName, access: Access, facts: Facts, opened: Opened) -> Self {
        let Opened { library, image, fsid, pool, timeout } = opened;
        let mut hasher = DefaultHasher::new();
        let by_name = if facts.id.is_empty() { name.image.as_str() } else { "" };
        (&fsid, pool, &name.namespace, &facts.id, by_name, &name.snapshot).hash(&mut hasher);
        Self {
            library,
            image,
            identity: hasher.finish(),
            access: if name.snapshot.is_some() { Access::ReadOnly } else { access },
            name,
            timeout,
            size: facts.size.into(),
            end: facts.size.into(),
            facts,
            runs: KnownRuns::default(),
            pending: Pending::new(timeout * STEPS_OF_REQUEST),
            requests: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            given_up: Mutex::new(None),
        }
    }

    /// Counters since it was opened.
    pub(crate) fn stats(&self) -> RbdStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RbdStats {
            requests: count(&self.requests),
            read_bytes: count(&self.read_bytes),
            written_bytes: count(&self.written_bytes),
        }
    }

    /// Why a request failed first, if that ever happened.
    pub(crate) fn given_up(&self) -> Option<String> {
        self.given_up.lock().clone()
    }

    /// Notes a request and begins its work.
    pub(crate) fn begin(&self, done: Completer, kind: Kind, work: impl FnOnce(Ticket)) {
        if let Some(ticket) = self.pending.begin(done, kind) {
            work(ticket);
        }
    }

    /// Hands a request to librbd.
    pub(crate) fn start(self: &Arc<Self>, call: Call, data: Vec<u8>, ticket: Ticket) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let is_change = !matches!(call, Call::Read { .. } | Call::Flush);
        if is_change {
            self.runs.change();
        }
        let shared = Arc::clone(self);
        self.image.start(call, data, move |data, result| {
            if is_change {
                // What was looked up meanwhile may not know of it.
                shared.runs.change();
            }
            let result = shared.answer(call, data.len() as u64, result);
            // Whoever waits may drop the disk.
            drop(shared);
            if let Some(mut done) = ticket.end() {
                if let (Call::Read { .. }, Ok(_)) = (call, result) {
                    done.bufs_mut().copy_from(0, &data);
                }
                done.finish(result);
            }
        });
    }

    fn answer(&self, call: Call, len: u64, result: Result<u64, i32>) -> Result<StorageDone, i32> {
        let moved = result.map_err(|errno| self.fail(errno))?;
        match call {
            // Fewer bytes: another client has cut the image.
            Call::Read { .. } if moved < len => Err(self.fail(libc::EIO)),
            Call::Read { .. } => {
                self.read_bytes.fetch_add(len, Ordering::Relaxed);
                Ok(StorageDone::Moved(len))
            }
            Call::Write { offset } => {
                self.written_bytes.fetch_add(len, Ordering::Relaxed);
                self.end.fetch_max(offset.saturating_add(len), Ordering::AcqRel);
                Ok(StorageDone::Moved(len))
            }
            Call::Flush | Call::Punch { .. } | Call::Zero { .. } => Ok(StorageDone::Done),
        }
    }

    /// The length of the run at `offset`, and whether it is a hole, if that is known.
    pub(crate) fn extent(&self, offset: u64) -> Option<(u64, bool)> {
        self.runs.at(offset).map(|(len, hole)| (self.within_disk(offset, len), hole))
    }

    /// The length of a run without what the image has past the disk's end. Not 0.
    pub(crate) fn within_disk(&self, offset: u64, len: u64) -> u64 {
        len.min(self.end.load(Ordering::Acquire).saturating_sub(offset)).max(1)
    }

    /// Notes a failure.
    pub(crate) fn note(&self, errno: i32) {
        let mut given_up = self.given_up.lock();
        given_up.get_or_insert_with(|| open::given_up(errno, self.timeout));
    }

    /// Notes a failure; the errno that the caller gets.
    pub(crate) fn fail(&self, errno: i32) -> i32 {
        self.note(errno);
        match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EROFS | libc::EPERM | libc::ENOMEM => errno,
            _ => libc::EIO,
        }
    }
}
