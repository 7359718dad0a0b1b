//! The mark of an image whose metadata was found damaged by a change.

use super::block::{ImageHeader, OnFailure, Patch, field};
use crate::Error;
use crate::options::DamageMark;
use zebu_qcow2::{Incompatible, Version};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl ImageHeader {
    /// Stops all writing if `why` is about the image's metadata, and it was opened to be marked then. Whether the mark is to be
    /// written: version 2 has none.
    pub(crate) fn stop_if_damaged(&self, why: &Error) -> bool {
        let is_ours = why.is_damaged_metadata() && why.image() == Some(self.files().path());
        if self.damage() == DamageMark::Leave || !is_ours || !self.files().is_writable() {
            return false;
        }
        self.files().poison(why);
        self.opened().geometry().version != Version::V2
    }

    /// Marks the image as corrupt, durably. Writing has stopped, so that no other change of the header comes after the mark. The
    /// caller's change fails in any case, so a mark that can't be written is told to nobody.
    pub(crate) async fn mark_corrupt(&self, worker: &Worker) {
        let mark = [Patch::Bits(field::INCOMPATIBLE, Incompatible::CORRUPT.bits())];
        if self.change(worker, &mark, OnFailure::Restore).await.is_ok()
            && !sabotage::is(Fault::ForgetMarkBarrier)
        {
            let _ = self.files().barrier(worker, self.files().file()).await;
        }
    }
}
