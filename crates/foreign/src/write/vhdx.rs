//! A new VHDX. The rules are those of [`crate::vhdx`]: its log is empty.

use super::blocks::BlockTable;
use super::bytes::{put, put_le16, put_le32, put_le64};
use super::options::Allocation;
use super::options::{Birth, LARGE_SECTOR, NewVhdx, SECTOR};
use super::places::{Part, Places, TABLE_PART};
use crate::error::{Error, Result, require};
use crate::vhdx::header::{self, MIB, checksum};
use crate::vhdx::{FULLY_PRESENT, MAGIC, NOT_PRESENT, SECTORS_PER_BITMAP, ZERO, metadata, region};

/// Bytes of a sector of the medium that the guest is told of.
const PHYSICAL_SECTOR: u32 = 4096;
/// Offset of the log, bytes.
const LOG_AT: u64 = MIB;
/// Bytes of the metadata region, and offset of its first item.
const METADATA: u64 = MIB;
const ITEMS_AT: u32 = metadata::TABLE as u32;
/// Bytes of the table and the items.
const TABLE_AND_ITEMS: usize = metadata::TABLE as usize + 4096;
/// Bytes of the largest disk.
const MOST: u64 = 64 << 40;
const GIB: u64 = 1 << 30;
/// Bytes of a table that QEMU can't read any more. Only that of an empty disk becomes so large.
const MOST_TABLE: u64 = 2 * GIB;
/// Flags of metadata: of the disk rather than of the file; no reader may ignore it.
const OF_THE_DISK: u32 = 1 << 1;
const REQUIRED: u32 = 1 << 2;

#[derive(Debug, Clone)]
pub(super) struct Tables {
    size: u64,
    block: u64,
    allocation: Allocation,
    log_size: u32,
    sector: u32,
    zero_blocks: bool,
    birth: Birth,
}

/// The block size for a disk whose maker does not say: that of QEMU.
fn usual_block(size: u64) -> u32 {
    match size {
        size if size > 32 * 1024 * GIB => 64 << 20,
        size if size > 100 * GIB => 32 << 20,
        size if size > GIB => 16 << 20,
        _ => 8 << 20,
    }
}

pub(super) fn layout(new: &NewVhdx, size: u64, birth: &Birth) -> Result<(Places, Tables)> {
    require!(size <= MOST, "a VHDX has no disks of more than 64 TiB");
    let block = new.block_size.unwrap_or_else(|| usual_block(size));
    require!(
        block.is_power_of_two() && (1 << 20..=256 << 20).contains(&block),
        "VHDX block size {block} is not a power of two from 1 MiB to 256 MiB"
    );
    require!(
        new.log_size >= 1 << 20 && new.log_size.is_multiple_of(1 << 20),
        "VHDX log size {} is not a multiple of 1 MiB",
        new.log_size
    );
    let sector = new.logical_sector.unwrap_or(SECTOR);
    require!(
        matches!(sector, SECTOR | LARGE_SECTOR),
        "VHDX logical sector size {sector} is neither {SECTOR} nor {LARGE_SECTOR}"
    );
    require!(
        size.is_multiple_of(u64::from(sector)),
        "a VHDX with logical sectors of {sector} bytes has no disk of {size} bytes: give a multiple"
    );
    let tables = Tables {
        size,
        block: u64::from(block),
        allocation: new.allocation,
        log_size: new.log_size,
        sector,
        zero_blocks: new.zero_blocks,
        birth: *birth,
    };
    require!(
        tables.table_bytes() < MOST_TABLE,
        "QEMU opens no VHDX of 0 bytes with blocks of {block} bytes: give a smaller block_size"
    );
    let first = tables.table_at().checked_add(tables.table_bytes());
    let places = Places {
        size,
        block: tables.block,
        first: first.ok_or_else(|| Error::unsupported("the VHDX disk is too large"))?,
        stride: tables.block,
        allocation: new.allocation,
        most: u32::MAX,
        mark: Vec::new(),
    };
    Ok((places, tables))
}

/// Appends a structure of `len` bytes to others, made by `fill` and then given its checksum, which all have at offset 4.
fn summed(len: usize, signature: [u8; 4], fill: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = vec![0; len];
    put(&mut bytes, 0, &signature);
    fill(&mut bytes);
    let sum = checksum(&bytes, 4);
    put_le32(&mut bytes, 4, sum);
    bytes
}

impl Tables {
    fn metadata_at(&self) -> u64 {
        LOG_AT.saturating_add(u64::from(self.log_size))
    }

    fn table_at(&self) -> u64 {
        self.metadata_at().saturating_add(METADATA)
    }

    /// Blocks between two entries of the sector bitmap.
    fn chunk(&self) -> u64 {
        SECTORS_PER_BITMAP.saturating_mul(u64::from(self.sector)).checked_div(self.block).unwrap_or(1).max(1)
    }

    /// Entries of the table, with those of the sector bitmaps between them.
    fn entries(&self) -> u64 {
        let blocks = self.size.div_ceil(self.block.max(1));
        let bitmaps = blocks.saturating_sub(1).checked_div(self.chunk()).unwrap_or(0);
        blocks.saturating_add(bitmaps)
    }

