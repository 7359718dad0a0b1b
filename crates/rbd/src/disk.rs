//! An image as a storage.

use crate::error::RbdError;
use crate::ffi::Call;
use crate::jobs::{self, Job};
use crate::name::RbdName;
use crate::open::{self, Existence};
use crate::options::RbdOptions;
use crate::pending::Kind;
use crate::shared::{RbdStats, Shared};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use zebu_storage::sync::Mutex;
use zebu_storage::{Access, Alignment, Completer, Storage, StorageAbilities, StorageDone, StorageOp};

/// Most steps of closing an image that wait for an answer of the cluster.
const STEPS_OF_CLOSING: u32 = 4;

/// An image of a cluster, or a snapshot of one.
///
/// An image that is open for writing grows when something is written past its end. It grows in steps, and is cut to what was
/// written when it is closed. librbd's own cache is off unless the name turns it on, so that a write is answered when it is safe.
pub struct RbdDisk {
    shared: Arc<Shared>,
    /// None once it is to be closed.
    jobs: Mutex<Option<mpsc::Sender<Job>>>,
    /// Disconnected once the image is closed.
    closed: Mutex<mpsc::Receiver<()>>,
}

impl RbdDisk {
    /// Opens an image. A snapshot is open for reading only, whatever `access` is.
    ///
    /// # Errors
    /// The name, the errno and the reason: no librbd, no configuration, no key, no such pool or image, no right to it, or a
    /// cluster that does not answer.
    pub fn open(name: RbdName, access: Access, options: &RbdOptions) -> Result<Self, RbdError> {
        Self::start(name, access, Existence::IsThere, options)
    }

    /// Makes an image of `size` bytes and opens it for writing.
    ///
    /// # Errors
    /// As of [`RbdDisk::open`]; there is an image of this name already; the name is that of a snapshot.
    pub fn create(name: RbdName, size: u64, options: &RbdOptions) -> Result<Self, RbdError> {
        if name.snapshot.is_some() {
            return Err(RbdError::new(&name.to_string(), libc::EINVAL, "a snapshot can't be made this way"));
        }
        Self::start(name, Access::ReadWrite, Existence::Make(size), options)
    }

    fn start(
        name: RbdName,
        access: Access,
        existence: Existence,
        options: &RbdOptions,
    ) -> Result<Self, RbdError> {
        let opened = open::open(&name, access, existence, options)?;
        let shown = name.to_string();
        let facts = opened.image.facts().map_err(|errno| {
            opened.image.close();
            RbdError::new(&shown, errno, open::given_up(errno, opened.timeout))
        })?;
        let shared = Arc::new(Shared::new(name, access, facts, opened));
        let (jobs, received) = mpsc::channel();
        let (closing, closed) = mpsc::channel();
        let thread = || std::thread::Builder::new().name("zebu-rbd".to_owned());
        let (worker, clock) = (Arc::clone(&shared), Arc::clone(&shared));
        let watch = move || clock.pending.watch(|| clock.note(libc::ETIMEDOUT));
        let started = thread().spawn(watch).and_then(|_| {
            thread().spawn(move || {
                jobs::run(&worker, &received);
                worker.pending.close();
                drop(closing);
            })
        });
        if let Err(error) = started {
            shared.pending.close();
            shared.image.close();
            let reason = format!("no thread could be made: {error}");
            return Err(RbdError::new(&shown, libc::EAGAIN, reason));
        }
        Ok(Self { shared, jobs: Mutex::new(Some(jobs)), closed: Mutex::new(closed) })
    }

    /// Its name.
    pub fn name(&self) -> &RbdName {
        &self.shared.name
    }

    /// Whether it was opened for writing.
    pub fn access(&self) -> Access {
        self.shared.access
    }

    /// Counters since it was opened.
    pub fn stats(&self) -> RbdStats {
        self.shared.stats()
    }

    /// Why a request failed first, if that ever happened.
    pub fn given_up(&self) -> Option<String> {
        self.shared.given_up()
    }

