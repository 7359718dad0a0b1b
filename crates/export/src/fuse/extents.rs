//! SEEK_DATA and SEEK_HOLE on an image.

use zebu_engine::storage::Worker;
use zebu_engine::{Image, Result};

/// The wanted kind of extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    Data,
    Hole,
}

/// The first offset at or after `offset` that is what is wanted; the end of the disk counts as a hole. `None` if there is
/// no data, or `offset` is not on the disk.
pub(crate) async fn seek(image: &Image, worker: &Worker, offset: u64, wanted: Wanted) -> Result<Option<u64>> {
    let size = image.virtual_size();
    if offset >= size {
        return Ok(None);
    }
    let mut extents = image.extents(offset..size);
    while let Some(extent) = extents.next(worker).await? {
        if extent.is_zero() == (wanted == Wanted::Hole) {
            return Ok(Some(extent.offset));
        }
    }
    Ok((wanted == Wanted::Hole).then_some(size))
}
