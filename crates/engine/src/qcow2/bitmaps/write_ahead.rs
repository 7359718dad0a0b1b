//! The record of changes: it begins with an opening's first write and with each change of bitmaps, is durable before the changes
//! that it tells of, and takes the place of what was not stored after a crash (docs/design/bitmap-record.md).

use super::record::{Layout, NAME, Record, TRAILER, is_trailer};
use super::store::{Afterwards, Places};
use super::{Bitmap, Bits, Condition, Loaded};
use crate::qcow2::read_tables::read_bytes;
use crate::qcow2::state::Qcow2;
use crate::{ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::bitmap::{BitmapCluster, BitmapEntry, BitmapFlags, BitmapTableEntry};
use zebu_qcow2::limits::MAX_BITMAPS;
use zebu_qcow2::{Geometry, Header, HostOffset};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, Worker};

/// The record that a crash left, as far as it is to be believed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FoundRecord {
    /// Bytes of its granules.
    granularity: Option<u64>,
}

impl FoundRecord {
    /// Looks for a record among the entries of a directory. One that another program has written since is not believed: it has
    /// marked it in use, or written it without its trailer.
    pub(crate) async fn find(
        worker: &Worker,
        file: &File,
        header: &Header,
        entries: &[BitmapEntry],
    ) -> Result<Self> {
        let (geometry, size) = (header.geometry(), header.virtual_size());
        let in_use = entries.iter().any(|entry| entry.flags.contains(BitmapFlags::IN_USE));
        let mut named = entries.iter().filter(|entry| entry.name == NAME.as_bytes());
        let (true, Some(entry), None) = (in_use, named.next(), named.next()) else {
            return Ok(Self::default());
        };
        let layout = Layout::of(size, &geometry).filter(|layout| {
            entry.validate(&geometry, size).is_ok()
                && entry.flags == BitmapFlags::AUTO
                && layout.granularity_bits == entry.granularity_bits
                && layout.clusters == u64::from(entry.table_entries)
        });
        let Some(layout) = layout else { return Ok(Self::default()) };
        let table = read_bytes(worker, file, entry.table_offset.0, layout.clusters as usize * 8).await?;
        let first = BitmapTableEntry::read(&table, 0).and_then(|entry| entry.decode(&geometry).ok());
        let Some(BitmapCluster::Data(HostOffset(offset))) = first else { return Ok(Self::default()) };
        let len = layout.clusters << geometry.cluster_bits;
        // Its clusters lie one behind the other.
        let follow = (0..).zip(table.as_chunks::<8>().0).all(|(index, word)| {
            let host = HostOffset(offset + (index << geometry.cluster_bits));
            u64::from_be_bytes(*word) == BitmapTableEntry::new(BitmapCluster::Data(host)).0
        });
        let is_in_file = offset.checked_add(len).is_some_and(|end| end <= file.len());
        if !follow || !is_in_file {
            return Ok(Self::default());
        }
        let end = read_bytes(worker, file, offset + len - TRAILER, TRAILER as usize).await?;
        let is_own = is_trailer(&end, offset) || sabotage::is(Fault::BelieveForeignRecord);
        Ok(Self { granularity: is_own.then(|| 1 << entry.granularity_bits) })
    }

    /// Bytes of the granules in which the record tells what a bitmap that was left in use does not say.
    pub(super) fn tells_of(self, entry: &BitmapEntry, geometry: &Geometry, size: u64) -> Option<u64> {
        let mut stored = entry.clone();
        stored.flags.remove(BitmapFlags::IN_USE);
        let tells =
            entry.flags == BitmapFlags::IN_USE | BitmapFlags::AUTO && stored.validate(geometry, size).is_ok();
        self.granularity.filter(|_| tells)
    }
}

impl Bitmap {
    /// The bits as they are on disk, with what the record tells. `None`: it can't be read.
    pub(super) fn joined(&self, mut loaded: Loaded, record: Option<&Bits>) -> Option<Loaded> {
        if self.recovered.is_some() && !sabotage::is(Fault::ForgetRecord) {
            loaded.bits.merge(record?);
            // What is on disk is marked in use.
            loaded.unstored = true;
        }
        Some(loaded)
    }
}

impl Qcow2 {
    /// Notes that a range of the disk is about to change. Where it returns, a crash does not make the bitmaps forget it.
    ///
    /// # Errors
    /// Failures of the file; the change must not be made then.
    pub(crate) async fn note_change(self: &Arc<Self>, worker: &Worker, offset: u64, len: u64) -> Result<()> {
        let range = offset..offset.saturating_add(len);
        match self.bitmaps.mark(&range) {
            Some(record) => Box::pin(self.record_ahead(worker, record, range)).await,
            None => Ok(()),
        }
    }

    /// Has the record tell of a range, durably, beside what others ask for meanwhile.
    async fn record_ahead(
        self: &Arc<Self>,
        worker: &Worker,
        record: Arc<Record>,
        range: Range<u64>,
    ) -> Result<()> {
        record.want(&range);
        if sabotage::is(Fault::ChangeBeforeRecord) {
            return Ok(());
        }
        self.on_own_worker(worker, move |me, on| async move {
            let _turn = me.bitmaps.record_turn.lock().await;
            let is_active = me.bitmaps.active_record().is_some_and(|active| Arc::ptr_eq(&active, &record));
            if !is_active || record.covers(&range) {
                // Where another record has begun, the request was given up: its clusters may be others' already.
                return Ok(());
            }
            me.check_writable()?;
            let parts = record.wanted();
            for part in &parts {
                me.files.write_at(&on, part.offset, &part.bytes).await?;
            }
            if !sabotage::is(Fault::SkipBarrierOfRecord) {
                me.files.barrier(&on, me.file()).await?;
            }
            record.note_durable(&parts);
            Ok(())
        })
        .await
    }

