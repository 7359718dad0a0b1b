//! The way to other machines: hosts are looked up and sockets connected here, each with a deadline.
//!
//! In a sandbox nothing can be looked up or connected. A [`Broker`] outside of it does that then, for the addresses that
//! were known when it was started.

mod broker;
pub(crate) mod deadline;
mod reach;
mod unix;

pub use broker::{Broker, Peer, SignedText};
pub(crate) use deadline::{late, time_left};
#[cfg(feature = "http")]
pub(crate) use reach::written_address;
pub(crate) use reach::{OutOfReach, Reach, is_public};

use rustix::net::sockopt;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use unix::connect_unix;
use zebu_storage::sync::Mutex;

/// A server that says nothing while requests wait is asked whether it is there, so often.
const PROBE: Duration = Duration::from_secs(10);
/// Sent bytes that nobody acknowledges for so long are lost.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);
/// The most look-ups at a time, those that were given up among them.
const MOST_LOOKUPS: usize = 16;
/// The most addresses of one host that are tried.
const MOST_ADDRESSES: usize = 16;

/// The way to other machines. Clones are the same way.
#[derive(Debug, Clone, Default)]
pub struct Network(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    /// Look-ups that have not ended. They can't be stopped: the C library has no way.
    lookups: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct State {
    /// Addresses that hosts had when they were looked up last.
    hosts: HashMap<(String, u16), Vec<SocketAddr>>,
    sockets: Vec<PathBuf>,
    /// Objects whose URLs were signed.
    objects: Vec<String>,
    broker: Option<Arc<Broker>>,
}

/// Two are the same if they are one way.
impl PartialEq for Network {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Network {}

impl Network {
    /// Everything that was looked up or connected so far, for a [`Broker`].
    pub fn peers(&self) -> Vec<Peer> {
        let state = self.0.state.lock();
        let mut tcp: Vec<SocketAddr> = state.hosts.values().flatten().copied().collect();
        tcp.sort_unstable();
        tcp.dedup();
        let sockets = state.sockets.iter().cloned().map(Peer::Unix);
        let objects = state.objects.iter().cloned().map(Peer::Object);
        tcp.into_iter().map(Peer::Tcp).chain(sockets).chain(objects).collect()
    }

    /// A URL of an object that the broker signs; `None` without a broker, which hears of the object then when it is started.
    #[cfg(feature = "http")]
    pub fn signed(&self, name: &str) -> Option<SignedText> {
        let broker = {
            let mut state = self.0.state.lock();
            if state.broker.is_none() && !state.objects.iter().any(|known| known == name) {
                state.objects.push(name.to_owned());
            }
            state.broker.clone()
        };
        broker.map(|broker| broker.sign(name))
    }

    /// From now on the broker connects, and nothing is looked up any more.
    pub fn use_broker(&self, broker: Broker) {
        self.0.state.lock().broker = Some(Arc::new(broker));
    }

    /// Connects to a host; the first of its addresses that answers and is within `reach`.
    pub(crate) fn tcp(&self, host: &str, port: u16, reach: Reach, until: Instant) -> io::Result<TcpStream> {
        let all = self.addresses(host, port, until)?;
        let addresses: Vec<SocketAddr> =
            all.iter().copied().filter(|address| reach.has(address.ip())).collect();
        if addresses.is_empty() && !all.is_empty() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, OutOfReach::new(host)));
        }
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for (index, address) in addresses.iter().enumerate() {
            // A host that drops packets leaves time for the others.
            let time = time_left(until)? / (addresses.len() - index) as u32;
            match self.connect(*address, time) {
                Ok(socket) => return Ok(socket),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn connect(&self, address: SocketAddr, time: Duration) -> io::Result<TcpStream> {
        let broker = self.0.state.lock().broker.clone();
        let socket = match broker {
            None => TcpStream::connect_timeout(&address, time)?,
            Some(broker) => TcpStream::from(broker.connect(&Peer::Tcp(address), time)?),
        };
        socket.set_nodelay(true)?;
        // A peer that vanished is noticed; where the system has not all of these, later.
        let _ = sockopt::set_socket_keepalive(&socket, true);
        let _ = sockopt::set_tcp_keepidle(&socket, PROBE);
        let _ = sockopt::set_tcp_keepintvl(&socket, PROBE / 2);
        let _ = sockopt::set_tcp_keepcnt(&socket, 3);
        let _ = sockopt::set_tcp_user_timeout(&socket, UNACKNOWLEDGED.as_millis() as u32);
        Ok(socket)
    }

    /// Connects to a Unix socket.
    #[cfg_attr(not(feature = "nbd"), expect(dead_code))]
    pub(crate) fn unix(&self, path: &Path, until: Instant) -> io::Result<UnixStream> {
        let broker = {
            let mut state = self.0.state.lock();
            if state.broker.is_none() && !state.sockets.iter().any(|known| known == path) {
                state.sockets.push(path.to_owned());
            }
            state.broker.clone()
        };
        match broker {
            None => connect_unix(path, until),
            Some(broker) => {
                Ok(UnixStream::from(broker.connect(&Peer::Unix(path.to_owned()), time_left(until)?)?))
            }
        }
    }

    /// The addresses of a host.
    fn addresses(&self, host: &str, port: u16, until: Instant) -> io::Result<Vec<SocketAddr>> {
        let key = (host.to_owned(), port);
        {
            let state = self.0.state.lock();
            if state.broker.is_some() {
                return state.hosts.get(&key).cloned().ok_or_else(|| {
                    let reason = format!("'{host}' can't be looked up in the sandbox");
                    io::Error::new(io::ErrorKind::PermissionDenied, reason)
                });
            }
        }
        let mut addresses = match host.parse::<IpAddr>() {
            Ok(address) => vec![SocketAddr::new(address, port)],
            Err(_) => look_up(&self.0.lookups, host, port, until)?,
        };
        addresses.truncate(MOST_ADDRESSES);
        self.0.state.lock().hosts.insert(key, addresses.clone());
        Ok(addresses)
    }
}

/// Asks the system for the addresses of a host, on a thread of its own: what asks may hang.
fn look_up(running: &Arc<AtomicUsize>, host: &str, port: u16, until: Instant) -> io::Result<Vec<SocketAddr>> {
    let time = time_left(until)?;
    if running.fetch_add(1, Ordering::SeqCst) >= MOST_LOOKUPS {
        running.fetch_sub(1, Ordering::SeqCst);
        return Err(io::Error::other("too many look-ups of hosts have no answer"));
    }
    let (sender, receiver) = mpsc::channel();
    let question = (host.to_owned(), port);
    let ended = Arc::clone(running);
    let ask = move || {
        let found = (question.0.as_str(), question.1).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        ended.fetch_sub(1, Ordering::SeqCst);
        let found = found.map_err(|error| {
            let text = error.to_string();
            let reason = text.rsplit_once(": ").map_or(text.as_str(), |(_, reason)| reason);
            io::Error::new(io::ErrorKind::NotFound, format!("'{}' can't be looked up: {reason}", question.0))
        });
        let _ = sender.send(found);
    };
    if let Err(error) = std::thread::Builder::new().name("zebu-lookup".to_owned()).spawn(ask) {
        running.fetch_sub(1, Ordering::SeqCst);
        return Err(error);
    }
    receiver.recv_timeout(time).unwrap_or_else(|_| {
        let reason = format!("looking up '{host}' takes too long");
        Err(io::Error::new(io::ErrorKind::TimedOut, reason))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_host_without_a_public_address_is_refused_if_that_is_asked_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let until = Instant::now() + Duration::from_secs(600);
        let network = Network::default();
        assert!(network.tcp("localhost", port, Reach::Any, until).is_ok());
        // What is connected is what was judged: there is no second look-up that could tell another address.
        let error = network.tcp("localhost", port, Reach::Public, until).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(error.to_string().contains("private"), "{error}");
        assert!(network.peers().contains(&Peer::Tcp(SocketAddr::from(([127, 0, 0, 1], port)))));
    }

    #[test]
    fn a_full_backlog_and_a_time_that_is_over_are_no_reason_to_wait() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let network = Network::default();
        let begin = Instant::now();
        let mut made = Vec::new();
        let error = loop {
            match network.unix(&path, Instant::now() + Duration::from_millis(200)) {
                Ok(socket) => made.push(socket),
                Err(error) => break error,
            }
            assert!(made.len() < 10);
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let over = network.tcp("localhost", 1, Reach::Any, begin).unwrap_err();
        assert_eq!(over.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_broker_connects_to_what_it_was_started_with_and_to_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let unix = UnixListener::bind(&path).unwrap();
        let (known, other) =
            (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let [known_port, other_port] = [&known, &other].map(|tcp| tcp.local_addr().unwrap().port());
        let network = Network::default();
        let until = Instant::now() + Duration::from_secs(600);
        network.tcp("127.0.0.1", known_port, Reach::Any, until).unwrap();
        network.unix(&path, until).unwrap();
        assert!(network.signed("s3://b/k").is_none() && network.signed("s3://b/other").is_none());
        let peers = network.peers();
        assert_eq!(peers.len(), 4);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let broker = std::thread::spawn({
            let peers = peers.clone();
            move || {
                Broker::serve(&theirs, &peers, |name| match name {
                    "s3://b/k" => Ok(("http://h/b/k?signed".to_owned(), Duration::from_secs(7))),
                    _ => Err((libc::EACCES, "no key".to_owned())),
                })
            }
        });
        network.use_broker(Broker::new(ours, peers));
        let _first = (known.accept().unwrap(), unix.accept().unwrap());
        let mut socket = network.tcp("127.0.0.1", known_port, Reach::Any, until).unwrap();
        let mut peer = known.accept().unwrap().0;
        peer.write_all(b"x").unwrap();
        socket.read_exact(&mut [0]).unwrap();
        network.unix(&path, until).unwrap();
        for (host, port) in [("127.0.0.1", other_port), ("localhost", known_port)] {
            let error = network.tcp(host, port, Reach::Any, until).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        }
        let gone = std::path::Path::new("/nowhere");
        assert_eq!(network.unix(gone, until).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        let signed = ("http://h/b/k?signed".to_owned(), Duration::from_secs(7));
        assert_eq!(network.signed("s3://b/k"), Some(Ok(signed)));
        assert_eq!(network.signed("s3://b/other"), Some(Err((libc::EACCES, "no key".to_owned()))));
        assert!(network.signed("s3://b/unknown").is_some_and(|signed| signed.is_err()));
        drop(known);
        let error = network.tcp("127.0.0.1", known_port, Reach::Any, until).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        drop(network);
        broker.join().unwrap().unwrap();
    }
}
