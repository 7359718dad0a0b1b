//! Writing a manifest, and going on with one that was not finished.

use super::read::{Line, ManifestReader, reader_error};
use super::{Coverage, Digest, Preamble, Subject, forget_pages, hex};
use crate::jobs::disk_hash::{DiskHash, Rule};
use crate::jobs::staging::from_io;
use crate::progress::Cancel;
use crate::{Error, Result};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A manifest that is being written. Clusters come in order.
pub(in crate::jobs) struct ManifestWriter {
    path: PathBuf,
    file: BufWriter<File>,
    whole: blake3::Hasher,
    disk: DiskHash,
    /// The next cluster.
    next: u64,
    /// Zero clusters before it that are not written yet.
    zeroes: u64,
    line: String,
    /// The first failure.
    failed: Option<Error>,
}

impl ManifestWriter {
    /// Begins a manifest in an empty file.
    pub(in crate::jobs) fn begin(path: &Path, subject: Subject, preamble: &Preamble) -> Result<Self> {
        let file = File::create(path).map_err(|e| from_io(path, "can't make the manifest", &e))?;
        let mut writer = Self::over(path, file, DiskHash::new(Rule::Runs, &Cancel::new()));
        let Subject { virtual_size, cluster_size } = subject;
        writer
            .put(&format!("zebu-manifest 2\nvirtual-size {virtual_size}\ncluster-size {cluster_size}\n"))?;
        if let Some(origin) = &preamble.origin {
            writer.put(&format!("source {origin}\n"))?;
        }
        if let Some(previous) = &preamble.previous {
            writer.put(&format!("previous {}\n", hex(previous)))?;
        }
        if preamble.coverage == Coverage::Changes {
            writer.put("changes-only\n")?;
        }
        Ok(writer)
    }

    fn over(path: &Path, file: File, disk: DiskHash) -> Self {
        Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
            whole: blake3::Hasher::new(),
            disk,
            next: 0,
            zeroes: 0,
            line: String::new(),
            failed: None,
        }
    }

    /// Goes on with a manifest that was not finished, from its last checkpoint; returns also how many bytes of the
    /// disk that was. `unreadable` is told what could not be read of them. Without a checkpoint it begins with `preamble`.
    ///
    /// # Errors
    /// It is none, or one of another disk; cancelled.
    pub(in crate::jobs) fn resume(
        path: &Path,
        subject: Subject,
        preamble: &Preamble,
        cancel: &Cancel,
        mut unreadable: impl FnMut(Range<u64>),
    ) -> Result<(Self, u64)> {
        let Some((end, done)) = ManifestReader::open_for(path, subject, cancel)?.last_checkpoint().at else {
            return Self::begin(path, subject, preamble).map(|writer| (writer, 0));
        };
        let io = |e: &std::io::Error| from_io(path, "can't go on with the manifest", e);
        let mut file = File::options().read(true).write(true).open(path).map_err(|e| io(&e))?;
        file.set_len(end).map_err(|e| io(&e))?;
        file.seek(SeekFrom::End(0)).map_err(|e| io(&e))?;
        let mut reader = ManifestReader::open(path, cancel)?;
        let mut writer = Self::over(path, file, DiskHash::new(reader.rule, cancel));
        while let Some(line) = reader.line()? {
            match line {
                Line::Zero { count, .. } => writer.hash_zeroes(count)?,
                Line::Cluster { digest, .. } => writer.hash(&digest),
                Line::Unreadable(range) => unreadable(range),
                Line::Source(_)
                | Line::Previous(_)
                | Line::ChangesOnly
                | Line::Checkpoint(_)
                | Line::Disk(_)
                | Line::End(_) => {}
            }
        }
        writer.whole = reader.whole.clone();
        if writer.next != done.div_ceil(subject.cluster_size) {
            return Err(reader_error(path, "its last checkpoint does not fit its clusters"));
        }
        Ok((writer, done))
    }

    fn hash(&mut self, digest: &[u8; 32]) {
        self.disk.add(digest);
        self.next += 1;
    }

    fn hash_zeroes(&mut self, count: u64) -> Result<()> {
        self.disk.add_zeroes(count)?;
        self.next += count;
        Ok(())
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
    pub(in crate::jobs) fn add_zeroes(&mut self, count: u64) -> Result<()> {
        self.hash_zeroes(count)?;
        self.zeroes += count;
        Ok(())
    }

    /// Adds the next cluster.
    pub(in crate::jobs) fn add(&mut self, digest: Digest) -> Result<()> {
        let Digest::Hash(hash) = digest else {
            return self.add_zeroes(1);
        };
        self.put_zeroes()?;
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        // Writing into a string does not fail.
        let _ = writeln!(line, "{} {}", self.next, hex(&hash));
        let put = self.put(&line);
        self.line = line;
        put?;
        self.hash(&hash);
        Ok(())
    }

    /// Notes a range that could not be read, of the clusters that are added next.
    pub(in crate::jobs) fn add_unreadable(&mut self, offset: u64, len: u64) -> Result<()> {
        self.put(&format!("unreadable {offset} {len}\n"))
    }

    /// Notes that `bytes` of the disk are durable in the image, and makes that durable, too.
    pub(in crate::jobs) fn checkpoint(&mut self, bytes: u64) -> Result<()> {
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
    pub(in crate::jobs) fn finish(&mut self) -> Result<String> {
        self.put_zeroes()?;
        let disk = hex(&self.disk.clone().finish());
        self.put(&format!("disk {disk}\n"))?;
        let whole = self.whole.finalize().to_hex().to_string();
        self.put(&format!("end {whole}\n"))?;
        self.sync()?;
        Ok(disk)
    }
}
