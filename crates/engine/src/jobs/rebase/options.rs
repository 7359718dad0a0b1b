//! Options and report of a rebase.

use crate::jobs::convert::TargetClusters;
use crate::progress::JobControl;

/// How an image is rebased.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RebaseOptions {
    /// Pieces of work in flight, at least 1; more than 1024 count as 1024. Default: 8.
    pub requests: usize,
    /// Most bytes of read buffers; two clusters are used in any case. Default: 32 MiB.
    pub buffer_memory: usize,
    /// How clusters are written into the image. Default: [`TargetClusters::Plain`].
    pub clusters: TargetClusters,
    /// Watching, slowing and stopping. A rebase that is stopped leaves the image on its old backing file.
    /// Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(RebaseOptions {
    requests: usize,
    buffer_memory: usize,
    clusters: TargetClusters,
    control: JobControl,
});

impl Default for RebaseOptions {
    fn default() -> Self {
        Self {
            requests: 8,
            buffer_memory: 32 << 20,
            clusters: TargetClusters::Plain,
            control: JobControl::default(),
        }
    }
}

/// The result of a rebase. All figures in bytes of the virtual disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RebaseReport {
    /// Of the disk.
    pub total: u64,
    /// Held by the image itself, or known to be the same in both chains: not looked at.
    pub skipped: u64,
    /// Read from the chains and compared.
    pub compared: u64,
    /// Written into the image.
    pub written: u64,
    /// Made zero in the image.
    pub zeroed: u64,
}
