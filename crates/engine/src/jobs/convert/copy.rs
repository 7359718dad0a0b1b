//! Moves data: the tasks that take pieces of work from the queue.

use super::compressed;
use super::job::{Job, Part};
use super::offload;
use super::options::{CopyMode, ReadErrors, SkippedRange};
use super::piece::Piece;
use super::source_range::{Destination, Moved, SourceRange};
use crate::jobs::buffers::rejoin;
use crate::jobs::queue::Queue;
use crate::jobs::zeros::{Run, runs};
use crate::new_foreign::{FilePlace, GrowingFile};
use crate::transfer::Transfer;
use crate::{Result, ZeroMode};
use std::ops::Range;
use zebu_storage::{IoBuf, IoBufs, Worker};

/// Does pieces of work until there are no more, with one buffer for all of them. After the job was stopped, pieces are
/// taken and left.
pub(super) async fn copy_pieces(worker: &Worker, job: &Job, queue: &Queue<Piece>) {
    let mut buffer = worker.buffer(job.sizing.chunk);
    while let Some(piece) = queue.pop().await {
        if job.is_stopped() {
            continue;
        }
        let (done, returned) = do_piece(worker, job, piece, buffer).await;
        buffer = returned;
        match done {
            Ok(len) => job.advance(len),
            Err(error) => job.fail(error),
        }
    }
}

/// Does one piece; gives its length and the buffer back.
async fn do_piece(worker: &Worker, job: &Job, piece: Piece, buffer: IoBuf) -> (Result<u64>, IoBuf) {
    match piece {
        Piece::Copy { part, offset, len } => {
            if let Err(error) = job.tracker.keep_to_rate(worker, len as u64).await {
                return (Err(error), buffer);
            }
            let (copied, buffer) = copy(worker, job, &job.parts[part], offset, len, buffer).await;
            (copied.map(|()| len as u64), buffer)
        }
        Piece::Zero { offset, len } => (zero(worker, job, offset, len).await.map(|()| len), buffer),
        Piece::Range { part, source, offset, how } => {
            let part = &job.parts[part];
            match job.target.placed_file() {
                Some(file) => move_placed(worker, job, part, &source, (file, offset, how), buffer).await,
                None => copy_range(worker, job, part, source, offset, buffer).await,
            }
        }
    }
}

/// Reads and writes a piece of at most one chunk.
async fn copy(
    worker: &Worker,
    job: &Job,
    source: &Part,
    offset: u64,
    len: usize,
    buffer: IoBuf,
) -> (Result<()>, IoBuf) {
    let (read, buffer) = read(worker, job, source, offset, len, buffer).await;
    match read {
        Ok(()) if job.target.placed_file().is_some() => place(worker, job, offset, len, buffer).await,
        // Compressed clusters stay whole: the source is zero past its end, and so is the target until it is cut.
        Ok(()) if job.compressed.is_none() => {
            write(worker, job, offset, job.before_end(offset, len), buffer).await
        }
        Ok(()) => write(worker, job, offset, len, buffer).await,
        Err(error) => (Err(error), buffer),
    }
}

/// Reads a piece of a source into the front of the buffer. `offset` is on the target's disk.
pub(super) async fn read(
    worker: &Worker,
    job: &Job,
    source: &Part,
    offset: u64,
    len: usize,
    mut buffer: IoBuf,
) -> (Result<()>, IoBuf) {
    let head = buffer.split_to(len);
    let (read, head) = source.image.read_source(worker, source.in_source(offset), head.into()).await;
    match read {
        Err(_) if job.read_errors == ReadErrors::Zero => {
            let head = salvage(worker, job, source, offset, head).await;
            (Ok(()), rejoin(head, buffer))
        }
        _ => {
            job.count(|report| report.read += len as u64);
            (read, rejoin(head, buffer))
        }
    }
}

/// Smallest range that is given up when a source can't be read, in bytes.
const SALVAGE_UNIT: usize = 512;

/// Reads what can be read of a range in ever smaller pieces; the rest becomes zero, and is reported.
async fn salvage(worker: &Worker, job: &Job, source: &Part, offset: u64, mut bufs: IoBufs) -> IoBufs {
    let mut done = IoBufs::new();
    // Ranges still to be read, the next one last. The first one failed as a whole.
    let mut ranges = vec![bufs.len()];
    let mut failed_whole = true;
    while let Some(len) = ranges.pop() {
        if job.is_stopped() {
            break;
        }
        let mut part = bufs.split_to(len);
        let at = offset + done.len() as u64;
        let error = if failed_whole {
            failed_whole = false;
            None
        } else {
            let (read, returned) = source.image.read_source(worker, source.in_source(at), part).await;
            part = returned;
            match read {
                Ok(()) => {
                    job.count(|report| report.read += len as u64);
                    done.append(part);
                    continue;
                }
                Err(error) => Some(error),
            }
        };
        match error {
            Some(error) if len <= SALVAGE_UNIT => {
                part.fill(0, len, 0);
                done.append(part);
                job.count_unreadable(SkippedRange { offset: at, len: len as u64, error });
            }
            _ => {
                part.append(bufs);
                bufs = part;
                // A range of one unit can't be halved: it is read once more on its own.
                let half = (len / 2).next_multiple_of(SALVAGE_UNIT).min(len);
                ranges.extend([len - half, half].into_iter().filter(|&len| len > 0));
            }
        }
    }
    done.append(bufs);
    done
}

