//! Persistent dirty bitmaps: what the image has, tracking while it is written, storing (docs/guide/command.md).
//!
//! A bitmap on disk that is not marked in use has a bit set for everything written since it was cleared. So before
//! the first write of an opening, the bitmaps that record writes are loaded, and marked in use, durably. (Operations on
//! bitmaps alone, on an image that nobody writes to, never mark any.) From then on writes set bits in memory. At the
//! close, and when a bitmap stops recording, its bits are written to new clusters, and
//! a new directory that names them, no longer in use, takes the place of the old one in the header. A crash before that
//! leaves the bitmap in use. What it says then is what was stored, and what the record of changes tells (`record.rs`). Without
//! a record, nobody trusts it any more.
//!
//! | file | |
//! |---|---|
//! | `bases.rs` | the backups that bitmaps go on from |
//! | `bits.rs` | the bits in memory |
//! | `find.rs` | a bitmap by its name, and whether it can be used |
//! | `load.rs` | tables and bits from disk; what must be done before the first write |
//! | `record.rs` | the record of changes as data: its layout, and what is durable of it |
//! | `write_ahead.rs` | a record begins, goes before changes, and is found after a crash |
//! | `store.rs` | bits, tables and the directory to disk |
//! | `lend.rs` | bits that a backup of a disk in use works with |
//! | `operations.rs` | adding, removing, clearing, merging, and what a resize needs |
//!
//! Requests come through `bitmap_changes.rs` beside this folder, which prepares the file first.

mod bases;
mod bits;
mod find;
mod lend;
mod load;
mod operations;
mod record;
mod store;
mod write_ahead;

pub(crate) use bits::Bits;
pub use lend::BackupEnd;
pub(crate) use operations::{BitmapChange, CopiedBitmap, FirstBits, Recording};
pub(crate) use write_ahead::FoundRecord;

use crate::qcow2::text::text;
use crate::status::BitmapInfo;
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{ArcCell, AsyncMutex};
use crate::sync::{Mutex, MutexGuard};
pub(crate) use record::Record;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::bitmap::{BitmapEntry, BitmapFlags};
use zebu_qcow2::extension::BitmapsExtension;
use zebu_qcow2::{BackupId, Geometry};

/// Bytes of memory that the bits of an image's loaded bitmaps may take, were all of them set: as much as one bitmap
/// of the largest size that the format's users accept.
const MAX_LOADED: u64 = zebu_qcow2::limits::MAX_BITMAP_DATA_SIZE;

/// Whether what a bitmap says can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    Sound,
    /// A program that had it in memory did not write it back; or its entry or its table is damaged.
    Inconsistent,
}

/// The bits of a bitmap, and the clusters that hold them on disk.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    bits: Arc<Bits>,
    /// Host clusters of the table and of the data that the entry on disk leads to.
    stored: Arc<[Range<u64>]>,
    /// The bits on disk are not those in memory, even if no bit was set since.
    unstored: bool,
}

impl Loaded {
    /// No bits, and no clusters.
    fn nothing() -> Self {
        Self { bits: Arc::new(Bits::new(0, 9)), stored: Arc::new([]), unstored: false }
    }
}

/// A bitmap of the image.
#[derive(Debug, Clone)]
pub(crate) struct Bitmap {
    /// The entry as it is on disk.
    entry: BitmapEntry,
    /// It records writes.
    recording: bool,
    condition: Condition,
    loaded: Option<Loaded>,
    /// The bits that a backup has.
    lent: Option<Arc<Bits>>,
    /// A crash left it in use, and a record tells what was not stored, in granules of so many bytes.
    recovered: Option<u64>,
    /// It knows of everything that was written since this backup.
    base: Option<BackupId>,
}

/// The bitmaps by the header and by memory.
#[derive(Debug, Default)]
struct State {
    /// Offset and bytes of the directory that the header names.
    directory: Option<(u64, u64)>,
    list: Vec<Bitmap>,
    /// Nobody knows any more what the bitmaps go on from.
    are_bases_lost: bool,
}

/// The bitmaps that record writes.
#[derive(Debug, Default)]
struct Recorders {
    bits: SmallVec<[Arc<Bits>; 2]>,
    /// The record that a crash finds in their place.
    record: Option<Arc<Record>>,
}

/// The bitmaps of an open image.
#[derive(Debug, Default)]
pub(crate) struct Bitmaps {
    state: Mutex<State>,
    /// Set while `recorders` has any: changed only while nobody changes the disk.
    is_recording: AtomicBool,
    recorders: ArcCell<Recorders>,
    /// Held for a change of bitmaps, and while bits are loaded.
    gate: AsyncMutex,
    /// Held while the record is written.
    record_turn: AsyncMutex,
    /// It is known where the tables of an image that is only read lie. (For one that is written, that comes before the
    /// first change.)
    are_tables_noted: AtomicBool,
}

