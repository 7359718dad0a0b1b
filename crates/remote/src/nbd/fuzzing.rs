//! A client whose server says whatever a test or a fuzz target wants.

use super::connection::{Connection, Lost, Terms, Unanswered, Watcher};
use super::protocol::command;
use super::queue::Queue;
use super::request::{Answer, Request, StatusRun};
use super::wire::Style;
use crate::stats::RemoteStats;
use crate::stream::Stream;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use zebu_storage::sync::Mutex;
use zebu_storage::{Completer, IoBuf, StorageOp};

/// Bytes of the read and of the write.
const LEN: u64 = 4096;
/// The form of replies, by number.
const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// The answers to the requests that a client made, as errno values where they failed.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Answers {
    /// To a read of 4096 bytes at offset 4096: the bytes. Its cookie is 1.
    pub read: Option<Result<Vec<u8>, i32>>,
    /// To a write of as many bytes at offset 0. Its cookie is 2.
    pub written: Option<Result<(), i32>>,
    /// To a block status of the first MiB in context 5: lengths and flags. Its cookie is 3.
    pub runs: Option<Result<Vec<StatusRun>, i32>>,
    /// How the connection ended.
    pub end: String,
}

/// An observer that notes nothing.
struct Nobody;

impl Watcher for Nobody {
    fn may_send(&self, _: usize, _: &mut Request) -> bool {
        true
    }
    fn succeeded(&self, _: usize, _: &Request) {}
    fn is_over(&self, _: usize, _: Unanswered) {}
}

