//! Backups into a file that takes each byte once, in the order of the disk: an upload. There are no checkpoints, because what
//! was written is the file's owner to keep.

use super::chunk::{Chunk, Done, digests, leave_out, read};
use super::leftovers::Leftovers;
use super::options::{BackupOptions, BackupReport, Decryption, Interrupted, SourceErrors};
use super::unreadable::Unreadable;
use super::{LOOK, account, divide};
use crate::image_stream::{ClusterBytes, ImageWriter, Packer};
use crate::jobs::manifest::{Coverage, Digest, ManifestWriter, Preamble, Subject};
use crate::jobs::origin::Origin;
use crate::jobs::pace::Pace;
use crate::jobs::pipeline::InOrder;
use crate::jobs::staging::{from_io, publish, reserve_temporary_name};
use crate::jobs::zeros::{is_known_zero, zero_run};
use crate::new_files::NewFiles;
use crate::new_foreign::WritesUnderWay;
use crate::progress::{Phase, Tracker};
use crate::{CreateOptions, Error, ErrorKind, Format, Image, Remedy, Result};
use std::path::PathBuf;
use zebu_storage::{File, Worker};

/// A backup whose file is written, and whose manifest has no name yet.
#[derive(Debug)]
#[non_exhaustive]
pub struct StreamedBackup {
    /// Figures of what was done.
    pub report: BackupReport,
    /// The manifest's temporary name, and its own.
    manifest: (PathBuf, Option<PathBuf>),
    files: NewFiles,
}

impl StreamedBackup {
    /// Gives the manifest its name, once the backup has its own.
    ///
    /// # Errors
    /// The file can't be renamed. It is gone then.
    pub fn publish(mut self) -> Result<BackupReport> {
        if let (temporary, Some(name)) = &self.manifest {
            publish(temporary, name)?;
            self.files.keep();
        }
        Ok(self.report)
    }
}

