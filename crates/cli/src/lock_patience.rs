//! Waiting for the writes of a program that is gone: until they have landed, or a signal comes. It says what it waits for.

use crate::output::stderr;
use crate::stop_signals::DuringQuestion;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use zebu_disks::Program;
use zebu_engine::storage::{LockWait, Patience};

/// A disk that works needs less; who waits longer is told.
const SILENT: Duration = Duration::from_secs(1);

/// The patience of all commands.
pub(crate) fn lock_wait(dialect: Program) -> LockWait {
    LockWait::with(Arc::new(UntilSignal { dialect, is_told: AtomicBool::default() }))
}

/// The impatience of who has other work to do, and asks again later.
pub(crate) fn no_lock_wait(dialect: Program) -> LockWait {
    LockWait::with(Arc::new(AskLater(UntilSignal { dialect, is_told: AtomicBool::default() })))
}

struct AskLater(UntilSignal);

impl Patience for AskLater {
    fn begin(&self, _file: &Path) -> Box<dyn FnMut(Duration) -> ControlFlow<()>> {
        Box::new(|_| ControlFlow::Break(()))
    }

    fn without_locks(&self, file: &Path) {
        self.0.without_locks(file);
    }
}

struct UntilSignal {
    dialect: Program,
    /// Whether it was told that there are no locks.
    is_told: AtomicBool,
}

impl Patience for UntilSignal {
    fn begin(&self, file: &Path) -> Box<dyn FnMut(Duration) -> ControlFlow<()>> {
        let mut wait = Wait { dialect: self.dialect, signals: DuringQuestion::begin().ok(), is_told: false };
        let file = file.display().to_string();
        Box::new(move |waited| wait.goes_on(&file, waited))
    }

    fn without_locks(&self, file: &Path) {
        if !self.is_told.swap(true, Ordering::Relaxed) {
            stderr::tell(
                self.dialect,
                &format!(
                    "warning: the file system of '{}' has no locks: nothing keeps other programs from changing it meanwhile",
                    file.display()
                ),
            );
        }
    }
}

/// One wait for one file.
struct Wait {
    dialect: Program,
    /// `None`: a signal ends the process at once.
    signals: Option<DuringQuestion>,
    is_told: bool,
}

impl Wait {
    fn goes_on(&mut self, file: &str, waited: Duration) -> ControlFlow<()> {
        if self.signals.as_ref().is_some_and(DuringQuestion::has_come) {
            return ControlFlow::Break(());
        }
        if waited >= SILENT && !self.is_told {
            self.is_told = true;
            stderr::tell(
                self.dialect,
                &format!(
                    "waiting for '{file}': writes of a process that has ended are still under way; it goes \
                     on when the disk has answered"
                ),
            );
        }
        ControlFlow::Continue(())
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        // Ends the process, if a signal came that nothing else handles.
        if let Some(signals) = self.signals.take() {
            signals.end();
        }
    }
}
