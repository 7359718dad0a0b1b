//! Sockets and other descriptors that become ready: what a worker waits for beside its files.

use crate::blocking::vectors;
use crate::buf::IoBufs;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::{SendAncillaryBuffer, SendFlags};
use smallvec::SmallVec;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A descriptor that a [`crate::Worker`] can wait on, receive from and send to: a stream socket, a listening socket, a
/// pipe, an eventfd. Cheap to clone; closed with its last clone.
#[derive(Debug, Clone)]
pub struct Socket {
    fd: Arc<OwnedFd>,
    holder: Holder,
}

/// Other holders of the open file, and with it of the flag that says whether it is non-blocking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holder {
    OursAlone,
    Others,
}

impl Socket {
    /// Takes the descriptor over and makes it non-blocking.
    ///
    /// # Errors
    /// The kernel refuses that.
    pub fn new(fd: impl Into<OwnedFd>) -> io::Result<Self> {
        Self::held_by(Holder::OursAlone, fd.into())
    }

    /// As [`Socket::new`], for an eventfd that another process holds as well and may make blocking again. Receiving
    /// from it never waits in a system call, since Linux 5.8.
    ///
    /// # Errors
    /// As for [`Socket::new`].
    pub fn shared_with_others(fd: impl Into<OwnedFd>) -> io::Result<Self> {
        Self::held_by(Holder::Others, fd.into())
    }

    fn held_by(holder: Holder, fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self { fd: Arc::new(fd), holder })
    }

    /// Receives what there is.
    fn read(&self, parts: &mut [io::IoSliceMut<'_>]) -> rustix::io::Result<usize> {
        if self.holder == Holder::Others {
            match rustix::io::preadv2(self, parts, u64::MAX, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                result => return result,
            }
        }
        rustix::io::readv(self, parts)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The event that is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketOp {
    /// There is something to receive or accept, or the end.
    Readable,
    /// Something was received into the buffers.
    Receive,
    /// All buffers were sent.
    Send,
    /// As `Send`, with the next system call that the worker makes anyway.
    SendLazily,
    /// The driver of the device has done what the command asks of it.
    Command(DeviceCommand),
}

/// A command for the driver of a device (`IORING_OP_URING_CMD`), which reads and writes one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCommand {
    /// The driver's number of it.
    pub code: u32,
    /// Its bytes before the buffer's address, which is the last eight.
    pub head: [u8; 8],
}

impl SocketOp {
    pub(crate) fn sends(self) -> bool {
        matches!(self, SocketOp::Send | SocketOp::SendLazily)
    }
}

/// One operation on a socket.
pub(crate) struct SocketRequest {
    pub(crate) socket: Socket,
    pub(crate) op: SocketOp,
    pub(crate) bufs: IoBufs,
    /// Bytes sent so far.
    pub(crate) sent: usize,
}

/// The end of an operation.
pub(crate) struct SocketCompletion {
    pub(crate) id: usize,
    pub(crate) request: SocketRequest,
    /// Bytes received or sent, or the errno.
    pub(crate) result: Result<usize, i32>,
}

impl SocketRequest {
    /// Notes that the kernel moved `moved` bytes. The result, or `None` if there is more to send.
    pub(crate) fn after(&mut self, moved: usize) -> Option<Result<usize, i32>> {
        if !self.op.sends() {
            return Some(Ok(moved));
        }
        self.sent += moved;
        match (self.sent >= self.bufs.len(), moved) {
            (true, _) => Some(Ok(self.sent)),
            (false, 0) => Some(Err(libc::EPIPE)),
            (false, _) => None,
        }
    }

    /// Does what can be done without waiting. `None` if the descriptor is not ready.
    pub(crate) fn attempt(&mut self) -> Option<Result<usize, i32>> {
        loop {
            let moved = match self.op {
                SocketOp::Readable => is_readable(self.socket.as_fd()),
                SocketOp::Receive => {
                    let mut parts: Vec<_> =
                        self.bufs.0.iter_mut().map(|buf| io::IoSliceMut::new(buf.as_mut_slice())).collect();
                    self.socket.read(&mut parts)
                }
                SocketOp::Send | SocketOp::SendLazily => self.send_some(),
                // Drivers take commands from rings only.
                SocketOp::Command(_) => Err(Errno::OPNOTSUPP),
            };
            match moved {
                Ok(moved) => {
                    if let Some(result) = self.after(moved) {
                        return Some(result);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return None,
                Err(errno) => return Some(Err(errno.raw_os_error())),
            }
        }
    }

    fn send_some(&mut self) -> rustix::io::Result<usize> {
        let mut skip = self.sent;
        let mut parts = SmallVec::<[io::IoSlice<'_>; 32]>::new();
        for buf in &self.bufs.0 {
            let bytes = buf.as_slice();
            if skip < bytes.len() {
                parts.push(io::IoSlice::new(&bytes[skip..]));
            }
            skip = skip.saturating_sub(bytes.len());
        }
        parts.truncate(crate::blocking::MAX_VECTORS);
        rustix::net::sendmsg(&self.socket, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)
    }

    /// The addresses of what is left to be received or sent.
    #[cfg(feature = "io-uring")]
    pub(crate) fn fill_vectors(&mut self, into: &mut Vec<libc::iovec>) {
        into.clear();
        into.extend(vectors(&mut self.bufs, self.sent));
    }
}

/// 0 if it is readable (or at its end), EAGAIN if not.
fn is_readable(fd: BorrowedFd<'_>) -> rustix::io::Result<usize> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    match poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))? {
        0 => Err(Errno::AGAIN),
        _ => Ok(0),
    }
}
