//! Errors, stops and limits on purpose (QEMU's driver `blkdebug`).
//!
//! The image above announces what its requests are for ([`Storage::announce`]): these are *events*, and so are requests
//! that nobody announced. A rule belongs to an event. When it happens, the rule makes an error active, changes the state
//! that other rules ask for, or stops the request until it is resumed. An active error fails requests until other errors
//! become active.

mod config;
mod rules;

pub use config::{BlkdebugConfig, Limits};
pub use rules::{Action, IoTypes, Rule, event};

use crate::call::{answer, call, moved, range, take_bufs};
use rules::Rules;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::ThreadId;
use zebu_storage::sync::Mutex;
use zebu_storage::{
    Alignment, Background, Completer, Engine, FileId, IoBuf, IoBufs, IoError, Storage, StorageAbilities,
    StorageDone, StorageOp,
};

/// The filter. It stands on the disk below it and changes nothing of its bytes.
pub struct Blkdebug {
    below: Arc<dyn Storage>,
    limits: Limits,
    /// Told of every request that is stopped or resumed.
    tell: Box<dyn Fn(&str) + Send + Sync>,
    state: Mutex<State>,
    /// For requests that limits cut into pieces.
    worker: Background,
}

#[derive(Default)]
struct State {
    rules: Rules,
    /// Threads whose next request was announced, with the breakpoint that it hit, if it did.
    announced: HashMap<ThreadId, Option<String>>,
    stopped: Vec<Stopped>,
}

/// A request that waits for [`Blkdebug::resume`].
struct Stopped {
    tag: String,
    op: StorageOp,
    done: Completer,
}

impl Blkdebug {
    /// A filter over `below`. `tell` gets a line for each request that is stopped or resumed.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(
        below: Arc<dyn Storage>,
        config: BlkdebugConfig,
        tell: impl Fn(&str) + Send + Sync + 'static,
        engine: Engine,
    ) -> Result<Self, IoError> {
        let mut state = State { rules: Rules::new(config.rules), ..State::default() };
        state.rules.happen("none");
        Ok(Self {
            below,
            limits: config.limits,
            tell: Box::new(tell),
            state: Mutex::new(state),
            worker: Background::small(engine)?,
        })
    }

    /// Stops the next request of an event, under a name.
    pub fn add_breakpoint(&self, event: &'static str, tag: &str) {
        self.state.lock().rules.add(Rule { event, state: 0, action: Action::Stop { tag: tag.to_owned() } });
    }

    /// Takes the breakpoints of a name away, and resumes what they have stopped. False if there were none.
    pub fn remove_breakpoint(&self, tag: &str) -> bool {
        let removed = self.state.lock().rules.remove_stops(tag);
        let mut found = removed;
        while self.resume(tag) {
            found = true;
        }
        found
    }

    /// Lets one request go on that was stopped under a name. False if there is none.
    pub fn resume(&self, tag: &str) -> bool {
        let mut state = self.state.lock();
        let Some(at) = state.stopped.iter().position(|stopped| stopped.tag == tag) else { return false };
        let stopped = state.stopped.remove(at);
        drop(state);
        (self.tell)(&format!("blkdebug: Resuming request '{tag}'"));
        self.forward(stopped.op, stopped.done);
        true
    }

    /// Whether a request is stopped under a name.
    pub fn is_stopped(&self, tag: &str) -> bool {
        self.state.lock().stopped.iter().any(|stopped| stopped.tag == tag)
    }

    /// Fails the request if an error is active for it, else hands it on, in pieces if limits ask for it.
    fn forward(&self, op: StorageOp, done: Completer) {
        let pieces = self.limits.pieces(op);
        let Some(pieces) = pieces else {
            let failed = self.state.lock().rules.error_for(op);
            return match failed {
                Some(errno) => done.finish(Err(errno)),
                None => self.below.submit(op, done),
            };
        };
        let mut errors = Vec::with_capacity(pieces.len());
        {
            let mut state = self.state.lock();
            for &(offset, len) in &pieces {
                errors.push(state.rules.error_for(of_len(op, offset, len)));
            }
        }
        let below = Arc::clone(&self.below);
        let least = self.limits.opt_write_zero;
        drop(self.worker.run(move |_| in_pieces(below, op, done, pieces, errors, least)));
    }
}

