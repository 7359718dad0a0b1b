//! Waits that have taken long: who waits for what, since when.

use crate::sync::Mutex;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The time after which a wait is told.
pub const LONG_WAIT: Duration = Duration::from_secs(10);

/// A wait that has taken long.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LongWait {
    /// Name of the thing that is waited for, in words.
    pub what: &'static str,
    /// The file that it is about.
    pub file: PathBuf,
    /// The worker that waits ([`Worker::id`](crate::Worker::id)).
    pub worker: usize,
    /// Its time until now.
    pub took: Duration,
}

impl fmt::Display for LongWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waits since {} s for {} of {}", self.took.as_secs(), self.what, self.file.display())
    }
}

/// A function that is told of a wait when it has taken long.
pub(crate) type Tell = dyn Fn(&LongWait) + Send + Sync;

/// The waits for a file that have taken long.
#[derive(Default)]
pub(crate) struct LongWaits {
    listed: Mutex<Listed>,
    tell: OnceLock<Arc<Tell>>,
}

#[derive(Default)]
struct Listed {
    begun: u64,
    waits: Vec<(u64, &'static str, usize, Instant)>,
}

/// A wait that is in the list.
pub(crate) struct Shown<'a> {
    waits: &'a LongWaits,
    number: u64,
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.waits.listed.lock().waits.retain(|(number, ..)| *number != self.number);
    }
}

impl LongWaits {
    /// Lists a wait that has taken [`LONG_WAIT`], and tells it.
    pub(crate) fn show(&self, path: &Path, what: &'static str, worker: usize) -> Shown<'_> {
        let number = {
            let mut listed = self.listed.lock();
            listed.begun += 1;
            let entry = (listed.begun, what, worker, Instant::now());
            listed.waits.push(entry);
            listed.begun
        };
        if let Some(tell) = self.tell.get() {
            tell(&LongWait { what, file: path.to_owned(), worker, took: LONG_WAIT });
        }
        Shown { waits: self, number }
    }

    /// The waits of the file at `path`, the longest first.
    pub(crate) fn list(&self, path: &Path) -> Vec<LongWait> {
        let listed = self.listed.lock();
        let wait = |(_, what, worker, since): &(u64, &'static str, usize, Instant)| LongWait {
            what,
            file: path.to_owned(),
            worker: *worker,
            took: LONG_WAIT + since.elapsed(),
        };
        listed.waits.iter().map(wait).collect()
    }

    /// Has `tell` called for each. The first such function stays.
    pub(crate) fn tell_by(&self, tell: Arc<Tell>) {
        let _ = self.tell.set(tell);
    }
}
