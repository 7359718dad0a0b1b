//! Giving up what was read, for one who knows that it came wrong.

use super::state::Qcow2;

impl Qcow2 {
    /// Gives up clean tables and inflated clusters.
    pub(crate) fn forget_what_was_read(&self) {
        self.map.slices().forget_all();
        self.inflated.forget_all();
    }
}
