//! COPIED flags of the active tables, made exact: set where the count is 1, clear where it is not. And the dirty bit.

use crate::Result;
use crate::qcow2::header::block::{OnFailure, Patch, field};
use crate::qcow2::snapshots::walk::{Table, Walk, entries_of, host_of};
use crate::qcow2::state::Qcow2;
use std::sync::Arc;
use zebu_qcow2::{Incompatible, L1Entry, L2Entry, Version};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl Qcow2 {
    /// Makes the flags of the active tables exact. The counts that they follow are durable, nothing is dirty, and the
    /// caller is alone. Tables that are shared are left alone: what they refer to is shared as well, and has no flag. So are
    /// those of a damaged image that lie where something else is.
    pub(super) async fn refresh_copied(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let l1 = self.map.l1();
        let mut entries = entries_of(l1.table());
        self.refresh_l1(worker, &mut entries).await?;
        let own: Vec<u64> = entries.iter().map(|e| if L1Entry(*e).copied() { *e } else { 0 }).collect();
        let mut walk = Walk::new(self, &own);
        loop {
            let mut tables = walk.next(worker).await?;
            if tables.is_empty() {
                break;
            }
            let mut changed = Vec::new();
            for mut table in tables.drain(..) {
                if self.space.check_own_l2_table(table.host).is_ok()
                    && self.refresh_table(worker, &mut table).await?
                {
                    changed.push(table);
                }
            }
            self.write_tables(worker, changed.iter()).await?;
        }
        self.forget_mapping();
        Ok(())
    }

    async fn refresh_l1(&self, worker: &Worker, entries: &mut [u64]) -> Result<()> {
        let bits = self.geometry().cluster_bits;
        let mut places: Vec<(u64, usize)> = entries
            .iter()
            .enumerate()
            .filter_map(|(index, entry)| L1Entry(*entry).table().map(|table| (table.0 >> bits, index)))
            .collect();
        places.sort_unstable();
        let clusters: Vec<u64> = places.iter().map(|(cluster, _)| *cluster).collect();
        let counts = self.counts_of(worker, &clusters).await?;
        let l1 = self.map.l1();
        for ((_, index), count) in places.into_iter().zip(counts) {
            if let Some(entry) = entries.get_mut(index)
                && L1Entry(*entry).copied() != (count == 1)
            {
                *entry = L1Entry(*entry).with_copied(count == 1).0;
                l1.table().set(index as u64, *entry);
            }
        }
        Ok(())
    }

    /// Makes the flags of a table exact in memory; whether any changed.
    async fn refresh_table(&self, worker: &Worker, table: &mut Table) -> Result<bool> {
        let geometry = self.geometry();
        let mut places = Vec::new();
        table.for_each(self, |index, _, mapping| {
            places.extend(host_of(&mapping).map(|host| (host >> geometry.cluster_bits, index)));
        })?;
        places.sort_unstable();
        let clusters: Vec<u64> = places.iter().map(|(cluster, _)| *cluster).collect();
        let counts = self.counts_of(worker, &clusters).await?;
        let mut changed = false;
        for ((_, index), count) in places.into_iter().zip(counts) {
            if let Some(entry) = L2Entry::read(&table.bytes, index, geometry)
                && entry.copied() != (count == 1)
            {
                changed |= entry.with_copied(count == 1).write(&mut table.bytes, index, geometry).is_ok();
            }
        }
        Ok(changed)
    }

    /// Empties the mapping cache, after flags of tables were rewritten in the file. Nothing of it is dirty. A read that is
    /// under way goes on: it finds its data where it was, and a slice that it loads from the old table is dropped.
    pub(super) fn forget_mapping(&self) {
        if !sabotage::is(Fault::KeepMapping) {
            self.map.slices().forget_all();
        }
    }

    /// Announces that counts and flags do not agree for a while: a crash makes the next writer build them anew.
    /// Version 2 can't say it.
    pub(super) async fn announce_inconsistency(&self, worker: &Worker) -> Result<()> {
        self.set_dirty_bit(worker, self.header.opened().incompatible() | Incompatible::DIRTY).await
    }

    /// Takes [`Qcow2::announce_inconsistency`] back: everything is durable.
    pub(super) async fn end_inconsistency(&self, worker: &Worker) -> Result<()> {
        self.set_dirty_bit(worker, self.header.opened().incompatible() - Incompatible::DIRTY).await
    }

    async fn set_dirty_bit(&self, worker: &Worker, bits: Incompatible) -> Result<()> {
        if self.geometry().version == Version::V2 {
            return Ok(());
        }
        let patches = [Patch::U64(field::INCOMPATIBLE, bits.bits())];
        self.header.change(worker, &patches, OnFailure::Restore).await?;
        self.files.barrier(worker, self.file()).await
    }
}
