//! A request of the disk's user, and the part of it that a connection is asked for.

use super::coverage::Coverage;
use super::protocol::{command, command_flag};
use crate::network::deadline::Allowance;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::sync::Mutex;
use zebu_storage::{Completer, StorageDone, StorageOp};

/// A run of one state, as a block status lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatusRun {
    /// Bytes.
    pub len: u64,
    /// State, whose meaning is the context's.
    pub flags: u64,
}

/// Time without a sign of the server that requests have at the end.
const GRACE: Duration = Duration::from_secs(5);

/// A callback for runs.
pub(super) type RunsWanted = Box<dyn FnOnce(Result<Vec<StatusRun>, i32>) + Send>;

/// A flush that several connections do.
pub(super) struct SharedFlush(Mutex<Flushing>);

struct Flushing {
    /// Connections that have not answered.
    left: usize,
    /// `None` once answered.
    done: Option<Completer>,
}

impl SharedFlush {
    /// A flush that is over when so many connections have answered, or one has failed.
    pub(super) fn new(connections: usize, done: Completer) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Flushing { left: connections, done: Some(done) })))
    }

    fn end(&self, result: Result<(), i32>) {
        let mut flushing = self.0.lock();
        flushing.left = flushing.left.saturating_sub(1);
        let done = if result.is_err() || flushing.left == 0 { flushing.done.take() } else { None };
        drop(flushing);
        if let Some(done) = done {
            done.finish(result.map(|()| StorageDone::Done));
        }
    }
}

/// The way to give the answer.
pub(super) enum Answer {
    Storage(Completer),
    Flush(Arc<SharedFlush>),
    /// `None` once answered.
    Runs(Option<RunsWanted>),
}

/// A request that has no answer yet.
pub(super) struct Request {
    pub(super) command: u16,
    pub(super) flags: u16,
    /// Bytes of the disk.
    pub(super) range: Range<u64>,
    /// The metadata context of a block status.
    pub(super) context: u32,
    /// When it is over, the answer is EIO.
    pub(super) allowance: Allowance,
    answer: Answer,
    /// Bytes from the beginning that are over.
    done: u64,
    /// The part that the connection was asked for.
    pub(super) part: Range<u64>,
    pub(super) covered: Coverage,
    pub(super) runs: Vec<StatusRun>,
    /// The NBD error of the part, or 0.
    pub(super) error: u32,
    /// Of a flush: the changes of its connection that it covers, by their number.
    pub(super) covers: u64,
    /// Whether all of it was sent.
    pub(super) is_sent: bool,
    /// Bytes of its connection by which the part is answered, if the server has not forgotten it.
    pub(super) due: u64,
}

/// The step after the end of a part.
pub(super) enum Next {
    /// The request is answered.
    Over,
    /// Another part is to be asked for.
    Again(Box<Request>),
}

impl Request {
    pub(super) fn new(
        command: u16,
        flags: u16,
        range: Range<u64>,
        allowance: Allowance,
        answer: Answer,
    ) -> Self {
        Self {
            command,
            flags,
            context: 0,
            allowance,
            answer,
            done: 0,
            part: range.start..range.start,
            range,
            covered: Coverage::default(),
            runs: Vec::new(),
            error: 0,
            covers: 0,
            is_sent: false,
            due: u64::MAX,
        }
    }

    /// Sets about the next part, of `most` bytes at most.
    pub(super) fn begin_part(&mut self, most: u64) {
        let start = self.range.start + self.done;
        self.part = start..self.range.end.min(start.saturating_add(most));
        self.covered.clear();
        self.runs.clear();
        self.error = 0;
        self.is_sent = false;
    }

    /// How long it still waits without a sign of the server when the disk's user wants to end.
    pub(super) fn grace(&self) -> Duration {
        if self.command == command::FLUSH { 3 * GRACE } else { GRACE }
    }

    /// The time when it is over, if its connection has moved so many bytes, the last of them at `progress`.
    pub(super) fn until(&self, moved: u64, progress: Instant) -> Instant {
        if moved > self.due { self.allowance.deadline() } else { self.allowance.until(progress) }
    }

