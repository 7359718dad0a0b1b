//! The snapshot table: reading it although something is wrong, and writing it anew without that.

use super::Repair;
use super::finding::{FindingKind, TableKind};
use super::report::Tally;
use super::source::Source;
use crate::{Error, ErrorKind, Result};
use zebu_qcow2::limits::{MAX_SNAPSHOTS, MIN_SNAPSHOT_ENTRY};
use zebu_qcow2::snapshot::{ParsedTable, SnapshotEntry, SnapshotTableFault, encode_table, parse_table};
use zebu_qcow2::{HostOffset, Purpose, Version};
use zebu_storage::IoError;

/// Bytes of the table that are read first; more if it is longer.
const FIRST_READ: u64 = 16 << 10;
/// How far past the end of the file a table may reach: QEMU takes what is not there for zeroes. With it and the program
/// itself, a check is resident with less than 64 MiB and the file.
const PAST_THE_END: u64 = 50 << 20;
/// Nanoseconds of a second: a date has fewer beside its seconds.
const NANOSECONDS: u32 = 1_000_000_000;
/// Bytes of extra data that have a meaning: VM state size, disk size, instruction count.
const KNOWN_EXTRA: usize = 24;
/// Bytes of an id or a name that a finding shows.
const SHOWN: usize = 40;
/// Bytes of a read.
const AT_ONCE: usize = 64 << 10;

/// The content of the snapshot table.
#[derive(Debug, Default)]
pub(super) struct SnapshotTable {
    /// Bytes of the table, as far as it was read.
    pub(super) len: u64,
    pub(super) entries: Vec<SnapshotEntry>,
    /// Damage that writing the table anew repairs. Not in any tally yet.
    pub(super) repairable: Vec<FindingKind>,
    /// Whether some clusters of its snapshots are unknown.
    pub(super) unknown: bool,
}

/// Reads the table that the header points at.
pub(super) async fn read(source: &Source<'_>, tally: &mut Tally) -> Result<SnapshotTable> {
    let (offset, count) = (source.header.snapshots_offset.0, source.header.nb_snapshots);
    let unknown = SnapshotTable { unknown: true, ..SnapshotTable::default() };
    let reach = u64::from(count.min(MAX_SNAPSHOTS)) * MIN_SNAPSHOT_ENTRY;
    if !source.geometry.is_cluster_aligned(offset)
        || offset.checked_add(reach).is_none_or(|end| end > i64::MAX as u64)
    {
        tally.add(FindingKind::SnapshotTableInvalid { reason: "snapshot table offset invalid".into() }, 1);
        return Ok(unknown);
    }
    if count == 0 {
        return Ok(SnapshotTable::default());
    }
    let (mut wanted, mut bytes) = (FIRST_READ, Vec::new());
    loop {
        if let Err(error) = read_up_to(source, offset, wanted as usize, &mut bytes).await? {
            let (table, error) = (TableKind::SnapshotTable, error.to_string());
            tally.add(FindingKind::Unreadable { table, offset, error }, 1);
            return Ok(unknown);
        }
        match parse_table(&bytes, count, Purpose::Check) {
            // The parser bounds what it asks for by the limit of the table and one entry. What lies past the end of the
            // file is zeroes, which are snapshots of nothing: few of them are worth memory.
            Ok(ParsedTable::NeedsBytes { at_least }) => {
                let most = source.file_len().saturating_sub(offset) + PAST_THE_END;
                if at_least > most {
                    let reason = "snapshot table reaches past the end of the file".into();
                    tally.add(FindingKind::SnapshotTableInvalid { reason }, 1);
                    return Ok(unknown);
                }
                wanted = at_least.max((wanted * 4).min(most));
            }
            Ok(ParsedTable::Complete { entries, len, faults }) => {
                // A check that repairs nothing says what QEMU's says.
                let doubtful = (source.options.repair != Repair::None)
                    .then(|| doubtful(&entries, &faults, source))
                    .flatten();
                if let Some(doubtful) = doubtful {
                    tally.add(doubtful, 1);
                    for kind in repairable(&entries, &faults, source.geometry.version) {
                        tally.add(kind, 1);
                    }
                    return Ok(unknown);
                }
                return Ok(SnapshotTable {
                    repairable: repairable(&entries, &faults, source.geometry.version),
                    entries,
                    len,
                    unknown: false,
                });
            }
            Err(error) => {
                tally.add(FindingKind::SnapshotTableInvalid { reason: error.to_string() }, 1);
                return Ok(unknown);
            }
        }
    }
}

