//! A walk over two disks in step.

use crate::{Error, Extent, Extents};
use zebu_storage::Worker;

/// A walk over the extents of two disks. Where one of them ends, the other one goes on alone.
pub(super) struct TwoDisks {
    walks: [Extents; 2],
    found: [Option<Extent>; 2],
    at: u64,
    end: u64,
}

/// A range in which neither disk changes its kind.
pub(super) struct Step {
    pub(super) start: u64,
    pub(super) end: u64,
    /// The extents around it; none where a disk has ended.
    pub(super) extents: [Option<Extent>; 2],
}

impl TwoDisks {
    /// A walk up to `end`, over ranges that begin at 0.
    pub(super) fn new(walks: [Extents; 2], end: u64) -> Self {
        Self { walks, found: [None, None], at: 0, end }
    }

    /// Offset in bytes at which the next step begins.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Looks up the next step; `None` at the end.
    ///
    /// # Errors
    /// The disk whose mapping can't be read, and why.
    pub(super) async fn next(&mut self, worker: &Worker) -> Result<Option<Step>, (usize, Error)> {
        if self.at >= self.end {
            return Ok(None);
        }
        for (side, (walk, found)) in self.walks.iter_mut().zip(&mut self.found).enumerate() {
            if found.is_none_or(|extent| extent.end() <= self.at) {
                walk.skip_to(self.at);
                *found = walk.next(worker).await.map_err(|error| (side, error))?;
            }
        }
        let until = self.found.iter().flatten().map(Extent::end).min().unwrap_or(self.end).min(self.end);
        let step = Step { start: self.at, end: until, extents: self.found };
        self.at = until;
        Ok(Some(step))
    }

    /// Goes on at `offset`, which may lie within the last step or behind it: a caller deals with whole units.
    pub(super) fn go_on_at(&mut self, offset: u64) {
        self.at = offset;
    }
}
