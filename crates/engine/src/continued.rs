//! The place of an image in which the disk goes on, once a fork has made another one of it.

use crate::sync::RwLock;
use crate::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::fmt;
use std::sync::Arc;

/// Where a disk goes on. The later image stands on the earlier one, so both hold each other until [`Continued::end`].
pub(crate) struct Continued<T> {
    is_set: AtomicBool,
    next: RwLock<Option<Arc<T>>>,
}

impl<T> Default for Continued<T> {
    fn default() -> Self {
        Self { is_set: AtomicBool::new(false), next: RwLock::default() }
    }
}

impl<T> fmt::Debug for Continued<T> {
    /// Without the later image, which shows this one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Continued").field("is_set", &self.is_set).finish_non_exhaustive()
    }
}

impl<T> Continued<T> {
    /// The later image: one load where there is none.
    #[inline]
    pub(crate) fn get(&self) -> Option<Arc<T>> {
        if !self.is_set.load(Acquire) {
            return None;
        }
        self.next.read().clone()
    }

    /// Has the disk go on there.
    pub(crate) fn set(&self, next: Arc<T>) {
        *self.next.write() = Some(next);
        self.is_set.store(true, Release);
    }

    /// Lets the later image go; whether there was one.
    pub(crate) fn end(&self) -> bool {
        self.next.write().take().is_some()
    }
}
