//! A process that connects for one in a sandbox: to the addresses that it was started with, and to no others. It signs URLs,
//! too: of the objects that it was started with.
//!
//! A question is the number of an address and a time in milliseconds, with the socket on which the answer goes back. The
//! answer is an errno, with the connected socket if that is 0; of an object, with the seconds that its URL is good and the URL,
//! or with the reason.

use super::unix::connect_unix;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
#[cfg(feature = "http")]
use std::io::Read as _;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The most connections that are being made at a time.
const MOST_AT_ONCE: usize = 64;
/// The longest that one may take.
const LONGEST: Duration = Duration::from_secs(120);
/// The time beyond its own in which the broker's answer must come.
const GRACE: Duration = Duration::from_secs(1);

/// An address that a broker may connect to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Peer {
    /// An address and port of TCP.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
    /// The name of an object, whose URLs it signs.
    Object(String),
}

/// A URL and how long it is good; or an errno and the reason.
pub type SignedText = Result<(String, Duration), (i32, String)>;

/// The longest answer, in bytes.
const LONGEST_ANSWER: usize = 32 << 10;
/// How long a signature may take: credentials may come over the network.
const LONGEST_SIGNING: Duration = Duration::from_secs(60);

/// A broker, as the process in the sandbox has it.
#[derive(Debug)]
pub struct Broker {
    socket: UnixStream,
    peers: Vec<Peer>,
}

impl Broker {
    /// The broker on the other end of `socket`, which was started with these `peers` ([`Broker::serve`]).
    pub fn new(socket: UnixStream, peers: Vec<Peer>) -> Self {
        Self { socket, peers }
    }

    /// Connects for the other end of `socket` until that is closed, and has `sign` sign. This is the work of the process
    /// outside of the sandbox.
    ///
    /// # Errors
    /// The socket's.
    pub fn serve(
        socket: &UnixStream,
        peers: &[Peer],
        sign: impl Fn(&str) -> SignedText + Send + Sync + 'static,
    ) -> io::Result<()> {
        let sign = Arc::new(sign);
        let busy = Arc::new(AtomicUsize::new(0));
        loop {
            let mut question = [0; 8];
            let (len, answer) = receive(socket, &mut question)?;
            if len == 0 {
                return Ok(());
            }
            let Some(answer) = answer.filter(|_| len == question.len()).map(UnixStream::from) else {
                continue;
            };
            let [index, time] = [&question[..4], &question[4..]]
                .map(|bytes| bytes.try_into().map(u32::from_le_bytes).unwrap_or_default());
            let peer = peers.get(index as usize).cloned();
            if busy.fetch_add(1, Ordering::SeqCst) >= MOST_AT_ONCE {
                busy.fetch_sub(1, Ordering::SeqCst);
                let _ = send(&answer, &libc::EAGAIN.to_le_bytes(), None);
                continue;
            }
            let (done, sign) = (Arc::clone(&busy), Arc::clone(&sign));
            let work = move || {
                if let Some(Peer::Object(name)) = &peer {
                    let _ = send(&answer, &signed_bytes(sign(name)), None);
                    done.fetch_sub(1, Ordering::SeqCst);
                    return;
                }
                let connected = peer.ok_or(libc::EACCES).and_then(|peer| {
                    let time = Duration::from_millis(time.into()).min(LONGEST);
                    connect(&peer, time).map_err(|error| match error.kind() {
                        io::ErrorKind::TimedOut => libc::ETIMEDOUT,
                        _ => error.raw_os_error().unwrap_or(libc::EIO),
                    })
                });
                let _ = match connected {
                    Ok(socket) => send(&answer, &0i32.to_le_bytes(), Some(&socket)),
                    Err(errno) => send(&answer, &errno.to_le_bytes(), None),
                };
                done.fetch_sub(1, Ordering::SeqCst);
            };
            if std::thread::Builder::new().spawn(work).is_err() {
                // Its answer's socket is gone, which is an answer, too.
                busy.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Has the broker sign a URL of an object.
    #[cfg(feature = "http")]
    pub(super) fn sign(&self, name: &str) -> SignedText {
        let fail = |error: io::Error| (error.raw_os_error().unwrap_or(libc::EACCES), error.to_string());
        let ours = self.ask(&Peer::Object(name.to_owned()), LONGEST_SIGNING).map_err(fail)?;
        let mut bytes = Vec::new();
        let read = (&ours).take(LONGEST_ANSWER as u64).read_to_end(&mut bytes);
        read.map_err(fail)?;
        let Some((errno, rest)) = bytes.split_first_chunk::<4>() else {
            return Err((libc::EIO, "the process that signs for the sandbox is gone".to_owned()));
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match (i32::from_le_bytes(*errno), rest.split_first_chunk::<4>()) {
            (0, Some((seconds, url))) => {
                Ok((text(url), Duration::from_secs(u32::from_le_bytes(*seconds).into())))
            }
            (errno, _) => Err((errno, text(rest))),
        }
    }

    /// Has the broker connect.
    pub(super) fn connect(&self, peer: &Peer, time: Duration) -> io::Result<OwnedFd> {
        let ours = self.ask(peer, time)?;
        let mut errno = [0; 4];
        let (len, socket) = receive(&ours, &mut errno)?;
        if len < errno.len() {
            return Err(io::Error::other("the process that connects for the sandbox is gone"));
        }
        match (i32::from_le_bytes(errno), socket) {
            (0, Some(socket)) => Ok(socket),
            (0, None) => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            (errno, _) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Asks; the socket on which the answer comes.
    fn ask(&self, peer: &Peer, time: Duration) -> io::Result<UnixStream> {
        let index = self.peers.iter().position(|known| known == peer).ok_or_else(|| {
            let reason = "its address was not known when the sandbox was entered";
            io::Error::new(io::ErrorKind::PermissionDenied, reason)
        })?;
        let mut question = [0; 8];
        question[..4].copy_from_slice(&(index as u32).to_le_bytes());
        question[4..].copy_from_slice(&(time.as_millis().min(u128::from(u32::MAX)) as u32).to_le_bytes());
        let (ours, theirs) = UnixStream::pair()?;
        send(&self.socket, &question, Some(&OwnedFd::from(theirs)))?;
        ours.set_read_timeout(Some(time + GRACE))?;
        Ok(ours)
    }
}

/// The answer to a question for a URL.
fn signed_bytes(signed: SignedText) -> Vec<u8> {
    match signed {
        Ok((url, good_for)) => {
            let seconds = u32::try_from(good_for.as_secs()).unwrap_or(u32::MAX);
            [&0i32.to_le_bytes()[..], &seconds.to_le_bytes(), url.as_bytes()].concat()
        }
        Err((errno, reason)) => [&errno.max(1).to_le_bytes()[..], reason.as_bytes()].concat(),
    }
}

fn connect(peer: &Peer, time: Duration) -> io::Result<OwnedFd> {
    match peer {
        Peer::Tcp(address) => TcpStream::connect_timeout(address, time).map(OwnedFd::from),
        Peer::Unix(path) => connect_unix(path, Instant::now() + time).map(OwnedFd::from),
        Peer::Object(_) => Err(io::ErrorKind::Unsupported.into()),
    }
}

fn send(socket: &UnixStream, bytes: &[u8], passed: Option<&OwnedFd>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let passed: Vec<_> = passed.iter().map(|socket| socket.as_fd()).collect();
    if !passed.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&passed));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?,
        }
    };
    let passed = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
        _ => None,
    });
    Ok((received.bytes, passed))
}
