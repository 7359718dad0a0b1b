//! COPIED flags one by one: only looked at when the counts say that some are wrong.
//!
//! The rule: an active L1 or L2 entry has the flag if and only if the refcount of its cluster, as it is in the
//! image, is 1. (In snapshots' tables the flag means nothing.)

use super::count::for_each_entry;
use super::finding::{FindingKind, TableKind};
use super::inventory::{Inventory, L1_PIECE};
use super::refmap::RefMap;
use super::report::Tally;
use super::source::{Content, Source};
use crate::Result;
use crate::progress::Phase;
use std::ops::Range;
use zebu_qcow2::{L1Entry, L2Entry};

/// Whether wrong flags are corrected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CorrectFlags {
    /// They are only reported.
    No,
    /// They are written anew.
    Yes,
}

/// Looks at the flags of all active entries whose clusters are in `map`, which holds the refcounts in the image.
/// `shared_l1` are the clusters of the active L1 table that something else uses too: they are not written.
pub(super) async fn check_flags(
    source: &Source<'_>,
    inventory: &Inventory,
    map: &RefMap,
    shared_l1: &[u64],
    correct: CorrectFlags,
    tally: &mut Tally,
) -> Result<()> {
    let window = map.start()..map.end();
    check_l1(source, map, &window, shared_l1, correct, tally).await?;
    check_l2(source, inventory, map, &window, correct, tally).await
}

async fn check_l1(
    source: &Source<'_>,
    map: &RefMap,
    window: &Range<u64>,
    shared_l1: &[u64],
    correct: CorrectFlags,
    tally: &mut Tally,
) -> Result<()> {
    let start = source.header.l1_table_offset.0;
    let end = (start + u64::from(source.header.l1_size) * 8).min(source.file_len());
    let mut at = start;
    while at < end {
        let len = (end - at).min(L1_PIECE);
        source.take_turn(len).await?;
        // A piece that cannot be read was reported when references were counted.
        if let Ok(piece) = source.read(at, len.next_multiple_of(8) as usize).await {
            let old = piece.as_slice();
            let mut new = old.to_vec();
            for (index, word) in old.chunks_exact(8).enumerate() {
                let entry = L1Entry(u64::from_be_bytes(word.try_into().unwrap_or_default()));
                let Some(table) = entry.table() else { continue };
                let cluster = source.geometry.cluster_index(table);
                if !window.contains(&cluster) {
                    continue;
                }
                let refcount = map.get(cluster).count;
                if (refcount == 1) == entry.copied() {
                    continue;
                }
                let position = at + index as u64 * 8;
                let l1_index = (position - start) / 8;
                let kind = FindingKind::CopiedFlagL1 { l1_index, entry: entry.0, refcount };
                let own_cluster = position >> source.geometry.cluster_bits;
                if correct == CorrectFlags::No {
                    tally.add(kind, 1);
                } else if shared_l1.binary_search(&own_cluster).is_ok()
                    || entry.with_copied(refcount == 1).write(&mut new, index).is_err()
                {
                    tally.add(kind, 1);
                    tally.add_weighted(
                        FindingKind::RepairOverlaps { table: TableKind::L1, offset: position },
                        0,
                    );
                } else {
                    tally.add_repaired(kind);
                }
            }
            source.write_changes(at, old, &new).await?;
        }
        at += len;
    }
    Ok(())
}

async fn check_l2(
    source: &Source<'_>,
    inventory: &Inventory,
    map: &RefMap,
    window: &Range<u64>,
    correct: CorrectFlags,
    tally: &mut Tally,
) -> Result<()> {
    let geometry = source.geometry;
    let active: Vec<_> = inventory.l2.iter().filter(|table| table.active > 0).collect();
    let total = active.len() as u64;
    let items = active.iter().map(|table| (table.offset, *table));
    let cluster_size = geometry.cluster_size();
    let mut tables = source.tables(cluster_size as usize, items, total.saturating_mul(cluster_size));
    let mut done = 0;
    while let Some((table, content)) = tables.next().await? {
        if let Content::Bytes(bytes) = content {
            let mut new: Option<Vec<u8>> = None;
            let mut overlaps = false;
            for_each_entry(bytes.as_slice(), geometry.extended_l2, |index, entry| {
                let Some(refcount) = refcount_of(source, map, window, entry) else { return };
                if (refcount == 1) == entry.copied() {
                    return;
                }
                let kind =
                    FindingKind::CopiedFlagL2 { table: table.offset, index, entry: entry.word, refcount };
                let corrected = entry.with_copied(refcount == 1);
                if correct == CorrectFlags::No {
                    tally.add(kind, u64::from(table.active));
                } else if table.exclusive {
                    let new = new.get_or_insert_with(|| bytes.as_slice().to_vec());
                    match corrected.write(new, index as usize, &geometry) {
                        Ok(()) => tally.add_repaired(kind),
                        Err(_) => tally.add(kind, 1),
                    }
                } else {
                    tally.add(kind, 1);
                    overlaps = true;
                }
            });
            if overlaps {
                let kind = FindingKind::RepairOverlaps { table: TableKind::L2, offset: table.offset };
                tally.add_weighted(kind, 0);
            }
            if let Some(new) = new {
                source.write_changes(table.offset, bytes.as_slice(), &new).await?;
            }
            tables.recycle(bytes);
        }
        done += 1;
        source.options.control.report(Phase::CheckingFlags, done, total);
    }
    Ok(())
}

/// The refcount that the entry's flag must agree with; `None` if the entry has no cluster of its own, or one outside
/// the window.
fn refcount_of(source: &Source<'_>, map: &RefMap, window: &Range<u64>, entry: L2Entry) -> Option<u64> {
    let host = entry.host(&source.geometry)?;
    let cluster = source.geometry.cluster_index(host);
    if source.geometry.external_data {
        // Clusters of a data file have no refcounts and are never shared. Reported with the first window.
        return (window.start == 0).then_some(1);
    }
    window.contains(&cluster).then(|| map.get(cluster).count)
}
