//! All crash states, where they are few: every combination of what each granule of the disk can hold.

use crate::content::{BLOCK, Content};
use crate::disk::{Applied, CopiedRuns, FileState, Image, LengthStep};
use crate::op::{OpNumber, SimOp};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Where the order of the operations in flight matters, and they are more, states are sampled.
const ORDERED_IN_FLIGHT: usize = 3;
/// Different contents of one granule that are followed.
const OPTIONS_PER_GRANULE: usize = 256;

/// Granules that are looked at. With more, even if most turn out certain, all states are not worth the search.
const GRANULES: usize = 4096;

/// One length, what is certain, and what the uncertain granules can hold.
struct Alternative {
    certain: Content,
    uncertain: Vec<(u64, Vec<Vec<u8>>)>,
    states: u64,
}

/// All states of one file.
struct FilePlan {
    alternatives: Vec<Alternative>,
    states: u64,
}

/// All states of all files, addressable by number. A state may occur under more than one number.
pub(super) struct Exhaustive {
    files: Vec<FilePlan>,
    pub(super) states: u64,
}

impl Exhaustive {
    /// `None` if there are more than `max_states`.
    pub(super) fn plan(
        files: &[FileState],
        copied: &BTreeMap<OpNumber, CopiedRuns>,
        granule: u64,
        max_states: u64,
    ) -> Option<Self> {
        let mut plans = Vec::new();
        let mut states: u64 = 1;
        for file in files {
            let plan = FilePlan::new(file, copied, granule, max_states / states)?;
            states *= plan.states;
            plans.push(plan);
        }
        Some(Self { files: plans, states })
    }

    /// The contents of the files in the state `number`, which is below `states`.
    pub(super) fn state(&self, mut number: u64) -> Vec<Content> {
        self.files
            .iter()
            .map(|plan| {
                let mut inside = number % plan.states;
                number /= plan.states;
                let mut chosen = &plan.alternatives[0];
                for alternative in &plan.alternatives {
                    chosen = alternative;
                    if inside < alternative.states {
                        break;
                    }
                    inside -= alternative.states;
                }
                chosen.state(inside)
            })
            .collect()
    }
}

impl Alternative {
    fn state(&self, mut number: u64) -> Content {
        let mut content = self.certain.clone();
        let len = content.len();
        for (offset, options) in &self.uncertain {
            content.write(*offset, &options[(number % options.len() as u64) as usize]);
            number /= options.len() as u64;
        }
        content.set_len(len);
        content
    }
}

/// Whether the operations can leave something different behind in another order: one changes the length, or two
/// touch the same sector.
fn order_matters(in_flight: &[&SimOp]) -> bool {
    let sectors = |what: &SimOp| what.range().start / 512..what.range().end.div_ceil(512);
    in_flight.iter().enumerate().any(|(index, what)| {
        let mine = sectors(what);
        let overlaps = |other: &&SimOp| {
            let theirs = sectors(other);
            mine.start < theirs.end && theirs.start < mine.end
        };
        matches!(what, SimOp::SetLen { .. }) || in_flight[..index].iter().any(overlaps)
    })
}

/// All orders of `items`.
fn orders(items: &[OpNumber]) -> Vec<Vec<OpNumber>> {
    if items.len() < 2 {
        return vec![items.to_vec()];
    }
    (0..items.len())
        .flat_map(|first| {
            let mut rest = items.to_vec();
            let head = rest.remove(first);
            orders(&rest).into_iter().map(move |mut tail| {
                tail.insert(0, head);
                tail
            })
        })
        .collect()
}

impl FilePlan {
    fn new(
        file: &FileState,
        copied: &BTreeMap<OpNumber, CopiedRuns>,
        granule: u64,
        max_states: u64,
    ) -> Option<Self> {
        let changing = file.in_flight.iter().filter(|(_, what)| what.changes_file());
        let (in_flight, whats): (Vec<OpNumber>, Vec<&SimOp>) = changing.map(|(op, what)| (*op, what)).unzip();
        let ordered = if !order_matters(&whats) {
            vec![in_flight]
        } else if in_flight.len() <= ORDERED_IN_FLIGHT {
            orders(&in_flight)
        } else {
            return None;
        };
        let mut plan = Self { alternatives: Vec::new(), states: 0 };
        for order in ordered {
            let unfinished = file.unfinished(&order, copied);
            let changes: Vec<&Applied> = file.uncovered.iter().chain(&unfinished).collect();
            let sets = changes.iter().filter(|a| a.is_set_len()).count();
            for landed_sets in 0..=sets {
                plan.add(file, &changes, landed_sets, granule, max_states)?;
            }
        }
        Some(plan)
    }

