//! Objects that are written in parts.
//!
//! An [`Upload`] is a storage that takes each byte once, in nearly any order. A part goes to the store when all its bytes are
//! there. Nothing has the object's name before [`Upload::finish`] has ended the upload, which the store does at once.

mod creation;
mod filling;
mod options;
mod ranges;
mod resume;
mod sending;
mod sizing;

use crate::failure::describe;
use crate::name::StoreName;
use crate::runtime;
use filling::{Filling, Step};
pub use options::{Existing, Length, UploadOptions, UploadStats};
use sending::Sender;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_remote::RemoteError;
use zebu_storage::sync::{Condvar, Mutex, MutexGuard};
use zebu_storage::{Alignment, Completer, Storage, StorageAbilities, StorageDone, StorageOp};

/// How long a store may take for each of two steps when an upload is given up: for what is being sent, and for its parts.
const LONGEST_END: Duration = Duration::from_secs(5);

/// An object that is being written.
pub struct Upload(Arc<Shared>);

struct Shared {
    name: StoreName,
    options: UploadOptions,
    sender: Sender,
    state: Mutex<State>,
    /// Something changed that [`Upload::finish`] waits for.
    changed: Condvar,
}

struct State {
    filling: Filling,
    /// Parts that are being sent.
    sending: usize,
    failure: Option<(i32, String)>,
    is_closed: bool,
}

impl Upload {
    /// Begins to write the object. Nothing is sent before a part is full.
    ///
    /// # Errors
    /// The memory is too small for an object of this size, there are no credentials, or the name has a version.
    pub fn begin(name: StoreName, options: UploadOptions) -> Result<Self, RemoteError> {
        let fail = |errno, reason: String| RemoteError::new(&name.to_string(), errno, reason);
        if name.version().is_some() {
            return Err(fail(
                libc::EINVAL,
                "a version of an object can't be written: leave ?versionId= out".to_owned(),
            ));
        }
        let sizing = sizing::Sizing::of(options.memory, options.most, options.length)
            .map_err(|reason| fail(libc::EINVAL, reason))?;
        let sender = Sender::new(name.clone(), options.http.clone(), sizing.part)?;
        let fixed = (options.length == Length::Fixed).then_some(options.most);
        let state = State {
            filling: Filling::new(sizing.part, sizing.buffers, fixed),
            sending: 0,
            failure: None,
            is_closed: false,
        };
        let shared = Shared { sender, state: Mutex::new(state), changed: Condvar::new(), name, options };
        Ok(Self(Arc::new(shared)))
    }

    /// The object.
    pub fn name(&self) -> &StoreName {
        &self.0.name
    }

    /// Looks for an object of that name. Nothing is read of it but its length and its ETag.
    ///
    /// # Errors
    /// The store does not say.
    pub fn existing(&self) -> Result<Existing, RemoteError> {
        let fail = |(errno, reason)| RemoteError::new(&self.0.name.to_string(), errno, reason);
        self.wait(self.0.sender.existing(self.0.options.most))?.map_err(fail)
    }

    /// Sends nothing: [`Upload::finish`] succeeds if the object with this ETag (of [`Existing::PerhapsTheSame`]) has the bytes
    /// that were written, and fails with `EEXIST` if it has others. Call it before the first write.
    pub fn only_compare(&self, etag: String) {
        self.0.sender.only_compare(etag);
    }

    /// Has [`Upload::finish`] fail with `EEXIST` where an object of that name was made meanwhile, which stays. Call it before the
    /// first write.
    ///
    /// Google's store and Azure are asked before an object of several parts is made, not at the same moment; a store of S3's
    /// protocol too, if it has no conditional requests.
    pub fn must_be_new(&self) {
        self.0.sender.must_be_new();
    }

    /// Counters so far.
    pub fn stats(&self) -> UploadStats {
        self.0.sender.stats()
    }

    /// Why it failed, if it did: the errors of its writes say only that it was so.
    pub fn failure(&self) -> Option<String> {
        self.0.state.lock().failure.clone().map(|(_, reason)| reason)
    }

