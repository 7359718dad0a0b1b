//! Verifies an image: reads every cluster, and compares it with a manifest if there is one.

use super::backup::{is_known_zero, zero_run};
use super::manifest::{Digest, ManifestReader, Subject, check_whole};
use super::progress::{JobControl, Phase, Tracker};
use crate::{Error, ErrorKind, Image, Result};
use futures_util::future::join_all;
use std::path::PathBuf;
use zebu_storage::Worker;

/// How an image is verified.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// The manifest to compare with.
    pub manifest: Option<PathBuf>,
    /// Most bytes of read buffers; at least a cluster is read at once.
    pub buffer_memory: usize,
    /// Watching, slowing and stopping.
    pub control: JobControl,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self { manifest: None, buffer_memory: 16 << 20, control: JobControl::default() }
    }
}

/// What is wrong with a range.
#[derive(Debug, Clone)]
pub struct BadRange {
    /// Offset in bytes on the virtual disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What.
    pub error: Error,
}

/// What a verification found.
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

/// Reads every cluster of the disk, through the whole chain, and compares it with the manifest.
///
/// Whatever can't be read or is different is counted and does not end the job, up to 65,536 clusters.
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
        worker.run_blocking(move || check_whole(&checked, unfit)).await?;
        manifest = Some(ManifestReader::open(path)?);
    }
    let subject = manifest
        .as_ref()
        .map_or(Subject { virtual_size: total, cluster_size: image.cluster_size() }, |manifest| {
            manifest.subject
        });
    let tracker = Tracker::new(&options.control, Phase::Verifying, total);
    let mut report = VerifyReport { total, ..VerifyReport::default() };
    let chunk = CHUNK.max(subject.cluster_size);
    let at_once = (options.buffer_memory as u64 / chunk).clamp(1, 32);
    let (mut at, mut bad_clusters) = (0, 0);
    while at < total {
        tracker.check()?;
        if bad_clusters >= MAX_BAD {
            report.gave_up_at = Some(at);
            return Ok(report);
        }
        // Where nothing else is expected, what is known to be zero costs no look at each of its clusters.
        let zeroes_expected = manifest.as_ref().map_or(u64::MAX, ManifestReader::zeroes_ahead);
        if zeroes_expected > 0 {
            let end = zeroes_expected
                .min(MAX_PASSED)
                .saturating_mul(subject.cluster_size)
                .saturating_add(at)
                .min(total);
            let zero = zero_run(worker, image, at, end).await / chunk * chunk;
            if zero > 0 {
                if let Some(manifest) = &mut manifest {
                    manifest.pass_zeroes(zero / subject.cluster_size);
                }
                tracker.advance(zero);
                at += zero;
                continue;
            }
        }
        let mut batch = Vec::new();
        let mut next = at;
        while next < total && batch.len() < at_once as usize {
            let len = chunk.min(total - next);
            batch.push(look_at(worker, image, &tracker, subject, next, len));
            next += len;
        }
        for looked in join_all(batch).await {
            let Looked { offset, len, read, clusters } = looked?;
            report.read += read;
            for (index, found) in clusters.into_iter().enumerate() {
                let start = offset + index as u64 * subject.cluster_size;
                let expected = manifest.as_mut().map(ManifestReader::next_digest).transpose()?;
                let error = match (found, expected) {
                    (Ok(found), Some(expected)) if found != expected => {
                        let message = "the cluster is not what the manifest says";
                        Error::new(ErrorKind::Corrupt, message).on(image.path()).at_guest(start)
                    }
                    (Err(error), _) => error,
                    _ => continue,
                };
                let len = subject.cluster_size.min(offset + len - start);
                report.bad += len;
                bad_clusters += 1;
                if report.bad_ranges.len() < MAX_REPORTED {
                    report.bad_ranges.push(BadRange { offset: start, len, error });
                }
            }
            tracker.advance(len);
        }
        at = next;
    }
    if let Some(manifest) = manifest {
        let hash = manifest.finish()?;
        report.disk_hash = (report.bad == 0).then_some(hash);
    }
    tracker.finish(None);
    Ok(report)
}

/// What a range holds.
struct Looked {
    offset: u64,
    len: u64,
    read: u64,
    /// Of each cluster.
    clusters: Vec<Result<Digest>>,
}

async fn look_at(
    worker: &Worker,
    image: &Image,
    tracker: &Tracker,
    subject: Subject,
    offset: u64,
    len: u64,
) -> Result<Looked> {
    let count = len.div_ceil(subject.cluster_size) as usize;
    if is_known_zero(worker, image, offset, len).await.unwrap_or(false) {
        let clusters = (0..count).map(|_| Ok(Digest::Zero)).collect();
        return Ok(Looked { offset, len, read: 0, clusters });
    }
    tracker.throttle(worker, len).await?;
    let (result, bufs) = image.read(worker, offset, worker.buffer(len as usize).into()).await;
    if result.is_ok()
        && let [buf] = &bufs.0[..]
    {
        let clusters =
            buf.as_slice().chunks(subject.cluster_size as usize).map(|c| Ok(Digest::of(c))).collect();
        return Ok(Looked { offset, len, read: len, clusters });
    }
    drop(bufs);
    // Which of the clusters it is.
    let mut clusters = Vec::with_capacity(count);
    for start in (offset..offset + len).step_by(subject.cluster_size as usize) {
        let part = subject.cluster_size.min(offset + len - start) as usize;
        let (result, bufs) = image.read(worker, start, worker.buffer(part).into()).await;
        let mut bytes = vec![0; part];
        bufs.copy_to(0, &mut bytes);
        clusters.push(result.map(|()| Digest::of(&bytes)));
    }
    Ok(Looked { offset, len, read: len, clusters })
}
