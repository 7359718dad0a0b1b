//! Tables and bits from disk, and what must be done before the first write of an opening.

use super::operations::loaded_bytes;
use super::{Bitmap, Bits, Condition, Loaded, MAX_LOADED};
use crate::qcow2::read_tables::read_bytes;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::state::Qcow2;
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::{AsyncMutexGuard, while_driven};
use crate::{Error, ErrorKind, Remedy, Result};
use futures_util::future::try_join_all;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::L1Entry;
use zebu_qcow2::bitmap::encode_directory;
use zebu_qcow2::bitmap::{
    BitmapCluster, BitmapEntry, BitmapFlags, BitmapTableEntry, data_bytes, table_entries,
};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Bytes of bits read at once.
const AT_ONCE: u64 = 1 << 20;
/// Clusters of bitmap tables that the overlap check knows at most; a bitmap beyond them can't be used.
const MAX_TABLE_CLUSTERS: u64 = 1 << 20;

impl Qcow2 {
    /// Before the first write of an opening: loads the bitmaps that record writes, and marks them in use, durably.
    /// One that turns out to be damaged is marked too: it can only be removed.
    pub(crate) async fn prepare_bitmaps(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if self.bitmaps.is_empty() {
            return Ok(());
        }
        let _turn = self.bitmaps.gate.lock().await;
        self.load_bitmaps(worker, |bitmap| bitmap.recording).await?;
        if self.begin_record(worker).await? {
            return Ok(());
        }
        let mut list = self.bitmaps.list();
        let which = |b: &Bitmap| b.recording || b.is_record() || b.condition == Condition::Inconsistent;
        self.mark_in_use(worker, &mut list, which).await?;
        self.bitmaps.record(&list, None);
        self.bitmaps.set_list(list);
        Ok(())
    }

    /// Marks all bitmaps in use, those that record nothing too. Nobody else changes bitmaps meanwhile.
    pub(crate) async fn take_bitmaps_into_use(&self, worker: &Worker) -> Result<()> {
        let _turn = self.bitmaps.gate.lock().await;
        self.load_bitmaps(worker, |_| true).await?;
        let mut list = self.bitmaps.list();
        self.mark_in_use(worker, &mut list, |bitmap| !bitmap.is_record()).await?;
        self.bitmaps.set_list(list);
        Ok(())
    }

    /// Marks bitmaps in use in the directory where it lies. Each flag lies within one sector of the disk, and nothing
    /// that the bitmaps would have to know is written before all of them are durable.
    pub(super) async fn mark_in_use(
        &self,
        worker: &Worker,
        list: &mut [Bitmap],
        which: impl Fn(&Bitmap) -> bool,
    ) -> Result<()> {
        let Some((offset, _)) = self.bitmaps.state().directory else { return Ok(()) };
        let mut changed = false;
        let mut entries: Vec<BitmapEntry> = Vec::with_capacity(list.len());
        for bitmap in list.iter() {
            let mut entry = bitmap.entry.clone();
            if which(bitmap) && !entry.flags.contains(BitmapFlags::IN_USE) {
                entry.flags |= BitmapFlags::IN_USE;
                changed = true;
            }
            entries.push(entry);
        }
        if !changed {
            return Ok(());
        }
        let mut bytes =
            encode_directory(&entries).map_err(|e| crate::error::format_error(self.path(), &e))?;
        // Whole sectors, with zeroes behind the end, as in a directory that was just made.
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        self.files.write_at(worker, offset, &bytes).await?;
        if !sabotage::is(Fault::SkipBarrierOfMarks) {
            self.files.barrier(worker, self.file()).await?;
        }
        for (bitmap, entry) in list.iter_mut().zip(entries) {
            bitmap.entry = entry;
        }
        Ok(())
    }

