//! The journal of a thread, with the time that all threads share.

use super::journal::{Begin, Entry, Journal, Kind, Outcome};
use super::sector::{Seen, Values};
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The time of all threads of a process: no two moments are the same.
pub type Clock = Arc<AtomicU64>;

/// The end of a journal's name.
pub const SUFFIX: &str = "journal";

/// One thread's records in one round.
#[derive(Debug)]
pub struct Recorder {
    journal: RefCell<Journal>,
    values: RefCell<Values>,
    next: Cell<u64>,
    clock: Clock,
}

/// Ends the process: the one that watches it sees why.
pub fn fail(what: &str) -> ! {
    eprintln!("{what}");
    std::process::exit(3)
}

impl Recorder {
    /// The records of a writer (a number below 200 that no other has).
    ///
    /// # Panics
    /// If the journal can't be written.
    pub fn new(dir: &Path, seed: u64, writer: u64, clock: &Clock) -> Self {
        let journal = Journal::open(&dir.join(format!("{writer}.{SUFFIX}"))).expect("a journal");
        Self {
            journal: RefCell::new(journal),
            values: RefCell::new(Values::new(seed, writer)),
            next: Cell::new(0),
            clock: clock.clone(),
        }
    }

    /// A value that nobody else writes.
    pub fn value(&self) -> u64 {
        self.values.borrow_mut().next_value()
    }

    /// The time.
    pub fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// A request is about to begin; its number.
    pub fn begin(&self, kind: Kind, first: u64, count: u64, value: u64) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        let begin = Begin { number, clock: self.now(), kind, first, count, value };
        self.journal.borrow_mut().add(&Entry::Begin(begin));
        number
    }

    /// A request has ended.
    pub fn end(&self, number: u64, outcome: Outcome, seen: Vec<Seen>) {
        self.end_at(number, self.now(), outcome, seen);
    }

    /// A request had ended at this time.
    pub fn end_at(&self, number: u64, clock: u64, outcome: Outcome, seen: Vec<Seen>) {
        self.journal.borrow_mut().add(&Entry::End { number, clock, outcome, seen });
    }

    /// The thread has nothing left to do.
    pub fn over(&self) {
        self.journal.borrow_mut().add(&Entry::Over);
    }
}