    /// Whether it changes the disk.
    pub(super) fn is_change(&self) -> bool {
        matches!(self.command, command::WRITE | command::WRITE_ZEROES)
    }

    /// Whether it changes the disk though nobody waits for its answer: it was sent whole.
    pub(super) fn may_change_later(&self) -> bool {
        self.is_change() && self.is_sent
    }

    /// Whether a change is durable when it is answered.
    pub(super) fn is_durable(&self) -> bool {
        self.flags & command_flag::FUA != 0
    }

    /// Bytes of payload of the part.
    pub(super) fn payload_len(&self) -> usize {
        if self.command == command::WRITE { (self.part.end - self.part.start) as usize } else { 0 }
    }

    /// Calls `with` with the pieces of the part's payload from `from` on, in order.
    pub(super) fn payload<'a>(&'a self, from: usize, mut with: impl FnMut(&'a [u8])) {
        let Answer::Storage(done) = &self.answer else { return };
        let mut skip = self.done as usize + from;
        let mut left = self.payload_len().saturating_sub(from);
        for buf in done.bufs().parts() {
            let bytes = buf.as_slice();
            let start = skip.min(bytes.len());
            skip -= start;
            let piece = &bytes[start..bytes.len().min(start.saturating_add(left))];
            left -= piece.len();
            if !piece.is_empty() {
                with(piece);
            }
            if left == 0 {
                break;
            }
        }
    }

    /// The memory for what a read receives at `offset` of the disk: at most `most` bytes in one piece. The range must lie
    /// in the part.
    pub(super) fn memory_at(&mut self, offset: u64, most: u64) -> &mut [u8] {
        let Answer::Storage(done) = &mut self.answer else { return &mut [] };
        let mut skip = (offset - self.range.start) as usize;
        for buf in done.bufs_mut().parts_mut() {
            if skip < buf.len() {
                let end = buf.len().min(skip.saturating_add(most as usize));
                return &mut buf.as_mut_slice()[skip..end];
            }
            skip -= buf.len();
        }
        &mut []
    }

    /// Sets a part of a read to zero.
    pub(super) fn zero(&mut self, offset: u64, len: u64) {
        let at = (offset - self.range.start) as usize;
        if let Answer::Storage(done) = &mut self.answer {
            done.bufs_mut().fill(at, len as usize, 0);
        }
    }

    /// The part is over: answers the request, or says what is left of it.
    pub(super) fn end_part(mut self) -> Next {
        if self.error != 0 {
            let errno = errno_of(self.error);
            self.fail(errno);
            return Next::Over;
        }
        if self.command == command::READ && !self.covered.is(&self.part) {
            self.fail(libc::EIO);
            return Next::Over;
        }
        self.done += self.part.end - self.part.start;
        let total = self.range.end - self.range.start;
        if self.done < total && self.command != command::BLOCK_STATUS {
            return Next::Again(Box::new(self));
        }
        self.succeed();
        Next::Over
    }

    fn succeed(mut self) {
        let runs = std::mem::take(&mut self.runs);
        match self.answer {
            Answer::Runs(wanted) => {
                if let Some(wanted) = wanted {
                    wanted(if runs.is_empty() { Err(libc::EIO) } else { Ok(runs) });
                }
            }
            Answer::Storage(done) => {
                let result = match done.op() {
                    StorageOp::Read { len, .. } | StorageOp::Write { len, .. } => StorageDone::Moved(len),
                    _ => StorageDone::Done,
                };
                done.finish(Ok(result));
            }
            Answer::Flush(shared) => shared.end(Ok(())),
        }
    }

    /// Answers with an errno.
    pub(super) fn fail(self, errno: i32) {
        match self.answer {
            Answer::Storage(done) => done.finish(Err(errno)),
            Answer::Flush(shared) => shared.end(Err(errno)),
            Answer::Runs(wanted) => {
                if let Some(wanted) = wanted {
                    wanted(Err(errno));
                }
            }
        }
    }
}

/// The errno for an error number of the protocol.
fn errno_of(error: u32) -> i32 {
    match error {
        1 => libc::EPERM,
        12 => libc::ENOMEM,
        22 => libc::EINVAL,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        // As a server should take what it does not know.
        _ => libc::EIO,
    }
}
