//! Operations as the log, the faults and the reports see them.

use crate::rng::mix64;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Names an operation within a world, in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpNumber(pub u64);

/// Names a file within a world, in the order of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileNumber(pub usize);

/// A requested operation. Offsets and lengths in bytes.
#[derive(Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SimOp {
    Read {
        offset: u64,
        len: u64,
    },
    Write {
        offset: u64,
        data: Arc<[u8]>,
    },
    Flush,
    Punch {
        offset: u64,
        len: u64,
    },
    ZeroRange {
        offset: u64,
        len: u64,
    },
    Allocate {
        offset: u64,
        len: u64,
    },
    SetLen {
        len: u64,
    },
    ExtentAt {
        offset: u64,
    },
    /// Copies (`copy_file_range`) or shares (`FICLONERANGE`) a range of another file or of the same.
    Copy {
        source: FileNumber,
        source_offset: u64,
        offset: u64,
        len: u64,
    },
    Clone {
        source: FileNumber,
        source_offset: u64,
        offset: u64,
        len: u64,
    },
}

impl SimOp {
    /// The kind, for filters.
    pub fn class(&self) -> OpClass {
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
pub(crate) fn fingerprint(bytes: &[u8]) -> u64 {
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
                write!(f, "{:?} {range:#x?} from file {} at {source_offset:#x}", self.class(), source.0)
            }
            _ => write!(f, "{:?} {range:#x?}", self.class()),
        }
    }
}

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum OpClass {
    Read,
    Write,
    Flush,
    Punch,
    ZeroRange,
    Allocate,
    SetLen,
    ExtentAt,
    CopyRange,
    CloneRange,
}

/// An operation, as filters see it and reports show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpInfo {
    /// Its number in the log.
    pub op: OpNumber,
    /// The worker that submitted it, counted from 0 in the order of creation in its world.
    pub worker: usize,
    /// The name of its file.
    pub file: Rc<str>,
    /// Its kind.
    pub class: OpClass,
    /// The bytes of the file that it concerns. Empty for a flush; for a change of length, empty at the new length.
    pub range: Range<u64>,
    /// Simulated time of its submission.
    pub submitted: Duration,
}

impl std::fmt::Display for OpInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { op, worker, file, class, range, submitted } = self;
        write!(
            f,
            "op {}: {class:?} {:#x}..{:#x} of {file:?} by worker {worker}, submitted at {submitted:?}",
            op.0, range.start, range.end
        )
    }
}

/// Chooses operations: all that meet every condition set. The default chooses all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OpFilter {
    classes: Vec<OpClass>,
    file: Option<String>,
    range: Option<Range<u64>>,
    worker: Option<usize>,
}

impl OpFilter {
    /// Operations of one kind.
    pub fn of(class: OpClass) -> Self {
        Self { classes: vec![class], ..Self::default() }
    }

    /// Operations of any of these kinds.
    pub fn of_any(classes: &[OpClass]) -> Self {
        Self { classes: classes.to_vec(), ..Self::default() }
    }

    /// Only on the file `name`.
    pub fn on_file(mut self, name: &str) -> Self {
        self.file = Some(name.to_owned());
        self
    }

    /// Only those that touch these bytes. Flushes touch none; a change of length touches its new end.
    pub fn touching(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// Only those of one worker, counted from 0.
    pub fn by_worker(mut self, worker: usize) -> Self {
        self.worker = Some(worker);
        self
    }

    /// Whether the filter chooses `info`.
    pub fn matches(&self, info: &OpInfo) -> bool {
        (self.classes.is_empty() || self.classes.contains(&info.class))
            && self.file.as_deref().is_none_or(|name| *name == *info.file)
            && self.worker.is_none_or(|worker| worker == info.worker)
            && self.range.as_ref().is_none_or(|range| match info.class {
                OpClass::Flush => false,
                OpClass::SetLen | OpClass::ExtentAt => range.contains(&info.range.start),
                _ => info.range.start < range.end && range.start < info.range.end,
            })
    }
}
