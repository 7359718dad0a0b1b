//! Comparing the counts with the refcounts in the image, and correcting those in place.

use super::finding::{FindingKind, TableKind};
use super::refmap::RefMap;
use super::reftable::{Block, RefTable, block_shift};
use super::report::Tally;
use super::source::{Content, Source};
use crate::Result;
use crate::progress::Phase;
use std::ops::Range;
use zebu_qcow2::refcount;

/// Which refcounts are corrected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Correct {
    /// None.
    Nothing,
    /// Counts that are too high.
    High,
    /// Counts that are too low.
    Low,
    /// Both.
    Both,
}

impl Correct {
    fn lowers(self) -> bool {
        matches!(self, Self::High | Self::Both)
    }
    fn raises(self) -> bool {
        matches!(self, Self::Low | Self::Both)
    }
}

/// The result of a comparison besides its findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Comparison {
    /// One past the highest cluster with a reference or a refcount.
    pub(super) used_end: u64,
    /// A cluster with references has the refcount 0: it could be allocated at any time, so that refcounts must be
    /// written without allocating by them.
    pub(super) rebuild: bool,
    /// Some active entry's COPIED flag contradicts the refcount.
    pub(super) flags_wrong: bool,
    /// Refcounts in the image were changed.
    pub(super) changed: bool,
}

/// One past the last cluster that is compared: what lies past the end of the file and has no reference is not.
fn clusters_end(source: &Source<'_>, map: &RefMap) -> u64 {
    source.file_clusters().max(map.used_end()).min(map.end())
}

/// The blocks of the refcount table that cover a cluster of the map with a reference or a refcount.
fn blocks(source: &Source<'_>, reftable: &RefTable, map: &RefMap) -> Vec<u64> {
    let shift = block_shift(&source.geometry);
    let end = clusters_end(source, map);
    let mut blocks = map.groups(shift);
    blocks.extend((0..reftable.len()).filter(|index| reftable.block(source, *index) != Block::None));
    blocks.retain(|index| index << shift < end && (index + 1) << shift > map.start());
    blocks.sort_unstable();
    blocks.dedup();
    blocks
}

/// Compares the refcounts of the clusters in `map` with its counts, and corrects what `correct` says, in place.
/// Clusters of `planned` may have the refcount 0 without more ado: their reference is not in the image yet.
pub(super) async fn compare(
    source: &Source<'_>,
    reftable: &RefTable,
    map: &RefMap,
    planned: Range<u64>,
    correct: Correct,
    tally: &mut Tally,
) -> Result<Comparison> {
    let geometry = &source.geometry;
    let (shift, cluster_size) = (block_shift(geometry), geometry.cluster_size());
    let end = clusters_end(source, map);
    let mut comparer = Comparer { source, map, planned, correct, tally, result: Comparison::default() };
    let blocks = blocks(source, reftable, map);
    let total = blocks.len() as u64;
    // Blocks that need no reading are given the offset past the end of the file, where all is zero.
    let items = blocks.iter().map(|index| match reftable.block(source, *index) {
        Block::At(offset) => (offset, (*index, offset)),
        _ => (u64::MAX, (*index, u64::MAX)),
    });
    let mut tables = source.tables(cluster_size as usize, items, total.saturating_mul(cluster_size));
    let mut done = 0;
    while let Some(((index, offset), content)) = tables.next().await? {
        let range = (index << shift).max(map.start())..((index + 1) << shift).min(end);
        let state = reftable.block(source, index);
        match content {
            _ if matches!(state, Block::Unaligned(_) | Block::Repeated(_) | Block::Unreachable(_)) => {
                comparer.unknown(index, &range);
            }
            Content::Failed(error) => {
                let (table, error) = (TableKind::RefcountBlock, error.to_string());
                comparer.tally.add_weighted(FindingKind::Unreadable { table, offset, error }, 0);
                comparer.unknown(index, &range);
            }
            Content::Zero => {
                if map.may_have(range.start, range.end) {
                    let changed = comparer.block(&[], index, &range);
                    if let Some(changed) = changed
                        && offset != u64::MAX
                    {
                        let old = vec![0; changed.len()];
                        source.write_changes(offset, &old, &changed).await?;
                    }
                }
            }
            Content::Bytes(bytes) => {
                let empty = || bytes.as_slice().iter().all(|byte| *byte == 0);
                if map.may_have(range.start, range.end) || !empty() {
                    let changed = comparer.block(bytes.as_slice(), index, &range);
                    if let Some(changed) = changed {
                        source.write_changes(offset, bytes.as_slice(), &changed).await?;
                    }
                }
                tables.recycle(bytes);
            }
        }
        done += 1;
        source.options.control.report(Phase::ComparingRefcounts, done, total);
    }
    Ok(comparer.result)
}

