//! What is known of a chain as a whole: which image owns a guest cluster, and where it lies there.
//!
//! Two forms, both derived from the tables and dropped at will: long runs in [`Extents`], and, for images with a
//! backing chain, *merged slices*: a word for each cluster of the disk, in slices like those of tables. With either, a
//! read needs one lookup however long the chain is.
//!
//! Only the top image is ever written. Its slice cache calls [`ChainIndex::forget_entries`] with every change, under
//! the lock of the changed slice; what is derived while a change happens is recognised by the generation of its shard.

use crate::qcow2::extents::{Extents, Place, PlaceKind};
use crate::qcow2::store::{Class, SliceStore};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a merged slice.
pub(crate) const MERGED_BYTES: usize = 4096;
/// Clusters that a merged slice maps.
pub(crate) const MERGED_UNITS: u64 = MERGED_BYTES as u64 / 8;

/// Bits of a word of a merged slice: what it says; the depth; the offset.
const KIND: u64 = 0b111;
const KIND_UNKNOWN: u64 = 0;
const KIND_ZERO: u64 = 1;
const KIND_DATA: u64 = 2;
const KIND_DATA_COPIED: u64 = 3;
const KIND_FROM: u64 = 4;
const DEPTH_SHIFT: u32 = 3;
const HOST_SHIFT: u32 = 16;
/// Images that a word can tell apart.
const DEPTHS: u64 = 1 << (HOST_SHIFT - DEPTH_SHIFT);

/// Which slices the index is derived from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DerivedFrom {
    /// The image stands alone: its own L2 slices.
    Tables,
    /// Merged slices.
    Chain,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct ChainIndex {
    store: Arc<SliceStore>,
    unit_bits: u32,
    /// Bytes of an L2 entry of the top image.
    entry_bytes: u64,
    /// The owner of the merged slices.
    merged: Option<u32>,
    extents: Extents,
}

/// What a word of a merged slice says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    Nothing,
    /// Where the cluster is.
    At(Place),
    /// The cluster is not of one kind, or compressed; images above this depth have no part of it.
    From(u16),
}

/// A word of a merged slice; 0 for what can't be said in one.
pub(crate) fn encode(known: Known) -> u64 {
    let place = match known {
        Known::From(depth) if u64::from(depth) < DEPTHS => {
            return KIND_FROM | u64::from(depth) << DEPTH_SHIFT;
        }
        Known::At(place) if u64::from(place.depth) < DEPTHS => place,
        Known::Nothing | Known::From(_) | Known::At(_) => return KIND_UNKNOWN,
    };
    let depth = u64::from(place.depth) << DEPTH_SHIFT;
    match place.kind {
        PlaceKind::Zero => KIND_ZERO | depth,
        PlaceKind::Data { host, .. } if host & 511 != 0 || host >> 56 != 0 => KIND_UNKNOWN,
        PlaceKind::Data { host, copied } => {
            (if copied { KIND_DATA_COPIED } else { KIND_DATA }) | depth | (host >> 9) << HOST_SHIFT
        }
    }
}

/// What a word says.
pub(crate) fn decode(word: u64) -> Known {
    let depth = (word >> DEPTH_SHIFT & (DEPTHS - 1)) as u16;
    let kind = match word & KIND {
        KIND_ZERO => PlaceKind::Zero,
        kind @ (KIND_DATA | KIND_DATA_COPIED) => {
            PlaceKind::Data { host: word >> HOST_SHIFT << 9, copied: kind == KIND_DATA_COPIED }
        }
        KIND_FROM => return Known::From(depth),
        _ => return Known::Nothing,
    };
    Known::At(Place { kind, depth })
}

/// Word `at` of a merged slice.
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.as_chunks::<8>().0.get(at).map_or(KIND_UNKNOWN, |word| u64::from_ne_bytes(*word))
}

/// Sets word `at` of a merged slice.
pub(crate) fn set_word(bytes: &mut [u8], at: usize, value: u64) {
    if let Some(place) = bytes.as_chunks_mut::<8>().0.get_mut(at) {
        *place = value.to_ne_bytes();
    }
}

impl ChainIndex {
    /// For a disk of `size` bytes in clusters of `1 << unit_bits`, the top image of which has L2 entries of
    /// `entry_bytes`.
    pub(crate) fn new(
        store: Arc<SliceStore>,
        size: u64,
        unit_bits: u32,
        entry_bytes: u64,
        from: DerivedFrom,
    ) -> Self {
        let merged = (from == DerivedFrom::Chain).then(|| store.new_owner());
        let extents = Extents::new(store.clone(), size, unit_bits);
        Self { store, unit_bits, entry_bytes, merged, extents }
    }

