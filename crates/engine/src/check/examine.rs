//! One examination of an image: everything counted, compared and, if wanted, repaired, in an order in which the
//! image is never worse than before.
//!
//! 1. L2 entries that only keep unusable space give it up; then they are durable.
//! 2. Refcounts are set to what was counted (in any order: each single one gets better), or all refcount structures
//!    are built anew and switched to; then they are durable.
//! 3. COPIED flags are set by the refcounts that are durable now.
//! 4. A repaired snapshot table, written past the end and counted in step 2, is switched to.

use super::compare::{Comparison, Correct, compare, load_refcounts};
use super::count::{Walk, count};
use super::entries::repair_entries;
use super::finding::FindingKind;
use super::flags::{CorrectFlags, check_flags};
use super::inventory::Inventory;
use super::options::Repair;
use super::rebuild::{Basis, rebuild};
use super::refmap::RefMap;
use super::reftable::RefTable;
use super::report::Tally;
use super::snapshots;
use super::source::Source;
use crate::Result;
use std::ops::Range;
use zebu_storage::FileKind;

/// The result of an examination.
pub(super) struct Examination {
    pub(super) tally: Tally,
    /// Something was written.
    pub(super) changed: bool,
    /// All refcount structures are new.
    pub(super) rebuilt: bool,
    /// The header points at another snapshot table.
    pub(super) snapshot_table_moved: bool,
}

impl Examination {
    /// This examination and another one that followed.
    pub(super) fn followed_by(self, next: Self) -> Self {
        Self {
            tally: self.tally.followed_by(next.tally),
            changed: true,
            rebuilt: self.rebuilt || next.rebuilt,
            snapshot_table_moved: self.snapshot_table_moved,
        }
    }
}

/// A snapshot table that a repair has written past the end of everything, for the header to point at later.
struct NewSnapshotTable {
    offset: u64,
    len: u64,
    count: u32,
    repairs: Vec<FindingKind>,
}

/// The result of counting and comparing everything.
#[derive(Default)]
struct State {
    comparison: Comparison,
    walk: Walk,
    /// One past the highest cluster with a reference.
    references_end: u64,
    /// Clusters of the active L1 table that something else uses too, ascending.
    shared_l1: Vec<u64>,
    /// The counts, if they all fit the memory.
    whole: Option<RefMap>,
}

