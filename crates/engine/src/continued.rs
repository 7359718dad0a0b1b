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

    /// Leads to a later one than it does, unless it was ended.
    pub(crate) fn shorten(&self, latest: &Arc<T>) {
        if let Some(next) = &mut *self.next.write() {
            next.clone_from(latest);
        }
    }

    /// Lets the later image go; whether there was one.
    pub(crate) fn end(&self) -> bool {
        self.next.write().take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_was_ended_leads_nowhere() {
        let continued = Continued::default();
        continued.set(Arc::new(1));
        continued.shorten(&Arc::new(2));
        assert_eq!(continued.get().as_deref(), Some(&2));
        assert!(continued.end());
        continued.shorten(&Arc::new(3));
        assert_eq!(continued.get(), None);
    }
}
