//! Bits, tables and the directory to disk.
//!
//! Nothing is written in place. New data, tables and the directory are counted and durable before the header names
//! the directory; what they replace is freed after that. A failure before leaves the old directory, in which the
//! bitmaps that record writes are in use.

use super::{Bitmap, Bits, Condition, Loaded};
use crate::Result;
use crate::error::format_error;
use crate::qcow2::header::block::OnFailure;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::backup_id::{BitmapBases, Seal};
use zebu_qcow2::bitmap::{BitmapCluster, BitmapFlags, BitmapTableEntry, encode_directory, table_entries};
use zebu_qcow2::extension::BitmapsExtension;
use zebu_qcow2::header_edit::{set_bitmap_bases, set_bitmaps};
use zebu_qcow2::{FormatError, HostOffset};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Bytes of bits written at once, or a cluster if that is more.
const AT_ONCE: u64 = 64 << 10;

/// The state of the disk when bitmaps are stored or marked in use the next time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Afterwards {
    /// It is written: bitmaps that record that stay in use.
    Written,
    /// Nothing: all bitmaps are written out.
    Untouched,
}

/// Whether a record begins with what is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Recorded,
    Unrecorded,
}

/// Clusters taken for what is being stored; given back if it comes to nothing.
pub(super) struct Places<'a> {
    qcow2: &'a Qcow2,
    taken: Vec<Range<u64>>,
}

impl<'a> Places<'a> {
    /// None yet.
    pub(super) fn of(qcow2: &'a Qcow2) -> Self {
        Self { qcow2, taken: Vec::new() }
    }

    /// Adds those of another, which is done.
    pub(super) fn take_over(&mut self, mut other: Self) {
        self.taken.append(&mut other.taken);
    }
}

impl Drop for Places<'_> {
    fn drop(&mut self) {
        for clusters in self.taken.drain(..) {
            self.qcow2.space.metadata().remove(clusters.clone());
            self.qcow2.space.quarantine().push_unread(clusters, FreeMode::Reuse);
        }
    }
}

impl Qcow2 {
    /// Makes `list` the bitmaps of the image; `gone` are clusters that are freed beside those of what is replaced.
    /// Nobody changes the disk meanwhile; what was changed before is durable afterwards, except for what was freed.
    /// Bitmaps that go on recording are stored as they are now beside a record that begins now, if there is room for one.
    pub(super) async fn store_bitmaps(
        self: &Arc<Self>,
        worker: &Worker,
        mut list: Vec<Bitmap>,
        mut gone: Vec<Range<u64>>,
        afterwards: Afterwards,
    ) -> Result<()> {
        let (old, directory) = {
            let state = self.bitmaps.state();
            (state.list.clone(), state.directory)
        };
        let mut places = Places::of(self);
        // The clusters of the record before are given back: nobody writes it any more, not even for a request that was given up.
        let _no_record_is_written = self.bitmaps.record_turn.lock().await;
        gone.extend(self.drop_record(worker, &mut list).await?);
        let begun = match afterwards {
            Afterwards::Written => self.make_record(worker, &list, &mut places).await?,
            Afterwards::Untouched => None,
        };
        let moment = if begun.is_some() { Moment::Recorded } else { Moment::Unrecorded };
        for bitmap in &mut list {
            self.store_bitmap(worker, bitmap, afterwards, moment, &mut places).await?;
        }
        let mut record = None;
        if let Some((bitmap, begun)) = begun {
            list.push(bitmap);
            record = Some(begun);
        }
        let same = old.iter().map(|b| &b.entry).eq(list.iter().map(|b| &b.entry));
        if !same {
            let entries: Vec<_> = list.iter().map(|bitmap| bitmap.entry.clone()).collect();
            let new_directory = self.write_directory(worker, &entries, &mut places).await?;
            self.settle(worker).await?;
            let bases = new_directory.and_then(|(offset, _)| self.sealed_bases(&list, offset));
            self.name_directory(worker, new_directory.map(|at| (at, entries.len() as u32)), bases).await?;
            // The disk refers to them now.
            places.taken.clear();
            if let Some((offset, len)) = new_directory {
                self.space.note_metadata(offset, len, Metadata::BitmapDirectory);
            }
            if let Some((offset, len)) = directory {
                self.space.free_table(offset, len);
            }
            gone.extend(clusters_gone(&old, &list));
            for clusters in gone {
                self.space.metadata().remove(clusters.clone());
                self.space.quarantine().push_unread(clusters, FreeMode::Reuse);
            }
            self.bitmaps.state().directory = new_directory;
        } else if let Some((offset, _)) = directory {
            let bases = self.sealed_bases(&list, offset);
            self.header
                .change_in_steps(worker, OnFailure::Poison, |block| {
                    Ok(steps_to_bases(block, bases.as_ref()).unwrap_or_default())
                })
                .await?;
        }
        for bitmap in &list {
            if let Some(loaded) = &bitmap.loaded
                && (bitmap.is_complete(afterwards) || (moment == Moment::Recorded && bitmap.is_recording()))
            {
                loaded.bits.set_stored();
            }
        }
        match afterwards {
            Afterwards::Written => self.bitmaps.record(&list, record),
            Afterwards::Untouched => self.bitmaps.end_record(),
        }
        self.bitmaps.set_list(list);
        Ok(())
    }

