//! One chunk of a backup: read, compare, write.

use super::leftovers::Leftovers;
use super::options::{BackupOptions, SourceErrors};
use crate::image::Clusters;
use crate::jobs::convert::SkippedRange;
use crate::jobs::manifest::Digest;
use crate::jobs::pace::{Kind, Pace};
use crate::jobs::zeros::is_known_zero;
use crate::progress::Tracker;
use crate::{Durability, Image, Result, ZeroMode};
use zebu_storage::{IoBuf, IoBufs, Worker};

/// Smallest range that is given up when the source can't be read, in bytes.
const SKIP_UNIT: usize = 4096;

/// A chunk: whole clusters, but for the end of the disk.
pub(super) struct Chunk {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The digests of the previous backup, by cluster.
    pub(super) before: Option<Vec<Digest>>,
    /// The backup is an overlay of a previous one: what is zero has to be said.
    pub(super) on_previous: bool,
    /// The clusters that have to be written over.
    pub(super) leftovers: Leftovers,
}

/// The result of a chunk. Figures in bytes.
#[derive(Default)]
pub(super) struct Done {
    pub(super) len: u64,
    pub(super) clusters: u64,
    pub(super) read: u64,
    pub(super) written: u64,
    pub(super) zero: u64,
    pub(super) unchanged: u64,
    /// By cluster; `None`: all are zero.
    pub(super) digests: Option<Vec<Digest>>,
    pub(super) unreadable: Vec<SkippedRange>,
}

/// The treatment of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Write,
    /// It has to be made zero: the previous backup, or what was left over, shows something else.
    Zero,
    /// It is zero there already.
    IsZero,
    Unchanged,
}

/// A chunk that has not changed since the previous backup.
pub(super) fn pass_over(chunk: Chunk, options: &BackupOptions) -> Done {
    let clusters = chunk.len.div_ceil(options.cluster_size);
    Done { len: chunk.len, clusters, unchanged: chunk.len, digests: chunk.before, ..Done::default() }
}

/// A chunk that is zero, as the backup is where nothing is written.
pub(super) fn leave_out(chunk: &Chunk, options: &BackupOptions) -> Done {
    let clusters = chunk.len.div_ceil(options.cluster_size);
    Done { len: chunk.len, clusters, zero: chunk.len, ..Done::default() }
}

pub(super) async fn do_chunk(
    worker: &Worker,
    source: &Image,
    target: Image,
    options: &BackupOptions,
    (tracker, pace): (&Tracker, &Pace),
    chunk: Chunk,
) -> Result<Done> {
    let Chunk { offset, len, before, on_previous, leftovers } = chunk;
    let cluster = options.cluster_size;
    let mut done = Done { len, clusters: len.div_ceil(cluster), ..Done::default() };
    let known_zero = match is_known_zero(worker, source, offset, len).await {
        Ok(known_zero) => known_zero,
        // What of it can be read shows when it is read.
        Err(_) if options.source_errors == SourceErrors::Skip => false,
        Err(error) => return Err(error),
    };
    if known_zero && before.is_none() && !on_previous && !leftovers.touch(offset..offset + len) {
        done.zero = len;
        return Ok(done);
    }
    let mut bufs = if known_zero {
        IoBuf::zeroed(len as usize).into()
    } else {
        tracker.keep_to_rate(worker, len).await?;
        done.read = len;
        read(worker, source, options, pace, offset, len, &mut done.unreadable).await?
    };
    let digests = digests(&bufs, cluster as usize);
    let mut at = offset;
    let mut index = 0;
    while !bufs.is_empty() {
        let fate_of = |index: usize| {
            let old = before.as_ref().and_then(|before| before.get(index));
            let start = offset + index as u64 * cluster;
            let is_left_over = leftovers.touch(start..start + cluster);
            match (digests.get(index), old) {
                (new, Some(_)) if new == old && !is_left_over => Fate::Unchanged,
                (Some(Digest::Zero), Some(_)) => Fate::Zero,
                (Some(Digest::Zero), None) if on_previous || is_left_over => Fate::Zero,
                (Some(Digest::Zero), None) => Fate::IsZero,
                _ => Fate::Write,
            }
        };
        // Clusters of one fate go together.
        let fate = fate_of(index);
        let mut run = bufs.split_to(bufs.len().min(cluster as usize));
        index += 1;
        while !bufs.is_empty() && fate_of(index) == fate {
            run.append(bufs.split_to(bufs.len().min(cluster as usize)));
            index += 1;
        }
        let run_len = run.len() as u64;
        match fate {
            Fate::Write => {
                let clusters = Clusters::Compressed(pace.bursts());
                target.write_as(worker, clusters, at, run, Durability::Volatile).await.0?;
                done.written += run_len;
            }
            Fate::Zero => {
                target.write_zeroes(worker, at, run_len, ZeroMode::Unmap).await?;
                done.written += run_len;
            }
            Fate::IsZero => done.zero += run_len,
            Fate::Unchanged => done.unchanged += run_len,
        }
        at += run_len;
    }
    done.digests = Some(digests);
    Ok(done)
}

