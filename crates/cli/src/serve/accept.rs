//! A socket beside those for clients, served by the worker of the main thread.

use crate::failure::Failure;
use futures_util::stream::{FuturesUnordered, Stream};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, accept_with, recvmsg};
use std::future::{Future, poll_fn};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
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
    descriptors: Descriptors,
}

/// What becomes of descriptors that come with the bytes.
enum Descriptors {
    /// The kernel drops them.
    Refused,
    /// The last one is kept until it is taken.
    Taken(Option<OwnedFd>),
}

impl Reader {
    /// Nothing is longer than `most` bytes.
    pub(crate) fn new(most: usize) -> Self {
        Self { received: Vec::new(), most, descriptors: Descriptors::Refused }
    }

    /// The same for a Unix socket, over which a descriptor may come with the bytes.
    pub(crate) fn with_descriptors(most: usize) -> Self {
        Self { received: Vec::new(), most, descriptors: Descriptors::Taken(None) }
    }

    /// The descriptor that came with the bytes up to now, if one did.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        match &mut self.descriptors {
            Descriptors::Refused => None,
            Descriptors::Taken(descriptor) => descriptor.take(),
        }
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
            if self.receive(worker, socket).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// Receives some bytes; 0 at the end.
    async fn receive(&mut self, worker: &Worker, socket: &Socket) -> io::Result<usize> {
        const AT_ONCE: usize = 4096;
        let start = self.received.len();
        let Descriptors::Taken(kept) = &mut self.descriptors else {
            let (count, bufs) = worker.receive(socket, IoBuf::zeroed(AT_ONCE).into()).await;
            let count = count?;
            self.received.resize(start + count, 0);
            bufs.copy_to(0, &mut self.received[start..]);
            return Ok(count);
        };
        loop {
            worker.readable(socket).await?;
            let mut bytes = [0; AT_ONCE];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let received = match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
                Ok(received) => received.bytes,
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    *kept = descriptors.last().or(kept.take());
                }
            }
            self.received.extend_from_slice(&bytes[..received]);
            return Ok(received);
        }
    }
}

/// The value of `work`, or an error if there is none after `limit`.
pub(crate) async fn within<T>(
    worker: &Worker,
    limit: Duration,
    work: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let (mut work, mut over) = (pin!(work), pin!(worker.sleep(limit)));
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(result) => Poll::Ready(result),
        Poll::Pending => over.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into())),
    })
    .await
}

/// Sends bytes.
pub(crate) async fn send(worker: &Worker, socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    worker.send(socket, IoBuf::copy_of(bytes).into()).await.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use zebu::storage::WorkerConfig;

    /// Gives a line back, if one comes in time.
    async fn echo(worker: &Worker, socket: Socket) {
        let mut reader = Reader::new(100);
        let line = reader.until(worker, &socket, b"\n");
        if let Ok(Some(line)) = within(worker, Duration::from_millis(100), line).await {
            send(worker, &socket, &line).await.unwrap();
        }
    }

    #[test]
    fn connections_that_say_nothing_make_room_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let door = Door::new(UnixListener::bind(&path).unwrap()).unwrap();
        let mut silent: Vec<_> = (0..MOST).map(|_| UnixStream::connect(&path).unwrap()).collect();
        // Half a line is none.
        silent[0].write_all(b"half").unwrap();
        let client = std::thread::spawn(move || {
            let mut client = UnixStream::connect(&path).unwrap();
            client.write_all(b"a line\n").unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).map(|_| answer)
        });
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        worker.block_on(async {
            let mut doors = pin!(door.serve(&worker, |socket| echo(&worker, socket)));
            let mut over = pin!(async {
                while !client.is_finished() {
                    worker.sleep(Duration::from_millis(10)).await;
                }
            });
            poll_fn(|cx| match doors.as_mut().poll(cx) {
                Poll::Ready(_) => panic!("the door is closed"),
                Poll::Pending => over.as_mut().poll(cx),
            })
            .await;
        });
        assert_eq!(client.join().unwrap().unwrap(), "a line");
        drop(silent);
    }
}
