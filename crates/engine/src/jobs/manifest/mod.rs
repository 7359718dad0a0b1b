//! Manifests: the hashes of a disk, cluster by cluster, as a text that is written and read in one pass.
//!
//! ```text
//! zebu-manifest 2
//! virtual-size 1073741824
//! cluster-size 65536
//! source 03b1... 92ce... -   which image it is of: see origin.rs
//! previous 5ac3...           an increment by a manifest: the hash at the end of that manifest
//! changes-only               only before an end: clusters that have not changed stand as zero, for they were not read
//! zero 0 16                  clusters 0 to 15 read as zero
//! 16 6ae1...                 cluster 16, and its BLAKE3 hash
//! unreadable 77824 4096      these bytes of the disk (offset, length) could not be read: zero in image and hashes
//! checkpoint 2097152         so many bytes of the disk were durable in the image when this was written
//! disk 03f2...               BLAKE3 of the hashes of all clusters, in order: see disk_hash.rs
//! end 99c0...                BLAKE3 of all bytes of the manifest before this line
//! ```
//!
//! The last cluster of a disk is hashed as far as the disk reaches. In the disk's hash zero clusters in a row count once,
//! with their number; in version 1, which is read and gone on with, each counts by itself. What could not be read of the clusters before a checkpoint stands before it, so that a backup that is
//! resumed knows of it; only manifests of backups that skipped something have such lines.

mod index;
mod read;
mod write;

pub use index::{ManifestIndex, ManifestRun};
pub(in crate::jobs) use read::{
    ManifestReader, check_whole, hash_of_whole, is_ended, last_checkpoint, preamble_of, unreadable_of,
};
pub(in crate::jobs) use write::ManifestWriter;

use crate::jobs::origin::Origin;
use rustix::fs::{Advice, fadvise};
use std::fs::File;

/// The content of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::jobs) enum Digest {
    /// Zeroes.
    Zero,
    /// Bytes of this BLAKE3 hash.
    Hash([u8; 32]),
}

impl Digest {
    /// Of the bytes of one cluster.
    pub(in crate::jobs) fn of(bytes: &[u8]) -> Self {
        if super::zeros::is_zero(bytes) { Self::Zero } else { Self::Hash(blake3::hash(bytes).into()) }
    }
}

/// The disk that a manifest speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::jobs) struct Subject {
    /// Bytes of the virtual disk.
    pub(in crate::jobs) virtual_size: u64,
    /// Bytes of a cluster.
    pub(in crate::jobs) cluster_size: u64,
}

impl Subject {
    /// Clusters of the disk.
    pub(in crate::jobs) fn clusters(&self) -> u64 {
        self.virtual_size.div_ceil(self.cluster_size)
    }
}

/// The clusters that an unfinished manifest tells of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::jobs) enum Coverage {
    /// All of them.
    All,
    /// The clusters that have changed since the previous backup. The others stand as zero.
    Changes,
}

/// The facts of a backup that its manifest states before any cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::jobs) struct Preamble {
    /// Which image it is of. None: an older program has written it.
    pub(in crate::jobs) origin: Option<Origin>,
    /// The hash at the end of the manifest of the previous backup. None: it is not by one, or an older program has
    /// written it.
    pub(in crate::jobs) previous: Option<[u8; 32]>,
    /// The clusters that it tells of.
    pub(in crate::jobs) coverage: Coverage,
}

fn hex(bytes: &[u8; 32]) -> String {
    blake3::Hash::from(*bytes).to_hex().to_string()
}

