//! The mark of an image whose metadata was found damaged by a change.

use super::block::{ImageHeader, OnFailure, Patch, field};
use crate::Error;
use crate::options::DamageMark;
use zebu_qcow2::{Incompatible, Version};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl ImageHeader {
    /// Marks the image as corrupt, durably, if it was opened so and `why` is about its metadata. Nothing is written from then on:
    /// first writing stops, so that no other change of the header comes after the mark. Version 2 has no mark. The caller's change
    /// fails with `why` in any case, so a mark that can't be written is told to nobody.
    pub(crate) async fn mark_if_corrupt(&self, worker: &Worker, why: &Error) {
        let is_ours = why.is_damaged_metadata() && why.image() == Some(self.files().path());
        if self.damage() == DamageMark::Leave || !is_ours || !self.files().is_writable() {
            return;
        }
        self.files().poison(why);
        if self.opened().geometry().version == Version::V2 {
            return;
        }
        let mark = [Patch::Bits(field::INCOMPATIBLE, Incompatible::CORRUPT.bits())];
        if self.change(worker, &mark, OnFailure::Restore).await.is_ok()
            && !sabotage::is(Fault::ForgetMarkBarrier)
        {
            let _ = self.files().barrier(worker, self.files().file()).await;
        }
    }
}
