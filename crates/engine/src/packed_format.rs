//! Files that are packed: known by their first bytes, with as much beside a magic number as a few letters need.

use std::fmt;

/// A way in which files are packed. None of them is read as a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PackedFormat {
    /// gzip (RFC 1952).
    Gzip,
    /// xz.
    Xz,
    /// zstd (RFC 8878).
    Zstd,
    /// bzip2.
    Bzip2,
    /// Frames of lz4.
    Lz4,
    /// lz4 as it was before its frames had a format.
    Lz4Legacy,
    /// Frames that decoders of zstd and lz4 pass over, longer than the bytes that are known.
    Skippable,
    /// LZMA alone, as it was before xz.
    Lzma,
    /// lzip.
    Lzip,
    /// Files in a tar file (POSIX).
    Tar,
    /// Files in a zip file.
    Zip,
    /// Files in a 7z file.
    SevenZip,
}

impl fmt::Display for PackedFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl PackedFormat {
    /// The packing of a file with these first bytes; 4096 are enough, fewer may not tell.
    pub fn of(first: &[u8]) -> Option<Self> {
        if let Some(behind) = behind_skippable(first) {
            return Some(match Self::of_magic(behind) {
                Some(framed @ (Self::Zstd | Self::Lz4)) => framed,
                _ => Self::Skippable,
            });
        }
        Self::of_magic(first)
    }

    fn of_magic(first: &[u8]) -> Option<Self> {
        Some(match first {
            // Two bytes are few: the method must be deflate, and the reserved flags 0.
            [0x1f, 0x8b, 8, flags, ..] if flags & 0xe0 == 0 => Self::Gzip,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            // The number with which the first block begins, or the end of an empty stream.
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, 0x53, 0x59, ..]
            | [b'B', b'Z', b'h', b'1'..=b'9', 0x17, 0x72, 0x45, 0x38, 0x50, 0x90, ..] => Self::Bzip2,
            [0x04, 0x22, 0x4d, 0x18, ..] => Self::Lz4,
            [0x02, 0x21, 0x4c, 0x18, ..] => Self::Lz4Legacy,
            [b'7', b'z', 0xbc, 0xaf, 0x27, 0x1c, ..] => Self::SevenZip,
            [b'L', b'Z', b'I', b'P', 1, size, ..] if (12..=29).contains(&(size & 31)) => Self::Lzip,
            _ if is_zip(first) => Self::Zip,
            _ if is_lzma(first) => Self::Lzma,
            _ if is_tar(first) => Self::Tar,
            _ => return None,
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Bzip2 => "bzip2",
            Self::Lz4 => "lz4",
            Self::Lz4Legacy => "the legacy format of lz4",
            Self::Skippable => "zstd or lz4",
            Self::Lzma => "lzma",
            Self::Lzip => "lzip",
            Self::Tar => "tar",
            Self::Zip => "zip",
            Self::SevenZip => "7z",
        }
    }

    /// Whether commands unpack it where it is the source of a copy.
    pub fn is_unpacked(self) -> bool {
        matches!(self, Self::Gzip | Self::Xz | Self::Zstd | Self::Bzip2 | Self::Lz4 | Self::Tar)
    }

    /// A program that unpacks such a file, with the options to do so.
    pub fn unpacker(self) -> &'static str {
        match self {
            Self::Gzip => "gzip -dc",
            Self::Xz => "xz -dc",
            Self::Zstd | Self::Skippable => "zstd -dc",
            Self::Bzip2 => "bzip2 -dc",
            Self::Lz4 | Self::Lz4Legacy => "lz4 -dc",
            Self::Lzma => "lzma -dc",
            Self::Lzip => "lzip -dc",
            Self::Tar => "tar -xf",
            Self::Zip => "unzip",
            Self::SevenZip => "7z x",
        }
    }
}

/// Bytes of a frame that decoders of zstd and lz4 pass over, if one begins here (RFC 8878, section 3.1.2).
pub fn skippable_frame(first: &[u8]) -> Option<u64> {
    let [0x50..=0x5f, 0x2a, 0x4d, 0x18, a, b, c, d, ..] = first else { return None };
    Some(8 + u64::from(u32::from_le_bytes([*a, *b, *c, *d])))
}

/// The bytes behind such frames, if there are any.
fn behind_skippable(first: &[u8]) -> Option<&[u8]> {
    let mut behind = None;
    while let Some(len) = skippable_frame(behind.unwrap_or(first)) {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        behind = Some(behind.unwrap_or(first).get(len..).unwrap_or_default());
    }
    behind
}

