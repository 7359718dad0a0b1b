//! Counting: every reference to a host cluster goes into the map, and the entries that hold them are checked.

use super::finding::{FindingKind, TableKind};
use super::inventory::{Inventory, L1_PIECE, L2Ref};
use super::options::Repair;
use super::refmap::RefMap;
use super::reftable::{RefTable, table_clusters};
use super::report::Tally;
use super::source::{Content, Source};
use crate::Result;
use crate::progress::Phase;
use zebu_qcow2::bitmap::{BitmapCluster, BitmapTableEntry};
use zebu_qcow2::{CompressedRange, GuestOffset, L2Entry};

/// The result of counting besides the counts.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// Some active entry's COPIED flag must be looked at, whatever the counts say.
    pub(super) flags_needed: bool,
    /// Some L2 table could not be read.
    pub(super) references_lost: bool,
    /// Entries that [`super::entries`] can repair. With [`Repair::All`] they are neither reported here nor, where
    /// their repair drops the reference, counted.
    pub(super) repairable_entries: u64,
}

/// Counts the references to the host clusters from `start` on, as far as the memory allows (see
/// [`RefMap::end`]), and fills in which L2 tables have their cluster for themselves.
///
/// Damage of entries goes to `tally`. The refcount blocks of `reftable` count, the table itself too.
pub(super) async fn count(
    source: &Source<'_>,
    inventory: &mut Inventory,
    reftable: Option<&RefTable>,
    start: u64,
    tally: &mut Tally,
) -> Result<(RefMap, Walk)> {
    let mut map = RefMap::new(start, source.options.memory);
    let mut walk = Walk::default();
    for span in &inventory.regions {
        for cluster in span.start..span.end {
            map.add(cluster, span.weight.total(), false, false);
        }
    }
    for table in &inventory.l2 {
        let cluster = table.offset >> source.geometry.cluster_bits;
        map.add(cluster, table.references(), table.copied, table.shared);
    }
    count_bitmaps(source, inventory, &mut map, &mut walk, tally).await?;
    count_l2_tables(source, &inventory.l2, &mut map, &mut walk, tally).await?;
    if let Some(reftable) = reftable {
        for cluster in table_clusters(source) {
            map.add(cluster, 1, false, false);
        }
        for (_, block) in reftable.blocks(source) {
            map.add(block >> source.geometry.cluster_bits, 1, false, false);
        }
    }
    for table in &mut inventory.l2 {
        let cluster = table.offset >> source.geometry.cluster_bits;
        if (map.start()..map.end()).contains(&cluster) {
            table.exclusive = map.get(cluster).count == table.references();
        }
    }
    Ok((map, walk))
}

async fn count_bitmaps(
    source: &Source<'_>,
    inventory: &Inventory,
    map: &mut RefMap,
    walk: &mut Walk,
    tally: &mut Tally,
) -> Result<()> {
    let cluster_size = source.geometry.cluster_size();
    for span in &inventory.bitmap_tables {
        let weight = span.weight.total();
        let mut at = span.start;
        while at < span.end {
            let len = (span.end - at).min(L1_PIECE);
            source.take_turn(len).await?;
            let piece = match source.read(at, len.next_multiple_of(8) as usize).await {
                Ok(piece) => piece,
                Err(error) => {
                    let error = error.to_string();
                    let table = TableKind::BitmapTable;
                    tally.add(FindingKind::Unreadable { table, offset: at, error }, 1);
                    walk.references_lost = true;
                    at += len;
                    continue;
                }
            };
            for (index, word) in piece.as_slice().chunks_exact(8).enumerate() {
                let entry = u64::from_be_bytes(word.try_into().unwrap_or_default());
                match BitmapTableEntry(entry).decode(&source.geometry) {
                    Ok(BitmapCluster::AllZeroes | BitmapCluster::AllOnes) => {}
                    Ok(BitmapCluster::Data(host)) if source.is_past_end(host.0, cluster_size) => {
                        tally.add(FindingKind::PastEnd { offset: host.0, size: cluster_size }, weight);
                    }
                    Ok(BitmapCluster::Data(host)) => {
                        map.add(source.geometry.cluster_index(host), weight, false, false);
                    }
                    Err(_) => {
                        let offset = at + index as u64 * 8;
                        tally.add(FindingKind::BitmapTableEntry { offset, entry }, weight);
                        walk.references_lost = true;
                    }
                }
            }
            at += len;
        }
    }
    Ok(())
}