    pub(crate) fn derived_from(&self) -> DerivedFrom {
        if self.merged.is_some() { DerivedFrom::Chain } else { DerivedFrom::Tables }
    }
    /// The owner of the merged slices.
    pub(crate) fn merged_owner(&self) -> Option<u32> {
        self.merged
    }
    pub(crate) fn unit_bits(&self) -> u32 {
        self.unit_bits
    }
    pub(crate) fn extents(&self) -> &Extents {
        &self.extents
    }

    /// Where `guest` is, and for how many bytes (at most `max_len`).
    #[inline]
    pub(crate) fn find(&self, guest: u64, max_len: u64) -> Option<(Place, u64)> {
        let in_unit = guest & ((1 << self.unit_bits) - 1);
        let (place, units) = self.extents.find(guest >> self.unit_bits)?;
        Some((place.advanced(in_unit), ((units << self.unit_bits) - in_unit).min(max_len)))
    }

    /// Forgets the clusters whose L2 entries lie in `len` bytes at `offset`, counted over all tables of the top image.
    pub(crate) fn forget_entries(&self, offset: u64, len: u64) {
        self.forget(offset / self.entry_bytes..(offset + len).div_ceil(self.entry_bytes));
    }

    fn forget(&self, units: Range<u64>) {
        let mut at = units.start;
        while let Some(owner) = self.merged
            && at < units.end
        {
            let key = at / MERGED_UNITS;
            let end = ((key + 1) * MERGED_UNITS).min(units.end);
            let id = SliceStore::id(owner, key);
            let mut shard = self.store.lock(Class::Derived, id);
            shard.generation += 1;
            if let Some(slice) = shard.peek(id) {
                for unit in at..end {
                    set_word(&mut slice.bytes, (unit % MERGED_UNITS) as usize, KIND_UNKNOWN);
                }
            }
            at = end;
        }
        self.extents.forget(units);
    }

    /// Locks the shard of the merged slice that maps `unit`; with it, the slice's name.
    #[cfg(test)]
    fn lock_merged(&self, unit: u64) -> Option<(crate::qcow2::store::ShardGuard<'_>, u64)> {
        let id = SliceStore::id(self.merged?, unit / MERGED_UNITS);
        Some((self.store.lock(Class::Derived, id), id))
    }

    /// Forgets everything: the tables were replaced.
    pub(crate) fn clear(&self) {
        if let Some(owner) = self.merged {
            self.store.forget(Class::Derived, owner);
        }
        self.extents.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_what_was_encoded() {
        for depth in [0, 1, 499, 1023] {
            for kind in [
                PlaceKind::Zero,
                PlaceKind::Data { host: 0, copied: false },
                PlaceKind::Data { host: (1 << 56) - 512, copied: true },
            ] {
                let known = Known::At(Place { kind, depth });
                assert_eq!(decode(encode(known)), known);
            }
            assert_eq!(decode(encode(Known::From(depth))), Known::From(depth));
        }
        let far = Place { kind: PlaceKind::Data { host: 1 << 56, copied: false }, depth: 0 };
        assert_eq!(decode(encode(Known::At(far))), Known::Nothing);
        assert_eq!(decode(0), Known::Nothing);
    }

    #[test]
    fn a_change_forgets_its_clusters_in_both_forms() {
        let store = Arc::new(SliceStore::new(1 << 20, std::time::Duration::ZERO));
        let index = ChainIndex::new(store.clone(), 1 << 40, 16, 8, DerivedFrom::Chain);
        index.extents().top_up();
        let place = Place { kind: PlaceKind::Data { host: 1 << 30, copied: false }, depth: 3 };
        index.extents().insert(0..2000, place);
        {
            let (mut shard, id) = index.lock_merged(600).unwrap();
            let mut bytes = vec![0; MERGED_BYTES];
            for at in 0..MERGED_UNITS as usize {
                set_word(&mut bytes, at, encode(Known::At(place)));
            }
            shard.insert(id, crate::qcow2::store::Slice::new(bytes.into()));
        }
        let before = index.lock_merged(600).unwrap().0.generation;
        index.forget_entries(600 * 8, 16);
        assert_eq!(index.find(600 << 16, 512), None);
        assert_eq!(index.find(602 << 16, 512), Some((place.advanced(602 << 16), 512)));
        let (mut shard, id) = index.lock_merged(600).unwrap();
        assert!(shard.generation > before);
        let slice = shard.get(id).unwrap();
        let known = |unit: usize| decode(word(&slice.bytes, unit % 512)) != Known::Nothing;
        assert_eq!([known(599), known(600), known(601), known(602)], [true, false, false, true]);
    }
}
