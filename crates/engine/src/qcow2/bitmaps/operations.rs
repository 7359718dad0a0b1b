//! Adding, removing, clearing, merging bitmaps, and what a resize needs. The caller of each operation is alone: no change
//! of the disk is under way. What it does is durable when it returns, as far as the format lets a bitmap in use be.

use super::record::NAME;
use super::store::Afterwards;
use super::{Bitmap, Bits, Condition, Loaded};
use crate::qcow2::state::Qcow2;
use crate::{ErrorKind, Result};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::bitmap::{BitmapEntry, BitmapFlags, data_bytes, default_granularity_bits, table_entries};
use zebu_qcow2::limits::{
    MAX_BITMAP_DATA_SIZE, MAX_BITMAP_GRANULARITY_BITS, MAX_BITMAP_NAME, MAX_BITMAP_TABLE_ENTRIES,
    MAX_BITMAPS, MIN_BITMAP_GRANULARITY_BITS,
};
use zebu_qcow2::{BackupId, Version};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Whether a bitmap records writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recording {
    On,
    Off,
}

/// The first content of a new bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FirstBits {
    /// That nothing was written.
    Clear,
    /// That everything was.
    Set,
}

/// A bitmap that is to say what another does.
pub(crate) struct CopiedBitmap {
    name: String,
    recording: Recording,
    bits: Arc<Bits>,
}

impl CopiedBitmap {
    /// A bitmap of this name that says what `bits` do.
    pub(crate) fn new(name: String, recording: Recording, bits: Arc<Bits>) -> Self {
        Self { name, recording, bits }
    }
}

/// A list of bitmaps that gets some more.
struct Adding<'a> {
    qcow2: &'a Qcow2,
    list: &'a mut Vec<Bitmap>,
    names: HashSet<Vec<u8>>,
    /// Memory that their bits may take, bytes.
    bytes: u64,
}

impl<'a> Adding<'a> {
    fn to(qcow2: &'a Qcow2, list: &'a mut Vec<Bitmap>) -> Self {
        let names = list.iter().map(|bitmap| bitmap.entry.name.clone()).collect();
        let bytes = loaded_bytes(list);
        Self { qcow2, list, names, bytes }
    }

    /// Adds one, if it may be there.
    fn add(
        &mut self,
        name: &str,
        granularity_bits: u8,
        recording: Recording,
        bits: impl FnOnce() -> Bits,
    ) -> Result<()> {
        let (qcow2, size) = (self.qcow2, self.qcow2.virtual_size());
        let refuse = |kind, message: String| Err(qcow2.bitmap_error(kind, message));
        if !self.names.insert(name.as_bytes().to_vec()) {
            return refuse(ErrorKind::Exists, format!("Bitmap already exists: {name}"));
        }
        if self.list.len() >= MAX_BITMAPS as usize {
            let message = "Maximum number of persistent bitmaps is already reached";
            return refuse(ErrorKind::NoSpace, message.to_owned());
        }
        qcow2.check_size(name, granularity_bits, size)?;
        self.bytes = self.bytes.saturating_add(data_bytes(size, granularity_bits));
        qcow2.check_bits(self.bytes)?;
        self.list.push(Bitmap {
            entry: BitmapEntry::new(name.as_bytes().to_vec(), granularity_bits, BitmapFlags::empty()),
            recording: recording == Recording::On,
            condition: Condition::Sound,
            loaded: Some(Loaded { bits: Arc::new(bits()), stored: Arc::new([]), unstored: true }),
            lent: None,
            recovered: None,
            base: None,
        });
        Ok(())
    }
}

