//! The search for free host clusters: known ones, then what the counts say, then growth of the file.

use crate::qcow2::space::free::Allocated;
use crate::qcow2::space::{HostSpace, Pool};
use crate::qcow2::turns::Turns;
use crate::{Error, ErrorKind, Result};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault, Limit};

/// Slices of counts that one step looks at.
const SCAN_SLICES: u64 = 16;
/// Steps for one window before the file grows instead.
const SCAN_STEPS: u64 = 16;
/// Growths of the file for one window: one as a rule, more where the border of two refcount blocks lies in it.
const MOST_GROWTHS: u64 = 4;

/// The clusters that are looked for, and the turns that it may take.
#[derive(Debug)]
pub(super) struct Search {
    want: u64,
    min: u64,
    /// The first cluster that nothing can count.
    end: u64,
    /// The reason why nothing can.
    uncounted: Option<Error>,
    turns: Turns,
    growths: Turns,
}

impl Search {
    /// Confines the search to clusters below `end`: nothing can count the others, as `error` says.
    pub(super) fn stay_below(&mut self, end: u64, error: Error) {
        self.end = end;
        self.uncounted = Some(error);
    }
}

/// The consequence of finding nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Otherwise {
    /// The file grows.
    Growth,
    /// There is no space.
    NoSpace,
}

/// The outcome of one step through the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Found,
    Nothing,
    /// All counts have been looked at.
    AtEnd,
}

impl Pool {
    /// True if it is worth looking on where nothing was found.
    fn is_look_worth_it(&self, least: u64, otherwise: Otherwise) -> bool {
        otherwise == Otherwise::NoSpace || self.free.has_forgotten_much(least, self.file_clusters)
    }

    /// Goes back to the first count, if enough was forgotten since to be worth it.
    fn look_again(&mut self, least: u64, otherwise: Otherwise) -> bool {
        let is_worth_it = self.free.has_forgotten() && self.is_look_worth_it(least, otherwise);
        if is_worth_it {
            self.free.looked_at_again();
            self.scanned = 0;
            self.scan_end = self.file_clusters;
        }
        is_worth_it
    }
}

impl HostSpace {
    /// A search for `min` to `want` clusters that follow each other.
    pub(super) fn search_for(&self, want: u64, min: u64) -> Search {
        // A run is looked at in vain where a border of refcount blocks cuts it.
        let blocks = self.file_clusters() / self.geometry.refcount_entries_per_block();
        Search {
            want,
            min,
            end: u64::MAX,
            uncounted: None,
            turns: Turns::at_most(4 * blocks + 64, "the search for free clusters"),
            growths: Turns::at_most(MOST_GROWTHS, "the growth of the file"),
        }
    }

    /// Free clusters: known ones first, then what a bounded look at the counts finds, then growth. What the file grows by
    /// is taken at once. `space_mutex` is held.
    pub(super) async fn find_free(&self, worker: &Worker, search: &mut Search) -> Result<Allocated> {
        let (want, min, end) = (search.want, search.min, search.end);
        loop {
            search.turns.take()?;
            let usable = min.max(want / 8);
            if let Some(found) = self.look(worker, want, usable, end, Otherwise::Growth).await? {
                return Ok(found);
            }
            let grown = match &search.uncounted {
                Some(error) => Err(error.clone()),
                None => self.grow(worker, want).await,
            };
            let error = match grown {
                Ok(grown) => {
                    search.growths.take()?;
                    if sabotage::is(Fault::LookAtFirstRuns) {
                        self.give_back(&grown);
                        continue;
                    }
                    return Ok(grown);
                }
                Err(error) if error.kind() == ErrorKind::NoSpace => error,
                Err(error) => return Err(error),
            };
            if let Some(found) = self.look(worker, want, min, end, Otherwise::NoSpace).await? {
                return Ok(found);
            }
            // The file may grow by less than a window, and without a refcount block to come first by what is needed.
            for least in [min + 1, min].into_iter().filter(|least| *least < want) {
                if search.uncounted.is_none()
                    && let Ok(grown) = self.grow(worker, least).await
                {
                    search.growths.take()?;
                    return Ok(grown);
                }
            }
            return Err(error);
        }
    }

    /// Up to `want` clusters that follow each other below `end`, `least` of them at least. `space_mutex` is held.
    ///
    /// Before the file grows, only some steps through the counts are taken. Before there is no space, all are; and if any
    /// were forgotten since they were looked at, all of them once more.
    pub(super) async fn look(
        &self,
        worker: &Worker,
        want: u64,
        least: u64,
        end: u64,
        otherwise: Otherwise,
    ) -> Result<Option<Allocated>> {
        let most = match otherwise {
            Otherwise::Growth => sabotage::at_most(Limit::ScanSteps, SCAN_STEPS),
            Otherwise::NoSpace => u64::MAX,
        };
        // The rest of one look, and another.
        let whole = self.file_clusters() / self.scan_clusters() + 2;
        let mut turns = Turns::at_most(2 * whole + 2, "the look for free clusters");
        let mut is_again = false;
        for _ in 0..=most {
            turns.take()?;
            if let Some((range, content)) = self.pool().free.take(want, least) {
                return Ok(Some(Allocated { range, content }));
            }
            let step = self.scan(worker, end).await?;
            let mut pool = self.pool();
            let goes_on = match step {
                Step::Found => true,
                Step::Nothing => is_again || pool.is_look_worth_it(least, otherwise),
                Step::AtEnd => {
                    let begins = !is_again && pool.look_again(least, otherwise);
                    is_again |= begins;
                    begins
                }
            };
            if !goes_on {
                break;
            }
        }
        let found = self.pool().free.take(want, least);
        Ok(found.map(|(range, content)| Allocated { range, content }))
    }

    /// Clusters whose counts one step looks at.
    fn scan_clusters(&self) -> u64 {
        sabotage::at_most(Limit::ScanSlices, SCAN_SLICES) * self.refcounts_per_slice()
    }

    /// Takes one step through the counts, below `end`.
    async fn scan(&self, worker: &Worker, end: u64) -> Result<Step> {
        let (from, end) = {
            let pool = self.pool();
            (pool.scanned, pool.scan_end.min(end))
        };
        if from >= end {
            return Ok(Step::AtEnd);
        }
        let to = end.min(from + self.scan_clusters());
        let runs = self.zero_refcount_runs(worker, from..to).await?;
        let mut pool = self.pool();
        pool.scanned = to;
        let step = if runs.is_empty() { Step::Nothing } else { Step::Found };
        for run in runs {
            // What was freed since the open is known already.
            pool.free.insert_found(run);
        }
        Ok(step)
    }
}
