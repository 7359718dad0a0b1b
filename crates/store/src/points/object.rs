//! Objects of a store, wherever it is.

use super::error::PointsErrorKind;
use std::fs::File;

/// The most bytes of an object that is read into memory.
pub(super) const LARGEST_DOCUMENT: u64 = 1 << 20;

/// The fate of an object that was to be made or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrote {
    /// It is there, durably.
    Done,
    /// Another has the name, or it was changed meanwhile: nothing was written.
    Lost,
}

/// An object in memory, and its version.
#[derive(Debug, Clone)]
pub(super) struct Document {
    pub(super) bytes: Vec<u8>,
    pub(super) version: String,
}

/// An object that says that somebody is at work. In a folder it is locked as long as this lives.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) key: String,
    /// The lock, of a folder's.
    _lock: Option<File>,
}

impl Held {
    pub(super) fn new(key: &str, lock: Option<File>) -> Self {
        Self { key: key.to_owned(), _lock: lock }
    }
}

/// Where somebody who left an object that is held is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// At work.
    Alive,
    /// Gone.
    Gone,
    /// Nobody can tell: a bucket has no locks.
    Unknown,
}

/// A failure of a place: its kind and the reason.
pub(super) type Failed = (PointsErrorKind, String);
