//! A socket beside those for clients, served by the worker of the main thread.

use crate::failure::Failure;
use futures_util::stream::{FuturesUnordered, Stream};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;
use zebu::storage::{IoBuf, Socket, Worker};

/// Connections at once; others wait.
const MOST: usize = 16;
/// How long to wait when there is nothing to accept with.
const BREATH: Duration = Duration::from_millis(100);

/// A listening socket.
pub(crate) struct Door(Socket);

impl Door {
    pub(crate) fn new(listener: impl Into<OwnedFd>) -> Result<Self, Failure> {
        let fail = |error: io::Error| Failure::new(format!("could not listen: {error}"));
        Socket::new(listener).map(Self).map_err(fail)
    }

    /// Accepts connections and runs `serve` for each. Ends only with an error.
    pub(crate) async fn serve<F: Future<Output = ()>>(
        &self,
        worker: &Worker,
        serve: impl Fn(Socket) -> F,
    ) -> Result<(), Failure> {
        let mut clients = FuturesUnordered::new();
        loop {
            let has_room = clients.len() < MOST;
            let mut ready = pin!(async {
                if has_room { worker.readable(&self.0).await } else { std::future::pending().await }
            });
            let came = poll_fn(|cx| {
                while let Poll::Ready(Some(())) = Pin::new(&mut clients).poll_next(cx) {
                    if clients.len() + 1 == MOST {
                        // There is room again.
                        return Poll::Ready(None);
                    }
                }
                ready.as_mut().poll(cx).map(Some)
            })
            .await;
            match came {
                None => continue,
                Some(Err(error)) => {
                    return Err(Failure::new(format!("could not wait for connections: {error}")));
                }
                Some(Ok(())) => {}
            }
            match accept_with(&self.0, SocketFlags::CLOEXEC) {
                Ok(fd) => {
                    if let Ok(socket) = Socket::new(fd) {
                        clients.push(serve(socket));
                    }
                }
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => worker.sleep(BREATH).await,
            }
        }
    }
}

/// Bytes of a connection up to a mark, and what came after it.
pub(crate) struct Reader {
    received: Vec<u8>,
    most: usize,
}

impl Reader {
    /// Nothing is longer than `most` bytes.
    pub(crate) fn new(most: usize) -> Self {
        Self { received: Vec::new(), most }
    }

    /// The next bytes up to `mark`, without it; `None` at the end.
    pub(crate) async fn until(
        &mut self,
        worker: &Worker,
        socket: &Socket,
        mark: &[u8],
    ) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.received.windows(mark.len()).position(|window| window == mark) {
                let rest = self.received.split_off(at + mark.len());
                let mut found = std::mem::replace(&mut self.received, rest);
                found.truncate(at);
                return Ok(Some(found));
            }
            if self.received.len() > self.most {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "too long"));
            }
            let (count, bufs) = worker.receive(socket, IoBuf::zeroed(4096).into()).await;
            let count = count?;
            if count == 0 {
                return Ok(None);
            }
            let start = self.received.len();
            self.received.resize(start + count, 0);
            bufs.copy_to(0, &mut self.received[start..]);
        }
    }
}

/// Sends bytes.
pub(crate) async fn send(worker: &Worker, socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    worker.send(socket, IoBuf::copy_of(bytes).into()).await.0
}
