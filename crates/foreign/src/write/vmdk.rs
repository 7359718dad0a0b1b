//! A new VMDK of one extent: sparse, or flat in a file of its own. The rules are those of [`crate::vmdk`].

use super::blocks::BlockTable;
use super::bytes::{pad, put, put_le16, put_le32, put_le64};
use super::options::Allocation;
use super::options::{Birth, NewVmdk, VmdkAdapter, VmdkKind};
use super::places::{Part, Places};
use crate::error::{Error, Result, printable, require};
use crate::vmdk::SPARSE_MAGIC;

/// Bytes of a grain, and of the tables' unit.
pub(super) const GRAIN: u64 = 65536;
pub(super) const SECTOR: u64 = 512;
/// Grains of a table, and its sectors.
pub(super) const TABLE_ENTRIES: u64 = 512;
pub(super) const TABLE_SECTORS: u64 = 4;
/// Sector and sectors of the descriptor.
pub(super) const DESCRIPTOR_AT: u64 = 1;
pub(super) const DESCRIPTOR_SECTORS: u64 = 20;
/// Tables at most: a directory of 64 MiB, for a disk of 512 TiB.
pub(super) const MOST_TABLES: u64 = 16 << 20;
/// Tables that are written at once, if any of them has a grain.
const TABLES_PART: u64 = 256;
/// Flags of the header.
pub(super) const NEWLINES: u32 = 1;
const SECOND_DIRECTORY: u32 = 1 << 1;
const ZERO_GRAINS: u32 = 1 << 2;
/// Bytes by which a reader notices that the file went through a transfer as text.
const CHECK_BYTES: [u8; 4] = *b"\n \r\n";

/// The fields of the header that differ.
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) flags: u32,
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Sectors of the directories and of the first grain.
    pub(super) second_directory: u64,
    pub(super) directory: u64,
    pub(super) overhead: u64,
    pub(super) compression: u16,
}

impl Header {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR as usize];
        put(&mut bytes, 0, SPARSE_MAGIC);
        put_le32(&mut bytes, 4, self.version);
        put_le32(&mut bytes, 8, self.flags);
        for (at, value) in [
            (12, self.size / SECTOR),
            (20, GRAIN / SECTOR),
            (28, DESCRIPTOR_AT),
            (36, DESCRIPTOR_SECTORS),
            (48, self.second_directory),
            (56, self.directory),
            (64, self.overhead),
        ] {
            put_le64(&mut bytes, at, value);
        }
        put_le32(&mut bytes, 44, TABLE_ENTRIES as u32);
        put(&mut bytes, 73, &CHECK_BYTES);
        put_le16(&mut bytes, 77, self.compression);
        bytes
    }
}

fn adapter_name(adapter: VmdkAdapter) -> &'static str {
    match adapter {
        VmdkAdapter::Ide => "ide",
        VmdkAdapter::BusLogic => "buslogic",
        VmdkAdapter::LsiLogic => "lsilogic",
        VmdkAdapter::LegacyEsx => "legacyESX",
    }
}

/// Whether a name can't stand in a descriptor: a quote would end it, and a control character the line.
fn breaks_line(c: char) -> bool {
    c.is_control() || c == '"'
}

/// The text that describes the disk, padded to its sectors. `name` is the last part of the file's name.
pub(super) fn descriptor(new: &NewVmdk, size: u64, name: &str, birth: &Birth) -> Result<Vec<u8>> {
    // Of an image in one file the name does not count.
    let name: String = name.chars().map(|c| if breaks_line(c) { '_' } else { c }).take(255).collect();
    let mut bytes = description(new, size, &format!("SPARSE \"{name}\""), birth)?;
    let most = (DESCRIPTOR_SECTORS * SECTOR) as usize;
    require!(bytes.len() < most, "the descriptor of the VMDK has no room for the name of its file");
    pad(&mut bytes, most);
    Ok(bytes)
}

/// The layout of the file with the bytes of the disk, whose name is `name`, and the text of the image file.
pub(super) fn flat(new: &NewVmdk, size: u64, name: &str, birth: &Birth) -> Result<(Places, Vec<u8>)> {
    require!(!new.zeroed_grain, "a flat VMDK has no zeroed grains");
    let is_readable = !name.contains(|c: char| breaks_line(c) || c == char::REPLACEMENT_CHARACTER);
    require!(is_readable, "a VMDK can't name the file '{}': choose another name", printable(name));
    let text = description(new, size, &format!("FLAT \"{name}\" 0"), birth)?;
    let places = Places {
        size,
        block: SECTOR,
        first: 0,
        stride: SECTOR,
        allocation: Allocation::Fixed,
        most: 0,
        mark: Vec::new(),
    };
    Ok((places, text))
}

