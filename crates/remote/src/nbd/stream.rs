//! A connected socket, plain or under TLS.

use super::address::Endpoint;
use super::tls::Tls;
use rustix::net::sockopt;
use rustls::ClientConnection;
use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A server that says nothing while requests wait is asked whether it is there, so often.
const PROBE: Duration = Duration::from_secs(10);
/// Sent bytes that nobody acknowledges for so long are lost.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// A socket. During the handshake it waits, until a time that is set; afterwards it never does.
pub(super) struct Stream {
    socket: Socket,
    tls: Option<Box<ClientConnection>>,
    /// While the socket waits: until when.
    until: Option<Instant>,
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.read(buf),
            Self::Unix(socket) => socket.read(buf),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.write(buf),
            Self::Unix(socket) => socket.write(buf),
        }
    }
    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.write_vectored(bufs),
            Self::Unix(socket) => socket.write_vectored(bufs),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream {
    /// Connects; all of the handshake that follows must be over at `until`.
    pub(super) fn connect(endpoint: &Endpoint, until: Instant) -> io::Result<Self> {
        let socket = match endpoint {
            Endpoint::Unix(path) => Socket::Unix(UnixStream::connect(path)?),
            Endpoint::Tcp { host, port } => {
                let mut last = None;
                let mut connected = None;
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, time_left(until)?) {
                        Ok(socket) => {
                            connected = Some(socket);
                            break;
                        }
                        Err(error) => last = Some(error),
                    }
                }
                let none = || io::Error::new(io::ErrorKind::NotFound, "the host has no address");
                let socket = connected.ok_or_else(|| last.unwrap_or_else(none))?;
                socket.set_nodelay(true)?;
                // A peer that vanished is noticed; where the system has not all of these, later.
                let _ = sockopt::set_socket_keepalive(&socket, true);
                let _ = sockopt::set_tcp_keepidle(&socket, PROBE);
                let _ = sockopt::set_tcp_keepintvl(&socket, PROBE / 2);
                let _ = sockopt::set_tcp_keepcnt(&socket, 3);
                let _ = sockopt::set_tcp_user_timeout(&socket, UNACKNOWLEDGED.as_millis() as u32);
                Socket::Tcp(socket)
            }
        };
        Ok(Self { socket, tls: None, until: Some(until) })
    }

    /// A socket that is connected, and whose handshake is over.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn of_unix(socket: UnixStream) -> io::Result<Self> {
        let mut stream = Self { socket: Socket::Unix(socket), tls: None, until: None };
        stream.set_nonblocking()?;
        Ok(stream)
    }

    /// Goes on under TLS.
    pub(super) fn start_tls(&mut self, tls: &Tls) -> io::Result<()> {
        let mut connection = tls.connection().map_err(io::Error::other)?;
        while connection.is_handshaking() {
            self.set_timeout()?;
            connection.complete_io(&mut self.socket).map_err(late_if_blocked)?;
        }
        self.tls = Some(Box::new(connection));
        Ok(())
    }

    /// The handshake is over: from now on, nothing waits.
    pub(super) fn set_nonblocking(&mut self) -> io::Result<()> {
        self.until = None;
        match &self.socket {
            Socket::Tcp(socket) => socket.set_nonblocking(true),
            Socket::Unix(socket) => socket.set_nonblocking(true),
        }
    }

    fn set_timeout(&self) -> io::Result<()> {
        let Some(until) = self.until else { return Ok(()) };
        let left = Some(time_left(until)?);
        match &self.socket {
            Socket::Tcp(socket) => {
                socket.set_read_timeout(left)?;
                socket.set_write_timeout(left)
            }
            Socket::Unix(socket) => {
                socket.set_read_timeout(left)?;
                socket.set_write_timeout(left)
            }
        }
    }

    /// Receives some bytes; 0 at the end.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.set_timeout()?;
        let Some(tls) = &mut self.tls else { return self.socket.read(buf) };
        loop {
            match tls.reader().read(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            if tls.read_tls(&mut self.socket)? == 0 {
                return Ok(0);
            }
            let processed = tls.process_new_packets();
            processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }

    /// Receives exactly so many bytes (during the handshake).
    pub(super) fn read_exact(&mut self, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.read(&mut buf[done..]) {
                Ok(0) => {
                    let ended = "the server closed the connection during the handshake";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, ended));
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(late()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends all of it (during the handshake).
    pub(super) fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.set_timeout()?;
        match &mut self.tls {
            None => self.socket.write_all(bytes).map_err(late_if_blocked),
            Some(tls) => {
                tls.writer().write_all(bytes)?;
                while tls.wants_write() {
                    tls.write_tls(&mut self.socket).map_err(late_if_blocked)?;
                }
                Ok(())
            }
        }
    }

    /// Sends some of it. With nothing to send, what TLS holds back goes out.
    pub(super) fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return self.socket.write_vectored(bufs) };
        let taken = if bufs.is_empty() { 0 } else { tls.writer().write_vectored(bufs)? };
        while tls.wants_write() {
            match tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        if taken == 0 && !bufs.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(taken)
    }

    /// Whether bytes can have arrived that the socket does not show.
    pub(super) fn buffers_input(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether TLS has bytes for the socket.
    pub(super) fn holds_back(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(socket) => socket.as_fd(),
            Socket::Unix(socket) => socket.as_fd(),
        }
    }
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the server does not answer")
}

/// During the handshake, a socket only blocks when its time is over.
fn late_if_blocked(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { late() } else { error }
}

fn time_left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late()) } else { Ok(left) }
}