    /// Has requests end soon: each fails when it has had a few seconds. For programs that are told to end.
    pub fn hurry(&self) {
        self.shared.pending.hurry();
    }

    /// Closes the image, which gives its lock back. Waits for requests that are under way and for the cluster, but not for ever: the
    /// rest is left to the disk's thread then. Later requests fail. Dropping the disk does the same.
    pub fn close(&self) {
        let jobs = self.jobs.lock().take();
        let is_first = jobs.is_some();
        drop(jobs);
        if is_first && !self.shared.image.is_calling_back() {
            let closed = self.closed.lock();
            let patience = self.shared.pending.at_most(self.shared.timeout * STEPS_OF_CLOSING);
            let _ = closed.recv_timeout(patience);
        }
    }

    fn give(&self, job: Job) {
        // A thread that is gone drops the job, which is the answer EIO.
        if let Some(jobs) = &*self.jobs.lock() {
            let _ = jobs.send(job);
        }
    }
}

impl Drop for RbdDisk {
    fn drop(&mut self) {
        self.close();
    }
}

impl Storage for RbdDisk {
    fn len(&self) -> u64 {
        self.shared.end.load(Ordering::Acquire)
    }

    fn identity(&self) -> u64 {
        self.shared.identity
    }

    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, offset: 1, length: 1 }
    }

    fn abilities(&self) -> StorageAbilities {
        let mut abilities = StorageAbilities::EXTENTS;
        if self.shared.access == Access::ReadWrite {
            abilities |= StorageAbilities::WRITE | StorageAbilities::SET_LEN;
            let zeroing = StorageAbilities::PUNCH | StorageAbilities::ZERO_RANGE;
            abilities.set(zeroing, self.shared.library.can_zero());
        }
        abilities
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let shared = &self.shared;
        match op {
            StorageOp::Read { offset, len } => {
                shared.begin(done, Kind::Other, |ticket| {
                    shared.start(Call::Read { offset }, vec![0; len as usize], ticket);
                });
            }
            StorageOp::Write { offset, len } => {
                let mut data = vec![0; len as usize];
                done.bufs().copy_to(0, &mut data);
                shared.begin(done, Kind::Change, |ticket| {
                    let end = offset.saturating_add(len);
                    if end > shared.size.load(Ordering::Acquire) {
                        self.give(Job::WritePastEnd { offset, end, data, ticket });
                    } else {
                        shared.start(Call::Write { offset }, data, ticket);
                    }
                });
            }
            // What was given up may come after what this would make safe.
            StorageOp::Flush if shared.pending.is_unsettled() => done.finish(Err(libc::EIO)),
            StorageOp::Flush => shared.begin(done, Kind::Other, |ticket| {
                shared.start(Call::Flush, Vec::new(), ticket);
            }),
            StorageOp::Punch { offset, len } => shared.begin(done, Kind::Change, |ticket| {
                shared.start(Call::Punch { offset, len }, Vec::new(), ticket);
            }),
            StorageOp::ZeroRange { offset, len } => shared.begin(done, Kind::Change, |ticket| {
                shared.start(Call::Zero { offset, len }, Vec::new(), ticket);
            }),
            StorageOp::SetLen { len } => {
                shared.begin(done, Kind::Change, |ticket| self.give(Job::SetLen { len, ticket }));
            }
            StorageOp::ExtentAt { offset } => match shared.extent(offset) {
                Some((len, hole)) => done.finish(Ok(StorageDone::Extent { len, hole })),
                None => shared.begin(done, Kind::Other, |ticket| self.give(Job::Extent { offset, ticket })),
            },
            _ => done.finish(Err(libc::EOPNOTSUPP)),
        }
    }
}

#[cfg(all(test, target_feature = "crt-static"))]
mod tests {
    use super::*;

    #[test]
    fn a_static_program_says_that_it_can_load_nothing() {
        let error =
            RbdDisk::open(RbdName::new("p", "i"), Access::ReadOnly, &RbdOptions::default()).err().unwrap();
        assert!(
            error.to_string().contains("rbd:p/i") && error.reason().contains("statically linked"),
            "{error}"
        );
    }
}
