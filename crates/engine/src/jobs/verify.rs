//! Verifies an image: reads every cluster, and compares it with a manifest if there is one.

use super::manifest::{Digest, ManifestReader, Subject, check_whole};
use super::pipeline::InOrder;
use super::zeros::{is_known_zero, zero_run};
use crate::progress::{JobControl, Phase, Tracker};
use crate::{Error, ErrorKind, Image, Result};
use std::ops::Range;
use std::path::PathBuf;
use zebu_storage::Worker;

/// How an image is verified.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VerifyOptions {
    /// The manifest to compare with. Default: `None`.
    pub manifest: Option<PathBuf>,
    /// Most bytes of read buffers; at least a cluster is read at once. Default: 16 MiB.
    pub buffer_memory: usize,
    /// Watching, slowing and stopping. Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(VerifyOptions {
    manifest: impl Into<Option<PathBuf>>,
    buffer_memory: usize,
    control: JobControl,
});

impl Default for VerifyOptions {
    fn default() -> Self {
        Self { manifest: None, buffer_memory: 16 << 20, control: JobControl::default() }
    }
}

/// A range that is wrong.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BadRange {
    /// Offset in bytes on the virtual disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The reason.
    pub error: Error,
}

/// The result of a verification.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Bytes of the virtual disk.
    pub total: u64,
    /// Bytes that were read; the rest is known to be zero.
    pub read: u64,
    /// Bytes of clusters that can't be read, or are not what the manifest says.
    pub bad: u64,
    /// The first of them (at most 1024), in order.
    pub bad_ranges: Vec<BadRange>,
    /// Where it gave up, in bytes of the virtual disk, because there was too much of that.
    pub gave_up_at: Option<u64>,
    /// The BLAKE3 hash of the disk, if the image was compared with a manifest and is what it says.
    pub disk_hash: Option<String>,
}

/// Ranges that are reported one by one.
const MAX_REPORTED: usize = 1024;
/// Clusters of zeroes that are passed over at once; between, cancelling is looked for.
const MAX_PASSED: u64 = 1 << 20;
/// Bad clusters after which it gives up: an image can say of petabytes, each of them, that they can't be read.
const MAX_BAD: u64 = 1 << 16;
/// Bytes read at once.
const CHUNK: u64 = 1 << 20;

/// Reads every cluster of the disk, through the whole chain, and compares it with the manifest. A cluster that lies
/// past the end of its file, because the file was cut short, counts as bad.
///
/// Clusters that can't be read or are different are counted. They end the job when there are 65,536 of them.
///
/// # Errors
/// The manifest is damaged or of another disk; [`ErrorKind::Cancelled`].
pub async fn verify(worker: &Worker, image: &Image, options: &VerifyOptions) -> Result<VerifyReport> {
    let total = image.virtual_size();
    let mut manifest = None;
    if let Some(path) = &options.manifest {
        let (checked, name) = (path.clone(), image.path().display().to_string());
        let unfit = move |subject: Subject| {
            (subject.virtual_size != total).then(|| {
                let other = subject.virtual_size;
                format!("the manifest is of another disk: it has {other} bytes, that of '{name}' has {total}")
            })
        };
        let cancel = options.control.cancel.clone();
        worker.run_blocking(move || check_whole(&checked, &cancel, unfit)).await?;
        manifest = Some(ManifestReader::open(path, &options.control.cancel)?);
    }
    let subject = manifest
        .as_ref()
        .map_or(Subject { virtual_size: total, cluster_size: image.cluster_size() }, |manifest| {
            manifest.subject
        });
    let tracker = Tracker::new(&options.control, Phase::Verifying, total);
    let report = VerifyReport { total, ..VerifyReport::default() };
    let chunk = CHUNK.max(subject.cluster_size);
    let at_once = (options.buffer_memory as u64 / chunk).clamp(1, 32) as usize;
    let mut job =
        Job { worker, image, tracker: &tracker, subject, chunk, at_once, manifest, report, bad_clusters: 0 };
    let mut looks = InOrder::new(at_once);
    let looked = job.run(&mut looks).await;
    // Whoever closes the image has no request under way.
    looks.idle().await;
    looked?;
    let Job { manifest, mut report, .. } = job;
    if report.gave_up_at.is_some() {
        return Ok(report);
    }
    if let Some(manifest) = manifest {
        let hash = manifest.finish()?;
        report.disk_hash = (report.bad == 0).then_some(hash);
    }
    tracker.finish(None);
    Ok(report)
}

/// A running verification.
struct Job<'a> {
    worker: &'a Worker,
    image: &'a Image,
    tracker: &'a Tracker,
    subject: Subject,
    /// Bytes read at once.
    chunk: u64,
    /// Chunks under way at once.
    at_once: usize,
    manifest: Option<ManifestReader>,
    report: VerifyReport,
    bad_clusters: u64,
}

