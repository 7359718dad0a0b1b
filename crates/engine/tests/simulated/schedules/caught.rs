//! Deliberate faults: each is noticed by a named scenario within so many executions, and the sound engine passes all of
//! them.

use crate::crash::guest::Request;
use crate::crash::limits::Limits;
use crate::crash::setup::Files;
use crate::schedules::explore::{executions, explore, first_failure, tell_how_to_repeat};
use crate::schedules::ground::{self, Ground, border, guest_at};
use crate::schedules::plan::{Op, Plan};
use crate::schedules::report::Report;
use crate::schedules::run::run;
use shuttle::rand::RngCore;
use std::sync::atomic::Ordering;
use zebu_engine::{Durability, ZeroMode};
use zebu_storage::sabotage::{Fault, under};

struct Scenario {
    name: &'static str,
    /// Name of the image.
    ground: &'static str,
    threads: fn(&Files) -> Vec<Vec<Op>>,
    /// Bytes of an allocation window at most. With small ones the image's own worker, which refills them, can't be in
    /// the middle of something else meanwhile.
    window: u64,
    fault: Fault,
    /// Executions within which the fault is noticed.
    within: usize,
}

const SECTOR: u64 = 512;
/// Bytes that one table of the images with the smallest clusters maps.
const TABLE: u64 = 32 << 10;
/// Where the last cluster of the overlay of a raw file begins, a sector long.
const LAST_CLUSTER: u64 = 5 * 4096;
/// Bytes of a window that lasts for all of a scenario.
const LARGE: u64 = 64 << 10;

fn write(offset: u64) -> Op {
    Op::Guest(Request::Write { offset, len: SECTOR, durability: Durability::Volatile })
}

fn read(offset: u64) -> Op {
    Op::Guest(Request::Read { offset, len: SECTOR })
}

fn discard(offset: u64) -> Op {
    Op::Guest(Request::Discard { offset, len: SECTOR })
}

fn zero(offset: u64) -> Op {
    Op::Guest(Request::Zero { offset, len: SECTOR, mode: ZeroMode::Keep })
}

fn flush() -> Op {
    Op::Guest(Request::Flush)
}

static SCENARIOS: [Scenario; 13] = [
    Scenario {
        name: "a table is copied while a commit freezes",
        ground: "shared",
        threads: |_| {
            let borders = (1..4).flat_map(|table| [write(table * TABLE - SECTOR), write(table * TABLE)]);
            vec![borders.collect(), vec![flush(), flush(), flush()]]
        },
        window: LARGE,
        fault: Fault::FreezeTablesFirst,
        within: 30000,
    },
    Scenario {
        name: "a table is copied while a slice of it is loaded",
        ground: "shared",
        threads: |_| {
            let tables = || (0..3).map(|table| table * TABLE);
            vec![tables().map(write).collect(), tables().map(|at| read(at + SECTOR)).collect()]
        },
        window: LARGE,
        fault: Fault::LookAtNewTablesFirst,
        within: 30000,
    },
    Scenario {
        name: "a change in a table that another thread makes is flushed",
        ground: "overlay of raw",
        threads: |_| vec![vec![zero(LAST_CLUSTER)], vec![zero(LAST_CLUSTER), flush()]],
        window: LARGE,
        fault: Fault::NoteEntriesLate,
        within: 60000,
    },
    Scenario {
        name: "a slice is loaded twice because time passes",
        ground: "overlay of qcow2",
        threads: |_| {
            vec![vec![write(0), flush()], vec![write(8 * SECTOR), flush()], vec![write(16 * SECTOR)]]
        },
        window: LARGE,
        fault: Fault::EndLoadsLate,
        within: 60000,
    },
    Scenario {
        name: "writes in more slices than there is room for",
        ground: "overlay of qcow2",
        threads: |_| {
            (0..3).map(|thread| (0..3).map(|turn| write((turn * 2 + thread) % 5 * TABLE)).collect()).collect()
        },
        window: LARGE,
        fault: Fault::LoadUnpinned,
        within: 3000,
    },
    Scenario {
        name: "reads through the chain while all slices are dirty",
        ground: "overlay of qcow2",
        threads: |_| {
            vec![
                vec![write(0), write(TABLE), zero(2 * TABLE)],
                vec![read(3 * TABLE), read(4 * TABLE), read(0)],
            ]
        },
        window: 1,
        fault: Fault::GiveBackUntaken,
        within: 3000,
    },
    Scenario {
        name: "a disk grows beside reads of its last cluster",
        ground: "overlay of small clusters",
        // By its length, the disk grows without setting space aside.
        threads: |_| {
            let grow = Op::Resize((16 << 10) + 3 * SECTOR);
            vec![vec![read(8 << 10), grow], vec![read(8 << 10), read(8 << 10)]]
        },
        window: LARGE,
        fault: Fault::KeepOldEnd,
        within: 1000,
    },
    Scenario {
        name: "a table of two clusters is made where one lies before a border",
        ground: "before a border",
        threads: |files| {
            let data_at = |host| guest_at(files, host).expect("data") * SECTOR;
            let (before, behind) = (data_at(border(files) - 1), data_at(border(files)));
            vec![
                vec![discard(before), discard(behind), Op::TakeSnapshot("one".to_owned()), flush()],
                vec![read(before), flush()],
            ]
        },
        window: 8 * SECTOR,
        fault: Fault::ForgetSetAside,
        within: 1000,
    },
    Scenario {
        name: "a thread goes in the middle of a flush",
        ground: "recycled",
        threads: |_| vec![vec![write(0), Op::FlushAndLeave(0)], vec![write(40 * SECTOR), flush(), read(0)]],
        window: 1,
        fault: Fault::RunOnCaller,
        within: 1000,
    },
    Scenario {
        name: "a thread goes when a commit waits for a mutex",
        ground: "recycled",
        threads: |_| {
            vec![vec![write(0), Op::FlushAndLeave(1)], vec![write(40 * SECTOR), write(41 * SECTOR), flush()]]
        },
        window: 1,
        fault: Fault::RunOnCaller,
        within: 1000,
    },
    Scenario {
        name: "a thread goes when its flush is done",
        ground: "recycled",
        threads: |_| vec![vec![discard(30 * SECTOR), Op::FlushThenLeave], vec![read(0), Op::Close]],
        window: 1,
        fault: Fault::RunOnCaller,
        within: 1000,
    },
    Scenario {
        name: "an image is closed beside flushes",
        ground: "recycled",
        threads: |_| {
            vec![
                vec![discard(30 * SECTOR), Op::CloseBeside],
                vec![Op::FlushBeside, Op::FlushBeside, Op::FlushBeside, Op::FlushBeside],
            ]
        },
        window: 1,
        fault: Fault::CloseBesideCommit,
        within: 30000,
    },
    Scenario {
        name: "a close fails beside flushes",
        ground: "recycled",
        threads: |_| {
            vec![
                vec![discard(30 * SECTOR), Op::CloseThatFails],
                vec![Op::FlushBeside, Op::FlushBeside, Op::FlushBeside, Op::FlushBeside],
            ]
        },
        window: 1,
        fault: Fault::UnlockBesideCommit,
        within: 30000,
    },
];