    /// Tells the overlap check where tables are. A table that lies where something else is, or not in the file, makes
    /// its bitmap inconsistent.
    pub(crate) fn note_bitmap_tables(&self) {
        let file_clusters = if self.is_writable() {
            self.space.file_clusters()
        } else {
            self.file().len().div_ceil(self.geometry().cluster_size())
        };
        if !self.is_writable() {
            // What a guest's data is found through comes first: a bitmap that lies on it is not followed.
            let l1 = self.map.l1();
            let tables = l1.table().iter_set().filter_map(|(_, entry)| L1Entry(entry).table());
            let tables = tables.map(|table| table.0 >> self.geometry().cluster_bits);
            let in_file = tables.filter(|cluster| *cluster < file_clusters);
            // Two entries with one table are the check's to report.
            let _ = self.space.metadata().insert_tables(in_file, Metadata::ActiveL2);
        }
        let mut state = self.bitmaps.state();
        let mut tables: Vec<(Range<u64>, usize)> = (0..)
            .zip(&state.list)
            .map(|(index, bitmap)| (self.table_clusters(&bitmap.entry), index))
            .collect();
        tables.sort_unstable_by_key(|(clusters, index)| (clusters.start, clusters.end, *index));
        let (mut end, mut noted) = (1, 0);
        for (clusters, index) in tables {
            let Some(bitmap) = state.list.get_mut(index) else { continue };
            noted += clusters.end - clusters.start;
            let sound = clusters.start >= end
                && clusters.end <= file_clusters
                && noted <= MAX_TABLE_CLUSTERS
                && self.geometry().is_cluster_aligned(bitmap.entry.table_offset.0)
                && self.space.metadata().first_of(clusters.clone()).is_none();
            if sound {
                end = clusters.end;
                self.space.metadata().insert(clusters, Metadata::BitmapTable);
            } else {
                bitmap.condition = Condition::Inconsistent;
                // It is not followed when the bitmap is removed.
                bitmap.loaded = Some(Loaded::nothing());
            }
        }
    }

    fn table_clusters(&self, entry: &BitmapEntry) -> Range<u64> {
        self.clusters_of(entry.table_offset.0, u64::from(entry.table_entries) * 8)
    }

    pub(super) fn clusters_of(&self, offset: u64, len: u64) -> Range<u64> {
        let first = offset >> self.geometry().cluster_bits;
        first..first.saturating_add(len.div_ceil(self.geometry().cluster_size()))
    }

    pub(super) fn check_bits(&self, bytes: u64) -> Result<()> {
        if bytes <= MAX_LOADED {
            return Ok(());
        }
        let message = format!(
            "the bitmaps of the image would take {bytes} bytes of memory, more than {MAX_LOADED}: remove some or use a \
             coarser granularity"
        );
        Err(self.bitmap_error(ErrorKind::Unsupported, message).with_remedy(Remedy::RemoveBitmap))
    }

    /// Reads the bits of those bitmaps that are not in memory yet. A damaged one becomes inconsistent; an error is one
    /// of the file. The gate of the bitmaps is held.
    pub(super) async fn load_bitmaps(&self, worker: &Worker, which: impl Fn(&Bitmap) -> bool) -> Result<()> {
        if !self.is_writable() && !self.bitmaps.are_tables_noted.swap(true, Relaxed) {
            self.note_bitmap_tables();
        }
        let (missing, mut bytes): (Vec<(usize, BitmapEntry)>, u64) = {
            let state = self.bitmaps.state();
            let missing = (0..).zip(&state.list).filter(|(_, bitmap)| {
                bitmap.loaded.is_none() && bitmap.condition == Condition::Sound && which(bitmap)
            });
            (missing.map(|(index, b)| (index, b.entry.clone())).collect(), loaded_bytes(&state.list))
        };
        let recorded = if missing.is_empty() { None } else { self.recorded_bits(worker).await? };
        for (index, entry) in missing {
            let with_it = bytes.saturating_add(data_bytes(self.virtual_size(), entry.granularity_bits));
            self.check_bits(with_it)?;
            let loaded = self.load_bitmap(worker, &entry).await?;
            let mut state = self.bitmaps.state();
            let Some(bitmap) = state.list.get_mut(index) else { continue };
            match loaded.and_then(|loaded| bitmap.joined(loaded, recorded.as_deref())) {
                Some(loaded) => {
                    bitmap.loaded = Some(loaded);
                    bytes = with_it;
                }
                None => bitmap.condition = Condition::Inconsistent,
            }
        }
        Ok(())
    }

