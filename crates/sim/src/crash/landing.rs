//! One crash state from one decision per operation: landed, not landed, or torn.

use crate::content::Content;
use crate::disk::{Applied, LengthStep, Piece};
use crate::rng::{SimRng, mix64};
use std::ops::Range;

/// How much of an operation is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Landing {
    Nothing,
    Whole,
    /// Each granule (bytes, a power of two from 512) with a probability of `eighths` / 8, decided by `seed`.
    Torn {
        granule: u64,
        eighths: u64,
        seed: u64,
    },
}

/// In which order the operations landed between two changes of length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Order {
    Applied,
    Reversed,
    Shuffled(u64),
}

impl Order {
    pub(super) fn arrange<T>(self, items: &mut [T]) {
        match self {
            Self::Applied => {}
            Self::Reversed => items.reverse(),
            Self::Shuffled(seed) => SimRng::new(seed).shuffle(items),
        }
    }
}

/// Granules beyond which a torn piece is cut into a few runs and not into single granules.
const SINGLE_GRANULES: u64 = 256;

/// The granules of `range` that land, joined into runs.
fn torn_runs(range: &Range<u64>, granule: u64, eighths: u64, seed: u64) -> Vec<Range<u64>> {
    let first = range.start / granule;
    let last = range.end.div_ceil(granule);
    let clip = |from: u64, to: u64| (from * granule).max(range.start)..(to * granule).min(range.end);
    let keeps = |n: u64| mix64(seed ^ mix64(n)) % 8 < eighths;
    if last - first <= SINGLE_GRANULES {
        return (first..last).filter(|&n| keeps(n)).map(|n| clip(n, n + 1)).collect();
    }
    let mut rng = SimRng::new(seed ^ first);
    let mut cuts: Vec<u64> = (0..7).map(|_| rng.between(first, last)).collect();
    cuts.extend([first, last]);
    cuts.sort_unstable();
    cuts.windows(2).filter(|w| w[0] < w[1] && keeps(w[0])).map(|w| clip(w[0], w[1])).collect()
}

/// The parts of `piece` outside `blocked`.
fn unblocked(piece: &Piece, blocked: &[Range<u64>]) -> Vec<Piece> {
    blocked.iter().fold(vec![piece.clone()], |parts, hole| {
        parts
            .iter()
            .flat_map(|p| [p.part(&(0..hole.start)), p.part(&(hole.end..u64::MAX))])
            .flatten()
            .collect()
    })
}

/// The content after a crash. `changes` are not durable, in the order of application; `durable` is what is.
///
/// A `set_len` that landed takes all earlier ones along, and after one that did not land nothing can show in the
/// range that it would have cut, nor can the file grow.
pub(super) fn land(
    durable: &Content,
    changes: &[&Applied],
    landing: impl Fn(&Applied) -> Landing,
    order: Order,
) -> Content {
    let last_set = changes.iter().rposition(|a| a.is_set_len() && landing(a) != Landing::Nothing);
    let mut content = durable.clone();
    let mut len = content.len();
    let mut blocked: Vec<Range<u64>> = Vec::new();
    let mut group: Vec<(&Applied, usize)> = Vec::new();
    for (index, change) in changes.iter().enumerate() {
        match &change.length {
            Some(LengthStep::Set { len: to, .. }) if last_set.is_some_and(|last| index <= last) => {
                land_group(&mut content, &mut len, &mut group, &blocked, &landing, order);
                content.set_len(*to);
                len = *to;
            }
            Some(LengthStep::Set { cut, .. }) => {
                let sectors = cut.start / 512 * 512..cut.end.div_ceil(512) * 512;
                blocked.push(sectors);
            }
            _ => group.push((change, blocked.len())),
        }
    }
    land_group(&mut content, &mut len, &mut group, &blocked, &landing, order);
    content.set_len(len);
    content
}

fn land_group(
    content: &mut Content,
    len: &mut u64,
    group: &mut Vec<(&Applied, usize)>,
    blocked: &[Range<u64>],
    landing: &impl Fn(&Applied) -> Landing,
    order: Order,
) {
    order.arrange(group);
    for (change, cuts_before) in group.drain(..) {
        let landed = landing(change);
        let grows = match landed {
            Landing::Nothing => continue,
            Landing::Whole => true,
            Landing::Torn { seed, .. } => mix64(seed).is_multiple_of(2),
        };
        if let Some(LengthStep::Grow(to)) = change.length
            && grows
            && cuts_before == 0
        {
            *len = (*len).max(to);
        }
        for piece in change.pieces.iter().flat_map(|p| unblocked(p, &blocked[..cuts_before])) {
            match landed {
                Landing::Torn { granule, eighths, seed } => {
                    for run in torn_runs(&piece.range, granule, eighths, seed) {
                        if let Some(part) = piece.part(&run) {
                            part.land(content);
                        }
                    }
                }
                _ => piece.land(content),
            }
        }
    }
}
