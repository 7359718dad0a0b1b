//! Formats that are recognised: images of other programs, some of which are read, and packed files
//! ([`PackedFormat`]). One table of magic numbers, for probing and for verdicts;
//! `no_disk.rs` has those of files that are no disks.

use crate::no_disk::NoDisk;
use crate::qcow2::read_tables::read_bytes;
use crate::{Format, PackedFormat, Probe, Result};
use std::fmt;
use zebu_storage::{File, Worker};

/// Bytes at the start and the end of a file that are looked at.
pub(crate) const SNIFFED: usize = 4096;

/// A format that is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Foreign {
    /// A disk in a format of another program, by its name.
    Image(&'static str),
    /// Any file, packed.
    Packed(PackedFormat),
    /// A piece of an image, or something else that is no disk by itself.
    NoDisk(NoDisk),
}

impl Foreign {
    /// The name of the format.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Image(name) => name,
            Self::Packed(packed) => packed.name(),
            Self::NoDisk(other) => other.name(),
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(name) => write!(f, "an image in the format {name}"),
            Self::Packed(packed) => write!(f, "a file packed with {packed}"),
            Self::NoDisk(other) => write!(f, "{other}"),
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

/// Bytes at the start of a file, from an offset on.
const STARTS: &[(usize, &[u8], &str)] = &[
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"\xbe\xba\xfe\xca\0\0\0\0\x01\0\0\0\x02\0\0\0", "vmdk"),
    (0, b"QED\0", "qed"),
    (0, b"LUKS\xba\xbe", "luks"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"Bochs Virtual HD Image", "bochs"),
    (0, b"#!/bin/sh\n#V2.0 Format", "cloop"),
    (64, b"\x7f\x10\xda\xbe", "vdi"),
];

/// Bytes in the last 512 bytes of a file, at their start.
const ENDS: &[(&[u8], &str)] = &[(b"conectix", "vpc"), (b"koly", "dmg")];

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
        .or_else(|| is_vmdk_descriptor(first).then_some("vmdk"))
        .map(Foreign::Image)
        .or_else(|| PackedFormat::of(first).map(Foreign::Packed))
        .or_else(|| ends().map(Foreign::Image))
        .or_else(|| NoDisk::of(first, last).map(Foreign::NoDisk))
}

/// Whether a file of an unnamed format with these first and last bytes is taken for a raw disk: it begins and ends like no
/// image and like no packed file. 4096 bytes of each are enough. Either may be empty, and tells nothing then.
pub fn looks_raw(first: &[u8], last: &[u8]) -> bool {
    !first.starts_with(&zebu_qcow2::header::MAGIC.to_be_bytes()) && recognise(first, last).is_none()
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

/// Guesses the format of a file by its first and last bytes.
pub(crate) async fn guess(worker: &Worker, file: &File, probe: Probe) -> Result<Guess> {
    let known = |foreign: Foreign| match foreign {
        Foreign::Image(name) => Format::from_name(name).map_or(Guess::Foreign(foreign), Guess::Known),
        Foreign::Packed(_) | Foreign::NoDisk(_) => Guess::Foreign(foreign),
    };
    let (len, sniffed) = (file.len(), SNIFFED.min(file.len() as usize));
    let first = read_bytes(worker, file, 0, sniffed).await?;
    if first.starts_with(&zebu_qcow2::header::MAGIC.to_be_bytes()) {
        return Ok(recognise(&first, &[]).map_or(Guess::Known(Format::Qcow2), known));
    }
    let is_looked_at = match probe {
        Probe::BothEnds => true,
        Probe::Start => file.path().extension().is_some_and(|extension| extension == "dmg"),
    };
    let last = if is_looked_at {
        read_bytes(worker, file, len - sniffed as u64, sniffed).await?
    } else {
        Vec::new()
    };
    let by_name = || NoDisk::of_name(file.path(), len).map(Foreign::NoDisk);
    Ok(recognise(&first, &last).or_else(by_name).map_or(Guess::Known(Format::Raw), known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(first: &[u8], last: &[u8]) -> Option<&'static str> {
        recognise(first, last).map(Foreign::name)
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
}
