//! How far long work is, and the switch that ends it.

use zebu_engine::jobs::Cancel;

/// Hears how far work is, as a phase, what is done and of how much; and says when it is to end.
pub struct Watch<'a> {
    cancel: Cancel,
    hear: &'a dyn Fn(&'static str, u64, u64),
}

impl<'a> Watch<'a> {
    /// Work that `cancel` ends, and `hear` is told of.
    pub fn new(cancel: Cancel, hear: &'a dyn Fn(&'static str, u64, u64)) -> Self {
        Self { cancel, hear }
    }

    /// Whether the work is to end.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// The switch.
    pub(crate) fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Says how far it is.
    pub(crate) fn note(&self, phase: &'static str, done: u64, total: u64) {
        (self.hear)(phase, done, total);
    }
}
