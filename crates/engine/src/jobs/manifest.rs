//! Manifests: the hashes of a disk, cluster by cluster, as a text that is written and read in one pass.
//!
//! ```text
//! zebu-manifest 1
//! virtual-size 1073741824
//! cluster-size 65536
//! zero 0 16                  clusters 0 to 15 read as zero
//! 16 6ae1...                 cluster 16, and its BLAKE3 hash
//! unreadable 77824 4096      these bytes of the disk (offset, length) could not be read: zero in image and hashes
//! checkpoint 2097152         so many bytes of the disk were durable in the image when this was written
//! disk 03f2...               BLAKE3 of the hashes of all clusters, in order
//! end 99c0...                BLAKE3 of all bytes of the manifest before this line
//! ```
//!
//! The last cluster of a disk is hashed as far as the disk reaches. A zero cluster counts in the disk's hash with 32
//! zero bytes. What could not be read of the clusters before a checkpoint stands before it, so that a backup that is
//! resumed knows of it; only manifests of backups that skipped something have such lines.

use crate::jobs::staging::from_io;
use crate::{Error, ErrorKind, Result};
use rustix::fs::{Advice, fadvise};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Longest line that a manifest has, with room to spare.
const MAX_LINE: u64 = 256;
/// Lines before the first cluster's.
const HEAD_LINES: usize = 3;
/// Bytes that are read between two times that the page cache is told to forget them.
const FORGET: u64 = 4 << 20;
/// What a zero cluster counts as.
const ZERO: [u8; 32] = [0; 32];

/// What a cluster holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digest {
    /// Zeroes.
    Zero,
    /// Bytes of this BLAKE3 hash.
    Hash([u8; 32]),
}

impl Digest {
    /// Of the bytes of one cluster.
    pub(super) fn of(bytes: &[u8]) -> Self {
        if super::zeros::is_zero(bytes) { Self::Zero } else { Self::Hash(blake3::hash(bytes).into()) }
    }

    fn bytes(&self) -> &[u8; 32] {
        match self {
            Self::Zero => &ZERO,
            Self::Hash(hash) => hash,
        }
    }
}

/// The disk that a manifest speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Subject {
    /// Bytes of the virtual disk.
    pub(super) virtual_size: u64,
    /// Bytes of a cluster.
    pub(super) cluster_size: u64,
}

impl Subject {
    /// Clusters of the disk.
    pub(super) fn clusters(&self) -> u64 {
        self.virtual_size.div_ceil(self.cluster_size)
    }
}

/// A manifest that is being written. Clusters come in order.
pub(super) struct ManifestWriter {
    path: PathBuf,
    file: BufWriter<File>,
    whole: blake3::Hasher,
    disk: blake3::Hasher,
    /// The next cluster.
    next: u64,
    /// Zero clusters before it that are not written yet.
    zeroes: u64,
    line: String,
    /// What went wrong first.
    failed: Option<Error>,
}

fn hex(bytes: &[u8; 32]) -> String {
    blake3::Hash::from(*bytes).to_hex().to_string()
}

impl ManifestWriter {
    /// Begins a manifest in an empty file.
    pub(super) fn begin(path: &Path, subject: Subject) -> Result<Self> {
        let file = File::create(path).map_err(|e| from_io(path, "can't make the manifest", &e))?;
        let mut writer = Self::over(path, file);
        let Subject { virtual_size, cluster_size } = subject;
        writer
            .put(&format!("zebu-manifest 1\nvirtual-size {virtual_size}\ncluster-size {cluster_size}\n"))?;
        Ok(writer)
    }

