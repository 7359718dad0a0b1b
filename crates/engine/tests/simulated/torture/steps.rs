//! Every named step of a commit, with every kind of failure, while every kind of operation is under way.
//!
//! For each cell of the table: requests make an epoch that needs the step; a flush commits it; when the step begins, its
//! first operation on the disk is held, another operation of the guest starts, crash states are taken, and then the
//! failure strikes. Afterwards nothing acknowledged is lost, everything works again (but after a failed sync, which is
//! final), and the image is sound. A step that was not reached fails the test: the table has no holes.

use crate::crash::guest::{Failures, Guest};
use crate::crash::judge::{Leaks, judge, read_all};
use crate::crash::setup::{Files, NAMES, Origin, Setup, TOP};
use crate::torture::invariants::Invariants;
use crate::torture::whole::{Change, Whole};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use zebu_engine::check::{CheckOptions, check_file};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Durability, ErrorKind, Image, OpenOptions, ZeroMode};
use zebu_sim::{
    CrashOptions, FailedEffect, Fault, FaultPlan, FaultRule, GuestModel, GuestRequest, GuestResult, OpClass,
    OpFilter, Seeds, SimFileConfig, SimRng, SimWorld, Tally, Tear,
};
use zebu_storage::commit_steps::{self, CommitStep};
use zebu_storage::sabotage::{self, Limit};

/// EIO and ENOSPC.
const IO: i32 = 5;
const FULL: i32 = 28;
/// Steps of the world for which the step's operation is held.
const HELD: u64 = 40;
/// Steps of the world between crash states of what goes on after the step.
const LATER: u64 = 8;

/// The failure of the first operation of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strike {
    PowerFails,
    Io,
    IoInPart,
    IoAfterAll,
    NoSpace,
    TwoParts,
    Late,
}

const STRIKES: [(Strike, &str); 7] = [
    (Strike::PowerFails, "power fails"),
    (Strike::Io, "EIO"),
    (Strike::IoInPart, "EIO, part done"),
    (Strike::IoAfterAll, "EIO, all done"),
    (Strike::NoSpace, "ENOSPC"),
    (Strike::TwoParts, "in two parts"),
    (Strike::Late, "late"),
];

/// The operation beside the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Other {
    WriteFresh,
    Overwrite,
    WriteDurable,
    WriteCompressed,
    ZeroKeep,
    ZeroUnmap,
    Discard,
    Flush,
    Read,
    Grow,
    Shrink,
    /// No request of a guest.
    Whole(Change),
}

const OTHERS: [(Other, &str); 16] = [
    (Other::WriteFresh, "write"),
    (Other::Overwrite, "overwrite"),
    (Other::WriteDurable, "FUA"),
    (Other::WriteCompressed, "compressed"),
    (Other::ZeroKeep, "zero"),
    (Other::ZeroUnmap, "zero, unmap"),
    (Other::Discard, "discard"),
    (Other::Flush, "flush"),
    (Other::Read, "read"),
    (Other::Grow, "grow"),
    (Other::Shrink, "shrink"),
    (Other::Whole(Change::TakeSnapshot), "snapshot"),
    (Other::Whole(Change::GoBack), "going back to it"),
    (Other::Whole(Change::DeleteSnapshot), "its deletion"),
    (Other::Whole(Change::AddBitmap), "bitmap"),
    (Other::Whole(Change::ClearBitmap), "its clearing"),
];

impl Strike {
    /// How those that have to be told of it are told; `None` if nothing fails.
    fn failure(self) -> Option<ErrorKind> {
        match self {
            Self::Io | Self::IoInPart | Self::IoAfterAll => Some(ErrorKind::Io),
            Self::NoSpace => Some(ErrorKind::NoSpace),
            Self::PowerFails | Self::TwoParts | Self::Late => None,
        }
    }
}

impl Other {
    fn is_of_snapshots(self) -> bool {
        matches!(self, Self::Whole(change) if change.is_of_snapshots())
    }

    /// Whether it makes something that the invariants at every step do not look at.
    fn is_beyond_the_invariants(self) -> bool {
        matches!(self, Self::Whole(_))
    }
}