/// Writes the front of the buffer, or what of it is not zero.
async fn write(
    worker: &Worker,
    job: &Job,
    offset: u64,
    len: usize,
    mut buffer: IoBuf,
) -> (Result<()>, IoBuf) {
    if let Some(cluster) = job.compressed {
        let head = buffer.split_to(len);
        let (written, head) = compressed::write(worker, job, cluster, offset, head.into()).await;
        return (written, rejoin(head, buffer));
    }
    if job.sparse_size == 0 {
        let head = buffer.split_to(len);
        let (written, head) = job.target.write(worker, offset, head.into()).await;
        job.count(|report| report.written += len as u64);
        return (written, rejoin(head, buffer));
    }
    let found: Vec<Run> = runs(&buffer.as_slice()[..len], offset, job.sparse_size).collect();
    let mut rest = IoBufs::from(buffer.split_to(len));
    let mut done = IoBufs::new();
    let mut result = Ok(());
    for run in found {
        let at = offset + run.start as u64;
        let mut part = rest.split_to(run.len);
        if !run.zero {
            (result, part) = job.target.write(worker, at, part).await;
            job.count(|report| report.written += run.len as u64);
        } else if job.is_zero_unless_written(at) {
            job.count(|report| report.skipped += run.len as u64);
        } else {
            result = zero(worker, job, at, run.len as u64).await;
        }
        done.append(part);
        if result.is_err() {
            break;
        }
    }
    done.append(rest);
    (result, rejoin(done, buffer))
}

/// Chooses places for what is not zero in the front of the buffer, when it is its turn, and writes there.
async fn place(
    worker: &Worker,
    job: &Job,
    offset: u64,
    len: usize,
    mut buffer: IoBuf,
) -> (Result<()>, IoBuf) {
    let Some(file) = job.target.placed_file() else { return (Ok(()), buffer) };
    let kept = job.before_end(offset, len);
    let filled: Vec<Range<usize>> = match job.sparse_size {
        _ if kept == 0 => Vec::new(),
        0 => Vec::from_iter(Some(0..kept)),
        block => {
            let found = runs(&buffer.as_slice()[..kept], offset, block).filter(|run| !run.zero);
            found.map(|run| run.start..run.start + run.len).collect()
        }
    };
    if !job.turn(offset).await {
        return (Ok(()), buffer);
    }
    let chosen = choose(job, offset, kept, &filled);
    job.pass(offset, len as u64);
    let places = match chosen {
        Ok(places) => places,
        Err(error) => return (Err(error), buffer),
    };
    let head = buffer.split_to(kept);
    let (written, head) = file.write_placed(worker, &places, head.into()).await;
    (written, rejoin(head, buffer))
}

/// The places of the `filled` parts of a range of the disk. The rest of it is made to read as zero.
fn choose(job: &Job, offset: u64, len: usize, filled: &[Range<usize>]) -> Result<Vec<FilePlace>> {
    let written: usize = filled.iter().map(Range::len).sum();
    let mut places = Vec::new();
    let Some(cluster) = job.whole else {
        job.count(|report| {
            report.written += written as u64;
            report.skipped += (len - written) as u64;
        });
        job.target.place(offset, filled, &mut places)?;
        return Ok(places);
    };
    let (mut at, mut zeroed) = (0, 0);
    while at < len {
        let start = offset + at as u64;
        let until = len.min(at + (cluster.get() - start % cluster.get()) as usize);
        let first = filled.partition_point(|part| part.end <= at);
        let within = filled.get(first..).unwrap_or_default().iter().take_while(|part| part.start < until);
        let within: Vec<_> = within.map(|part| part.start.max(at)..part.end.min(until)).collect();
        if !within.is_empty() {
            job.target.place(offset, &within, &mut places)?;
        } else if !job.is_zero_unless_written(start) {
            job.target.place_zeroes(start..offset + until as u64, &mut places)?;
            zeroed += until - at;
        }
        at = until;
    }
    job.count(|report| {
        report.written += written as u64;
        report.zeroed += zeroed as u64;
        report.skipped += (len - written - zeroed) as u64;
    });
    Ok(places)
}