    /// Begins a record with the bits as they are now. False: there is none, and the file is as it was. The gate of the bitmaps is
    /// held, and nobody changes the disk.
    pub(super) async fn begin_record(self: &Arc<Self>, worker: &Worker) -> Result<bool> {
        let list = self.bitmaps.list();
        if self.layout_of_record(&list).is_none() {
            return Ok(false);
        }
        match self.store_bitmaps(worker, list, Vec::new(), Afterwards::Written).await {
            Ok(()) => Ok(self.bitmaps.active_record().is_some()),
            // A full disk does not keep guests from writing in place.
            Err(error) if error.kind() == ErrorKind::NoSpace && self.check_writable().is_ok() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Begins a record anew, so that a crash finds what the bitmaps say now, and no less. The caller is alone.
    ///
    /// # Errors
    /// Failures of the file; the record before goes on, if there was one.
    pub(crate) async fn renew_record(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if !self.header.preparation().is_done() {
            return Ok(());
        }
        let _turn = self.bitmaps.gate.lock().await;
        self.begin_record(worker).await.map(drop)
    }

    /// The layout of a record beside these bitmaps. `None`: nothing records, or there is no place for one.
    fn layout_of_record(&self, list: &[Bitmap]) -> Option<Layout> {
        let others = list.iter().filter(|bitmap| !bitmap.is_record()).count();
        let is_of_use = list.iter().any(Bitmap::is_recording) && others < MAX_BITMAPS as usize;
        is_of_use.then(|| Layout::of(self.virtual_size(), self.geometry())).flatten()
    }

    /// Writes an empty record for the directory that is being made. `None`: nothing records, or there is no place for one.
    pub(super) async fn make_record<'a>(
        self: &'a Arc<Self>,
        worker: &Worker,
        list: &[Bitmap],
        places: &mut Places<'a>,
    ) -> Result<Option<(Bitmap, Arc<Record>)>> {
        let Some(layout) = self.layout_of_record(list) else { return Ok(None) };
        let mut own = Places::of(self);
        match self.write_record(worker, layout, &mut own).await {
            Ok(made) => {
                places.take_over(own);
                Ok(Some(made))
            }
            Err(error) if error.kind() == ErrorKind::NoSpace && self.check_writable().is_ok() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn write_record(
        self: &Arc<Self>,
        worker: &Worker,
        layout: Layout,
        places: &mut Places<'_>,
    ) -> Result<(Bitmap, Arc<Record>)> {
        let bits = self.geometry().cluster_bits;
        let data = self.allocate_for(worker, layout.clusters, places).await?;
        let record = Arc::new(Record::new(layout, data.start << bits));
        self.files.write_at(worker, data.start << bits, &record.bytes()).await?;
        let table = data.clone().map(|cluster| BitmapCluster::Data(HostOffset(cluster << bits)));
        let table: Vec<_> = table.map(BitmapTableEntry::new).collect();
        let mut entry =
            BitmapEntry::new(NAME.as_bytes().to_vec(), layout.granularity_bits, BitmapFlags::AUTO);
        let mut loaded = Loaded::nothing();
        self.write_table(worker, &mut entry, &mut loaded, (table, vec![data]), places).await?;
        let bitmap = Bitmap {
            entry,
            recording: false,
            condition: Condition::Sound,
            loaded: Some(loaded),
            lent: None,
            recovered: None,
            base: None,
        };
        Ok((bitmap, record))
    }

    /// The bits of the record that a crash left, if there is one that is believed and can be read.
    pub(super) async fn recorded_bits(&self, worker: &Worker) -> Result<Option<Arc<Bits>>> {
        let entry = {
            let state = self.bitmaps.state();
            if !state.list.iter().any(|bitmap| bitmap.recovered.is_some() && bitmap.loaded.is_none()) {
                return Ok(None);
            }
            let record = state.list.iter().find(|b| b.is_record() && b.condition == Condition::Sound);
            let Some(record) = record else { return Ok(None) };
            if let Some(loaded) = &record.loaded {
                return Ok(Some(loaded.bits.clone()));
            }
            record.entry.clone()
        };
        let loaded = self.load_bitmap(worker, &entry).await?;
        let mut state = self.bitmaps.state();
        let Some(record) = state.list.iter_mut().find(|bitmap| bitmap.is_record()) else { return Ok(None) };
        if loaded.is_none() {
            record.condition = Condition::Inconsistent;
        }
        record.loaded = loaded;
        Ok(record.loaded.as_ref().map(|loaded| loaded.bits.clone()))
    }

    /// Takes the record out of a list of bitmaps; gives the clusters that are to be freed if they are not in memory. What it tells is in
    /// memory already.
    pub(super) async fn drop_record(
        &self,
        worker: &Worker,
        list: &mut Vec<Bitmap>,
    ) -> Result<Vec<Range<u64>>> {
        let Some(index) = list.iter().position(Bitmap::is_record) else { return Ok(Vec::new()) };
        let record = list.remove(index);
        if record.loaded.is_none()
            && let Some((_, stored)) = self.read_bitmap_table(worker, &record.entry).await?
        {
            return Ok(stored.to_vec());
        }
        Ok(Vec::new())
    }
}
