//! Standard output as a file that is written once, from its first byte to its last.
//!
//! Writes come in any order, and are answered when they have gone out: a writer with only some under way needs no more memory than
//! for those.

use crate::failure::Failure;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::{Errno, writev};
use std::collections::BTreeMap;
use std::io::{IoSlice, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use zebu_engine::jobs::Cancel;
use zebu_engine::storage::{
    Access, Completer, File, OpenFlags, Storage, StorageAbilities, StorageDone, StorageOp,
};
use zebu_storage::sync::{Condvar, Mutex};

/// Name in messages.
const NAME: &str = "standard output";
/// How often is looked whether the job was cancelled, where nobody reads.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Zeroes that are written at once.
const ZEROES: &[u8] = &[0; 64 << 10];

#[derive(Default)]
struct State {
    /// Operations by offset, none of them before `at`.
    waiting: BTreeMap<u64, (StorageOp, Completer)>,
    /// Bytes that have gone out.
    at: u64,
    /// Why nothing more goes out.
    failure: Option<Errno>,
    is_over: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    cancel: Cancel,
    len: Option<u64>,
}

/// Standard output, as long as a command writes to it.
pub(crate) struct OutputPipe {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

impl OutputPipe {
    /// Begins. `len`: bytes that will be written, if that is known. When `cancel` is thrown, nothing more goes out.
    ///
    /// # Errors
    /// Standard output is a terminal, or closed.
    pub(crate) fn begin(len: Option<u64>, cancel: Cancel) -> Result<Self, Failure> {
        let out = descriptor()?;
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), cancel, len });
        let of_writer = Arc::clone(&shared);
        let writer = std::thread::Builder::new().spawn(move || write_all(&of_writer, &out));
        let writer = writer.map_err(|error| Failure::new(format!("could not write to {NAME}: {error}")))?;
        Ok(Self { shared, writer: Some(writer) })
    }

    /// The file that the bytes are written to.
    pub(crate) fn file(&self) -> Result<File, Failure> {
        let flags = OpenFlags::default().access(Access::ReadWrite);
        File::from_storage(Arc::new(Output(Arc::clone(&self.shared))), NAME, &flags)
            .map_err(|error| Failure::new(format!("could not write to {NAME}: {error}")))
    }

    /// Why nothing more goes out, if so.
    pub(crate) fn failure(&self) -> Option<Failure> {
        let errno = self.shared.state.lock().failure?;
        Some(Failure::new(format!("could not write to {NAME}: {errno}")))
    }
}

