//! The log: changes of the file that were promised, and may not have been carried out.
//!
//! It is a ring of entries. Each tells at which entry the changes begin that were not carried out when it was written (the
//! tail). The valid entry with the highest number from whose tail an unbroken sequence leads to it is the head.

use super::header::{MIB, is_valid};
use super::overlay::Overlay;
use crate::bytes::{array, le32, le64};
use crate::error::{Error, Result, ensure, require};
use crate::files::Source;
use crate::limits::MAX_LOG;
use std::collections::BTreeMap;

/// The unit of the log, bytes.
const SECTOR: usize = 4096;
/// Bytes of an entry's header and of a descriptor.
const HEADER: usize = 64;
const DESCRIPTOR: usize = 32;
/// Bytes of a data sector that are data, and where they begin.
const DATA: usize = 4084;
const DATA_AT: usize = 8;
/// The log is summed so many times at most: entries that overlap are none that a writer leaves.
const MOST_SUMS: u64 = 4;
/// Entries that are visited in search of the head.
const MOST_STEPS: u64 = 1 << 20;

/// An entry that is valid by itself.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// Offset in the log and length, bytes.
    at: u64,
    len: u64,
    tail: u64,
    number: u64,
    descriptors: u32,
    flushed_len: u64,
    last_len: u64,
}

/// The bytes of the log.
struct Ring(Vec<u8>);

impl Ring {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// `len` bytes at `at`, which may go on at the start.
    fn bytes(&self, at: u64, len: u64) -> Vec<u8> {
        let (start, behind) = self.0.split_at_checked(at as usize).unwrap_or_default();
        behind.iter().chain(start).take(len as usize).copied().collect()
    }

    fn next(&self, entry: &Entry) -> u64 {
        let next = entry.at.saturating_add(entry.len);
        next.checked_sub(self.len()).unwrap_or(next)
    }

    /// The valid entries by their offset.
    fn entries(&self, guid: &[u8; 16]) -> Result<BTreeMap<u64, Entry>> {
        let mut found = BTreeMap::new();
        let mut summed = 0u64;
        for at in (0..self.0.len()).step_by(SECTOR) {
            let header = self.0.get(at..).unwrap_or_default();
            if !header.starts_with(b"loge") || array::<16>(header, 32) != *guid {
                continue;
            }
            let entry = Entry {
                at: at as u64,
                len: u64::from(le32(header, 8)),
                tail: u64::from(le32(header, 12)),
                number: le64(header, 16),
                descriptors: le32(header, 24),
                flushed_len: le64(header, 48),
                last_len: le64(header, 56),
            };
            let whole = entry.len > 0 && entry.len <= self.len() && entry.len.is_multiple_of(SECTOR as u64);
            if !whole || entry.number == 0 {
                continue;
            }
            summed = summed.saturating_add(entry.len);
            ensure!(summed <= self.len().saturating_mul(MOST_SUMS), "entries of the VHDX log overlap");
            if is_valid(&self.bytes(entry.at, entry.len), *b"loge") {
                found.insert(entry.at, entry);
            }
        }
        Ok(found)
    }
}

/// The entries that are to be carried out, in order.
fn active(ring: &Ring, entries: &BTreeMap<u64, Entry>) -> Result<Vec<Entry>> {
    let mut heads: Vec<&Entry> = entries.values().collect();
    heads.sort_by_key(|entry| std::cmp::Reverse(entry.number));
    let mut steps = 0u64;
    for head in heads {
        let mut sequence: Vec<Entry> = Vec::new();
        let mut at = head.tail;
        while let Some(entry) = entries.get(&at) {
            steps = steps.saturating_add(1);
            ensure!(steps <= MOST_STEPS, "the entries of the VHDX log lead in circles");
            let expected = sequence.last().map(|before| before.number.saturating_add(1));
            if expected.is_some_and(|expected| expected != entry.number) || entry.number > head.number {
                break;
            }
            sequence.push(*entry);
            if entry.at == head.at {
                return Ok(sequence);
            }
            at = ring.next(entry);
        }
    }
    Ok(Vec::new())
}

/// The changes in the log of `len` bytes at `at`.
pub(super) fn replay(source: Source<'_>, guid: &[u8; 16], at: u64, len: u64) -> Result<Overlay> {
    ensure!(
        at >= MIB && at.is_multiple_of(MIB) && len > 0 && len.is_multiple_of(MIB),
        "the log of the VHDX with {len} bytes at {at} is not aligned"
    );
    require!(len <= MAX_LOG, "the log of the VHDX has {len} bytes; attach the image in Hyper-V once");
    let ring = Ring(source.vec(at, len, "the log of the VHDX")?);
    let entries = ring.entries(guid)?;
    let mut overlay = Overlay::default();
    for entry in active(&ring, &entries)? {
        ensure!(
            source.len() >= entry.flushed_len,
            "the VHDX has {} bytes, and had {} when its log was written: it is cut off",
            source.len(),
            entry.flushed_len
        );
        apply(&ring, &entry, &mut overlay)?;
        overlay.grow_to(entry.last_len);
    }
    Ok(overlay)
}

fn apply(ring: &Ring, entry: &Entry, overlay: &mut Overlay) -> Result<()> {
    let bytes = ring.bytes(entry.at, entry.len);
    let damaged = || Error::damaged(format!("entry {} of the VHDX log is damaged", entry.number));
    let described = (entry.descriptors as usize).saturating_mul(DESCRIPTOR).saturating_add(HEADER);
    let mut sectors =
        bytes.get(described.next_multiple_of(SECTOR)..).unwrap_or_default().as_chunks::<SECTOR>().0.iter();
    let descriptors = bytes.get(HEADER..described).ok_or_else(damaged)?;
    for descriptor in descriptors.as_chunks::<DESCRIPTOR>().0 {
        let start = le64(descriptor, 16);
        let fits = le64(descriptor, 24) == entry.number && start.is_multiple_of(SECTOR as u64);
        if !fits {
            return Err(damaged());
        }
        if descriptor.starts_with(b"zero") {
            let len = le64(descriptor, 8);
            if !len.is_multiple_of(SECTOR as u64) || start.checked_add(len).is_none() {
                return Err(damaged());
            }
            overlay.zero(start, len);
        } else if descriptor.starts_with(b"desc") {
            let sector = sectors.next().ok_or_else(damaged)?;
            let number = u64::from(le32(sector, 4)) << 32 | u64::from(le32(sector, SECTOR - 4));
            if !sector.starts_with(b"data") || number != entry.number {
                return Err(damaged());
            }
            // The descriptor keeps the first and the last bytes, where the sector has its marks.
            let mut content = Vec::with_capacity(SECTOR);
            content.extend_from_slice(descriptor.get(8..16).unwrap_or_default());
            content.extend_from_slice(sector.get(DATA_AT..DATA_AT + DATA).unwrap_or_default());
            content.extend_from_slice(descriptor.get(4..8).unwrap_or_default());
            overlay.write(start, content);
        } else {
            return Err(damaged());
        }
    }
    Ok(())
}
