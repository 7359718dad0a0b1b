//! Messages, under QEMU's name, of an image that was marked as corrupt: the results of requests have no words for it.

use crate::output::stderr;
use std::cell::Cell;
use std::rc::Rc;
use zebu_disks::Program;
use zebu_engine::{Error, ErrorKind};

/// The message, which is told once; clones are the same one.
#[derive(Clone)]
pub(crate) struct DamageNotice {
    dialect: Program,
    is_told: Rc<Cell<bool>>,
}

impl DamageNotice {
    /// One that was not told yet.
    pub(crate) fn of(dialect: Program) -> Self {
        Self { dialect, is_told: Rc::default() }
    }

    /// Tells, once, that a change found the image damaged.
    pub(crate) fn tell(&self, error: &Error) {
        let is_damage = error.kind() == ErrorKind::Corrupt && self.dialect.is_qemu();
        if is_damage && !self.is_told.replace(true) {
            let why = error.message();
            let why = why.split_once("; ").map_or(why, |(why, _)| why);
            let text = format!(
                "qcow2: Marking image as corrupt: {why}; further corruption events will be suppressed"
            );
            stderr::warn(&text);
        }
    }

    /// Whether it was told.
    pub(crate) fn is_told(&self) -> bool {
        self.is_told.get()
    }
}
