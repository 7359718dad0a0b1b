//! Targets with compressed clusters: what can't have them, and writing a piece as whole clusters.

use super::job::Job;
use super::options::{ConvertOptions, ConvertTarget, CopyMode, TargetClusters};
use super::sink::Sink;
use crate::jobs::zeros::is_zero;
use crate::new_foreign::StreamWriter;
use crate::{Durability, Error, ErrorKind, Format, Preallocation, Result};
use std::num::NonZeroU64;
use zebu_storage::{IoBufs, Worker};

/// The cluster size of a target whose clusters are to be compressed; `None` if they are not.
///
/// # Errors
/// The target can't have compressed clusters, or the options contradict each other.
pub(super) fn cluster_size(options: &ConvertOptions, target: &ConvertTarget) -> Result<Option<NonZeroU64>> {
    if target.is_stream() {
        return stream_block(options, target);
    }
    if options.clusters == TargetClusters::Plain {
        return Ok(None);
    }
    let (format, cluster, path, preallocation, data_file) = match target {
        ConvertTarget::New(new) => (
            new.create.format,
            new.create.cluster_size,
            new.path.as_path(),
            new.create.preallocation,
            new.create.data_file.is_some(),
        ),
        ConvertTarget::Existing { image, .. } => {
            (image.format(), image.cluster_size(), image.path(), Preallocation::Off, false)
        }
        ConvertTarget::Stream(_) => return Ok(None),
    };
    let refuse = |kind, message: &str| Err(Error::new(kind, message).on(path));
    if format != Format::Qcow2 {
        return refuse(ErrorKind::Unsupported, "Compression not supported for this file format");
    }
    if preallocation != Preallocation::Off {
        let message = "Compression and preallocation not supported at the same time";
        return refuse(ErrorKind::InvalidArgument, message);
    }
    if data_file {
        let message = "an image with an external data file can't hold compressed clusters";
        return refuse(ErrorKind::Unsupported, message);
    }
    match options.copy {
        CopyMode::Auto | CopyMode::Buffers => Ok(NonZeroU64::new(cluster)),
        CopyMode::Reflink | CopyMode::Range => {
            refuse(ErrorKind::InvalidArgument, "Cannot enable copy offloading when compressing")
        }
    }
}

/// The bytes of a block of a target that is written in order: its pieces are whole blocks, but where a source ends.
fn stream_block(options: &ConvertOptions, target: &ConvertTarget) -> Result<Option<NonZeroU64>> {
    let ConvertTarget::Stream(new) = target else { return Ok(NonZeroU64::new(StreamWriter::BLOCK)) };
    if matches!(options.copy, CopyMode::Reflink | CopyMode::Range) {
        let message = "an image that is written in the order of its disk goes through buffers: no reflink or \
                       copy_file_range";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(new.file.path()));
    }
    Ok(NonZeroU64::new(new.create.cluster_size))
}

/// Writes a piece: whole clusters compressed, zero ones not at all where the target reads as zero, parts of clusters
/// (at the edges of sources) plain.
pub(super) async fn write(
    worker: &Worker,
    job: &Job,
    cluster: NonZeroU64,
    offset: u64,
    mut bufs: IoBufs,
) -> (Result<()>, IoBufs) {
    let cluster = cluster.get();
    let mut done = IoBufs::new();
    let mut at = offset;
    let mut result = Ok(());
    while !bufs.is_empty() && result.is_ok() {
        let end = at + bufs.len() as u64;
        let whole = at.is_multiple_of(cluster) && (end >= at + cluster || end == job.target.virtual_size());
        let mut part;
        if whole {
            let (len, skip) = run_of_clusters(job, cluster, at, &bufs);
            part = bufs.split_to(len);
            if skip {
                job.count(|report| report.skipped += len as u64);
            } else {
                (result, part) = match &job.target {
                    Sink::Image(image) => {
                        image.write_compressed(worker, at, part, Durability::Volatile).await
                    }
                    other => other.write(worker, at, part).await,
                };
                job.count(|report| report.written += len as u64);
            }
            at += len as u64;
        } else {
            let boundary = (at / cluster + 1).saturating_mul(cluster).min(end);
            part = bufs.split_to((boundary - at) as usize);
            (result, part) = job.target.write(worker, at, part).await;
            job.count(|report| report.written += boundary - at);
            at = boundary;
        }
        done.append(part);
    }
    done.append(bufs);
    (result, done)
}

/// Bytes of clusters at the start of `bufs` that are all to be written, or all to be left out.
fn run_of_clusters(job: &Job, cluster: u64, at: u64, bufs: &IoBufs) -> (usize, bool) {
    let [buf] = bufs.parts() else { return (bufs.len().min(cluster as usize), false) };
    let ends_disk = at + buf.len() as u64 == job.target.virtual_size();
    let mut len = 0;
    let mut skipped = None;
    for bytes in buf.as_slice().chunks(cluster as usize) {
        let whole = bytes.len() as u64 == cluster || ends_disk;
        let skip = job.sparse_size > 0 && job.is_zero_unless_written(at + len as u64) && is_zero(bytes);
        if !whole || *skipped.get_or_insert(skip) != skip {
            break;
        }
        len += bytes.len();
    }
    (len, skipped == Some(true))
}
