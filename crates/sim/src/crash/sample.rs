//! Seeded sampling of crash states: the revealing extremes first, then random mixtures.

use super::landing::{Landing, Order};
use crate::op::OpNumber;
use crate::rng::{SimRng, mix64};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// An operation that a crash state decides about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) op: OpNumber,
    /// Whether it had not completed.
    pub(super) in_flight: bool,
    /// Bytes that it changes.
    pub(super) bytes: u64,
}

/// How one crash state is made.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    pub(super) name: &'static str,
    pub(super) order: Order,
    /// Absent: nothing landed.
    pub(super) landings: BTreeMap<OpNumber, Landing>,
}

impl Recipe {
    fn fingerprint(&self) -> u64 {
        let order = match self.order {
            Order::Applied => 1,
            Order::Reversed => 2,
            Order::Shuffled(seed) => mix64(seed),
        };
        self.landings.iter().fold(mix64(order), |hash, (op, landing)| {
            let code = match landing {
                Landing::Nothing => return hash,
                Landing::Whole => 1,
                Landing::Torn { granule, eighths, seed } => mix64(seed ^ (granule << 8) ^ eighths),
            };
            mix64(hash ^ mix64(op.0) ^ code.rotate_left(17))
        })
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?}); landed:", self.name, self.order)?;
        let mut any = false;
        for (op, landing) in &self.landings {
            match landing {
                Landing::Nothing => continue,
                Landing::Whole => write!(f, " {}", op.0)?,
                Landing::Torn { granule, eighths, .. } => {
                    write!(f, " {} (torn at {granule}, {eighths}/8)", op.0)?;
                }
            }
            any = true;
        }
        if any { Ok(()) } else { f.write_str(" nothing") }
    }
}

/// Makes recipes, no two the same, until the given number is reached or the possibilities seem used up.
#[derive(Debug)]
pub(super) struct Sampler {
    candidates: Vec<Candidate>,
    extremes: VecDeque<Recipe>,
    granules: Vec<u64>,
    rng: SimRng,
    seen: BTreeSet<u64>,
    left: usize,
}

/// Draws in a row that brought nothing new before the sampler gives up.
const USED_UP: u32 = 64;

impl Sampler {
    pub(super) fn new(candidates: Vec<Candidate>, granules: Vec<u64>, seed: u64, max_states: usize) -> Self {
        let mut sampler = Self {
            extremes: VecDeque::new(),
            granules,
            rng: SimRng::new(seed),
            seen: BTreeSet::new(),
            left: max_states,
            candidates,
        };
        sampler.extremes = sampler.extremes(max_states);
        sampler
    }

    fn recipe(
        &self,
        name: &'static str,
        order: Order,
        mut landing: impl FnMut(usize, &Candidate) -> Landing,
    ) -> Recipe {
        let landings = self.candidates.iter().enumerate().map(|(i, c)| (c.op, landing(i, c))).collect();
        Recipe { name, order, landings }
    }

    fn extremes(&mut self, max_states: usize) -> VecDeque<Recipe> {
        let whole_if = |yes: bool| if yes { Landing::Whole } else { Landing::Nothing };
        let mut list = VecDeque::from([
            self.recipe("nothing", Order::Applied, |_, _| Landing::Nothing),
            self.recipe("everything", Order::Applied, |_, _| Landing::Whole),
            self.recipe("everything, reversed", Order::Reversed, |_, _| Landing::Whole),
        ]);
        let mut singles: Vec<usize> = (0..self.candidates.len()).collect();
        // The rest of the budget is for mixtures.
        let room = max_states / 4;
        if singles.len() > room {
            self.rng.shuffle(&mut singles);
            singles.truncate(room);
        }
        for single in singles {
            list.push_back(self.recipe("all but one", Order::Applied, |i, _| whole_if(i != single)));
            list.push_back(self.recipe("only one", Order::Applied, |i, _| whole_if(i == single)));
        }
        list
    }

    fn mixture(&mut self) -> Recipe {
        let mut rng = self.rng.fork();
        let count = self.candidates.len();
        let at = rng.index(count + 1);
        let granule = *rng.pick(&self.granules);
        let eighths = rng.between(1, 7);
        let torn = |seed: u64| Landing::Torn { granule, eighths, seed };
        let mut coin = rng.fork();
        let whole_if = |yes: bool| if yes { Landing::Whole } else { Landing::Nothing };
        match rng.below(8) {
            0 => self.recipe("a prefix, its last torn", Order::Applied, |i, _| match i.cmp(&at) {
                std::cmp::Ordering::Less => Landing::Whole,
                std::cmp::Ordering::Equal => torn(coin.next_u64()),
                std::cmp::Ordering::Greater => Landing::Nothing,
            }),
            1 => self.recipe("a suffix", Order::Applied, |i, _| whole_if(i >= at)),
            2 => {
                let most = self.candidates.iter().map(|c| c.bytes).max().unwrap_or(0);
                let limit = rng.between(0, most);
                let small = rng.chance(1, 2);
                self.recipe("by size", Order::Applied, |_, c| whole_if((c.bytes <= limit) == small))
            }
            3 => {
                let order = Order::Shuffled(rng.next_u64());
                self.recipe("a subset, shuffled", order, |_, _| whole_if(coin.below(8) < eighths))
            }
            4 => self.recipe("all, one torn", Order::Applied, |i, _| {
                if i == at { torn(coin.next_u64()) } else { Landing::Whole }
            }),
            5 => self.recipe("all torn", Order::Applied, |_, _| torn(coin.next_u64())),
            6 => self.recipe("completed, some in flight torn", Order::Applied, |_, c| {
                if c.in_flight { torn(coin.next_u64()) } else { Landing::Whole }
            }),
            _ => {
                let order = Order::Shuffled(rng.next_u64());
                self.recipe("a subset, some torn, shuffled", order, |_, _| match coin.below(3) {
                    0 => Landing::Nothing,
                    1 => Landing::Whole,
                    _ => torn(coin.next_u64()),
                })
            }
        }
    }
}

impl Iterator for Sampler {
    type Item = Recipe;

    fn next(&mut self) -> Option<Recipe> {
        if self.left == 0 {
            return None;
        }
        while let Some(extreme) = self.extremes.pop_front() {
            if self.seen.insert(extreme.fingerprint()) {
                self.left -= 1;
                return Some(extreme);
            }
        }
        if self.candidates.is_empty() {
            return None;
        }
        for _ in 0..USED_UP {
            let recipe = self.mixture();
            if self.seen.insert(recipe.fingerprint()) {
                self.left -= 1;
                return Some(recipe);
            }
        }
        None
    }
}
