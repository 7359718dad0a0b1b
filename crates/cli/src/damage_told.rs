//! Messages, under QEMU's name, of an image that was marked as corrupt: the results of requests have no words for it.

use crate::output::stderr;
use crate::program;
use std::sync::atomic::{AtomicBool, Ordering};
use zebu::{Error, ErrorKind};

static IS_TOLD: AtomicBool = AtomicBool::new(false);

/// Tells, once, that a change found the image damaged.
pub(crate) fn tell_of_damage(error: &Error) {
    let is_damage = error.kind() == ErrorKind::Corrupt && program::called().is_qemu();
    if is_damage && !IS_TOLD.swap(true, Ordering::Relaxed) {
        let why = error.message();
        let why = why.split_once("; ").map_or(why, |(why, _)| why);
        let text =
            format!("qcow2: Marking image as corrupt: {why}; further corruption events will be suppressed");
        stderr::warn(&text);
    }
}

/// Whether it was told.
pub(crate) fn is_told() -> bool {
    IS_TOLD.load(Ordering::Relaxed)
}
