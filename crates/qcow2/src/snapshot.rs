//! The table of internal snapshots.
//!
//! Entries lie one after another, each starting at a multiple of 8 bytes: 40 fixed bytes, extra data, identifier,
//! name. Extra data is kept byte for byte, so that fields unknown to this crate survive (format document,
//! "Snapshots").

use crate::bytes::{self, ZeroExtended};
use crate::error::{FormatError, SnapshotField};
use crate::geometry::Geometry;
use crate::header::Purpose;
use crate::limits;
use crate::offsets::HostOffset;
use crate::table_bounds::{self, TableFault};
use crate::version::Version;

/// Bytes of the fixed part of an entry.
const FIXED: usize = limits::MIN_SNAPSHOT_ENTRY as usize;
/// End of the 64-bit VM state size in the extra data.
const VM_STATE_END: usize = 8;
/// End of the disk size in the extra data; version 3 requires the extra data to reach here.
const DISK_SIZE_END: usize = 16;
/// End of the instruction count in the extra data.
const ICOUNT_END: usize = 24;
/// The stored instruction count of a snapshot without one.
const NO_ICOUNT: u64 = u64::MAX;

/// One internal snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SnapshotEntry {
    /// Host offset of the snapshot's L1 table.
    pub l1_table_offset: HostOffset,
    /// Entries of the snapshot's L1 table.
    pub l1_size: u32,
    /// Identifier: a decimal number as text, in images that QEMU made.
    pub id: Vec<u8>,
    /// Name given by the user.
    pub name: Vec<u8>,
    /// When it was taken, in seconds since 1970.
    pub date_sec: u32,
    /// Nanoseconds that belong to the date.
    pub date_nsec: u32,
    /// Time that the guest had been running, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// The 32-bit VM state size; 0 where the real one, in the extra data, does not fit.
    vm_state_size_32: u32,
    extra: Vec<u8>,
}

/// A snapshot to be taken. See [`SnapshotEntry::new`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewSnapshot {
    /// Identifier, unique in the table: see [`next_id`].
    pub id: Vec<u8>,
    /// Name.
    pub name: Vec<u8>,
    /// Host offset of the L1 table.
    pub l1_table_offset: HostOffset,
    /// Entries of the L1 table.
    pub l1_size: u32,
    /// When it is taken, in seconds since 1970.
    pub date_sec: u32,
    /// Nanoseconds that belong to the date.
    pub date_nsec: u32,
    /// Virtual size of the disk, in bytes.
    pub disk_size: u64,
    /// Bytes of VM state.
    pub vm_state_size: u64,
    /// Time that the guest had been running, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// Instructions that the guest had run, where they were counted.
    pub icount: Option<u64>,
}

impl SnapshotEntry {
    /// An entry with the extra data that QEMU writes: VM state size, disk size, instruction count.
    pub fn new(new: NewSnapshot) -> Self {
        let mut extra = Vec::with_capacity(ICOUNT_END);
        for field in [new.vm_state_size, new.disk_size, new.icount.unwrap_or(NO_ICOUNT)] {
            extra.extend_from_slice(&field.to_be_bytes());
        }
        Self {
            l1_table_offset: new.l1_table_offset,
            l1_size: new.l1_size,
            id: new.id,
            name: new.name,
            date_sec: new.date_sec,
            date_nsec: new.date_nsec,
            vm_clock_nsec: new.vm_clock_nsec,
            vm_state_size_32: u32::try_from(new.vm_state_size).unwrap_or(0),
            extra,
        }
    }

    /// Bytes of VM state.
    pub fn vm_state_size(&self) -> u64 {
        bytes::u64_at(&self.extra, 0).unwrap_or(self.vm_state_size_32 as u64)
    }

    /// Virtual size of the disk in bytes when the snapshot was taken; `None` where the entry does not say, so that
    /// the current size counts.
    pub fn disk_size(&self) -> Option<u64> {
        bytes::u64_at(&self.extra, VM_STATE_END)
    }

    /// Instructions that the guest had run; `None` where they were not counted.
    pub fn icount(&self) -> Option<u64> {
        bytes::u64_at(&self.extra, DISK_SIZE_END).filter(|count| *count != NO_ICOUNT)
    }

    /// The extra data, known fields included.
    pub fn extra(&self) -> &[u8] {
        &self.extra
    }

    /// Whether the extra data has the fields that the version requires. A check reports it where not.
    pub fn is_complete(&self, version: Version) -> bool {
        version == Version::V2 || self.extra.len() >= DISK_SIZE_END
    }

