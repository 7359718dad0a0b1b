//! The log of a simulated world: every operation, when it took effect, when it was over.

use crate::content::Content;
use crate::op::{FileNumber, OpNumber, SimOp, fingerprint};
use crate::rng::mix64;
use std::fmt;
use std::ops::Range;

/// One line of the log.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub enum LogEvent {
    /// A file came into the world, durable as it is.
    File { file: FileNumber, name: String, content: Content },
    /// A worker handed an operation over.
    Submitted { op: OpNumber, worker: usize, file: FileNumber, what: SimOp },
    /// A part of an operation took effect: reads see it from now on. For a change of length the range is empty.
    Applied { op: OpNumber, range: Range<u64> },
    /// The operation is over; the errno if it failed.
    Completed { op: OpNumber, result: Result<(), i32> },
    /// A note of the test's own.
    Mark(u64),
}

impl LogEvent {
    /// Adds the event to `bytes` in a form that differs for different events (data by its fingerprint).
    fn encode(&self, bytes: &mut Vec<u8>) {
        let mut put = |values: &[u64]| values.iter().for_each(|v| bytes.extend_from_slice(&v.to_le_bytes()));
        match self {
            Self::File { file, name, content } => {
                put(&[1, file.0 as u64, fingerprint(name.as_bytes()), content.len()]);
                for (offset, block) in content.data_blocks(0..content.len()) {
                    put(&[offset, fingerprint(block)]);
                }
            }
            Self::Submitted { op, worker, file, what } => {
                let range = what.range();
                put(&[2, op.0, *worker as u64, file.0 as u64, what.class() as u64, range.start, range.end]);
                match what {
                    SimOp::Write { data, .. } => put(&[fingerprint(data)]),
                    SimOp::Copy { source, source_offset, .. }
                    | SimOp::Clone { source, source_offset, .. } => {
                        put(&[source.0 as u64, *source_offset]);
                    }
                    _ => {}
                }
            }
            Self::Applied { op, range } => put(&[3, op.0, range.start, range.end]),
            Self::Completed { op, result } => {
                put(&[4, op.0, result.err().map_or(u64::MAX, |errno| errno as u64)]);
            }
            Self::Mark(mark) => put(&[5, *mark]),
        }
    }
}

/// How much of the log a world keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogKeep {
    /// Everything: any point of the run can be gone back to. Takes the memory of all that was written.
    #[default]
    All,
    /// Only the digest, for long runs that look at crash states while they go.
    Digest,
}

/// Everything that happened in a world.
#[derive(Debug, Clone)]
pub struct SimLog {
    keep: LogKeep,
    events: Vec<LogEvent>,
    count: u64,
    digest: u64,
    scratch: Vec<u8>,
}

impl SimLog {
    pub(crate) fn new(keep: LogKeep) -> Self {
        Self { keep, events: Vec::new(), count: 0, digest: 0, scratch: Vec::new() }
    }

    pub(crate) fn push(&mut self, event: LogEvent) {
        self.scratch.clear();
        event.encode(&mut self.scratch);
        self.digest = mix64(self.digest ^ fingerprint(&self.scratch));
        self.count += 1;
        if self.keep == LogKeep::All {
            self.events.push(event);
        }
    }

    /// The events kept, oldest first. A position in the log is an index into them: the state before that event.
    pub fn events(&self) -> &[LogEvent] {
        &self.events
    }

    /// Number of events so far, kept or not.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// A fingerprint of everything that happened, data included. Equal runs have equal digests.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The log as bytes, for comparing two runs.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for event in &self.events {
            event.encode(&mut bytes);
        }
        bytes
    }
}

impl fmt::Display for SimLog {
    /// One line per event.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, event) in self.events.iter().enumerate() {
            match event {
                LogEvent::File { file, name, content } => {
                    writeln!(f, "{index:6} file {} is {name:?}: {content:?}", file.0)?;
                }
                LogEvent::Submitted { op, worker, file, what } => {
                    writeln!(f, "{index:6} op {} by worker {worker} on file {}: {what:?}", op.0, file.0)?;
                }
                LogEvent::Applied { op, range } => writeln!(f, "{index:6} op {} applied {range:#x?}", op.0)?,
                LogEvent::Completed { op, result: Ok(()) } => writeln!(f, "{index:6} op {} done", op.0)?,
                LogEvent::Completed { op, result: Err(errno) } => {
                    writeln!(f, "{index:6} op {} failed with errno {errno}", op.0)?;
                }
                LogEvent::Mark(mark) => writeln!(f, "{index:6} mark {mark}")?,
            }
        }
        Ok(())
    }
}
