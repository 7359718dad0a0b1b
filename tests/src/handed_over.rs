//! Descriptors that keep whoever closes them waiting, and ways to hand them over.

use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A TCP socket that is full, and waits for its peer when its last descriptor is closed, for so long.
#[derive(Debug)]
pub struct Lingering {
    /// The only descriptor of it here.
    pub descriptor: OwnedFd,
    /// Its peer, which takes nothing. Dropping it ends the wait.
    pub peer: TcpStream,
}

/// Makes one.
///
/// # Panics
/// If the system has no TCP.
pub fn lingering(time: Duration) -> Lingering {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    set_socket_recv_buffer_size(&listener, 4096).expect("a small buffer");
    let mut socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (peer, _) = listener.accept().expect("accepted");
    socket.set_nonblocking(true).expect("a flag");
    while socket.write(&[0; 4096]).is_ok() {}
    set_socket_linger(&socket, Some(time)).expect("an option");
    Lingering { descriptor: socket.into(), peer }
}

/// Sends bytes and a descriptor. The receiver alone has it once the caller has closed its own.
///
/// # Errors
/// The receiver takes none, or none of the bytes.
pub fn hand_over(stream: &UnixStream, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
