//! Feature bits of the header, the compression type and the encryption method.

use bitflags::bitflags;

bitflags! {
    /// Features that a program must know to open the image at all. Unknown bits are kept.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Incompatible: u64 {
        /// Refcounts may be wrong; they are rebuilt before the image is written.
        const DIRTY = 1 << 0;
        /// Metadata is damaged: reading only, except for repair.
        const CORRUPT = 1 << 1;
        /// Guest data lies in an external data file.
        const EXTERNAL_DATA = 1 << 2;
        /// The compression type is not deflate.
        const COMPRESSION_TYPE = 1 << 3;
        /// L2 entries are 128 bits wide.
        const EXTENDED_L2 = 1 << 4;
        const _ = !0;
    }
}

bitflags! {
    /// Features that a program may ignore. Unknown bits are kept.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Compatible: u64 {
        /// The dirty bit may be used to postpone refcount updates.
        const LAZY_REFCOUNTS = 1 << 0;
        const _ = !0;
    }
}

bitflags! {
    /// Features that a program which does not know them must clear before it writes the image.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Autoclear: u64 {
        /// The bitmaps extension is consistent with the guest data.
        const BITMAPS = 1 << 0;
        /// The external data file is a valid raw image by itself.
        const RAW_EXTERNAL_DATA = 1 << 1;
        const _ = !0;
    }
}

impl Incompatible {
    /// The bits with a meaning to this crate.
    pub const KNOWN: Self = Self::DIRTY
        .union(Self::CORRUPT)
        .union(Self::EXTERNAL_DATA)
        .union(Self::COMPRESSION_TYPE)
        .union(Self::EXTENDED_L2);
}

impl Compatible {
    /// The bits with a meaning to this crate.
    pub const KNOWN: Self = Self::LAZY_REFCOUNTS;
}

impl Autoclear {
    /// The bits with a meaning to this crate.
    pub const KNOWN: Self = Self::BITMAPS.union(Self::RAW_EXTERNAL_DATA);
}

/// How compressed clusters are coded; one type for the whole image.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Compression {
    /// A raw deflate stream (RFC 1951) per cluster.
    #[default]
    Zlib,
    /// Zstandard frames (RFC 8878).
    Zstd,
}

impl Compression {
    /// The byte in the header.
    pub fn code(self) -> u8 {
        match self {
            Self::Zlib => 0,
            Self::Zstd => 1,
        }
    }

    /// The type of a header byte, or `None` for one that is not defined.
    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Zlib),
            1 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// The name that QEMU's options and JSON use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

/// How guest data is encrypted (`crypt_method`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Encryption {
    /// Not.
    #[default]
    None,
    /// AES-CBC, long deprecated.
    Aes,
    /// LUKS, with its header in clusters of the image.
    Luks,
    /// A method that the format does not define; kept so that the image can be described.
    Unknown(u32),
}

impl Encryption {
    /// The number in the header.
    pub fn code(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Aes => 1,
            Self::Luks => 2,
            Self::Unknown(code) => code,
        }
    }

    /// The method of a header field.
    pub fn from_code(code: u32) -> Self {
        match code {
            0 => Self::None,
            1 => Self::Aes,
            2 => Self::Luks,
            other => Self::Unknown(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_bits_survive() {
        assert_eq!(Incompatible::from_bits_retain(1 << 40).bits(), 1 << 40);
        assert_eq!((Incompatible::from_bits_retain(0x81) - Incompatible::KNOWN).bits(), 0x80);
        assert_eq!((Autoclear::from_bits_retain(u64::MAX) & Autoclear::KNOWN).bits(), 3);
    }

    #[test]
    fn codes() {
        for code in 0..=255 {
            if let Some(compression) = Compression::from_code(code) {
                assert_eq!(compression.code(), code);
            } else {
                assert!(code > 1);
            }
        }
        for code in [0, 1, 2, 3, u32::MAX] {
            assert_eq!(Encryption::from_code(code).code(), code);
        }
    }
}