/// Examines the image, and repairs what its options say.
pub(super) async fn examine(source: &mut Source<'_>) -> Result<Examination> {
    let repair = source.options.repair;
    let max_findings = source.options.max_findings;
    let mut structure = Tally::new(max_findings);
    let mut table = snapshots::read(source, &mut structure).await?;
    let repairs = std::mem::take(&mut table.repairable);
    let new_snapshots = if repair == Repair::All && !repairs.is_empty() {
        write_snapshot_table(source, &table, repairs, &mut structure).await?
    } else {
        for kind in repairs {
            table.unknown |= matches!(kind, FindingKind::SnapshotsOverhanging { .. });
            structure.add(kind, 1);
        }
        None
    };
    let planned = new_snapshots.as_ref().map(|new| (new.offset, new.len));
    let mut inventory = Inventory::read(source, table, planned, &mut structure).await?;

    let mut refcounts = Tally::new(max_findings);
    let mut reftable = RefTable::read(source, &mut refcounts).await?;
    let planned = planned_clusters(source, planned);
    let mut state =
        count_and_compare(source, &mut inventory, &reftable, &planned, &mut structure, &mut refcounts)
            .await?;
    let lost = inventory.references_lost || state.walk.references_lost;
    let mut changed = false;
    let mut rebuilt = false;

    let wrong = refcounts.standing() > 0 || !planned.is_empty();
    let flags_suspect = inventory.flags_needed || state.walk.flags_needed || state.comparison.flags_wrong;
    if repair != Repair::None && (wrong || flags_suspect || state.walk.repairable_entries > 0) {
        source.clear_unknown_autoclear().await?;
    }

    if repair == Repair::All && state.walk.repairable_entries > 0 {
        changed |= repair_entries(source, &inventory, &mut structure).await?;
    }

    let must_rebuild = state.comparison.rebuild;
    let correct = match (repair, lost) {
        (Repair::None, _) | (Repair::Leaks, true) => Correct::Nothing,
        (Repair::Leaks, false) => Correct::High,
        // What looks free may be in use where references cannot be followed.
        (Repair::All, true) => Correct::Low,
        (Repair::All, false) => Correct::Both,
    };
    if must_rebuild && repair == Repair::All {
        let basis = if lost { Basis::ReferencesAndOld } else { Basis::References };
        state.whole = None;
        rebuild(source, &mut inventory, &reftable, state.references_end, basis).await?;
        refcounts = refcounts.into_repaired();
        reftable = RefTable::read(source, &mut refcounts).await?;
        state.comparison.flags_wrong = true;
        rebuilt = true;
        changed = true;
    } else if !must_rebuild && wrong && correct != Correct::Nothing {
        let used_end = state.comparison.used_end;
        refcounts = Tally::new(max_findings);
        state.comparison = correct_refcounts(
            source,
            &mut inventory,
            &reftable,
            &planned,
            correct,
            &mut state,
            &mut refcounts,
        )
        .await?;
        state.comparison.used_end = state.comparison.used_end.max(if lost { used_end } else { 0 });
        changed |= state.comparison.changed;
    }

    let mut flags = Tally::new(max_findings);
    if inventory.flags_needed || state.walk.flags_needed || state.comparison.flags_wrong {
        let nothing_else = structure.standing() == 0 && refcounts.standing() == 0;
        let correct = match repair {
            Repair::All => CorrectFlags::Yes,
            Repair::Leaks if nothing_else => CorrectFlags::Yes,
            Repair::Leaks | Repair::None => CorrectFlags::No,
        };
        judge_flags(source, &mut inventory, &reftable, &mut state, correct, &mut flags).await?;
        if correct == CorrectFlags::Yes {
            source.flush().await?;
            changed |= flags.repaired() > 0;
        }
    }

    let snapshot_table_moved = new_snapshots.is_some();
    if let Some(new) = new_snapshots {
        snapshots::switch_table(source, new.offset, new.count).await?;
        for kind in new.repairs {
            structure.add_repaired(kind);
        }
        changed = true;
    }

    let mut tally = structure.followed_by(refcounts).followed_by(flags);
    // The header is always there.
    let used_end = state.comparison.used_end.max(1);
    tally.counts.image_end_offset = used_end * source.geometry.cluster_size();
    tally.counts.total_clusters = source.geometry.host_clusters(source.header.virtual_size());
    Ok(Examination { tally, changed, rebuilt, snapshot_table_moved })
}

/// Writes the snapshot table without its damage past the end of the file.
async fn write_snapshot_table(
    source: &mut Source<'_>,
    table: &snapshots::SnapshotTable,
    repairs: Vec<FindingKind>,
    tally: &mut Tally,
) -> Result<Option<NewSnapshotTable>> {
    if source.file.kind() == FileKind::BlockDevice {
        // There is no end to write past, and what is free is not known yet.
        for kind in repairs {
            tally.add(kind, 1);
        }
        return Ok(None);
    }
    let bytes = snapshots::repaired_table(source, table)?;
    let count = table.entries.len() as u32;
    source.clear_unknown_autoclear().await?;
    if bytes.is_empty() {
        return Ok(Some(NewSnapshotTable { offset: 0, len: 0, count, repairs }));
    }
    let offset = source.file_clusters() * source.geometry.cluster_size();
    source.write(offset, &bytes).await?;
    source.flush().await?;
    Ok(Some(NewSnapshotTable { offset, len: bytes.len() as u64, count, repairs }))
}

fn planned_clusters(source: &Source<'_>, planned: Option<(u64, u64)>) -> Range<u64> {
    match planned {
        Some((offset, len)) if len > 0 => {
            let first = offset >> source.geometry.cluster_bits;
            first..first + source.geometry.host_clusters(len)
        }
        _ => 0..0,
    }
}