async fn count_l2_tables(
    source: &Source<'_>,
    l2: &[L2Ref],
    map: &mut RefMap,
    walk: &mut Walk,
    tally: &mut Tally,
) -> Result<()> {
    let cluster_size = source.geometry.cluster_size();
    let total = l2.len() as u64;
    let items = l2.iter().map(|table| (table.offset, table));
    let mut tables = source.tables(cluster_size as usize, items, total.saturating_mul(cluster_size));
    let mut done = 0;
    while let Some((table, content)) = tables.next().await? {
        match content {
            Content::Zero => {}
            Content::Bytes(bytes) => {
                Counter { source, table, map, walk, tally }.count_table(bytes.as_slice());
                tables.recycle(bytes);
            }
            Content::Failed(error) => {
                let (offset, error) = (table.offset, error.to_string());
                tally.add(FindingKind::Unreadable { table: TableKind::L2, offset, error }, 1);
                walk.references_lost = true;
            }
        }
        done += 1;
        source.options.control.report(Phase::CountingReferences, done, total);
    }
    Ok(())
}

/// Counts what one L2 table refers to.
struct Counter<'c, 's> {
    source: &'c Source<'s>,
    table: &'c L2Ref,
    map: &'c mut RefMap,
    walk: &'c mut Walk,
    tally: &'c mut Tally,
}

/// Calls `f` with the index of each entry that is not all zero, and the entry.
#[inline]
pub(super) fn for_each_entry(table: &[u8], extended: bool, mut f: impl FnMut(u64, L2Entry)) {
    let word = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap_or_default());
    if extended {
        for (index, bytes) in table.chunks_exact(16).enumerate() {
            let entry = L2Entry { word: word(&bytes[..8]), bitmap: word(&bytes[8..]) };
            if entry != L2Entry::default() {
                f(index as u64, entry);
            }
        }
    } else {
        for (index, bytes) in table.chunks_exact(8).enumerate() {
            let entry = L2Entry { word: word(bytes), bitmap: 0 };
            if entry.word != 0 {
                f(index as u64, entry);
            }
        }
    }
}

/// Whether the data of an entry with a host cluster is all zeroes or nothing: the cluster only keeps space.
pub(super) fn keeps_space_only(entry: L2Entry, extended: bool) -> bool {
    if extended { entry.bitmap as u32 == 0 } else { entry.word & 1 != 0 }
}

impl Counter<'_, '_> {
    fn count_table(&mut self, bytes: &[u8]) {
        let mut next_contiguous = 0;
        for_each_entry(bytes, self.source.geometry.extended_l2, |index, entry| {
            if entry.is_compressed() {
                self.compressed(index, entry);
            } else {
                self.standard(index, entry, &mut next_contiguous);
            }
        });
    }

    fn repairs_entries(&self) -> bool {
        self.source.options.repair == Repair::All
    }

    /// Notes damage that [`super::entries`] repairs, if that is wanted.
    fn repairable(&mut self, kind: FindingKind) {
        self.walk.repairable_entries += 1;
        if !self.repairs_entries() {
            self.tally.add(kind, self.table.references());
        }
    }

