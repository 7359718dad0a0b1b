//! Changing the size of the virtual disk. The size in the header changes last.

use crate::Remedy;
use crate::node::Node;
use crate::options::{Preallocation, Shrink, ZeroMode};
use crate::progress::JobControl;
use crate::qcow2::header::block::{OnFailure, Patch, field};
use crate::qcow2::map::active_map::L1;
use crate::qcow2::map::mapping::Run;
use crate::qcow2::replace_table::{TableReplacement, Unnamed};
use crate::qcow2::space::free::SpaceContent;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::state::Qcow2;
use crate::sync::while_driven;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::{L1Entry, Version, limits};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{FileKind, Worker};

impl Qcow2 {
    /// Resizes to `new_size` bytes, a multiple of 512.
    pub(crate) async fn resize(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        new_size: u64,
        shrink: Shrink,
        preallocation: Preallocation,
        control: &JobControl,
    ) -> Result<()> {
        let old_size = self.virtual_size();
        let refuse = |kind, message: &str| Err(Error::new(kind, message.to_owned()).on(self.path()));
        if self.geometry().version == Version::V2 && !self.snapshots().entries().is_empty() {
            return refuse(ErrorKind::Unsupported, "Can't resize a v2 image which has snapshots");
        }
        if new_size < old_size {
            if shrink == Shrink::Refuse {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    "the new size is smaller: what lies past it would be lost, and shrinking is not allowed",
                )
                .with_remedy(Remedy::AllowShrinking));
            }
            if preallocation != Preallocation::Off {
                return refuse(
                    ErrorKind::InvalidArgument,
                    "Preallocation can't be used for shrinking an image",
                );
            }
        } else if new_size == old_size {
            return Ok(());
        }
        self.prepare_bitmaps_for_resize(worker, new_size).await?;
        if new_size < old_size {
            // Should the shrink fail, what it was to cut off may be gone all the same.
            let unrecorded = self.bitmaps.mark(&(new_size..old_size));
            debug_assert!(unrecorded.is_none(), "a record is of a disk of one size");
            self.shrink(node, worker, new_size).await?;
        } else {
            self.grow_disk(node, worker, old_size, new_size, preallocation, control).await?;
        }
        self.resize_bitmaps().await;
        // Without it, a crash leaves the bitmaps inconsistent, and the disk has its new size all the same.
        let _ = self.renew_record(worker).await;
        self.cut_data_file(worker, new_size).await
    }

    /// Cuts a data file that is longer than the disk. The disk has its new size already.
    async fn cut_data_file(&self, worker: &Worker, size: u64) -> Result<()> {
        let Some(data_file) = self.data_file() else { return Ok(()) };
        if data_file.kind() == FileKind::BlockDevice || data_file.len() <= size {
            return Ok(());
        }
        worker.set_len(data_file, size).await.map_err(|error| {
            let message =
                format!("the disk has {size} bytes now, but its data file could not be cut to them: {error}");
            let error = Error::from(error);
            Error::new(error.kind(), message).on(data_file.path())
        })
    }

    /// Moves the end of the disk.
    fn set_virtual_size(&self, size: u64) {
        self.disk.set_size(size);
        self.forget_old_end();
    }

    /// Forgets what was derived with another end of the disk. Reads go on beside this: a cluster that was cut at the old end
    /// may count as zero. What they are deriving now is recognised by its generation.
    fn forget_old_end(&self) {
        if let Some(index) = self.map.chain().filter(|_| !sabotage::is(Fault::KeepOldEnd)) {
            index.clear();
        }
    }

    async fn grow_disk(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        old_size: u64,
        new_size: u64,
        preallocation: Preallocation,
        control: &JobControl,
    ) -> Result<()> {
        self.make_room_in_l1(worker, new_size).await?;
        let mut external = SpaceContent::Recycled;
        if let Some(data_file) = self.data_file()
            && data_file.kind() != FileKind::BlockDevice
        {
            if data_file.len() <= old_size {
                external = SpaceContent::Fresh;
            }
            if data_file.len() < new_size {
                worker.set_len(data_file, new_size).await.map_err(|e| Error::from(e).on(data_file.path()))?;
            }
        }
        // A raw data file has every cluster at its own place: what nobody mapped would be there for one reader only.
        let preallocation = match preallocation {
            Preallocation::Off if self.is_raw_external() => Preallocation::Metadata,
            other => other,
        };
        self.disk.extend(new_size);
        self.forget_old_end();
        let grown = async {
            let filled =
                self.fill_growth(node, worker, old_size..new_size, preallocation, external, control).await;
            let first_new = old_size.next_multiple_of(self.geometry().cluster_size());
            if filled.is_err() && preallocation != Preallocation::Off && first_new < new_size {
                // The header still has the old size: nobody would find what was set aside past it. Should this fail,
                // the first error tells more.
                let _ = self.drop_mapping(node, worker, first_new..new_size).await;
            }
            filled?;
            self.write_size(worker, new_size).await
        }
        .await;
        if grown.is_ok() || sabotage::is(Fault::KeepFailedSize) {
            self.disk.set_size(new_size);
        } else {
            // What is flushed past the old end would be out of reach when the image is opened again.
            self.set_virtual_size(old_size);
        }
        grown
    }

    /// Makes the L1 table long enough for a disk of `size` bytes. No other change is under way.
    pub(crate) async fn make_room_in_l1(self: &Arc<Self>, worker: &Worker, size: u64) -> Result<()> {
        let too_big = || {
            let message =
                "The image size is too large for file format 'qcow2' (try using a larger cluster size)"
                    .to_owned();
            Error::new(ErrorKind::InvalidArgument, message).with_errno(27).on(self.path())
        };
        let entries = self.geometry().l1_entries_for(size).ok_or_else(too_big)?;
        if entries * 8 > limits::MAX_L1_SIZE {
            return Err(too_big());
        }
        if entries > self.map.l1().table().len() as u64 {
            self.grow_l1(worker, entries).await?;
        }
        Ok(())
    }

    /// Has the disk reach to `size` in memory alone; requests may use what they could before. The caller is alone with the image.
    pub(crate) fn set_reach(&self, size: u64) {
        self.disk.reach(size);
        self.forget_old_end();
    }

    /// Drops data in `growth`, whole clusters: VM state was kept there, or another program left it.
    async fn drop_leftovers(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        growth: Range<u64>,
    ) -> Result<()> {
        let per_table = self.geometry().guest_bytes_per_l2();
        let mut at = growth.start;
        while at < growth.end && !sabotage::is(Fault::ShowVmState) {
            let table_end = (at / per_table + 1).saturating_mul(per_table).min(growth.end);
            if L1Entry(self.map.l1().table().get(self.map.l1_index(at))).table().is_none() {
                at = table_end;
                continue;
            }
            let (run, len) = node.map(worker, at, table_end - at).await?;
            if !matches!(run, Run::Unallocated | Run::Zero { .. }) {
                self.drop_mapping(node, worker, at..at + len).await?;
            }
            at += len;
        }
        Ok(())
    }

    /// Makes new space read as zero: the rest of the last cluster, where a longer backing image would show, and where VM state
    /// was kept.
    async fn fill_growth(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        growth: Range<u64>,
        preallocation: Preallocation,
        external: SpaceContent,
        control: &JobControl,
    ) -> Result<()> {
        let Range { start: old_size, end: new_size } = growth.clone();
        let backed = node.backing.as_ref().map_or(0, |backing| backing.virtual_size());
        let cluster_end = old_size.next_multiple_of(self.geometry().cluster_size());
        let zero_to = backed.next_multiple_of(self.geometry().cluster_size()).max(cluster_end).min(new_size);
        if zero_to > old_size && !sabotage::is(Fault::SkipGrowthZeroing) {
            self.write_zeroes(node, worker, old_size, zero_to - old_size, ZeroMode::Unmap).await?;
        }
        // A data file has no room for VM state, and may have been longer than the disk.
        if self.data_file().is_none() {
            self.drop_leftovers(node, worker, zero_to..new_size).await?;
        }
        if preallocation != Preallocation::Off {
            self.preallocate(node, worker, growth, preallocation, external, control).await?;
        }
        Ok(())
    }

    async fn shrink(self: &Arc<Self>, node: &Node, worker: &Worker, new_size: u64) -> Result<()> {
        let old_size = self.virtual_size();
        let first_gone = new_size.next_multiple_of(self.geometry().cluster_size());
        // Reads that came before end first: where the mapping has gone, they would find what the backing image holds.
        self.set_virtual_size(new_size);
        let shrunk = async {
            let reads = while_driven(worker, || self.readers().awaited(), self.readers().wait(worker));
            worker
                .shown(self.file(), "reads of what is cut off", reads)
                .await
                .ok_or_else(|| Error::undriven("the disk can't become smaller", "a read").on(self.path()))?;
            if first_gone < old_size {
                self.drop_mapping(node, worker, first_gone..old_size).await?;
            }
            self.write_size(worker, new_size).await
        }
        .await;
        if let Err(error) = shrunk {
            self.set_virtual_size(old_size);
            return Err(error);
        }
        Ok(())
    }

    async fn write_size(self: &Arc<Self>, worker: &Worker, size: u64) -> Result<()> {
        self.commit(worker).await?;
        if !sabotage::is(Fault::ForgetHeaderSize) {
            self.header.change(worker, &[Patch::U64(field::SIZE, size)], OnFailure::Restore).await?;
        }
        // A commit with nothing to do would only flush an external data file.
        self.header.make_durable(worker).await
    }

    /// Moves the L1 table to a place with room for `entries`.
    async fn grow_l1(self: &Arc<Self>, worker: &Worker, entries: u64) -> Result<()> {
        // No table is made meanwhile, so after the commit the table in memory is the one on disk.
        let _no_new_tables = self.map.hold_tables().await;
        self.commit(worker).await?;
        let old = self.map.l1();
        let table = old.table().resized(entries as usize);
        let new = TableReplacement::new(table.to_bytes(), Metadata::ActiveL1, OnFailure::Restore)
            .in_place_of(old.offset(), old.table().len() as u64 * 8);
        let make_durable = async || -> Result<()> {
            // The refcounts of the new place. They may be durable already, and a commit with nothing to do would
            // only flush an external data file; the table itself must be durable before the header names it.
            self.commit(worker).await?;
            self.files.barrier(worker, self.file()).await
        };
        let switch = async |new: Unnamed<'_>| -> Result<()> {
            let offset = new.offset().unwrap_or(old.offset());
            let patches = [Patch::U32(field::L1_SIZE, entries as u32), Patch::U64(field::L1_OFFSET, offset)];
            new.change_header(&patches).await?;
            self.map.replace_l1(L1::new(table, offset));
            Ok(())
        };
        self.replace_table(worker, new, make_durable, switch).await?;
        self.commit(worker).await
    }
}