    /// Reads the bits that an entry leads to. `None`: it is damaged.
    pub(super) async fn load_bitmap(&self, worker: &Worker, entry: &BitmapEntry) -> Result<Option<Loaded>> {
        let (size, granularity_bits) = (self.virtual_size(), entry.granularity_bits);
        let Some((entries, stored)) = self.read_bitmap_table(worker, entry).await? else { return Ok(None) };
        let bits = Bits::new(size, granularity_bits);
        let needed = table_entries(size, granularity_bits, self.geometry()) as usize;
        self.read_bits(worker, entries.get(..needed).unwrap_or(&entries), &bits).await?;
        bits.set_stored();
        // So that no other bitmap has them, too.
        for clusters in stored.iter().skip(1) {
            self.space.metadata().insert(clusters.clone(), Metadata::BitmapData);
        }
        Ok(Some(Loaded { bits: Arc::new(bits), stored, unstored: false }))
    }

    /// The table of a bitmap, and the clusters that belong to it, those of the table first. `None`: it is damaged.
    pub(super) async fn read_bitmap_table(
        &self,
        worker: &Worker,
        entry: &BitmapEntry,
    ) -> Result<Option<(Vec<BitmapCluster>, Arc<[Range<u64>]>)>> {
        let bits = self.geometry().cluster_bits;
        let (offset, len) = (entry.table_offset.0, u64::from(entry.table_entries) * 8);
        let file_clusters = self.file().len().div_ceil(self.geometry().cluster_size());
        let table = self.clusters_of(offset, len);
        let data_size = u64::from(entry.table_entries).saturating_mul(self.geometry().cluster_size());
        if table.end > file_clusters || data_size > zebu_qcow2::limits::MAX_BITMAP_DATA_SIZE {
            return Ok(None);
        }
        let bytes = read_bytes(worker, self.file(), offset, len as usize).await?;
        let mut entries = Vec::new();
        let mut stored = vec![table];
        for word in bytes.as_chunks::<8>().0 {
            let Ok(cluster) = BitmapTableEntry(u64::from_be_bytes(*word)).decode(self.geometry()) else {
                return Ok(None);
            };
            if let BitmapCluster::Data(host) = cluster {
                let host = host.0 >> bits;
                if host >= file_clusters || host == 0 {
                    return Ok(None);
                }
                let is_first = stored.len() == 1;
                match stored.last_mut() {
                    Some(last) if last.end == host && !is_first => last.end += 1,
                    _ => stored.push(host..host + 1),
                }
            }
            entries.push(cluster);
        }
        // What lies on something else is not the bitmap's, nor is what comes twice.
        let mut sorted: Vec<&Range<u64>> = stored.iter().collect();
        sorted.sort_unstable_by_key(|clusters| clusters.start);
        let twice = sorted.windows(2).any(|pair| matches!(pair, [a, b] if a.end > b.start));
        let overlaps =
            stored.iter().skip(1).any(|clusters| self.space.metadata().first_of(clusters.clone()).is_some());
        if twice || overlaps {
            return Ok(None);
        }
        Ok(Some((entries, stored.into())))
    }

