//! The state of a range, in the words of metadata contexts.

use super::contexts::Context;
use super::protocol::{STATE_DIRTY, STATE_HOLE, STATE_ZERO};
use super::reply::StatusRun;
use crate::export::Export;
use std::ops::Range;
use zebu_engine::storage::Worker;
use zebu_engine::{DirtyBits, Extent, ExtentKind, Image, Result};

/// Runs of one context in one reply.
const MAX_RUNS: usize = 4096;
/// Extents that are looked up for one reply.
const MAX_EXTENTS: usize = 16384;
/// The longest run that a length of 32 bits can tell: whole blocks.
const MAX_COMPACT: u64 = (1 << 32) - (1 << 16);

/// Tells, for each of the contexts, runs from the start of `range` on; at least one each.
///
/// # Errors
/// The first extent can't be looked up, or a bitmap is gone.
pub(crate) async fn block_status(
    export: &Export,
    worker: &Worker,
    range: Range<u64>,
    contexts: &[Context],
    limit: RunLimit,
) -> Result<Vec<Vec<StatusRun>>> {
    let mut lists = vec![Vec::new(); contexts.len()];
    let mut of_extents = false;
    for (list, context) in lists.iter_mut().zip(contexts) {
        match context {
            Context::Bitmap(index) => {
                *list = dirty_runs(&export.bits_of(worker, *index).await?, range.clone(), limit);
            }
            Context::Allocation | Context::Depth => of_extents = true,
        }
    }
    if of_extents {
        walk_extents(&export.image(), worker, range, contexts, &mut lists, limit).await?;
    }
    for list in &mut lists {
        list.truncate(limit.runs());
        if limit.is_compact() {
            make_compact(list);
            list.truncate(limit.runs());
        }
    }
    Ok(lists)
}

/// Walks over the extents of a range and tells their runs, for those contexts that are about extents.
async fn walk_extents(
    image: &Image,
    worker: &Worker,
    range: Range<u64>,
    contexts: &[Context],
    lists: &mut [Vec<StatusRun>],
    limit: RunLimit,
) -> Result<()> {
    let mut extents = image.extents(range.clone());
    for _ in 0..MAX_EXTENTS {
        let is_full = |(list, context): (&Vec<StatusRun>, &Context)| {
            matches!(context, Context::Bitmap(_)) || list.len() > limit.runs()
        };
        if lists.iter().zip(contexts).all(is_full) {
            break;
        }
        let extent = match extents.next(worker).await {
            Ok(Some(extent)) => extent,
            Err(error) if extents.position() == range.start => return Err(error),
            // After an error, what is known is told; the client comes again for the rest.
            Ok(None) | Err(_) => break,
        };
        for (list, context) in lists.iter_mut().zip(contexts) {
            if let Some(flags) = state(&extent, *context) {
                append(list, StatusRun { len: extent.len, flags });
            }
        }
    }
    Ok(())
}

/// The runs of a bitmap.
fn dirty_runs(bits: &DirtyBits, range: Range<u64>, limit: RunLimit) -> Vec<StatusRun> {
    let mut list = Vec::new();
    let mut at = range.start;
    while at < range.end && list.len() <= limit.runs() {
        let (dirty, end) = match bits.run_at(at) {
            // The disk has become larger meanwhile: nothing is known of that part.
            (_, end) if end <= at => (true, range.end),
            run => run,
        };
        let end = end.min(range.end);
        append(&mut list, StatusRun { len: end - at, flags: if dirty { STATE_DIRTY } else { 0 } });
        at = end;
    }
    list
}

/// How much one reply may tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RunLimit {
    /// Only the first run.
    pub(crate) one: bool,
    /// Lengths have 32 bits.
    pub(crate) compact: bool,
}

impl RunLimit {
    fn runs(self) -> usize {
        if self.one { 1 } else { MAX_RUNS }
    }

    fn is_compact(self) -> bool {
        self.compact
    }
}

/// The state of an extent in a context, if the context is about extents.
fn state(extent: &Extent, context: Context) -> Option<u64> {
    Some(match context {
        Context::Allocation => match extent.kind {
            ExtentKind::Data { .. } | ExtentKind::Elsewhere { .. } if extent.hole => STATE_HOLE | STATE_ZERO,
            ExtentKind::Zero { host: Some(_) } => STATE_ZERO,
            ExtentKind::Zero { host: None } | ExtentKind::Unallocated => STATE_HOLE | STATE_ZERO,
            // Data, and what a later version may know beside it: to be read.
            _ => 0,
        },
        Context::Depth => match extent.kind {
            ExtentKind::Unallocated => 0,
            _ => u64::from(extent.depth) + 1,
        },
        Context::Bitmap(_) => return None,
    })
}

fn append(list: &mut Vec<StatusRun>, run: StatusRun) {
    match list.last_mut() {
        Some(last) if last.flags == run.flags => last.len += run.len,
        _ => list.push(run),
    }
}

/// Cuts runs that are too long into several.
fn make_compact(list: &mut Vec<StatusRun>) {
    if list.iter().all(|run| run.len <= MAX_COMPACT) {
        return;
    }
    let mut cut = Vec::new();
    for run in list.iter() {
        let mut left = run.len;
        while left > 0 && cut.len() < MAX_RUNS {
            let len = left.min(MAX_COMPACT);
            cut.push(StatusRun { len, flags: run.flags });
            left -= len;
        }
    }
    *list = cut;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(len: u64, flags: u64) -> StatusRun {
        StatusRun { len, flags }
    }

    #[test]
    fn neighbours_of_one_state_are_one_run() {
        let mut list = Vec::new();
        for (len, flags) in [(10, 0), (20, 0), (5, 3), (5, 2), (1, 2)] {
            append(&mut list, run(len, flags));
        }
        assert_eq!(list, [run(30, 0), run(5, 3), run(6, 2)]);
    }

    #[test]
    fn long_runs_are_cut_for_short_lengths() {
        let mut list = vec![run(100, 1), run(10 << 30, 3), run(7, 0)];
        make_compact(&mut list);
        assert_eq!(list.iter().map(|run| run.len).sum::<u64>(), 107 + (10 << 30));
        assert!(list.iter().all(|run| u32::try_from(run.len).is_ok()));
        assert_eq!((list[0], list.last().copied()), (run(100, 1), Some(run(7, 0))));
    }

    #[test]
    fn states_follow_the_kind_of_extent() {
        let extent = |kind, depth, hole| {
            let mut extent = Extent::default();
            (extent.len, extent.kind, extent.depth, extent.hole) = (1, kind, depth, hole);
            extent
        };
        let data = ExtentKind::Data { host: 0 };
        for (extent, allocation, depth) in [
            (extent(data, 0, false), 0, 1),
            (extent(data, 2, false), 0, 3),
            (extent(data, 0, true), 3, 1),
            (extent(ExtentKind::Compressed, 1, false), 0, 2),
            (extent(ExtentKind::Zero { host: Some(0) }, 0, false), 2, 1),
            (extent(ExtentKind::Zero { host: None }, 0, false), 3, 1),
            (extent(ExtentKind::Unallocated, 1, false), 3, 0),
        ] {
            assert_eq!(state(&extent, Context::Allocation), Some(allocation), "{extent:?}");
            assert_eq!(state(&extent, Context::Depth), Some(depth), "{extent:?}");
        }
    }
}
