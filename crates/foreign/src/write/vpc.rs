//! A new VHD. The rules are those of [`crate::vpc`].

use super::blocks::BlockTable;
use super::bytes::{put, put_be16, put_be32, put_be64};
use super::options::Allocation;
use super::options::{Birth, NewVpc, VpcSize};
use super::places::{Part, Places, TABLE_PART};
use crate::error::{Error, Result, require};
use crate::vpc::{COOKIE, DYNAMIC_COOKIE, UNALLOCATED, checksum};

/// Bytes of a block. (The specification allows others; Virtual PC does not.)
const BLOCK: u64 = 2 << 20;
/// Bytes of the bitmap before a block: a bit for each sector.
const BITMAP: u64 = 512;
/// Data of blocks begins at multiples of so many bytes.
const ALIGNMENT: u64 = 4096;
/// Offsets of the header of a dynamic image, and of its table.
const HEADER_AT: u64 = 512;
const TABLE_AT: u64 = 1536;
/// Bytes of the footer.
pub(super) const FOOTER: u64 = 512;
/// Sectors of the largest disk: 2040 GiB.
const MOST_SECTORS: u64 = 0xff00_0000;
/// Sectors of the largest disk that cylinders, heads and sectors can express.
const MOST_BY_GEOMETRY: u64 = 65535 * 16 * 255;
/// Seconds from 1970 to 2000, where time begins for a VHD.
const YEAR_2000: u64 = 946_684_800;

/// Cylinders, heads and sectors of a track.
type Geometry = (u64, u64, u64);

/// The geometry of the specification's appendix for a disk of so many sectors; the disk may be a little larger.
fn geometry(sectors: u64) -> Geometry {
    let sectors = sectors.min(MOST_BY_GEOMETRY);
    if sectors >= 65535 * 16 * 63 {
        return (sectors / 255 / 16, 16, 255);
    }
    let (mut per_track, mut tracks) = (17, sectors / 17);
    let mut heads = tracks.div_ceil(1024).max(4);
    if tracks >= heads.saturating_mul(1024) || heads > 16 {
        (per_track, heads, tracks) = (31, 16, sectors / 31);
    }
    if tracks >= heads.saturating_mul(1024) {
        (per_track, heads, tracks) = (63, 16, sectors / 63);
    }
    (tracks.checked_div(heads).unwrap_or(0), heads, per_track)
}

fn sectors_of((cylinders, heads, per_track): Geometry) -> u64 {
    cylinders.saturating_mul(heads).saturating_mul(per_track)
}

/// The first geometry that holds so many sectors; none if it is at its limit.
fn geometry_for(sectors: u64) -> Option<Geometry> {
    let mut asked = sectors;
    loop {
        let found = geometry(asked);
        if sectors_of(found) >= MOST_BY_GEOMETRY || asked >= MOST_BY_GEOMETRY {
            return None;
        }
        if sectors_of(found) >= sectors {
            return Some(found);
        }
        asked = asked.saturating_add(1);
    }
}

/// Bytes of the disk for one of `asked` bytes, whole sectors, and its geometry. Where the size counts and not the geometry,
/// that is at its limit, so that it says nothing.
fn disk(new: &NewVpc, asked: u64) -> Result<(u64, Geometry)> {
    const SAYS_NOTHING: Geometry = (65535, 16, 255);
    let (size, geometry) = match (new.size, new.allocation) {
        (VpcSize::Exact, Allocation::Fixed) => {
            (asked.checked_next_multiple_of(1 << 20).unwrap_or(u64::MAX), SAYS_NOTHING)
        }
        (VpcSize::Exact, Allocation::Dynamic) => (asked, SAYS_NOTHING),
        (VpcSize::ByGeometry, _) => match geometry_for(asked / 512) {
            Some(geometry) => (sectors_of(geometry).saturating_mul(512), geometry),
            None => (asked, SAYS_NOTHING),
        },
    };
    // Its footer would stand at the start of the file, where readers take it for the copy that a dynamic one has there.
    require!(
        size > 0 || new.allocation == Allocation::Dynamic,
        "a fixed VHD has no disks of 0 bytes: choose another format, or subformat=dynamic"
    );
    require!(size / 512 <= MOST_SECTORS, "a VHD has no disks of more than 2040 GiB");
    Ok((size, geometry))
}

#[derive(Debug, Clone)]
pub(super) struct Tables {
    footer: Vec<u8>,
    allocation: Allocation,
}