impl Drop for OutputPipe {
    fn drop(&mut self) {
        self.shared.state.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

/// Standard output; of a pipe, one of our own, that no write waits in.
fn descriptor() -> Result<OwnedFd, Failure> {
    let out = std::io::stdout();
    if out.is_terminal() {
        return Err(Failure::usage(format!(
            "{NAME} is a terminal: redirect it to a pipe or a file (> FILE)"
        )));
    }
    let fail = |errno: Errno| Failure::new(format!("could not write to {NAME}: {errno}"));
    let own = rustix::io::dup(out.as_fd()).map_err(fail)?;
    let kind = FileType::from_raw_mode(fstat(&own).map_err(fail)?.st_mode);
    if kind != FileType::Fifo {
        return Ok(own);
    }
    // Its flags are of this opening alone. Without /proc, a write waits.
    let opened = open("/proc/self/fd/1", OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    Ok(opened.unwrap_or(own))
}

/// Does operations in the order of their offsets, until there are no more.
fn write_all(shared: &Shared, out: &OwnedFd) {
    let mut state = shared.state.lock();
    loop {
        let at = state.at;
        if let Some(errno) = state.failure {
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            for (_, done) in waiting.into_values() {
                done.finish(Err(errno.raw_os_error()));
            }
            state = shared.state.lock();
        } else if let Some((op, done)) = state.waiting.remove(&at) {
            drop(state);
            let written = write_one(shared, out, op, &done);
            state = shared.state.lock();
            let answer = match (written, op) {
                (Ok(len), StorageOp::Write { .. }) => {
                    state.at = at + len;
                    Ok(StorageDone::Moved(len))
                }
                (Ok(len), _) => {
                    state.at = at + len;
                    Ok(StorageDone::Done)
                }
                (Err(errno), _) => {
                    state.failure = Some(errno);
                    Err(errno.raw_os_error())
                }
            };
            drop(state);
            done.finish(answer);
            state = shared.state.lock();
            continue;
        }
        if state.is_over {
            return;
        }
        if state.failure.is_none() || state.waiting.is_empty() {
            state = shared.changed.wait(state);
        }
    }
}

/// The bytes that were written.
fn write_one(shared: &Shared, out: &OwnedFd, op: StorageOp, done: &Completer) -> Result<u64, Errno> {
    match op {
        StorageOp::Write { len, .. } => {
            let parts: Vec<IoSlice<'_>> =
                done.bufs().parts().iter().map(|part| IoSlice::new(part.as_slice())).collect();
            write_parts(shared, out, parts)?;
            Ok(len)
        }
        StorageOp::ZeroRange { len, .. } | StorageOp::Punch { len, .. } => {
            let mut left = len;
            while left > 0 {
                let now = left.min(ZEROES.len() as u64);
                write_parts(shared, out, vec![IoSlice::new(&ZEROES[..now as usize])])?;
                left -= now;
            }
            Ok(len)
        }
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// Parts that the system takes at once.
const MOST_PARTS: usize = 1024;

fn write_parts(shared: &Shared, out: &OwnedFd, mut parts: Vec<IoSlice<'_>>) -> Result<(), Errno> {
    let mut left = &mut parts[..];
    while left.iter().any(|part| !part.is_empty()) {
        if shared.cancel.is_cancelled() {
            return Err(Errno::CANCELED);
        }
        match writev(out, &left[..left.len().min(MOST_PARTS)]) {
            Ok(0) => return Err(Errno::IO),
            Ok(len) => IoSlice::advance_slices(&mut left, len),
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(out, PollFlags::OUT)], Some(&LOOK)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            },
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Standard output as the engine sees it.
struct Output(Arc<Shared>);

impl Storage for Output {
    fn len(&self) -> u64 {
        self.0.len.unwrap_or(0)
    }

    fn identity(&self) -> u64 {
        Arc::as_ptr(&self.0) as u64
    }

    fn abilities(&self) -> StorageAbilities {
        let all = StorageAbilities::WRITE | StorageAbilities::ZERO_RANGE | StorageAbilities::PUNCH;
        if self.0.len.is_some() { all } else { all | StorageAbilities::SET_LEN }
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let (StorageOp::Write { offset, len }
        | StorageOp::ZeroRange { offset, len }
        | StorageOp::Punch { offset, len }) = op
        else {
            let answer = match op {
                // What is durable is up to whoever reads, and how long it is, too.
                StorageOp::Flush | StorageOp::SetLen { .. } => Ok(StorageDone::Done),
                _ => Err(Errno::OPNOTSUPP.raw_os_error()),
            };
            return done.finish(answer);
        };
        let mut state = self.0.state.lock();
        let refusal = match state.failure {
            Some(errno) => Some(errno),
            // What has gone out can't be changed.
            None if offset < state.at || state.waiting.contains_key(&offset) => Some(Errno::SPIPE),
            None => None,
        };
        if len == 0 || refusal.is_some() {
            drop(state);
            let nothing =
                if matches!(op, StorageOp::Write { .. }) { StorageDone::Moved(0) } else { StorageDone::Done };
            return done.finish(refusal.map_or(Ok(nothing), |errno| Err(errno.raw_os_error())));
        }
        state.waiting.insert(offset, (op, done));
        drop(state);
        self.0.changed.notify_all();
    }
}