    fn over(path: &Path, file: File) -> Self {
        Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
            whole: blake3::Hasher::new(),
            disk: blake3::Hasher::new(),
            next: 0,
            zeroes: 0,
            line: String::new(),
            failed: None,
        }
    }

    /// Goes on with a manifest that was not finished, from its last checkpoint; returns also how many bytes of the
    /// disk that was. `unreadable` is told what could not be read of them.
    ///
    /// # Errors
    /// It is none, or one of another disk.
    pub(super) fn resume(
        path: &Path,
        subject: Subject,
        mut unreadable: impl FnMut(Range<u64>),
    ) -> Result<(Self, u64)> {
        let Some((end, done)) = ManifestReader::open_for(path, subject)?.last_checkpoint() else {
            return Self::begin(path, subject).map(|writer| (writer, 0));
        };
        let io = |e: &std::io::Error| from_io(path, "can't go on with the manifest", e);
        let mut file = File::options().read(true).write(true).open(path).map_err(|e| io(&e))?;
        file.set_len(end).map_err(|e| io(&e))?;
        file.seek(SeekFrom::End(0)).map_err(|e| io(&e))?;
        let mut writer = Self::over(path, file);
        let mut reader = ManifestReader::open(path)?;
        while let Some(line) = reader.line()? {
            match line {
                Line::Zero { count, .. } => writer.hash_zeroes(count),
                Line::Cluster { digest, .. } => writer.hash(&digest),
                Line::Unreadable(range) => unreadable(range),
                Line::Checkpoint(_) | Line::Disk(_) | Line::End(_) => {}
            }
        }
        writer.whole = reader.whole.clone();
        if writer.next != done.div_ceil(subject.cluster_size) {
            return Err(reader_error(path, "its last checkpoint does not fit its clusters"));
        }
        Ok((writer, done))
    }

    fn hash(&mut self, digest: &[u8; 32]) {
        self.disk.update(digest);
        self.next += 1;
    }

    fn hash_zeroes(&mut self, count: u64) {
        hash_zeroes(&mut self.disk, count);
        self.next += count;
    }

    fn put(&mut self, text: &str) -> Result<()> {
        self.whole.update(text.as_bytes());
        let written = self.file.write_all(text.as_bytes());
        self.note(written, "can't write the manifest")
    }

    /// After a failure nothing more is noted: a checkpoint behind a gap would not be one.
    fn note(&mut self, result: std::io::Result<()>, what: &str) -> Result<()> {
        let result = match &self.failed {
            Some(error) => return Err(error.clone()),
            None => result.map_err(|e| from_io(&self.path, what, &e)),
        };
        self.failed = result.as_ref().err().cloned();
        result
    }

    fn put_zeroes(&mut self) -> Result<()> {
        let count = std::mem::take(&mut self.zeroes);
        if count == 0 {
            return Ok(());
        }
        self.put(&format!("zero {} {count}\n", self.next - count))
    }

    /// Adds the next `count` clusters, all of them zero.
    pub(super) fn add_zeroes(&mut self, count: u64) {
        self.hash_zeroes(count);
        self.zeroes += count;
    }

    /// Adds the next cluster.
    pub(super) fn add(&mut self, digest: Digest) -> Result<()> {
        let Digest::Hash(hash) = digest else {
            self.add_zeroes(1);
            return Ok(());
        };
        self.put_zeroes()?;
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        // Writing into a string does not fail.
        let _ = writeln!(line, "{} {}", self.next, hex(&hash));
        let put = self.put(&line);
        self.line = line;
        put?;
        self.hash(digest.bytes());
        Ok(())
    }

    /// Notes a range that could not be read, of the clusters that are added next.
    pub(super) fn add_unreadable(&mut self, offset: u64, len: u64) -> Result<()> {
        self.put(&format!("unreadable {offset} {len}\n"))
    }

    /// Notes that `bytes` of the disk are durable in the image, and makes that durable, too.
    pub(super) fn checkpoint(&mut self, bytes: u64) -> Result<()> {
        self.put_zeroes()?;
        self.put(&format!("checkpoint {bytes}\n"))?;
        self.sync()
    }

    fn sync(&mut self) -> Result<()> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        forget_pages(self.file.get_ref());
        self.note(synced, "can't make the manifest durable")
    }

    /// Ends the manifest and makes it durable; returns the hash of the disk, as text.
    pub(super) fn finish(&mut self) -> Result<String> {
        self.put_zeroes()?;
        let disk = self.disk.finalize().to_hex().to_string();
        self.put(&format!("disk {disk}\n"))?;
        let whole = self.whole.finalize().to_hex().to_string();
        self.put(&format!("end {whole}\n"))?;
        self.sync()?;
        Ok(disk)
    }
}

/// Gives the pages of a file back that nobody has to write any more. To fail at that does no harm.
fn forget_pages(file: &File) {
    let _ = fadvise(file, 0, None, Advice::DontNeed);
}

enum Line {
    Zero { count: u64 },
    Cluster { digest: [u8; 32] },
    Unreadable(Range<u64>),
    Checkpoint(u64),
    Disk([u8; 32]),
    End([u8; 32]),
}

