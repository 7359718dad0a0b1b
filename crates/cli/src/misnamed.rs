//! Raw images by the name of another format, which nobody asked for.

use crate::output::stderr;
use std::path::Path;
use zebu_disks::{Program, printable};

/// Ends of names, and the formats that they stand for.
const SUFFIXES: [(&str, &str); 6] =
    [("qcow2", "qcow2"), ("vmdk", "vmdk"), ("vhdx", "vhdx"), ("vhd", "vpc"), ("vpc", "vpc"), ("vdi", "vdi")];

/// Warns that `path` was made raw, where no format was given and its name ends as that of another one.
pub(crate) fn warn_of_raw(dialect: Program, path: &Path) {
    let suffix = path.extension().unwrap_or_default();
    let found = SUFFIXES.iter().find(|(name, _)| suffix.eq_ignore_ascii_case(name));
    let Some((_, format)) = found.filter(|_| !dialect.is_qemu()) else { return };
    stderr::warn(&format!(
        "warning: no format was given, so '{}' is a raw image, whatever its name says: the format {format} has to be asked for",
        printable(&path.to_string_lossy())
    ));
}
