//! A new VDI. The rules are those of [`crate::vdi`].

use super::blocks::BlockTable;
use super::bytes::{put, put_le32, put_le64};
use super::options::Allocation;
use super::options::{Birth, NewVdi};
use super::places::{Part, Places, TABLE_PART};
use crate::error::{Error, Result, require};
use crate::vdi::{SIGNATURE, UNALLOCATED, VERSION};

/// Offset of the table, bytes.
const TABLE_AT: u64 = 512;
/// Data begins at a multiple of so many bytes, as VirtualBox has it.
const DATA_ALIGNMENT: u64 = 1 << 20;
/// Bytes of the header behind its signature and version.
const HEADER_BYTES: u32 = 0x180;
/// Blocks at most: QEMU opens no more.
const MOST_BLOCKS: u32 = 0x1fff_ffff;
/// The text at the start. Nobody compares it.
const TEXT: &[u8] = b"<<< zebu VM Virtual Disk Image >>>\n";

#[derive(Debug, Clone)]
pub(super) struct Tables {
    birth: Birth,
}

pub(super) fn layout(new: &NewVdi, size: u64, birth: &Birth) -> Result<(Places, Tables)> {
    let block = new.block_size;
    require!(
        block.is_power_of_two() && (4096..=256 << 20).contains(&block),
        "VDI block size {block} is not a power of two from 4 KiB to 256 MiB"
    );
    let block = u64::from(block);
    let blocks = size.div_ceil(block.max(1));
    require!(blocks <= u64::from(MOST_BLOCKS), "a VDI has no disks of {size} bytes");
    let first = TABLE_AT.saturating_add(blocks.saturating_mul(4));
    let first = first.checked_next_multiple_of(DATA_ALIGNMENT);
    let first = first.ok_or_else(|| Error::unsupported("the VDI disk is too large"))?;
    let places = Places {
        size,
        block,
        first,
        stride: block,
        allocation: new.allocation,
        most: MOST_BLOCKS,
        mark: Vec::new(),
    };
    Ok((places, Tables { birth: *birth }))
}

impl Tables {
    pub(super) fn tables<'a>(
        places: &'a Places,
        table: &'a BlockTable,
    ) -> impl Iterator<Item = Part> + use<'a> {
        let entries = TABLE_PART / 4;
        (0..places.blocks().div_ceil(entries)).map(move |part| {
            let start = part.saturating_mul(entries);
            let end = start.saturating_add(entries).min(places.blocks());
            let entry = |index| places.of(table, index).map_or(UNALLOCATED, |place| place as u32);
            let bytes = (start..end).flat_map(|index| entry(index).to_le_bytes()).collect();
            Part { offset: TABLE_AT.saturating_add(start.saturating_mul(4)), bytes }
        })
    }

    pub(super) fn headers(&self, places: &Places, used: u32) -> Vec<Part> {
        let mut header = vec![0; 512];
        let blocks = places.blocks() as u32;
        let (kind, allocated) = match places.allocation {
            Allocation::Dynamic => (1, used),
            Allocation::Fixed => (2, blocks),
        };
        put(&mut header, 0, TEXT);
        for (at, value) in [
            (0x40, SIGNATURE),
            (0x44, VERSION),
            (0x48, HEADER_BYTES),
            (0x4c, kind),
            (0x154, TABLE_AT as u32),
            (0x158, places.first as u32),
            (0x168, 512),
            (0x178, places.block as u32),
            (0x180, blocks),
            (0x184, allocated),
        ] {
            put_le32(&mut header, at, value);
        }
        put_le64(&mut header, 0x170, places.size);
        put(&mut header, 0x188, &self.birth.uuid(0));
        put(&mut header, 0x198, &self.birth.uuid(1));
        vec![Part { offset: 0, bytes: header }]
    }
}