const STEPS: [CommitStep; 13] = [
    CommitStep::NewRefcountBlocks,
    CommitStep::Barrier0,
    CommitStep::RefcountTableEntries,
    CommitStep::MovedRefcountTable,
    CommitStep::BarrierOfMovedTable,
    CommitStep::HeaderOfMovedTable,
    CommitStep::RefcountBlocks,
    CommitStep::NewTables,
    CommitStep::BarrierOfDataFile,
    CommitStep::Barrier1,
    CommitStep::Links,
    CommitStep::Barrier2,
    CommitStep::Punch,
];

fn moves_the_table(step: CommitStep) -> bool {
    matches!(
        step,
        CommitStep::MovedRefcountTable | CommitStep::BarrierOfMovedTable | CommitStep::HeaderOfMovedTable
    )
}

/// The kind of the step's operations on the disk.
fn class(step: CommitStep) -> OpClass {
    match step {
        CommitStep::Barrier0
        | CommitStep::BarrierOfMovedTable
        | CommitStep::BarrierOfDataFile
        | CommitStep::Barrier1
        | CommitStep::Barrier2 => OpClass::Flush,
        CommitStep::Punch => OpClass::Punch,
        _ => OpClass::Write,
    }
}

/// Whether there is such a thing.
fn can_be(step: CommitStep, strike: Strike, other: Other) -> bool {
    let strikes = match (class(step), strike) {
        // A sync is done or not; the kernel says EIO or ENOSPC.
        (OpClass::Flush, Strike::IoInPart | Strike::IoAfterAll | Strike::TwoParts)
        | (OpClass::Punch, Strike::TwoParts) => false,
        _ => true,
    };
    // An image with an external data file has neither compressed clusters nor internal snapshots.
    let beside = step != CommitStep::BarrierOfDataFile
        || !(other.is_of_snapshots() || other == Other::WriteCompressed);
    strikes && beside
}

/// An image in which the step comes.
fn setup(step: CommitStep) -> Setup {
    let plain = Setup { cluster_size: 512, refcount_bits: 64, origin: Origin::Own, ..Setup::plain() };
    if moves_the_table(step) {
        // The refcount table of one cluster counts 2 MiB.
        return Setup { size: 2600 << 10, pattern: 1960 << 10, gather_memory: Some(16 << 10), ..plain };
    }
    if step == CommitStep::BarrierOfDataFile {
        return Setup { size: 128 << 10, pattern: 24 << 10, external_data: true, ..plain };
    }
    Setup { size: 160 << 10, pattern: 24 << 10, gather_memory: Some(16 << 10), ..plain }
}

struct Bench<'a> {
    setup: &'a Setup,
    world: &'a SimWorld,
    workers: Vec<Worker>,
    guest: Rc<Guest>,
    other: Other,
    whole: Rc<Whole>,
    /// Whether the flush that makes the commit said that it was done.
    has_flushed: Rc<Cell<bool>>,
    states: u64,
}

/// One cell: how many crash states were judged.
fn cell(
    step: CommitStep,
    strike: Strike,
    other: Other,
    files: &Files,
    setup: &Setup,
    seed: u64,
    tally: &Tally,
) -> Result<u64, String> {
    let mut rng = SimRng::new(seed ^ 0x7374_6570_7300);
    let world = setup.world(files, rng.next_u64());
    world.count_in(tally);
    let workers: Vec<Worker> = (0..2).map(|_| world.worker()).collect();
    let image = setup.open(&world, &workers[0])?;
    let mut model = setup.model();
    model.count_in(tally);
    let guest = Rc::new(Guest::new(image, model, setup));
    let whole = Rc::new(Whole::new(guest.clone(), setup.pattern));
    let has_flushed = Rc::default();
    let mut bench = Bench { setup, world: &world, workers, guest, other, whole, has_flushed, states: 0 };
    bench.prepare()?;
    bench.strike(step, strike, &mut rng)?;
    bench.judge_failures(step, strike)?;
    if class(step) == OpClass::Flush && strike.failure().is_some() {
        bench.afterwards_nothing_is_written()?;
    } else {
        bench.afterwards()?;
    }
    Ok(bench.states)
}

