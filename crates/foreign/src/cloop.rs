//! cloop version 2, the compressed loop device of Knoppix: a table of offsets, and blocks in zlib streams.
//!
//! Integers are big endian. The rules are those of QEMU's `block/cloop.c`, with smaller limits.

use crate::bytes::be32;
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::limits::MAX_PACKED_UNIT;
use crate::opened::Opened;
use crate::run::{Kind, Packed, Packing, Run};
use crate::units::{Unit, Units};

/// The first bytes of the file: it is a program for the shell.
pub const MAGIC: &[u8] = b"#!/bin/sh\n#V2.0 Format\n";
/// Where the size of a block stands; behind it, the number of blocks, then the table.
const BLOCK_SIZE_AT: u64 = 128;
const TABLE: u64 = 136;

/// The table of a cloop image.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    block: Unit,
    blocks: u32,
}

pub(crate) fn open(files: &dyn Files) -> Result<Opened<Map>> {
    let source = Source::image(files);
    let start: [u8; 23] = source.array(0, "the cloop header")?;
    ensure!(start.starts_with(MAGIC), "Image not in cloop format, version 2");
    let numbers: [u8; 8] = source.array(BLOCK_SIZE_AT, "the cloop header")?;
    let (block, blocks) = (be32(&numbers, 0), be32(&numbers, 4));
    ensure!(block > 0 && block.is_multiple_of(512), "cloop block size {block} must be a multiple of 512");
    let most = MAX_PACKED_UNIT >> 20;
    require!(u64::from(block) <= MAX_PACKED_UNIT, "cloop block size {block} must be {most} MB or less");
    source.check(TABLE, u64::from(blocks).saturating_add(1).saturating_mul(8), "the cloop offset table")?;
    let block = Unit::new(u64::from(block)).ok_or_else(|| Error::damaged("cloop blocks are empty"))?;
    let size = block.start(u64::from(blocks));
    let map = Map { block, blocks };
    Ok(Opened { size, unit: block.bytes(), variant: "cloop", parent: None, identity: None, map })
}

impl Map {
    pub(crate) fn run(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        self.block.run(guest, max_len, |index| self.block(files, index))
    }

    fn block(&self, files: &dyn Files, index: u64) -> Result<Units> {
        if index >= u64::from(self.blocks) {
            return Ok(Units::NO_MORE);
        }
        let source = Source::image(files);
        let at = TABLE.saturating_add(index.saturating_mul(8));
        let offset = source.be64(at, "the cloop offset table")?;
        let end = source.be64(at.saturating_add(8), "the cloop offset table")?;
        let len = end.saturating_sub(offset);
        if len == 0 || len > MAX_PACKED_UNIT.saturating_mul(2) || !source.holds(offset, len) {
            let message = format!(
                "cloop block {index} from {offset} to {end} does not lie in the file; it is cut off or damaged"
            );
            return Err(Error::damaged(message).at(FileIndex::IMAGE, at));
        }
        Ok(Kind::Packed(Packed {
            file: FileIndex::IMAGE,
            offset,
            len,
            packing: Packing::Zlib,
            start: self.block.start(index),
            unit: self.block.bytes(),
        })
        .into())
    }
}