/// Backs `source` up into `file`, which is empty and takes each byte once, nearly in order; its first cluster last.
///
/// # Errors
/// As of [`super::backup`]. [`ErrorKind::Unsupported`]: increments, bitmaps and resuming.
pub async fn backup_streamed(
    worker: &Worker,
    source: &Image,
    file: File,
    options: &BackupOptions,
) -> Result<StreamedBackup> {
    let refused = [
        (options.previous.is_some(), "an increment"),
        (options.bitmap.is_some(), "a bitmap of what changed"),
        (options.interrupted == Interrupted::Resume, "going on with an interrupted one"),
    ];
    if let Some((_, what)) = refused.iter().find(|(is_wanted, _)| *is_wanted) {
        let message = format!("{what} can't be had in a backup that is written in the order of the disk");
        return Err(Error::new(ErrorKind::Unsupported, message).on(&options.target));
    }
    let (chunk, at_once, _) = divide(options)?;
    let total = source.virtual_size();
    let subject = Subject { virtual_size: total, cluster_size: options.cluster_size };
    let decrypted = source.is_chain_encrypted();
    if decrypted && options.decryption == Decryption::Refuse {
        let message = "the disk is encrypted, and a backup of it would hold its plain text";
        let error = Error::new(ErrorKind::InvalidArgument, message).on(source.path());
        return Err(error.with_remedy(Remedy::AllowDecryption));
    }
    let mut files = NewFiles::default();
    let (path, mut manifest) = begin_manifest(source, options, subject, &mut files)?;
    let create = CreateOptions {
        format: Format::Qcow2,
        size: Some(total),
        cluster_size: options.cluster_size,
        compression: options.compression,
        ..CreateOptions::default()
    };
    let mut writer = ImageWriter::unchangeable(file, &create, total)?;
    let pace = Pace::new(options.speed, at_once);
    let packer = Packer::new(
        Some(options.compress.method(options.compression)?),
        &options.compress.pool,
        options.cluster_size,
    )
    .in_bursts(pace.bursts());
    let tracker = Tracker::new(&options.control, Phase::Copying, total);
    let mut report = BackupReport { decrypted, total, ..BackupReport::default() };
    let mut unreadable = Unreadable::new(total);

    let mut under_way = InOrder::new(at_once);
    let mut writes = WritesUnderWay::default();
    let (mut next, mut done, mut looked_to) = (0, 0, 0);
    let mut failed = None;
    loop {
        while failed.is_none() && next < total && under_way.has_room() {
            if let Err(error) = tracker.check() {
                failed = Some(error);
                break;
            }
            let mut zero = 0;
            if next >= looked_to {
                zero = zero_run(worker, source, next, total).await / chunk * chunk;
                looked_to = next + if zero > 0 { zero } else { LOOK };
            }
            let offset = next;
            let len = if zero > 0 { zero } else { chunk.min(total - next) };
            let (tracker, pace, packer) = (&tracker, &pace, &packer);
            under_way.begin(async move {
                if zero > 0 {
                    return Ok((leave_out(&whole(offset, len), options), Vec::new()));
                }
                pack_chunk(worker, source, options, packer, (tracker, pace), offset, len).await
            });
            next += len;
        }
        let Some(packed) = under_way.next().await else { break };
        let appended = match packed {
            Ok(_) if failed.is_some() => continue,
            Ok((chunk, clusters)) => {
                done += chunk.len;
                match writer.append(worker, &clusters, &mut writes).await {
                    Ok(()) => account(&mut report, &mut unreadable, chunk, &mut manifest),
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        };
        match appended {
            Ok(()) => tracker.advance(done),
            Err(error) => _ = failed.get_or_insert(error),
        }
    }
    let written = writes.wait(0).await;
    if let Some(error) = failed {
        return Err(error);
    }
    written?;
    tracker.finish(Some(Phase::Finishing));
    report.file_length = writer.finish(worker).await?;
    report.disk_hash = Some(manifest.finish()?);
    unreadable.tell(&mut report);
    Ok(StreamedBackup { report, manifest: (path, options.manifest.clone()), files })
}

/// A chunk of which nothing is known.
fn whole(offset: u64, len: u64) -> Chunk {
    Chunk { offset, len, before: None, on_previous: false, leftovers: Leftovers::default() }
}

/// Begins the manifest under a temporary name: beside its own, or where temporary files are if it gets none.
fn begin_manifest(
    source: &Image,
    options: &BackupOptions,
    subject: Subject,
    files: &mut NewFiles,
) -> Result<(PathBuf, ManifestWriter)> {
    if let Some(name) = options.manifest.as_ref().filter(|name| std::fs::symlink_metadata(name).is_ok()) {
        let message = "exists already: remove it first, or give another name";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(name));
    }
    let beside = options.manifest.clone().unwrap_or_else(|| std::env::temp_dir().join("backup.manifest"));
    let path = reserve_temporary_name(&beside, 0o600)
        .map_err(|error| from_io(&beside, "can't make the manifest", &error))?;
    files.add(&path);
    let preamble = Preamble { origin: Some(Origin::of(source)), previous: None, coverage: Coverage::All };
    let manifest = ManifestWriter::begin(&path, subject, &preamble)?;
    Ok((path, manifest))
}

/// Reads a chunk and packs its clusters.
async fn pack_chunk(
    worker: &Worker,
    source: &Image,
    options: &BackupOptions,
    packer: &Packer,
    (tracker, pace): (&Tracker, &Pace),
    offset: u64,
    len: u64,
) -> Result<(Done, Vec<(u64, ClusterBytes)>)> {
    let cluster = options.cluster_size;
    let known_zero = match is_known_zero(worker, source, offset, len).await {
        Ok(known_zero) => known_zero,
        // What of it can be read shows when it is read.
        Err(_) if options.source_errors == SourceErrors::Skip => false,
        Err(error) => return Err(error),
    };
    if known_zero {
        return Ok((leave_out(&whole(offset, len), options), Vec::new()));
    }
    let mut done = Done { len, clusters: len.div_ceil(cluster), read: len, ..Done::default() };
    tracker.keep_to_rate(worker, len).await?;
    let mut bufs = read(worker, source, options, pace, offset, len, &mut done.unreadable).await?;
    let digests = digests(&bufs, cluster as usize);
    let mut packing = Vec::new();
    for (index, digest) in (offset / cluster..).zip(&digests) {
        let bytes = bufs.split_to(bufs.len().min(cluster as usize));
        if *digest == Digest::Zero {
            done.zero += bytes.len() as u64;
        } else {
            done.written += bytes.len() as u64;
            packing.push(packer.pack(worker, index, bytes));
        }
    }
    let clusters = futures_util::future::try_join_all(packing).await?;
    done.digests = Some(digests);
    Ok((done, clusters))
}
