//! Whether two images show a guest the same bytes.

use super::JobControl;
use crate::{Error, Image};
use std::fmt;
use std::path::PathBuf;
use zebu_storage::Worker;

/// What has to be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strictness {
    /// The bytes that a guest reads; what only the larger image has must read as zero.
    #[default]
    Content,
    /// Also the sizes, and which ranges are allocated (`-s`).
    Allocation,
}

/// How images are compared.
#[derive(Debug, Clone)]
pub struct CompareOptions {
    /// What has to be equal.
    pub strictness: Strictness,
    /// Pairs of reads in flight, at least 1.
    pub requests: usize,
    /// Most bytes of read buffers.
    pub buffer_memory: usize,
    /// Watching and stopping.
    pub control: JobControl,
}

impl Default for CompareOptions {
    fn default() -> Self {
        Self {
            strictness: Strictness::Content,
            requests: 8,
            buffer_memory: 32 << 20,
            control: JobControl::default(),
        }
    }
}

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// No difference of the kind asked for.
    Identical,
    /// The bytes differ.
    ContentMismatch {
        /// The lowest sector (512 bytes) that differs: its offset in bytes.
        offset: u64,
    },
    /// The sizes differ (only with [`Strictness::Allocation`]).
    SizeMismatch,
    /// What is allocated differs (only with [`Strictness::Allocation`]).
    StatusMismatch {
        /// The lowest offset in bytes where it does.
        offset: u64,
    },
}

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompareReport {
    /// What was found.
    pub result: Comparison,
    /// Virtual sizes in bytes of the first and the second image. Where they differ and the result is
    /// [`Comparison::Identical`], the larger image's tail reads as zero.
    pub sizes: [u64; 2],
}

/// Where a comparison failed. (Opening the images is the caller's part.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareStage {
    /// Looking up what is allocated (exit code 3).
    Status,
    /// Reading (exit code 4).
    Read,
    /// Not a failure of the images: it was cancelled, or an option is out of range.
    Control,
}

/// A comparison that could not be finished.
#[derive(Debug, Clone)]
pub struct CompareError {
    /// Doing what.
    pub stage: CompareStage,
    /// On which image.
    pub image: Option<PathBuf>,
    /// Why.
    pub error: Error,
}

impl fmt::Display for CompareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for CompareError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// Compares what a guest would read from two images, which may differ in format, size and chain. Ranges that both
/// images know to be zero are not read. The offset reported is the lowest one, however the reads were ordered.
pub async fn compare(
    worker: &Worker,
    first: &Image,
    second: &Image,
    options: &CompareOptions,
) -> Result<CompareReport, CompareError> {
    todo!("{:?}", (worker.id(), first.path(), second.path(), options))
}
