//! VHDX, the format of Hyper-V: two headers, two region tables, metadata, and a block allocation table, all of which a log
//! protects.
//!
//! Integers are little endian. Rules: Microsoft's open specification MS-VHDX. A log that was not replayed is replayed in
//! memory.

pub(crate) mod header;
mod log;
pub(crate) mod metadata;
mod overlay;
pub(crate) mod region;

use crate::bytes::equal_bits;
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::opened::Opened;
use crate::parent::Identity;
use crate::run::{Kind, Run};
use crate::units::{Unit, Units};
use header::MIB;
use overlay::{Overlay, Patched};

/// The first bytes of the file.
pub const MAGIC: &[u8; 8] = b"vhdxfile";
/// Sectors that one block of the sector bitmap describes.
pub(crate) const SECTORS_PER_BITMAP: u64 = 1 << 23;
/// States of a block.
pub(crate) const NOT_PRESENT: u64 = 0;
pub(crate) const FULLY_PRESENT: u64 = 6;
const PARTIALLY_PRESENT: u64 = 7;
pub(crate) const ZERO: u64 = 2;

/// The tables of a VHDX.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    size: u64,
    block: Unit,
    sector: u64,
    /// Blocks between two entries of the sector bitmap.
    chunk: Unit,
    table: u64,
    has_parent: bool,
    overlay: Overlay,
}

/// The header, and the changes that the log tells.
#[derive(Debug)]
pub(crate) struct Replayed {
    data_write_guid: [u8; 16],
    overlay: Overlay,
}

fn replay(files: &dyn Files) -> Result<Replayed> {
    let source = Source::image(files);
    let magic: [u8; 8] = source.array(0, "the VHDX file identifier")?;
    ensure!(magic == *MAGIC, "Image not in VHDX format");
    let header = header::read(source)?;
    let overlay = match header.log {
        None => Overlay::default(),
        Some((at, len)) => log::replay(source, &header.log_guid, at, len)?,
    };
    Ok(Replayed { data_write_guid: header.data_write_guid, overlay })
}

/// The log is replayed once, whatever is missing later: `replayed` keeps its changes.
pub(crate) fn open(files: &dyn Files, replayed: &mut Option<Replayed>) -> Result<Opened<Map>> {
    let Replayed { data_write_guid, overlay } = match replayed {
        Some(replayed) => replayed,
        None => replayed.insert(replay(files)?),
    };
    let patched = Patched { files, overlay };
    let source = Source::image(&patched);
    let regions = region::read(source)?;
    let metadata = metadata::read(source, regions.metadata)?;
    let (size, block_bytes) = (metadata.size, metadata.block);
    let block = Unit::new(block_bytes).ok_or_else(|| Error::damaged("VHDX blocks are empty"))?;
    let per_bitmap = SECTORS_PER_BITMAP.saturating_mul(metadata.sector);
    let chunk = Unit::new(block.index(per_bitmap)).ok_or_else(|| Error::damaged("VHDX chunks are empty"))?;
    let blocks = block.count(size);
    let entries = if metadata.has_parent {
        chunk.count(blocks).saturating_mul(chunk.bytes().saturating_add(1))
    } else {
        blocks.saturating_add(chunk.index(blocks.saturating_sub(1)))
    };
    let (table, table_len) = regions.table;
    ensure!(
        entries.saturating_mul(8) <= table_len,
        "the block allocation table of the VHDX has {table_len} bytes for {entries} entries"
    );
    require!(
        metadata.parent.is_some() == metadata.has_parent,
        "the VHDX contradicts itself about its parent"
    );
    let variant = match (metadata.has_parent, metadata.is_fixed) {
        (true, _) => "differencing",
        (false, true) => "fixed",
        (false, false) => "dynamic",
    };
    let has_parent = metadata.has_parent;
    let map =
        Map { size, block, sector: metadata.sector, chunk, table, has_parent, overlay: overlay.clone() };
    Ok(Opened {
        size,
        unit: block_bytes,
        variant,
        parent: metadata.parent,
        identity: Some(Identity::Uuid(*data_write_guid)),
        map,
    })
}

/// The state and the place that a table entry tells.
fn decode(entry: u64) -> (u64, u64) {
    (entry & 7, entry >> 20 << 20)
}

impl Map {
    /// Bytes of a sector as the guest sees it.
    pub(crate) fn sector(&self) -> u32 {
        u32::try_from(self.sector).unwrap_or_default()
    }