impl Bench<'_> {
    fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, String> {
        let value = self.world.block_on(work).map_err(|stuck| stuck.to_string())?;
        self.guest.violation.borrow_mut().take().map_or(Ok(value), Err)
    }

    /// The beginning of an epoch that needs the step.
    fn prepare(&self) -> Result<(), String> {
        let (guest, worker) = (&self.guest, &self.workers[0]);
        self.run(async {
            if self.other == Other::Whole(Change::DeleteSnapshot) {
                self.whole.take_old_snapshot(worker).await;
            }
            let pattern = self.setup.pattern;
            // Space that goes back; where a snapshot keeps it, it has to be the epoch's own.
            guest.write(worker, pattern + 2048, 2048, Durability::Durable).await;
            if self.other == Other::Whole(Change::ClearBitmap) {
                self.whole.add_old_bitmap(worker).await;
                // A window that begins within a refcount block: else all that is dirty is new.
                guest.write(worker, pattern + (16 << 10), 8192, Durability::Durable).await;
            }
            guest.discard(worker, pattern + 2048, 1024).await;
            guest.discard(worker, 1024, 1024).await;
        })
    }

    fn strike(&mut self, step: CommitStep, strike: Strike, rng: &mut SimRng) -> Result<(), String> {
        let filter = match class(step) {
            OpClass::Flush => OpFilter::of(OpClass::Flush),
            class => OpFilter::of(class).on_file(TOP),
        };
        let fault = match strike {
            Strike::PowerFails => None,
            Strike::Io => Some(Fault::Fail { errno: IO, effect: FailedEffect::Nothing }),
            Strike::IoInPart => Some(Fault::Fail { errno: IO, effect: FailedEffect::Part }),
            Strike::IoAfterAll => Some(Fault::Fail { errno: IO, effect: FailedEffect::All }),
            Strike::NoSpace => Some(Fault::Fail { errno: FULL, effect: FailedEffect::Nothing }),
            Strike::TwoParts => Some(Fault::Split { bytes: 256 }),
            Strike::Late => Some(Fault::Delay(std::time::Duration::from_millis(20))),
        };
        if strike.failure().is_some() {
            self.guest.failures.set(Failures::OfTheDisk);
        }
        let hold = Rc::new(RefCell::new(None));
        let has_nothing = Rc::new(Cell::new(false));
        let has_caught = Rc::new(Cell::new(false));
        let (disk, held, nothing, caught) =
            (self.world.disk(), hold.clone(), has_nothing.clone(), has_caught.clone());
        let mut is_over = false;
        commit_steps::observe(Some(Box::new(move |begun| {
            if let Some(id) = *held.borrow() {
                // The next step begins. If nothing was held by then, this one had nothing to do.
                if !is_over && begun != CommitStep::Punch {
                    is_over = true;
                    nothing.set(!caught.get() && disk.held(id).is_empty());
                }
            } else if begun == step {
                if let Some(fault) = fault {
                    disk.inject(FaultRule::new(filter.clone(), fault).nth(0));
                }
                *held.borrow_mut() = Some(disk.hold(filter.clone()));
            }
        })));
        let (guest, worker) = (self.guest.clone(), self.workers[0].clone());
        // Another L2 table, another refcount block; or so many that the refcount table is too small.
        let fresh = if moves_the_table(step) { 320 << 10 } else { 40 << 10 };
        let place = self.setup.pattern + (32 << 10);
        let ended = Rc::new(Cell::new(0));
        let (flush_ended, has_flushed) = (ended.clone(), self.has_flushed.clone());
        drop(self.workers[0].spawn(async move {
            guest.write(&worker, place, fresh, Durability::Volatile).await;
            guest.write(&worker, 4096, 512, Durability::Volatile).await;
            let is_done = guest.try_flush(&worker).await;
            has_flushed.set(is_done);
            flush_ended.set(flush_ended.get() + 1);
        }));
        // The punch comes after the flush: everything is waited for by its own count.
        let world = self.world;
        let mut invariants = Invariants::new(self.setup, world);
        let has_invariants = !self.other.is_beyond_the_invariants() && !moves_the_table(step);
        let (mut since, mut is_under_way, mut has_later) = (0, false, false);
        let limit = 200_000;
        for turn in 0.. {
            let idle = world.step() == zebu_sim::Step::Idle;
            if let Some(violation) = self.guest.violation.borrow_mut().take() {
                commit_steps::observe(None);
                return Err(violation);
            }
            if has_invariants {
                invariants.check(&self.guest.model.borrow())?;
            }
            let holding = *hold.borrow();
            if let Some(id) = holding {
                if !is_under_way {
                    is_under_way = true;
                    let (guest, worker) = (self.guest.clone(), self.workers[1].clone());
                    let other_ended = ended.clone();
                    let work = beside(guest, self.whole.clone(), worker, self.other, self.setup.pattern);
                    drop(self.workers[1].spawn(async move {
                        work.await;
                        other_ended.set(other_ended.get() + 1);
                    }));
                }
                has_caught.set(has_caught.get() || !world.held(id).is_empty());
                since += 1;
                if since == HELD || (idle && since < HELD) {
                    since = HELD;
                    let most = if strike == Strike::PowerFails { 16 } else { 4 };
                    self.crash_states(most, rng.next_u64())?;
                    world.release(id);
                } else if since == HELD + 12 && strike == Strike::PowerFails {
                    self.crash_states(8, rng.next_u64())?;
                } else if since == HELD + 12 && !has_invariants {
                    self.crash_states(2, rng.next_u64())?;
                } else if strike == Strike::PowerFails
                    && self.whole.is_under_way()
                    && since > HELD
                    && since % LATER == 0
                {
                    // It waits for the step; what it does itself comes after.
                    self.crash_states(1, rng.next_u64())?;
                    has_later = true;
                }
                if since > HELD && idle && ended.get() == 2 {
                    break;
                }
            } else if idle {
                break;
            }
            if turn > limit {
                return Err("no end in sight".into());
            }
        }
        commit_steps::observe(None);
        if !is_under_way || has_nothing.get() || !has_caught.get() {
            return Err(format!("{step:?} was not reached, or had nothing to do"));
        }
        if ended.get() != 2 {
            return Err("a request did not end".into());
        }
        if strike == Strike::PowerFails && self.other.is_beyond_the_invariants() && !has_later {
            return Err("nothing was looked at of what came after the step".into());
        }
        world.set_faults(FaultPlan::none());
        if !has_invariants {
            self.crash_states(4, rng.next_u64())?;
        }
        Ok(())
    }

    fn crash_states(&mut self, most: usize, seed: u64) -> Result<(), String> {
        let options = CrashOptions { max_states: most, tear: Tear::Sector, seed };
        for state in self.world.crash_states(&options) {
            self.states += 1;
            self.judge(state.files().to_vec()).map_err(|e| format!("crash, {state}: {e}"))?;
        }
        Ok(())
    }

    fn judge(&self, files: Files) -> Result<(), String> {
        let model = self.guest.model.borrow();
        match self.other {
            Other::Whole(change) if change.is_of_snapshots() => {
                return self.judge_after_repair(&files, &model, change);
            }
            // Bits that were being recorded are not to be trusted after a crash; the bitmap is there.
            Other::Whole(Change::AddBitmap) => self.judge_bitmaps(&files, Change::AddBitmap)?,
            _ => {}
        }
        judge(self.setup, &files, &model, Leaks::Allowed).map(drop)
    }

    fn judge_bitmaps(&self, files: &Files, change: Change) -> Result<(), String> {
        let world = self.setup.world(files, 0);
        let worker = world.worker();
        let judged = world.block_on(async {
            let options = OpenOptions::default();
            let image = Image::open_files(&worker, self.setup.chain(&world), &options).await;
            let image = image.map_err(|e| format!("open: {e}"))?;
            self.whole.judge_image(&worker, &image, change).await
        });
        judged.map_err(|stuck| stuck.to_string())?
    }

    /// As [`judge`], with snapshots, and where flags and counts may disagree until the next opening for writing has mended
    /// them, as the dirty bit announces.
    fn judge_after_repair(&self, files: &Files, model: &GuestModel, change: Change) -> Result<(), String> {
        let world = self.setup.world(files, 0);
        let worker = world.worker();
        let judged = world.block_on(async {
            let open = async |options: &OpenOptions| {
                let image = Image::open_files(&worker, self.setup.chain(&world), options).await;
                image.map_err(|e| format!("open: {e}"))
            };
            let image = open(&self.setup.options()).await?;
            let len = image.virtual_size();
            if !model.may_have_len(len) {
                return Err(format!("the disk has {len} bytes"));
            }
            let disk = read_all(&worker, &image, len).await?;
            model.check(0, &disk).map_err(|v| v.to_string())?;
            self.whole.judge_image(&worker, &image, change).await?;
            let snapshots = image.snapshots();
            image.close(&worker).await.map_err(|e| format!("close: {e}"))?;
            for snapshot in snapshots {
                let options = OpenOptions::default().snapshot(Some(snapshot.name.clone()));
                let image = open(&options).await?;
                let bytes = read_all(&worker, &image, image.virtual_size()).await?;
                self.whole.judge_snapshot(model, &snapshot.name, &bytes)?;
            }
            let top = world.open(TOP, SimFileConfig::default()).unwrap();
            let report = check_file(&worker, &top, &CheckOptions::default())
                .await
                .map_err(|e| format!("check: {e}"))?;
            match report.counts.corruptions + report.counts.check_errors {
                0 => Ok(()),
                _ => Err(format!(
                    "check: {:?} {:?}",
                    report.counts,
                    report.findings.first().map(ToString::to_string)
                )),
            }
        });
        judged.map_err(|stuck| stuck.to_string())?
    }

    /// The flush that makes the commit is told of what failed, as what it was; nobody is told of anything else. (Others that
    /// wait may have had it done once more.)
    fn judge_failures(&self, step: CommitStep, strike: Strike) -> Result<(), String> {
        let failed = self.guest.failed.borrow();
        let poisons = class(step) == OpClass::Flush && strike.failure().is_some();
        let is_right =
            |kind: &ErrorKind| Some(*kind) == strike.failure() || (poisons && *kind == ErrorKind::Poisoned);
        if let Some(wrong) = failed.iter().find(|kind| !is_right(kind)) {
            return Err(format!("a request failed with {wrong:?}"));
        }
        // Space that is not given back to the file system is no failure.
        let has_to_be_told = strike.failure().is_some() && step != CommitStep::Punch;
        if has_to_be_told && !failed.iter().any(|kind| Some(*kind) == strike.failure()) {
            return Err("nobody was told that it failed".into());
        }
        if self.has_flushed.get() == has_to_be_told {
            return Err(format!("the flush said that it was done: {}", self.has_flushed.get()));
        }
        Ok(())
    }

    /// After a failed sync.
    fn afterwards_nothing_is_written(&mut self) -> Result<(), String> {
        let (image, worker) = (&self.guest.image, &self.workers[0]);
        let (written, flushed) = self.run(async {
            let bytes = IoBuf::zeroed(512).into();
            (image.write(worker, 0, bytes, Durability::Volatile).await.0, image.flush(worker).await)
        })?;
        for (what, result) in [("write", written), ("flush", flushed)] {
            if !result.as_ref().is_err_and(|e| e.kind() == ErrorKind::Poisoned) {
                return Err(format!("a {what} after a failed sync: {result:?}"));
            }
        }
        self.crash_states(6, 1)
    }

    fn afterwards(&mut self) -> Result<(), String> {
        self.guest.failures.set(Failures::Forbidden);
        let (guest, worker) = (&self.guest, &self.workers[0]);
        if let Other::Whole(change) = self.other {
            self.run(self.whole.must_have_done(worker, change))??;
        }
        self.run(guest.flush(worker))?;
        let len = guest.model.borrow().len().min(guest.image.virtual_size());
        let op = guest.model.borrow_mut().begin(GuestRequest::Read);
        let disk = self.run(read_all(worker, &guest.image, len))??;
        guest.model.borrow().check_read(op, 0, &disk).map_err(|v| format!("read of the whole: {v}"))?;
        guest.model.borrow_mut().end(op, GuestResult::Done);
        self.run(guest.image.close(worker))?.map_err(|e| format!("close: {e}"))?;
        guest.model.borrow_mut().apply(GuestRequest::Flush);
        let files: Files =
            NAMES.iter().filter_map(|name| Some(((*name).to_owned(), self.world.content(name)?))).collect();
        if self.other == Other::Whole(Change::ClearBitmap) {
            self.judge_bitmaps(&files, Change::ClearBitmap).map_err(|e| format!("after close: {e}"))?;
        }
        self.judge(files).map_err(|e| format!("after close: {e}"))
    }
}

