//! Standard error, beside the failure that ends a command.

use std::io::Write;
use zebu_disks::{Program, printable};

/// Writes a line for people: what they should know of, though the command goes on.
pub(crate) fn tell(dialect: Program, message: &str) {
    // There is nobody left to tell if standard error is gone.
    let _ = writeln!(std::io::stderr(), "{}: {}", dialect.name(), printable(message));
}

/// Writes a warning as it stands, which may take several lines.
pub(crate) fn warn(message: &str) {
    let _ = writeln!(std::io::stderr(), "{message}");
}
