//! Completions that other threads bring to a worker.

use crate::notify::Notifier;
use crate::request::Completion;
use crate::sync::Mutex;
use std::sync::Arc;

/// Completions that the worker has not taken yet.
pub(crate) struct Completions {
    done: Mutex<Vec<Completion>>,
    notifier: Arc<Notifier>,
}

impl Completions {
    pub(crate) fn new(notifier: Arc<Notifier>) -> Self {
        Self { done: Mutex::default(), notifier }
    }

    /// Adds one, from any thread, and wakes the worker.
    pub(crate) fn push(&self, completion: Completion) {
        self.done.lock().push(completion);
        self.notifier.notify();
    }

    /// Moves all to `done`; returns how many they were.
    pub(crate) fn take(&self, done: &mut Vec<Completion>) -> usize {
        let mut ours = self.done.lock();
        let count = ours.len();
        done.append(&mut ours);
        count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.done.lock().is_empty()
    }
}
