//! The host clusters that hold metadata, for the overlap check. A look costs one hashed lookup, whatever the image's size.

use crate::qcow2::cache::slice_store::SliceStore;
use crate::sync::{OnceLock, RwLock, RwLockWriteGuard};
use foldhash::fast::FixedState;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Bytes that the check needs for each table, at most.
pub(crate) const METADATA_PLACE: u64 = 48;

/// Clusters of snapshots' L1 tables that are noted for the overlap check, at most. They take up to 100 MiB of memory.
pub(crate) const MAX_SNAPSHOT_TABLE_CLUSTERS: u64 = 1 << 21;

/// Bytes of a place for a cluster in the table.
const PLACE_BYTES: u64 = 24;

/// Host clusters, by number.
pub(crate) type Clusters = HashSet<u64, FixedState>;

/// The kind of metadata in a host cluster.
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
    LuksHeader,
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
            Metadata::LuksHeader => "LUKS header",
        }
    }
}

/// The sparse set of metadata clusters, by host cluster number.
#[derive(Debug)]
pub(crate) struct MetadataMap {
    clusters: RwLock<HashMap<u64, Metadata, FixedState>>,
    /// Clusters that tables lie in and that something else lies in, too: they are not changed. Set before the first
    /// write.
    shared_tables: OnceLock<Clusters>,
    /// The store whose budget the memory counts in.
    store: Arc<SliceStore>,
}

impl MetadataMap {
    pub(crate) fn new(store: &Arc<SliceStore>) -> Self {
        Self { clusters: RwLock::default(), shared_tables: OnceLock::new(), store: store.clone() }
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<u64, Metadata, FixedState>> {
        self.clusters.write()
    }

    /// Adds clusters of one kind.
    pub(crate) fn insert(&self, clusters: Range<u64>, what: Metadata) {
        let mut map = self.write();
        let before = map.capacity();
        map.extend(clusters.map(|cluster| (cluster, what)));
        self.store.budget().take_for_tables((map.capacity() - before) as u64 * PLACE_BYTES);
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
        self.store.budget().take_for_tables((map.capacity() - before) as u64 * PLACE_BYTES);
        twice
    }

    /// Notes which tables lie where something else is, too. Once in an opening.
    pub(crate) fn set_shared_tables(&self, clusters: Clusters) {
        let _ = self.shared_tables.set(clusters);
    }

    /// Whether a table and something else lie in `cluster`.
    pub(crate) fn is_shared(&self, cluster: u64) -> bool {
        self.shared_tables.get().is_some_and(|shared| !shared.is_empty() && shared.contains(&cluster))
    }

    /// Removes clusters.
    pub(crate) fn remove(&self, clusters: Range<u64>) {
        let mut map = self.write();
        for cluster in clusters {
            map.remove(&cluster);
        }
    }

    /// The first of `clusters` that holds metadata.
    pub(crate) fn first_of(&self, clusters: Range<u64>) -> Option<(u64, Metadata)> {
        let map = self.clusters.read();
        clusters.into_iter().find_map(|cluster| map.get(&cluster).map(|what| (cluster, *what)))
    }
}

impl Drop for MetadataMap {
    fn drop(&mut self) {
        let places = self.write().capacity() as u64;
        self.store.budget().give_back_tables(places * PLACE_BYTES);
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
        assert_eq!(map.first_of(1..7), None);
        assert_eq!(map.first_of(5..20), Some((7, Metadata::ActiveL2)));
        map.remove(7..8);
        assert_eq!(map.first_of(5..20), Some((8, Metadata::ActiveL2)));
        let twice = map.insert_tables([0, 30, 31, 30].into_iter(), Metadata::RefcountBlock);
        assert_eq!(twice, [0, 30].into_iter().collect());
        assert_eq!(map.first_of(0..1), Some((0, Metadata::Header)));
    }
}
