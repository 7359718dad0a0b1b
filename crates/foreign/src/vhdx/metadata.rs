//! The metadata region: sizes, and the parent.

use crate::bytes::{array, le16, le32, le64, utf16};
use crate::error::{Error, Result, ensure, require};
use crate::files::Source;
use crate::limits::{MAX_DISK, MAX_NAME};
use crate::parent::{Identity, Parent, ParentFormat, with_slashes};

/// Bytes of the table; items lie behind it.
pub(crate) const TABLE: u64 = 64 << 10;
/// Entries of the table at most.
const MOST: u16 = 2047;
/// Bytes of an item at most.
const MOST_ITEM: u64 = 1 << 20;

pub(crate) const FILE_PARAMETERS: [u8; 16] =
    [0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d, 0xb3, 0xb6, 0x33, 0xf0, 0xaa, 0x44, 0xe7, 0x6b];
pub(crate) const DISK_SIZE: [u8; 16] =
    [0x24, 0x42, 0xa5, 0x2f, 0x1b, 0xcd, 0x76, 0x48, 0xb2, 0x11, 0x5d, 0xbe, 0xd8, 0x3b, 0xf4, 0xb8];
pub(crate) const DISK_ID: [u8; 16] =
    [0xab, 0x12, 0xca, 0xbe, 0xe6, 0xb2, 0x23, 0x45, 0x93, 0xef, 0xc3, 0x09, 0xe0, 0x00, 0xc7, 0x46];
pub(crate) const LOGICAL_SECTOR: [u8; 16] =
    [0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47, 0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab, 0x5f];
pub(crate) const PHYSICAL_SECTOR: [u8; 16] =
    [0xc7, 0x48, 0xa3, 0xcd, 0x5d, 0x44, 0x71, 0x44, 0x9c, 0xc9, 0xe9, 0x88, 0x52, 0x51, 0xc5, 0x56];
const PARENT_LOCATOR: [u8; 16] =
    [0x2d, 0x5f, 0xd3, 0xa8, 0x0b, 0xb3, 0x4d, 0x45, 0xab, 0xf7, 0xd3, 0xd8, 0x48, 0x34, 0xab, 0x0c];
/// The only type of parent locator: a VHDX.
const LOCATOR_TYPE: [u8; 16] =
    [0xb7, 0xef, 0x4a, 0xb0, 0x9e, 0xd1, 0x81, 0x4a, 0xb7, 0x89, 0x25, 0xb8, 0xe9, 0x44, 0x59, 0x13];

/// The content of the metadata.
#[derive(Debug)]
pub(super) struct Metadata {
    /// Bytes of the disk, of a block, and of a sector as the guest sees it.
    pub(super) size: u64,
    pub(super) block: u64,
    pub(super) sector: u64,
    pub(super) has_parent: bool,
    /// Blocks stay allocated.
    pub(super) is_fixed: bool,
    pub(super) parent: Option<Parent>,
}

