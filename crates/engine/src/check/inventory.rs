//! Everything that the header leads to, found once: regions of metadata and the L2 tables, each with the number of times that
//! something refers to it.

use super::bitmaps::{self, Bitmaps};
use super::finding::{FindingKind, TableKind};
use super::luks;
use super::report::Tally;
use super::snapshots::SnapshotTable;
use super::source::Source;
use super::sweep::{Span, Weight, sweep};
use crate::Result;
use zebu_qcow2::L1Entry;
use zebu_qcow2::limits::MAX_L1_ENTRIES;

/// Bytes of an L1 table that are read at once.
pub(super) const L1_PIECE: u64 = 1 << 20;

/// An L2 table, with everything that refers to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct L2Ref {
    /// Its offset: aligned, not past the end of the file.
    pub(super) offset: u64,
    /// Entries of snapshots' L1 tables that point at it.
    pub(super) inactive: u64,
    /// Entries of the active L1 table that do.
    pub(super) active: u32,
    /// The first of those; meaningless if there is none.
    pub(super) l1_index: u32,
    /// One of those has the COPIED flag.
    pub(super) copied: bool,
    /// One of those has not.
    pub(super) shared: bool,
    /// Nothing but these entries refers to its cluster, so that it may be written. Set when that is known.
    pub(super) exclusive: bool,
}

impl L2Ref {
    /// Entries that point at it.
    pub(super) fn references(&self) -> u64 {
        self.inactive.saturating_add(u64::from(self.active))
    }
}

/// Everything that refers to host clusters, except for the contents of L2 tables, bitmap tables and the refcount
/// table.
pub(super) struct Inventory {
    /// Ranges of host clusters that are metadata.
    pub(super) regions: Vec<Span>,
    /// The L2 tables, ascending by offset, each once.
    pub(super) l2: Vec<L2Ref>,
    /// Byte ranges of the bitmaps' tables.
    pub(super) bitmap_tables: Vec<Span>,
    /// Something that refers to clusters cannot be followed, so that a cluster without reference may be in use.
    pub(super) references_lost: bool,
    /// Some active entry's COPIED flag must be looked at, whatever the counts say.
    pub(super) flags_needed: bool,
}

/// Collects regions.
struct Regions<'s> {
    source: &'s Source<'s>,
    spans: Vec<Span>,
}

impl Regions<'_> {
    /// Notes `size` bytes from `offset`; false if they reach past the end of the file.
    fn add(&mut self, offset: u64, size: u64, weight: Weight, tally: &mut Tally) -> bool {
        if size == 0 {
            return true;
        }
        if self.source.is_past_end(offset, size) {
            tally.add(FindingKind::PastEnd { offset, size }, weight.total());
            return false;
        }
        let bits = self.source.geometry.cluster_bits;
        let end = ((offset + size - 1) >> bits) + 1;
        self.spans.push(Span { start: offset >> bits, end, weight });
        true
    }
}

impl Inventory {
    /// Reads the snapshot table, all L1 tables and the bitmap directory. `planned` is a region (offset, bytes) that
    /// a repair is about to use.
    pub(super) async fn read(
        source: &Source<'_>,
        snapshots: SnapshotTable,
        planned: Option<(u64, u64)>,
        tally: &mut Tally,
    ) -> Result<Self> {
        let header = &source.header;
        let mut regions = Regions { source, spans: Vec::new() };
        let mut lost = snapshots.unknown;

        regions.add(0, source.geometry.cluster_size(), Weight::OTHER, tally);
        if let Some((offset, size)) = planned {
            regions.add(offset, size, Weight::OTHER, tally);
        }

        let mut l1_tables = Vec::new();
        let mut l1 = |offset: u64, entries: u32, weight, tally: &mut Tally| {
            let size = u64::from(entries) * 8;
            regions.add(offset, size, weight, tally);
            let end = offset.saturating_add(size).min(source.file_len());
            l1_tables.push(Span { start: offset, end, weight });
        };
        l1(header.l1_table_offset.0, header.l1_size, Weight::ACTIVE, tally);
        if source.geometry.external_data && !snapshots.entries.is_empty() {
            let count = snapshots.entries.len() as u32;
            tally.add(FindingKind::SnapshotsWithDataFile { count }, 1);
        }
        for (index, entry) in snapshots.entries.iter().enumerate() {
            let (index, offset, entries) = (index as u32, entry.l1_table_offset.0, entry.l1_size);
            if !source.geometry.is_cluster_aligned(offset) {
                tally.add(FindingKind::SnapshotL1Unaligned { index, offset }, 1);
                lost = true;
            } else if u64::from(entries) > MAX_L1_ENTRIES {
                tally.add(FindingKind::SnapshotL1TooLarge { index, entries }, 1);
                lost = true;
            } else {
                l1(offset, entries, Weight::OTHER, tally);
            }
        }

        regions.add(header.snapshots_offset.0, snapshots.len, Weight::OTHER, tally);
        if let Some(luks) = header.luks() {
            let is_inside = regions.add(luks.offset.0, luks.len, Weight::OTHER, tally);
            let area = luks.offset.0..luks.offset.0.saturating_add(luks.len);
            lost |= !is_inside || !luks::is_covered(source, area, tally).await?;
        }
        let Bitmaps { directory, tables, unknown } = bitmaps::read(source, tally).await?;
        lost |= unknown;
        if let Some((offset, size)) = directory {
            regions.add(offset, size, Weight::OTHER, tally);
        }
        let mut bitmap_tables = Vec::new();
        for (offset, size) in tables {
            lost |= !regions.add(offset, size, Weight::OTHER, tally);
            let end = offset.saturating_add(size).min(source.file_len());
            bitmap_tables.push(Span { start: offset, end, weight: Weight::OTHER });
        }

        let mut inventory = Self {
            regions: Vec::new(),
            l2: Vec::new(),
            bitmap_tables: sweep(&bitmap_tables),

            references_lost: lost,
            flags_needed: false,
        };
        for span in sweep(&l1_tables) {
            inventory.read_l1(&mut regions, span, tally).await?;
        }
        compact(&mut inventory.l2);
        inventory.regions = sweep(&regions.spans);
        Ok(inventory)
    }

