//! Adding, removing, clearing, merging bitmaps, and what a resize needs. The caller of each operation is alone: no change
//! of the disk is under way. What it does is durable when it returns, as far as the format lets a bitmap in use be.

use super::store::Afterwards;
use super::{Bitmap, Bits, Condition, Loaded};
use crate::qcow2::state::Qcow2;
use crate::{ErrorKind, Result};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use zebu_qcow2::Version;
use zebu_qcow2::bitmap::{BitmapEntry, BitmapFlags, data_bytes, default_granularity_bits, table_entries};
use zebu_qcow2::limits::{
    MAX_BITMAP_DATA_SIZE, MAX_BITMAP_GRANULARITY_BITS, MAX_BITMAP_NAME, MAX_BITMAP_TABLE_ENTRIES,
    MAX_BITMAPS, MIN_BITMAP_GRANULARITY_BITS,
};
use zebu_storage::Worker;

/// Whether a bitmap records writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recording {
    On,
    Off,
}

/// What a new bitmap says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FirstBits {
    /// That nothing was written.
    Clear,
    /// That everything was.
    Set,
}

/// A bitmap that is to say what another does.
pub(crate) struct CopiedBitmap {
    pub(crate) name: String,
    pub(crate) recording: Recording,
    pub(crate) bits: Arc<Bits>,
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
            lent: false,
        });
        Ok(())
    }
}

impl Qcow2 {
    /// Runs one operation on the list of bitmaps and stores what it leaves. `loads` is a bitmap that must be
    /// usable, and has its bits in memory then. The operation may name clusters that are to be freed.
    async fn change_bitmaps(
        self: &Arc<Self>,
        worker: &Worker,
        loads: Option<&str>,
        change: impl AsyncFnOnce(&Arc<Self>, &mut Vec<Bitmap>, &mut Vec<Range<u64>>) -> Result<()>,
    ) -> Result<()> {
        self.check_writable()?;
        self.before_metadata_write(worker).await?;
        let _turn = self.bitmaps.gate.enter().await;
        if let Some(name) = loads {
            self.sound_bits(worker, name).await?;
        }
        let mut list = self.bitmaps.state().list.clone();
        let mut gone = Vec::new();
        change(self, &mut list, &mut gone).await?;
        let afterwards =
            if self.first_write_done.load(Acquire) { Afterwards::Written } else { Afterwards::Untouched };
        self.store_bitmaps(worker, list, gone, afterwards).await?;
        self.settle(worker).await
    }

    /// Adds a bitmap. `granularity`: bytes, a power of two; by default as QEMU chooses it.
    pub(crate) async fn add_bitmap(
        self: &Arc<Self>,
        worker: &Worker,
        name: &str,
        granularity: Option<u64>,
        recording: Recording,
        first: FirstBits,
    ) -> Result<()> {
        self.check_name(name)?;
        let granularity_bits = match granularity {
            None => default_granularity_bits(&self.geometry),
            Some(bytes) => {
                let bits = bytes.trailing_zeros() as u8;
                let range = MIN_BITMAP_GRANULARITY_BITS..=MAX_BITMAP_GRANULARITY_BITS;
                if !bytes.is_power_of_two() || !range.contains(&bits) {
                    let message = "the granularity of a bitmap is a power of two from 512 to 2147483648";
                    return Err(self.bitmap_error(ErrorKind::InvalidArgument, message));
                }
                bits
            }
        };
        self.change_bitmaps(worker, None, async |me, list, _| {
            let size = me.virtual_size();
            Adding::to(me, list).add(name, granularity_bits, recording, || {
                let bits = Bits::new(size, granularity_bits);
                if first == FirstBits::Set {
                    bits.mark(0..size);
                }
                bits
            })
        })
        .await
    }

    /// Adds bitmaps that say what others do, of a disk of the same size: all of them, or none.
    pub(crate) async fn add_copies(self: &Arc<Self>, worker: &Worker, copies: &[CopiedBitmap]) -> Result<()> {
        copies.iter().try_for_each(|copy| self.check_name(&copy.name))?;
        self.change_bitmaps(worker, None, async |me, list, _| {
            let size = me.virtual_size();
            let mut adding = Adding::to(me, list);
            for copy in copies {
                me.check_same_size(&copy.bits)?;
                let granularity_bits = copy.bits.granularity_bits();
                adding.add(&copy.name, granularity_bits, copy.recording, || copy.bits.resized(size))?;
            }
            Ok(())
        })
        .await
    }

