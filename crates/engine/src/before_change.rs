//! The hooks of an image that requests wait for before they change it: those of a backup of the disk in use, and of checkpoints.

use crate::Result;
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use zebu_storage::Worker;

/// The wait of one request.
pub(crate) type Waiting = Pin<Box<dyn Future<Output = Result<()>>>>;

/// Does what has to be done before a range of the disk changes.
type Call = dyn Fn(Worker, Range<u64>) -> Waiting + Send + Sync;

/// The kind of work that a hook belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HookOf {
    Backup,
    Checkpoint,
}

/// The place of an image's hooks.
#[derive(Default)]
pub(crate) struct BeforeChange {
    is_set: AtomicBool,
    set: RwLock<Arc<[Hook]>>,
}

/// A hook, and the address of its owner, which tells it from others. The hook keeps its owner alive.
#[derive(Clone)]
pub(crate) struct Hook {
    owner: usize,
    of: HookOf,
    call: Arc<Call>,
}

impl Hook {
    /// Waits for what has to be done before `range` changes.
    pub(crate) fn wait(&self, worker: Worker, range: Range<u64>) -> Waiting {
        (self.call)(worker, range)
    }
}

impl fmt::Debug for BeforeChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BeforeChange").field("is_set", &self.is_set).finish_non_exhaustive()
    }
}

impl BeforeChange {
    /// The hooks that are set now: one load for an image without.
    #[inline]
    pub(crate) fn get(&self) -> Option<Arc<[Hook]>> {
        if !self.is_set.load(Acquire) {
            return None;
        }
        Some(self.set.read().clone())
    }

    /// The kind of the first hook that is set.
    pub(crate) fn first(&self) -> Option<HookOf> {
        self.set.read().first().map(|hook| hook.of)
    }

    /// Whether a hook of this kind is set.
    pub(crate) fn has(&self, kind: HookOf) -> bool {
        self.set.read().iter().any(|hook| hook.of == kind)
    }

    /// Sets the hook of `owner` beside those that are there. The caller is alone with the image.
    pub(crate) fn set<T: Send + Sync + 'static>(
        &self,
        of: HookOf,
        owner: Arc<T>,
        call: impl Fn(Arc<T>, Worker, Range<u64>) -> Waiting + Send + Sync + 'static,
    ) {
        let mut set = self.set.write();
        let address = Arc::as_ptr(&owner).addr();
        let call = Arc::new(move |worker, range| call(owner.clone(), worker, range));
        let hook = Hook { owner: address, of, call };
        *set = set.iter().cloned().chain([hook]).collect();
        self.is_set.store(true, Release);
    }

    /// Takes the hook of `owner` away, if it is still set.
    pub(crate) fn clear<T>(&self, owner: &T) {
        let owner = std::ptr::from_ref(owner).addr();
        let mut set = self.set.write();
        let kept: Arc<[Hook]> = set.iter().filter(|hook| hook.owner != owner).cloned().collect();
        self.is_set.store(!kept.is_empty(), Release);
        let gone = std::mem::replace(&mut *set, kept);
        drop(set);
        // What the last owner of a hook does when it goes is done without the lock.
        drop(gone);
    }
}
