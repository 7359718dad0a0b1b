//! Where clients come in.

use super::origin::Origin;
use crate::error::ExportError;
use rustix::io::Errno;
use rustix::net::{SocketAddrAny, SocketFlags, acceptfrom_with, sockopt};
use std::net::SocketAddr;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use zebu_storage::{Socket, refuse_descriptors};

/// A listening socket.
#[derive(Debug, Clone)]
pub struct Listener {
    socket: Socket,
    name: String,
    kind: Kind,
    refuses_descriptors: bool,
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
    /// It can't be made non-blocking, or clients can't be kept from sending descriptors though the kernel knows how.
    pub fn unix(listener: UnixListener) -> Result<Self, ExportError> {
        let address = listener.local_addr().ok();
        let path = address.as_ref().and_then(|address| address.as_pathname());
        let name = path.map_or("a Unix socket".to_owned(), |path| format!("unix:{}", path.display()));
        let refuses_descriptors = refuse_descriptors(&listener)
            .map_err(|source| ExportError::Socket { doing: format!("listen on {name}"), source })?;
        Ok(Self { refuses_descriptors, ..Self::new(listener.into(), name, Kind::Unix)? })
    }

    /// A TCP socket, bound and listening.
    ///
    /// # Errors
    /// It can't be made non-blocking.
    pub fn tcp(listener: TcpListener) -> Result<Self, ExportError> {
        let name = listener.local_addr().map_or("a TCP socket".to_owned(), |address| address.to_string());
        Self::new(listener.into(), name, Kind::Tcp)
    }

    fn new(fd: OwnedFd, name: String, kind: Kind) -> Result<Self, ExportError> {
        match Socket::new(fd) {
            Ok(socket) => Ok(Self { socket, name, kind, refuses_descriptors: kind == Kind::Tcp }),
            Err(source) => Err(ExportError::Socket { doing: format!("listen on {name}"), source }),
        }
    }

    /// The address, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether clients can't hand over descriptors. They can at a Unix socket before Linux 6.16: whoever hands over the last
    /// descriptor of a TCP socket that lingers holds up the thread that closes it, and all clients of that thread.
    pub fn refuses_descriptors(&self) -> bool {
        self.refuses_descriptors
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// A client that has come, if one has.
    ///
    /// # Errors
    /// EAGAIN if none has; others, such as a lack of descriptors, may pass.
    pub(crate) fn accept(&self) -> Result<Client, Errno> {
        let (fd, address) = acceptfrom_with(&self.socket, SocketFlags::CLOEXEC)?;
        if self.kind == Kind::Tcp {
            // Replies are not to wait for each other; vanished clients are to be noticed in the end.
            let _ = sockopt::set_tcp_nodelay(&fd, true);
            let _ = sockopt::set_socket_keepalive(&fd, true);
        }
        let (name, origin) = name_of(&fd, address);
        let socket = Socket::new(fd);
        let socket =
            socket.map_err(|error| error.raw_os_error().map_or(Errno::INVAL, Errno::from_raw_os_error))?;
        Ok(Client { socket, name, origin })
    }
}

/// A client that has come.
pub(crate) struct Client {
    pub(crate) socket: Socket,
    /// For messages: its address, or the process that a Unix socket's client was when it connected.
    pub(crate) name: String,
    pub(crate) origin: Origin,
}

fn name_of(socket: &OwnedFd, address: Option<SocketAddrAny>) -> (String, Origin) {
    match address.map(SocketAddr::try_from) {
        Some(Ok(address)) => (address.to_string(), address.into()),
        _ => match sockopt::socket_peercred(socket) {
            Ok(peer) => {
                let (process, user) = (peer.pid.as_raw_nonzero(), peer.uid.as_raw());
                (format!("of process {process} (user {user})"), Origin::User(user))
            }
            Err(_) => ("at a Unix socket".to_owned(), Origin::Unknown),
        },
    }
}