/// Counts everything and compares, without changing anything.
async fn count_and_compare(
    source: &Source<'_>,
    inventory: &mut Inventory,
    reftable: &RefTable,
    planned: &Range<u64>,
    structure: &mut Tally,
    refcounts: &mut Tally,
) -> Result<State> {
    let mut state = State::default();
    let mut scratch = Tally::new(0);
    let mut start = 0;
    loop {
        // What is wrong with entries is the same in each pass.
        let tally = if start == 0 { &mut *structure } else { &mut scratch };
        let (map, walk) = count(source, inventory, Some(reftable), start, tally).await?;
        if start == 0 {
            state.walk = walk;
        }
        let rebuild = reftable.judge(source, &map, refcounts);
        let found = compare(source, reftable, &map, planned.clone(), Correct::Nothing, refcounts).await?;
        let all = &mut state.comparison;
        all.used_end = all.used_end.max(found.used_end);
        all.rebuild |= found.rebuild | rebuild;
        all.flags_wrong |= found.flags_wrong;
        state.references_end = state.references_end.max(map.used_end());
        note_shared_l1(source, &map, &mut state.shared_l1);
        if map.end() == u64::MAX {
            state.whole = (start == 0).then_some(map);
            return Ok(state);
        }
        start = map.end();
    }
}

fn note_shared_l1(source: &Source<'_>, map: &RefMap, shared: &mut Vec<u64>) {
    let offset = source.header.l1_table_offset.0;
    let size = u64::from(source.header.l1_size) * 8;
    if size == 0 || source.is_past_end(offset, size) {
        return;
    }
    let bits = source.geometry.cluster_bits;
    map.visit(offset >> bits, ((offset + size - 1) >> bits) + 1, |cluster, cell| {
        if cell.count != 1 {
            shared.push(cluster);
        }
    });
}

/// The counts of a window: those that are at hand, or counted again.
async fn window(
    source: &Source<'_>,
    inventory: &mut Inventory,
    reftable: &RefTable,
    whole: &mut Option<RefMap>,
    start: u64,
) -> Result<RefMap> {
    match whole.take() {
        Some(map) if start == 0 => Ok(map),
        _ => Ok(count(source, inventory, Some(reftable), start, &mut Tally::new(0)).await?.0),
    }
}

/// Corrects refcounts in place and makes them durable.
async fn correct_refcounts(
    source: &Source<'_>,
    inventory: &mut Inventory,
    reftable: &RefTable,
    planned: &Range<u64>,
    correct: Correct,
    state: &mut State,
    tally: &mut Tally,
) -> Result<Comparison> {
    let mut all = Comparison::default();
    let mut start = 0;
    loop {
        let map = window(source, inventory, reftable, &mut state.whole, start).await?;
        let found = compare(source, reftable, &map, planned.clone(), correct, tally).await?;
        all.used_end = all.used_end.max(found.used_end);
        all.flags_wrong |= found.flags_wrong;
        all.changed |= found.changed;
        if map.end() == u64::MAX {
            if start == 0 {
                state.whole = Some(map);
            }
            break;
        }
        start = map.end();
    }
    if all.changed {
        source.flush().await?;
    }
    Ok(all)
}

/// Judges all COPIED flags by the refcounts that are in the image now.
async fn judge_flags(
    source: &Source<'_>,
    inventory: &mut Inventory,
    reftable: &RefTable,
    state: &mut State,
    correct: CorrectFlags,
    tally: &mut Tally,
) -> Result<()> {
    let mut start = 0;
    loop {
        let mut map = window(source, inventory, reftable, &mut state.whole, start).await?;
        load_refcounts(source, reftable, &mut map).await?;
        check_flags(source, inventory, &map, &state.shared_l1, correct, tally).await?;
        if map.end() == u64::MAX {
            return Ok(());
        }
        start = map.end();
    }
}