    fn compressed(&mut self, index: u64, entry: L2Entry) {
        let (source, weight, table) = (self.source, self.table.references(), self.table.offset);
        if entry.copied() {
            self.repairable(FindingKind::CopiedFlagCompressed { table, index, entry: entry.word });
        }
        if source.geometry.external_data {
            self.tally.add(FindingKind::CompressedWithDataFile { table, index, entry: entry.word }, weight);
            return;
        }
        if entry.bitmap != 0 {
            self.repairable(FindingKind::CompressedWithSubclusters { table, index, entry: entry.word });
        }
        let counts = &mut self.tally.counts;
        let active = u64::from(self.table.active);
        counts.allocated_clusters += active;
        counts.compressed_clusters += active;
        counts.fragmented_clusters += active;
        match CompressedRange::decode(entry.word, &source.geometry) {
            Ok(range) if !source.is_past_end(range.offset.0, range.len) => {
                for cluster in range.host_clusters(&source.geometry) {
                    self.map.add(cluster, weight, false, false);
                }
            }
            Ok(range) => {
                self.tally.add(FindingKind::PastEnd { offset: range.offset.0, size: range.len }, weight);
            }
            Err(_) => {
                self.tally.add(FindingKind::L2ReservedBits { table, index, entry: entry.word }, weight);
            }
        }
    }

    fn standard(&mut self, index: u64, entry: L2Entry, next_contiguous: &mut u64) {
        let geometry = &self.source.geometry;
        let (weight, table) = (self.table.references(), self.table.offset);
        if entry.reserved_bits(geometry) != 0 {
            self.tally.add(FindingKind::L2ReservedBits { table, index, entry: entry.word }, weight);
        }
        let Some(host) = entry.host(geometry) else {
            if entry.bitmap as u32 != 0 {
                let kind = FindingKind::SubclustersWithoutCluster { table, index, bitmap: entry.bitmap };
                self.tally.add(kind, weight);
            }
            return;
        };
        let offset = host.0;
        let cluster_size = geometry.cluster_size();
        if entry.bitmap as u32 & (entry.bitmap >> 32) as u32 != 0 {
            let kind = FindingKind::SubclustersContradict { table, index, offset, bitmap: entry.bitmap };
            self.tally.add(kind, weight);
        }
        if !geometry.is_cluster_aligned(offset) {
            if keeps_space_only(entry, geometry.extended_l2) {
                self.repairable(FindingKind::ZeroClusterUnaligned { table, index, offset });
                if self.repairs_entries() {
                    return;
                }
            } else {
                self.tally.add(FindingKind::DataClusterUnaligned { table, index, offset }, weight);
            }
        }
        if self.table.active > 0 {
            let active = u64::from(self.table.active);
            let counts = &mut self.tally.counts;
            counts.allocated_clusters += active;
            if *next_contiguous != 0 && offset != *next_contiguous {
                counts.fragmented_clusters += active;
            }
            *next_contiguous = offset + cluster_size;
        }
        if geometry.external_data {
            self.external(index, entry, offset);
            return;
        }
        let copied = self.table.active > 0 && entry.copied();
        let shared = self.table.active > 0 && !entry.copied();
        if self.source.is_past_end(offset, cluster_size) {
            self.tally.add(FindingKind::PastEnd { offset, size: cluster_size }, weight);
            self.walk.flags_needed |= copied;
            return;
        }
        let bits = geometry.cluster_bits;
        self.map.add(offset >> bits, weight, copied, shared);
        if !geometry.is_cluster_aligned(offset) {
            self.map.add((offset >> bits) + 1, weight, false, false);
        }
    }

    /// An entry of an image whose data lies in another file: there are no counts, but rules for place and flag.
    fn external(&mut self, index: u64, entry: L2Entry, offset: u64) {
        if self.table.active == 0 {
            return;
        }
        self.walk.flags_needed |= !entry.copied();
        let guest = self.source.geometry.guest_offset(u64::from(self.table.l1_index), index);
        if guest != Some(GuestOffset(offset)) {
            let guest = guest.map_or(u64::MAX, |guest| guest.0);
            self.tally.add(FindingKind::DataFileOffset { guest, offset }, u64::from(self.table.active));
        } else if self.table.active > 1 {
            let others = u64::from(self.table.active) - 1;
            self.tally.add(FindingKind::DataFileOffset { guest: guest.map_or(0, |g| g.0), offset }, others);
        }
    }
}