    /// Adds the fields that version 3 requires: the VM state size as it is, and the given disk size in bytes.
    /// Fields that are there already keep their values.
    pub fn complete(&mut self, disk_size: u64) {
        let vm_state_size = self.vm_state_size();
        let disk_size = self.disk_size().unwrap_or(disk_size);
        let known = ((vm_state_size as u128) << 64 | disk_size as u128).to_be_bytes();
        let rest = self.extra.get(DISK_SIZE_END..).unwrap_or_default();
        self.extra = [known.as_slice(), rest].concat();
    }

    /// That the snapshot's L1 table is within the limits of the active one. To be called before it is used.
    ///
    /// # Errors
    /// [`FormatError::SnapshotL1TooLarge`], [`FormatError::SnapshotL1OffsetInvalid`].
    pub fn check_l1(&self, geometry: &Geometry) -> Result<(), FormatError> {
        let offset = self.l1_table_offset.0;
        table_bounds::check(self.l1_size as u64, 8, limits::MAX_L1_ENTRIES, offset, geometry).map_err(
            |fault| match fault {
                TableFault::TooLarge => FormatError::SnapshotL1TooLarge { entries: self.l1_size },
                TableFault::OffsetInvalid => FormatError::SnapshotL1OffsetInvalid { offset },
            },
        )
    }

    /// Bytes of the entry on disk, without padding.
    fn len(&self) -> usize {
        FIXED.saturating_add(self.extra.len()).saturating_add(self.id.len()).saturating_add(self.name.len())
    }

    fn append_to(&self, out: &mut Vec<u8>) -> Result<(), FormatError> {
        let short =
            |len: usize, field| u16::try_from(len).map_err(|_| FormatError::SnapshotFieldTooLong { field });
        let id_len = short(self.id.len(), SnapshotField::Id)?;
        let name_len = short(self.name.len(), SnapshotField::Name)?;
        let extra_len = u32::try_from(self.extra.len())
            .ok()
            .filter(|len| *len <= limits::MAX_SNAPSHOT_EXTRA)
            .ok_or(FormatError::SnapshotFieldTooLong { field: SnapshotField::Extra })?;
        out.extend_from_slice(&self.l1_table_offset.0.to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&id_len.to_be_bytes());
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&self.date_sec.to_be_bytes());
        out.extend_from_slice(&self.date_nsec.to_be_bytes());
        out.extend_from_slice(&self.vm_clock_nsec.to_be_bytes());
        out.extend_from_slice(&self.vm_state_size_32.to_be_bytes());
        out.extend_from_slice(&extra_len.to_be_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.name);
        Ok(())
    }
}

/// A fault of a snapshot table that a repair mends. Only found with [`Purpose::Check`]; an error otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SnapshotTableFault {
    /// More than 1024 bytes of extra data; what exceeds them was dropped.
    ExtraTooLarge {
        /// Index of the entry.
        index: u32,
        /// Bytes of extra data on disk.
        len: u32,
    },
    /// Entries past the limits of count or table size; they were dropped.
    Overhanging {
        /// Entries dropped.
        entries: u32,
    },
}

/// How far the bytes given to [`parse_table`] went.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ParsedTable {
    /// The whole table.
    Complete {
        /// The snapshots, in order.
        entries: Vec<SnapshotEntry>,
        /// Bytes of the table on disk.
        len: u64,
        /// Faults for a repair.
        faults: Vec<SnapshotTableFault>,
    },
    /// The table goes on: parse again with more of it. Each call starts at the first entry, so give at least twice as
    /// many bytes as before: a hostile table has many small entries.
    NeedsBytes {
        /// Bytes of the table that must be there to get any further; at most 64 MiB and one entry.
        at_least: u64,
    },
}

/// One entry from the start of `bytes`: the entry, its length without padding, and its extra data's length.
enum ParsedEntry {
    Complete { entry: SnapshotEntry, len: usize, extra_len: u32 },
    NeedsBytes(usize),
}

