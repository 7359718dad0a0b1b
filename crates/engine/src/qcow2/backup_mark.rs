//! The mark of an image that is a backup: its id, by which bitmaps know it.

use crate::Result;
use crate::error::format_error;
use crate::qcow2::header::block::OnFailure;
use crate::qcow2::state::Qcow2;
use zebu_qcow2::header::MAGIC;
use zebu_qcow2::header_edit::set_backup_mark;
use zebu_qcow2::{BackupMark, FormatError};
use zebu_storage::Worker;

impl Qcow2 {
    /// The mark of the backup that the image is.
    pub(crate) fn backup_mark(&self) -> Option<BackupMark> {
        self.header.backup_mark()
    }

    /// Marks the image as a backup, or as none, durably. Whether it is marked so: the header may have no room. The file is
    /// prepared for changes.
    pub(super) async fn write_backup_mark(&self, worker: &Worker, mark: Option<BackupMark>) -> Result<bool> {
        let mut has_room = true;
        self.header
            .change_in_steps(worker, OnFailure::Poison, |block| {
                // An image that is not whole yet has no magic number, and gets none here.
                let mut whole = block.to_vec();
                whole[..4].copy_from_slice(&MAGIC.to_be_bytes());
                match set_backup_mark(&whole, mark) {
                    Ok(mut steps) => {
                        for step in &mut steps {
                            step[..4].copy_from_slice(&block[..4]);
                        }
                        Ok(steps)
                    }
                    Err(FormatError::HeaderDoesNotFit { .. }) => {
                        has_room = false;
                        Ok(Vec::new())
                    }
                    Err(error) => Err(format_error(self.path(), &error)),
                }
            })
            .await?;
        Ok(has_room)
    }
}
