//! Single digests of a manifest, by an index in memory.

use super::Digest;
use super::read::ManifestReader;
use crate::jobs::staging::from_io;
use crate::progress::Cancel;
use crate::{Error, ErrorKind, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Lines from one mark of the index to the next.
const LINES: usize = 64;

/// A whole manifest, to look at single clusters: which bytes a disk must have.
///
/// The manifest is read and checked once, and stays open. 16 bytes of memory are kept for 64 of its lines.
#[derive(Debug)]
pub struct ManifestIndex {
    path: PathBuf,
    file: File,
    virtual_size: u64,
    cluster_size: u64,
    /// Each 64th line: its first cluster, and where it begins.
    marks: Vec<Mark>,
    /// Where the last cluster's line ends.
    end: u64,
}

#[derive(Debug, Clone, Copy)]
struct Mark {
    cluster: u64,
    offset: u64,
}

/// A run of clusters of which a manifest says the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ManifestRun {
    /// Bytes of the disk from the offset that was asked for to the end of the run; at most to the end of the disk.
    pub len: u64,
    /// Whether the run reads as zero.
    pub zero: bool,
}

impl ManifestIndex {
    /// Reads and checks a manifest. `cancel` ends what takes long.
    ///
    /// # Errors
    /// It can't be read, is damaged, or is of an unfinished backup; [`ErrorKind::Cancelled`].
    pub fn open(path: &Path, cancel: &Cancel) -> Result<Self> {
        let file = File::open(path).map_err(|e| from_io(path, "can't open the manifest", &e))?;
        let again = file.try_clone().map_err(|e| from_io(path, "can't read the manifest", &e))?;
        let mut reader = ManifestReader::of(path, again, cancel)?;
        let subject = reader.subject;
        let (mut marks, mut lines, mut next) = (Vec::new(), 0, 0);
        while next < subject.clusters() {
            if lines % LINES == 0 {
                marks.push(Mark { cluster: next, offset: reader.offset() });
            }
            lines += 1;
            // The first cluster of a line; those of a run of zeroes are counted with it.
            reader.next_digest()?;
            let zeroes = reader.zeroes_ahead();
            reader.pass_zeroes(zeroes)?;
            next += 1 + zeroes;
        }
        let end = reader.offset();
        reader.finish()?;
        let (virtual_size, cluster_size) = (subject.virtual_size, subject.cluster_size);
        Ok(Self { path: path.to_owned(), file, virtual_size, cluster_size, marks, end })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the disk that it is of.
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// Bytes of a cluster, each of which has a hash of its own; a power of two.
    pub fn cluster_size(&self) -> u64 {
        self.cluster_size
    }

    /// Whether these bytes are those of the cluster that begins at `offset` of the disk. The last cluster ends with the disk.
    ///
    /// # Errors
    /// The manifest was changed meanwhile, or can't be read.
    pub fn matches(&self, offset: u64, bytes: &[u8]) -> Result<bool> {
        Ok(self.look(offset / self.cluster_size)?.digest == Digest::of(bytes))
    }

    /// The run at `offset` of the disk, in bytes.
    ///
    /// # Errors
    /// The manifest was changed meanwhile, or can't be read; the offset is past the end of the disk.
    pub fn run_at(&self, offset: u64) -> Result<ManifestRun> {
        let found = self.look(offset / self.cluster_size)?;
        let end = found.end.saturating_mul(self.cluster_size).min(self.virtual_size);
        Ok(ManifestRun { len: end.saturating_sub(offset), zero: found.digest == Digest::Zero })
    }

    fn look(&self, cluster: u64) -> Result<Found> {
        let number = self.marks.partition_point(|mark| mark.cluster <= cluster);
        let mark = number.checked_sub(1).and_then(|number| self.marks.get(number));
        let Some(mark) = mark.filter(|_| cluster < self.virtual_size.div_ceil(self.cluster_size)) else {
            let message = format!("the manifest's disk has no cluster {cluster}");
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(&self.path));
        };
        let end = self.marks.get(number).map_or(self.end, |next| next.offset);
        let mut text = vec![0; (end - mark.offset) as usize];
        let read = self.file.read_exact_at(&mut text, mark.offset);
        read.map_err(|e| from_io(&self.path, "can't read the manifest", &e))?;
        let found = std::str::from_utf8(&text).ok().and_then(|text| find(text, cluster));
        found.ok_or_else(|| {
            let message = "the manifest was changed while it was used";
            Error::new(ErrorKind::Corrupt, message).on(&self.path)
        })
    }
}

