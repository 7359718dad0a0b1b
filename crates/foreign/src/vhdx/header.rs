//! The two headers: the valid one with the higher number counts.

use crate::bytes::{array, le16, le32, le64};
use crate::crc32c::crc32c;
use crate::error::{Error, Result, ensure, require};
use crate::files::Source;

/// The unit of places in the file, bytes.
pub(crate) const MIB: u64 = 1 << 20;
/// Where the headers lie, and how long they are.
pub(crate) const PLACES: [u64; 2] = [64 << 10, 128 << 10];
pub(crate) const BYTES: usize = 4096;

/// The fields of the header that are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    sequence: u64,
    pub(super) data_write_guid: [u8; 16],
    pub(super) log_guid: [u8; 16],
    /// Offset and length of the log in bytes, if there may be something in it.
    pub(super) log: Option<(u64, u64)>,
}

/// The checksum of a structure with its own sum at `sum_at` taken as zero.
pub(crate) fn checksum(bytes: &[u8], sum_at: usize) -> u32 {
    let before = bytes.get(..sum_at).unwrap_or_default();
    let behind = bytes.get(sum_at.saturating_add(4)..).unwrap_or_default();
    crc32c(&[before, &[0; 4], behind])
}

/// Whether a structure has its signature and its checksum.
pub(super) fn is_valid(bytes: &[u8], signature: [u8; 4]) -> bool {
    bytes.starts_with(&signature) && le32(bytes, 4) == checksum(bytes, 4)
}

pub(super) fn read(source: Source<'_>) -> Result<Header> {
    let mut found: Option<Header> = None;
    for at in PLACES {
        if !source.holds(at, BYTES as u64) {
            continue;
        }
        let bytes: [u8; BYTES] = source.array(at, "a header of the VHDX")?;
        if !is_valid(&bytes, *b"head") {
            continue;
        }
        let header = parse(&bytes)?;
        match &found {
            Some(other) if other.sequence == header.sequence => {
                ensure!(*other == header, "the two headers of the VHDX have one number and differ");
            }
            Some(other) if other.sequence > header.sequence => {}
            _ => found = Some(header),
        }
    }
    found.ok_or_else(|| Error::damaged("No valid VHDX header found"))
}

fn parse(bytes: &[u8; BYTES]) -> Result<Header> {
    let version = le16(bytes, 66);
    require!(version == 1, "Unsupported VHDX version {version}");
    let log_guid = array(bytes, 48);
    let log = if log_guid == [0; 16] {
        None
    } else {
        let version = le16(bytes, 64);
        require!(version == 0, "Unsupported VHDX log version {version}");
        Some((le64(bytes, 72), u64::from(le32(bytes, 68))))
    };
    Ok(Header { sequence: le64(bytes, 8), data_write_guid: array(bytes, 32), log_guid, log })
}
