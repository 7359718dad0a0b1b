//! The states in which a crash may legally leave a disk.

mod exhaustive;
mod landing;
mod possible;
mod sample;

use crate::content::Content;
use crate::counts::Tally;
use crate::disk::{Applied, CopiedRuns, DiskState, FileState};
use crate::log::SimLog;
use crate::op::OpNumber;
use exhaustive::Exhaustive;
use landing::{Landing, land};
pub use possible::Possible;
use sample::{Candidate, Recipe, Sampler};
use std::collections::BTreeMap;
use std::fmt;

/// The smallest piece of a write that a crash may leave out while the rest lands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tear {
    /// 512 bytes: any disk. States torn at 4096 bytes are among the samples too.
    #[default]
    Sector,
    /// 4096 bytes: disks with such sectors.
    Block,
}

/// Which crash states are wanted.
#[derive(Debug, Clone)]
pub struct CrashOptions {
    /// The most states to yield. If there are no more than that, all are yielded; otherwise a sample that begins
    /// with what reads saw (the process was killed), nothing, everything, everything in reversed order, and then for
    /// each operation all but it, and only it.
    pub max_states: usize,
    /// Where writes tear.
    pub tear: Tear,
    /// Decides about the sample.
    pub seed: u64,
}

impl Default for CrashOptions {
    fn default() -> Self {
        Self { max_states: 64, tear: Tear::Sector, seed: 0 }
    }
}

/// The content of all files of a world after a crash.
#[derive(Debug, Clone)]
pub struct CrashState {
    files: Vec<(String, Content)>,
    origin: Origin,
}

#[derive(Debug, Clone)]
enum Origin {
    Numbered {
        number: u64,
        of: u64,
    },
    /// The view of readers: the process died, the machine did not.
    Visible,
    Made(Recipe),
}

impl CrashState {
    /// Names and contents, in the order in which the files were made.
    pub fn files(&self) -> &[(String, Content)] {
        &self.files
    }

    /// The content of the file `name`.
    pub fn file(&self, name: &str) -> Option<&Content> {
        self.files.iter().find(|(n, _)| n == name).map(|(_, content)| content)
    }
}

impl fmt::Display for CrashState {
    /// How the state came about, by the numbers of the operations in the log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Numbered { number, of } => write!(f, "state {number} of all {of}"),
            Origin::Visible => f.write_str("what reads saw"),
            Origin::Made(recipe) => write!(f, "{recipe}"),
        }
    }
}

enum Plan {
    Exhaustive { all: Exhaustive, next: u64 },
    Sampled { sampler: Sampler, visible_is_next: bool },
}

/// The crash states at one point of a world's history. Independent of the world: it may go on meanwhile.
pub struct CrashStates {
    files: Vec<FileState>,
    copied: BTreeMap<OpNumber, CopiedRuns>,
    plan: Plan,
    tally: Tally,
}

impl CrashStates {
    pub(crate) fn new(disk: &DiskState, options: &CrashOptions, tally: &Tally) -> Self {
        let files = disk.files.clone();
        let mut copied = BTreeMap::new();
        for (op, what) in files.iter().flat_map(|f| &f.in_flight) {
            if let Some(runs) = disk.source_bytes(what, &what.range()) {
                copied.insert(*op, runs);
            }
        }
        let (granule, granules) = match options.tear {
            Tear::Sector => (512, vec![512, 4096]),
            Tear::Block => (4096, vec![4096]),
        };
        let all = Exhaustive::plan(&files, &copied, granule, options.max_states as u64);
        let plan = if let Some(all) = all {
            Plan::Exhaustive { all, next: 0 }
        } else {
            let left = options.max_states.saturating_sub(1);
            let sampler = Sampler::new(candidates(&files), granules, options.seed, left);
            Plan::Sampled { sampler, visible_is_next: options.max_states > 0 }
        };
        Self { files, copied, plan, tally: tally.clone() }
    }

