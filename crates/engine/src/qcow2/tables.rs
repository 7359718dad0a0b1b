//! L2 tables that are made or copied, so that a slice can be changed.

use crate::qcow2::metadata_map::Metadata;
use crate::qcow2::slices::ShardGuard;
use crate::qcow2::state::{AfterFree, NewTable, Qcow2};
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use zebu_qcow2::{HostOffset, L1Entry};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl Qcow2 {
    /// Makes sure that the L2 table that maps `guest` exists and belongs to the active state alone.
    pub(crate) async fn ensure_table(self: &Arc<Self>, worker: &Worker, guest: u64) -> Result<()> {
        let index = self.l1_index(guest);
        if self.has_own_table(index)? {
            return Ok(());
        }
        let _turn = self.table_gate.enter().await;
        if self.has_own_table(index)? {
            return Ok(());
        }
        let allocated = self.allocate_metadata(worker, 1).await?;
        let host = allocated.range.start << self.geometry.cluster_bits;
        let l1 = self.l1();
        let old = self.table_of(index)?;
        let new_table = NewTable { host, content: allocated.content, source: old.map(|t| t.0) };
        self.note_metadata(host, 1, Metadata::ActiveL2);
        self.new_tables().insert(index, new_table);
        l1.table.set(index, L1Entry::new(HostOffset(host), true).0);
        if let Some(old) = old {
            let cluster = old.0 >> self.geometry.cluster_bits;
            self.metadata.remove(cluster..cluster + 1);
            self.push_freed(cluster..cluster + 1, AfterFree::Reuse);
        }
        Ok(())
    }

    fn table_of(&self, index: u64) -> Result<Option<HostOffset>> {
        let table = L1Entry(self.l1().table.get(index)).checked_table(&self.geometry).map_err(|e| {
            Error::new(ErrorKind::Corrupt, format!("{e} (L1 index: {index:#x}); run zebu check"))
                .on(&self.path)
        })?;
        if let Some(table) = table {
            self.check_own(table.0, Metadata::ActiveL2)?;
        }
        Ok(table)
    }

    fn has_own_table(&self, index: u64) -> Result<bool> {
        let l1 = self.l1();
        if index >= l1.table.len() as u64 {
            return Err(
                Error::new(ErrorKind::OutOfRange, "the L1 table does not reach that far").on(&self.path)
            );
        }
        let copied = L1Entry(l1.table.get(index)).copied() || sabotage::is(Fault::ChangeSharedTable);
        Ok(self.table_of(index)?.is_some() && copied)
    }

    /// Locks the shard of the slice that maps `guest`, if the slice is present and its table may be changed.
    pub(crate) fn try_lock_slice(&self, guest: u64) -> Result<Option<(ShardGuard<'_>, u64, usize)>> {
        let (key, index) = self.slice_of(guest);
        let mut shard = self.l2.lock(key);
        let has_own_table = self.has_own_table(self.l1_index(guest)).map_err(|e| e.at_guest(guest))?;
        if self.l2.get(&mut shard, key).is_none() || !has_own_table {
            return Ok(None);
        }
        Ok(Some((shard, key, index)))
    }

    /// Does what [`Qcow2::try_lock_slice`] needs to succeed. It may have to be done again.
    pub(crate) async fn prepare_slice(self: &Arc<Self>, worker: &Worker, guest: u64) -> Result<()> {
        self.ensure_table(worker, guest).await.map_err(|e| e.at_guest(guest))?;
        self.load_slice_of(worker, guest).await
    }

    /// Locks the shard of the slice that maps `guest`, with the slice present and its table changeable.
    pub(crate) async fn lock_slice(
        self: &Arc<Self>,
        worker: &Worker,
        guest: u64,
    ) -> Result<(ShardGuard<'_>, u64, usize)> {
        loop {
            if let Some(locked) = self.try_lock_slice(guest)? {
                return Ok(locked);
            }
            self.prepare_slice(worker, guest).await?;
        }
    }
}