impl Bitmaps {
    /// As found by opening: the extension, the entries of the directory (none if it is broken), the record among them if it is
    /// to be believed, and the first block of the header.
    pub(crate) fn found(
        extension: Option<BitmapsExtension>,
        entries: &[BitmapEntry],
        record: FoundRecord,
        geometry: &Geometry,
        size: u64,
        first_block: &[u8],
    ) -> Self {
        let offset = extension.map_or(0, |extension| extension.directory_offset.0);
        let known = bases::find(first_block, offset, entries);
        let list = entries.iter().map(|entry| {
            let in_use = entry.flags.contains(BitmapFlags::IN_USE);
            let is_record = entry.name == record::NAME.as_bytes();
            let recovered = record.tells_of(entry, geometry, size).filter(|_| !is_record);
            let sound = recovered.is_some() || (!in_use && entry.validate(geometry, size).is_ok());
            Bitmap {
                entry: entry.clone(),
                recording: entry.flags.contains(BitmapFlags::AUTO) && !is_record,
                condition: if sound { Condition::Sound } else { Condition::Inconsistent },
                loaded: None,
                lent: None,
                recovered,
                base: bases::base_of(&known, &entry.name)
                    .filter(|_| sound && entry.flags.contains(BitmapFlags::AUTO)),
            }
        });
        let list: Vec<Bitmap> = list.collect();
        let directory = extension.filter(|_| !list.is_empty());
        let directory = directory.map(|ext| (ext.directory_offset.0, ext.directory_size));
        let state = State { directory, list, are_bases_lost: false };
        Self { state: Mutex::new(state), ..Self::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The bitmaps as they are now.
    fn list(&self) -> Vec<Bitmap> {
        self.state().list.clone()
    }

    /// Replaces the bitmaps. The gate is held.
    fn set_list(&self, list: Vec<Bitmap>) {
        self.state().list = list;
    }

    /// Whether the image has any.
    pub(crate) fn is_empty(&self) -> bool {
        self.state().list.is_empty()
    }

    /// The facts that are known without reading any bitmap.
    pub(crate) fn info(&self) -> Vec<BitmapInfo> {
        self.state().list.iter().filter(|bitmap| !bitmap.is_record()).map(Bitmap::info).collect()
    }

    /// Whether a crash left some that a record tells of.
    pub(crate) fn are_recovered(&self) -> bool {
        self.state().list.iter().any(|bitmap| bitmap.recovered.is_some())
    }

    /// Notes that a range of the disk is about to change. The record that does not tell so yet, if there is one.
    #[inline]
    pub(crate) fn mark(&self, range: &Range<u64>) -> Option<Arc<Record>> {
        if self.is_recording.load(Relaxed) { self.mark_recorders(range) } else { None }
    }

    fn mark_recorders(&self, range: &Range<u64>) -> Option<Arc<Record>> {
        let recorders = self.recorders.load();
        for bits in &recorders.bits {
            bits.mark(range.clone());
        }
        recorders.record.as_ref().filter(|record| !record.covers(range)).cloned()
    }

    /// Has writes recorded in the bitmaps of the list that are to record, and in the record. Nobody changes the disk now.
    fn record(&self, list: &[Bitmap], record: Option<Arc<Record>>) {
        let bits: SmallVec<_> = list
            .iter()
            .filter(|bitmap| bitmap.is_recording())
            .filter_map(|bitmap| bitmap.loaded.as_ref().map(|loaded| loaded.bits.clone()))
            .collect();
        self.is_recording.store(!bits.is_empty(), Relaxed);
        self.recorders.store(Recorders { bits, record });
    }

    /// Has no record go before changes any more. Nobody changes the disk now.
    fn end_record(&self) {
        let bits = self.recorders.load().bits.clone();
        self.recorders.store(Recorders { bits, record: None });
    }

    /// The record that goes before changes.
    fn active_record(&self) -> Option<Arc<Record>> {
        self.recorders.load().record.clone()
    }
}

impl Bitmap {
    pub(crate) fn info(&self) -> BitmapInfo {
        let in_use = self.condition == Condition::Inconsistent;
        BitmapInfo {
            name: text(&self.entry.name),
            granularity: 1u64.checked_shl(u32::from(self.entry.granularity_bits)).unwrap_or(0),
            in_use,
            auto: self.recording,
            lent: self.lent.is_some(),
            recovered: self.recovered.filter(|_| !in_use),
            base: self.base,
        }
    }

    /// Whether it is the record of changes, which no user sees.
    fn is_record(&self) -> bool {
        self.entry.name == record::NAME.as_bytes()
    }

    /// Whether what is written is to be marked in it.
    fn is_recording(&self) -> bool {
        self.recording && self.condition == Condition::Sound
    }

    fn name(&self) -> String {
        text(&self.entry.name)
    }
}
