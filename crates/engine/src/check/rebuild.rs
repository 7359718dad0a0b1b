//! New refcount structures for the whole image, built past everything in use and switched to with one header write.
//!
//! Until that write nothing refers to them: a crash leaves the image as it was, with a longer file. After it nothing
//! refers to the old ones, whose clusters the new refcounts call free.

use super::count::count;
use super::inventory::Inventory;
use super::refmap::RefMap;
use super::reftable::{Block, RefTable, block_shift, table_clusters};
use super::report::Tally;
use super::source::Source;
use crate::progress::Phase;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use zebu_qcow2::limits::MAX_REFTABLE_SIZE;
use zebu_qcow2::{HostOffset, RefTableEntry, refcount};
use zebu_storage::FileKind;

/// The source of the new refcounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Basis {
    /// The references found.
    References,
    /// The references found or the old refcount, whichever is higher: some references cannot be found.
    ReferencesAndOld,
}

/// Builds new refcount structures and switches to them. `inventory` must be complete but for what `basis` says;
/// `references_end` is one past the highest cluster that anything refers to, the old structures included.
///
/// # Errors
/// [`ErrorKind::NoSpace`] if there is no room for them, in the file or in the format. The image is unchanged then.
pub(super) async fn rebuild(
    source: &mut Source<'_>,
    inventory: &mut Inventory,
    old: &RefTable,
    references_end: u64,
    basis: Basis,
) -> Result<()> {
    let built = build_or_cut(source, inventory, old, references_end, basis).await?;
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&built.table.to_be_bytes());
    bytes[8..].copy_from_slice(&built.table_clusters.to_be_bytes());
    source.write(48, &bytes).await?;
    source.flush().await?;
    source.header.refcount_table_offset = HostOffset(built.table);
    source.header.refcount_table_clusters = built.table_clusters;
    Ok(())
}

/// The same with refcounts of `1 << order` bits, into which all counts fit. The table and the width change in one
/// sector of the header.
pub(super) async fn rebuild_in_width(
    source: &mut Source<'_>,
    inventory: &mut Inventory,
    old: &RefTable,
    references_end: u64,
    order: u32,
) -> Result<()> {
    source
        .header
        .set_refcount_order(order)
        .map_err(|e| Error::new(ErrorKind::InvalidArgument, e.to_string()).on(source.file.path()))?;
    source.geometry = source.header.geometry();
    let built = build_or_cut(source, inventory, old, references_end, Basis::References).await?;
    let header = &source.header;
    // The fields from 48 to 99, in between those that stay.
    let mut bytes = Vec::with_capacity(52);
    bytes.extend(built.table.to_be_bytes());
    bytes.extend(built.table_clusters.to_be_bytes());
    bytes.extend(header.nb_snapshots.to_be_bytes());
    bytes.extend(header.snapshots_offset.0.to_be_bytes());
    bytes.extend(header.incompatible().bits().to_be_bytes());
    bytes.extend(header.compatible.bits().to_be_bytes());
    bytes.extend(header.autoclear.bits().to_be_bytes());
    bytes.extend(order.to_be_bytes());
    source.write(48, &bytes).await?;
    source.flush().await
}

async fn build_or_cut(
    source: &Source<'_>,
    inventory: &mut Inventory,
    old: &RefTable,
    references_end: u64,
    basis: Basis,
) -> Result<Built> {
    let len_before = source.file_len();
    match build(source, inventory, old, references_end, basis).await {
        Ok(built) => Ok(built),
        Err(error) => {
            if source.file.kind() != FileKind::BlockDevice && source.file_len() > len_before {
                // Nothing refers to what was appended. If it cannot be cut off, it stays as unused space.
                let _ = source.worker.set_len(source.file, len_before).await;
            }
            Err(error)
        }
    }
}

/// The durable new table.
struct Built {
    /// Its offset.
    table: u64,
    table_clusters: u32,
}

async fn build(
    source: &Source<'_>,
    inventory: &mut Inventory,
    old: &RefTable,
    references_end: u64,
    basis: Basis,
) -> Result<Built> {
    let geometry = source.geometry;
    let shift = block_shift(&geometry);
    let mut old_clusters: Vec<u64> = table_clusters(source).collect();
    old_clusters.extend(old.blocks(source).map(|(_, block)| block >> geometry.cluster_bits));
    old_clusters.sort_unstable();

    // What a file holds past its last reference may be an unfinished repair; it is not overwritten either. The end
    // of a device is nothing that could be moved.
    let base = match source.file.kind() {
        FileKind::BlockDevice => references_end,
        _ => references_end.max(source.file_clusters()),
    };
    let mut builder = Builder {
        source,
        old,
        basis,
        old_clusters: &old_clusters,
        base,
        written: 0,
        entries: Vec::new(),
        current: None,
    };
    let mut scratch = Tally::new(0);
    let mut start = 0;
    loop {
        let (map, _) = count(source, inventory, None, start, &mut scratch).await?;
        let blocks = builder.blocks_of(&map);
        let total = blocks.len() as u64;
        for (done, block) in blocks.into_iter().enumerate() {
            source.options.control.cancel.check()?;
            let range = (block << shift).max(map.start())..((block + 1) << shift).min(map.end());
            builder.add(&map, block, range).await?;
            source.options.control.report(Phase::RebuildingRefcounts, done as u64 + 1, total);
        }
        if map.end() == u64::MAX || map.end() >= builder.base {
            break;
        }
        start = map.end();
    }
    builder.finish().await
}

struct Builder<'b, 's> {
    source: &'b Source<'s>,
    old: &'b RefTable,
    basis: Basis,
    /// Clusters of the old structures, sorted: they are given up.
    old_clusters: &'b [u64],
    /// First cluster of the new structures; nothing from there on is in use.
    base: u64,
    /// Clusters written from there on.
    written: u64,
    entries: Vec<RefTableEntry>,
    /// The block being filled: its index and bytes. It may go on in the next window.
    current: Option<(u64, Vec<u8>)>,
}

