//! VHD, the format of Virtual PC, Hyper-V and Azure; QEMU calls it "vpc".
//!
//! Integers are big endian. Rules: Microsoft's "Virtual Hard Disk Image Format Specification", version 1.0.

use crate::bytes::{array, be16, be32, be64, utf16};
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::limits::MAX_NAME;
use crate::opened::Opened;
use crate::parent::{Identity, Parent, ParentFormat, with_slashes};
use crate::run::{Kind, Run};
use crate::units::{Unit, Units};

/// The first bytes of the footer, and of its copy.
pub const COOKIE: &[u8; 8] = b"conectix";
/// The first bytes of the header of a dynamic image.
pub(crate) const DYNAMIC_COOKIE: &[u8; 8] = b"cxsparse";
/// Bytes of the footer.
const FOOTER: u64 = 512;
/// The table entry of a block that was never written.
pub(crate) const UNALLOCATED: u32 = u32::MAX;
/// The size of the disk that cylinders, heads and sectors tell, where these are at their limit: it says nothing.
const LARGEST_GEOMETRY: u64 = 65535 * 16 * 255 * 512;
/// Programs of which the disk is as large as cylinders, heads and sectors say: Virtual PC, Virtual Server, QEMU.
const SIZE_BY_GEOMETRY: [&[u8; 4]; 3] = [b"vpc ", b"vs  ", b"qemu"];

/// The tables of a VHD.
#[derive(Debug, Clone)]
pub(crate) enum Map {
    Fixed { size: u64 },
    Blocks(Blocks),
}

/// The table of a dynamic or differencing image.
#[derive(Debug, Clone)]
pub(crate) struct Blocks {
    block: Unit,
    table: u64,
    entries: u32,
    /// Bytes of the bitmap before each block.
    bitmap: u64,
    differencing: bool,
}

/// The sum that a structure has to have, whose own sum is at `sum_at`.
pub(crate) fn checksum(bytes: &[u8], sum_at: usize) -> u32 {
    let bytes = bytes.iter().enumerate();
    let counted = bytes.filter(|(at, _)| at.checked_sub(sum_at).is_none_or(|within| within >= 4));
    !counted.fold(0u32, |sum, (_, byte)| sum.wrapping_add(u32::from(*byte)))
}

/// Bytes of the disk. Some writers mean the size that they tell, others mean the geometry, rounded down.
fn disk_size(footer: &[u8; 512]) -> u64 {
    let current = be64(footer, 48);
    let [heads, sectors] = array(footer, 58);
    let tracks = u64::from(be16(footer, 56)).saturating_mul(u64::from(heads));
    let geometry = tracks.saturating_mul(u64::from(sectors)).saturating_mul(512);
    let by_geometry = SIZE_BY_GEOMETRY.contains(&&array(footer, 28));
    if by_geometry && geometry != LARGEST_GEOMETRY { geometry } else { current & !511 }
}

fn check_footer(footer: &[u8; 512], at: u64) -> Result<()> {
    let (told, sum) = (be32(footer, 64), checksum(footer, 64));
    if told != sum {
        let message = format!("the VHD footer has the wrong checksum ({told:08x}, {sum:08x} expected)");
        return Err(Error::damaged(message).at(FileIndex::IMAGE, at));
    }
    let version = be32(footer, 12);
    require!(version >> 16 == 1, "unsupported VHD image (version {}.{})", version >> 16, version & 0xffff);
    Ok(())
}

pub(crate) fn open(files: &dyn Files) -> Result<Opened<Map>> {
    let source = Source::image(files);
    let first: [u8; 512] = source.array(0, "the VHD footer")?;
    if first.starts_with(COOKIE) && matches!(be32(&first, 60), 3 | 4) {
        return open_dynamic(source, &first);
    }
    let (at, footer) = last_footer(source)?;
    ensure!(footer.starts_with(COOKIE), "invalid VPC image: no footer at its start or end");
    check_footer(&footer, at)?;
    match be32(&footer, 60) {
        2 => {}
        3 | 4 => {
            return Err(Error::damaged("the copy of the VHD footer at the start of the file is missing"));
        }
        other => return Err(Error::unsupported(format!("unsupported VHD image (type {other})"))),
    }
    let size = disk_size(&footer);
    ensure!(
        size <= at,
        "the VHD disk of {size} bytes does not fit in a file of {}: it is cut off",
        source.len()
    );
    let map = Map::Fixed { size };
    Ok(Opened {
        size,
        unit: 0,
        variant: "fixed",
        parent: None,
        identity: Some(Identity::Uuid(array(&footer, 68))),
        map,
    })
}

/// The footer at the end of the file, and its offset. Old versions of Virtual PC wrote one byte less, which is 0.
fn last_footer(source: Source<'_>) -> Result<(u64, [u8; 512])> {
    let at = source.len().saturating_sub(FOOTER);
    let footer: [u8; 512] = source.array(at, "the VHD footer")?;
    if footer.starts_with(COOKIE) {
        return Ok((at, footer));
    }
    let at = at.saturating_add(1);
    let mut shorter = [0; 512];
    let bytes = source.vec(at, FOOTER.saturating_sub(1), "the VHD footer")?;
    for (to, from) in shorter.iter_mut().zip(bytes) {
        *to = from;
    }
    Ok((at, shorter))
}

