//! The verdict on a change of the code.

use serde::{Deserialize, Serialize};

/// The verdict on a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    /// A test failed.
    Caught,
    /// A test came to no end.
    Stuck,
    /// All tests passed.
    Survived,
    /// No test came by.
    NotReached,
    /// It does not compile.
    Unviable,
    /// It can't be chosen when the program runs: of a constant, a field that is left out, an iterator that is returned, a
    /// condition joined with `let`.
    LeftOut,
}

impl Verdict {
    pub(super) const ALL: [Self; 6] =
        [Self::Caught, Self::Stuck, Self::Survived, Self::NotReached, Self::Unviable, Self::LeftOut];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Caught => "caught",
            Self::Stuck => "stuck",
            Self::Survived => "survived",
            Self::NotReached => "not reached",
            Self::Unviable => "does not compile",
            Self::LeftOut => "left out",
        }
    }

    /// Whether somebody has to look at it.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Self::Survived | Self::NotReached | Self::LeftOut)
    }
}

/// A finding about a change.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Finding {
    pub(super) verdict: Verdict,
    /// The program that noticed it.
    pub(super) by: Option<String>,
    /// Of all programs that ran.
    pub(super) seconds: f64,
}
