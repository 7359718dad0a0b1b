//! How large an image file would become.

use super::progress::JobControl;
use crate::{CreateOptions, Image, Result};
use zebu_storage::Worker;

/// Bytes that a new image file needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measurement {
    /// To hold what the source holds now.
    pub required: u64,
    /// When every cluster of the disk is allocated.
    pub fully_allocated: u64,
    /// For the source's persistent bitmaps, on top; `None` where source or target format has none.
    pub bitmaps: Option<u64>,
}

/// Measures a target made with `create` for the content of `image`, its backing chain included.
/// `create.size` is not looked at: the size is that of the image.
pub async fn measure_image(
    worker: &Worker,
    image: &Image,
    create: &CreateOptions,
    control: &JobControl,
) -> Result<Measurement> {
    todo!("{:?}", (worker.id(), image.path(), create, control))
}

/// Measures a target made with `create` for an empty disk of `size` bytes.
pub fn measure_size(size: u64, create: &CreateOptions) -> Result<Measurement> {
    todo!("{:?}", (size, create))
}
