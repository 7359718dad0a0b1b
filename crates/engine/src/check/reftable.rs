//! The refcount table and its blocks as they are in the image.

use super::finding::{FindingKind, TableKind};
use super::refmap::RefMap;
use super::report::Tally;
use super::source::Source;
use crate::Result;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use zebu_qcow2::{Geometry, RefTableEntry};

/// Entries that point at a block which another entry has already: so many are compared all the same, the others are
/// only reported.
const MAX_REPEATED: u64 = 64;

/// The target of a refcount table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    /// No block: all refcounts are 0.
    None,
    /// A block at this offset, which is aligned and within the file.
    At(u64),
    /// A block past the end of the file: all its refcounts read as 0.
    Outside(u64),
    /// A block past the largest offset of a file.
    Unreachable(u64),
    /// A block that cannot be read as one.
    Unaligned(u64),
    /// One of too many entries with the same block.
    Repeated(u64),
}

/// The refcount table.
pub(super) struct RefTable {
    entries: Vec<RefTableEntry>,
    /// Entries that are not to be compared, see [`MAX_REPEATED`].
    repeated: Vec<u64>,
}

impl RefTable {
    /// Reads the table that the header points at.
    pub(super) async fn read(source: &Source<'_>, tally: &mut Tally) -> Result<Self> {
        let offset = source.header.refcount_table_offset.0;
        // The header's parser limits the table to 8 MiB.
        let len = u64::from(source.header.refcount_table_clusters) * source.geometry.cluster_size();
        let stored = len.min(source.file_len().saturating_sub(offset));
        let mut entries = Vec::new();
        match source.read(offset, stored.next_multiple_of(8) as usize).await {
            Ok(bytes) => {
                let words = bytes.as_slice().chunks_exact(8);
                entries.extend(
                    words.map(|word| RefTableEntry(u64::from_be_bytes(word.try_into().unwrap_or_default()))),
                );
            }
            Err(error) => {
                let error = error.to_string();
                tally.add(FindingKind::Unreadable { table: TableKind::RefcountTable, offset, error }, 1);
            }
        }
        let used = entries.iter().rposition(|entry| entry.0 != 0).map_or(0, |last| last + 1);
        entries.truncate(used);
        let mut repeated = Vec::new();
        let mut seen: HashSet<u64, foldhash::fast::FixedState> = HashSet::default();
        for (index, entry) in entries.iter().enumerate() {
            if let Some(block) = entry.block()
                && !seen.insert(block.0)
            {
                repeated.push(index as u64);
            }
        }
        repeated.drain(..repeated.len().min(MAX_REPEATED as usize));
        Ok(Self { entries, repeated })
    }

    /// Number of entries up to the last one in use.
    pub(super) fn len(&self) -> u64 {
        self.entries.len() as u64
    }

    /// The target of entry `index`.
    pub(super) fn block(&self, source: &Source<'_>, index: u64) -> Block {
        let entry = self.entries.get(index as usize).copied().unwrap_or_default();
        match entry.block() {
            None => Block::None,
            Some(block) if !source.geometry.is_cluster_aligned(block.0) => Block::Unaligned(block.0),
            Some(block) if block.0 > i64::MAX as u64 => Block::Unreachable(block.0),
            Some(block) if block.0 >= source.file_len() => Block::Outside(block.0),
            Some(block) if self.repeated.binary_search(&index).is_ok() => Block::Repeated(block.0),
            Some(block) => Block::At(block.0),
        }
    }

    /// Index and offset of the blocks that count as references: valid entries, one for each time a block is named.
    pub(super) fn blocks(&self, source: &Source<'_>) -> impl Iterator<Item = (u64, u64)> {
        let last = source.file_clusters();
        self.entries.iter().enumerate().filter_map(move |(index, entry)| {
            let block = entry.block()?.0;
            let valid = entry.reserved_bits() == 0
                && source.geometry.is_cluster_aligned(block)
                && block >> source.geometry.cluster_bits < last;
            valid.then_some((index as u64, block))
        })
    }

    /// Reports what is wrong with the table and the places of its blocks, as far as `map` (which has counted
    /// everything) covers them. Returns whether all refcount structures must be rebuilt.
    pub(super) fn judge(&self, source: &Source<'_>, map: &RefMap, tally: &mut Tally) -> bool {
        let mut rebuild = false;
        if map.start() == 0 {
            rebuild |= self.judge_entries(source, tally);
        }
        // A block named several times is counted several times already: the first is in order, each further one
        // finds one reference more.
        let mut named: HashMap<u64, u64, foldhash::fast::FixedState> = HashMap::default();
        for (_, block) in self.blocks(source) {
            *named.entry(block).or_default() += 1;
        }
        let mut met: HashMap<u64, u64, foldhash::fast::FixedState> = HashMap::default();
        for (index, offset) in self.blocks(source) {
            let cluster = offset >> source.geometry.cluster_bits;
            if !(map.start()..map.end()).contains(&cluster) {
                continue;
            }
            let times = named.get(&offset).copied().unwrap_or(1);
            let met = met.entry(offset).or_default();
            *met += 1;
            let references = map.get(cluster).count.saturating_sub(times - *met);
            if references != 1 {
                tally.add(FindingKind::RefblockShared { index, offset, references }, 1);
                rebuild = true;
            }
        }
        rebuild
    }

    fn judge_entries(&self, source: &Source<'_>, tally: &mut Tally) -> bool {
        let mut rebuild = false;
        let header = &source.header;
        let (offset, clusters) = (header.refcount_table_offset.0, header.refcount_table_clusters);
        if clusters > 0 {
            let size = u64::from(clusters) * source.geometry.cluster_size();
            if source.is_past_end(offset, size) {
                tally.add(FindingKind::PastEnd { offset, size }, 1);
                rebuild = true;
            }
        }
        for (index, entry) in self.entries.iter().enumerate() {
            let index = index as u64;
            let kind = if entry.reserved_bits() != 0 {
                FindingKind::ReftableReservedBits { index, entry: entry.0 }
            } else {
                match self.block(source, index) {
                    Block::Unaligned(offset) => FindingKind::RefblockUnaligned { index, offset },
                    Block::Outside(offset) | Block::Unreachable(offset) => {
                        FindingKind::RefblockOutside { index, offset }
                    }
                    Block::Repeated(offset) => {
                        FindingKind::TooManyOverlaps { table: TableKind::RefcountBlock, offset }
                    }
                    Block::None | Block::At(_) => continue,
                }
            };
            tally.add(kind, 1);
            rebuild = true;
        }
        rebuild
    }
}

/// The clusters of the table itself, none if it reaches past the end of the file.
pub(super) fn table_clusters(source: &Source<'_>) -> Range<u64> {
    let offset = source.header.refcount_table_offset.0;
    let clusters = u64::from(source.header.refcount_table_clusters);
    let first = offset >> source.geometry.cluster_bits;
    if clusters == 0 || source.is_past_end(offset, clusters * source.geometry.cluster_size()) {
        return 0..0;
    }
    first..first + clusters
}

/// log2 of the clusters that one refcount block covers.
pub(super) fn block_shift(geometry: &Geometry) -> u32 {
    geometry.refcount_entries_per_block().trailing_zeros()
}
