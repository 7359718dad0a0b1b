//! VDI, the format of VirtualBox: a header, and a table with an entry for each block of the disk.
//!
//! All integers are little endian. The rules are those of QEMU's `block/vdi.c`, except that blocks may be of any power of
//! two from 4 KiB to 256 MiB.

use crate::bytes::{array, le32, le64};
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::opened::Opened;
use crate::parent::{Identity, Parent, ParentFormat};
use crate::run::{Kind, Run};
use crate::units::{Unit, Units};

/// At offset 64 of the file.
pub const SIGNATURE: u32 = 0xbeda_107f;
/// Versions 1.1; the only one that is in use.
pub(crate) const VERSION: u32 = 0x0001_0001;
/// Table entries of blocks that were never written, and of blocks that were given up.
pub(crate) const UNALLOCATED: u32 = 0xffff_ffff;
const DISCARDED: u32 = 0xffff_fffe;

/// The table of a VDI.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    block: Unit,
    table: u64,
    data: u64,
    blocks: u32,
}

pub(crate) fn open(files: &dyn Files) -> Result<Opened<Map>> {
    let source = Source::image(files);
    let header: [u8; 512] = source.array(0, "the VDI header")?;
    let signature = le32(&header, 0x40);
    ensure!(signature == SIGNATURE, "Image not in VDI format (bad signature {signature:08x})");
    let version = le32(&header, 0x44);
    require!(version == VERSION, "unsupported VDI image (version {}.{})", version >> 16, version & 0xffff);
    let variant = match le32(&header, 0x4c) {
        1 => "dynamic",
        2 => "static",
        3 => return Err(Error::unsupported("VDI undo images are not supported")),
        4 => "differencing",
        other => return Err(Error::unsupported(format!("unsupported VDI image (type {other})"))),
    };
    let (table, data) = (u64::from(le32(&header, 0x154)), u64::from(le32(&header, 0x158)));
    ensure!(table % 512 == 0, "the VDI block map at {table} does not begin at a sector");
    ensure!(data % 512 == 0, "the VDI data at {data} does not begin at a sector");
    let sector = le32(&header, 0x168);
    require!(sector == 512, "unsupported VDI image (sector size {sector} is not 512)");
    let block = le32(&header, 0x178);
    require!(
        block.is_power_of_two() && (4096..=256 << 20).contains(&block),
        "unsupported VDI image (block size {block})"
    );
    require!(le32(&header, 0x17c) == 0, "unsupported VDI image (blocks with extra data)");
    let uuid = |at| array::<16>(&header, at);
    let identity = |image, content| Identity::Uuids { image: uuid(image), content: uuid(content) };
    let parent = if variant == "differencing" {
        ensure!(uuid(0x1a8) != [0; 16], "the differencing VDI does not tell its parent");
        let identities = vec![identity(0x1a8, 0x1b8)];
        Some(Parent { name: String::new(), format: ParentFormat::Same, identities })
    } else {
        require!(uuid(0x1a8) == [0; 16], "unsupported VDI image (non-NULL link UUID)");
        require!(uuid(0x1b8) == [0; 16], "unsupported VDI image (non-NULL parent UUID)");
        None
    };
    let size = le64(&header, 0x170);
    let blocks = le32(&header, 0x180);
    let block = Unit::new(u64::from(block)).ok_or_else(|| Error::damaged("a VDI has empty blocks"))?;
    ensure!(
        size <= block.start(u64::from(blocks)),
        "the VDI disk of {size} bytes is larger than its {blocks} blocks"
    );
    source.check(table, u64::from(blocks).saturating_mul(4), "the VDI block map")?;
    let size =
        size.checked_next_multiple_of(512).ok_or_else(|| Error::damaged("the VDI disk is too large"))?;
    let map = Map { block, table, data, blocks };
    let identity = Some(identity(0x188, 0x198));
    Ok(Opened { size, unit: block.bytes(), variant, parent, identity, map })
}

impl Map {
    pub(crate) fn run(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        self.block.run(guest, max_len, |index| self.block(files, index))
    }

    fn block(&self, files: &dyn Files, index: u64) -> Result<Units> {
        if index >= u64::from(self.blocks) {
            return Ok(Units::NO_MORE);
        }
        let at = self.table.saturating_add(index.saturating_mul(4));
        let entry = Source::image(files).le32(at, "the VDI block map")?;
        if entry == UNALLOCATED {
            return Ok(Kind::Hole.into());
        }
        if entry == DISCARDED {
            return Ok(Kind::Zero.into());
        }
        if entry >= self.blocks {
            let message = format!("the VDI block map leads to block {entry} of {}", self.blocks);
            return Err(Error::damaged(message).at(FileIndex::IMAGE, at));
        }
        let offset = self.data.saturating_add(self.block.start(u64::from(entry)));
        Ok(Kind::Data { file: FileIndex::IMAGE, offset }.into())
    }
}