    /// Sends what is left and ends the upload: from now on the object is there, whole. It waits.
    ///
    /// # Errors
    /// A byte was never written, or the store refuses.
    pub fn finish(&self) -> Result<(), RemoteError> {
        let fail = |(errno, reason)| RemoteError::new(&self.0.name.to_string(), errno, reason);
        let mut state = self.0.state.lock();
        while state.failure.is_none() && (state.sending > 0 || state.filling.has_waiting()) {
            state = self.0.changed.wait(state);
        }
        state.is_closed = true;
        if let Some(failure) = state.failure.clone() {
            return Err(fail(failure));
        }
        let rest = state.filling.finish().map_err(|reason| fail((libc::EIO, reason.to_owned())))?;
        drop(state);
        self.wait(self.0.sender.finish(rest))?.map_err(fail)
    }

    /// Gives the upload up, and has the store forget its parts. What the store does not answer to within ten seconds it is left
    /// with.
    pub fn abort(&self) {
        self.0.fail((libc::ECANCELED, "given up".to_owned()));
        let until = Instant::now() + LONGEST_END;
        let mut state = self.0.state.lock();
        while state.sending > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.0.changed.wait_timeout(state, left).0;
        }
        drop(state);
        let _ = runtime::wait(async { tokio::time::timeout(LONGEST_END, self.0.sender.abort()).await });
    }

    fn wait<T>(&self, future: impl Future<Output = T>) -> Result<T, RemoteError> {
        runtime::wait(future)
            .map_err(|error| RemoteError::new(&self.0.name.to_string(), libc::EAGAIN, error.to_string()))
    }
}

impl Shared {
    /// Fails all that waits; the first failure counts.
    fn fail(&self, failure: (i32, String)) {
        let mut state = self.state.lock();
        let errno = failure.0;
        state.failure.get_or_insert(failure);
        let waiting = state.filling.give_up();
        drop(state);
        self.changed.notify_all();
        for done in waiting {
            done.finish(Err(errno));
        }
    }

    /// Moves bytes of waiting writes into parts, and sends those that are full.
    fn pump(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let Step { answered, full } = state.filling.step();
        state.sending += full.len();
        drop(state);
        for (done, result) in answered {
            done.finish(result);
        }
        for (index, part) in full {
            let shared = Arc::clone(self);
            // On a thread of its own, which also computes the signature.
            let send = move || {
                let sent = runtime::wait(shared.sender.send(index, part.clone()));
                let mut state = shared.state.lock();
                state.sending -= 1;
                state.filling.give_back(part);
                let failure = match sent {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(describe(&error)),
                    Err(error) => Some((libc::EAGAIN, error.to_string())),
                };
                match failure {
                    None => shared.pump(state),
                    Some(failure) => {
                        drop(state);
                        shared.fail(failure);
                    }
                }
                shared.changed.notify_all();
            };
            if let Err(error) = std::thread::Builder::new().name("zebu-store".to_owned()).spawn(send) {
                self.state.lock().sending -= 1;
                self.fail((libc::EAGAIN, error.to_string()));
            }
        }
        self.changed.notify_all();
    }
}

impl Storage for Upload {
    fn len(&self) -> u64 {
        match self.0.options.length {
            Length::Fixed => self.0.options.most,
            Length::Growing => 0,
        }
    }

    fn identity(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.name.hash(&mut hasher);
        hasher.finish()
    }

    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, offset: 1, length: 1 }
    }

    fn abilities(&self) -> StorageAbilities {
        let all = StorageAbilities::WRITE | StorageAbilities::ZERO_RANGE | StorageAbilities::PUNCH;
        match self.0.options.length {
            Length::Fixed => all,
            Length::Growing => all | StorageAbilities::SET_LEN,
        }
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let mut state = self.0.state.lock();
        let refusal = match &state.failure {
            Some((errno, _)) => Some(Err(*errno)),
            None if state.is_closed => Some(Err(libc::EIO)),
            None => match op {
                StorageOp::Write { offset, len }
                | StorageOp::ZeroRange { offset, len }
                | StorageOp::Punch { offset, len } => {
                    offset.checked_add(len).is_none().then_some(Err(libc::EFBIG))
                }
                // What is durable is said at the end, and how long it is, too.
                StorageOp::Flush | StorageOp::SetLen { .. } => Some(Ok(StorageDone::Done)),
                // What was sent can't be had back.
                _ => Some(Err(libc::EOPNOTSUPP)),
            },
        };
        if let Some(result) = refusal {
            drop(state);
            done.finish(result);
            return;
        }
        state.filling.add(op, done);
        self.0.pump(state);
    }

    fn cancel(&self) {
        self.0.fail((libc::ECANCELED, "given up".to_owned()));
    }
}