/// A manifest that is being read.
pub(super) struct ManifestReader {
    path: PathBuf,
    file: BufReader<File>,
    whole: blake3::Hasher,
    disk: blake3::Hasher,
    /// Bytes read.
    offset: u64,
    /// Where of them the page cache was last told that they are not needed.
    forgotten: u64,
    /// The cluster that the next line is of.
    next: u64,
    pub(super) subject: Subject,
    /// Zero clusters that were read and not given out.
    zeroes: u64,
}

/// Adds the digests of `count` zero clusters.
fn hash_zeroes(disk: &mut blake3::Hasher, count: u64) {
    static MANY: [[u8; 32]; 2048] = [ZERO; 2048];
    for _ in 0..count / MANY.len() as u64 {
        disk.update(MANY.as_flattened());
    }
    for _ in 0..count % MANY.len() as u64 {
        disk.update(&ZERO);
    }
}

fn reader_error(path: &Path, why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the manifest can't be used: {why}")).on(path)
}

impl ManifestReader {
    /// Opens a manifest and reads what disk it is of.
    ///
    /// # Errors
    /// It can't be read, or is none.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| from_io(path, "can't open the manifest", &e))?;
        let mut reader = Self {
            path: path.to_owned(),
            file: BufReader::new(file),
            whole: blake3::Hasher::new(),
            disk: blake3::Hasher::new(),
            offset: 0,
            forgotten: 0,
            next: 0,
            subject: Subject { virtual_size: 0, cluster_size: 1 },
            zeroes: 0,
        };
        if reader.text()?.as_deref() != Some("zebu-manifest 1") {
            return Err(reader.wrong("it does not begin with 'zebu-manifest 1'"));
        }
        let virtual_size = reader.number_after("virtual-size")?;
        let cluster_size = reader.number_after("cluster-size")?;
        if !cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&cluster_size) {
            return Err(reader.wrong("its cluster size is none"));
        }
        reader.subject = Subject { virtual_size, cluster_size };
        Ok(reader)
    }

    /// Opens a manifest that is of this disk.
    fn open_for(path: &Path, subject: Subject) -> Result<Self> {
        let reader = Self::open(path)?;
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

    fn line(&mut self) -> Result<Option<Line>> {
        let Some(text) = self.text()? else { return Ok(None) };
        let mut words = text.split(' ');
        let (first, second, third) = (words.next().unwrap_or_default(), words.next(), words.next());
        let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok());
        let hash = |word: Option<&str>| {
            word.and_then(|word| blake3::Hash::from_hex(word).ok()).map(<[u8; 32]>::from)
        };
        let parsed = match first {
            "zero" => match (number(second), number(third)) {
                (Some(start), Some(count)) if start == self.next && count > 0 => {
                    self.next = self.next.saturating_add(count);
                    Some(Line::Zero { count })
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
                    Some(Line::Cluster { digest })
                }
                _ => None,
            },
        };
        if parsed.is_none() || self.next > self.subject.clusters() {
            return Err(self.wrong(&format!("line '{text}' does not belong there")));
        }
        Ok(parsed)
    }

    /// Where the last checkpoint ends, in bytes of the manifest, and of how many bytes of the disk it is. What comes
    /// behind it may be cut off anywhere.
    fn last_checkpoint(mut self) -> Option<(u64, u64)> {
        let mut last = None;
        while let Ok(Some(line)) = self.line() {
            match line {
                Line::Checkpoint(bytes) => last = Some((self.offset, bytes)),
                Line::Zero { .. } | Line::Cluster { .. } | Line::Unreadable(_) => {}
                Line::Disk(_) | Line::End(_) => break,
            }
        }
        last
    }

    /// What the next cluster holds.
    ///
    /// # Errors
    /// There is none, or the manifest is damaged.
    pub(super) fn next_digest(&mut self) -> Result<Digest> {
        loop {
            if self.zeroes > 0 {
                self.zeroes -= 1;
                self.disk.update(&ZERO);
                return Ok(Digest::Zero);
            }
            match self.line()? {
                Some(Line::Zero { count }) => self.zeroes = count,
                Some(Line::Cluster { digest }) => {
                    self.disk.update(&digest);
                    return Ok(Digest::Hash(digest));
                }
                Some(Line::Checkpoint(_) | Line::Unreadable(_)) => {}
                Some(Line::Disk(_) | Line::End(_)) | None => {
                    return Err(
                        self.wrong("it ends before the disk does; the backup may not have been finished")
                    );
                }
            }
        }
    }

    /// How many of the next clusters are known to be zero without reading further.
    pub(super) fn zeroes_ahead(&self) -> u64 {
        self.zeroes
    }

    /// Passes `count` of [`ManifestReader::zeroes_ahead`].
    pub(super) fn pass_zeroes(&mut self, count: u64) {
        self.zeroes -= count;
        hash_zeroes(&mut self.disk, count);
    }

    /// Reads the end, and checks the hashes of disk and manifest; returns that of the disk, as text.
    pub(super) fn finish(mut self) -> Result<String> {
        let mut disk = None;
        loop {
            match self.line()? {
                Some(Line::Checkpoint(_) | Line::Unreadable(_)) => {}
                Some(Line::Disk(found)) => disk = Some(found),
                Some(Line::End(found)) => {
                    let (Some(disk), true) = (disk, self.whole.finalize() == blake3::Hash::from(found))
                    else {
                        return Err(self.wrong("it has been changed since it was written"));
                    };
                    if self.disk.finalize() != blake3::Hash::from(disk) {
                        return Err(self.wrong("the hash of the disk is not that of its clusters"));
                    }
                    return Ok(hex(&disk));
                }
                Some(Line::Zero { .. } | Line::Cluster { .. }) => {
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
pub(super) fn check_whole(path: &Path, unfit: impl FnOnce(Subject) -> Option<String>) -> Result<Subject> {
    let mut reader = ManifestReader::open(path)?;
    let subject = reader.subject;
    if let Some(why) = unfit(subject) {
        return Err(Error::new(ErrorKind::InvalidArgument, why).on(path));
    }
    let mut left = subject.clusters();
    while left > 0 {
        reader.next_digest()?;
        let zeroes = reader.zeroes_ahead().min(left - 1);
        reader.pass_zeroes(zeroes);
        left -= 1 + zeroes;
    }
    reader.finish()?;
    Ok(subject)
}

/// Tells what of the disk could not be read, by a whole manifest.
///
/// # Errors
/// It can't be read, or is none.
pub(super) fn unreadable_of(path: &Path, mut unreadable: impl FnMut(Range<u64>)) -> Result<()> {
    let mut reader = ManifestReader::open(path)?;
    while let Some(line) = reader.line()? {
        if let Line::Unreadable(range) = line {
            unreadable(range);
        }
    }
    Ok(())
}

/// How many bytes of the disk the last checkpoint is of that a manifest has, if it has one. One that was cut off within
/// its first lines has none.
///
/// # Errors
/// It can't be read, or is of another disk.
pub(super) fn last_checkpoint(path: &Path, subject: Subject) -> Result<Option<u64>> {
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
    Ok(ManifestReader::open_for(path, subject)?.last_checkpoint().map(|(_, done)| done))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: Subject = Subject { virtual_size: 10 * 4096 + 512, cluster_size: 4096 };

    fn digests() -> Vec<Digest> {
        (0..11u8).map(|i| if i % 4 < 2 { Digest::Zero } else { Digest::of(&[i; 64]) }).collect()
    }

    fn write(path: &Path) -> String {
        let mut writer = ManifestWriter::begin(path, SUBJECT).unwrap();
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
        assert_eq!(check_whole(&path, |_| None).unwrap(), SUBJECT);
        let mut reader = ManifestReader::open(&path).unwrap();
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
            assert!(check_whole(&path, unfit).is_err(), "byte {at}");
        }
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(check_whole(&path, |_| None).is_err(), "{len} bytes");
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
            let Ok((mut writer, done)) = ManifestWriter::resume(&path, SUBJECT, note) else {
                assert!(len < 70, "{len} bytes");
                continue;
            };
            from_checkpoint += usize::from(done == 5 * 4096);
            // Those before the checkpoint; the rest comes again.
            assert_eq!(unreadable, if done == 0 { 0 } else { 2 * 1024 });
            assert_eq!(last_checkpoint(&path, SUBJECT).unwrap(), (done > 0).then_some(done));
            for digest in digests().into_iter().skip((done / 4096) as usize) {
                writer.add(digest).unwrap();
            }
            assert_eq!(writer.finish().unwrap(), disk);
            assert_eq!(check_whole(&path, |_| None).unwrap(), SUBJECT);
        }
        assert!(from_checkpoint > 100);
        let other = Subject { virtual_size: 1 << 20, ..SUBJECT };
        assert!(ManifestWriter::resume(&path, other, |_| ()).is_err());
    }
}