async fn zero(worker: &Worker, job: &Job, offset: u64, len: u64) -> Result<()> {
    if let Some(image) = job.target.image() {
        image.write_zeroes(worker, offset, len, ZeroMode::Unmap).await?;
    } else if let Some(file) = job.target.placed_file() {
        if !job.turn(offset).await {
            return Ok(());
        }
        let mut places = Vec::new();
        let chosen = job.target.place_zeroes(offset..offset.saturating_add(len), &mut places);
        job.pass(offset, len);
        chosen?;
        file.write_placed(worker, &places, IoBufs::new()).await.0?;
    }
    job.count(|report| report.zeroed += len);
    Ok(())
}

/// Lets the kernel copy from a file into that of the target, and gives the length and the buffer back. The buffer is used if
/// the source's bytes lie elsewhere by now.
async fn copy_range(
    worker: &Worker,
    job: &Job,
    part: &Part,
    source: SourceRange,
    offset: u64,
    mut buffer: IoBuf,
) -> (Result<u64>, IoBuf) {
    let len = source.place().len;
    if let Err(error) = job.tracker.keep_to_rate(worker, len).await {
        return (Err(error), buffer);
    }
    // Only what an image can take was queued.
    let Some(image) = job.target.image() else { return (Ok(len), buffer) };
    match source.move_to(worker, Transfer::Copy, &Destination::Image(image.clone(), offset)).await {
        Ok(Moved::Bytes(_, None)) => {
            job.count(|report| report.range_copied += len);
            return (Ok(len), buffer);
        }
        Ok(Moved::Bytes(_, Some(error))) | Err(error) => return (Err(error), buffer),
        Ok(Moved::Elsewhere) => {}
    }
    let mut done = 0;
    while done < len && !job.is_stopped() {
        let next = (len - done).min(job.sizing.chunk as u64);
        let copied;
        (copied, buffer) = copy(worker, job, part, offset + done, next as usize, buffer).await;
        if let Err(error) = copied {
            return (Err(error), buffer);
        }
        done += next;
    }
    (Ok(len), buffer)
}

/// Lets the kernel move a range to places that are chosen when it is its turn; what it does not move goes through the buffer.
async fn move_placed(
    worker: &Worker,
    job: &Job,
    part: &Part,
    source: &SourceRange,
    (file, offset, how): (&GrowingFile, u64, Transfer),
    mut buffer: IoBuf,
) -> (Result<u64>, IoBuf) {
    let len = source.place().len;
    if let Err(error) = job.tracker.keep_to_rate(worker, len).await {
        return (Err(error), buffer);
    }
    if !job.turn(offset).await {
        return (Ok(len), buffer);
    }
    let whole = 0..len as usize;
    let mut places = Vec::new();
    let chosen = job.target.place(offset, std::slice::from_ref(&whole), &mut places);
    job.pass(offset, len);
    if let Err(error) = chosen {
        return (Err(error), buffer);
    }
    let moved = source.move_to(worker, how, &Destination::Places(file.clone(), places.clone())).await;
    let (mut done, refusal) = match moved {
        Ok(Moved::Bytes(done, refusal)) => (done, refusal),
        Ok(Moved::Elsewhere) => (0, None),
        Err(error) => return (Err(error), buffer),
    };
    job.count(|report| match how {
        Transfer::Copy => report.range_copied += done,
        Transfer::Share => report.reflinked += done,
    });
    if let (Some(refusal), CopyMode::Reflink) = (refusal, job.copy) {
        return (Err(offload::refused(source, job, &refusal)), buffer);
    }
    while done < len && !job.is_stopped() {
        let next = (len - done).min(job.sizing.chunk as u64) as usize;
        let result;
        (result, buffer) = read(worker, job, part, offset + done, next, buffer).await;
        if let Err(error) = result {
            return (Err(error), buffer);
        }
        let within = done as usize..done as usize + next;
        let here: Vec<FilePlace> = places.iter().filter_map(|place| place.within(&within)).collect();
        let (written, head) = file.write_placed(worker, &here, buffer.split_to(next).into()).await;
        buffer = rejoin(head, buffer);
        if let Err(error) = written {
            return (Err(error), buffer);
        }
        job.count(|report| report.written += next as u64);
        done += next as u64;
    }
    let tables = places.iter().filter(|place| matches!(place, FilePlace::Table { .. })).cloned();
    let tables: Vec<FilePlace> = tables.collect();
    let (written, _) = file.write_placed(worker, &tables, IoBufs::new()).await;
    (written.map(|()| len), buffer)
}