impl Builder<'_, '_> {
    /// The blocks that the clusters of `map` need.
    fn blocks_of(&self, map: &RefMap) -> Vec<u64> {
        let shift = block_shift(&self.source.geometry);
        let mut blocks = map.groups(shift);
        if self.basis == Basis::ReferencesAndOld {
            blocks.extend((0..self.old.len()).filter(|i| self.old.block(self.source, *i) != Block::None));
        }
        blocks.retain(|block| {
            let covered = block << shift..(block + 1) << shift;
            covered.start < map.end().min(self.base) && covered.end > map.start()
        });
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Takes over the counts of the clusters `range` of one block.
    async fn add(&mut self, map: &RefMap, block: u64, range: Range<u64>) -> Result<()> {
        let geometry = self.source.geometry;
        let old = match self.old.block(self.source, block) {
            Block::At(offset) if self.basis == Basis::ReferencesAndOld => {
                self.source.read(offset, geometry.cluster_size() as usize).await.ok()
            }
            _ => None,
        };
        let (index, mut bytes) = match self.current.take() {
            Some((index, bytes)) if index == block => (index, bytes),
            other => {
                if let Some((index, bytes)) = other {
                    self.write_block(index, &bytes).await?;
                }
                (block, vec![0; geometry.cluster_size() as usize])
            }
        };
        let first = block << block_shift(&geometry);
        let (order, max) = (geometry.refcount_order, geometry.refcount_max());
        map.visit(range.start, range.end.min(self.base), |cluster, cell| {
            let at = (cluster - first) as usize;
            let mut count = cell.count.min(max);
            if let Some(old) = &old
                && self.old_clusters.binary_search(&cluster).is_err()
            {
                count = count.max(refcount::get(old.as_slice(), at, order).unwrap_or(0));
            }
            if count > 0 {
                // The value was limited to the width, and the index lies in the block.
                let _ = refcount::set(&mut bytes, at, order, count);
            }
        });
        self.current = Some((index, bytes));
        Ok(())
    }

    /// Writes a block that needs no more counts, unless all are 0.
    async fn write_block(&mut self, index: u64, bytes: &[u8]) -> Result<()> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let offset = (self.base + self.written) * self.source.geometry.cluster_size();
        self.check_room(1)?;
        self.source.write(offset, bytes).await?;
        self.written += 1;
        if self.entries.len() <= index as usize {
            if (index + 1) * RefTableEntry::SIZE as u64 > MAX_REFTABLE_SIZE {
                return Err(too_large());
            }
            self.entries.resize(index as usize + 1, RefTableEntry::default());
        }
        self.entries[index as usize] = RefTableEntry::new(HostOffset(offset));
        Ok(())
    }

    /// That `clusters` more fit the device.
    fn check_room(&self, clusters: u64) -> Result<()> {
        let end = (self.base + self.written + clusters) * self.source.geometry.cluster_size();
        if self.source.file.kind() == FileKind::BlockDevice && end > self.source.file_len() {
            return Err(Error::new(
                ErrorKind::NoSpace,
                "no room for new refcount structures at the end of the device: make it larger and try again",
            )
            .on(self.source.file.path()));
        }
        Ok(())
    }

    /// Writes the blocks that cover the new structures themselves, and the table.
    async fn finish(mut self) -> Result<Built> {
        let geometry = self.source.geometry;
        let shift = block_shift(&geometry);
        let cluster_size = geometry.cluster_size();
        let first_tail = self.base >> shift;
        let mut first_bytes = vec![0; cluster_size as usize];
        if let Some((index, bytes)) = self.current.take() {
            if index == first_tail {
                first_bytes = bytes;
            } else {
                self.write_block(index, &bytes).await?;
            }
        }
        // Structures that count themselves: enlarge until they fit.
        let (mut tail, mut table_clusters) = (1, 1);
        let end = loop {
            let end = self.base + self.written + tail + table_clusters;
            let blocks = ((end - 1) >> shift) + 1;
            let needed_table = (blocks * RefTableEntry::SIZE as u64).div_ceil(cluster_size);
            if blocks * RefTableEntry::SIZE as u64 > MAX_REFTABLE_SIZE {
                return Err(too_large());
            }
            if blocks - first_tail <= tail && needed_table <= table_clusters {
                break end;
            }
            tail = tail.max(blocks - first_tail);
            table_clusters = table_clusters.max(needed_table);
        };
        self.check_room(tail + table_clusters)?;
        let base = self.base;
        for index in first_tail..first_tail + tail {
            let mut bytes = if index == first_tail {
                std::mem::take(&mut first_bytes)
            } else {
                vec![0; cluster_size as usize]
            };
            let first = index << shift;
            for cluster in first.max(base)..((index + 1) << shift).min(end) {
                let _ = refcount::set(&mut bytes, (cluster - first) as usize, geometry.refcount_order, 1);
            }
            self.write_block(index, &bytes).await?;
        }
        let table = (self.base + self.written) * cluster_size;
        let mut bytes: Vec<u8> = self.entries.iter().flat_map(|entry| entry.0.to_be_bytes()).collect();
        bytes.resize((table_clusters * cluster_size) as usize, 0);
        self.source.write(table, &bytes).await?;
        self.source.flush().await?;
        Ok(Built { table, table_clusters: table_clusters as u32 })
    }
}

fn too_large() -> Error {
    Error::new(
        ErrorKind::NoSpace,
        "the refcount table would exceed 8 MiB: the image needs larger clusters or narrower refcounts",
    )
}
