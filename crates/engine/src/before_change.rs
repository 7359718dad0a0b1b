//! The hook of an image that requests wait for before they change it, as a backup of a disk in use needs.

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
type Hook = dyn Fn(Worker, Range<u64>) -> Waiting + Send + Sync;

/// The hook's place in an image.
#[derive(Default)]
pub(crate) struct BeforeChange {
    is_set: AtomicBool,
    set: RwLock<Option<Set>>,
}

/// A hook, and the address of its owner, which tells it from others. The hook keeps its owner alive.
struct Set {
    owner: usize,
    hook: Arc<Hook>,
}

impl fmt::Debug for BeforeChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BeforeChange").field("is_set", &self.is_set).finish_non_exhaustive()
    }
}

impl BeforeChange {
    /// The hook that is set now: one load for an image without.
    #[inline]
    pub(crate) fn get(&self) -> Option<Arc<Hook>> {
        if !self.is_set.load(Acquire) {
            return None;
        }
        self.set.read().as_ref().map(|set| set.hook.clone())
    }

    /// Sets the hook of `owner`. The caller is alone with the image.
    pub(crate) fn set<T: Send + Sync + 'static>(
        &self,
        owner: Arc<T>,
        hook: impl Fn(Arc<T>, Worker, Range<u64>) -> Waiting + Send + Sync + 'static,
    ) {
        let mut set = self.set.write();
        self.is_set.store(true, Release);
        let address = Arc::as_ptr(&owner).addr();
        let hook = Arc::new(move |worker, range| hook(owner.clone(), worker, range));
        *set = Some(Set { owner: address, hook });
    }

    /// Takes the hook of `owner` away. If it was taken away already, and another is set since, that one stays.
    pub(crate) fn clear<T>(&self, owner: &T) {
        let mut set = self.set.write();
        if set.as_ref().is_some_and(|set| set.owner == std::ptr::from_ref(owner).addr()) {
            self.is_set.store(false, Release);
            *set = None;
        }
    }
}
