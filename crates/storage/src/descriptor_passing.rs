//! Descriptors that others send with their bytes over a Unix socket (`SCM_RIGHTS`).
//!
//! They do harm even if nobody takes them: whoever receives the bytes, or closes the socket with the bytes in it, closes
//! the descriptors. Closing the last one of a TCP socket that lingers (`SO_LINGER`) waits for that socket's peer, for as long
//! as its owner chose, and a worker's thread with all its clients waits, too.

use rustix::fd::{AsFd, AsRawFd};
use std::io;

/// The option that allows descriptors (<asm-generic/socket.h>, Linux 6.16).
const SO_PASSRIGHTS: libc::c_int = 83;

/// Refuses descriptors at a Unix socket that listens, and at those that are accepted from it: senders get EPERM. False if the
/// kernel can't, before Linux 6.16.
///
/// # Errors
/// It is no Unix socket.
pub fn refuse_descriptors(socket: impl AsFd) -> io::Result<bool> {
    let refused: libc::c_int = 0;
    // SAFETY: the value is an int, alive through the call, and its length is that of an int.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const refused).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENOPROTOOPT) { Ok(false) } else { Err(error) }
}
