//! The map of a chain: which image owns a guest cluster, and where it lies there.
//!
//! Two forms, both derived from the tables and dropped at will: long runs in [`Extents`], and, for images with a
//! backing chain, *merged slices*: a word for each cluster of the disk, in slices like those of tables. With either, a
//! read needs one lookup however long the chain is.
//!
//! Only the top image is ever written. Its slice cache calls [`ChainMap::forget_entries`] with every change, under
//! the lock of the changed slice; what is derived while a change happens is recognised by the generation of its shard.

use crate::chain::extents::Extents;
use crate::chain::place::ClusterPlace;
use crate::qcow2::cache::slice_store::{Class, SliceStore};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a merged slice.
pub(crate) const MERGED_BYTES: usize = 4096;
/// Clusters that a merged slice maps.
pub(crate) const MERGED_UNITS: u64 = MERGED_BYTES as u64 / 8;

/// The word of a cluster of which nothing is known.
const UNKNOWN: u64 = 0;

/// The slices that the map is derived from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DerivedFrom {
    /// The image stands alone: its own L2 slices.
    Tables,
    /// Merged slices.
    Chain,
}

/// The map of a chain: its extents and merged slices.
#[derive(Debug)]
pub(crate) struct ChainMap {
    store: Arc<SliceStore>,
    unit_bits: u32,
    /// Bytes of an L2 entry of the top image.
    entry_bytes: u64,
    /// The owner of the merged slices.
    merged: Option<u32>,
    extents: Extents,
}

/// Word `at` of a merged slice.
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.as_chunks::<8>().0.get(at).map_or(UNKNOWN, |word| u64::from_ne_bytes(*word))
}

/// Sets word `at` of a merged slice.
pub(crate) fn set_word(bytes: &mut [u8], at: usize, value: u64) {
    if let Some(place) = bytes.as_chunks_mut::<8>().0.get_mut(at) {
        *place = value.to_ne_bytes();
    }
}

impl ChainMap {
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
    pub(crate) fn find(&self, guest: u64, max_len: u64) -> Option<(ClusterPlace, u64)> {
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
            shard.raise_generation();
            if let Some(slice) = shard.peek(id) {
                for unit in at..end {
                    set_word(slice.derived_bytes(), (unit % MERGED_UNITS) as usize, UNKNOWN);
                }
            }
            at = end;
        }
        self.extents.forget(units);
    }

    /// Locks the shard of the merged slice that maps `unit`; with it, the slice's name.
    #[cfg(test)]
    fn lock_merged(&self, unit: u64) -> Option<(crate::qcow2::cache::shard::ShardGuard<'_>, u64)> {
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
    use crate::chain::place::{Lookup, PlaceKind};

    #[test]
    fn a_change_forgets_its_clusters_in_both_forms() {
        let store = Arc::new(SliceStore::new(1 << 20, std::time::Duration::ZERO));
        let index = ChainMap::new(store.clone(), 1 << 40, 16, 8, DerivedFrom::Chain);
        index.extents().top_up();
        let place = ClusterPlace { kind: PlaceKind::Data { host: 1 << 30, copied: false }, depth: 3 };
        index.extents().insert(0..2000, place);
        {
            let (mut shard, id) = index.lock_merged(600).unwrap();
            let mut bytes = vec![0; MERGED_BYTES];
            for at in 0..MERGED_UNITS as usize {
                set_word(&mut bytes, at, Lookup::Hit(place).word());
            }
            shard.insert(id, crate::qcow2::cache::shard::Slice::new(bytes.into()));
        }
        let before = index.lock_merged(600).unwrap().0.generation();
        index.forget_entries(600 * 8, 16);
        assert_eq!(index.find(600 << 16, 512), None);
        assert_eq!(index.find(602 << 16, 512), Some((place.advanced(602 << 16), 512)));
        let (mut shard, id) = index.lock_merged(600).unwrap();
        assert!(shard.generation() > before);
        let slice = shard.get(id).unwrap();
        let known = |unit: usize| Lookup::from_word(word(slice.bytes(), unit % 512)) != Lookup::Miss;
        assert_eq!([known(599), known(600), known(601), known(602)], [true, false, false, true]);
    }
}
