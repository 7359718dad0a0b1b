//! Waits that have taken long: who waits for what, since when.

use crate::file::File;
use crate::sync::Mutex;
use crate::worker::Worker;
use std::fmt;
use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

/// The time after which a wait is told.
pub const LONG_WAIT: Duration = Duration::from_secs(10);

/// A wait that has taken long.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LongWait {
    /// What is waited for, in words.
    pub what: &'static str,
    /// The file that it is about.
    pub file: PathBuf,
    /// The worker that waits ([`Worker::id`]).
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
type Tell = dyn Fn(&LongWait) + Send + Sync;

/// The waits for a file that have taken long.
#[derive(Default)]
pub(crate) struct LongWaits {
    listed: Mutex<Listed>,
    tell: OnceLock<Box<Tell>>,
}

#[derive(Default)]
struct Listed {
    begun: u64,
    waits: Vec<(u64, &'static str, usize, Instant)>,
}

/// A wait that is in the list.
struct Shown<'a> {
    waits: &'a LongWaits,
    number: u64,
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.waits.listed.lock().waits.retain(|(number, ..)| *number != self.number);
    }
}

impl LongWaits {
    fn show(&self, path: &Path, what: &'static str, worker: usize) -> Shown<'_> {
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
}

impl File {
    /// The waits for this file that have taken [`LONG_WAIT`] and more, the longest first.
    pub fn long_waits(&self) -> Vec<LongWait> {
        let listed = self.waits().listed.lock();
        let wait = |(_, what, worker, since): &(u64, &'static str, usize, Instant)| LongWait {
            what,
            file: self.path().to_owned(),
            worker: *worker,
            took: LONG_WAIT + since.elapsed(),
        };
        listed.waits.iter().map(wait).collect()
    }

    /// Has `tell` called for each wait for this file, once, when it has taken [`LONG_WAIT`]. It must not wait itself. The first
    /// such function stays.
    pub fn tell_long_waits(&self, tell: Arc<dyn Fn(&LongWait) + Send + Sync>) {
        let _ = self.waits().tell.set(Box::new(move |wait| tell(wait)));
    }
}

impl Worker {
    /// The result of `waits`, which is about `file`. If it takes long, it is told, and shows in [`File::long_waits`] until its
    /// end.
    pub async fn shown<T>(&self, file: &File, what: &'static str, waits: impl Future<Output = T>) -> T {
        let (mut waits, mut is_long) = (pin!(waits), pin!(self.sleep(LONG_WAIT)));
        let mut shown = None;
        poll_fn(|cx| {
            let result = waits.as_mut().poll(cx);
            if result.is_pending() && shown.is_none() && is_long.as_mut().poll(cx) == Poll::Ready(()) {
                shown = Some(file.waits().show(file.path(), what, self.id()));
            }
            result
        })
        .await
    }
}