    /// Follows the entries in the byte range `span` of one or more L1 tables.
    async fn read_l1(&mut self, regions: &mut Regions<'_>, span: Span, tally: &mut Tally) -> Result<()> {
        let source = regions.source;
        let active_start = source.header.l1_table_offset.0;
        let mut compact_at = 2 * self.l2.len().max(1 << 16);
        let mut at = span.start;
        while at < span.end {
            let len = (span.end - at).min(L1_PIECE);
            source.take_turn(len).await?;
            let piece = match source.read(at, len.next_multiple_of(8) as usize).await {
                Ok(piece) => piece,
                Err(error) => {
                    let error = error.to_string();
                    tally.add(FindingKind::Unreadable { table: TableKind::L1, offset: at, error }, 1);
                    self.references_lost = true;
                    at += len;
                    continue;
                }
            };
            for (index, word) in piece.as_slice().chunks_exact(8).enumerate() {
                let entry = L1Entry(u64::from_be_bytes(word.try_into().unwrap_or_default()));
                if entry.0 != 0 {
                    let position = at + index as u64 * 8;
                    let l1_index = position.wrapping_sub(active_start) / 8;
                    self.follow(regions, entry, l1_index as u32, span.weight, tally);
                }
            }
            if self.l2.len() > compact_at {
                compact(&mut self.l2);
                compact_at = 2 * self.l2.len().max(1 << 16);
            }
            at += len;
        }
        Ok(())
    }

    fn follow(
        &mut self,
        regions: &mut Regions<'_>,
        entry: L1Entry,
        l1_index: u32,
        weight: Weight,
        tally: &mut Tally,
    ) {
        let source = regions.source;
        if entry.reserved_bits() != 0 {
            tally.add(FindingKind::L1ReservedBits { entry: entry.0 }, weight.total());
        }
        let Some(table) = entry.table() else {
            if entry.copied() {
                tally.add(FindingKind::L1CopiedWithoutTable { entry: entry.0 }, weight.total());
                self.references_lost = true;
            }
            return;
        };
        let offset = table.0;
        let cluster_size = source.geometry.cluster_size();
        if !source.geometry.is_cluster_aligned(offset) {
            // No program can use such a table, and what lies there is not one: only its place is taken.
            tally.add(FindingKind::L2TableUnaligned { offset }, weight.total());
            regions.add(offset, cluster_size, weight, tally);
            self.references_lost = true;
            self.flags_needed |= weight.active > 0;
            return;
        }
        if source.is_past_end(offset, cluster_size) {
            tally.add(FindingKind::PastEnd { offset, size: cluster_size }, weight.total());
            self.references_lost = true;
            self.flags_needed |= weight.active > 0;
            return;
        }
        self.l2.push(L2Ref {
            offset,
            inactive: weight.other,
            active: weight.active as u32,
            l1_index: if weight.active > 0 { l1_index } else { u32::MAX },
            copied: weight.active > 0 && entry.copied(),
            shared: weight.active > 0 && !entry.copied(),
            exclusive: false,
        });
    }
}

/// Sorts, and makes one of those with the same offset.
fn compact(l2: &mut Vec<L2Ref>) {
    l2.sort_unstable_by_key(|table| (table.offset, table.l1_index));
    l2.dedup_by(|next, kept| {
        let same = next.offset == kept.offset;
        if same {
            kept.inactive = kept.inactive.saturating_add(next.inactive);
            kept.active = kept.active.saturating_add(next.active);
            kept.l1_index = kept.l1_index.min(next.l1_index);
            kept.copied |= next.copied;
            kept.shared |= next.shared;
        }
        same
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_listed_once() {
        let table = |offset, active: u32, inactive, l1_index, copied| L2Ref {
            offset,
            inactive,
            active,
            l1_index,
            copied: copied && active > 0,
            shared: !copied && active > 0,
            exclusive: false,
        };
        let mut l2 = vec![
            table(0x20000, 0, 5, u32::MAX, false),
            table(0x10000, 1, 0, 9, true),
            table(0x20000, 1, 1, 4, true),
            table(0x20000, 1, 0, 2, false),
        ];
        compact(&mut l2);
        assert_eq!(l2.len(), 2);
        assert_eq!(l2[0], table(0x10000, 1, 0, 9, true));
        let both = L2Ref { copied: true, shared: true, ..table(0x20000, 2, 6, 2, true) };
        assert_eq!(l2[1], both);
        assert_eq!(l2[1].references(), 8);
    }
}
