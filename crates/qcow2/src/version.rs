//! The version of the format.

/// The version of the format.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Version {
    /// Version 2 (compat 0.10): no feature bits, no zero clusters, 16-bit refcounts.
    V2,
    /// Version 3 (compat 1.1).
    V3,
}

impl Version {
    /// The number in the header.
    pub fn number(self) -> u32 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }
}