impl<'a> Job<'a> {
    /// Looks at the whole disk, or up to where it gives up.
    async fn run(&mut self, looks: &mut InOrder<'a, Looked>) -> Result<()> {
        let total = self.report.total;
        let (mut at, mut next_look_for_zeroes) = (0, 0);
        loop {
            while at < total && looks.has_room() {
                self.tracker.check()?;
                if at >= next_look_for_zeroes {
                    let zero = self.pass_zeroes(at).await?;
                    if zero > 0 {
                        at += zero;
                        continue;
                    }
                    next_look_for_zeroes = at + self.chunk * self.at_once as u64;
                }
                let len = self.chunk.min(total - at);
                let expected = self.expected(len)?;
                let (worker, image, tracker, subject) = (self.worker, self.image, self.tracker, self.subject);
                looks.begin(look_at(worker, image, tracker, subject, at..at + len, expected));
                at += len;
            }
            let Some(looked) = looks.next().await else { return Ok(()) };
            let end = self.account(looked?);
            if self.bad_clusters >= MAX_BAD && end < total {
                self.report.gave_up_at = Some(end);
                return Ok(());
            }
        }
    }

    /// Passes over clusters from `at` on that are known to be zero, where nothing else is expected: they cost no look at
    /// each of them. Gives their bytes.
    async fn pass_zeroes(&mut self, at: u64) -> Result<u64> {
        let cluster = self.subject.cluster_size;
        let expected = self.manifest.as_ref().map_or(u64::MAX, ManifestReader::zeroes_ahead);
        if expected == 0 {
            return Ok(0);
        }
        let end = expected.min(MAX_PASSED).saturating_mul(cluster).saturating_add(at).min(self.report.total);
        let zero = zero_run(self.worker, self.image, at, end).await / self.chunk * self.chunk;
        if let Some(manifest) = self.manifest.as_mut().filter(|_| zero > 0) {
            manifest.pass_zeroes(zero / cluster)?;
        }
        self.tracker.advance(zero);
        Ok(zero)
    }

    /// Takes from the manifest what the next `len` bytes hold, by cluster.
    fn expected(&mut self, len: u64) -> Result<Option<Vec<Digest>>> {
        let Some(manifest) = &mut self.manifest else { return Ok(None) };
        (0..len.div_ceil(self.subject.cluster_size))
            .map(|_| manifest.next_digest())
            .collect::<Result<_>>()
            .map(Some)
    }

    /// Adds what was found to the report; gives the offset just past it.
    fn account(&mut self, looked: Looked) -> u64 {
        let Looked { range, read, clusters, expected } = looked;
        self.report.read += read;
        let mut expected = expected.map(Vec::into_iter);
        for (start, found) in range.clone().step_by(self.subject.cluster_size as usize).zip(clusters) {
            let error = match (found, expected.as_mut().and_then(Iterator::next)) {
                (Ok(found), Some(expected)) if found != expected => {
                    let message = "the cluster is not what the manifest says";
                    Error::new(ErrorKind::Corrupt, message).on(self.image.path()).at_guest(start)
                }
                (Err(error), _) => error,
                _ => continue,
            };
            let len = self.subject.cluster_size.min(range.end - start);
            self.report.bad += len;
            self.bad_clusters += 1;
            if self.report.bad_ranges.len() < MAX_REPORTED {
                self.report.bad_ranges.push(BadRange { offset: start, len, error });
            }
        }
        self.tracker.advance(range.end - range.start);
        range.end
    }
}

/// A range that was looked at.
struct Looked {
    range: Range<u64>,
    /// Bytes that were read.
    read: u64,
    /// The digests found, by cluster.
    clusters: Vec<Result<Digest>>,
    /// The digests in the manifest, by cluster.
    expected: Option<Vec<Digest>>,
}

async fn look_at(
    worker: &Worker,
    image: &Image,
    tracker: &Tracker,
    subject: Subject,
    range: Range<u64>,
    expected: Option<Vec<Digest>>,
) -> Result<Looked> {
    let (read, clusters) = read_clusters(worker, image, tracker, subject, range.clone()).await?;
    Ok(Looked { range, read, clusters, expected })
}

/// Bytes that were read of a range, and what was found, by cluster.
async fn read_clusters(
    worker: &Worker,
    image: &Image,
    tracker: &Tracker,
    subject: Subject,
    range: Range<u64>,
) -> Result<(u64, Vec<Result<Digest>>)> {
    let (offset, len) = (range.start, range.end - range.start);
    let count = len.div_ceil(subject.cluster_size) as usize;
    if is_known_zero(worker, image, offset, len).await.unwrap_or(false) {
        return Ok((0, (0..count).map(|_| Ok(Digest::Zero)).collect()));
    }
    tracker.keep_to_rate(worker, len).await?;
    let (result, bufs) = image.read_source(worker, offset, worker.buffer(len as usize).into()).await;
    if result.is_ok()
        && let [buf] = bufs.parts()
    {
        let clusters = buf.as_slice().chunks(subject.cluster_size as usize);
        return Ok((len, clusters.map(|bytes| Ok(Digest::of(bytes))).collect()));
    }
    drop(bufs);
    // Which of the clusters it is.
    let mut clusters = Vec::with_capacity(count);
    for start in range.clone().step_by(subject.cluster_size as usize) {
        let part = subject.cluster_size.min(range.end - start) as usize;
        let (result, bufs) = image.read_source(worker, start, worker.buffer(part).into()).await;
        let mut bytes = vec![0; part];
        bufs.copy_to(0, &mut bytes);
        clusters.push(result.map(|()| Digest::of(&bytes)));
    }
    Ok((len, clusters))
}
