//! A connected socket, plain or under TLS.

use crate::network::{late, time_left};
use crate::tls::Tls;
#[cfg(feature = "nbd")]
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zebu_tls::Session;

/// How often TLS receives for one read, at most: a record of the greatest length comes in fewer pieces, unless the peer dawdles.
const MOST_PIECES_OF_RECORD: usize = 16;

/// Bytes that are taken at once of what nobody wants any more.
#[cfg(feature = "nbd")]
const UNREAD: usize = 64 << 10;

/// A socket. During the handshake it waits, until a time that is set; afterwards it never does.
pub(crate) struct Stream {
    socket: Socket,
    tls: Option<Box<Session>>,
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

impl Socket {
    /// Has the next system call wait until then at most, if there is such a time.
    fn wait_until(&self, until: Option<Instant>) -> io::Result<()> {
        until.map_or(Ok(()), |until| self.set_timeouts(time_left(until)?))
    }

    fn set_timeouts(&self, time: Duration) -> io::Result<()> {
        let left = Some(time);
        match self {
            Self::Tcp(socket) => {
                socket.set_read_timeout(left)?;
                socket.set_write_timeout(left)
            }
            Self::Unix(socket) => {
                socket.set_read_timeout(left)?;
                socket.set_write_timeout(left)
            }
        }
    }
}

impl Stream {
    /// A socket that was just connected; all of the handshake that follows must be over at `until`.
    pub(crate) fn of_tcp(socket: TcpStream, until: Instant) -> Self {
        Self { socket: Socket::Tcp(socket), tls: None, until: Some(until) }
    }

    /// The same of a Unix socket.
    #[cfg(feature = "nbd")]
    pub(crate) fn of_unix(socket: UnixStream, until: Instant) -> Self {
        Self { socket: Socket::Unix(socket), tls: None, until: Some(until) }
    }

    /// A socket that is connected, and whose handshake is over.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn without_handshake(socket: UnixStream) -> io::Result<Self> {
        let mut stream = Self { socket: Socket::Unix(socket), tls: None, until: None };
        stream.set_nonblocking()?;
        Ok(stream)
    }

    /// Goes on under TLS.
    pub(crate) fn start_tls(&mut self, tls: &Tls) -> io::Result<()> {
        let mut session = tls.session().map_err(io::Error::other)?;
        // A step at a time: a peer that sends a byte now and then must not stretch the deadline.
        while session.is_handshaking() || session.wants_to_send() {
            self.set_timeout()?;
            if session.wants_to_send() {
                session.send_to(&mut self.socket).map_err(late_if_blocked)?;
                continue;
            }
            match session.receive_from(&mut self.socket) {
                Ok(0) => {
                    let ended = "the server closed the connection during the TLS handshake";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, ended));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(late_if_blocked(error)),
            }
            if let Err(error) = session.process() {
                // The alert, which says to the server why.
                let _ = session.send_to(&mut self.socket);
                return Err(error.into());
            }
        }
        self.tls = Some(Box::new(session));
        Ok(())
    }

    /// The handshake is over: from now on, nothing waits.
    pub(crate) fn set_nonblocking(&mut self) -> io::Result<()> {
        self.until = None;
        match &self.socket {
            Socket::Tcp(socket) => socket.set_nonblocking(true),
            Socket::Unix(socket) => socket.set_nonblocking(true),
        }
    }

    /// The handshake is over: from now on, a read or write waits so long at most and fails with `WouldBlock` then.
    #[cfg(feature = "http")]
    pub(crate) fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
        self.until = None;
        self.socket.set_timeouts(time)
    }

    /// Another handshake begins, which must be over at `until`.
    #[cfg(feature = "http")]
    pub(crate) fn wait_until(&mut self, until: Instant) {
        self.until = Some(until);
    }

    /// The address of the other end, if it has one.
    #[cfg(feature = "http")]
    pub(crate) fn peer(&self) -> Option<std::net::IpAddr> {
        match &self.socket {
            Socket::Tcp(socket) => socket.peer_addr().ok().map(|address| address.ip()),
            Socket::Unix(_) => None,
        }
    }

    fn set_timeout(&self) -> io::Result<()> {
        self.socket.wait_until(self.until)
    }

    /// Receives some bytes; 0 at the end.
    pub(crate) fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.set_timeout()?;
        let Some(tls) = &mut self.tls else { return self.socket.read(buf) };
        // The caller has a look at its own time now and then.
        for _ in 0..MOST_PIECES_OF_RECORD {
            match tls.read(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            self.socket.wait_until(self.until)?;
            if tls.receive_from(&mut self.socket)? == 0 {
                return Ok(0);
            }
            tls.process()?;
        }
        match tls.read(buf) {
            // During a handshake, that would mean that its time is over.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.until.is_some() => {
                Err(io::ErrorKind::Interrupted.into())
            }
            result => result,
        }
    }

    /// Receives exactly so many bytes (during the handshake).
    pub(crate) fn read_exact(&mut self, buf: &mut [u8]) -> io::Result<()> {
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
    pub(crate) fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.set_timeout()?;
        match &mut self.tls {
            None => self.socket.write_all(bytes).map_err(late_if_blocked),
            Some(tls) => {
                tls.write_all(bytes)?;
                while tls.wants_to_send() {
                    self.socket.wait_until(self.until)?;
                    tls.send_to(&mut self.socket).map_err(late_if_blocked)?;
                }
                Ok(())
            }
        }
    }

    /// Sends some of it. With nothing to send, what TLS holds back goes out.
    pub(crate) fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return self.socket.write_vectored(bufs) };
        let taken = if bufs.is_empty() { 0 } else { tls.write_vectored(bufs)? };
        while tls.wants_to_send() {
            match tls.send_to(&mut self.socket) {
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

    /// Says that nothing follows, and takes what comes until the other end closes, or for so long: a socket that closes
    /// with something unread takes back what it sent.
    #[cfg(feature = "nbd")]
    pub(crate) fn say_goodbye(&mut self, most: Duration) {
        let until = Instant::now() + most;
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
            let _ = self.write_vectored(&[]);
        }
        let _ = rustix::net::shutdown(self.as_fd(), rustix::net::Shutdown::Write);
        let mut rest = vec![0; UNREAD];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(timeout) = Timespec::try_from(left) else { return };
            match poll(&mut [PollFd::new(&*self, PollFlags::IN)], Some(&timeout)) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            match self.socket.read(&mut rest) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }

    /// Whether bytes can have arrived that the socket does not show.
    pub(crate) fn buffers_input(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether TLS has bytes for the socket.
    pub(crate) fn holds_back(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_to_send())
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

/// During the handshake, a socket only blocks when its time is over.
fn late_if_blocked(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { late() } else { error }
}
