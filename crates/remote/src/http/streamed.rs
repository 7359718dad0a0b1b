//! Reading from the beginning to the end, where the server has no ranges: one response, and a window of it in memory.
//!
//! Reads of the beginning, which is kept, and of the window are answered from memory; reads beyond have the stream go on.
//! Reads before the window fail. When the connection breaks, all of it is asked for again, if the server marks versions, as long
//! as what comes again is in proportion to the object.

use super::cache::BLOCK;
use super::connection::{Connection, INPUT, Patience};
use super::source::{Reply, Source, Trouble};
use crate::network::deadline::{Allowance, BYTES_A_SECOND};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::sync::{Condvar, Mutex};
use zebu_storage::{Completer, StorageDone, StorageOp};

/// Bytes of the beginning that are kept.
const HEAD: u64 = 1 << 20;
/// Bytes that may come again: so often what came, and so many more.
const MOST_AGAIN: (u64, u64) = (2, 16 << 20);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_SILENCE: Duration = Duration::from_secs(10);

/// An object that is read in order.
pub(super) struct Streamed {
    pub(super) source: Source,
    state: Mutex<State>,
    more: Condvar,
}

/// A read that waits.
struct Waiting {
    done: Completer,
    /// When it fails if no bytes come, and even if they do.
    deadline: Instant,
    limit: Instant,
    /// Of what is missing.
    _allowance: Allowance,
}

#[derive(Default)]
struct State {
    /// Reads by their offset, and by when they came.
    waiting: BTreeMap<(u64, u64), Waiting>,
    count: u64,
    /// Bytes of the object that have come.
    position: u64,
    is_closed: bool,
}

impl Streamed {
    /// The object of `source`, which is pinned; its response is about to come over `connection`.
    ///
    /// # Errors
    /// No thread could be made.
    pub(super) fn start(source: Source, connection: Connection) -> std::io::Result<Arc<Self>> {
        let streamed = Arc::new(Self { source, state: Mutex::default(), more: Condvar::new() });
        let shared = Arc::clone(&streamed);
        let window = shared.source.options.memory.saturating_sub(HEAD + INPUT as u64).max(BLOCK);
        let stream = Stream {
            connection: Some(connection),
            position: 0,
            again: 0,
            head: Vec::new(),
            window: VecDeque::new(),
            most: window,
        };
        std::thread::Builder::new().name("zebu-http".to_owned()).spawn(move || shared.run(stream))?;
        Ok(streamed)
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.more.notify_all();
        drop(waiting);
    }

    /// Reads a range within the object, not empty.
    pub(super) fn read(&self, range: &Range<u64>, done: Completer) {
        let mut state = self.state.lock();
        if state.is_closed {
            return;
        }
        state.count += 1;
        let key = (range.start, state.count);
        // The bytes between the stream's place and this one come first, those of reads that wait already among them.
        let missing = range.end.saturating_sub(state.position);
        let deadline = Instant::now() + self.source.options.timeout;
        let limit = deadline + Duration::from_secs(missing / BYTES_A_SECOND + 1);
        let allowance = self.source.allowance(Instant::now(), missing);
        state.waiting.insert(key, Waiting { done, deadline, limit, _allowance: allowance });
        drop(state);
        self.more.notify_all();
    }

