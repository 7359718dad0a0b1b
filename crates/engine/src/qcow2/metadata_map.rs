//! Which host clusters hold metadata: the overlap check.
//!
//! Every data write asks here first; a hit means that the image is corrupt (a mapping points into a table), and the
//! write is refused. Cost is one hashed lookup whatever the size of the image.

use crate::qcow2::store::SliceStore;
use crate::sync::{RwLock, RwLockWriteGuard};
use foldhash::fast::FixedState;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, PoisonError};

/// Bytes of a place for a cluster in the table.
const PLACE_BYTES: u64 = 24;

/// Host clusters, by number.
pub(crate) type Clusters = HashSet<u64, FixedState>;

/// What a host cluster holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Metadata {
    Header,
    ActiveL1,
    ActiveL2,
    RefcountTable,
    RefcountBlock,
    SnapshotTable,
    InactiveL1,
    BitmapDirectory,
    BitmapTable,
    BitmapData,
}

impl Metadata {
    /// The name as users of qcow2 tools know it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Metadata::Header => "qcow2 header",
            Metadata::ActiveL1 => "active L1 table",
            Metadata::ActiveL2 => "active L2 table",
            Metadata::RefcountTable => "refcount table",
            Metadata::RefcountBlock => "refcount block",
            Metadata::SnapshotTable => "snapshot table",
            Metadata::InactiveL1 => "inactive L1 table",
            Metadata::BitmapDirectory => "bitmap directory",
            Metadata::BitmapTable => "bitmap table",
            Metadata::BitmapData => "bitmap",
        }
    }
}

/// The sparse set of metadata clusters, by host cluster number.
#[derive(Debug)]
pub(crate) struct MetadataMap {
    clusters: RwLock<HashMap<u64, Metadata, FixedState>>,
    /// Whose budget the memory counts in.
    store: Arc<SliceStore>,
}

impl MetadataMap {
    pub(crate) fn new(store: &Arc<SliceStore>) -> Self {
        Self { clusters: RwLock::default(), store: store.clone() }
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<u64, Metadata, FixedState>> {
        self.clusters.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds clusters.
    pub(crate) fn insert(&self, clusters: Range<u64>, what: Metadata) {
        self.insert_all(clusters, what);
    }

    /// Adds clusters of one kind, many at once.
    pub(crate) fn insert_all(&self, clusters: impl Iterator<Item = u64>, what: Metadata) {
        let mut map = self.write();
        let before = map.capacity();
        map.extend(clusters.map(|cluster| (cluster, what)));
        self.store.budget.take_for_tables((map.capacity() - before) as u64 * PLACE_BYTES);
    }

    /// Adds clusters of tables; gives those of them that hold something else, too, or come twice. What was known of a place
    /// stays known.
    pub(crate) fn insert_tables(&self, tables: impl Iterator<Item = u64>, what: Metadata) -> Clusters {
        let mut map = self.write();
        let before = map.capacity();
        let mut twice = Clusters::default();
        for cluster in tables {
            match map.entry(cluster) {
                Entry::Vacant(place) => drop(place.insert(what)),
                Entry::Occupied(_) => drop(twice.insert(cluster)),
            }
        }
        self.store.budget.take_for_tables((map.capacity() - before) as u64 * PLACE_BYTES);
        twice
    }

    /// Removes clusters.
    pub(crate) fn remove(&self, clusters: Range<u64>) {
        let mut map = self.write();
        for cluster in clusters {
            map.remove(&cluster);
        }
    }

    /// The first of `clusters` that holds metadata.
    pub(crate) fn overlap(&self, clusters: Range<u64>) -> Option<(u64, Metadata)> {
        let map = self.clusters.read().unwrap_or_else(PoisonError::into_inner);
        clusters.into_iter().find_map(|cluster| map.get(&cluster).map(|what| (cluster, *what)))
    }
}

impl Drop for MetadataMap {
    fn drop(&mut self) {
        let places = self.write().capacity() as u64;
        self.store.budget.give_back_tables(places * PLACE_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_overlap_and_forgets_what_was_removed() {
        let map = MetadataMap::new(&Arc::new(SliceStore::new(0, std::time::Duration::ZERO)));
        map.insert(0..1, Metadata::Header);
        map.insert(7..9, Metadata::ActiveL2);
        assert_eq!(map.overlap(1..7), None);
        assert_eq!(map.overlap(5..20), Some((7, Metadata::ActiveL2)));
        map.remove(7..8);
        assert_eq!(map.overlap(5..20), Some((8, Metadata::ActiveL2)));
        let twice = map.insert_tables([0, 30, 31, 30].into_iter(), Metadata::RefcountBlock);
        assert_eq!(twice, [0, 30].into_iter().collect());
        assert_eq!(map.overlap(0..1), Some((0, Metadata::Header)));
    }
}