fn parse_entry(bytes: &[u8]) -> ParsedEntry {
    let Some(fixed) = bytes.first_chunk::<FIXED>() else {
        return ParsedEntry::NeedsBytes(FIXED);
    };
    let fixed = ZeroExtended(fixed);
    let id_len = u16::from_be_bytes(fixed.array(12)) as usize;
    let name_len = u16::from_be_bytes(fixed.array(14)) as usize;
    let extra_len = fixed.u32(36);

    let id_at = FIXED.saturating_add(extra_len as usize);
    let name_at = id_at.saturating_add(id_len);
    let end = name_at.saturating_add(name_len);
    let kept = FIXED.saturating_add(extra_len.min(limits::MAX_SNAPSHOT_EXTRA) as usize);
    let parts = (bytes.get(FIXED..kept), bytes.get(id_at..name_at), bytes.get(name_at..end));
    let (Some(extra), Some(id), Some(name)) = parts else {
        return ParsedEntry::NeedsBytes(end);
    };
    let entry = SnapshotEntry {
        l1_table_offset: HostOffset(fixed.u64(0)),
        l1_size: fixed.u32(8),
        id: id.to_vec(),
        name: name.to_vec(),
        date_sec: fixed.u32(16),
        date_nsec: fixed.u32(20),
        vm_clock_nsec: fixed.u64(24),
        vm_state_size_32: fixed.u32(32),
        extra: extra.to_vec(),
    };
    ParsedEntry::Complete { entry, len: end, extra_len }
}

/// Parses `count` entries of a snapshot table that starts at `bytes`.
///
/// How long a table is shows only in its entries, so the caller gives what it has and reads on when it is told to.
/// Where the file ends before the table, the missing bytes are zeroes.
///
/// # Errors
/// [`FormatError::TooManySnapshots`], [`FormatError::SnapshotExtraTooLarge`],
/// [`FormatError::SnapshotTableTooBig`]; none of them with [`Purpose::Check`], where what is wrong is returned as
/// [`SnapshotTableFault`]s.
pub fn parse_table(bytes: &[u8], count: u32, purpose: Purpose) -> Result<ParsedTable, FormatError> {
    let repairing = purpose == Purpose::Check;
    if count > limits::MAX_SNAPSHOTS && !repairing {
        return Err(FormatError::TooManySnapshots { count });
    }
    let mut faults = Vec::new();
    let mut entries = Vec::new();
    let mut len = 0usize;
    for index in 0..count {
        if index >= limits::MAX_SNAPSHOTS {
            faults.push(SnapshotTableFault::Overhanging { entries: count.saturating_sub(index) });
            break;
        }
        let start = len.next_multiple_of(8);
        if start as u64 >= limits::MAX_SNAPSHOT_TABLE_SIZE {
            if !repairing {
                return Err(FormatError::SnapshotTableTooBig);
            }
            faults.push(SnapshotTableFault::Overhanging { entries: count.saturating_sub(index) });
            break;
        }
        // The length of extra data is judged before it is read, so that a wild value asks for no memory.
        let extra_len = bytes::u32_at(bytes, start.saturating_add(36)).unwrap_or(0);
        if extra_len > limits::MAX_SNAPSHOT_EXTRA && !repairing {
            return Err(FormatError::SnapshotExtraTooLarge { index, len: extra_len });
        }
        let entry_end = (start as u64).saturating_add(extra_len as u64);
        let too_big = |end: u64| end > limits::MAX_SNAPSHOT_TABLE_SIZE;
        let parsed = if too_big(entry_end) {
            None
        } else {
            match parse_entry(bytes.get(start..).unwrap_or_default()) {
                ParsedEntry::NeedsBytes(needed) => {
                    let at_least = start.saturating_add(needed) as u64;
                    return Ok(ParsedTable::NeedsBytes { at_least });
                }
                ParsedEntry::Complete { entry, len, extra_len } => Some((entry, len, extra_len)),
            }
        };
        let Some((entry, entry_len, extra_len)) =
            parsed.filter(|(_, entry_len, _)| !too_big(start.saturating_add(*entry_len) as u64))
        else {
            if !repairing {
                return Err(FormatError::SnapshotTableTooBig);
            }
            faults.push(SnapshotTableFault::Overhanging { entries: count.saturating_sub(index) });
            break;
        };
        if extra_len > limits::MAX_SNAPSHOT_EXTRA {
            faults.push(SnapshotTableFault::ExtraTooLarge { index, len: extra_len });
        }
        len = start.saturating_add(entry_len);
        entries.push(entry);
    }
    Ok(ParsedTable::Complete { entries, len: len as u64, faults })
}

