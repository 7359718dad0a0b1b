//! Reading a manifest.

use super::{Coverage, Digest, Preamble, Subject, forget_pages, hex};
use crate::jobs::disk_hash::{DiskHash, Rule};
use crate::jobs::origin::Origin;
use crate::jobs::staging::from_io;
use crate::progress::Cancel;
use crate::{Error, ErrorKind, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Longest line that a manifest has, with room to spare.
const MAX_LINE: u64 = 256;
/// Lines before the first cluster's.
const HEAD_LINES: usize = 3;
/// Bytes that are read between two times that the page cache is told to forget them.
const FORGET: u64 = 4 << 20;

pub(super) enum Line {
    Source(Origin),
    Previous([u8; 32]),
    ChangesOnly,
    Zero { start: u64, count: u64 },
    Cluster { cluster: u64, digest: [u8; 32] },
    Unreadable(Range<u64>),
    Checkpoint(u64),
    Disk([u8; 32]),
    End([u8; 32]),
}

/// A manifest that is being read.
pub(in crate::jobs) struct ManifestReader {
    path: PathBuf,
    file: BufReader<File>,
    pub(super) whole: blake3::Hasher,
    pub(super) rule: Rule,
    disk: DiskHash,
    /// Bytes read.
    offset: u64,
    /// Where of them the page cache was last told that they are not needed.
    forgotten: u64,
    /// The cluster that the next line is of.
    next: u64,
    pub(in crate::jobs) subject: Subject,
    /// Zero clusters that were read and not given out.
    zeroes: u64,
}

/// The last checkpoint of a manifest, and what stands before.
pub(super) struct LastCheckpoint {
    pub(super) preamble: Preamble,
    /// Where it ends, in bytes of the manifest, and of how many bytes of the disk it is, if there is one.
    pub(super) at: Option<(u64, u64)>,
}

pub(super) fn reader_error(path: &Path, why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the manifest can't be used: {why}")).on(path)
}

impl ManifestReader {
    /// Opens a manifest and reads what disk it is of. `cancel` ends what takes long.
    ///
    /// # Errors
    /// It can't be read, or is none.
    pub(in crate::jobs) fn open(path: &Path, cancel: &Cancel) -> Result<Self> {
        let file = File::open(path).map_err(|e| from_io(path, "can't open the manifest", &e))?;
        Self::of(path, file, cancel)
    }

    /// Reads what disk a manifest is of; `file` is at its beginning.
    ///
    /// # Errors
    /// It can't be read, or is none.
    pub(super) fn of(path: &Path, file: File, cancel: &Cancel) -> Result<Self> {
        let mut reader = Self {
            path: path.to_owned(),
            file: BufReader::new(file),
            whole: blake3::Hasher::new(),
            rule: Rule::Runs,
            disk: DiskHash::new(Rule::Runs, cancel),
            offset: 0,
            forgotten: 0,
            next: 0,
            subject: Subject { virtual_size: 0, cluster_size: 1 },
            zeroes: 0,
        };
        reader.rule = match reader.text()?.as_deref() {
            Some("zebu-manifest 1") => Rule::Clusters,
            Some("zebu-manifest 2") => Rule::Runs,
            Some(other) if other.starts_with("zebu-manifest ") => {
                return Err(reader.wrong("its version is newer than 2: a newer program has made it"));
            }
            _ => return Err(reader.wrong("it does not begin with 'zebu-manifest 1' or 2")),
        };
        reader.disk = DiskHash::new(reader.rule, cancel);
        let virtual_size = reader.number_after("virtual-size")?;
        let cluster_size = reader.number_after("cluster-size")?;
        if !cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&cluster_size) {
            return Err(reader.wrong("its cluster size is none"));
        }
        reader.subject = Subject { virtual_size, cluster_size };
        Ok(reader)
    }

    /// Opens a manifest that is of this disk.
    pub(super) fn open_for(path: &Path, subject: Subject, cancel: &Cancel) -> Result<Self> {
        let reader = Self::open(path, cancel)?;
        if reader.subject == subject {
            return Ok(reader);
        }
        Err(reader.wrong(&format!(
            "it is of a disk of {} bytes in clusters of {}, this one has {} bytes in clusters of {}",
            reader.subject.virtual_size,
            reader.subject.cluster_size,
            subject.virtual_size,
            subject.cluster_size
        )))
    }

    /// Bytes of the manifest that were read.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    fn wrong(&self, why: &str) -> Error {
        reader_error(&self.path, why)
    }

    /// The next line, without its end; hashed.
    fn text(&mut self) -> Result<Option<String>> {
        let mut bytes = Vec::new();
        let read = (&mut self.file).take(MAX_LINE).read_until(b'\n', &mut bytes);
        read.map_err(|e| from_io(&self.path, "can't read the manifest", &e))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if !bytes.starts_with(b"end ") {
            self.whole.update(&bytes);
        }
        self.offset += bytes.len() as u64;
        if self.offset - self.forgotten >= FORGET {
            self.forgotten = self.offset;
            forget_pages(self.file.get_ref());
        }
        if bytes.pop() != Some(b'\n') {
            return Err(self.wrong("it ends within a line, or a line is too long"));
        }
        String::from_utf8(bytes).map(Some).map_err(|_| self.wrong("it is not text"))
    }

    fn number_after(&mut self, key: &str) -> Result<u64> {
        let line = self.text()?.unwrap_or_default();
        let number = line.strip_prefix(key).and_then(|rest| rest.trim_start().parse().ok());
        number.ok_or_else(|| self.wrong(&format!("it has no {key}")))
    }

    pub(super) fn line(&mut self) -> Result<Option<Line>> {
        let Some(text) = self.text()? else { return Ok(None) };
        let mut words = text.split(' ');
        let (first, second, third) = (words.next().unwrap_or_default(), words.next(), words.next());
        let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok());
        let hash = |word: Option<&str>| {
            word.and_then(|word| blake3::Hash::from_hex(word).ok()).map(<[u8; 32]>::from)
        };
        let may_begin = self.next == 0 && self.rule == Rule::Runs;
        let parsed = match first {
            "source" if may_begin => match (second, third, words.next()) {
                (Some(name), Some(file), Some(snapshot)) => {
                    Origin::parse(name, file, snapshot).map(Line::Source)
                }
                _ => None,
            },
            "previous" if may_begin => hash(second).map(Line::Previous),
            "changes-only" if may_begin => Some(Line::ChangesOnly),
            "zero" => match (number(second), number(third)) {
                (Some(start), Some(count)) if start == self.next && count > 0 => {
                    self.next = self.next.saturating_add(count);
                    Some(Line::Zero { start, count })
                }
                _ => None,
            },
            "unreadable" => match (number(second), number(third)) {
                (Some(start), Some(len)) if len > 0 => start
                    .checked_add(len)
                    .filter(|end| *end <= self.subject.virtual_size)
                    .map(|end| Line::Unreadable(start..end)),
                _ => None,
            },
            "checkpoint" => number(second).map(Line::Checkpoint),
            "disk" => hash(second).map(Line::Disk),
            "end" => hash(second).map(Line::End),
            _ => match (number(Some(first)), hash(second)) {
                (Some(cluster), Some(digest)) if cluster == self.next => {
                    self.next += 1;
                    Some(Line::Cluster { cluster, digest })
                }
                _ => None,
            },
        };
        if parsed.is_none() || self.next > self.subject.clusters() {
            return Err(self.wrong(&format!("line '{text}' does not belong there")));
        }
        Ok(parsed)
    }

    /// The last checkpoint. What comes behind it may be cut off anywhere.
    pub(super) fn last_checkpoint(mut self) -> LastCheckpoint {
        let mut preamble = Preamble { origin: None, previous: None, coverage: Coverage::All };
        let mut at = None;
        while let Ok(Some(line)) = self.line() {
            match line {
                Line::Source(origin) => preamble.origin = Some(origin),
                Line::Previous(hash) => preamble.previous = Some(hash),
                Line::ChangesOnly => preamble.coverage = Coverage::Changes,
                Line::Checkpoint(bytes) => at = Some((self.offset, bytes)),
                Line::Zero { .. } | Line::Cluster { .. } | Line::Unreadable(_) => {}
                Line::Disk(_) | Line::End(_) => break,
            }
        }
        LastCheckpoint { preamble, at }
    }

    /// The next cluster, or all zero clusters from the next one on: the first of them, how many they are, and what they
    /// hold. `None`: nothing follows.
    pub(in crate::jobs) fn next_run(&mut self) -> Result<Option<(u64, u64, Digest)>> {
        while let Some(line) = self.line()? {
            match line {
                Line::Zero { start, count } => return Ok(Some((start, count, Digest::Zero))),
                Line::Cluster { cluster, digest } => return Ok(Some((cluster, 1, Digest::Hash(digest)))),
                Line::Disk(_) | Line::End(_) => break,
                Line::Source(_)
                | Line::Previous(_)
                | Line::ChangesOnly
                | Line::Unreadable(_)
                | Line::Checkpoint(_) => {}
            }
        }
        Ok(None)
    }

    /// The digest of the next cluster.
    ///
    /// # Errors
    /// There is none, or the manifest is damaged.
    pub(in crate::jobs) fn next_digest(&mut self) -> Result<Digest> {
        loop {
            if self.zeroes > 0 {
                self.zeroes -= 1;
                self.disk.add_zeroes(1)?;
                return Ok(Digest::Zero);
            }
            match self.line()? {
                Some(Line::Zero { count, .. }) => self.zeroes = count,
                Some(Line::Cluster { digest, .. }) => {
                    self.disk.add(&digest);
                    return Ok(Digest::Hash(digest));
                }
                Some(Line::ChangesOnly) => {
                    return Err(self.wrong("it tells of changes only; the backup has not been finished"));
                }
                Some(Line::Source(_) | Line::Previous(_) | Line::Checkpoint(_) | Line::Unreadable(_)) => {}
                Some(Line::Disk(_) | Line::End(_)) | None => {
                    return Err(
                        self.wrong("it ends before the disk does; the backup may not have been finished")
                    );
                }
            }
        }
    }

    /// How many of the next clusters are known to be zero without reading further.
    pub(in crate::jobs) fn zeroes_ahead(&self) -> u64 {
        self.zeroes
    }

    /// Passes `count` of [`ManifestReader::zeroes_ahead`].
    pub(in crate::jobs) fn pass_zeroes(&mut self, count: u64) -> Result<()> {
        self.zeroes -= count;
        self.disk.add_zeroes(count)
    }

    /// Passes `count` clusters, whatever they hold.
    pub(in crate::jobs) fn pass(&mut self, count: u64) -> Result<()> {
        let mut left = count;
        while left > 0 {
            let zeroes = self.zeroes.min(left);
            self.pass_zeroes(zeroes)?;
            left -= zeroes;
            if left > 0 {
                self.next_digest()?;
                left -= 1;
            }
        }
        Ok(())
    }

    /// Reads the end, and checks the hashes of disk and manifest; returns that of the disk, as text.
    pub(in crate::jobs) fn finish(self) -> Result<String> {
        self.hashes().map(|(disk, _)| disk)
    }

    /// The same; returns also the hash of the manifest.
    fn hashes(mut self) -> Result<(String, [u8; 32])> {
        let mut disk = None;
        loop {
            match self.line()? {
                Some(Line::Source(_) | Line::Previous(_) | Line::Checkpoint(_) | Line::Unreadable(_)) => {}
                Some(Line::Disk(found)) => disk = Some(found),
                Some(Line::End(found)) => {
                    let (Some(disk), true) = (disk, self.whole.finalize() == blake3::Hash::from(found))
                    else {
                        return Err(self.wrong("it has been changed since it was written"));
                    };
                    if blake3::Hash::from(self.disk.clone().finish()) != blake3::Hash::from(disk) {
                        return Err(self.wrong("the hash of the disk is not that of its clusters"));
                    }
                    return Ok((hex(&disk), found));
                }
                Some(Line::ChangesOnly | Line::Zero { .. } | Line::Cluster { .. }) => {
                    return Err(self.wrong("it has more clusters than the disk"));
                }
                None => return Err(self.wrong("it has no end; the backup may not have been finished")),
            }
        }
    }
}

