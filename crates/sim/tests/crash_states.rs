//! Crash states of small logs against brute force: every subset of single sectors and growths, applied literally.

use std::collections::{BTreeMap, BTreeSet};
use zebu_sim::{
    Content, CrashOptions, FailedEffect, Fault, FaultRule, LogCursor, LogEvent, OpClass, OpFilter, Seeds,
    SimConfig, SimFileConfig, SimLog, SimOp, SimRng, SimWorld,
};
use zebu_storage::{File, IoBuf, Worker};

const FILE: &str = "f";
/// The files of these tests stay within so many bytes.
const SPAN: usize = 512 * 6;

/// The bytes of a file, and nothing else.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Plain(Vec<u8>);

impl Plain {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        if self.0.len() < offset + bytes.len() {
            self.0.resize(offset + bytes.len(), 0);
        }
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    fn sector(&self, sector: usize) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        for (to, from) in bytes.iter_mut().zip(self.0.iter().skip(sector * 512)) {
            *to = *from;
        }
        bytes
    }
    /// Performs the part `start..end` of an operation.
    fn perform(&mut self, what: &SimOp, start: usize, end: usize) {
        match what {
            SimOp::Write { offset, data } => {
                self.write(start, &data[start - *offset as usize..end - *offset as usize]);
            }
            SimOp::Punch { .. } => {
                let end = end.min(self.0.len());
                if start < end {
                    self.0[start..end].fill(0);
                }
            }
            SimOp::ZeroRange { .. } => self.write(start, &vec![0; end - start]),
            SimOp::Allocate { .. } => {
                let len = self.0.len().max(end);
                self.0.resize(len, 0);
            }
            SimOp::SetLen { len } => self.0.resize(*len as usize, 0),
            _ => {}
        }
    }
}

/// One thing that lands as a whole or not at all.
enum Atom {
    Sector { sector: usize, after: Vec<u8> },
    Grow(usize),
    SetLen { len: usize, cut_from: usize, cut_to: usize },
}

struct Step {
    atom: Atom,
    /// Surely durable.
    forced: bool,
}

/// An operation as it took effect.
struct Change {
    op: u64,
    atoms: Vec<Atom>,
    completed_at: Option<usize>,
    covered: bool,
    lost: bool,
}

fn atoms_of(volatile: &mut Plain, what: &SimOp, start: usize, end: usize) -> Vec<Atom> {
    let len_before = volatile.0.len();
    volatile.perform(what, start, end);
    if let SimOp::SetLen { len } = what {
        return vec![Atom::SetLen { len: *len as usize, cut_from: *len as usize, cut_to: len_before }];
    }
    let touched = match what {
        SimOp::Write { .. } | SimOp::ZeroRange { .. } => start..end,
        SimOp::Punch { .. } => start..end.min(len_before),
        _ => start..start,
    };
    let mut atoms = Vec::new();
    if touched.start < touched.end {
        for sector in touched.start / 512..touched.end.div_ceil(512) {
            atoms.push(Atom::Sector { sector, after: volatile.sector(sector) });
        }
    }
    if start < end && !matches!(what, SimOp::Punch { .. }) {
        atoms.push(Atom::Grow(end));
    }
    atoms
}