    /// Writes what the entry of a bitmap is to lead to, and makes the entry for it.
    async fn store_bitmap(
        self: &Arc<Self>,
        worker: &Worker,
        bitmap: &mut Bitmap,
        afterwards: Afterwards,
        moment: Moment,
        places: &mut Places<'_>,
    ) -> Result<()> {
        if bitmap.condition == Condition::Inconsistent {
            bitmap.entry.flags |= BitmapFlags::IN_USE;
            return Ok(());
        }
        bitmap.entry.flags.set(BitmapFlags::AUTO, bitmap.recording);
        let is_complete = bitmap.is_complete(afterwards);
        let is_stored = is_complete
            || (moment == Moment::Recorded && bitmap.is_recording() && !sabotage::is(Fault::ForgetMoment));
        let lent = bitmap.lent.clone().filter(|_| !sabotage::is(Fault::ForgetLentBits));
        let Some(loaded) = &mut bitmap.loaded else { return Ok(()) };
        bitmap.entry.flags.set(BitmapFlags::IN_USE, !is_complete);
        if is_stored && (loaded.unstored || loaded.bits.is_changed() || lent.is_some()) {
            let all = lent.as_ref().map(|lent| {
                let all = loaded.bits.resized(loaded.bits.size());
                all.merge(lent);
                all
            });
            let table = self.write_bits(worker, all.as_ref().unwrap_or(&loaded.bits), places).await?;
            self.write_table(worker, &mut bitmap.entry, loaded, table, places).await?;
            // What a backup has is on disk, and not in memory.
            loaded.unstored = lent.is_some();
        } else if bitmap.entry.table_entries == 0 {
            // It has to have a table, though nobody trusts what it says.
            let entries = table_entries(loaded.bits.size(), loaded.bits.granularity_bits(), self.geometry());
            let table = (vec![BitmapTableEntry::default(); entries.max(1) as usize], Vec::new());
            self.write_table(worker, &mut bitmap.entry, loaded, table, places).await?;
        }
        Ok(())
    }

    /// Writes the clusters of bits that are neither all clear nor all set; returns the table that leads to them, and
    /// where they are.
    async fn write_bits(
        self: &Arc<Self>,
        worker: &Worker,
        bits: &Bits,
        places: &mut Places<'_>,
    ) -> Result<(Vec<BitmapTableEntry>, Vec<Range<u64>>)> {
        let cluster_size = self.geometry().cluster_size();
        let words = cluster_size / 8;
        let entries = table_entries(bits.size(), bits.granularity_bits(), self.geometry()).max(1);
        let mut table = Vec::with_capacity(entries as usize);
        let mut mixed = Vec::new();
        // Bytes of disk that a cluster of bits covers.
        let covered = (cluster_size * 8).saturating_mul(1 << bits.granularity_bits());
        let mut next = bits.next_dirty(0);
        for index in 0..entries {
            let start = index.saturating_mul(covered);
            if next.as_ref().is_some_and(|run| run.end <= start) {
                next = bits.next_dirty(start);
            }
            if next.as_ref().is_none_or(|run| run.start >= start.saturating_add(covered)) {
                table.push(BitmapTableEntry::new(BitmapCluster::AllZeroes));
                continue;
            }
            let range = index * words..((index + 1) * words).min(bits.words());
            let (mut all_clear, mut all_set) = (true, true);
            for word in range {
                let value = bits.word(word);
                all_clear &= value == 0;
                all_set &= value == bits.valid(word);
                if !all_clear && !all_set {
                    break;
                }
            }
            table.push(BitmapTableEntry::new(match (all_clear, all_set) {
                (true, _) => BitmapCluster::AllZeroes,
                (false, true) => BitmapCluster::AllOnes,
                (false, false) => {
                    mixed.push(index);
                    BitmapCluster::AllZeroes
                }
            }));
        }
        let mut data: Vec<Range<u64>> = Vec::new();
        let at_once = (AT_ONCE / cluster_size).max(1) as usize;
        for batch in mixed.chunks(at_once) {
            let allocated = self.allocate_metadata(worker, batch.len() as u64).await?.into_range();
            places.taken.push(allocated.clone());
            let mut bytes = Vec::with_capacity(batch.len() * cluster_size as usize);
            for (index, cluster) in batch.iter().zip(allocated.clone()) {
                for word in index * words..(index + 1) * words {
                    bytes.extend_from_slice(&bits.word(word).to_le_bytes());
                }
                let host = HostOffset(cluster << self.geometry().cluster_bits);
                if let Some(entry) = table.get_mut(*index as usize) {
                    *entry = BitmapTableEntry::new(BitmapCluster::Data(host));
                }
            }
            self.files.write_at(worker, allocated.start << self.geometry().cluster_bits, &bytes).await?;
            data.push(allocated);
        }
        Ok((table, data))
    }