/// The same operation on a piece of its range.
fn of_len(op: StorageOp, offset: u64, len: u64) -> StorageOp {
    match op {
        StorageOp::Read { .. } => StorageOp::Read { offset, len },
        StorageOp::Write { .. } => StorageOp::Write { offset, len },
        StorageOp::Punch { .. } => StorageOp::Punch { offset, len },
        StorageOp::ZeroRange { .. } => StorageOp::ZeroRange { offset, len },
        other => moved(other, offset),
    }
}

/// One piece after the other, until one fails. Zeroing of less than `least` bytes is not worth it: zeroes are written.
async fn in_pieces(
    below: Arc<dyn Storage>,
    op: StorageOp,
    mut done: Completer,
    pieces: Vec<(u64, u64)>,
    errors: Vec<Option<i32>>,
    least: u64,
) {
    let is_transfer = matches!(op, StorageOp::Read { .. } | StorageOp::Write { .. });
    let (mut bufs, mut moved) = (take_bufs(&mut done), IoBufs::new());
    let mut result = Ok(());
    for ((offset, len), error) in pieces.into_iter().zip(errors) {
        let part = if is_transfer { bufs.split_to(len as usize) } else { IoBufs::new() };
        let (part, ended) = match error {
            Some(errno) => (part, Err(errno)),
            None if matches!(op, StorageOp::ZeroRange { .. }) && len < least => {
                let zeroes = IoBuf::zeroed(len as usize).into();
                let (_, written) = call(&*below, StorageOp::Write { offset, len }, zeroes).await;
                (part, written)
            }
            None => call(&*below, of_len(op, offset, len), part).await,
        };
        moved.append(part);
        if let Err(errno) = ended {
            result = Err(errno);
            break;
        }
    }
    moved.append(bufs);
    let len = range(op).map_or(0, |(_, len)| len);
    let success = if is_transfer { StorageDone::Moved(len) } else { StorageDone::Done };
    answer(done, moved, result.map(|()| success));
}

impl Storage for Blkdebug {
    fn len(&self) -> u64 {
        self.below.len()
    }

    fn files(&self) -> Vec<FileId> {
        self.below.files()
    }

    fn identity(&self) -> u64 {
        self.below.identity()
    }

    fn alignment(&self) -> Alignment {
        let mut alignment = self.below.alignment();
        if let Some(align) = self.limits.align {
            alignment.offset = alignment.offset.max(align);
            alignment.length = alignment.length.max(align);
        }
        alignment
    }

    fn abilities(&self) -> StorageAbilities {
        self.below.abilities()
    }

    fn discard_granularity(&self) -> u64 {
        self.below.discard_granularity()
    }

    fn announce(&self, purpose: &'static str) {
        let mut state = self.state.lock();
        let stop = state.rules.happen(purpose);
        // A stop stays until the request comes, whatever is announced in between.
        let announced = state.announced.entry(std::thread::current().id()).or_default();
        if announced.is_none() {
            *announced = stop;
        }
        drop(state);
        self.below.announce(purpose);
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let mut state = self.state.lock();
        let announced = state.announced.remove(&std::thread::current().id());
        let mut stop = announced.clone().flatten();
        let events: &[&'static str] = match op {
            StorageOp::Read { .. } => &["read_aio"],
            StorageOp::Write { .. } => &["write_aio", "pwritev"],
            StorageOp::ZeroRange { .. } | StorageOp::Punch { .. } => &["pwritev_zero"],
            StorageOp::Flush => &["flush_to_os", "flush_to_disk"],
            _ => &[],
        };
        // What was announced stands for the first of them.
        let skipped = usize::from(announced.is_some() && !matches!(op, StorageOp::Flush));
        for event in events.iter().skip(skipped) {
            let hit = state.rules.happen(event);
            stop = stop.or(hit);
        }
        if let Some(tag) = stop {
            let line = format!("blkdebug: Suspended request '{tag}'");
            state.stopped.push(Stopped { tag, op, done });
            drop(state);
            (self.tell)(&line);
            return;
        }
        drop(state);
        self.forward(op, done);
    }

    fn cancel(&self) {
        // Whoever ends does not wait for somebody to resume.
        let stopped = std::mem::take(&mut self.state.lock().stopped);
        for stopped in stopped {
            stopped.done.finish(Err(libc::ECANCELED));
        }
        self.below.cancel();
    }
}

#[cfg(test)]
mod tests;
