//! Changes of bitmaps and of the backups that they know, and uses of their bits. Each prepares the file first, as every change of it does.

use crate::Result;
use crate::qcow2::bitmaps::{BitmapChange, Bits};
use crate::qcow2::state::Qcow2;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use zebu_qcow2::BackupMark;
use zebu_storage::Worker;

impl Qcow2 {
    /// Makes one change of the list of bitmaps, durably. The caller is alone.
    pub(crate) async fn change_bitmaps(
        self: &Arc<Self>,
        worker: &Worker,
        change: BitmapChange<'_>,
    ) -> Result<()> {
        self.check_bitmap_change(&change)?;
        self.before_metadata_write(worker).await?;
        self.make_bitmap_change(worker, change).await
    }

    /// Marks the image as a backup, or as none, durably. Whether it is marked so: the header may have no room.
    pub(crate) async fn mark_as_backup(
        self: &Arc<Self>,
        worker: &Worker,
        mark: Option<BackupMark>,
    ) -> Result<bool> {
        self.before_metadata_write(worker).await?;
        self.on_own_worker(worker, move |me, on| async move { me.write_backup_mark(&on, mark).await }).await
    }

    /// The bits of the bitmap of this name, read if they were not yet. For one that records writes they change with
    /// the disk.
    pub(crate) async fn bitmap_bits(self: &Arc<Self>, worker: &Worker, name: &str) -> Result<Arc<Bits>> {
        self.before_bits_are_read(worker).await?;
        self.read_bits_of(worker, name).await
    }

    /// The bits of all bitmaps of these names.
    pub(crate) async fn bits_of_bitmaps(
        self: &Arc<Self>,
        worker: &Worker,
        names: &HashSet<&str>,
    ) -> Result<HashMap<String, Arc<Bits>>> {
        self.before_bits_are_read(worker).await?;
        self.read_bits_of_all(worker, names).await
    }

    async fn before_bits_are_read(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if self.is_writable() {
            // What is loaded now is what records the first write; the overlap check has to know the tables before.
            self.before_metadata_write(worker).await?;
        }
        Ok(())
    }

    /// Takes the bits of a bitmap that records writes; it goes on with none set. The caller is alone.
    pub(crate) async fn lend_bits(self: &Arc<Self>, worker: &Worker, name: &str) -> Result<Arc<Bits>> {
        // From the first write of an opening on, bitmaps that record are in use on disk.
        self.prepare_write(worker).await?;
        self.lend_recorded(worker, name).await
    }
}
