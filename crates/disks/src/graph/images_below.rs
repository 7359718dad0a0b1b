//! The images below drivers, which nobody else closes.

use std::sync::{Arc, Weak};
use zebu_drivers::ImageDisk;
use zebu_engine::Error;
use zebu_storage::sync::Mutex;

/// All that are open.
#[derive(Default)]
pub(crate) struct ImagesBelow(Mutex<Vec<Weak<ImageDisk>>>);

impl ImagesBelow {
    /// Has [`ImagesBelow::close`] find it.
    pub(crate) fn keep(&self, disk: ImageDisk) -> Arc<ImageDisk> {
        let kept = Arc::new(disk);
        let mut known = self.0.lock();
        known.retain(|weak| weak.strong_count() > 0);
        known.push(Arc::downgrade(&kept));
        kept
    }

    /// Closes all. Those that were opened last lie above the others, and go first.
    ///
    /// # Errors
    /// The first one that can't be closed. The others are closed all the same.
    pub(crate) fn close(&self) -> Result<(), Error> {
        let known = std::mem::take(&mut *self.0.lock());
        let mut result = Ok(());
        for disk in known.iter().rev().filter_map(Weak::upgrade) {
            result = result.and(disk.close());
        }
        result
    }
}