    fn table_bytes(&self) -> u64 {
        // QEMU counts the bitmaps of a disk without blocks as if it had 2^32, and wants a table of so many entries.
        let least =
            if self.size == 0 { u64::from(u32::MAX).checked_div(self.chunk()).unwrap_or(0) } else { 0 };
        self.entries().max(least).saturating_mul(8).max(1).next_multiple_of(MIB)
    }

    pub(super) fn tables<'a>(
        &'a self,
        places: &'a Places,
        table: &'a BlockTable,
    ) -> impl Iterator<Item = Part> + use<'a> {
        let part_entries = TABLE_PART / 8;
        let without_place = if self.zero_blocks { ZERO } else { NOT_PRESENT };
        let period = self.chunk().saturating_add(1);
        let entry = move |number: u64| {
            // After the blocks of a chunk comes the entry of their bitmap, which there is none of.
            let chunk = number.checked_div(period).unwrap_or(0);
            let within = number.saturating_sub(chunk.saturating_mul(period));
            if within == self.chunk() {
                return NOT_PRESENT;
            }
            let index = chunk.saturating_mul(self.chunk()).saturating_add(within);
            places.of(table, index).map_or(without_place, |place| places.host(place) | FULLY_PRESENT)
        };
        (0..self.entries().div_ceil(part_entries)).map(move |part| {
            let start = part.saturating_mul(part_entries);
            let end = start.saturating_add(part_entries).min(self.entries());
            let bytes = (start..end).flat_map(|number| entry(number).to_le_bytes()).collect();
            Part { offset: self.table_at().saturating_add(start.saturating_mul(8)), bytes }
        })
    }

    pub(super) fn headers(&self) -> Vec<Part> {
        let mut parts = vec![Part { offset: self.metadata_at(), bytes: self.metadata() }];
        let regions = self.regions();
        parts.extend(region::PLACES.map(|offset| Part { offset, bytes: regions.clone() }));
        for (offset, sequence) in header::PLACES.into_iter().zip(1..) {
            parts.push(Part { offset, bytes: self.header(sequence) });
        }
        let mut identifier = vec![0; 4096];
        put(&mut identifier, 0, MAGIC);
        let creator: Vec<u8> = "zebu".encode_utf16().flat_map(u16::to_le_bytes).collect();
        put(&mut identifier, 8, &creator);
        parts.push(Part { offset: 0, bytes: identifier });
        parts
    }

    fn header(&self, sequence: u64) -> Vec<u8> {
        summed(header::BYTES, *b"head", |bytes| {
            put_le64(bytes, 8, sequence);
            put(bytes, 16, &self.birth.uuid(0));
            put(bytes, 32, &self.birth.uuid(1));
            put_le16(bytes, 66, 1);
            put_le32(bytes, 68, self.log_size);
            put_le64(bytes, 72, LOG_AT);
        })
    }

    fn regions(&self) -> Vec<u8> {
        summed(region::BYTES as usize, *b"regi", |bytes| {
            let regions = [
                (region::TABLE, self.table_at(), self.table_bytes()),
                (region::METADATA, self.metadata_at(), METADATA),
            ];
            put_le32(bytes, 8, regions.len() as u32);
            for (at, (id, offset, len)) in (16..).step_by(32).zip(regions) {
                put(bytes, at, &id);
                let rest = bytes.get_mut(at..).unwrap_or_default();
                put_le64(rest, 16, offset);
                put_le32(rest, 24, len as u32);
                put_le32(rest, 28, 1);
            }
        })
    }

    fn metadata(&self) -> Vec<u8> {
        let leave_allocated = u64::from(self.allocation == Allocation::Fixed);
        let parameters = self.block | leave_allocated << 32;
        let items: [(_, u32, Vec<u8>); 5] = [
            (metadata::FILE_PARAMETERS, REQUIRED, parameters.to_le_bytes().into()),
            (metadata::DISK_SIZE, OF_THE_DISK | REQUIRED, self.size.to_le_bytes().into()),
            (metadata::DISK_ID, OF_THE_DISK | REQUIRED, self.birth.uuid(2).into()),
            (metadata::LOGICAL_SECTOR, OF_THE_DISK | REQUIRED, self.sector.to_le_bytes().into()),
            (metadata::PHYSICAL_SECTOR, OF_THE_DISK | REQUIRED, PHYSICAL_SECTOR.to_le_bytes().into()),
        ];
        // The table, and a block for the items.
        let mut bytes = vec![0; TABLE_AND_ITEMS];
        put(&mut bytes, 0, b"metadata");
        put_le16(&mut bytes, 10, items.len() as u16);
        let mut item_at = ITEMS_AT;
        for (at, (id, flags, content)) in (32usize..).step_by(32).zip(items) {
            put(&mut bytes, at, &id);
            let entry = bytes.get_mut(at..).unwrap_or_default();
            put_le32(entry, 16, item_at);
            put_le32(entry, 20, content.len() as u32);
            put_le32(entry, 24, flags);
            put(&mut bytes, item_at as usize, &content);
            item_at = item_at.saturating_add(content.len() as u32);
        }
        bytes
    }
}