    pub(crate) fn run(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        let index = self.block.index(guest);
        if self.has_parent && decode(self.entry(files, index)?.1).0 == PARTIALLY_PRESENT {
            return self.run_by_bitmap(files, guest, max_len);
        }
        self.block.run(guest, max_len, |index| self.block(files, index))
    }

    /// The place and the content of a block's table entry.
    fn entry(&self, files: &dyn Files, index: u64) -> Result<(u64, u64)> {
        let before = index.saturating_add(self.chunk.index(index));
        self.entry_number(files, before)
    }

    fn entry_number(&self, files: &dyn Files, number: u64) -> Result<(u64, u64)> {
        let at = self.table.saturating_add(number.saturating_mul(8));
        let patched = Patched { files, overlay: &self.overlay };
        Ok((at, Source::image(&patched).le64(at, "the block allocation table of the VHDX")?))
    }

    fn block(&self, files: &dyn Files, index: u64) -> Result<Units> {
        if self.block.start(index) >= self.size {
            return Ok(Units::NO_MORE);
        }
        let (at, entry) = self.entry(files, index)?;
        match decode(entry) {
            (NOT_PRESENT, _) => Ok(Kind::Hole.into()),
            // Undefined, zero, unmapped, and what version 0.95 called unmapped.
            (1 | ZERO | 3 | 5, _) => Ok(Kind::Zero.into()),
            (FULLY_PRESENT, offset) => {
                let offset = self.payload(offset).map_err(|e| e.at(FileIndex::IMAGE, at))?;
                Ok(Kind::Data { file: FileIndex::IMAGE, offset }.into())
            }
            (state, _) => {
                let message = format!("the block allocation table of the VHDX has a block in state {state}");
                Err(Error::damaged(message).at(FileIndex::IMAGE, at))
            }
        }
    }

    /// Checks the place of a block's data.
    fn payload(&self, offset: u64) -> Result<u64> {
        ensure!(offset >= MIB, "the block allocation table of the VHDX leads to the headers at {offset}");
        require!(
            !self.overlay.touches(offset, self.block.bytes()),
            "the log of the VHDX changes data of the disk; attach the image in Hyper-V once"
        );
        Ok(offset)
    }

    /// The run at `guest` within a block that has only some of its sectors. A bit of the bitmap, the lowest of each byte
    /// first, says whether the block or the parent holds a sector.
    fn run_by_bitmap(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        let (index, within) = (self.block.index(guest), self.block.within(guest));
        let (_, entry) = self.entry(files, index)?;
        let offset = self.payload(decode(entry).1)?;
        // Behind the entries of each chunk comes that of its bitmap.
        let per_chunk = self.chunk.bytes().saturating_add(1);
        let number = self.chunk.index(index).saturating_mul(per_chunk).saturating_add(self.chunk.bytes());
        let (at, bitmap) = self.entry_number(files, number)?;
        let (state, bitmap) = decode(bitmap);
        if state != FULLY_PRESENT {
            let message = "a bitmap of the VHDX is missing, of which a block needs a part";
            return Err(Error::damaged(message).at(FileIndex::IMAGE, at));
        }
        let rest = self.block.bytes().saturating_sub(within).min(max_len);
        let in_chunk = self.block.start(self.chunk.within(index)).saturating_add(within);
        let sector = |bytes: u64| bytes.checked_div(self.sector).unwrap_or_default();
        let first = sector(in_chunk);
        let last = sector(in_chunk.saturating_add(rest).saturating_add(self.sector).saturating_sub(1));
        let len = last.div_ceil(8).saturating_sub(first / 8);
        let patched = Patched { files, overlay: &self.overlay };
        let bytes =
            Source::image(&patched).vec(bitmap.saturating_add(first / 8), len, "a bitmap of the VHDX")?;
        let (here, sectors) = equal_bits(&bytes, (first % 8) as usize, |byte, bit| byte >> bit & 1 != 0);
        let past = in_chunk.checked_rem(self.sector).unwrap_or_default();
        let len = sectors.saturating_mul(self.sector).saturating_sub(past).min(rest);
        let kind = if here {
            Kind::Data { file: FileIndex::IMAGE, offset: offset.saturating_add(within) }
        } else {
            Kind::Hole
        };
        Ok(Run { kind, len })
    }
}