    /// The read with the lowest offset; `None` if the disk is closed.
    fn next(&self) -> Option<Waiting> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some((_, read)) = state.waiting.pop_first() {
                return Some(read);
            }
            state = self.more.wait(state);
        }
    }

    fn run(&self, mut stream: Stream) {
        while let Some(Waiting { mut done, deadline, limit, _allowance }) = self.next() {
            let StorageOp::Read { offset, len } = done.op() else { continue };
            let result = self.go_to(&mut stream, offset + len, (deadline, limit), &done);
            match result {
                Ok(()) if stream.copy(offset, len, &mut done) => done.finish(Ok(StorageDone::Moved(len))),
                Ok(()) => {
                    self.source.note_given_up(
                        "the server has no ranges, and what was read is gone: download the object first",
                    );
                    done.finish(Err(libc::EIO));
                }
                Err(reason) => {
                    self.source.note_given_up(&reason);
                    done.finish(Err(libc::EIO));
                }
            }
        }
    }

    /// Receives up to `end`. As long as bytes come at a fair pace, it goes on.
    fn go_to(
        &self,
        stream: &mut Stream,
        end: u64,
        (deadline, limit): (Instant, Instant),
        done: &Completer,
    ) -> Result<(), String> {
        let mut pause = FIRST_PAUSE;
        let is_over =
            || done.is_cancelled() || self.state.lock().is_closed || self.source.is_late(deadline, limit);
        let silence = (self.source.options.timeout / 4).min(LONGEST_SILENCE);
        let patience = Patience { until: limit, silence, is_cancelled: &is_over };
        while stream.position < end {
            let trouble = match self.receive(stream, end, &patience) {
                Ok(()) => return Ok(()),
                Err(trouble) => trouble,
            };
            if matches!(trouble, Trouble::Cancelled) && self.source.is_late(deadline, limit) {
                stream.connection = None;
                let reason = self.source.last_failure();
                return Err(reason.unwrap_or_else(|| "the server does not answer in time".to_owned()));
            }
            self.source.note_failure(trouble.reason());
            stream.connection = None;
            let is_hopeless = matches!(
                trouble,
                Trouble::Changed(_) | Trouble::Cancelled | Trouble::Refused { .. } | Trouble::Unsafe(_)
            );
            if is_hopeless || self.source.is_late(deadline, limit) {
                return Err(trouble.reason().to_owned());
            }
            if !self.source.has_validators() {
                return Err(format!(
                    "{} (and nothing tells whether it would be the same object again)",
                    trouble.reason()
                ));
            }
            self.source.stats.count_retries(1);
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Ok(())
    }

    fn receive(&self, stream: &mut Stream, end: u64, patience: &Patience<'_>) -> Result<(), Trouble> {
        let mut skip = 0;
        if stream.connection.is_none() {
            stream.check_again()?;
            let (_, connection, reply, _) = self.source.find(None, patience)?;
            if !matches!(reply, Reply::Whole { .. }) {
                return Err(Trouble::Passing {
                    reason: "the server sends a part that nobody asked for".to_owned(),
                    pause: None,
                });
            }
            stream.connection = Some(connection);
            skip = stream.position;
        }
        let mut piece = vec![0; INPUT];
        while stream.position < end {
            let Some(connection) = &mut stream.connection else { break };
            let left = self.source.len() - stream.position + skip;
            let most = (piece.len() as u64).min(if skip > 0 { skip } else { left }) as usize;
            let read = connection.read(&mut piece[..most], patience)?;
            if read == 0 {
                return Err(Trouble::Passing {
                    reason: "the body of a response is too short".to_owned(),
                    pause: None,
                });
            }
            self.source.count_read(read as u64);
            if skip > 0 {
                skip -= read as u64;
                stream.again += read as u64;
                stream.check_again()?;
            } else {
                stream.push(&piece[..read]);
                self.state.lock().position = stream.position;
            }
        }
        Ok(())
    }
}

/// The bytes that have come.
struct Stream {
    connection: Option<Connection>,
    /// Bytes of the object so far.
    position: u64,
    /// Bytes that came once more.
    again: u64,
    head: Vec<u8>,
    /// The latest of them.
    window: VecDeque<u8>,
    most: u64,
}

impl Stream {
    /// Gives up a server whose answers break off again and again.
    fn check_again(&self) -> Result<(), Trouble> {
        let (times, more) = MOST_AGAIN;
        if self.again <= self.position.saturating_mul(times).saturating_add(more) {
            return Ok(());
        }
        let reason = format!(
            "the server breaks its answers off again and again: {} bytes came at most, and {} bytes once more (download the \
             object first)",
            self.position, self.again
        );
        Err(Trouble::Refused { errno: libc::EIO, reason })
    }

    fn push(&mut self, bytes: &[u8]) {
        let room = HEAD.saturating_sub(self.head.len() as u64) as usize;
        self.head.extend_from_slice(&bytes[..bytes.len().min(room)]);
        let over = (self.window.len() + bytes.len()).saturating_sub(self.most as usize);
        self.window.drain(..over.min(self.window.len()));
        // Growing by itself, it would take up to twice its bytes.
        let need = self.window.len() + bytes.len();
        if need > self.window.capacity() {
            let capacity = need.max(2 * self.window.capacity()).min(need.max(self.most as usize));
            self.window.reserve_exact(capacity - self.window.len());
        }
        self.window.extend(bytes);
        self.position += bytes.len() as u64;
    }

    /// Copies a range to its reader; false if it is gone.
    fn copy(&self, offset: u64, len: u64, done: &mut Completer) -> bool {
        let end = offset + len;
        let start = self.position - self.window.len() as u64;
        if offset >= start && end <= self.position {
            let (from, to) = ((offset - start) as usize, (end - start) as usize);
            let (first, second) = self.window.as_slices();
            let mut at = 0;
            for (piece, begin) in [(first, 0), (second, first.len())] {
                let (from, to) =
                    (from.clamp(begin, begin + piece.len()), to.clamp(begin, begin + piece.len()));
                done.bufs_mut().copy_from(at, &piece[from - begin..to - begin]);
                at += to - from;
            }
            return true;
        }
        let Some(bytes) = self.head.get(offset as usize..end as usize) else { return false };
        done.bufs_mut().copy_from(0, bytes);
        true
    }
}
