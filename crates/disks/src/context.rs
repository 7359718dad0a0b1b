//! The meaning of words of a user, and the disks that they name.

use crate::disks::Disks;
use crate::program::Program;
use std::sync::Arc;

/// Passed to all that reads names of disks and opens them. Clones have the same disks.
#[derive(Clone, Default)]
pub struct Context {
    /// The program whose grammar, defaults and messages are asked for.
    pub dialect: Program,
    /// The disks, which are named, opened and closed here.
    pub disks: Arc<Disks>,
}
