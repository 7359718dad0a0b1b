//! How much memory requests of the kernel may take.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Bytes that may be taken; waits until there are enough. One request fits always.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    most: u64,
    taken: Mutex<u64>,
    less: Condvar,
}

impl Budget {
    pub(crate) fn new(most: u64) -> Self {
        Self(Arc::new(Inner { most, taken: Mutex::new(0), less: Condvar::new() }))
    }

    /// Waits for room. The room is given back with the value.
    pub(crate) fn take(&self, bytes: u64) -> Share {
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken > 0 && taken.saturating_add(bytes) > self.0.most {
            taken = self.0.less.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken += bytes;
        Share { budget: self.clone(), bytes }
    }
}

/// A part of a budget.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Budget,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        *self.budget.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
        self.budget.0.less.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn no_more_is_taken_than_there_is() {
        let budget = Budget::new(100);
        drop(budget.take(1000));
        let (now, most) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let _share = budget.take(40);
                        most.fetch_max(now.fetch_add(40, Ordering::SeqCst) + 40, Ordering::SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(40, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.load(Ordering::SeqCst) <= 80);
    }
}
