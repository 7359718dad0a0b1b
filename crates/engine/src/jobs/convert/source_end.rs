//! Sources whose length shows when they have been read, such as the streams of packed files.

use super::options::{ConvertOptions, ConvertTarget, ReadErrors, TargetClusters};
use super::target::is_device;
use crate::{Error, ErrorKind, Format, Image, Preallocation, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Not known yet. No disk is so long.
const UNKNOWN: u64 = u64::MAX;

/// The end of a source that is read in order and that learns its length at the end. Until then, the source counts as longer;
/// it reads as zero past its end. Clones are the same end.
#[derive(Debug, Clone)]
pub struct SourceEnd(Arc<Ends>);

#[derive(Debug)]
struct Ends {
    end: AtomicU64,
    expected: AtomicU64,
}

impl Default for SourceEnd {
    fn default() -> Self {
        Self(Arc::new(Ends { end: AtomicU64::new(UNKNOWN), expected: AtomicU64::new(0) }))
    }
}

impl SourceEnd {
    /// An end that is not known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes how many bytes there are likely to be: for the progress of the job alone.
    pub fn expect(&self, bytes: u64) {
        self.0.expected.store(bytes, Ordering::Relaxed);
    }

    /// Notes how many bytes there are, a multiple of 512. The source calls this before it answers the first read that
    /// goes on past them.
    pub fn set(&self, bytes: u64) {
        self.0.end.store(bytes, Ordering::Release);
    }

    /// Bytes of the source, once they are known.
    pub fn get(&self) -> Option<u64> {
        Some(self.0.end.load(Ordering::Acquire)).filter(|end| *end != UNKNOWN)
    }

    /// Bytes of the source as far as is known, or likely.
    pub(super) fn likely(&self) -> u64 {
        self.get().unwrap_or_else(|| self.0.expected.load(Ordering::Relaxed))
    }
}

/// The length of the target of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// The source's, which is known.
    Known,
    /// Its own, whatever the source has.
    Kept,
    /// That of the source, at the end.
    Cut,
}

impl Ending {
    /// The ending of a job with these options.
    ///
    /// # Errors
    /// The source has an end that is not known, and the target needs to know it, or there are several sources.
    pub(super) fn of(sources: &[Image], target: &ConvertTarget, options: &ConvertOptions) -> Result<Self> {
        if options.source_end.is_none() {
            return Ok(Self::Known);
        }
        let refuse = |why: &str| {
            let message = format!("the length of a source is not known before it has been read: {why}");
            Err(Error::new(ErrorKind::InvalidArgument, message))
        };
        if sources.len() != 1 || options.range.is_some() {
            return refuse("it must be the only one, and copied as a whole");
        }
        if options.read_errors == ReadErrors::Zero {
            return refuse("what can't be read can't be left out");
        }
        match target {
            ConvertTarget::New(new) => {
                let takes = matches!(new.create.format, Format::Raw | Format::Qcow2);
                if !takes || new.create.preallocation != Preallocation::Off {
                    return refuse("the target must be raw or qcow2, without preallocation");
                }
                Ok(match new.create.size {
                    None if !is_device(&new.path) => Self::Cut,
                    _ => Self::Kept,
                })
            }
            ConvertTarget::Existing { .. } if options.clusters == TargetClusters::Plain => Ok(Self::Kept),
            ConvertTarget::Existing { .. } => {
                refuse("the clusters of a target that exists can't be compressed")
            }
            ConvertTarget::Stream(_) => refuse("the target must know it before"),
        }
    }
}