pub(super) fn digests(bufs: &IoBufs, cluster: usize) -> Vec<Digest> {
    if let [buf] = bufs.parts() {
        return buf.as_slice().chunks(cluster).map(Digest::of).collect();
    }
    let mut bytes = vec![0; bufs.len()];
    bufs.copy_to(0, &mut bytes);
    bytes.chunks(cluster).map(Digest::of).collect()
}

/// Fills a buffer, in parts where the disk is busy, each in its turn.
async fn read_in_turn(
    worker: &Worker,
    source: &Image,
    pace: &Pace,
    offset: u64,
    mut buffer: IoBuf,
) -> (Result<()>, IoBufs) {
    let mut done = IoBufs::new();
    let mut at = offset;
    loop {
        let turn = pace.turn().await;
        let len = pace.read_size(buffer.len() as u64);
        let part = buffer.split_to(len as usize);
        let (read, part) = pace.timed(Kind::Read, len, source.read_source(worker, at, part.into())).await;
        turn.end(worker).await;
        done.append(part);
        at += len;
        if read.is_err() || buffer.is_empty() {
            done.push(buffer);
            return (read, done);
        }
    }
}

/// Reads a chunk, in one buffer.
pub(super) async fn read(
    worker: &Worker,
    source: &Image,
    options: &BackupOptions,
    pace: &Pace,
    offset: u64,
    len: u64,
    unreadable: &mut Vec<SkippedRange>,
) -> Result<IoBufs> {
    let (result, bufs) = read_in_turn(worker, source, pace, offset, worker.buffer(len as usize)).await;
    match result {
        Ok(()) => return Ok(bufs),
        Err(error) if options.source_errors == SourceErrors::Stop => return Err(error),
        Err(_) => drop(bufs),
    }
    // Cluster by cluster, and those that fail in ever smaller pieces.
    let mut whole = IoBuf::zeroed(len as usize);
    let mut ranges = vec![(0, len as usize, options.cluster_size as usize)];
    while let Some((start, len, step)) = ranges.pop() {
        for at in (start..start + len).step_by(step) {
            let part = step.min(start + len - at);
            let place = offset + at as u64;
            let (result, bufs) = source.read_source(worker, place, worker.buffer(part).into()).await;
            match result {
                Ok(()) => {
                    if let Some(place) = whole.as_mut_slice().get_mut(at..at + part) {
                        bufs.copy_to(0, place);
                    }
                }
                Err(_) if part > SKIP_UNIT => ranges.push((at, part, SKIP_UNIT)),
                Err(error) => unreadable.push(SkippedRange { offset: place, len: part as u64, error }),
            }
        }
    }
    unreadable.sort_unstable_by_key(|range| range.offset);
    unreadable.dedup_by(|next, last| {
        let joined = last.offset + last.len == next.offset;
        if joined {
            last.len += next.len;
        }
        joined
    });
    Ok(whole.into())
}