/// The text that describes a disk of one extent.
fn description(new: &NewVmdk, size: u64, extent: &str, birth: &Birth) -> Result<Vec<u8>> {
    require!(size > 0, "a VMDK has no disks of 0 bytes: choose another format");
    let heads: u64 = if new.adapter == VmdkAdapter::Ide { 16 } else { 255 };
    let (sectors, per_track) = (size / SECTOR, 63);
    let cylinders = sectors.checked_div(heads.saturating_mul(per_track)).unwrap_or(0);
    let kind = match new.kind {
        VmdkKind::MonolithicSparse => "monolithicSparse",
        VmdkKind::StreamOptimized => "streamOptimized",
        VmdkKind::MonolithicFlat => "monolithicFlat",
    };
    let encoding = if extent.is_ascii() { "" } else { "encoding=\"UTF-8\"\n" };
    let [a, b, c, d, ..] = birth.uuid(0);
    // 0xffffffff is the identity of no image, 0xfffffffe that of one whose parent was lost.
    let identity = u32::from_le_bytes([a, b, c, d & 0x7f]);
    let adapter = adapter_name(new.adapter);
    let (hardware, tools) = (new.hardware_version, new.tools_version);
    let text = format!(
        "# Disk DescriptorFile\n\
         version=1\n\
         {encoding}\
         CID={identity:08x}\n\
         parentCID=ffffffff\n\
         createType=\"{kind}\"\n\
         \n\
         # Extent description\n\
         RW {sectors} {extent}\n\
         \n\
         # The Disk Data Base\n\
         #DDB\n\
         \n\
         ddb.virtualHWVersion = \"{hardware}\"\n\
         ddb.geometry.cylinders = \"{cylinders}\"\n\
         ddb.geometry.heads = \"{heads}\"\n\
         ddb.geometry.sectors = \"{per_track}\"\n\
         ddb.adapterType = \"{adapter}\"\n\
         ddb.toolsVersion = \"{tools}\"\n"
    );
    Ok(text.into_bytes())
}

/// Tables of a disk of `size` bytes.
pub(super) fn tables_of(size: u64) -> Result<u64> {
    let tables = size.div_ceil(GRAIN * TABLE_ENTRIES);
    require!(tables <= MOST_TABLES, "a VMDK has no disks of more than 512 TiB");
    Ok(tables)
}

#[derive(Debug, Clone)]
pub(super) struct Tables {
    header: Vec<u8>,
    descriptor: Vec<u8>,
    count: u64,
    /// Sectors of the two directories; behind each are its tables.
    directories: [u64; 2],
    directory_sectors: u64,
}

pub(super) fn layout(new: &NewVmdk, size: u64, name: &str, birth: &Birth) -> Result<(Places, Tables)> {
    let count = tables_of(size)?;
    let directory_sectors = count.saturating_mul(4).div_ceil(SECTOR);
    let second = DESCRIPTOR_AT + DESCRIPTOR_SECTORS;
    let both = directory_sectors.saturating_add(count.saturating_mul(TABLE_SECTORS));
    let first = second.saturating_add(both);
    let overhead = first.saturating_add(both).checked_next_multiple_of(GRAIN / SECTOR);
    let overhead = overhead.ok_or_else(|| Error::unsupported("the VMDK disk is too large"))?;
    let header = Header {
        version: if new.zeroed_grain { 2 } else { 1 },
        flags: NEWLINES | SECOND_DIRECTORY | if new.zeroed_grain { ZERO_GRAINS } else { 0 },
        size,
        second_directory: second,
        directory: first,
        overhead,
        compression: 0,
    };
    // Places are sectors of 32 bits.
    let most = u64::from(u32::MAX).saturating_sub(overhead) / (GRAIN / SECTOR);
    let places = Places {
        size,
        block: GRAIN,
        first: overhead.saturating_mul(SECTOR),
        stride: GRAIN,
        allocation: Allocation::Dynamic,
        most: most as u32,
        mark: Vec::new(),
    };
    let tables = Tables {
        header: header.encode(),
        descriptor: descriptor(new, size, name, birth)?,
        count,
        directories: [second, first],
        directory_sectors,
    };
    Ok((places, tables))
}

impl Tables {
    pub(super) fn tables<'a>(
        &'a self,
        places: &'a Places,
        table: &'a BlockTable,
    ) -> impl Iterator<Item = Part> + use<'a> {
        self.directories.into_iter().flat_map(move |directory| {
            let tables_at = directory.saturating_add(self.directory_sectors);
            let entries = (0..self.count).flat_map(move |number| {
                (tables_at.saturating_add(number.saturating_mul(TABLE_SECTORS)) as u32).to_le_bytes()
            });
            let directory = Part { offset: directory.saturating_mul(SECTOR), bytes: entries.collect() };
            let parts = (0..self.count.div_ceil(TABLES_PART)).filter_map(move |part| {
                let start = part.saturating_mul(TABLES_PART);
                let end = start.saturating_add(TABLES_PART).min(self.count);
                if !(start..end).any(|leaf| table.has_leaf(leaf as usize)) {
                    return None;
                }
                let grains = start.saturating_mul(TABLE_ENTRIES)..end.saturating_mul(TABLE_ENTRIES);
                let entry =
                    |index| places.of(table, index).map_or(0, |place| (places.host(place) / SECTOR) as u32);
                let bytes = grains.flat_map(|index| entry(index).to_le_bytes()).collect();
                let at = tables_at.saturating_add(start.saturating_mul(TABLE_SECTORS));
                Some(Part { offset: at.saturating_mul(SECTOR), bytes })
            });
            std::iter::once(directory).chain(parts)
        })
    }

    pub(super) fn headers(&self) -> Vec<Part> {
        let mut bytes = self.header.clone();
        bytes.extend(&self.descriptor);
        vec![Part { offset: 0, bytes }]
    }
}
