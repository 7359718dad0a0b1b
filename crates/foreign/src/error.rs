//! Why an image can't be read.

use crate::place::{FileIndex, Missing};

/// Shorthand.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image, or a part of it, can't be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Bytes have to be read first.
    #[error("bytes of the file have not been read yet")]
    Missing(Missing),
    /// The image contradicts itself, or its file is cut off.
    #[error("{message}")]
    Damaged {
        /// The mistake, and where there is one, the remedy.
        message: String,
        /// The file that it was found in.
        file: FileIndex,
        /// Offset in that file, in bytes, if it has one.
        offset: Option<u64>,
    },
    /// The image is valid but uses something that is not implemented.
    #[error("{message}")]
    Unsupported {
        /// The thing, by its name.
        message: String,
    },
}

impl From<Missing> for Error {
    fn from(missing: Missing) -> Self {
        Self::Missing(missing)
    }
}

impl Error {
    /// A mistake in the image file itself.
    pub(crate) fn damaged(message: impl Into<String>) -> Self {
        Self::Damaged { message: message.into(), file: FileIndex::IMAGE, offset: None }
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::Unsupported { message: message.into() }
    }

    /// The same mistake with its place.
    pub(crate) fn at(self, file: FileIndex, offset: u64) -> Self {
        match self {
            Self::Damaged { message, .. } => Self::Damaged { message, file, offset: Some(offset) },
            other => other,
        }
    }
}

/// Fails with a message about a damaged image unless something holds.
macro_rules! ensure {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err($crate::error::Error::damaged(format!($($message)*)));
        }
    };
}
pub(crate) use ensure;

/// Fails with a message about something that is not implemented unless something holds.
macro_rules! require {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err($crate::error::Error::unsupported(format!($($message)*)));
        }
    };
}
pub(crate) use require;

/// Characters of an image's text that a message repeats.
const MOST_REPEATED: usize = 200;

/// Text from an image, with control characters escaped: an image must not write to a user's terminal. Long text is cut.
pub(crate) fn printable(text: &str) -> String {
    let (start, rest) =
        text.char_indices().nth(MOST_REPEATED).map_or((text, ""), |(at, _)| text.split_at(at));
    let more = if rest.is_empty() { "" } else { "..." };
    start
        .chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .chain(more.chars())
        .collect()
}
