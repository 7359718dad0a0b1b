//! A socket beside those for clients, served by the worker of the main thread.

use crate::failure::Failure;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, accept_with, recvmsg};
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};
use zebu_storage::{IoBuf, Socket, Worker};

/// Connections at once. Beyond that, the one that has been waited for longest makes room.
const MOST: usize = 16;
/// Descriptors that come with a request at most.
pub(crate) const MOST_DESCRIPTORS: usize = 64;
/// How long to wait when there is nothing to accept with.
const BREATH: Duration = Duration::from_millis(100);

/// The slot of a connection among the others.
pub(crate) struct ConnectionSlot(Cell<Option<Instant>>);

impl ConnectionSlot {
    fn new() -> Rc<Self> {
        Rc::new(Self(Cell::new(Some(Instant::now()))))
    }

    /// The server works on what was asked: the connection keeps its slot.
    pub(crate) fn works(&self) {
        self.0.set(None);
    }

    /// The other side has to send or to receive something.
    pub(crate) fn waits(&self) {
        self.0.set(Some(Instant::now()));
    }

    /// Since when the other side is waited for.
    fn waits_since(&self) -> Option<Instant> {
        self.0.get()
    }
}

/// A connection under way.
struct Client<F> {
    slot: Rc<ConnectionSlot>,
    conversation: Pin<Box<F>>,
}

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
        serve: impl Fn(Socket, Rc<ConnectionSlot>) -> F,
    ) -> Result<(), Failure> {
        let mut clients: Vec<Client<F>> = Vec::new();
        loop {
            let may_accept = has_room(&clients);
            let mut ready = pin!(async {
                if may_accept { worker.readable(&self.0).await } else { std::future::pending().await }
            });
            let came = poll_fn(|cx| {
                clients.retain_mut(|client| client.conversation.as_mut().poll(cx).is_pending());
                if !may_accept && has_room(&clients) {
                    return Poll::Ready(None);
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
            if !has_room(&clients) {
                // Those that were waited for have sent something meanwhile.
                continue;
            }
            match accept_with(&self.0, SocketFlags::CLOEXEC) {
                Ok(fd) => {
                    if let Ok(socket) = Socket::new(fd) {
                        make_room(&mut clients);
                        let slot = ConnectionSlot::new();
                        let conversation = Box::pin(serve(socket, Rc::clone(&slot)));
                        clients.push(Client { slot, conversation });
                    }
                }
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => worker.sleep(BREATH).await,
            }
        }
    }
}

/// Whether there is a slot for one more, if need be that of one that is waited for.
fn has_room<F>(clients: &[Client<F>]) -> bool {
    clients.len() < MOST || clients.iter().any(|client| client.slot.waits_since().is_some())
}

/// Closes the connection that has been waited for longest, if there is no other slot.
fn make_room<F>(clients: &mut Vec<Client<F>>) {
    if clients.len() < MOST {
        return;
    }
    let waiting =
        clients.iter().enumerate().filter_map(|(at, client)| Some((client.slot.waits_since()?, at)));
    if let Some((_, at)) = waiting.min() {
        clients.remove(at);
    }
}

/// Bytes of a connection up to a mark, and what came after it.
pub(crate) struct Reader {
    received: Vec<u8>,
    most: usize,
    descriptors: Descriptors,
}

/// The treatment of descriptors that come with the bytes.
enum Descriptors {
    /// The kernel drops them.
    Refused,
    /// They are kept until they are taken: the last ones, if there are too many.
    Taken(Vec<OwnedFd>),
}

impl Reader {
    /// Nothing is longer than `most` bytes.
    pub(crate) fn new(most: usize) -> Self {
        Self { received: Vec::new(), most, descriptors: Descriptors::Refused }
    }

    /// The same for a Unix socket, over which descriptors may come with the bytes.
    pub(crate) fn with_descriptors(most: usize) -> Self {
        Self { received: Vec::new(), most, descriptors: Descriptors::Taken(Vec::new()) }
    }

    /// The descriptors that came with the bytes up to now, in their order.
    pub(crate) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        match &mut self.descriptors {
            Descriptors::Refused => Vec::new(),
            Descriptors::Taken(descriptors) => std::mem::take(descriptors),
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
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let received = match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
                Ok(received) => received.bytes,
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    kept.extend(descriptors);
                    kept.drain(..kept.len().saturating_sub(MOST_DESCRIPTORS));
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
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
    use zebu_engine::storage::WorkerConfig;

    /// A switch that clients throw, and those who wait for it.
    #[derive(Default)]
    struct Switch {
        is_thrown: AtomicBool,
        waiting: AtomicUsize,
    }

    /// Gives a line back; `wait` is answered when the switch is thrown.
    async fn echo(worker: &Worker, socket: Socket, slot: Rc<ConnectionSlot>, switch: &Switch) {
        let mut reader = Reader::new(100);
        let Ok(Some(line)) = reader.until(worker, &socket, b"\n").await else { return };
        slot.works();
        if line == b"wait" {
            switch.waiting.fetch_add(1, SeqCst);
            while !switch.is_thrown.load(SeqCst) {
                worker.sleep(Duration::from_millis(5)).await;
            }
        }
        send(worker, &socket, &line).await.unwrap();
    }

    fn ask(path: &Path, line: &str) -> String {
        let mut client = UnixStream::connect(path).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Serves the door until the thread has ended. The thread may throw the switch.
    fn serve_until<T: Send + 'static>(path: &Path, clients: impl FnOnce(&Switch) -> T + Send + 'static) -> T {
        let door = Door::new(UnixListener::bind(path).unwrap()).unwrap();
        let switch = Arc::new(Switch::default());
        let theirs = Arc::clone(&switch);
        let thread = std::thread::spawn(move || clients(&theirs));
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        worker.block_on(async {
            let mut doors = pin!(door.serve(&worker, |socket, slot| echo(&worker, socket, slot, &switch)));
            let mut over = pin!(async {
                while !thread.is_finished() {
                    worker.sleep(Duration::from_millis(5)).await;
                }
            });
            poll_fn(|cx| match doors.as_mut().poll(cx) {
                Poll::Ready(_) => panic!("the door is closed"),
                Poll::Pending => over.as_mut().poll(cx),
            })
            .await;
        });
        thread.join().unwrap()
    }

    #[test]
    fn connections_that_say_nothing_make_room_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let at = path.clone();
        serve_until(&path, move |_| {
            let mut silent: Vec<_> = (0..3 * MOST).map(|_| UnixStream::connect(&at).unwrap()).collect();
            // Half a line is none.
            silent[2 * MOST + 1].write_all(b"half").unwrap();
            for _ in 0..MOST {
                assert_eq!(ask(&at, "a line\n"), "a line");
            }
        });
    }

    #[test]
    fn connections_that_are_worked_for_keep_their_places() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let at = path.clone();
        serve_until(&path, move |switch| {
            let busy: Vec<_> = (0..MOST)
                .map(|_| {
                    let at = at.clone();
                    std::thread::spawn(move || ask(&at, "wait\n"))
                })
                .collect();
            // One that has said nothing yet makes room.
            while switch.waiting.load(SeqCst) < MOST {
                std::thread::sleep(Duration::from_millis(1));
            }
            let others = std::thread::spawn(move || ask(&at, "a line\n"));
            std::thread::sleep(Duration::from_millis(100));
            switch.is_thrown.store(true, SeqCst);
            assert!(busy.into_iter().all(|thread| thread.join().unwrap() == "wait"));
            assert_eq!(others.join().unwrap(), "a line");
        });
    }
}