    /// Whether all legal states are yielded, and not a sample.
    pub fn is_exhaustive(&self) -> bool {
        matches!(self.plan, Plan::Exhaustive { .. })
    }

    fn make(&self, recipe: Recipe) -> CrashState {
        let landing = |a: &Applied| recipe.landings.get(&a.op).copied().unwrap_or(Landing::Nothing);
        let files = self
            .files
            .iter()
            .map(|file| {
                let mut order: Vec<OpNumber> = file.in_flight.keys().copied().collect();
                recipe.order.arrange(&mut order);
                let unfinished = file.unfinished(&order, &self.copied);
                let changes: Vec<&Applied> = file.uncovered.iter().chain(&unfinished).collect();
                // The operations in flight are in their order already; `Reversed` turns all.
                let content = land(&file.durable, &changes, landing, recipe.order);
                (file.name.clone(), content)
            })
            .collect();
        CrashState { files, origin: Origin::Made(recipe) }
    }
}

fn candidates(files: &[FileState]) -> Vec<Candidate> {
    let mut list = Vec::new();
    for file in files {
        for applied in &file.uncovered {
            let bytes = applied.pieces.iter().map(|p| p.range.end - p.range.start).sum();
            let in_flight = file.in_flight.contains_key(&applied.op);
            list.push(Candidate { op: applied.op, in_flight, bytes });
        }
        for (op, what) in file.in_flight.iter().filter(|(_, what)| what.changes_file()) {
            let range = what.range();
            list.push(Candidate { op: *op, in_flight: true, bytes: range.end - range.start });
        }
    }
    list.sort_by_key(|c| c.op);
    list.dedup_by_key(|c| c.op);
    list
}

impl Iterator for CrashStates {
    type Item = CrashState;

    fn next(&mut self) -> Option<CrashState> {
        let state = self.next_state();
        if state.is_some() {
            self.tally.change(|counts| counts.crash_states += 1);
        }
        state
    }
}

impl CrashStates {
    fn next_state(&mut self) -> Option<CrashState> {
        match &mut self.plan {
            Plan::Exhaustive { all, next } => {
                let number = *next;
                if number == all.states {
                    return None;
                }
                *next += 1;
                let names = self.files.iter().map(|f| f.name.clone());
                let files = names.zip(all.state(number)).collect();
                Some(CrashState { files, origin: Origin::Numbered { number, of: all.states } })
            }
            Plan::Sampled { visible_is_next, .. } if *visible_is_next => {
                *visible_is_next = false;
                let files = self.files.iter().map(|f| (f.name.clone(), f.volatile.clone())).collect();
                Some(CrashState { files, origin: Origin::Visible })
            }
            Plan::Sampled { sampler, .. } => {
                let recipe = sampler.next()?;
                Some(self.make(recipe))
            }
        }
    }
}

/// Walks over a recorded log and gives the crash states at any point of it.
pub struct LogCursor<'a> {
    log: &'a SimLog,
    position: usize,
    disk: DiskState,
}

impl<'a> LogCursor<'a> {
    /// At the beginning of `log`, which must have been kept whole ([`crate::LogKeep::All`]).
    pub fn new(log: &'a SimLog) -> Self {
        Self { log, position: 0, disk: DiskState::default() }
    }

    /// The position: events before it have happened.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Goes on to `position`, at most to the end of the log. It never goes back.
    pub fn advance_to(&mut self, position: usize) {
        let end = position.min(self.log.events().len());
        while self.position < end {
            self.disk.follow(&self.log.events()[self.position]);
            self.position += 1;
        }
    }

    /// The crash states at this point.
    pub fn crash_states(&self, options: &CrashOptions) -> CrashStates {
        CrashStates::new(&self.disk, options, &Tally::default())
    }

    /// The content of the file `name`, as reads see it at this point.
    pub fn content(&self, name: &str) -> Option<Content> {
        self.disk.files.iter().find(|f| f.name == name).map(|f| f.volatile.clone())
    }
}
