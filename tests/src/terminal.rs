//! Terminals from both sides, for programs that are used by people.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// A terminal: our end, and the one for a program. Programs that other tests start meanwhile have neither open.
///
/// # Panics
/// If the system gives none.
pub fn terminal() -> (File, OwnedFd) {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_NOCTTY);
    let ours = options.open("/dev/ptmx").expect("a terminal");
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: it is open, and nothing is written to memory.
    let theirs = unsafe {
        assert_eq!(libc::unlockpt(ours.as_raw_fd()), 0, "{}", std::io::Error::last_os_error());
        libc::ioctl(ours.as_raw_fd(), libc::TIOCGPTPEER, flags)
    };
    assert!(theirs >= 0, "no terminal: {}", std::io::Error::last_os_error());
    // SAFETY: it was just opened, for nobody else.
    (ours, unsafe { OwnedFd::from_raw_fd(theirs) })
}

/// Sets the size of a terminal.
///
/// # Panics
/// If it can't be set.
pub fn resize(terminal: &File, columns: u16, rows: u16) {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: it is open, and `size` is read only.
    let set = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// Starts a program at a terminal, as the leader of its session.
///
/// # Panics
/// If it can't be started.
pub fn start_at(theirs: OwnedFd, mut command: Command) -> Child {
    let end = |fd: &OwnedFd| Stdio::from(fd.try_clone().expect("a descriptor"));
    command.stdin(end(&theirs)).stdout(end(&theirs)).stderr(end(&theirs));
    let number = theirs.as_raw_fd();
    let lead = move || {
        // SAFETY: system calls that a process may make between fork and exec; `number` is open there.
        let leads = unsafe { libc::setsid() >= 0 && libc::ioctl(number, libc::TIOCSCTTY, 0) == 0 };
        if leads { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: `lead` makes system calls only.
    unsafe { command.pre_exec(lead) };
    // The terminal is at its end when nobody else has it open: ours is closed here.
    command.spawn().expect("the program starts")
}
