//! Requests that are not answered yet, and their time. librados gives up on answers that don't come, but librbd may wait for
//! several of them, or ask again for ever: whoever waits for librbd is answered all the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::Completer;
use zebu_storage::sync::{Condvar, Mutex};

/// The time between two looks at the clock.
const TICK: Duration = Duration::from_secs(1);
/// The time that requests have once the program is to end.
const HURRY: Duration = Duration::from_secs(5);

/// The requests of a disk.
#[derive(Debug)]
pub(crate) struct Pending {
    /// How long each may take.
    patience: Duration,
    state: Mutex<State>,
    /// The state is not what somebody waits in.
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// In the order in which they came, which is that of their ends.
    waiting: BTreeMap<u64, Waiting>,
    /// Requests that somebody works on, given up or not.
    held: usize,
    /// Changes among them that were given up: they may still be done, after later ones.
    given_up_changes: usize,
    /// No request is taken any more.
    is_over: bool,
    /// Since when the program is to end.
    hurried: Option<Instant>,
    /// Nobody looks at the clock, because nothing is waiting.
    is_asleep: bool,
    /// The clock is not needed any more.
    is_closed: bool,
}

#[derive(Debug)]
struct Waiting {
    begun: Instant,
    done: Completer,
    kind: Kind,
}

/// Whether a request changes the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Change,
    Other,
}

impl Pending {
    /// No requests. Each may take `patience`.
    pub(crate) fn new(patience: Duration) -> Arc<Self> {
        Arc::new(Self { patience, state: Mutex::default(), news: Condvar::new() })
    }

    /// Notes a request. None if no more are taken: it is answered then.
    pub(crate) fn begin(self: &Arc<Self>, done: Completer, kind: Kind) -> Option<Ticket> {
        let mut state = self.state.lock();
        if state.is_over {
            drop(state);
            done.finish(Err(libc::EIO));
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.held += 1;
        state.waiting.insert(number, Waiting { begun: Instant::now(), done, kind });
        if state.is_asleep {
            self.news.notify_all();
        }
        Some(Ticket { pending: Arc::clone(self), number, kind, is_held: true })
    }

    /// Whether a change was given up that may still be done.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.state.lock().given_up_changes > 0
    }

    /// Has requests end soon.
    pub(crate) fn hurry(&self) {
        self.state.lock().hurried.get_or_insert_with(Instant::now);
        self.news.notify_all();
    }

    /// How long to wait for what takes `usual`, as things are now.
    pub(crate) fn at_most(&self, usual: Duration) -> Duration {
        if self.state.lock().hurried.is_some() { usual.min(HURRY) } else { usual }
    }

    /// Waits until nobody works on a request, and lets no more come. False if that takes too long.
    pub(crate) fn settle(&self) -> bool {
        let patience = self.at_most(self.patience);
        let mut state = self.news.wait_timeout_while(self.state.lock(), patience, |state| state.held > 0);
        state.is_over = state.held == 0;
        state.is_over
    }

    /// Ends [`Pending::watch`].
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.news.notify_all();
    }

    /// Looks at the clock until [`Pending::close`], and gives requests up whose time is over. Each is told of.
    pub(crate) fn watch(&self, tell: impl Fn()) {
        loop {
            let mut state = self.state.lock();
            if state.is_closed {
                return;
            }
            let late = self.take_late(&mut state);
            if !late.is_empty() {
                drop(state);
                for done in late {
                    tell();
                    done.finish(Err(libc::EIO));
                }
                continue;
            }
            if state.waiting.is_empty() {
                state.is_asleep = true;
                let is_idle = |state: &mut State| state.waiting.is_empty() && !state.is_closed;
                self.news.wait_while(state, is_idle).is_asleep = false;
            } else {
                drop(self.news.wait_timeout(state, TICK));
            }
        }
    }

    /// Takes the requests whose time is over.
    fn take_late(&self, state: &mut State) -> Vec<Completer> {
        let now = Instant::now();
        let hurried = state.hurried;
        let is_late = |waiting: &Waiting| {
            let soon = hurried.is_some_and(|since| now >= since.max(waiting.begun) + HURRY);
            soon || now >= waiting.begun + self.patience
        };
        let mut late = Vec::new();
        while let Some(first) = state.waiting.first_entry().filter(|first| is_late(first.get())) {
            let Waiting { done, kind, .. } = first.remove();
            state.given_up_changes += usize::from(kind == Kind::Change);
            late.push(done);
        }
        late
    }
}

/// A request that somebody works on. Dropping it is the answer EIO.
#[derive(Debug)]
pub(crate) struct Ticket {
    pending: Arc<Pending>,
    number: u64,
    kind: Kind,
    is_held: bool,
}

impl Ticket {
    /// The end of the work: the way to answer, unless the request was given up.
    pub(crate) fn end(mut self) -> Option<Completer> {
        self.leave()
    }

    fn leave(&mut self) -> Option<Completer> {
        if !std::mem::replace(&mut self.is_held, false) {
            return None;
        }
        let mut state = self.pending.state.lock();
        let waiting = state.waiting.remove(&self.number);
        state.held -= 1;
        if waiting.is_none() && self.kind == Kind::Change {
            state.given_up_changes -= 1;
        }
        let is_last = state.held == 0;
        drop(state);
        if is_last {
            self.pending.news.notify_all();
        }
        waiting.map(|waiting| waiting.done)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        drop(self.leave());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};
    use zebu_storage::{IoBufs, StorageDone, StorageOp};

    fn request() -> (Completer, Receiver<Result<StorageDone, i32>>) {
        let (sender, receiver) = channel();
        let done = Completer::new(StorageOp::Flush, IoBufs::new(), move |_, result| {
            let _ = sender.send(result);
        });
        (done, receiver)
    }

    #[test]
    fn a_request_that_takes_too_long_is_given_up_and_its_end_is_noted() {
        let pending = Pending::new(Duration::from_millis(50));
        let (done, answer) = request();
        let late = pending.begin(done, Kind::Change).unwrap();
        let (done, in_time) = request();
        pending.begin(done, Kind::Other).unwrap().end().unwrap().finish(Ok(StorageDone::Done));
        assert_eq!(in_time.recv(), Ok(Ok(StorageDone::Done)));
        // From now on, somebody looks at the time.
        let watch = std::thread::spawn({
            let pending = Arc::clone(&pending);
            move || pending.watch(|| {})
        });
        assert_eq!(answer.recv(), Ok(Err(libc::EIO)));
        assert!(pending.is_unsettled() && !pending.settle());
        assert!(late.end().is_none());
        assert!(!pending.is_unsettled() && pending.settle());
        let (done, refused) = request();
        assert!(pending.begin(done, Kind::Other).is_none());
        assert_eq!(refused.recv(), Ok(Err(libc::EIO)));
        pending.close();
        watch.join().unwrap();
    }

    #[test]
    fn work_that_vanishes_is_answered() {
        let pending = Pending::new(Duration::from_secs(60));
        let (done, answer) = request();
        drop(pending.begin(done, Kind::Other));
        assert_eq!(answer.recv(), Ok(Err(libc::EIO)));
        assert!(pending.settle());
    }
}
