//! A shared value that is replaced as a whole.

use crate::sync::RwLock;
use std::sync::Arc;

/// A place for an `Arc`. A reader keeps the value that it found, also when another takes its place.
#[derive(Debug, Default)]
pub(crate) struct ArcCell<T>(RwLock<Arc<T>>);

impl<T> ArcCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(RwLock::new(Arc::new(value)))
    }

    pub(crate) fn load(&self) -> Arc<T> {
        self.0.read().clone()
    }

    pub(crate) fn store(&self, value: impl Into<Arc<T>>) {
        let old = std::mem::replace(&mut *self.0.write(), value.into());
        // Freed with the lock given back.
        drop(old);
    }
}