/// A change of the list of bitmaps.
pub(crate) enum BitmapChange<'a> {
    /// Adds a bitmap. `granularity`: bytes, a power of two; by default as QEMU chooses it.
    Add { name: &'a str, granularity: Option<u64>, recording: Recording, first: FirstBits },
    /// Adds bitmaps that say what others do, of a disk of the same size: all of them, or none.
    AddCopies(&'a [CopiedBitmap]),
    /// Removes a bitmap, whatever its state.
    Remove(&'a str),
    /// Clears all bits of a bitmap.
    Clear(&'a str),
    /// Has a bitmap record writes from now on, or no longer.
    Record(&'a str, Recording),
    /// Marks in a bitmap all that is dirty in others' bits, which are of a disk of the same size.
    Merge(&'a str, &'a Bits),
    /// Notes that a bitmap knows of everything that was written since a backup.
    Tie(&'a str, BackupId),
}

impl BitmapChange<'_> {
    /// The bitmap that must be usable, and whose bits are needed.
    fn changed_bits(&self) -> Option<&str> {
        match self {
            Self::Clear(name) | Self::Record(name, _) | Self::Merge(name, _) | Self::Tie(name, _) => {
                Some(name)
            }
            Self::Add { .. } | Self::AddCopies(_) | Self::Remove(_) => None,
        }
    }
}

impl Qcow2 {
    /// Refuses a change that the image can't have whatever bitmaps it has. The file is not touched.
    pub(crate) fn check_bitmap_change(&self, change: &BitmapChange<'_>) -> Result<()> {
        match change {
            BitmapChange::Add { name, granularity, .. } => {
                self.check_name(name)?;
                self.granularity_bits(*granularity).map(drop)
            }
            BitmapChange::AddCopies(copies) => copies.iter().try_for_each(|copy| self.check_name(&copy.name)),
            BitmapChange::Remove(_)
            | BitmapChange::Clear(_)
            | BitmapChange::Record(..)
            | BitmapChange::Merge(..)
            | BitmapChange::Tie(..) => Ok(()),
        }
    }

    fn granularity_bits(&self, granularity: Option<u64>) -> Result<u8> {
        let Some(bytes) = granularity else { return Ok(default_granularity_bits(self.geometry())) };
        let bits = bytes.trailing_zeros() as u8;
        let range = MIN_BITMAP_GRANULARITY_BITS..=MAX_BITMAP_GRANULARITY_BITS;
        if !bytes.is_power_of_two() || !range.contains(&bits) {
            let message = "the granularity of a bitmap is a power of two from 512 to 2147483648";
            return Err(self.bitmap_error(ErrorKind::InvalidArgument, message));
        }
        Ok(bits)
    }

    /// Makes a change that was let through by [`Qcow2::check_bitmap_change`], and stores what it leaves. The caller is
    /// alone, and has prepared the file for changes.
    pub(crate) async fn make_bitmap_change(
        self: &Arc<Self>,
        worker: &Worker,
        change: BitmapChange<'_>,
    ) -> Result<()> {
        debug_assert!(self.header.preparation().is_metadata_done(), "the file is not prepared for changes");
        self.free_what_waits(worker).await?;
        let _turn = self.bitmaps.gate.lock().await;
        let removed = if let BitmapChange::Remove(name) = &change { Some(*name) } else { None };
        self.load_bitmaps(worker, |b| b.recovered.is_some() && Some(b.name().as_str()) != removed).await?;
        if let Some(name) = change.changed_bits() {
            self.sound_bits(worker, name).await?;
        }
        let mut list = self.bitmaps.list();
        let mut gone = Vec::new();
        match change {
            BitmapChange::Add { name, granularity, recording, first } => {
                self.add_bitmap(&mut list, name, granularity, recording, first)?;
            }
            BitmapChange::AddCopies(copies) => self.add_copies(&mut list, copies)?,
            BitmapChange::Remove(name) => gone = self.remove_bitmap(worker, &mut list, name).await?,
            BitmapChange::Clear(name) => self.clear_bitmap(&mut list, name)?,
            BitmapChange::Record(name, recording) => self.set_recording(&mut list, name, recording)?,
            BitmapChange::Merge(name, other) => self.merge_bitmap(&mut list, name, other)?,
            BitmapChange::Tie(name, backup) => self.tie_bitmap(&mut list, name, backup)?,
        }
        let afterwards =
            if self.header.preparation().is_done() { Afterwards::Written } else { Afterwards::Untouched };
        self.store_bitmaps(worker, list, gone, afterwards).await?;
        self.settle(worker).await
    }

    fn add_bitmap(
        &self,
        list: &mut Vec<Bitmap>,
        name: &str,
        granularity: Option<u64>,
        recording: Recording,
        first: FirstBits,
    ) -> Result<()> {
        let (size, granularity_bits) = (self.virtual_size(), self.granularity_bits(granularity)?);
        Adding::to(self, list).add(name, granularity_bits, recording, || {
            let bits = Bits::new(size, granularity_bits);
            if first == FirstBits::Set {
                bits.mark(0..size);
            }
            bits
        })
    }

    fn add_copies(&self, list: &mut Vec<Bitmap>, copies: &[CopiedBitmap]) -> Result<()> {
        let size = self.virtual_size();
        let mut adding = Adding::to(self, list);
        for copy in copies {
            self.check_same_size(&copy.bits)?;
            let granularity_bits = copy.bits.granularity_bits();
            adding.add(&copy.name, granularity_bits, copy.recording, || copy.bits.resized(size))?;
        }
        Ok(())
    }

    /// Removes a bitmap; gives the clusters that are to be freed if they are not in memory.
    async fn remove_bitmap(
        &self,
        worker: &Worker,
        list: &mut Vec<Bitmap>,
        name: &str,
    ) -> Result<Vec<Range<u64>>> {
        let (index, bitmap) = self.find_bitmap(list, name)?;
        self.check_not_lent(&bitmap)?;
        list.remove(index);
        if bitmap.loaded.is_none()
            && let Some((_, stored)) = self.read_bitmap_table(worker, &bitmap.entry).await?
        {
            return Ok(stored.to_vec());
        }
        Ok(Vec::new())
    }

    fn clear_bitmap(&self, list: &mut [Bitmap], name: &str) -> Result<()> {
        self.check_not_lent(&self.find_bitmap(list, name)?.1)?;
        let Some(bitmap) = find_mut(list, name) else { return Ok(()) };
        if !sabotage::is(Fault::KeepBaseOfCleared) {
            bitmap.base = None;
        }
        bitmap.recovered = None;
        if let Some(loaded) = bitmap.loaded.as_mut() {
            let bits = Bits::new(loaded.bits.size(), loaded.bits.granularity_bits());
            *loaded = Loaded { bits: Arc::new(bits), stored: loaded.stored.clone(), unstored: true };
        }
        Ok(())
    }

    fn set_recording(&self, list: &mut [Bitmap], name: &str, recording: Recording) -> Result<()> {
        self.check_not_lent(&self.find_bitmap(list, name)?.1)?;
        if let Some(bitmap) = find_mut(list, name) {
            bitmap.recording = recording == Recording::On;
            if !bitmap.recording && !sabotage::is(Fault::KeepBaseOfStopped) {
                // It does not know of what is written from now on.
                bitmap.base = None;
            }
        }
        Ok(())
    }

    fn tie_bitmap(&self, list: &mut [Bitmap], name: &str, backup: BackupId) -> Result<()> {
        self.check_not_lent(&self.find_bitmap(list, name)?.1)?;
        if let Some(bitmap) = find_mut(list, name) {
            bitmap.base = Some(backup);
        }
        Ok(())
    }

    fn merge_bitmap(&self, list: &mut [Bitmap], name: &str, other: &Bits) -> Result<()> {
        self.check_same_size(other)?;
        if let Some(loaded) = find_mut(list, name).and_then(|bitmap| bitmap.loaded.as_mut()) {
            loaded.bits.merge(other);
        }
        Ok(())
    }

    /// Fails if the image can have no bitmap of that name, whatever it has.
    fn check_name(&self, name: &str) -> Result<()> {
        if self.geometry().version == Version::V2 {
            let message = "Cannot store dirty bitmaps in qcow2 v2 files";
            return Err(self.bitmap_error(ErrorKind::Unsupported, message));
        }
        if name == NAME {
            let message = format!("the name '{NAME}' is that of the record that bitmaps are recovered by");
            return Err(self.bitmap_error(ErrorKind::InvalidArgument, message));
        }
        if name.is_empty() || name.len() > MAX_BITMAP_NAME as usize || name.contains('\0') {
            let message = format!("the name of a bitmap has 1 to {MAX_BITMAP_NAME} bytes, none of them zero");
            return Err(self.bitmap_error(ErrorKind::InvalidArgument, message));
        }
        Ok(())
    }

    /// Fails for bits of a disk of another size.
    fn check_same_size(&self, other: &Bits) -> Result<()> {
        let (size, theirs) = (self.virtual_size(), other.size());
        if theirs == size {
            return Ok(());
        }
        let message = format!(
            "Bitmaps are of different sizes (destination size is {size}, source size is {theirs}) and can't be merged"
        );
        Err(self.bitmap_error(ErrorKind::InvalidArgument, message))
    }

    /// Fails if a bitmap over `size` bytes of disk is larger than the format's users accept.
    fn check_size(&self, name: &str, granularity_bits: u8, size: u64) -> Result<()> {
        let entries = table_entries(size, granularity_bits, self.geometry());
        let on_disk = entries.saturating_mul(self.geometry().cluster_size());
        if on_disk <= MAX_BITMAP_DATA_SIZE
            && entries <= u64::from(MAX_BITMAP_TABLE_ENTRIES)
            && data_bytes(size, granularity_bits) <= MAX_BITMAP_DATA_SIZE
        {
            return Ok(());
        }
        let message = format!(
            "Bitmap '{name}' would take too much space for a disk of {size} bytes. Use larger granularity"
        );
        Err(self.bitmap_error(ErrorKind::InvalidArgument, message))
    }

    /// Before the size of the disk changes: all bitmaps are in memory, and in use on disk, since their size follows.
    pub(crate) async fn prepare_bitmaps_for_resize(&self, worker: &Worker, new_size: u64) -> Result<()> {
        let _turn = self.bitmaps.gate.lock().await;
        let list = self.bitmaps.list();
        let mut bytes = 0u64;
        for bitmap in list.iter().filter(|bitmap| !bitmap.is_record()) {
            self.check_sound(bitmap)?;
            self.check_size(&bitmap.name(), bitmap.entry.granularity_bits, new_size)?;
            bytes = bytes.saturating_add(data_bytes(new_size, bitmap.entry.granularity_bits));
        }
        self.check_bits(bytes)?;
        self.load_bitmaps(worker, |bitmap| !bitmap.is_record()).await?;
        let mut list = self.bitmaps.list();
        list.iter().filter(|bitmap| !bitmap.is_record()).try_for_each(|bitmap| self.check_sound(bitmap))?;
        // A record is of a disk of one size: a crash before the next one begins finds none.
        let is_kept = |bitmap: &Bitmap| bitmap.is_record() && sabotage::is(Fault::KeepRecordOfResized);
        self.mark_in_use(worker, &mut list, |bitmap| !is_kept(bitmap)).await?;
        self.bitmaps.record(&list, None);
        self.bitmaps.set_list(list);
        Ok(())
    }

    /// Gives the bitmaps the size of the disk. What a bitmap that records writes did not cover before is dirty in it.
    pub(crate) async fn resize_bitmaps(&self) {
        let _turn = self.bitmaps.gate.lock().await;
        let mut list = self.bitmaps.list();
        let size = self.virtual_size();
        for bitmap in list.iter_mut().filter(|bitmap| !bitmap.is_record()) {
            let Some(loaded) = &mut bitmap.loaded else { continue };
            let bits = loaded.bits.resized(size);
            if bitmap.recording {
                bits.mark(loaded.bits.size()..size);
            }
            *loaded = Loaded { bits: Arc::new(bits), stored: loaded.stored.clone(), unstored: true };
        }
        self.bitmaps.record(&list, None);
        self.bitmaps.set_list(list);
    }

    /// At the close: writes out all that is in memory.
    pub(crate) async fn close_bitmaps(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let _turn = self.bitmaps.gate.lock().await;
        self.load_bitmaps(worker, |bitmap| bitmap.recovered.is_some()).await?;
        let list = self.bitmaps.list();
        if list.is_empty() {
            return Ok(());
        }
        self.store_bitmaps(worker, list, Vec::new(), Afterwards::Untouched).await
    }
}

pub(super) fn find_mut<'l>(list: &'l mut [Bitmap], name: &str) -> Option<&'l mut Bitmap> {
    list.iter_mut().find(|bitmap| bitmap.name() == name)
}

/// Bytes of memory that the bits of a list may take.
pub(super) fn loaded_bytes(list: &[Bitmap]) -> u64 {
    let loaded = list.iter().filter(|bitmap| !bitmap.is_record()).filter_map(|b| b.loaded.as_ref());
    loaded.map(|l| data_bytes(l.bits.size(), l.bits.granularity_bits())).fold(0, u64::saturating_add)
}
