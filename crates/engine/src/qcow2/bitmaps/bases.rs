//! The backups that bitmaps go on from: a bitmap with a base knows of everything that was written since that backup.
//!
//! The header names the bases under a seal over the directory that they were written for (docs/design/format.md). So
//! they are believed of that directory only: marks of use, a directory that takes its place, and a header that another program has
//! written anew end it. A base that is not known is no harm, one that is wrong is.

use super::Bitmap;
use crate::qcow2::state::Qcow2;
use zebu_qcow2::BackupId;
use zebu_qcow2::backup_id::{BitmapBases, BitmapKey, Seal};
use zebu_qcow2::bitmap::{BitmapEntry, BitmapFlags, encode_directory};
use zebu_qcow2::header_edit::bitmap_bases;
use zebu_storage::sabotage::{self, Fault};

/// Purpose of the hash, as its first input.
const PURPOSE: &[u8] = b"zebu: bases of bitmaps";

fn key(name: &[u8]) -> BitmapKey {
    let mut key = BitmapKey::default();
    key.copy_from_slice(&blake3::hash(name).as_bytes()[..BitmapBases::KEY]);
    key
}

/// The seal of `data` for the directory of these entries at `offset`. `None`: there is no such directory.
fn seal(data: &[u8], offset: u64, entries: &[BitmapEntry]) -> Option<Seal> {
    let directory = encode_directory(entries).ok()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(PURPOSE).update(data).update(&offset.to_be_bytes()).update(&directory);
    let mut seal = Seal::default();
    seal.copy_from_slice(&hasher.finalize().as_bytes()[..BitmapBases::SEAL]);
    Some(seal)
}

/// The bases that the header's first block names for the directory of these entries at `offset`.
pub(super) fn find(block: &[u8], offset: u64, entries: &[BitmapEntry]) -> BitmapBases {
    let Some((bases, data, found)) = bitmap_bases(block) else { return BitmapBases::default() };
    let fits = seal(&data, offset, entries) == Some(found) || sabotage::is(Fault::BelieveBrokenSeal);
    if fits { bases } else { BitmapBases::default() }
}

/// The base of a bitmap by its name.
pub(super) fn base_of(bases: &BitmapBases, name: &[u8]) -> Option<BackupId> {
    bases.get(&key(name))
}

fn sealed(list: &[Bitmap], offset: u64) -> Option<(BitmapBases, Seal)> {
    let has_record = list.iter().any(Bitmap::is_record);
    let known = list.iter().filter(|bitmap| {
        !bitmap.entry.flags.contains(BitmapFlags::IN_USE) || (has_record && bitmap.is_recording())
    });
    let bases = BitmapBases::new(known.filter_map(|bitmap| Some((key(&bitmap.entry.name), bitmap.base?))));
    if bases.is_empty() {
        return None;
    }
    let entries: Vec<_> = list.iter().map(|bitmap| bitmap.entry.clone()).collect();
    let seal = seal(&bases.encode(), offset, &entries)?;
    Some((bases, seal))
}

impl Qcow2 {
    /// The bases that the header is to name for `list`, whose directory lies at `offset`. `None`: there are none.
    pub(super) fn sealed_bases(&self, list: &[Bitmap], offset: u64) -> Option<(BitmapBases, Seal)> {
        if self.bitmaps.state().are_bases_lost { None } else { sealed(list, offset) }
    }

    /// Forgets which backups the bitmaps go on from, for as long as this opening lasts: the disk changes in a way that they don't
    /// know.
    pub(crate) fn forget_bases(&self) {
        let mut state = self.bitmaps.state();
        state.are_bases_lost = true;
        for bitmap in &mut state.list {
            bitmap.base = None;
        }
    }
}
