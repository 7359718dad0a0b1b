//! Formats that are recognised: images of other programs, some of which are read, and packed files. One table of magic
//! numbers, for probing and for verdicts.

use crate::qcow2::read_tables::read_bytes;
use crate::{Format, Result};
use std::fmt;
use zebu_storage::{File, Worker};

/// Bytes at the start and the end of a file that are looked at.
pub(crate) const SNIFFED: usize = 4096;

/// The kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A disk in a format of another program.
    Image,
    /// Any file, packed.
    Packed,
}

/// A format that is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Foreign {
    /// The name of the format.
    pub(crate) name: &'static str,
    /// The kind of file that has it.
    pub(crate) kind: Kind,
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Image => write!(f, "an image in the format {}", self.name),
            Kind::Packed => write!(f, "a file packed with {}", self.name),
        }
    }
}

/// A guess at a file of an unnamed format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guess {
    /// A format that can be opened.
    Known(Format),
    /// A format that can't.
    Foreign(Foreign),
}

const fn image(name: &'static str) -> Foreign {
    Foreign { name, kind: Kind::Image }
}

const fn packed(name: &'static str) -> Foreign {
    Foreign { name, kind: Kind::Packed }
}

/// Bytes at the start of a file, from an offset on.
const STARTS: &[(usize, &[u8], Foreign)] = &[
    (0, b"QFI\xfb\0\0\0\x01", image("qcow")),
    (0, b"KDMV", image("vmdk")),
    (0, b"COWD", image("vmdk")),
    (0, b"\xbe\xba\xfe\xca\0\0\0\0\x01\0\0\0\x02\0\0\0", image("vmdk")),
    (0, b"QED\0", image("qed")),
    (0, b"LUKS\xba\xbe", image("luks")),
    (0, b"vhdxfile", image("vhdx")),
    (0, b"conectix", image("vpc")),
    (0, b"WithoutFreeSpace", image("parallels")),
    (0, b"WithouFreSpacExt", image("parallels")),
    (0, b"Bochs Virtual HD Image", image("bochs")),
    (0, b"#!/bin/sh\n#V2.0 Format", image("cloop")),
    (64, b"\x7f\x10\xda\xbe", image("vdi")),
    (0, b"\xfd7zXZ\0", packed("xz")),
    (0, b"\x28\xb5\x2f\xfd", packed("zstd")),
    (0, b"\x04\x22\x4d\x18", packed("lz4")),
    (0, b"\x02\x21\x4c\x18", packed("lz4")),
];

/// Bytes in the last 512 bytes of a file, at their start.
const ENDS: &[(&[u8], Foreign)] = &[(b"conectix", image("vpc")), (b"koly", image("dmg"))];

/// Bytes of the last part of a file that holds such a footer. Old versions of Virtual PC wrote one byte less.
const FOOTERS: [usize; 2] = [512, 511];

/// The format, other than qcow2, of a file with these first and last bytes. `last` may be empty if the end is not known.
pub(crate) fn recognise(first: &[u8], last: &[u8]) -> Option<Foreign> {
    let starts = STARTS
        .iter()
        .find(|(offset, magic, _)| first.get(*offset..).is_some_and(|rest| rest.starts_with(magic)))
        .map(|(.., format)| *format);
    let ends = || {
        FOOTERS
            .iter()
            .filter_map(|len| last.get(last.len().checked_sub(*len)?..))
            .find_map(|footer| ENDS.iter().find(|(magic, _)| footer.starts_with(magic)))
            .map(|(_, format)| *format)
    };
    starts
        .or_else(|| is_vmdk_descriptor(first).then_some(image("vmdk")))
        .or_else(|| is_skippable(first).then_some(packed("zstd or lz4")))
        .or_else(|| is_tar(first).then_some(packed("tar")))
        .or_else(|| is_gzip(first).then_some(packed("gzip")))
        .or_else(|| is_bzip2(first).then_some(packed("bzip2")))
        .or_else(ends)
}

/// Text that names the files of a disk: comments and blank lines, then the version.
pub(crate) fn is_vmdk_descriptor(first: &[u8]) -> bool {
    first.starts_with(b"# Disk DescriptorFile")
        || first
            .split(|byte| *byte == b'\n')
            .map(|line| line.trim_ascii())
            .find(|line| !line.is_empty() && !line.starts_with(b"#"))
            .is_some_and(|line| line.get(..8).is_some_and(|word| word.eq_ignore_ascii_case(b"version=")))
}

