//! Offsets of the two address spaces, as types that do not mix.

use std::fmt;

/// A byte offset in the disk that the guest sees.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GuestOffset(pub u64);

/// A byte offset in the image file, or in the external data file where the image has one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct HostOffset(pub u64);

impl fmt::Debug for GuestOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guest {:#x}", self.0)
    }
}

impl fmt::Debug for HostOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {:#x}", self.0)
    }
}

impl fmt::Display for GuestOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for HostOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl GuestOffset {
    /// The offset `bytes` further, or `None` past 2^64.
    #[inline]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

impl HostOffset {
    /// The offset `bytes` further, or `None` past 2^64.
    #[inline]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_is_hexadecimal() {
        assert_eq!(format!("{:?} {:?}", GuestOffset(0x1000), HostOffset(255)), "guest 0x1000 host 0xff");
        assert_eq!(format!("{} {}", GuestOffset(0x1000), HostOffset(255)), "0x1000 0xff");
    }
}