/// All states after a crash before the event `position`, or `None` if they are too many to try.
fn brute_force(log: &SimLog, position: usize) -> Option<BTreeSet<Plain>> {
    let mut initial = Plain(Vec::new());
    let mut volatile = initial.clone();
    let mut changes: Vec<Change> = Vec::new();
    let mut open: BTreeMap<u64, (SimOp, usize)> = BTreeMap::new();
    for (index, event) in log.events()[..position].iter().enumerate() {
        match event {
            LogEvent::File { content, .. } => {
                initial = Plain(content.bytes(0..content.len()));
                volatile = initial.clone();
            }
            LogEvent::Submitted { op, what, .. } => {
                open.insert(op.0, (what.clone(), index));
            }
            LogEvent::Applied { op, range } => {
                let what = &open[&op.0].0;
                let atoms = atoms_of(&mut volatile, what, range.start as usize, range.end as usize);
                changes.push(Change { op: op.0, atoms, completed_at: None, covered: false, lost: false });
            }
            LogEvent::Completed { op, result } => {
                let (what, submitted_at) = open.remove(&op.0).unwrap();
                for change in changes.iter_mut().filter(|c| c.op == op.0) {
                    change.completed_at = Some(index);
                }
                if what == SimOp::Flush {
                    for change in &mut changes {
                        let before = change.completed_at.is_some_and(|done| done < submitted_at);
                        if result.is_ok() {
                            change.covered |= before && !change.lost;
                        } else {
                            change.lost |= !change.covered;
                        }
                    }
                    // A durable change of length takes earlier cuts along.
                    let has_length = |c: &Change| c.atoms.iter().any(|a| !matches!(a, Atom::Sector { .. }));
                    if let Some(last) = changes.iter().rposition(|c| c.covered && has_length(c)) {
                        for change in &mut changes[..last] {
                            change.covered |= matches!(change.atoms[..], [Atom::SetLen { .. }]);
                        }
                    }
                }
            }
            LogEvent::Mark(_) => {}
        }
    }
    let in_flight: Vec<SimOp> =
        open.into_values().map(|(what, _)| what).filter(|w| w.changes_file()).collect();
    if in_flight.len() > 3 {
        return None;
    }
    let mut states = BTreeSet::new();
    for order in permutations(&in_flight) {
        let mut steps: Vec<Step> = Vec::new();
        let mut scratch = volatile.clone();
        let unfinished: Vec<Vec<Atom>> = order
            .iter()
            .map(|what| {
                let range = what.range();
                atoms_of(&mut scratch, what, range.start as usize, range.end as usize)
            })
            .collect();
        let copy = |atom: &Atom| match atom {
            Atom::Sector { sector, after } => Atom::Sector { sector: *sector, after: after.clone() },
            Atom::Grow(to) => Atom::Grow(*to),
            Atom::SetLen { len, cut_from, cut_to } => {
                Atom::SetLen { len: *len, cut_from: *cut_from, cut_to: *cut_to }
            }
        };
        for change in &changes {
            steps.extend(change.atoms.iter().map(|a| Step { atom: copy(a), forced: change.covered }));
        }
        steps.extend(unfinished.into_iter().flatten().map(|atom| Step { atom, forced: false }));
        let free: Vec<usize> = (0..steps.len()).filter(|&i| !steps[i].forced).collect();
        if free.len() > 11 {
            return None;
        }
        for subset in 0..1_u32 << free.len() {
            let landed =
                |index: usize| free.iter().position(|&f| f == index).is_none_or(|bit| subset >> bit & 1 == 1);
            states.extend(apply(&initial, &steps, landed));
        }
    }
    Some(states)
}

/// The content that a choice of atoms leaves, or nothing if the choice is not allowed.
fn apply(initial: &Plain, steps: &[Step], landed: impl Fn(usize) -> bool) -> Option<Plain> {
    let last_set =
        (0..steps.len()).rev().find(|&i| matches!(steps[i].atom, Atom::SetLen { .. }) && landed(i));
    let mut bytes = initial.clone();
    let mut len = bytes.0.len();
    bytes.0.resize(2 * SPAN, 0);
    let mut not_cut: Vec<(usize, usize)> = Vec::new();
    let mut growth_over = false;
    for (index, step) in steps.iter().enumerate() {
        match &step.atom {
            Atom::SetLen { len: to, cut_from, cut_to } => {
                if landed(index) {
                    bytes.0[*to..].fill(0);
                    len = *to;
                } else if last_set.is_some_and(|last| index < last) {
                    return None;
                } else {
                    growth_over = true;
                    not_cut.push((*cut_from, *cut_to));
                }
            }
            Atom::Grow(to) if landed(index) && !growth_over => len = len.max(*to),
            Atom::Sector { sector, after } if landed(index) => {
                let cut = |&(from, to): &(usize, usize)| from < sector * 512 + 512 && sector * 512 < to;
                if !not_cut.iter().any(|c| c.0 < c.1 && cut(c)) {
                    bytes.write(sector * 512, after);
                }
            }
            _ => {}
        }
    }
    bytes.0.truncate(len);
    Some(bytes)
}

fn permutations(items: &[SimOp]) -> Vec<Vec<SimOp>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for first in 0..items.len() {
        let mut rest = items.to_vec();
        let head = rest.remove(first);
        for mut tail in permutations(&rest) {
            tail.insert(0, head.clone());
            all.push(tail);
        }
    }
    all
}