/// The answers of a client that made three requests, and whose server sent `bytes` in style number `style` (0: simple, 1:
/// structured, 2: extended) and closed the connection. What has no answer then fails.
///
/// # Panics
/// If the system has no sockets to give, or if a request has no answer in the end.
pub fn answers(style: u8, bytes: &[u8]) -> Answers {
    // What is longer would not fit into the socket.
    let bytes = &bytes[..bytes.len().min(32 << 10)];
    let found = Arc::new(Mutex::new(Answers::default()));
    let put = |set: fn(&mut Answers, Result<Vec<u8>, i32>)| {
        let found = Arc::clone(&found);
        move |bufs: zebu_storage::IoBufs, result: Result<zebu_storage::StorageDone, i32>| {
            let mut bytes = vec![0; bufs.len()];
            bufs.copy_to(0, &mut bytes);
            set(&mut found.lock(), result.map(|_| bytes));
        }
    };
    let queue = Queue::new(1).expect("there is a descriptor");
    let allowance = || queue.allowance(Duration::from_secs(600), LEN);
    let read = StorageOp::Read { offset: LEN, len: LEN };
    let answer = Completer::new(
        read,
        IoBuf::zeroed(LEN as usize).into(),
        put(|found, result| {
            assert!(found.read.replace(result).is_none());
        }),
    );
    queue.push(Request::new(command::READ, 0, LEN..2 * LEN, allowance(), Answer::Storage(answer)));
    let write = StorageOp::Write { offset: 0, len: LEN };
    let answer = Completer::new(
        write,
        IoBuf::zeroed(LEN as usize).into(),
        put(|found, result| {
            assert!(found.written.replace(result.map(drop)).is_none());
        }),
    );
    queue.push(Request::new(command::WRITE, 0, 0..LEN, allowance(), Answer::Storage(answer)));
    let runs = Arc::clone(&found);
    let wanted = Box::new(move |result| {
        let before = runs.lock().runs.replace(result);
        assert!(before.is_none());
    });
    let answer = Answer::Runs(Some(wanted));
    let mut request = Request::new(command::BLOCK_STATUS, 0, 0..1 << 20, allowance(), answer);
    request.context = 5;
    queue.push(request);

    let (mut server, client) = UnixStream::pair().expect("there is a socket");
    server.write_all(bytes).expect("it fits");
    server.shutdown(Shutdown::Write).expect("it is open");
    let terms = Terms { style: STYLES[usize::from(style % 3)], most_payload: 1 << 20, most_range: 1 << 30 };
    let stats = RemoteStats::default();
    let stream = Stream::without_handshake(client).expect("it is open");
    let lost: Lost = Connection::new(0, stream, terms, &queue, &Nobody, &stats).run();
    queue.close();
    let mut found = found.lock().clone();
    assert!(found.read.is_some() && found.written.is_some() && found.runs.is_some(), "{found:?}");
    found.end = lost.to_string();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chunk of a structured reply.
    fn chunk(is_last: bool, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = 0x668e_33ef_u32.to_be_bytes().to_vec();
        bytes.extend(u16::from(is_last).to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend((payload.len() as u32).to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    fn simple(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
        let mut bytes = 0x6744_6698_u32.to_be_bytes().to_vec();
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn data(offset: u64, bytes: &[u8]) -> Vec<u8> {
        [&offset.to_be_bytes()[..], bytes].concat()
    }

    #[test]
    fn honest_replies_in_any_order_and_in_pieces_are_taken() {
        let status = [5u32, 4096, 3, 8192, 0].map(u32::to_be_bytes).concat();
        let hole = [&5120u64.to_be_bytes()[..], &1024u32.to_be_bytes()].concat();
        let bytes = [
            chunk(true, 5, 3, &status),
            chunk(false, 1, 1, &data(6144, &[2; 2048])),
            simple(28, 2, &[]),
            chunk(false, 2, 1, &hole),
            chunk(true, 1, 1, &data(4096, &[1; 1024])),
        ]
        .concat();
        let found = answers(1, &bytes);
        assert_eq!(found.read, Some(Ok([vec![1; 1024], vec![0; 1024], vec![2; 2048]].concat())));
        assert_eq!(found.written, Some(Err(libc::ENOSPC)));
        let runs = vec![StatusRun { len: 4096, flags: 3 }, StatusRun { len: 8192, flags: 0 }];
        assert_eq!(found.runs, Some(Ok(runs)));
        assert_eq!(found.end, "the server closed the connection");
        let found = answers(0, &[simple(0, 2, &[]), simple(0, 1, &[9; 4096])].concat());
        assert_eq!((found.written, found.read), (Some(Ok(())), Some(Ok(vec![9; 4096]))));
    }

    #[test]
    fn a_server_that_lies_is_believed_in_nothing() {
        let none = |cookie| chunk(true, 0, cookie, &[]);
        for (lie, bytes) in [
            ("cookie", none(77)),
            ("answer twice", [none(2), none(2)].concat()),
            ("magic", vec![0; 64]),
            ("more than was asked for", chunk(true, 1, 1, &data(4096, &[1; 4097]))),
            ("before the range", chunk(true, 1, 1, &data(4095, &[1; 4096]))),
            ("behind the range", chunk(true, 1, 1, &data(u64::MAX, &[1; 4096]))),
            ("half a read", chunk(true, 1, 1, &data(4096, &[1; 2048]))),
            ("nothing of a read", none(1)),
            ("a part twice", [1, 1].map(|_| chunk(false, 1, 1, &data(4096, &[1; 100]))).concat()),
            ("data for a write", chunk(true, 1, 2, &data(0, &[1; 100]))),
            ("a simple reply to a read", simple(0, 1, &[1; 4096])),
            ("a status of a read", chunk(true, 5, 1, &[0; 12])),
            ("an empty run", chunk(true, 5, 3, &[5u32, 0, 0].map(u32::to_be_bytes).concat())),
            ("an unknown chunk", chunk(true, 99, 2, &[])),
        ] {
            let found = answers(1, &bytes);
            assert!(found.end.contains("breaks the protocol"), "{lie}: {}", found.end);
            // Requests go back to the queue, and fail when it is closed.
            assert_eq!(found.read, Some(Err(libc::EIO)), "{lie}");
            assert_eq!(found.runs, Some(Err(libc::EIO)), "{lie}");
        }
        // A length that would need 4 GiB is refused before any of it is read.
        let mut huge = chunk(true, 0x8001, 2, &[]);
        huge[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(answers(1, &huge).end.contains("wrong length"));
        // Runs of another context are no answer.
        let other = [6u32, 4096, 3].map(u32::to_be_bytes).concat();
        assert_eq!(answers(1, &chunk(true, 5, 3, &other)).runs, Some(Err(libc::EIO)));
        // A server that is about to end may still do the changes that it was sent before: their answers are waited for.
        let refused = chunk(true, 0x8001, 1, &[0, 0, 0, 108, 0, 0]);
        let found = answers(1, &[refused, simple(0, 2, &[])].concat());
        assert_eq!((found.read, found.written), (Some(Err(libc::EIO)), Some(Ok(()))));
        assert_eq!(found.end, "the server is about to end");
        assert_eq!(answers(1, &simple(108, 2, &[])).end, "the server is about to end");
    }

    /// Looks at the queue when it is told that a connection is over.
    struct Looks<'a> {
        queue: &'a Queue,
        was_empty: Mutex<Option<bool>>,
    }

    impl Watcher for Looks<'_> {
        fn may_send(&self, _: usize, _: &mut Request) -> bool {
            true
        }
        fn succeeded(&self, _: usize, _: &Request) {}
        fn is_over(&self, _: usize, _: Unanswered) {
            let waiting = self.queue.take(0);
            *self.was_empty.lock() = Some(waiting.is_none());
            self.queue.put_back(waiting.into_iter());
        }
    }

    /// Else another connection might have a flush answered before anybody knows what this one has lost.
    #[test]
    fn a_lost_connection_is_told_of_before_its_requests_wait_again() {
        let queue = Queue::new(1).unwrap();
        let write = StorageOp::Write { offset: 0, len: LEN };
        let completer = Completer::new(write, IoBuf::zeroed(LEN as usize).into(), |_, _| {});
        let allowance = || queue.allowance(Duration::from_secs(600), LEN);
        queue.push(Request::new(command::WRITE, 0, 0..LEN, allowance(), Answer::Storage(completer)));
        let (server, client) = UnixStream::pair().unwrap();
        server.shutdown(Shutdown::Write).unwrap();
        let terms = Terms { style: Style::Simple, most_payload: 1 << 20, most_range: 1 << 30 };
        let stats = RemoteStats::default();
        let stream = Stream::without_handshake(client).unwrap();
        let looks = Looks { queue: &queue, was_empty: Mutex::default() };
        Connection::new(0, stream, terms, &queue, &looks, &stats).run();
        assert_eq!(*looks.was_empty.lock(), Some(true));
        assert!(queue.take(0).is_some(), "the write waits again");
        queue.close();
    }
}