/// The header of a member of a tar file. Five letters are few: the checksum must be right.
fn is_tar(first: &[u8]) -> bool {
    let Some(block) = first.get(..512).filter(|block| &block[257..262] == b"ustar") else { return false };
    let told = block[148..156].split(|byte| matches!(byte, 0 | b' ')).find(|digits| !digits.is_empty());
    let told = told.and_then(|digits| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    // The checksum itself counts as blanks.
    told == Some(sum(&block[..148]) + 8 * u64::from(b' ') + sum(&block[156..]))
}

/// The header of a member of a zip file: a version and a method that there are. Or the end of an empty one.
fn is_zip(first: &[u8]) -> bool {
    match first {
        [b'P', b'K', 3, 4, version, _, _, _, method, 0, ..] => (10..=63).contains(version) && *method < 100,
        [b'P', b'K', 5, 6, numbers @ ..] => numbers.get(..16).is_some_and(|zeroes| *zeroes == [0; 16]),
        _ => false,
    }
}

/// The header of LZMA alone, which has no magic number. The properties must be those of every packer's default, the dictionary
/// a size that packers use, the length unknown or below 256 GiB, and the first byte of the stream 0: 60 bits and more.
fn is_lzma(first: &[u8]) -> bool {
    let [0x5d, a, b, c, d, len @ .., 0] = first.get(..14).unwrap_or_default() else { return false };
    let dictionary = u32::from_le_bytes([*a, *b, *c, *d]);
    let (low, ones) = (dictionary.trailing_zeros(), dictionary.count_ones());
    // 2^n, or 2^n + 2^(n - 1).
    let is_usual = low >= 12 && (ones == 1 || ones == 2 && dictionary.ilog2() == low + 1);
    let len = len.iter().rev().fold(0u64, |len, byte| len << 8 | u64::from(*byte));
    is_usual && (len == u64::MAX || len < 1 << 38)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(first: &[u8]) -> Option<&'static str> {
        PackedFormat::of(first).map(PackedFormat::name)
    }

    #[test]
    fn short_magic_numbers_need_more_to_be_believed() {
        assert_eq!(name(b"\x1f\x8b\x08\x00rest"), Some("gzip"));
        assert_eq!(name(b"\x1f\x8b\x08\xe0rest"), None);
        assert_eq!(name(b"\x1f\x8b\x00\x00rest"), None);
        assert_eq!(name(b"BZh91AY&SY"), Some("bzip2"));
        assert_eq!(name(b"BZh9\x17\x72\x45\x38\x50\x90"), Some("bzip2"));
        assert_eq!(name(b"BZh01AY&SY"), None);
        assert_eq!(name(b"BZh9"), None);
        assert_eq!(name(&[0; 4096]), None);
        assert_eq!(name(b""), None);
        let zip = b"PK\x03\x04\x14\0\0\0\x08\0\x90\x14\x79\x5d";
        assert_eq!(name(zip), Some("zip"));
        for (at, byte) in [(4, 64), (4, 0), (8, 100), (9, 1)] {
            let mut other = *zip;
            other[at] = byte;
            assert_eq!(name(&other), None, "{at}");
        }
    }

    #[test]
    fn lzma_is_known_by_all_of_its_header() {
        let unknown = b"\x5d\0\0\x80\0\xff\xff\xff\xff\xff\xff\xff\xff\0";
        assert_eq!(name(unknown), Some("lzma"));
        assert_eq!(name(b"\x5d\0\0\x18\0\0\0\x10\0\0\0\0\0\0"), Some("lzma"));
        for (at, byte) in [(0, 0x5e), (1, 1), (2, 1), (3, 0x90), (9, 0xfe), (13, 1)] {
            let mut other = *unknown;
            other[at] = byte;
            assert_eq!(name(&other), None, "{at}");
        }
        assert_eq!(name(&unknown[..13]), None);
    }

    #[test]
    fn frames_without_data_are_looked_behind() {
        let skipped = b"\x53\x2a\x4d\x18\x02\0\0\0xx";
        assert_eq!(name(&[&skipped[..], b"\x28\xb5\x2f\xfd"].concat()), Some("zstd"));
        assert_eq!(name(&[&skipped[..], skipped, b"\x04\x22\x4d\x18"].concat()), Some("lz4"));
        assert_eq!(name(&[&skipped[..], b"\x1f\x8b\x08\x00rest"].concat()), Some("zstd or lz4"));
        assert_eq!(name(skipped), Some("zstd or lz4"));
        assert_eq!(name(b"\x53\x2a\x4d\x18\xff\xff\xff\xff"), Some("zstd or lz4"));
    }
}