/// The bytes of a snapshot table.
///
/// # Errors
/// [`FormatError::TooManySnapshots`], [`FormatError::SnapshotFieldTooLong`],
/// [`FormatError::SnapshotTableTooBig`].
pub fn encode_table(entries: &[SnapshotEntry]) -> Result<Vec<u8>, FormatError> {
    let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    if count > limits::MAX_SNAPSHOTS {
        return Err(FormatError::TooManySnapshots { count });
    }
    let mut out = Vec::with_capacity(table_len(entries) as usize);
    for entry in entries {
        out.resize(out.len().next_multiple_of(8), 0);
        entry.append_to(&mut out)?;
        if out.len() as u64 > limits::MAX_SNAPSHOT_TABLE_SIZE {
            return Err(FormatError::SnapshotTableTooBig);
        }
    }
    Ok(out)
}

/// Bytes of the snapshot table on disk, capped a little above the limit of 64 MiB.
fn table_len(entries: &[SnapshotEntry]) -> u64 {
    let mut len = 0u64;
    for entry in entries {
        len = len.next_multiple_of(8).saturating_add(entry.len() as u64);
        if len > limits::MAX_SNAPSHOT_TABLE_SIZE {
            break;
        }
    }
    len
}

/// The snapshot with this identifier or, failing that, the first with this name.
pub fn find<'a>(entries: &'a [SnapshotEntry], id_or_name: &[u8]) -> Option<&'a SnapshotEntry> {
    let by_id = entries.iter().find(|entry| entry.id == id_or_name);
    by_id.or_else(|| entries.iter().find(|entry| entry.name == id_or_name))
}