/// Runs the operation beside the step.
async fn beside(guest: Rc<Guest>, whole: Rc<Whole>, worker: Worker, other: Other, pattern: u64) {
    let len = guest.model.borrow().len();
    match other {
        Other::WriteFresh => guest.write(&worker, len - 8192, 4096, Durability::Volatile).await,
        Other::Overwrite => guest.write(&worker, 4096, 2048, Durability::Volatile).await,
        Other::WriteDurable => guest.write(&worker, len - 4096, 1024, Durability::Durable).await,
        Other::WriteCompressed => guest.write_compressed(&worker, 8192, 1024, Durability::Volatile).await,
        Other::ZeroKeep => guest.zero(&worker, 4096, 2048, ZeroMode::Keep).await,
        Other::ZeroUnmap => guest.zero(&worker, 4096, 2048, ZeroMode::Unmap).await,
        Other::Discard => guest.discard(&worker, 4096, 2048).await,
        Other::Flush => guest.flush(&worker).await,
        Other::Read => guest.read(&worker, 0, pattern).await,
        Other::Grow => guest.resize(&worker, len + 8192).await,
        Other::Shrink => guest.resize(&worker, len - 8192).await,
        Other::Whole(change) => whole.begin(&worker, change).await,
    }
}

/// A table of all cells: crash states judged in each. Where nobody asks for the table, every fourth cell is enough.
#[test]
fn every_step_survives_every_failure() {
    let is_whole = std::env::var_os("ZEBU_COVERAGE").is_some();
    let only = std::env::var("ZEBU_CELL").ok();
    // Before the first image is made: all cells are to be what they are by themselves.
    sabotage::limit(Limit::WindowBytes, 4096);
    let seeds = Seeds::new(1);
    seeds.run(|seed| {
        let mut rows: Vec<Vec<String>> = Vec::new();
        for step in STEPS {
            let setup = setup(step);
            let files = setup.make(seed);
            for (strike, strike_name) in STRIKES {
                let mut row = vec![format!("{step:?}"), strike_name.to_owned()];
                for (index, (other, other_name)) in OTHERS.into_iter().enumerate() {
                    let name = format!("{step:?}, {strike_name}, {other_name}");
                    if !can_be(step, strike, other) {
                        row.push("–".to_owned());
                        continue;
                    }
                    let in_slice = (rows.len() + index) % 4 == seed as usize % 4;
                    if only.is_none() && !is_whole && !in_slice
                        || only.as_ref().is_some_and(|only| *only != name)
                    {
                        row.push(String::new());
                        continue;
                    }
                    let seed = seed ^ (index as u64) << 32;
                    let judged = cell(step, strike, other, &files, &setup, seed, seeds.tally());
                    commit_steps::observe(None);
                    let states = judged.unwrap_or_else(|e| {
                        panic!("{name}: {e}\nthis cell alone: ZEBU_CELL='{name}' and the command below")
                    });
                    row.push(states.to_string());
                }
                rows.push(row);
            }
        }
        eprintln!("{:?}", seeds.tally());
        write_table(&rows);
    });
}

/// Prints the table, and writes it as JSON where the environment says.
fn write_table(rows: &[Vec<String>]) {
    let mut columns = vec!["step".to_owned(), "failure".to_owned()];
    columns.extend(OTHERS.iter().map(|(_, name)| (*name).to_owned()));
    for row in std::iter::once(&columns).chain(rows) {
        eprintln!("{}", row.join(" | "));
    }
    let Some(path) = std::env::var_os("ZEBU_COVERAGE") else { return };
    let list = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().map(|cell| format!("\"{cell}\"")).collect();
        format!("[{}]", cells.join(","))
    };
    let rows: Vec<String> = rows.iter().map(list).collect();
    let text = format!("{{\"columns\":{},\"rows\":[{}]}}\n", list(&columns), rows.join(","));
    std::fs::write(path, text).unwrap();
}
