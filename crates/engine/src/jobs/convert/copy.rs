//! Moves data: the tasks that take pieces of work from the queue.

use super::compressed;
use super::job::{Job, Part};
use super::options::{ReadErrors, SkippedRange};
use super::piece::Piece;
use super::source_range::{Moved, SourceRange};
use crate::jobs::buffers::rejoin;
use crate::jobs::queue::Queue;
use crate::jobs::zeros::{Run, runs};
use crate::transfer::Transfer;
use crate::{Result, ZeroMode};
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
        Piece::Range { part, source, offset } => {
            copy_range(worker, job, &job.parts[part], source, offset, buffer).await
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

async fn zero(worker: &Worker, job: &Job, offset: u64, len: u64) -> Result<()> {
    if let Some(image) = job.target.image() {
        image.write_zeroes(worker, offset, len, ZeroMode::Unmap).await?;
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
    match source.move_to(worker, Transfer::Copy, image, offset).await {
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