    async fn read_bits(&self, worker: &Worker, entries: &[BitmapCluster], bits: &Bits) -> Result<()> {
        let cluster = self.geometry().cluster_size();
        let words = cluster / 8;
        let at_once = (AT_ONCE / cluster).clamp(1, 32) as usize;
        let mut data = Vec::new();
        for (first, entry) in (0u64..).map(|index| index * words).zip(entries) {
            match entry {
                BitmapCluster::AllZeroes => {}
                BitmapCluster::AllOnes => bits.set_bits(first * 64..(first + words) * 64),
                BitmapCluster::Data(host) => data.push((first, host.0)),
            }
        }
        for batch in data.chunks(at_once) {
            let reads = batch.iter().map(|(first, host)| async move {
                let (result, bufs) =
                    worker.read(self.file(), *host, worker.buffer(cluster as usize).into()).await;
                result.map_err(|e| Error::from(e).on(self.path()).at_host(*host))?;
                let mut bytes = vec![0; cluster as usize];
                bufs.copy_to(0, &mut bytes);
                for (word, value) in (*first..).zip(bytes.as_chunks::<8>().0) {
                    bits.set_word(word, u64::from_le_bytes(*value) & bits.valid(word));
                }
                Ok::<(), Error>(())
            });
            try_join_all(reads.collect::<Vec<_>>()).await?;
        }
        Ok(())
    }

    /// The turn of one who reads bits, also on a worker that nobody may drive: that of an image that is only read.
    async fn turn_to_read(&self, worker: &Worker) -> Result<AsyncMutexGuard<'_>> {
        let gate = &self.bitmaps.gate;
        while_driven(worker, || gate.awaited(), gate.lock_by(Some(worker.drive())))
            .await
            .ok_or_else(|| Error::undriven("bitmaps can't be read", "another who reads them").on(self.path()))
    }

    /// The bits of the bitmap of this name, read if they were not yet. The overlap check knows where the tables are.
    pub(crate) async fn read_bits_of(&self, worker: &Worker, name: &str) -> Result<Arc<Bits>> {
        self.assert_bits_may_be_read();
        let _turn = self.turn_to_read(worker).await?;
        let bits = self.sound_bits(worker, name).await?;
        self.check_not_lent(&self.find_bitmap(&self.bitmaps.list(), name)?.1)?;
        Ok(bits)
    }

    /// The bits of all bitmaps of these names. The overlap check knows where the tables are.
    pub(crate) async fn read_bits_of_all(
        &self,
        worker: &Worker,
        names: &HashSet<&str>,
    ) -> Result<HashMap<String, Arc<Bits>>> {
        self.assert_bits_may_be_read();
        let _turn = self.turn_to_read(worker).await?;
        self.load_bitmaps(worker, |bitmap| names.contains(bitmap.name().as_str())).await?;
        let mut found = HashMap::new();
        for bitmap in &self.bitmaps.list() {
            let name = bitmap.name();
            if names.contains(name.as_str()) {
                self.check_sound(bitmap)?;
                self.check_not_lent(bitmap)?;
                found.extend(bitmap.loaded.as_ref().map(|loaded| (name, loaded.bits.clone())));
            }
        }
        Ok(found)
    }

    fn assert_bits_may_be_read(&self) {
        debug_assert!(
            !self.is_writable() || self.header.preparation().is_metadata_done(),
            "where the tables of bitmaps are is not noted"
        );
    }

    /// The bits of one bitmap, with the gate of the bitmaps held.
    pub(super) async fn sound_bits(&self, worker: &Worker, name: &str) -> Result<Arc<Bits>> {
        let find = || self.find_bitmap(&self.bitmaps.list(), name).map(|(_, bitmap)| bitmap);
        let found = find()?;
        self.check_sound(&found)?;
        self.load_bitmaps(worker, |bitmap| bitmap.entry.name == found.entry.name).await?;
        let bitmap = find()?;
        self.check_sound(&bitmap)?;
        bitmap.loaded.map(|loaded| loaded.bits).ok_or_else(|| self.no_bitmap(name))
    }
}