pub(super) fn read(source: Source<'_>, (region, region_len): (u64, u64)) -> Result<Metadata> {
    ensure!(region_len >= TABLE, "the metadata region of the VHDX has {region_len} bytes");
    let table = source.vec(region, TABLE, "the metadata table of the VHDX")?;
    ensure!(table.starts_with(b"metadata"), "the metadata table of the VHDX has the wrong signature");
    let count = le16(&table, 10);
    ensure!(count <= MOST, "the metadata table of the VHDX has {count} entries");
    let (mut parameters, mut size, mut sector, mut parent) = (None, None, None, None);
    for entry in table.get(32..).unwrap_or_default().as_chunks::<32>().0.iter().take(usize::from(count)) {
        let (at, len) = (u64::from(le32(entry, 16)), u64::from(le32(entry, 20)));
        let item = || {
            let inside = at >= TABLE && at.saturating_add(len) <= region_len;
            ensure!(
                inside && len <= MOST_ITEM,
                "a metadata item of the VHDX with {len} bytes at {at} is damaged"
            );
            source.vec(region.saturating_add(at), len, "a metadata item of the VHDX")
        };
        match array(entry, 0) {
            FILE_PARAMETERS => parameters = Some(item()?),
            DISK_SIZE => size = Some(le64(&item()?, 0)),
            LOGICAL_SECTOR => sector = Some(le32(&item()?, 0)),
            PARENT_LOCATOR => parent = Some(parse_locator(&item()?)?),
            DISK_ID | PHYSICAL_SECTOR => {}
            _ => require!(le32(entry, 24) & 4 == 0, "the VHDX has unknown metadata that is required"),
        }
    }
    let missing = |what: &str| Error::damaged(format!("the metadata of the VHDX does not tell {what}"));
    let parameters = parameters.ok_or_else(|| missing("the block size"))?;
    let (block, flags) = (le32(&parameters, 0), le32(&parameters, 4));
    ensure!(
        block.is_power_of_two() && (1 << 20..=256 << 20).contains(&block),
        "VHDX block size {block} is not a power of two from 1 MiB to 256 MiB"
    );
    let sector = sector.ok_or_else(|| missing("the sector size"))?;
    ensure!(matches!(sector, 512 | 4096), "VHDX sector size {sector}");
    let size = size.ok_or_else(|| missing("the disk size"))?;
    ensure!(
        size <= MAX_DISK && size.is_multiple_of(u64::from(sector)),
        "VHDX disk size {size} is too large or not a multiple of the sector size {sector}"
    );
    Ok(Metadata {
        size,
        block: u64::from(block),
        sector: u64::from(sector),
        has_parent: flags & 2 != 0,
        is_fixed: flags & 1 != 0,
        parent,
    })
}

/// A list of keys and values in UTF-16.
fn parse_locator(item: &[u8]) -> Result<Parent> {
    require!(array(item, 0) == LOCATOR_TYPE, "the VHDX names its parent in an unknown way");
    let count = usize::from(le16(item, 18));
    let text = |at: u32, len: u16| -> Result<String> {
        let start = at as usize;
        let bytes = item.get(start..start.saturating_add(usize::from(len)));
        let bytes = bytes.filter(|bytes| bytes.len() as u64 <= MAX_NAME.saturating_mul(4));
        Ok(utf16(
            bytes.ok_or_else(|| Error::damaged("the parent locator of the VHDX is damaged"))?,
            u16::from_le_bytes,
        ))
    };
    let (mut identities, mut paths) = (Vec::new(), [None, None, None]);
    let [relative, volume, absolute] = &mut paths;
    for entry in item.get(20..).unwrap_or_default().as_chunks::<12>().0.iter().take(count) {
        let key = text(le32(entry, 0), le16(entry, 8))?;
        let value = || text(le32(entry, 4), le16(entry, 10));
        match key.as_str() {
            "parent_linkage" | "parent_linkage2" => {
                identities.extend(parse_guid(&value()?).map(Identity::Uuid));
            }
            "relative_path" => *relative = Some(value()?),
            "volume_path" => *volume = Some(value()?),
            "absolute_win32_path" => *absolute = Some(value()?),
            _ => {}
        }
    }
    let name = paths.into_iter().flatten().find(|path| !path.is_empty());
    let name = name.ok_or_else(|| Error::damaged("the parent locator of the VHDX tells no path"))?;
    Ok(Parent { name: with_slashes(&name), format: ParentFormat::Same, identities })
}

/// The bytes in the file of a GUID in braces: its first three parts are little endian.
fn parse_guid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim_matches(['{', '}']).split('-').collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    let bytes = number.to_be_bytes();
    let order = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    Some(order.map(|at: usize| bytes.get(at).copied().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_lie_in_the_file_with_their_first_parts_reversed() {
        assert_eq!(
            parse_guid("{2DC27766-F623-4200-9D64-115E9BFD4A08}").unwrap()[..8],
            [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0, 0x42]
        );
        assert_eq!(parse_guid("{2DC27766}"), None);
    }
}
