//! Failures of stores of points, in words that name the store and the object.

use std::fmt;

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PointsErrorKind {
    /// There is no such store or point.
    NotFound,
    /// An object is missing or is not what it should be.
    Damaged,
    /// Somebody else works on it.
    Busy,
    /// It can't be asked for.
    Refused,
    /// A file or a store failed.
    Io,
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointsError {
    kind: PointsErrorKind,
    text: String,
}

impl PointsError {
    /// A failure of `object` of `store`; an empty object is the store itself.
    pub fn new(kind: PointsErrorKind, store: impl fmt::Display, object: &str, reason: &str) -> Self {
        let object = if object.is_empty() { String::new() } else { format!(": {object}") };
        Self { kind, text: format!("{store}{object}: {reason}") }
    }

    /// Its kind.
    pub fn kind(&self) -> PointsErrorKind {
        self.kind
    }
}

impl fmt::Display for PointsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for PointsError {}
