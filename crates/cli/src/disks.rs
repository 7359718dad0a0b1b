//! The disks of a command: each part of what it knows of them has an owner.

use crate::uploads::Uploads;

/// The disks that a command line names and opens.
#[derive(Debug, Default)]
pub(crate) struct Disks {
    /// Objects in stores that are written.
    pub(crate) uploads: Uploads,
}