struct Comparer<'c, 's> {
    source: &'c Source<'s>,
    map: &'c RefMap,
    planned: Range<u64>,
    correct: Correct,
    tally: &'c mut Tally,
    result: Comparison,
}

impl Comparer<'_, '_> {
    fn unknown(&mut self, index: u64, range: &Range<u64>) {
        let clusters = range.end.saturating_sub(range.start);
        self.tally.add_weighted(FindingKind::RefcountUnknown { index, clusters }, clusters);
        self.result.rebuild = true;
    }

    /// Compares the clusters `range` of block `index`; an empty `block` is all zeroes. Returns the block as it is
    /// to be written, if any refcount is to be changed.
    fn block(&mut self, block: &[u8], index: u64, range: &Range<u64>) -> Option<Vec<u8>> {
        let geometry = self.source.geometry;
        let first = index << block_shift(&geometry);
        let (order, max) = (geometry.refcount_order, geometry.refcount_max());
        let mut corrected: Option<Vec<u8>> = None;
        let map = self.map;
        map.visit(range.start, range.end, |cluster, cell| {
            let at = (cluster - first) as usize;
            // An empty block has no entries: all are 0.
            let mut refcount = refcount::get(block, at, order).unwrap_or(0);
            let references = cell.count.min(max);
            if refcount == references {
                if refcount == 0 && cell.is_empty() {
                    return;
                }
            } else if self.mismatch(cluster, refcount, references) {
                let block = corrected.get_or_insert_with(|| {
                    if block.is_empty() { vec![0; geometry.cluster_size() as usize] } else { block.to_vec() }
                });
                if refcount::set(block, at, order, references).is_ok() {
                    refcount = references;
                }
            }
            if refcount > 0 || cell.count > 0 {
                self.result.used_end = self.result.used_end.max(cluster + 1);
            }
            if cell.count > max {
                let kind = FindingKind::RefcountOverflow { cluster, references: cell.count };
                self.tally.add(kind, cell.count - max);
            }
            self.result.flags_wrong |= cell.contradicts(refcount);
        });
        self.result.changed |= corrected.is_some();
        corrected
    }

    /// Reports a wrong refcount. Returns whether it is to be corrected.
    fn mismatch(&mut self, cluster: u64, refcount: u64, references: u64) -> bool {
        let (kind, corrected) = if refcount < references {
            let planned = self.planned.contains(&cluster);
            if planned && self.correct == Correct::Nothing {
                return false;
            }
            self.result.rebuild |= refcount == 0 && !planned;
            (FindingKind::RefcountTooLow { cluster, refcount, references }, self.correct.raises())
        } else {
            (FindingKind::Leak { cluster, refcount, references }, self.correct.lowers())
        };
        if !corrected {
            self.tally.add(kind, 1);
        } else if !self.planned.contains(&cluster) {
            self.tally.add_repaired(kind);
        }
        corrected
    }
}

/// Replaces the counts in `map` by the refcounts in the image, for all clusters that anything refers to.
pub(super) async fn load_refcounts(source: &Source<'_>, reftable: &RefTable, map: &mut RefMap) -> Result<()> {
    let geometry = &source.geometry;
    let (shift, cluster_size) = (block_shift(geometry), geometry.cluster_size());
    let blocks = blocks(source, reftable, map);
    let items = blocks.iter().map(|index| match reftable.block(source, *index) {
        Block::At(offset) => (offset, *index),
        _ => (u64::MAX, *index),
    });
    let total_bytes = (blocks.len() as u64).saturating_mul(cluster_size);
    let mut tables = source.tables(cluster_size as usize, items, total_bytes);
    let mut differing = Vec::new();
    while let Some((index, content)) = tables.next().await? {
        let range = index << shift..(index + 1) << shift;
        if !map.may_have(range.start, range.end) {
            if let Content::Bytes(bytes) = content {
                tables.recycle(bytes);
            }
            continue;
        }
        let bytes = match &content {
            Content::Bytes(bytes) => bytes.as_slice(),
            Content::Zero | Content::Failed(_) => &[],
        };
        map.visit(range.start, range.end, |cluster, cell| {
            let refcount =
                refcount::get(bytes, (cluster - range.start) as usize, geometry.refcount_order).unwrap_or(0);
            if !cell.is_empty() && cell.count != refcount {
                differing.push((cluster, refcount));
            }
        });
        for (cluster, refcount) in differing.drain(..) {
            map.set_count(cluster, refcount);
        }
        if let Content::Bytes(bytes) = content {
            tables.recycle(bytes);
        }
    }
    Ok(())
}