pub(super) fn layout(new: &NewVpc, asked: u64, birth: &Birth) -> Result<(Places, Tables)> {
    let (size, geometry) = disk(new, asked)?;
    let creator = match new.size {
        VpcSize::ByGeometry => b"qemu",
        VpcSize::Exact => b"qem2",
    };
    let footer = footer(new, size, geometry, *creator, birth);
    let tables = Tables { footer, allocation: new.allocation };
    let places = match new.allocation {
        // The disk lies in the file as it is.
        Allocation::Fixed => Places {
            size,
            block: 512,
            first: 0,
            stride: 512,
            allocation: Allocation::Fixed,
            most: u32::MAX,
            mark: Vec::new(),
        },
        Allocation::Dynamic => {
            let table_end = TABLE_AT.saturating_add(size.div_ceil(BLOCK).saturating_mul(4));
            let first = table_end.saturating_add(BITMAP).checked_next_multiple_of(ALIGNMENT);
            Places {
                size,
                block: BLOCK,
                first: first.ok_or_else(|| Error::unsupported("the VHD disk is too large"))?,
                stride: BLOCK + ALIGNMENT,
                allocation: Allocation::Dynamic,
                most: u32::MAX,
                mark: vec![0xff; BITMAP as usize],
            }
        }
    };
    Ok((places, tables))
}

/// Creators are QEMU's: readers know by them whether the size or the geometry counts.
fn footer(new: &NewVpc, size: u64, geometry: Geometry, creator: [u8; 4], birth: &Birth) -> Vec<u8> {
    let mut footer = vec![0; FOOTER as usize];
    let (kind, header) = match new.allocation {
        Allocation::Fixed => (2, u64::MAX),
        Allocation::Dynamic => (3, HEADER_AT),
    };
    put(&mut footer, 0, COOKIE);
    put_be32(&mut footer, 8, 2);
    put_be32(&mut footer, 12, 0x0001_0000);
    put_be64(&mut footer, 16, header);
    put_be32(&mut footer, 24, birth.time.saturating_sub(YEAR_2000) as u32);
    put(&mut footer, 28, &creator);
    put_be32(&mut footer, 32, 0x0005_0003);
    put(&mut footer, 36, b"Wi2k");
    put_be64(&mut footer, 40, size);
    put_be64(&mut footer, 48, size);
    let (cylinders, heads, per_track) = geometry;
    put_be16(&mut footer, 56, cylinders as u16);
    put(&mut footer, 58, &[heads as u8, per_track as u8]);
    put_be32(&mut footer, 60, kind);
    put(&mut footer, 68, &birth.uuid(0));
    let sum = checksum(&footer, 64);
    put_be32(&mut footer, 64, sum);
    footer
}

impl Tables {
    pub(super) fn tables<'a>(
        places: &'a Places,
        table: &'a BlockTable,
    ) -> impl Iterator<Item = Part> + use<'a> {
        let entries = TABLE_PART / 4;
        let blocks = match places.allocation {
            Allocation::Fixed => 0,
            Allocation::Dynamic => places.blocks(),
        };
        (0..blocks.div_ceil(entries)).map(move |part| {
            let start = part.saturating_mul(entries);
            let end = start.saturating_add(entries).min(blocks);
            let entry = |index| {
                let place = places.of(table, index);
                place.map_or(UNALLOCATED, |place| (places.host(place).saturating_sub(BITMAP) / 512) as u32)
            };
            let bytes = (start..end).flat_map(|index| entry(index).to_be_bytes()).collect();
            Part { offset: TABLE_AT.saturating_add(start.saturating_mul(4)), bytes }
        })
    }

    pub(super) fn headers(&self, places: &Places, used: u32) -> Vec<Part> {
        let last = Part { offset: places.end(used), bytes: self.footer.clone() };
        if self.allocation == Allocation::Fixed {
            return vec![last];
        }
        let mut header = vec![0; 1024];
        put(&mut header, 0, DYNAMIC_COOKIE);
        put_be64(&mut header, 8, u64::MAX);
        put_be64(&mut header, 16, TABLE_AT);
        put_be32(&mut header, 24, 0x0001_0000);
        put_be32(&mut header, 28, places.blocks() as u32);
        put_be32(&mut header, 32, BLOCK as u32);
        let sum = checksum(&header, 36);
        put_be32(&mut header, 36, sum);
        let mut first = self.footer.clone();
        first.extend(header);
        vec![last, Part { offset: 0, bytes: first }]
    }
}