/// A frame that decoders of zstd and lz4 pass over (RFC 8878, section 3.1.2).
fn is_skippable(first: &[u8]) -> bool {
    matches!(first, [0x50..=0x5f, 0x2a, 0x4d, 0x18, _, _, _, _, ..])
}

/// The header of a member of a tar file (POSIX). Five letters are few: the checksum must be right.
fn is_tar(first: &[u8]) -> bool {
    let Some(block) = first.get(..512).filter(|block| &block[257..262] == b"ustar") else { return false };
    let told = block[148..156].split(|byte| matches!(byte, 0 | b' ')).find(|digits| !digits.is_empty());
    let told = told.and_then(|digits| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    // The checksum itself counts as blanks.
    told == Some(sum(&block[..148]) + 8 * u64::from(b' ') + sum(&block[156..]))
}

/// Two bytes are few: the method must be deflate, and the reserved flags 0 (RFC 1952).
fn is_gzip(first: &[u8]) -> bool {
    matches!(first, [0x1f, 0x8b, 8, flags, ..] if flags & 0xe0 == 0)
}

/// The size of a block, and the number with which a block or the end of the stream begins.
fn is_bzip2(first: &[u8]) -> bool {
    first.strip_prefix(b"BZh").is_some_and(|rest| {
        matches!(rest.first(), Some(b'1'..=b'9'))
            && [b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90"]
                .iter()
                .any(|magic| rest.get(1..).is_some_and(|rest| rest.starts_with(*magic)))
    })
}

/// Guesses the format of a file by its first and last bytes.
pub(crate) async fn guess(worker: &Worker, file: &File) -> Result<Guess> {
    let known = |foreign: Foreign| match Format::from_name(foreign.name) {
        Some(format) if foreign.kind == Kind::Image => Guess::Known(format),
        _ => Guess::Foreign(foreign),
    };
    let (len, sniffed) = (file.len(), SNIFFED.min(file.len() as usize));
    let first = read_bytes(worker, file, 0, sniffed).await?;
    if first.starts_with(&zebu_qcow2::header::MAGIC.to_be_bytes()) {
        return Ok(recognise(&first, &[]).map_or(Guess::Known(Format::Qcow2), known));
    }
    let last = read_bytes(worker, file, len - sniffed as u64, sniffed).await?;
    Ok(recognise(&first, &last).map_or(Guess::Known(Format::Raw), known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(first: &[u8], last: &[u8]) -> Option<&'static str> {
        recognise(first, last).map(|format| format.name)
    }

    #[test]
    fn other_formats_are_seen() {
        assert_eq!(name(b"QFI\xfb\0\0\0\x01", &[]), Some("qcow"));
        assert_eq!(name(b"QFI\xfb\0\0\0\x03", &[]), None);
        assert_eq!(name(b"LUKS\xba\xbe\0\x01", &[]), Some("luks"));
        assert_eq!(name(b"# comment\n\nversion=1\nRW 8 FLAT \"/etc/passwd\" 0\n", &[]), Some("vmdk"));
        assert_eq!(name(b"# comment\nhello\nversion=1\n", &[]), None);
        assert_eq!(name(&[], &[]), None);
    }

    #[test]
    fn footers_are_seen_at_the_end_alone() {
        for (len, at) in [(4096, 3584), (4096, 3585), (512, 0), (511, 0)] {
            let mut last = vec![0; len];
            last[at..at + 8].copy_from_slice(b"conectix");
            assert_eq!(name(&[0; 4096], &last), Some("vpc"), "{len} {at}");
        }
        let mut last = vec![0; 4096];
        last[3583..3591].copy_from_slice(b"conectix");
        assert_eq!(name(&[0; 4096], &last), None);
        assert_eq!(name(&[0; 100], &[0; 100]), None);
    }

    #[test]
    fn short_magic_numbers_need_more_to_be_believed() {
        assert_eq!(name(b"\x1f\x8b\x08\x00rest", &[]), Some("gzip"));
        assert_eq!(name(b"\x1f\x8b\x08\xe0rest", &[]), None);
        assert_eq!(name(b"\x1f\x8b\x00\x00rest", &[]), None);
        assert_eq!(name(b"BZh91AY&SY", &[]), Some("bzip2"));
        assert_eq!(name(b"BZh9\x17\x72\x45\x38\x50\x90", &[]), Some("bzip2"));
        assert_eq!(name(b"BZh01AY&SY", &[]), None);
        assert_eq!(name(b"BZh9", &[]), None);
    }
}
