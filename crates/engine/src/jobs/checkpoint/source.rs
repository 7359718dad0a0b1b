//! The disks that a checkpoint is made of.

use crate::Image;

/// One disk that a checkpoint is made of.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CheckpointSource {
    /// The image, open for writing.
    pub image: Image,
    /// A bitmap that records writes; its bits at the moment are those of [`FrozenDisk::bitmap`](super::FrozenDisk::bitmap). Default: `None`.
    pub from: Option<String>,
    /// A bitmap that is empty at the moment and records what is written from then on. It is added if it is missing. Default: `None`.
    pub bitmap: Option<String>,
}

zebu_storage::option_setters!(CheckpointSource {
    from: impl Into<Option<String>>,
    bitmap: impl Into<Option<String>>,
});

impl CheckpointSource {
    /// A disk without bitmaps.
    pub fn new(image: &Image) -> Self {
        Self { image: image.clone(), from: None, bitmap: None }
    }
}