/// A cluster that was looked for: its digest, and the first cluster behind those of the same line.
struct Found {
    digest: Digest,
    end: u64,
}

/// The line of a cluster among some that were checked before.
fn find(lines: &str, cluster: u64) -> Option<Found> {
    let wanted = cluster.to_string();
    lines.lines().find_map(|line| {
        let mut words = line.split(' ');
        match (words.next()?, words.next()) {
            ("zero", Some(start)) => {
                let (start, count): (u64, u64) = (start.parse().ok()?, words.next()?.parse().ok()?);
                let end = start.checked_add(count)?;
                (start..end).contains(&cluster).then_some(Found { digest: Digest::Zero, end })
            }
            (first, Some(hash)) if first == wanted => {
                let digest = Digest::Hash(blake3::Hash::from_hex(hash).ok()?.into());
                Some(Found { digest, end: cluster + 1 })
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::{ManifestWriter, Preamble, Subject};
    use super::*;
    use crate::jobs::manifest::Coverage;

    const CLUSTER: usize = 4096;

    /// Every third cluster, and the 300 from 1000 on, are zero; the last one is short.
    fn content(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for (i, cluster) in bytes.chunks_mut(CLUSTER).enumerate() {
            if i % 3 != 0 && !(1000..1300).contains(&i) {
                cluster.fill(i as u8 | 1);
                cluster[0] = (i >> 8) as u8;
            }
        }
        bytes
    }

    fn written(path: &Path, bytes: &[u8]) {
        let subject = Subject { virtual_size: bytes.len() as u64, cluster_size: CLUSTER as u64 };
        let preamble = Preamble { origin: None, previous: None, coverage: Coverage::All };
        let mut writer = ManifestWriter::begin(path, subject, &preamble).unwrap();
        for cluster in bytes.chunks(CLUSTER) {
            writer.add(Digest::of(cluster)).unwrap();
        }
        writer.finish().unwrap();
    }

    #[test]
    fn each_cluster_is_found_whatever_was_asked_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let bytes = content(2000 * CLUSTER + 512);
        written(&path, &bytes);
        let index = ManifestIndex::open(&path, &Cancel::new()).unwrap();
        assert_eq!((index.virtual_size(), index.cluster_size()), (bytes.len() as u64, CLUSTER as u64));
        let count = bytes.len().div_ceil(CLUSTER);
        for turn in 0..count {
            let cluster = turn * 1237 % count;
            let at = cluster * CLUSTER;
            let own = &bytes[at..bytes.len().min(at + CLUSTER)];
            assert!(index.matches(at as u64, own).unwrap(), "{cluster}");
            let mut other = own.to_vec();
            other[turn % own.len()] ^= 1 << (turn % 8);
            assert!(!index.matches(at as u64, &other).unwrap(), "{cluster}");
            let run = index.run_at(at as u64 + 5).unwrap();
            assert_eq!(run.zero, own.iter().all(|byte| *byte == 0), "{cluster}");
            let end = at + 5 + run.len as usize;
            assert!(end == bytes.len() || end.is_multiple_of(CLUSTER) && end > at, "{cluster} {run:?}");
            assert!(!run.zero || bytes[at + 5..end].iter().all(|byte| *byte == 0), "{cluster} {run:?}");
        }
        assert_eq!(index.run_at(1000 * CLUSTER as u64).unwrap().len, 300 * CLUSTER as u64);
        assert!(index.run_at(bytes.len() as u64 + CLUSTER as u64).is_err());
    }

    #[test]
    fn a_manifest_that_is_damaged_or_changed_later_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let bytes = content(100 * CLUSTER);
        written(&path, &bytes);
        let index = ManifestIndex::open(&path, &Cancel::new()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\n2 ", "\n9 ")).unwrap();
        assert!(index.matches(2 * CLUSTER as u64, &bytes[2 * CLUSTER..3 * CLUSTER]).is_err());
        let error = ManifestIndex::open(&path, &Cancel::new()).unwrap_err();
        assert!(error.to_string().contains("manifest"), "{error}");
        std::fs::write(&path, &text[..text.len() / 2]).unwrap();
        assert!(ManifestIndex::open(&path, &Cancel::new()).is_err());
    }
}
