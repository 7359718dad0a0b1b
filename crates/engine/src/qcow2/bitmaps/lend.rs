//! The bits of a bitmap, lent to a backup of a disk in use.
//!
//! The backup copies what they mark, or everything, while the bitmap goes on empty and records what is written from then
//! on. If the backup comes to nothing, what was lent is marked again. Meanwhile the bitmap is in use on disk, and
//! stays so if the image is closed: what it would hold there is not all that was written.

use super::operations::find_mut;
use super::{Bitmap, Bits, Loaded};
use crate::qcow2::state::Qcow2;
use crate::{ErrorKind, Remedy, Result};
use std::sync::Arc;
use zebu_qcow2::BackupId;
use zebu_storage::Worker;

/// The end of the backup that bits were lent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackupEnd {
    /// It is complete and durable.
    Complete,
    /// There is none.
    GivenUp,
}

impl Qcow2 {
    /// Takes the bits of a bitmap that records writes; it goes on with none set. The caller is alone, and has prepared the
    /// image for writes.
    pub(crate) async fn lend_recorded(&self, worker: &Worker, name: &str) -> Result<Arc<Bits>> {
        debug_assert!(self.header.preparation().is_done(), "bitmaps that record are not in use on disk");
        let _turn = self.bitmaps.gate.lock().await;
        self.sound_bits(worker, name).await?;
        let mut list = self.bitmaps.list();
        let (_, found) = self.find_bitmap(&list, name)?;
        self.check_not_lent(&found)?;
        if !found.recording {
            let message = format!(
                "bitmap '{name}' does not record writes (it is disabled), so it does not tell what has changed: enable \
                 it and make a full backup"
            );
            let error = self.bitmap_error(ErrorKind::InvalidArgument, message);
            return Err(error.with_remedy(Remedy::EnableBitmap));
        }
        let lent = find_mut(&mut list, name).and_then(|bitmap| {
            let loaded = bitmap.loaded.as_mut()?;
            let bits = loaded.bits.clone();
            bitmap.lent = Some(bits.clone());
            let empty = Arc::new(Bits::new(bits.size(), bits.granularity_bits()));
            *loaded = Loaded { bits: empty, stored: loaded.stored.clone(), unstored: true };
            Some(bits)
        });
        let lent = lent.ok_or_else(|| self.no_bitmap(name))?;
        self.bitmaps.record(&list, self.bitmaps.active_record());
        self.bitmaps.set_list(list);
        Ok(lent)
    }

    /// Ends what [`Qcow2::lend_bits`] began. `backup`: what a complete one is called, if it has a name.
    pub(crate) async fn take_bits_back(
        &self,
        name: &str,
        lent: &Bits,
        outcome: BackupEnd,
        backup: Option<BackupId>,
    ) {
        let _turn = self.bitmaps.gate.lock().await;
        let mut state = self.bitmaps.state();
        let Some(bitmap) = find_mut(&mut state.list, name) else { return };
        bitmap.lent = None;
        match (outcome, &bitmap.loaded) {
            (BackupEnd::Complete, _) => {
                bitmap.base = backup;
                bitmap.recovered = None;
            }
            (BackupEnd::GivenUp, Some(loaded)) => loaded.bits.merge(lent),
            (BackupEnd::GivenUp, None) => {}
        }
    }

    pub(super) fn check_not_lent(&self, bitmap: &Bitmap) -> Result<()> {
        if bitmap.lent.is_none() {
            return Ok(());
        }
        let message = format!("a backup that is under way works with bitmap '{}'", bitmap.name());
        Err(self.bitmap_error(ErrorKind::Exists, message))
    }
}
