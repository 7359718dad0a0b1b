//! Where clients come in.

use crate::error::ExportError;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use zebu::storage::Socket;

/// A listening socket.
#[derive(Debug, Clone)]
pub struct Listener {
    socket: Socket,
    name: String,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unix,
    Tcp,
}

impl Listener {
    /// A Unix socket, bound and listening. Its file is the caller's to remove.
    ///
    /// # Errors
    /// It can't be made non-blocking.
    pub fn unix(listener: UnixListener) -> Result<Self, ExportError> {
        let address = listener.local_addr().ok();
        let path = address.as_ref().and_then(|address| address.as_pathname());
        let name = path.map_or("a Unix socket".to_owned(), |path| format!("unix:{}", path.display()));
        Self::new(listener.into(), name, Kind::Unix)
    }

    /// A TCP socket, bound and listening.
    ///
    /// # Errors
    /// It can't be made non-blocking.
    pub fn tcp(listener: TcpListener) -> Result<Self, ExportError> {
        let name = listener.local_addr().map_or("a TCP socket".to_owned(), |address| address.to_string());
        Self::new(listener.into(), name, Kind::Tcp)
    }

    fn new(fd: std::os::fd::OwnedFd, name: String, kind: Kind) -> Result<Self, ExportError> {
        match Socket::new(fd) {
            Ok(socket) => Ok(Self { socket, name, kind }),
            Err(source) => Err(ExportError::Socket { doing: format!("listen on {name}"), source }),
        }
    }

    /// The address, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// A client that has come, if one has.
    ///
    /// # Errors
    /// EAGAIN if none has; others, such as a lack of descriptors, may pass.
    pub(crate) fn accept(&self) -> Result<Socket, Errno> {
        let fd = accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        if self.kind == Kind::Tcp {
            // Replies are not to wait for each other; vanished clients are to be noticed in the end.
            let _ = sockopt::set_tcp_nodelay(&fd, true);
            let _ = sockopt::set_socket_keepalive(&fd, true);
        }
        Socket::new(fd).map_err(|error| error.raw_os_error().map_or(Errno::INVAL, Errno::from_raw_os_error))
    }
}