impl Drop for ManifestReader {
    fn drop(&mut self) {
        forget_pages(self.file.get_ref());
    }
}

/// Reads a whole manifest and checks it, so that nothing of a damaged one is used. `unfit` says first why it can't be
/// used for its disk; the work is bounded by a disk that it is used for.
pub(in crate::jobs) fn check_whole(
    path: &Path,
    cancel: &Cancel,
    unfit: impl FnOnce(Subject) -> Option<String>,
) -> Result<Subject> {
    look_at_whole(path, cancel, unfit).map(|(subject, _)| subject)
}

/// The hash of a whole manifest, which tells it from all others; it is checked as by [`check_whole`].
pub(in crate::jobs) fn hash_of_whole(
    path: &Path,
    cancel: &Cancel,
    unfit: impl FnOnce(Subject) -> Option<String>,
) -> Result<[u8; 32]> {
    look_at_whole(path, cancel, unfit).map(|(_, hash)| hash)
}

fn look_at_whole(
    path: &Path,
    cancel: &Cancel,
    unfit: impl FnOnce(Subject) -> Option<String>,
) -> Result<(Subject, [u8; 32])> {
    let mut reader = ManifestReader::open(path, cancel)?;
    let subject = reader.subject;
    if let Some(why) = unfit(subject) {
        return Err(Error::new(ErrorKind::InvalidArgument, why).on(path));
    }
    reader.pass(subject.clusters())?;
    reader.hashes().map(|(_, hash)| (subject, hash))
}

