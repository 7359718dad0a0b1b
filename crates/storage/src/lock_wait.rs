//! Waiting for the writes of a program that is gone: they hold an image until they have landed (`lock.rs`).

use crate::error::{IoError, IoErrorKind, Op};
use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time for which an opener without patience waits: a kernel needs 50 to 200 ms to take a ring apart.
const BRIEFLY: Duration = Duration::from_secs(1);
/// Pauses between two looks begin with the first and grow to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(20));

/// An opener that waits for the writes of a program that is gone.
pub trait Patience: Send + Sync {
    /// Begins to wait for `file`. What it returns is called with the time since then, again and again, and dropped when the
    /// wait is over; [`ControlFlow::Break`] ends the wait with an error.
    fn begin(&self, file: &Path) -> Box<dyn FnMut(Duration) -> ControlFlow<()>>;

    /// Hears that `file` lies on a file system without locks, so that nothing keeps other programs out. By default nobody is told.
    fn without_locks(&self, file: &Path) {
        let _ = file;
    }
}

/// The patience of an opener with the writes of a program that is gone. By default it lasts for a second, and a disk that works
/// needs less.
#[derive(Clone, Default)]
pub struct LockWait(Option<Arc<dyn Patience>>);

impl LockWait {
    /// As long as `patience` lasts.
    pub fn with(patience: Arc<dyn Patience>) -> Self {
        Self(Some(patience))
    }

    pub(crate) fn tell_without_locks(&self, path: &Path) {
        if let Some(patience) = &self.0 {
            patience.without_locks(path);
        }
    }

    /// Waits until `is_over`. `what` is the lock that was refused, in QEMU's words.
    ///
    /// # Errors
    /// [`IoErrorKind::LockedByWrites`]: the patience is at its end. Those of `is_over`.
    pub(crate) fn until(
        &self,
        path: &Path,
        what: &str,
        mut is_over: impl FnMut() -> Result<bool, IoError>,
    ) -> Result<(), IoError> {
        let brief: Box<dyn FnMut(Duration) -> ControlFlow<()>> =
            Box::new(
                |waited| {
                    if waited < BRIEFLY { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
                },
            );
        let mut goes_on = self.0.as_ref().map_or(brief, |patience| patience.begin(path));
        let (mut pause, longest) = PAUSES;
        let start = Instant::now();
        while !is_over()? {
            if goes_on(start.elapsed()).is_break() {
                let detail =
                    format!("{what}: writes of a process that is gone may still land [{}]", path.display());
                return Err(IoError::of_file(Op::Lock, IoErrorKind::LockedByWrites, path).with_detail(detail));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(longest);
        }
        Ok(())
    }
}

impl fmt::Debug for LockWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "LockWait(patient)" } else { "LockWait(brief)" })
    }
}