fn open_dynamic(source: Source<'_>, footer: &[u8; 512]) -> Result<Opened<Map>> {
    check_footer(footer, 0)?;
    let differencing = be32(footer, 60) == 4;
    let at = be64(footer, 16);
    let header: [u8; 1024] = source.array(at, "the header of the dynamic VHD")?;
    ensure!(header.starts_with(DYNAMIC_COOKIE), "the header of the dynamic VHD is missing at {at}");
    let (told, sum) = (be32(&header, 36), checksum(&header, 36));
    if told != sum {
        let message =
            format!("the header of the dynamic VHD has the wrong checksum ({told:08x}, {sum:08x} expected)");
        return Err(Error::damaged(message).at(FileIndex::IMAGE, at));
    }
    let block = be32(&header, 32);
    ensure!(block.is_power_of_two() && block >= 512, "Invalid block size {block} of the VHD");
    require!(block <= 256 << 20, "VHD blocks of {block} bytes are too large");
    let block = Unit::new(u64::from(block)).ok_or_else(|| Error::damaged("a VHD has empty blocks"))?;
    let (table, entries) = (be64(&header, 16), be32(&header, 28));
    let size = disk_size(footer);
    ensure!(
        size <= block.start(u64::from(entries)),
        "Page Allocation Table of the VHD is too small: {entries} entries for {size} bytes"
    );
    source.check(table, u64::from(entries).saturating_mul(4), "the block allocation table of the VHD")?;
    let parent = if differencing { Some(parent(source, &header)?) } else { None };
    let bitmap = (block.bytes() / 512).div_ceil(8).next_multiple_of(512);
    let map = Map::Blocks(Blocks { block, table, entries, bitmap, differencing });
    Ok(Opened {
        size,
        unit: block.bytes(),
        variant: if differencing { "differencing" } else { "dynamic" },
        parent,
        identity: Some(Identity::Uuid(array(footer, 68))),
        map,
    })
}

/// The parent: by its relative path if that is told, else by the name that the child keeps, or by an absolute path.
fn parent(source: Source<'_>, header: &[u8; 1024]) -> Result<Parent> {
    let identities = vec![Identity::Uuid(array(header, 40))];
    let locators = header.get(576..768).unwrap_or_default().as_chunks::<24>().0;
    let of_platform = |code: &[u8; 4]| locators.iter().find(|locator| locator.starts_with(code));
    let mut name = String::new();
    for code in [b"W2ru", b"W2ku"] {
        if let Some(locator) = of_platform(code) {
            let (len, at) = (u64::from(be32(locator, 8)), be64(locator, 16));
            ensure!(len <= MAX_NAME.saturating_mul(2), "the name of the VHD's parent has {len} bytes");
            name = utf16(&source.vec(at, len, "the name of the VHD's parent")?, u16::from_le_bytes);
        }
        if !name.is_empty() {
            break;
        }
    }
    if name.is_empty() {
        name = utf16(header.get(64..576).unwrap_or_default(), u16::from_be_bytes);
    }
    ensure!(!name.is_empty(), "the differencing VHD does not name its parent");
    Ok(Parent { name: with_slashes(&name), format: ParentFormat::Same, identities })
}

impl Map {
    pub(crate) fn run(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        match self {
            Self::Fixed { size } => {
                let kind = Kind::Data { file: FileIndex::IMAGE, offset: guest };
                Ok(Run { kind, len: max_len.min(size.saturating_sub(guest)) })
            }
            Self::Blocks(blocks) if blocks.differencing => blocks.run_by_bitmap(files, guest, max_len),
            Self::Blocks(blocks) => blocks.block.run(guest, max_len, |index| blocks.block(files, index)),
        }
    }
}

impl Blocks {
    /// The data of a block, behind its bitmap.
    fn block(&self, files: &dyn Files, index: u64) -> Result<Units> {
        match self.offset(files, index)? {
            None if index >= u64::from(self.entries) => Ok(Units::NO_MORE),
            None => Ok(Kind::Hole.into()),
            Some(offset) => Ok(Kind::Data { file: FileIndex::IMAGE, offset }.into()),
        }
    }

    /// The offset of a block's data, if it has any.
    fn offset(&self, files: &dyn Files, index: u64) -> Result<Option<u64>> {
        if index >= u64::from(self.entries) {
            return Ok(None);
        }
        let at = self.table.saturating_add(index.saturating_mul(4));
        let entry = Source::image(files).be32(at, "the block allocation table of the VHD")?;
        let offset = u64::from(entry).saturating_mul(512).saturating_add(self.bitmap);
        Ok((entry != UNALLOCATED).then_some(offset))
    }

    /// The run at `guest` within one block. A bit of the bitmap, the highest of each byte first, says whether the block or
    /// the parent holds a sector.
    fn run_by_bitmap(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        let (index, within) = (self.block.index(guest), self.block.within(guest));
        let rest = self.block.bytes().saturating_sub(within).min(max_len);
        let Some(offset) = self.offset(files, index)? else {
            return Ok(Run { kind: Kind::Hole, len: rest });
        };
        let bitmap = offset.saturating_sub(self.bitmap);
        let (first, last) = (within / 512, within.saturating_add(rest).div_ceil(512));
        let bytes_at = bitmap.saturating_add(first / 8);
        let bytes = Source::image(files).vec(
            bytes_at,
            last.div_ceil(8).saturating_sub(first / 8),
            "a bitmap of the VHD",
        )?;
        let (here, sectors) =
            crate::bytes::equal_bits(&bytes, (first % 8) as usize, |byte, bit| byte << bit & 0x80 != 0);
        let len = sectors.saturating_mul(512).saturating_sub(within % 512).min(rest);
        let kind = if here {
            Kind::Data { file: FileIndex::IMAGE, offset: offset.saturating_add(within) }
        } else {
            Kind::Hole
        };
        Ok(Run { kind, len })
    }
}