    /// Fails if the image can have no bitmap of that name, whatever it has.
    fn check_name(&self, name: &str) -> Result<()> {
        if self.geometry.version == Version::V2 {
            let message = "Cannot store dirty bitmaps in qcow2 v2 files";
            return Err(self.bitmap_error(ErrorKind::Unsupported, message));
        }
        if name.is_empty() || name.len() > MAX_BITMAP_NAME as usize {
            let message = format!("the name of a bitmap has 1 to {MAX_BITMAP_NAME} bytes");
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
        let entries = table_entries(size, granularity_bits, &self.geometry);
        let on_disk = entries.saturating_mul(self.geometry.cluster_size());
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

    /// Removes a bitmap, whatever its state.
    pub(crate) async fn remove_bitmap(self: &Arc<Self>, worker: &Worker, name: &str) -> Result<()> {
        self.change_bitmaps(worker, None, async |me, list, gone| {
            let (index, bitmap) = me.find_bitmap(list, name)?;
            me.check_not_lent(&bitmap)?;
            list.remove(index);
            if bitmap.loaded.is_none()
                && let Some((_, stored)) = me.read_bitmap_table(worker, &bitmap.entry).await?
            {
                gone.extend(stored.iter().cloned());
            }
            Ok(())
        })
        .await
    }

    /// Clears all bits of a bitmap.
    pub(crate) async fn clear_bitmap(self: &Arc<Self>, worker: &Worker, name: &str) -> Result<()> {
        self.change_bitmaps(worker, Some(name), async |me, list, _| {
            me.check_not_lent(&me.find_bitmap(list, name)?.1)?;
            if let Some(loaded) = find_mut(list, name).and_then(|bitmap| bitmap.loaded.as_mut()) {
                let bits = Bits::new(loaded.bits.size(), loaded.bits.granularity_bits());
                *loaded = Loaded { bits: Arc::new(bits), stored: loaded.stored.clone(), unstored: true };
            }
            Ok(())
        })
        .await
    }

    /// Has a bitmap record writes from now on, or no longer.
    pub(crate) async fn set_recording(
        self: &Arc<Self>,
        worker: &Worker,
        name: &str,
        recording: Recording,
    ) -> Result<()> {
        self.change_bitmaps(worker, Some(name), async |me, list, _| {
            me.check_not_lent(&me.find_bitmap(list, name)?.1)?;
            if let Some(bitmap) = find_mut(list, name) {
                bitmap.recording = recording == Recording::On;
            }
            Ok(())
        })
        .await
    }

    /// Marks in a bitmap all that is dirty in `other`, which is of a disk of the same size.
    pub(crate) async fn merge_bitmap(
        self: &Arc<Self>,
        worker: &Worker,
        name: &str,
        other: &Arc<Bits>,
    ) -> Result<()> {
        self.change_bitmaps(worker, Some(name), async |me, list, _| {
            me.check_same_size(other)?;
            if let Some(loaded) = find_mut(list, name).and_then(|bitmap| bitmap.loaded.as_mut()) {
                loaded.bits.merge(other);
            }
            Ok(())
        })
        .await
    }

    /// Before the size of the disk changes: all bitmaps are in memory, and in use on disk, since their size follows.
    pub(crate) async fn prepare_bitmaps_for_resize(&self, worker: &Worker, new_size: u64) -> Result<()> {
        let _turn = self.bitmaps.gate.enter().await;
        let list = self.bitmaps.state().list.clone();
        let mut bytes = 0u64;
        for bitmap in &list {
            self.check_sound(bitmap)?;
            self.check_size(&bitmap.name(), bitmap.entry.granularity_bits, new_size)?;
            bytes = bytes.saturating_add(data_bytes(new_size, bitmap.entry.granularity_bits));
        }
        self.check_bits(bytes)?;
        self.load_bitmaps(worker, |_| true).await?;
        let mut list = self.bitmaps.state().list.clone();
        list.iter().try_for_each(|bitmap| self.check_sound(bitmap))?;
        self.mark_in_use(worker, &mut list, |_| true).await?;
        self.bitmaps.state().list = list;
        Ok(())
    }

    /// Gives the bitmaps the size of the disk. What a bitmap that records writes did not cover before is dirty in it.
    pub(crate) async fn resize_bitmaps(&self) {
        let _turn = self.bitmaps.gate.enter().await;
        let mut list = self.bitmaps.state().list.clone();
        let size = self.virtual_size();
        for bitmap in &mut list {
            let Some(loaded) = &mut bitmap.loaded else { continue };
            let bits = loaded.bits.resized(size);
            if bitmap.recording {
                bits.mark(loaded.bits.size()..size);
            }
            *loaded = Loaded { bits: Arc::new(bits), stored: loaded.stored.clone(), unstored: true };
        }
        self.bitmaps.record(&list);
        self.bitmaps.state().list = list;
    }

    /// At the close: writes out all that is in memory.
    pub(crate) async fn close_bitmaps(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let _turn = self.bitmaps.gate.enter().await;
        let list = self.bitmaps.state().list.clone();
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
    let loaded = list.iter().filter_map(|bitmap| bitmap.loaded.as_ref());
    loaded.map(|l| data_bytes(l.bits.size(), l.bits.granularity_bits())).fold(0, u64::saturating_add)
}