/// Tells what of the disk could not be read, by a whole manifest.
///
/// # Errors
/// It can't be read, or is none.
pub(in crate::jobs) fn unreadable_of(path: &Path, mut unreadable: impl FnMut(Range<u64>)) -> Result<()> {
    let mut reader = ManifestReader::open(path, &Cancel::new())?;
    while let Some(line) = reader.line()? {
        if let Line::Unreadable(range) = line {
            unreadable(range);
        }
    }
    Ok(())
}

/// The preamble of a manifest, and how many bytes of the disk its last checkpoint is of, if it has one. One that was cut
/// off within its first lines has none.
///
/// # Errors
/// It can't be read, or is of another disk.
pub(in crate::jobs) fn last_checkpoint(path: &Path, subject: Subject) -> Result<Option<(u64, Preamble)>> {
    let io = |e: &std::io::Error| from_io(path, "can't open the manifest", e);
    let mut head = Vec::new();
    let file = File::open(path).map_err(|e| io(&e))?;
    file.take(HEAD_LINES as u64 * MAX_LINE).read_to_end(&mut head).map_err(|e| io(&e))?;
    if head
        .split_inclusive(|byte| *byte == b'\n')
        .take(HEAD_LINES)
        .filter(|line| line.ends_with(b"\n"))
        .count()
        < HEAD_LINES
    {
        return Ok(None);
    }
    let found = ManifestReader::open_for(path, subject, &Cancel::new())?.last_checkpoint();
    Ok(found.at.map(|(_, done)| (done, found.preamble)))
}

/// Whether a manifest has been ended, and not been changed since.
pub(in crate::jobs) fn is_ended(path: &Path) -> bool {
    let Ok(mut reader) = ManifestReader::open(path, &Cancel::new()) else { return false };
    while let Ok(Some(line)) = reader.line() {
        if let Line::End(found) = line {
            return reader.whole.finalize() == blake3::Hash::from(found);
        }
    }
    false
}

/// The lines of a manifest before its clusters.
///
/// # Errors
/// It can't be read, or is none.
pub(in crate::jobs) fn preamble_of(path: &Path) -> Result<Preamble> {
    Ok(ManifestReader::open(path, &Cancel::new())?.last_checkpoint().preamble)
}
