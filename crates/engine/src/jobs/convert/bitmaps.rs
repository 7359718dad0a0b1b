//! Taking the persistent dirty bitmaps of the source along.

use super::options::CopyBitmaps;
use crate::Remedy;
use crate::{BitmapInfo, Error, ErrorKind, Image, Result};
use zebu_storage::Worker;

/// The bitmaps that are to be copied.
pub(super) fn wanted(sources: &[Image], copy: CopyBitmaps) -> Result<Vec<BitmapInfo>> {
    let (Some(source), true) = (sources.first(), copy != CopyBitmaps::No) else { return Ok(Vec::new()) };
    if sources.len() > 1 {
        let message = "Copying bitmaps only possible with single source";
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    let mut bitmaps = source.bitmaps();
    if let Some(broken) = bitmaps.iter().find(|bitmap| bitmap.in_use && copy == CopyBitmaps::All) {
        let message =
            format!("Cannot copy inconsistent bitmap '{}': leave it out, or remove it", broken.name);
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .on(source.path())
            .with_remedy(Remedy::SkipBrokenBitmaps));
    }
    bitmaps.retain(|bitmap| !bitmap.in_use);
    Ok(bitmaps)
}

/// Copies bitmaps. A target of another size, or with a bitmap of one of the names, is refused.
pub(super) async fn copy(
    worker: &Worker,
    source: &Image,
    target: &Image,
    bitmaps: &[BitmapInfo],
) -> Result<()> {
    if bitmaps.is_empty() {
        return Ok(());
    }
    target.copy_bitmaps(worker, source, bitmaps).await
}
