//! The region table: where the block allocation table and the metadata are.

use super::header::{MIB, is_valid};
use crate::bytes::{array, le32, le64};
use crate::error::{Error, Result, ensure, require};
use crate::files::Source;

/// Where the two tables lie, and how long they are.
pub(crate) const PLACES: [u64; 2] = [192 << 10, 256 << 10];
pub(crate) const BYTES: u64 = 64 << 10;
/// Entries of a table at most.
const MOST: u32 = 2047;
pub(crate) const TABLE: [u8; 16] =
    [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42, 0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 0x08];
pub(crate) const METADATA: [u8; 16] =
    [0x06, 0xa2, 0x7c, 0x8b, 0x90, 0x47, 0x9a, 0x4b, 0xb8, 0xfe, 0x57, 0x5f, 0x05, 0x0f, 0x88, 0x6e];

/// Offset and length of the regions in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Regions {
    pub(super) table: (u64, u64),
    pub(super) metadata: (u64, u64),
}

pub(super) fn read(source: Source<'_>) -> Result<Regions> {
    for at in PLACES {
        let bytes = source.vec(at, BYTES, "a region table of the VHDX")?;
        if is_valid(&bytes, *b"regi") {
            return parse(source, &bytes);
        }
    }
    Err(Error::damaged("no valid region table in the VHDX"))
}

fn parse(source: Source<'_>, bytes: &[u8]) -> Result<Regions> {
    let count = le32(bytes, 8);
    ensure!(count <= MOST, "the region table of the VHDX has {count} entries");
    let (mut table, mut metadata, mut places) = (None, None, Vec::new());
    for entry in bytes.get(16..).unwrap_or_default().as_chunks::<32>().0.iter().take(count as usize) {
        let place @ (at, len) = (le64(entry, 16), u64::from(le32(entry, 24)));
        ensure!(
            at >= MIB && at.is_multiple_of(MIB) && len.is_multiple_of(MIB),
            "a region of the VHDX with {len} bytes at {at} is not aligned"
        );
        places.push(place);
        let known = match array(entry, 0) {
            TABLE => &mut table,
            METADATA => &mut metadata,
            _ => {
                require!(
                    le32(entry, 28) & 1 == 0,
                    "the VHDX has a region of an unknown kind that is required"
                );
                continue;
            }
        };
        source.check(at, len, "a region of the VHDX")?;
        ensure!(known.replace(place).is_none(), "the region table of the VHDX names a region twice");
    }
    places.sort_unstable();
    let overlap = places.windows(2).any(|pair| match pair {
        [(at, len), (next, _)] => at.saturating_add(*len) > *next,
        _ => false,
    });
    ensure!(!overlap, "two regions of the VHDX overlap");
    let missing = || Error::damaged("the region table of the VHDX does not name what is needed");
    Ok(Regions { table: table.ok_or_else(missing)?, metadata: metadata.ok_or_else(missing)? })
}
