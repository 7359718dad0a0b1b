//! The meaning of one command line's words, and the disks that it has.

use crate::disks::Disks;
use crate::program::Program;
use std::sync::Arc;

/// Passed to all that reads words of the command line, opens disks or prints.
#[derive(Clone, Default)]
pub(crate) struct Context {
    /// The program whose grammar, defaults and messages are asked for.
    pub(crate) dialect: Program,
    /// The disks of the command, which it names, opens and closes.
    pub(crate) disks: Arc<Disks>,
}
