//! The log of a simulated world: every operation, when it took effect, when it was over.

use super::content::Content;
use super::rng::mix64;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Names an operation within a world, in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpNumber(pub u64);

/// Names a file within a world, in the order of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileNumber(pub usize);

/// What an operation is asked to do. Offsets and lengths in bytes.
#[derive(Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SimOp {
    Read { offset: u64, len: u64 },
    Write { offset: u64, data: Arc<[u8]> },
    Flush,
    Punch { offset: u64, len: u64 },
    ZeroRange { offset: u64, len: u64 },
    Allocate { offset: u64, len: u64 },
    SetLen { len: u64 },
    ExtentAt { offset: u64 },
    /// Copies (`copy_file_range`) or shares (`FICLONERANGE`) a range of another file or of the same.
    Copy { source: FileNumber, source_offset: u64, offset: u64, len: u64 },
    Clone { source: FileNumber, source_offset: u64, offset: u64, len: u64 },
}

impl SimOp {
    /// The kind, for filters.
    pub fn kind(&self) -> super::OpClass {
        use super::OpClass;
        match self {
            Self::Read { .. } => OpClass::Read,
            Self::Write { .. } => OpClass::Write,
            Self::Flush => OpClass::Flush,
            Self::Punch { .. } => OpClass::Punch,
            Self::ZeroRange { .. } => OpClass::ZeroRange,
            Self::Allocate { .. } => OpClass::Allocate,
            Self::SetLen { .. } => OpClass::SetLen,
            Self::ExtentAt { .. } => OpClass::ExtentAt,
            Self::Copy { .. } => OpClass::CopyRange,
            Self::Clone { .. } => OpClass::CloneRange,
        }
    }

    /// The bytes of the file that it concerns; empty for a flush or a change of length.
    pub fn range(&self) -> Range<u64> {
        match *self {
            Self::Write { offset, ref data } => offset..offset + data.len() as u64,
            Self::Read { offset, len }
            | Self::Punch { offset, len }
            | Self::ZeroRange { offset, len }
            | Self::Allocate { offset, len }
            | Self::Copy { offset, len, .. }
            | Self::Clone { offset, len, .. } => offset..offset.saturating_add(len),
            Self::SetLen { len } => len..len,
            Self::ExtentAt { offset } => offset..offset,
            Self::Flush => 0..0,
        }
    }

    /// Whether the file may be different afterwards.
    pub fn changes_file(&self) -> bool {
        !matches!(self, Self::Read { .. } | Self::Flush | Self::ExtentAt { .. })
    }
}

/// A short fingerprint of bytes, for logs and comparisons; not for secrets.
pub(super) fn fingerprint(bytes: &[u8]) -> u64 {
    let mut hash = mix64(bytes.len() as u64);
    for word in bytes.chunks(8) {
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        hash = mix64(hash ^ u64::from_le_bytes(padded));
    }
    hash
}

impl fmt::Debug for SimOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = self.range();
        match self {
            Self::Write { data, .. } => {
                write!(f, "Write {range:#x?} of {:016x}", fingerprint(data))
            }
            Self::Flush => f.write_str("Flush"),
            Self::SetLen { len } => write!(f, "SetLen {len:#x}"),
            Self::ExtentAt { offset } => write!(f, "ExtentAt {offset:#x}"),
            Self::Copy { source, source_offset, .. } | Self::Clone { source, source_offset, .. } => {
                write!(f, "{:?} {range:#x?} from file {} at {source_offset:#x}", self.kind(), source.0)
            }
            _ => write!(f, "{:?} {range:#x?}", self.kind()),
        }
    }
}

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
                put(&[2, op.0, *worker as u64, file.0 as u64, what.kind() as u64, range.start, range.end]);
                match what {
                    SimOp::Write { data, .. } => put(&[fingerprint(data)]),
                    SimOp::Copy { source, source_offset, .. } | SimOp::Clone { source, source_offset, .. } => {
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
    pub(super) fn new(keep: LogKeep) -> Self {
        Self { keep, events: Vec::new(), count: 0, digest: 0, scratch: Vec::new() }
    }

    pub(super) fn push(&mut self, event: LogEvent) {
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