/// An identifier that no entry has: one more than the largest number among them.
pub fn next_id(entries: &[SnapshotEntry]) -> Vec<u8> {
    let number = |id: &[u8]| {
        id.iter()
            .take_while(|byte| byte.is_ascii_digit())
            .fold(0u64, |n, digit| n.saturating_mul(10).saturating_add(digit.wrapping_sub(b'0') as u64))
    };
    let largest = entries.iter().map(|entry| number(&entry.id)).max().unwrap_or(0);
    largest.saturating_add(1).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{DataLocation, L2Format};
    use proptest::prelude::*;

    fn complete(
        parsed: Result<ParsedTable, FormatError>,
    ) -> (Vec<SnapshotEntry>, u64, Vec<SnapshotTableFault>) {
        match parsed.unwrap() {
            ParsedTable::Complete { entries, len, faults } => (entries, len, faults),
            ParsedTable::NeedsBytes { at_least } => panic!("needs {at_least} bytes"),
        }
    }

    /// An entry built by hand from the format document.
    fn raw(extra: &[u8], id: &[u8], name: &[u8]) -> Vec<u8> {
        let mut out = vec![0; FIXED];
        out[0..8].copy_from_slice(&0x5_0000u64.to_be_bytes());
        out[8..12].copy_from_slice(&3u32.to_be_bytes());
        out[12..14].copy_from_slice(&(id.len() as u16).to_be_bytes());
        out[14..16].copy_from_slice(&(name.len() as u16).to_be_bytes());
        out[16..20].copy_from_slice(&1_700_000_000u32.to_be_bytes());
        out[20..24].copy_from_slice(&5u32.to_be_bytes());
        out[24..32].copy_from_slice(&77u64.to_be_bytes());
        out[32..36].copy_from_slice(&9u32.to_be_bytes());
        out[36..40].copy_from_slice(&(extra.len() as u32).to_be_bytes());
        out.extend_from_slice(extra);
        out.extend_from_slice(id);
        out.extend_from_slice(name);
        out
    }

    fn snapshot(id: &str, name: &str) -> SnapshotEntry {
        SnapshotEntry::new(NewSnapshot {
            id: id.into(),
            name: name.into(),
            l1_table_offset: HostOffset(0x5_0000),
            l1_size: 1,
            date_sec: 1,
            date_nsec: 2,
            disk_size: 1 << 30,
            vm_state_size: 0,
            vm_clock_nsec: 0,
            icount: None,
        })
    }

    #[test]
    fn fields_of_an_entry() {
        let extra = [7u64.to_be_bytes(), (1u64 << 40).to_be_bytes(), u64::MAX.to_be_bytes()].concat();
        let bytes = raw(&extra, b"12", b"before upgrade");
        let (entries, len, faults) = complete(parse_table(&bytes, 1, Purpose::ReadOnly));
        assert_eq!((len, faults.len()), (bytes.len() as u64, 0));
        let entry = &entries[0];
        assert_eq!((entry.l1_table_offset, entry.l1_size), (HostOffset(0x5_0000), 3));
        assert_eq!((entry.id.as_slice(), entry.name.as_slice()), (&b"12"[..], &b"before upgrade"[..]));
        assert_eq!((entry.date_sec, entry.date_nsec, entry.vm_clock_nsec), (1_700_000_000, 5, 77));
        assert_eq!((entry.vm_state_size(), entry.disk_size(), entry.icount()), (7, Some(1 << 40), None));
        assert!(entry.is_complete(Version::V3));
    }

    #[test]
    fn fields_that_are_absent() {
        let (entries, ..) = complete(parse_table(&raw(&[], b"1", b"a"), 1, Purpose::ReadOnly));
        let mut entry = entries[0].clone();
        assert_eq!((entry.vm_state_size(), entry.disk_size(), entry.icount()), (9, None, None));
        assert!(entry.is_complete(Version::V2) && !entry.is_complete(Version::V3));
        entry.complete(4096);
        assert_eq!((entry.vm_state_size(), entry.disk_size(), entry.extra().len()), (9, Some(4096), 16));
    }

    #[test]
    fn a_large_vm_state_does_not_fit_the_old_field() {
        let new = NewSnapshot {
            id: b"1".to_vec(),
            name: vec![],
            l1_table_offset: HostOffset(0),
            l1_size: 0,
            date_sec: 0,
            date_nsec: 0,
            disk_size: 0,
            vm_state_size: 1 << 32,
            vm_clock_nsec: 0,
            icount: Some(5),
        };
        let bytes = encode_table(&[SnapshotEntry::new(new)]).unwrap();
        assert_eq!(&bytes[32..36], [0; 4]);
        let (entries, ..) = complete(parse_table(&bytes, 1, Purpose::ReadOnly));
        assert_eq!((entries[0].vm_state_size(), entries[0].icount()), (1 << 32, Some(5)));
    }

    #[test]
    fn check_46_too_much_extra_data() {
        let bytes = raw(&[1; 1025], b"1", b"a");
        let error = parse_table(&bytes, 1, Purpose::ReadOnly).unwrap_err();
        assert_eq!(error, FormatError::SnapshotExtraTooLarge { index: 0, len: 1025 });
        assert_eq!(error.to_string(), "Too much extra metadata in snapshot table entry 0");
        assert!(error.hint().unwrap().contains("Repair"));
        let (entries, _, faults) = complete(parse_table(&bytes, 1, Purpose::Check));
        assert_eq!(faults, [SnapshotTableFault::ExtraTooLarge { index: 0, len: 1025 }]);
        assert_eq!(entries[0].extra(), [1; 1024]);
        assert_eq!(entries[0].name, b"a");
        assert!(parse_table(&raw(&[1; 1024], b"1", b"a"), 1, Purpose::ReadOnly).is_ok());
    }

    #[test]
    fn check_46_table_too_big() {
        // Entries of nearly 130 KiB each: 65536 of them would be far over 64 MiB.
        let entry = raw(&[], &vec![b'1'; 65535], &vec![b'n'; 65535]);
        let stride = entry.len().next_multiple_of(8);
        let fits = (limits::MAX_SNAPSHOT_TABLE_SIZE as usize - entry.len()) / stride + 1;
        let mut table = Vec::new();
        for _ in 0..=fits {
            table.resize(table.len().next_multiple_of(8), 0);
            table.extend_from_slice(&entry);
        }
        assert_eq!(complete(parse_table(&table, fits as u32, Purpose::ReadOnly)).0.len(), fits);
        let error = parse_table(&table, fits as u32 + 1, Purpose::ReadOnly).unwrap_err();
        assert_eq!(error.to_string(), "Snapshot table is too big");
        let (entries, _, faults) = complete(parse_table(&table, fits as u32 + 1, Purpose::Check));
        assert_eq!((entries.len(), faults), (fits, vec![SnapshotTableFault::Overhanging { entries: 1 }]));
        let mut too_many = entries.clone();
        too_many.push(entries[0].clone());
        assert_eq!(encode_table(&too_many), Err(FormatError::SnapshotTableTooBig));
    }

    #[test]
    fn a_wild_extra_length_asks_for_no_memory() {
        let mut bytes = raw(&[], b"1", b"a");
        bytes[36..40].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(parse_table(&bytes, 1, Purpose::ReadOnly).is_err());
        let (entries, _, faults) = complete(parse_table(&bytes, 7, Purpose::Check));
        assert_eq!((entries.len(), faults), (0, vec![SnapshotTableFault::Overhanging { entries: 7 }]));
    }

    #[test]
    #[cfg_attr(miri, ignore = "65,536 entries take minutes")]
    fn too_many_snapshots() {
        let count = limits::MAX_SNAPSHOTS + 1;
        let error = parse_table(&[], count, Purpose::ReadOnly).unwrap_err();
        assert_eq!(error, FormatError::TooManySnapshots { count });
        let table = vec![0; 40 * count as usize];
        let (entries, _, faults) = complete(parse_table(&table, count, Purpose::Check));
        assert_eq!((entries.len(), faults), (65536, vec![SnapshotTableFault::Overhanging { entries: 1 }]));
    }

    #[test]
    fn l1_of_a_snapshot_is_bounded() {
        let geometry = Geometry::new(Version::V3, 16, 4, L2Format::Standard, DataLocation::InImage).unwrap();
        let mut entry = snapshot("1", "a");
        assert_eq!(entry.check_l1(&geometry), Ok(()));
        entry.l1_table_offset = HostOffset(0x5_0200);
        assert_eq!(entry.check_l1(&geometry).unwrap_err().to_string(), "Snapshot L1 table offset invalid");
        entry.l1_size = limits::MAX_L1_ENTRIES as u32 + 1;
        assert_eq!(entry.check_l1(&geometry).unwrap_err().to_string(), "Snapshot L1 table too large");
    }

    #[test]
    fn lookup_prefers_the_identifier() {
        let entries = [snapshot("1", "2"), snapshot("2", "x"), snapshot("10", "x")];
        assert_eq!(find(&entries, b"2").unwrap().name, b"x");
        assert_eq!(find(&entries, b"x").unwrap().id, b"2");
        assert_eq!(find(&entries, b"y"), None);
        assert_eq!(next_id(&entries), b"11");
        assert_eq!(next_id(&[]), b"1");
    }

    #[test]
    fn fields_that_do_not_fit_are_refused() {
        let mut entry = snapshot("1", "a");
        entry.name = vec![b'x'; 65536];
        assert_eq!(
            encode_table(&[entry]),
            Err(FormatError::SnapshotFieldTooLong { field: SnapshotField::Name })
        );
    }

    fn any_entry() -> impl Strategy<Value = SnapshotEntry> {
        let bytes = |max| proptest::collection::vec(any::<u8>(), 0..max);
        (any::<[u64; 3]>(), any::<[u32; 3]>(), bytes(40), bytes(40), bytes(100)).prop_map(
            |(longs, ints, id, name, extra)| SnapshotEntry {
                l1_table_offset: HostOffset(longs[0]),
                l1_size: ints[0],
                id,
                name,
                date_sec: ints[1],
                date_nsec: ints[2],
                vm_clock_nsec: longs[1],
                vm_state_size_32: longs[2] as u32,
                extra,
            },
        )
    }

    proptest! {
        /// Any table round trips, and any part of it asks for more without asking for less than it has.
        #[test]
        fn round_trip(entries in proptest::collection::vec(any_entry(), 0..6), cut in any::<prop::sample::Index>()) {
            let bytes = encode_table(&entries).unwrap();
            let count = entries.len() as u32;
            let (parsed, len, faults) = complete(parse_table(&bytes, count, Purpose::ReadOnly));
            prop_assert_eq!((&parsed, len, faults.len()), (&entries, bytes.len() as u64, 0));
            if !bytes.is_empty() {
                let part = &bytes[..cut.index(bytes.len())];
                match parse_table(part, count, Purpose::ReadOnly).unwrap() {
                    ParsedTable::NeedsBytes { at_least } => {
                        prop_assert!(at_least > part.len() as u64 && at_least <= bytes.len() as u64);
                    }
                    ParsedTable::Complete { .. } => prop_assert!(false, "complete without all bytes"),
                }
            }
        }

        #[test]
        fn any_bytes_give_a_verdict(bytes in proptest::collection::vec(any::<u8>(), 0..400), count in any::<u32>()) {
            for purpose in [Purpose::ReadOnly, Purpose::Check] {
                if let Ok(ParsedTable::NeedsBytes { at_least }) = parse_table(&bytes, count, purpose) {
                    prop_assert!(at_least > bytes.len() as u64);
                    prop_assert!(at_least < limits::MAX_SNAPSHOT_TABLE_SIZE + (1 << 20));
                }
            }
        }
    }
}
