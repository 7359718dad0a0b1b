//! Logical sectors larger than 512 bytes, which a target can't record.

use crate::output::stderr;
use std::ffi::OsStr;
use zebu_disks::printable;

/// Bytes of a logical sector of almost every disk.
const USUAL: u32 = 512;

/// Bytes of an image's logical sector, if they are not the usual ones.
pub(crate) fn unusual(bytes: u32) -> Option<u32> {
    Some(bytes).filter(|bytes| *bytes > USUAL)
}

/// Warns that `target` does not tell of sectors of `lost` bytes.
pub(crate) fn warn_of_lost(lost: Option<u32>, target: &OsStr) {
    let Some(bytes) = lost else { return };
    stderr::warn(&format!(
        "warning: the disk has logical sectors of {bytes} bytes, in which its partition table counts, and \
         '{}' can't record that: give the virtual machine a disk with logical_block_size={bytes}, or convert \
         to vhdx",
        printable(&target.to_string_lossy())
    ));
}