impl Scenario {
    fn ground(&self) -> Ground {
        let found = ground::all().into_iter().find(|ground| ground.name == self.ground);
        found.expect("there is such an image")
    }

    /// One execution.
    fn run(&self, ground: &Ground) {
        let seed = shuttle::rand::thread_rng().next_u64();
        run(
            ground,
            &Plan {
                threads: (self.threads)(&ground::files(ground)),
                window: self.window,
                limits: Limits::ORDINARY,
                seed,
            },
        );
    }
}

/// `ZEBU_SCENARIO`: the scenarios with this in their name alone.
fn chosen() -> impl Iterator<Item = &'static Scenario> {
    let only = std::env::var("ZEBU_SCENARIO").unwrap_or_default();
    ground::make(&ground::all());
    SCENARIOS.iter().filter(move |scenario| scenario.name.contains(&only))
}

#[test]
fn each_fault_is_caught() {
    let mut missed = Vec::new();
    for scenario in chosen() {
        let ground = scenario.ground();
        let (caught, felt) =
            under(Some(scenario.fault), || first_failure(scenario.within, move || scenario.run(&ground)));
        match caught {
            Some((tried, how)) => {
                let how: String = how.lines().take(2).collect::<Vec<_>>().join(" / ");
                eprintln!("{:?}, {}: caught by execution {tried}: {how}", scenario.fault, scenario.name);
            }
            None => missed.push(format!(
                "{:?}, {}: survives {} executions ({felt} times passed)",
                scenario.fault, scenario.name, scenario.within
            )),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn the_sound_engine_passes() {
    let report = Report::of_scenarios();
    for scenario in chosen() {
        let ground = scenario.ground();
        let counted = report.counter();
        let done = std::panic::catch_unwind(|| {
            explore(executions(), move || {
                counted.fetch_add(1, Ordering::Relaxed);
                scenario.run(&ground);
            });
        });
        if done.is_err() {
            report.fail();
            eprintln!("{:?}: fails without its fault", scenario.name);
            let scenario = format!("ZEBU_SCENARIO='{}'", scenario.name);
            tell_how_to_repeat(&scenario, "caught::the_sound_engine_passes");
        }
    }
    report.finish("scenarios");
}
