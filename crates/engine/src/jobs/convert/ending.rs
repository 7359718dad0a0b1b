//! The length of a target, by what is known of the source's.

use super::options::{ConvertOptions, ConvertTarget, ReadErrors, TargetClusters};
use super::target::is_device;
use crate::{Error, ErrorKind, Format, Image, Preallocation, Result};

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