/// Gives the pages of a file back that nobody has to write any more. To fail at that does no harm.
fn forget_pages(file: &File) {
    let _ = fadvise(file, 0, None, Advice::DontNeed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Cancel;
    use std::ops::Range;
    use std::path::Path;

    const SUBJECT: Subject = Subject { virtual_size: 10 * 4096 + 512, cluster_size: 4096 };

    fn preamble() -> Preamble {
        let origin = Origin::parse("0123456789abcdef", "0011223344556677", "-");
        Preamble { origin, previous: Some([0x5a; 32]), coverage: Coverage::All }
    }

    /// A manifest of version 1 as the description has it: each cluster counts by its hash, a zero cluster by 32 zeroes.
    fn write_first_version(path: &Path, clusters: usize, ending: &str) -> String {
        let mut text = "zebu-manifest 1\nvirtual-size 41472\ncluster-size 4096\n".to_owned();
        let mut counted = Vec::new();
        for (i, digest) in digests().into_iter().enumerate() {
            let bytes = match digest {
                Digest::Zero => [0; 32],
                Digest::Hash(hash) => hash,
            };
            counted.extend(bytes);
            if i < clusters {
                text += &match digest {
                    Digest::Zero => format!("zero {i} 1\n"),
                    Digest::Hash(hash) => format!("{i} {}\n", hex(&hash)),
                };
            }
        }
        let disk = blake3::hash(&counted).to_hex().to_string();
        text += &ending.replace("HASH", &disk);
        if ending.starts_with("disk") {
            text += &format!("end {}\n", blake3::hash(text.as_bytes()).to_hex());
        }
        std::fs::write(path, text).unwrap();
        disk
    }

    #[test]
    fn manifests_of_the_first_version_are_read_and_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let disk = write_first_version(&path, 11, "disk HASH\n");
        let never = Cancel::new();
        assert_eq!(check_whole(&path, &never, |_| None).unwrap(), SUBJECT);
        let mut reader = ManifestReader::open(&path, &never).unwrap();
        reader.pass(11).unwrap();
        assert_eq!(reader.finish().unwrap(), disk);

        write_first_version(&path, 6, "checkpoint 24576\n");
        assert_eq!(
            last_checkpoint(&path, SUBJECT).unwrap(),
            Some((24576, Preamble { origin: None, previous: None, coverage: Coverage::All }))
        );
        let (mut writer, done) = ManifestWriter::resume(&path, SUBJECT, &preamble(), &never, |_| ()).unwrap();
        assert_eq!(done, 24576);
        digests().into_iter().skip(6).for_each(|digest| writer.add(digest).unwrap());
        assert_eq!(writer.finish().unwrap(), disk);
        assert_eq!(check_whole(&path, &never, |_| None).unwrap(), SUBJECT);
        std::fs::write(&path, "zebu-manifest 3\n").unwrap();
        let error = ManifestReader::open(&path, &never).err().unwrap();
        assert!(error.message().contains("newer"), "{error}");
    }

    #[test]
    fn a_run_of_zeroes_costs_the_same_whatever_its_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        // Hashed one by one, they would take years.
        let subject = Subject { virtual_size: u64::MAX - 511, cluster_size: 512 };
        let mut writer = ManifestWriter::begin(&path, subject, &preamble()).unwrap();
        writer.add_zeroes(subject.clusters() / 2).unwrap();
        writer.checkpoint(subject.clusters() / 2 * 512).unwrap();
        drop(writer);
        let never = Cancel::new();
        let (mut writer, _) = ManifestWriter::resume(&path, subject, &preamble(), &never, |_| ()).unwrap();
        writer.add(Digest::of(&[1; 512])).unwrap();
        writer.add_zeroes(subject.clusters() - subject.clusters() / 2 - 1).unwrap();
        let disk = writer.finish().unwrap();
        assert_eq!(check_whole(&path, &never, |_| None).unwrap(), subject);
        let mut reader = ManifestReader::open(&path, &never).unwrap();
        reader.pass(subject.clusters()).unwrap();
        assert_eq!(reader.finish().unwrap(), disk);
    }

    fn digests() -> Vec<Digest> {
        (0..11u8).map(|i| if i % 4 < 2 { Digest::Zero } else { Digest::of(&[i; 64]) }).collect()
    }

    fn write(path: &Path) -> String {
        let mut writer = ManifestWriter::begin(path, SUBJECT, &preamble()).unwrap();
        for (i, digest) in digests().into_iter().enumerate() {
            if [3, 4, 7].contains(&i) {
                writer.add_unreadable(i as u64 * 4096 + 512, 1024).unwrap();
            }
            writer.add(digest).unwrap();
            if i == 4 {
                writer.checkpoint(5 * 4096).unwrap();
            }
        }
        writer.finish().unwrap()
    }

    #[test]
    fn what_was_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let disk = write(&path);
        assert_eq!(check_whole(&path, &Cancel::new(), |_| None).unwrap(), SUBJECT);
        let mut reader = ManifestReader::open(&path, &Cancel::new()).unwrap();
        for digest in digests() {
            assert_eq!(reader.next_digest().unwrap(), digest);
        }
        assert_eq!(reader.finish().unwrap(), disk);
        let mut unreadable = Vec::new();
        unreadable_of(&path, |range| unreadable.push(range.start)).unwrap();
        assert_eq!(unreadable, [3 * 4096 + 512, 4 * 4096 + 512, 7 * 4096 + 512]);
    }

    #[test]
    fn every_change_of_a_byte_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        write(&path);
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            std::fs::write(&path, &changed).unwrap();
            let unfit = |subject| (subject != SUBJECT).then(|| "another disk".to_owned());
            assert!(check_whole(&path, &Cancel::new(), unfit).is_err(), "byte {at}");
        }
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(check_whole(&path, &Cancel::new(), |_| None).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn one_that_was_cut_off_goes_on_from_its_last_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let disk = write(&path);
        let whole = std::fs::read(&path).unwrap();
        let mut from_checkpoint = 0;
        for len in 0..=whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let mut unreadable = 0;
            let note = |range: Range<u64>| unreadable += range.end - range.start;
            let Ok((mut writer, done)) =
                ManifestWriter::resume(&path, SUBJECT, &preamble(), &Cancel::new(), note)
            else {
                assert!(len < 70, "{len} bytes");
                continue;
            };
            from_checkpoint += usize::from(done == 5 * 4096);
            // Those before the checkpoint; the rest comes again.
            assert_eq!(unreadable, if done == 0 { 0 } else { 2 * 1024 });
            let expected = (done > 0).then(|| (done, preamble()));
            assert_eq!(last_checkpoint(&path, SUBJECT).unwrap(), expected);
            for digest in digests().into_iter().skip((done / 4096) as usize) {
                writer.add(digest).unwrap();
            }
            assert_eq!(writer.finish().unwrap(), disk);
            assert_eq!(check_whole(&path, &Cancel::new(), |_| None).unwrap(), SUBJECT);
        }
        assert!(from_checkpoint > 100);
        let other = Subject { virtual_size: 1 << 20, ..SUBJECT };
        assert!(ManifestWriter::resume(&path, other, &preamble(), &Cancel::new(), |_| ()).is_err());
    }
}