    pub(super) async fn write_table(
        self: &Arc<Self>,
        worker: &Worker,
        entry: &mut zebu_qcow2::bitmap::BitmapEntry,
        loaded: &mut Loaded,
        (table, data): (Vec<BitmapTableEntry>, Vec<Range<u64>>),
        places: &mut Places<'_>,
    ) -> Result<()> {
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.0.to_be_bytes()).collect();
        let place = self.write_whole_clusters(worker, bytes, places).await?;
        self.space.metadata().insert(place.clone(), Metadata::BitmapTable);
        for clusters in &data {
            self.space.metadata().insert(clusters.clone(), Metadata::BitmapData);
        }
        entry.table_offset = HostOffset(place.start << self.geometry().cluster_bits);
        entry.table_entries = table.len() as u32;
        let mut stored = vec![place];
        stored.extend(data);
        loaded.stored = stored.into();
        Ok(())
    }

    /// Writes a directory of the entries; where it is, and its bytes. None for no entries.
    async fn write_directory(
        self: &Arc<Self>,
        worker: &Worker,
        entries: &[zebu_qcow2::bitmap::BitmapEntry],
        places: &mut Places<'_>,
    ) -> Result<Option<(u64, u64)>> {
        if entries.is_empty() {
            return Ok(None);
        }
        let bytes = encode_directory(entries).map_err(|e| format_error(self.path(), &e))?;
        let len = bytes.len() as u64;
        let place = self.write_whole_clusters(worker, bytes, places).await?;
        Ok(Some((place.start << self.geometry().cluster_bits, len)))
    }

    async fn write_whole_clusters(
        self: &Arc<Self>,
        worker: &Worker,
        mut bytes: Vec<u8>,
        places: &mut Places<'_>,
    ) -> Result<Range<u64>> {
        bytes.resize(bytes.len().next_multiple_of(self.geometry().cluster_size() as usize), 0);
        let clusters = bytes.len() as u64 >> self.geometry().cluster_bits;
        let place = self.allocate_for(worker, clusters, places).await?;
        self.files.write_at(worker, place.start << self.geometry().cluster_bits, &bytes).await?;
        Ok(place)
    }

    /// Clusters one behind the other.
    pub(super) async fn allocate_for(
        self: &Arc<Self>,
        worker: &Worker,
        clusters: u64,
        places: &mut Places<'_>,
    ) -> Result<Range<u64>> {
        let place = self.allocate_metadata(worker, clusters).await?.into_range();
        places.taken.push(place.clone());
        Ok(place)
    }

    /// Has the header name a directory (offset and bytes, entries), or none, durably. The bases come first: they are
    /// sealed to that directory, and a crash between the two leaves none.
    async fn name_directory(
        &self,
        worker: &Worker,
        directory: Option<((u64, u64), u32)>,
        bases: Option<(BitmapBases, Seal)>,
    ) -> Result<()> {
        let extension = directory.map(|((offset, size), count)| BitmapsExtension {
            bitmap_count: count,
            directory_size: size,
            directory_offset: HostOffset(offset),
        });
        self.header
            .change_in_steps(worker, OnFailure::Poison, |block| {
                let wrong = |e| format_error(self.path(), &e);
                let mut steps = steps_to_bases(block, bases.as_ref()).unwrap_or_default();
                let named = match set_bitmaps(steps.last().map_or(block, Vec::as_slice), extension) {
                    Err(FormatError::HeaderDoesNotFit { .. }) if !steps.is_empty() => {
                        // There is no room for both.
                        steps.clear();
                        set_bitmaps(block, extension)
                    }
                    named => named,
                };
                steps.extend(named.map_err(wrong)?);
                Ok(steps)
            })
            .await
    }
}

/// The blocks by which the header comes to name the bases. `None`: it has no room for them, so it names none.
fn steps_to_bases(block: &[u8], bases: Option<&(BitmapBases, Seal)>) -> Option<Vec<Vec<u8>>> {
    set_bitmap_bases(block, bases.map(|(bases, seal)| (bases, *seal))).ok()
}

impl Bitmap {
    /// Whether all that is in memory has to be on disk, and is all that there is.
    fn is_complete(&self, afterwards: Afterwards) -> bool {
        let is_final = afterwards == Afterwards::Untouched || sabotage::is(Fault::StoreUnfinishedBits);
        self.lent.is_none() && (is_final || !self.recording)
    }
}

/// Clusters that the entries of `old` lead to and those of `new` don't.
fn clusters_gone(old: &[Bitmap], new: &[Bitmap]) -> Vec<Range<u64>> {
    let place = |bitmap: &Bitmap| (bitmap.entry.table_offset.0, bitmap.entry.table_entries);
    let stay: HashSet<_> = new.iter().map(place).collect();
    let mut gone = Vec::new();
    for bitmap in old {
        if !stay.contains(&place(bitmap))
            && let Some(loaded) = &bitmap.loaded
        {
            gone.extend(loaded.stored.iter().cloned());
        }
    }
    gone
}
