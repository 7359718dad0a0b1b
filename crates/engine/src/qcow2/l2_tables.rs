//! L2 tables that are made or copied, so that a slice can be changed.

use crate::qcow2::cache::shard::{Shard, ShardGuard};
use crate::qcow2::cache::slice_cache::Pin;
use crate::qcow2::space::alloc::WindowFor;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use zebu_qcow2::{HostOffset, L1Entry, L2Entry, Mapping};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl Qcow2 {
    /// Makes sure that the L2 table that maps `guest` exists and belongs to the active state alone.
    pub(crate) async fn ensure_table(self: &Arc<Self>, worker: &Worker, guest: u64) -> Result<()> {
        let index = self.map.l1_index(guest);
        if !self.has_own_table(index)? {
            self.set_l1_aside(worker).await?;
        }
        loop {
            if self.has_own_table(index)? {
                return Ok(());
            }
            {
                // Nothing is waited for inside: whoever holds the mutex is not at the mercy of its worker.
                let _turn = self.map.hold_tables().await;
                if self.has_own_table(index)? || self.make_table(index)? {
                    return Ok(());
                }
            }
            let refilled = self.refill(worker, WindowFor::Metadata, 1).await;
            // Another may have made the table meanwhile, with the last cluster there was.
            if !self.has_own_table(index)? {
                refilled?;
            }
        }
    }

    /// Has the file system set room aside for the L1 table, which is a hole in a new image: a commit writes it in its place.
    async fn set_l1_aside(&self, worker: &Worker) -> Result<()> {
        let l1 = self.map.l1();
        if !l1.has_room() {
            // One of those that want it at once does it.
            let _turn = self.space.hold_space().await;
            if !l1.has_room() {
                self.space.set_metadata_aside(worker, l1.offset(), l1.table().len() as u64 * 8).await?;
                l1.note_room();
            }
        }
        Ok(())
    }

    /// Makes the table, if the window for tables has a cluster. `ActiveMap::table_mutex` is held.
    fn make_table(&self, index: u64) -> Result<bool> {
        let old = self.table_of(index)?;
        let Some(allocated) = self.space.try_allocate_tables(1) else { return Ok(false) };
        let (clusters, content) = allocated.into_parts();
        let host = clusters.start << self.geometry().cluster_bits;
        self.space.note_metadata(host, 1, Metadata::ActiveL2);
        self.map.add_table(index, host, content, old);
        if let Some(old) = old {
            let cluster = old.0 >> self.geometry().cluster_bits;
            self.space.metadata().remove(cluster..cluster + 1);
            self.space.quarantine().push(cluster..cluster + 1, FreeMode::Reuse);
        }
        Ok(true)
    }

    fn table_of(&self, index: u64) -> Result<Option<HostOffset>> {
        let table =
            L1Entry(self.map.l1().table().get(index)).checked_table(self.geometry()).map_err(|e| {
                Error::new(ErrorKind::Corrupt, format!("{e} (L1 index: {index:#x}); run zebu check"))
                    .on(self.path())
            })?;
        if let Some(table) = table {
            self.space.check_own(table.0, Metadata::ActiveL2)?;
        }
        Ok(table)
    }

    fn has_own_table(&self, index: u64) -> Result<bool> {
        let l1 = self.map.l1();
        if index >= l1.table().len() as u64 {
            return Err(
                Error::new(ErrorKind::OutOfRange, "the L1 table does not reach that far").on(self.path())
            );
        }
        let copied = L1Entry(l1.table().get(index)).copied() || sabotage::is(Fault::ChangeSharedTable);
        Ok(self.table_of(index)?.is_some() && copied)
    }

    /// Locks the shard of the slice that maps `guest`, if the slice is present and its table may be changed.
    pub(crate) fn try_lock_slice(&self, guest: u64) -> Result<Option<(ShardGuard<'_>, u64, usize)>> {
        let (key, index) = self.map.slice_of(guest);
        let mut shard = self.map.slices().lock(key);
        let has_own_table = self.has_own_table(self.map.l1_index(guest)).map_err(|e| e.at_guest(guest))?;
        if self.map.slices().get(&mut shard, key).is_none() || !has_own_table {
            return Ok(None);
        }
        Ok(Some((shard, key, index)))
    }

    /// Does what [`Qcow2::try_lock_slice`] needs to succeed. While the slice is pinned, it has to be done again only if
    /// a snapshot came in between.
    pub(crate) async fn prepare_slice(self: &Arc<Self>, worker: &Worker, guest: u64) -> Result<Pin<'_>> {
        self.ensure_table(worker, guest).await.map_err(|e| e.at_guest(guest))?;
        self.load_slice_of(worker, guest).await
    }

    /// Locks the shard of the slice that maps `guest`, with the slice present and its table changeable.
    pub(crate) async fn lock_slice(
        self: &Arc<Self>,
        worker: &Worker,
        guest: u64,
    ) -> Result<(ShardGuard<'_>, u64, usize)> {
        let mut pin = None;
        loop {
            if let Some(mut locked) = self.try_lock_slice(guest)? {
                if let Some(pin) = pin {
                    Pin::end(pin, &mut locked.0);
                }
                return Ok(locked);
            }
            pin = Some(self.prepare_slice(worker, guest).await?);
        }
    }

    /// Entry `index` of a slice in its locked shard.
    pub(crate) fn entry_in(&self, shard: &mut Shard, key: u64, index: usize) -> L2Entry {
        self.map
            .slices()
            .peek(shard, key)
            .and_then(|slice| L2Entry::read(slice.bytes(), index, self.geometry()))
            .unwrap_or(L2Entry::unallocated())
    }

    /// Puts what `entry` refers to into quarantine; the entry was replaced under the lock that is still held.
    pub(crate) fn free_entry(&self, entry: L2Entry, guest: u64, then: FreeMode) {
        if self.geometry().external_data {
            return;
        }
        let (clusters, then) = match self.decode(entry, guest) {
            Ok(
                Mapping::Data { host, .. }
                | Mapping::Zero { host: Some(host), .. }
                | Mapping::Subclusters { host: Some(host), .. },
            ) => {
                let cluster = host.0 >> self.geometry().cluster_bits;
                (cluster..cluster + 1, then)
            }
            Ok(Mapping::Compressed(stream)) => (stream.host_clusters(self.geometry()), FreeMode::Reuse),
            _ => return,
        };
        // A damaged entry that leads to a table goes; the table stays: it is not data to give away.
        if self.space.metadata().first_of(clusters.clone()).is_none() || sabotage::is(Fault::SkipOverlapCheck)
        {
            self.space.quarantine().push(clusters, then);
        }
    }
}
