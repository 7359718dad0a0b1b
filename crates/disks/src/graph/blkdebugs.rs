//! The `blkdebug`s that are open, for breakpoints.

use std::sync::{Arc, Weak};
use zebu_drivers::Blkdebug;
use zebu_storage::sync::Mutex;

/// All `blkdebug`s that are open.
#[derive(Default)]
pub struct Blkdebugs(Mutex<Vec<Weak<Blkdebug>>>);

impl Blkdebugs {
    /// All that are open, for breakpoints.
    pub fn all(&self) -> Vec<Arc<Blkdebug>> {
        self.0.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Has breakpoints find it.
    pub(crate) fn keep(&self, blkdebug: Blkdebug) -> Arc<Blkdebug> {
        let kept = Arc::new(blkdebug);
        let mut known = self.0.lock();
        known.retain(|weak| weak.strong_count() > 0);
        known.push(Arc::downgrade(&kept));
        kept
    }
}
