//! Programs that were killed, and the writes that they have left on their way: QEMU does not wait for those.

use crate::patience::wait_until;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// The byte of a file that is locked as long as writes of a killed zebu may land.
const MARK: i64 = 99;

/// Waits until nothing that a killed program has sent to a file is under way.
///
/// # Panics
/// If they never land.
#[track_caller]
pub fn wait_for_writes_to(file: &Path) {
    // What is not there any more has nobody to wait for it.
    let Ok(opened) = File::open(file) else { return };
    wait_until(format_args!("the writes to {} land", file.display()), || !is_marked(&opened));
}

fn is_marked(file: &File) -> bool {
    // SAFETY: a structure of integers, for which zero is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    (lock.l_start, lock.l_len) = (MARK, 1);
    // SAFETY: the command takes a pointer to one `flock`.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    asked == 0 && lock.l_type != libc::F_UNLCK as libc::c_short
}
