//! The `blkdebug`s that are open, for breakpoints, and lines that drivers tell.

use crate::output::{stderr, stdout};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use zebu_drivers::Blkdebug;

/// All `blkdebug`s that are open.
static BLKDEBUGS: Mutex<Vec<Weak<Blkdebug>>> = Mutex::new(Vec::new());

/// All `blkdebug`s that are open, for breakpoints.
pub(crate) fn breakpoints() -> Vec<Arc<Blkdebug>> {
    let known = BLKDEBUGS.lock().unwrap_or_else(PoisonError::into_inner);
    known.iter().filter_map(Weak::upgrade).collect()
}

/// Has breakpoints find it.
pub(super) fn keep_blkdebug(blkdebug: Blkdebug) -> Arc<Blkdebug> {
    let kept = Arc::new(blkdebug);
    let mut known = BLKDEBUGS.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|weak| weak.strong_count() > 0);
    known.push(Arc::downgrade(&kept));
    kept
}

/// A line about a request that was stopped or resumed. Where standard output is gone, nobody looks.
pub(super) fn tell_line(line: &str) {
    let _ = stdout::print(&format!("{line}\n"));
}

/// Two disks that must be the same are not: nothing of this process can be believed.
pub(super) fn differs(line: &str) {
    stderr::tell(line);
    std::process::exit(1);
}