/// A few random operations on a small file; the log of what became of them.
fn small_log(seed: u64) -> SimLog {
    let mut rng = SimRng::new(seed);
    let world = SimWorld::with_config(&SimConfig { splits: 200, ..SimConfig::seeded(seed) });
    let initial: Vec<u8> = (0..rng.below(4) * 512).map(|i| i as u8 | 1).collect();
    drop(world.file(FILE, Content::from_bytes(&initial), SimFileConfig::default()));
    let flush_fails = rng.chance(1, 3);
    if flush_fails || rng.chance(1, 4) {
        let classes = if flush_fails { [OpClass::Flush; 2] } else { [OpClass::Write, OpClass::Punch] };
        let fault = Fault::Fail { errno: 5, effect: FailedEffect::Part };
        world.inject(FaultRule::new(OpFilter::of(*rng.pick(&classes)), fault).nth(0));
    }
    let worker = world.worker();
    let unit = *rng.pick(&[512, 512, 100]);
    for _ in 0..rng.between(2, 6) {
        let offset = rng.below(4 * 512 / unit) * unit;
        let len = (1 + rng.below(2 * 512 / unit)) * unit;
        // Where flushes fail, there must be others.
        let (kind, fill) = (rng.below(if flush_fails { 13 } else { 10 }), rng.next_u64() as u8 | 1);
        let (disk, task_worker) = (world.disk(), worker.clone());
        let later = rng.below(200);
        drop(worker.spawn(async move {
            task_worker.sleep(std::time::Duration::from_micros(later)).await;
            // A handle of its own: one that saw a flush fail would refuse to flush again.
            let file = disk.open(FILE, SimFileConfig::default()).unwrap();
            one_operation(&task_worker, &file, kind, offset, len, fill).await;
            disk.mark(kind);
        }));
    }
    world.run_until_idle().unwrap();
    world.log()
}

async fn one_operation(worker: &Worker, file: &File, kind: u64, offset: u64, len: u64, fill: u8) {
    // Faults are part of the game.
    let _ = match kind {
        0..4 => worker.write(file, offset, IoBuf::copy_of(&vec![fill; len as usize]).into()).await.0,
        4 => worker.punch_hole(file, offset, len).await,
        5 => worker.zero_range(file, offset, len).await,
        6 => worker.allocate(file, offset, len).await,
        7 => worker.set_len(file, offset).await,
        _ => worker.flush(file).await,
    };
}

fn plain(content: &Content) -> Plain {
    Plain(content.bytes(0..content.len()))
}

#[test]
fn exhaustive_states_are_those_of_brute_force() {
    let (mut compared, mut largest, mut skipped) = (0, 0, 0);
    Seeds::new(60).run(|seed| {
        let log = small_log(seed);
        let mut cursor = LogCursor::new(&log);
        for position in 1..=log.events().len() {
            cursor.advance_to(position);
            let states = cursor.crash_states(&CrashOptions { max_states: 20_000, ..CrashOptions::default() });
            let Some(expected) = brute_force(&log, position).filter(|_| states.is_exhaustive()) else {
                skipped += 1;
                continue;
            };
            let got: BTreeSet<Plain> = states.map(|s| plain(s.file(FILE).unwrap())).collect();
            let (missing, extra) = (expected.difference(&got).count(), got.difference(&expected).count());
            assert!(missing + extra == 0, "before event {position}: {missing} missing, {extra} extra\n{log}");
            compared += 1;
            largest = largest.max(got.len());
        }
    });
    eprintln!("{compared} points compared, the largest with {largest} states; {skipped} too large");
    if std::env::var_os("ZEBU_SEED").is_none() {
        assert!(compared > 10 * skipped && largest > 100, "{compared} {skipped} {largest}");
    }
}