    /// Adds the states in which the first `landed_sets` changes of length landed and no later one.
    fn add(
        &mut self,
        file: &FileState,
        changes: &[&Applied],
        landed_sets: usize,
        granule: u64,
        max_states: u64,
    ) -> Option<()> {
        for len in lengths(file.durable.len(), changes, landed_sets) {
            let mut certain = file.durable.clone();
            let mut uncertain = Vec::new();
            let mut states: u64 = 1;
            let touched = granules(&file.durable, changes, granule);
            if touched.len() > GRANULES {
                return None;
            }
            for offset in touched {
                let mut options = options_at(&file.durable, changes, landed_sets, offset, granule)?;
                for option in &mut options {
                    let visible = len.saturating_sub(offset).min(granule) as usize;
                    option[visible..].fill(0);
                }
                options.sort_unstable();
                options.dedup();
                if options.len() == 1 {
                    certain.write(offset, &options[0]);
                } else {
                    states = states.checked_mul(options.len() as u64).filter(|n| *n <= max_states)?;
                    uncertain.push((offset, options));
                }
            }
            certain.set_len(len);
            self.states = self.states.checked_add(states).filter(|n| *n <= max_states)?;
            self.alternatives.push(Alternative { certain, uncertain, states });
        }
        Some(())
    }
}

/// The lengths that the file can have.
fn lengths(durable: u64, changes: &[&Applied], landed_sets: usize) -> BTreeSet<u64> {
    let mut base = durable;
    let mut sets = 0;
    let mut grown = BTreeSet::new();
    for change in changes {
        match change.length {
            Some(LengthStep::Set { len, .. }) => {
                sets += 1;
                if sets > landed_sets {
                    break;
                }
                base = len;
                grown.clear();
            }
            Some(LengthStep::Grow(to)) => {
                grown.insert(to);
            }
            None => {}
        }
    }
    grown.retain(|to| *to > base);
    grown.insert(base);
    grown
}

/// Offsets of the granules that some change may alter.
fn granules(durable: &Content, changes: &[&Applied], granule: u64) -> BTreeSet<u64> {
    let mut offsets = BTreeSet::new();
    let mut add = |range: Range<u64>| {
        let first = range.start / granule;
        offsets.extend((first..range.end.div_ceil(granule)).map(|n| n * granule));
    };
    for piece in changes.iter().flat_map(|c| &c.pieces) {
        match piece.image {
            Image::Bytes { .. } => add(piece.range.clone()),
            // Where there is no data, there is nothing to clear.
            Image::Clear(_) => {
                let around = piece.range.start / BLOCK * BLOCK..piece.range.end;
                for (at, _) in durable.data_blocks(around) {
                    add(at.max(piece.range.start)..(at + BLOCK).min(piece.range.end));
                }
            }
            Image::Reserve => {}
        }
    }
    offsets
}

/// The possible contents of the granule at `offset`, its part past the end of the file included.
fn options_at(
    durable: &Content,
    changes: &[&Applied],
    landed_sets: usize,
    offset: u64,
    granule: u64,
) -> Option<Vec<Vec<u8>>> {
    let whole = offset..offset + granule;
    let mut options = vec![durable.bytes(whole.clone())];
    let mut blocked = [false; (BLOCK / 512) as usize];
    let mut sets = 0;
    for change in changes {
        if let Some(LengthStep::Set { len, cut }) = &change.length {
            sets += 1;
            if sets <= landed_sets {
                for option in &mut options {
                    option[len.saturating_sub(offset).min(granule) as usize..].fill(0);
                }
            } else {
                for (index, sector) in blocked.iter_mut().enumerate() {
                    let at = offset + index as u64 * 512;
                    *sector |= cut.start < at + 512 && at < cut.end;
                }
            }
            continue;
        }
        let mut more = options.clone();
        for part in change.pieces.iter().filter_map(|p| p.part(&whole)) {
            for (at, inside) in (part.range.start..part.range.end).step_by(512).zip((0..).step_by(512)) {
                let to = (at - offset) as usize;
                if blocked[to / 512] {
                    continue;
                }
                for option in &mut more {
                    match &part.image {
                        Image::Bytes { data, start } => {
                            option[to..to + 512].copy_from_slice(&data[start + inside..][..512]);
                        }
                        Image::Clear(_) => option[to..to + 512].fill(0),
                        Image::Reserve => {}
                    }
                }
            }
        }
        options.extend(more);
        options.sort_unstable();
        options.dedup();
        if options.len() > OPTIONS_PER_GRANULE {
            return None;
        }
    }
    Some(options)
}
