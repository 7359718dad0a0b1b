//! Lines that drivers tell.

use crate::output::{stderr, stdout};
use crate::program::Program;

/// A line about a request that was stopped or resumed. Where standard output is gone, nobody looks.
pub(super) fn tell_line(line: &str) {
    let _ = stdout::print(&format!("{line}\n"));
}

/// Two disks that must be the same are not: nothing of this process can be believed.
pub(super) fn differs(dialect: Program, line: &str) {
    stderr::tell(dialect, line);
    std::process::exit(1);
}
