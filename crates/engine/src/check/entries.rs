//! L2 entries that can be repaired without loss: nothing that a guest reads changes.

use super::count::{for_each_entry, keeps_space_only};
use super::finding::{FindingKind, TableKind};
use super::inventory::Inventory;
use super::report::Tally;
use super::source::{Content, Source};
use crate::Result;
use zebu_qcow2::L2Entry;

/// The entry without its damage, and what the damage was; `None` for an entry that is in order or beyond repair.
fn repaired(
    source: &Source<'_>,
    table: u64,
    index: u64,
    entry: L2Entry,
) -> Option<(L2Entry, Vec<FindingKind>)> {
    let geometry = &source.geometry;
    let mut kinds = Vec::new();
    let mut new = entry;
    if entry.is_compressed() {
        if entry.copied() {
            kinds.push(FindingKind::CopiedFlagCompressed { table, index, entry: entry.word });
            new = new.with_copied(false);
        }
        if entry.bitmap != 0 && !geometry.external_data {
            kinds.push(FindingKind::CompressedWithSubclusters { table, index, entry: entry.word });
            new.bitmap = 0;
        }
    } else if let Some(host) = entry.host(geometry)
        && !geometry.is_cluster_aligned(host.0)
        && keeps_space_only(entry, geometry.extended_l2)
    {
        kinds.push(FindingKind::ZeroClusterUnaligned { table, index, offset: host.0 });
        // The zeroes stay, the space that cannot be used goes.
        new = if geometry.extended_l2 {
            L2Entry { word: 0, bitmap: entry.bitmap }
        } else {
            L2Entry::zero_plain(geometry)
        };
    }
    (!kinds.is_empty()).then_some((new, kinds))
}

/// Repairs the entries of all L2 tables, active or not. A table that shares its cluster with something else is not
/// written. Returns whether anything was.
pub(super) async fn repair_entries(
    source: &Source<'_>,
    inventory: &Inventory,
    tally: &mut Tally,
) -> Result<bool> {
    let geometry = source.geometry;
    let cluster_size = geometry.cluster_size();
    let items = inventory.l2.iter().map(|table| (table.offset, table));
    let total_bytes = (inventory.l2.len() as u64).saturating_mul(cluster_size);
    let mut tables = source.tables(cluster_size as usize, items, total_bytes);
    let mut written = false;
    while let Some((table, content)) = tables.next().await? {
        let Content::Bytes(bytes) = content else { continue };
        let mut new: Option<Vec<u8>> = None;
        let mut overlaps = false;
        for_each_entry(bytes.as_slice(), geometry.extended_l2, |index, entry| {
            let Some((entry, kinds)) = repaired(source, table.offset, index, entry) else { return };
            if table.exclusive {
                let new = new.get_or_insert_with(|| bytes.as_slice().to_vec());
                if entry.write(new, index as usize, &geometry).is_ok() {
                    for kind in kinds {
                        tally.add_repaired(kind);
                    }
                    return;
                }
            }
            overlaps = true;
            for kind in kinds {
                tally.add(kind, table.references());
            }
        });
        if overlaps {
            let offset = table.offset;
            tally.add_weighted(FindingKind::RepairOverlaps { table: TableKind::L2, offset }, 0);
        }
        if let Some(new) = new {
            source.write_changes(table.offset, bytes.as_slice(), &new).await?;
            written = true;
        }
        tables.recycle(bytes);
    }
    if written {
        source.flush().await?;
    }
    Ok(written)
}