/// Goes on reading at `offset` until there are `wanted` bytes, no more memory than they take.
async fn read_up_to(
    source: &Source<'_>,
    offset: u64,
    wanted: usize,
    bytes: &mut Vec<u8>,
) -> Result<Result<(), IoError>> {
    bytes.reserve_exact(wanted.saturating_sub(bytes.len()));
    while bytes.len() < wanted {
        let len = (wanted - bytes.len()).min(AT_ONCE);
        source.take_turn(len as u64).await?;
        match source.read(offset + bytes.len() as u64, len).await {
            Ok(piece) => bytes.extend_from_slice(piece.as_slice()),
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok(()))
}

/// The first entry that can't be what a program wrote, or hides what one wrote. Where a length is damaged, what follows is
/// read from the wrong place: to write the table anew would lose the snapshots that stand there, and to free what they do
/// not seem to use would lose their data.
fn doubtful(
    entries: &[SnapshotEntry],
    faults: &[SnapshotTableFault],
    source: &Source<'_>,
) -> Option<FindingKind> {
    let is_blank = |entry: &SnapshotEntry| {
        entry.l1_table_offset.0 == 0 && entry.l1_size == 0 && entry.id.is_empty() && entry.name.is_empty()
    };
    // An entry that takes in the next one is as long as two, and a blank one follows the last.
    let has_blank = entries.iter().any(is_blank);
    let is_doubtful = |(index, entry): (usize, &SnapshotEntry)| {
        let l1_end = entry.l1_table_offset.0.saturating_add(u64::from(entry.l1_size) * 8);
        // No length before the first entry can have moved it: there, the place itself is what is damaged.
        let is_misplaced = index > 0
            && (!source.geometry.is_cluster_aligned(entry.l1_table_offset.0)
                || l1_end > source.file_len().next_multiple_of(source.geometry.cluster_size()));
        !is_blank(entry)
            && (entry.id.contains(&0)
                || entry.name.contains(&0)
                || entry.date_nsec >= NANOSECONDS
                || is_misplaced
                || has_blank && entry.extra().len() > KNOWN_EXTRA)
    };
    let text = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN)]).into_owned();
        text.chars().map(|c| if c.is_control() { '?' } else { c }).collect::<String>()
    };
    if let Some(index) = entries.iter().enumerate().position(is_doubtful) {
        let entry = &entries[index];
        return Some(FindingKind::SnapshotEntryDoubtful {
            index: index as u32,
            id: text(&entry.id),
            name: text(&entry.name),
        });
    }
    // A table that no lengths of entries before the limit of their number make too large.
    let overhangs = faults.iter().any(|fault| matches!(fault, SnapshotTableFault::Overhanging { .. }));
    (overhangs && entries.len() < MAX_SNAPSHOTS as usize).then(|| FindingKind::SnapshotEntryDoubtful {
        index: entries.len() as u32,
        id: "?".to_owned(),
        name: "?".to_owned(),
    })
}

fn repairable(
    entries: &[SnapshotEntry],
    faults: &[SnapshotTableFault],
    version: Version,
) -> Vec<FindingKind> {
    let incomplete = entries.iter().enumerate().filter(|(_, entry)| !entry.is_complete(version));
    let incomplete = incomplete.map(|(index, _)| FindingKind::SnapshotIncomplete { index: index as u32 });
    let faults = faults.iter().map(|fault| match *fault {
        SnapshotTableFault::Overhanging { entries } => FindingKind::SnapshotsOverhanging { count: entries },
        SnapshotTableFault::ExtraTooLarge { index, len } => {
            FindingKind::SnapshotExtraData { index, bytes: len }
        }
        ref other => FindingKind::SnapshotTableInvalid { reason: format!("{other:?}") },
    });
    faults.chain(incomplete).collect()
}

/// The bytes of the same table without what can be repaired: missing fields filled in, what is too much left out.
pub(super) fn repaired_table(source: &Source<'_>, table: &SnapshotTable) -> Result<Vec<u8>> {
    let mut entries = table.entries.clone();
    if source.geometry.version == Version::V3 {
        for entry in &mut entries {
            entry.complete(source.header.virtual_size());
        }
    }
    encode_table(&entries)
        .map_err(|e| Error::new(ErrorKind::Corrupt, format!("cannot repair the snapshot table: {e}")))
}

/// Lets the header point at a table of `count` snapshots at `offset`: one write of twelve bytes in one sector, after
/// everything written before is durable.
pub(super) async fn switch_table(source: &mut Source<'_>, offset: u64, count: u32) -> Result<()> {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&count.to_be_bytes());
    bytes[4..].copy_from_slice(&offset.to_be_bytes());
    source.flush().await?;
    source.write(60, &bytes).await?;
    source.flush().await?;
    source.header.nb_snapshots = count;
    source.header.snapshots_offset = HostOffset(offset);
    Ok(())
}
