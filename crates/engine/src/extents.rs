//! A walk over the extents of a disk.

use crate::chain::CutOff;
use crate::{Extent, Image, Result};
use std::ops::Range;
use zebu_storage::Worker;

/// A walk over the extents of a range, in order of offset ([`Image::extents`]).
#[derive(Debug, Clone)]
pub struct Extents {
    image: Image,
    left: Range<u64>,
    cut_off: CutOff,
}

impl Extents {
    /// Looks up the next extent; `None` at the end of the range. After an error the walk may be continued: it looks at
    /// the same place again.
    ///
    /// # Errors
    /// As [`Image::extent`].
    pub async fn next(&mut self, worker: &Worker) -> Result<Option<Extent>> {
        if self.left.is_empty() {
            return Ok(None);
        }
        let extent = self
            .image
            .extent_with(worker, self.left.start, self.left.end - self.left.start, self.cut_off)
            .await?;
        self.left.start = extent.end();
        Ok(Some(extent))
    }

    /// Offset in bytes at which the next extent begins.
    pub fn position(&self) -> u64 {
        self.left.start
    }

    /// Leaves out what lies before `offset`.
    pub fn skip_to(&mut self, offset: u64) {
        self.left.start = self.left.start.max(offset);
    }
}

impl Image {
    /// A walk over the extents of a range of the disk, through the whole chain. The end of the range cuts the last one.
    pub fn extents(&self, range: Range<u64>) -> Extents {
        Extents { image: self.clone(), left: range, cut_off: CutOff::ReadsAsZero }
    }

    /// A walk for a job, by [`Image::source_extent`].
    pub(crate) fn source_extents(&self, range: Range<u64>) -> Extents {
        Extents { image: self.clone(), left: range, cut_off: CutOff::Fails }
    }
}
