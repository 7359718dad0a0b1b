//! State of an image for its compressed clusters.

use crate::compress::CompressOptions;
use crate::qcow2::compressed::stream_packer::StreamPacker;

/// The packer of streams, and how to compress.
#[derive(Debug)]
pub(crate) struct CompressedClusters {
    packer: StreamPacker,
    options: CompressOptions,
}

impl CompressedClusters {
    pub(crate) fn new(options: CompressOptions) -> Self {
        Self { packer: StreamPacker::default(), options }
    }

    #[inline]
    pub(crate) fn packer(&self) -> &StreamPacker {
        &self.packer
    }

    pub(crate) fn options(&self) -> &CompressOptions {
        &self.options
    }
}