#[test]
fn sampled_states_are_legal_and_hold_the_extremes() {
    let mut compared = 0;
    Seeds::new(50).run(|seed| {
        let log = small_log(seed);
        let mut cursor = LogCursor::new(&log);
        for position in 1..=log.events().len() {
            cursor.advance_to(position);
            let options = CrashOptions { max_states: 25, seed, ..CrashOptions::default() };
            let states = cursor.crash_states(&options);
            if states.is_exhaustive() {
                continue;
            }
            let Some(legal) = brute_force(&log, position) else { continue };
            let mut found_volatile = false;
            let volatile = plain(&cursor.content(FILE).unwrap());
            for state in states {
                let content = plain(state.file(FILE).unwrap());
                assert!(legal.contains(&content), "{state} before event {position} is not legal\n{log}");
                found_volatile |= content == volatile;
            }
            assert!(
                found_volatile,
                "the state of a killed process is missing before event {position}\n{log}"
            );
            compared += 1;
        }
    });
    if std::env::var_os("ZEBU_SEED").is_none() {
        assert!(compared > 20, "{compared}");
    }
}

#[test]
fn states_are_the_same_for_the_same_seed() {
    let log = small_log(4);
    let mut cursor = LogCursor::new(&log);
    cursor.advance_to(log.events().len() / 2);
    let describe = |seed| -> Vec<String> {
        let options = CrashOptions { max_states: 12, seed, ..CrashOptions::default() };
        cursor.crash_states(&options).map(|s| s.to_string()).collect()
    };
    assert_eq!(describe(1), describe(1));
}

#[test]
fn samples_hold_every_single_loss_and_every_single_survivor() {
    const WRITES: u64 = 10;
    let world = SimWorld::new(1);
    let file = world.file(FILE, Content::hole(WRITES * 8192), SimFileConfig::default());
    let worker = world.worker();
    let all = async {
        for n in 0..WRITES {
            worker.write(&file, n * 8192, IoBuf::copy_of(&[n as u8 + 1; 8192]).into()).await.0.unwrap();
        }
    };
    world.block_on(all).unwrap();
    let states = world.crash_states(&CrashOptions { max_states: 200, ..CrashOptions::default() });
    assert!(!states.is_exhaustive());
    let (mut landed_sets, mut torn_sectors, mut torn_blocks) = (BTreeSet::new(), 0, 0);
    for state in states {
        let bytes = state.file(FILE).unwrap().bytes(0..WRITES * 8192);
        let sectors: Vec<bool> = bytes.chunks(512).map(|s| s.iter().all(|&b| b != 0)).collect();
        assert!(bytes.chunks(512).zip(&sectors).all(|(s, landed)| *landed || s.iter().all(|&b| b == 0)));
        let whole = |writes: &[bool]| writes.iter().all(|&l| l == writes[0]);
        if !sectors.chunks(8).all(whole) {
            torn_sectors += 1;
        } else if sectors.chunks(16).all(whole) {
            landed_sets.insert(sectors.chunks(16).map(|w| w[0]).collect::<Vec<bool>>());
        } else {
            torn_blocks += 1;
        }
    }
    let count =
        |landed: usize| landed_sets.iter().filter(|s| s.iter().filter(|&&l| l).count() == landed).count();
    assert_eq!((count(0), count(1), count(9), count(10)), (1, 10, 10, 1));
    assert!(torn_sectors > 10 && torn_blocks > 10, "{torn_sectors} {torn_blocks}");
}

#[test]
fn huge_sparse_files_cost_little() {
    let world = SimWorld::new(2);
    let file = world.file(FILE, Content::hole(16 << 40), SimFileConfig::default());
    let worker = world.worker();
    let all = async {
        worker.write(&file, 8 << 40, IoBuf::copy_of(&[1; 512]).into()).await.0.unwrap();
        worker.flush(&file).await.unwrap();
        worker.punch_hole(&file, 0, 16 << 40).await.unwrap();
        worker.zero_range(&file, 1 << 40, 4 << 40).await.unwrap();
        worker.set_len(&file, 1 << 30).await.unwrap();
    };
    world.block_on(all).unwrap();
    let states = world.crash_states(&CrashOptions { max_states: 100, ..CrashOptions::default() });
    assert!(states.is_exhaustive());
    let found: BTreeSet<(u64, u8)> = states
        .map(|state| {
            let content = state.file(FILE).unwrap();
            (content.len(), content.bytes(8 << 40..(8 << 40) + 1)[0])
        })
        .collect();
    assert_eq!(found, BTreeSet::from([(16 << 40, 0), (16 << 40, 1), (1 << 30, 0)]));
    let sampled = world.crash_states(&CrashOptions { max_states: 2, ..CrashOptions::default() });
    assert_eq!(sampled.count(), 2);
}
