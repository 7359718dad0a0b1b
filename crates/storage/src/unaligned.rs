//! Requests that do not keep to what O_DIRECT asks for: bounced through aligned buffers, and where a write does not
//! cover whole blocks, completed with what is on the disk (read-modify-write).

use crate::buf::{IoBuf, IoBufs};
use crate::file::File;
use crate::file_types::Alignment;
use crate::operation::Claim;
use crate::request::OpKind;
use crate::sabotage::{self, Fault};
use crate::worker::Worker;
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

/// The most bytes bounced at once, in whole blocks.
const PIECE: u64 = 1 << 20;

/// How a request fares with a file's alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The kernel takes it as it is.
    Exact,
    /// Whole blocks, but not in memory that the kernel takes.
    WrongMemory,
    /// Not whole blocks.
    WrongRange,
}

/// How a request of these buffers fares.
pub(crate) fn fit(alignment: Alignment, offset: u64, bufs: &IoBufs) -> Fit {
    let block = block(alignment);
    if block == 1 {
        return Fit::Exact;
    }
    let mut total = 0u64;
    let mut memory = true;
    for buf in &bufs.0 {
        memory &= (buf.as_ptr() as usize).is_multiple_of(alignment.memory as usize)
            && buf.len().is_multiple_of(alignment.length as usize);
        total += buf.len() as u64;
    }
    if !offset.is_multiple_of(block) || !total.is_multiple_of(block) {
        Fit::WrongRange
    } else if memory {
        Fit::Exact
    } else {
        Fit::WrongMemory
    }
}

/// The unit of whole-block requests.
pub(crate) fn block(alignment: Alignment) -> u64 {
    alignment.offset.max(alignment.length).into()
}

/// The range, widened to whole blocks.
fn widened(alignment: Alignment, offset: u64, len: u64) -> Range<u64> {
    let block = block(alignment);
    // A request ends at 2^63 - 1 at most, which the worker has checked.
    offset - offset % block..(offset + len).next_multiple_of(block)
}

/// Cuts a range at multiples of [`PIECE`].
fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let piece = at..range.end.min((at / PIECE + 1) * PIECE);
        at = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The overlap of `piece` of the file and the request that begins at `offset`: where it lies in a buffer of the
/// piece, and where in the request's buffers.
fn common(piece: &Range<u64>, offset: u64, len: u64) -> (Range<usize>, usize) {
    let (from, to) = (piece.start.max(offset), piece.end.min(offset + len));
    ((from - piece.start) as usize..(to - piece.start) as usize, (from - offset) as usize)
}

/// Reads through aligned buffers.
pub(crate) async fn read(
    worker: &Worker,
    file: &File,
    offset: u64,
    mut bufs: IoBufs,
) -> (Result<(), i32>, IoBufs) {
    let len = bufs.len() as u64;
    for piece in pieces(widened(file.alignment(), offset, len)) {
        let buf = worker.buffer((piece.end - piece.start) as usize);
        let (result, read) = worker.transfer(file, OpKind::Read, piece.start, buf.into(), None).await;
        if result.is_err() {
            return (result, bufs);
        }
        let (within, at) = common(&piece, offset, len);
        if let Some(buf) = read.0.first() {
            bufs.copy_from(at, &buf.as_slice()[within]);
        }
    }
    (Ok(()), bufs)
}

/// Writes whole blocks from memory that the kernel does not take.
pub(crate) async fn write_blocks(
    worker: &Worker,
    file: &File,
    offset: u64,
    bufs: IoBufs,
) -> (Result<(), i32>, IoBufs) {
    let len = bufs.len() as u64;
    for piece in pieces(offset..offset + len) {
        let mut buf = worker.buffer((piece.end - piece.start) as usize);
        bufs.copy_to((piece.start - offset) as usize, buf.as_mut_slice());
        let hold = worker.hold_write(file, piece.start, piece.end - piece.start).await;
        let (result, _) = worker.transfer(file, OpKind::Write, piece.start, buf.into(), hold).await;
        if result.is_err() {
            return (result, bufs);
        }
    }
    (Ok(()), bufs)
}

/// The wait of a request for the task that writes for it. The task goes on if the request vanishes. Its write may then land at any
/// time.
struct OwnTask<'a> {
    file: &'a File,
    has_ended: Rc<Cell<bool>>,
}

impl Drop for OwnTask<'_> {
    fn drop(&mut self) {
        if !self.has_ended.get() && !sabotage::is(Fault::ForgetOwnTask) {
            self.file.note_abandoned_change();
        }
    }
}

/// Writes a range that is not whole blocks. It is a task of its own, since it must not be left half-way when the
/// caller loses interest: a file may have to be cut back afterwards.
pub(crate) async fn write(
    worker: &Worker,
    file: &File,
    offset: u64,
    bufs: IoBufs,
) -> (Result<(), i32>, IoBufs) {
    let (theirs, on, has_ended) = (worker.uncounted(), file.clone(), Rc::new(Cell::new(false)));
    let _task = OwnTask { file, has_ended: Rc::clone(&has_ended) };
    worker
        .spawn(async move {
            let result = read_modify_write(&theirs, &on, offset, &bufs).await;
            has_ended.set(true);
            (result, bufs)
        })
        .await
}

async fn read_modify_write(worker: &Worker, file: &File, offset: u64, bufs: &IoBufs) -> Result<(), i32> {
    let len = bufs.len() as u64;
    let end = offset + len;
    let whole = widened(file.alignment(), offset, len);
    let block = block(file.alignment());
    // A file that ends within the last block is to be cut back, and nobody may write past its end until then.
    let cuts = || whole.end > file.len().max(end);
    let _claim = loop {
        let will_cut = cuts();
        let mut range = whole.start..if will_cut { u64::MAX } else { whole.end };
        if sabotage::is(Fault::SkipWriteTable) {
            range = u64::MAX - 1..u64::MAX;
        }
        let claim = Claim::take(file, range).await;
        // The file may have been cut while this waited.
        if will_cut || !cuts() {
            break claim;
        }
    };
    let len_after = file.len().max(end);

    // Both edges are read before anything is written, so that a failure leaves the file as it was.
    let head = if offset == whole.start { None } else { Some(read_block(worker, file, whole.start).await?) };
    let last = whole.end - block;
    let tail = if end == whole.end || (head.is_some() && last == whole.start) {
        None
    } else {
        Some(read_block(worker, file, last).await?)
    };
    for piece in pieces(whole.clone()) {
        let mut buf = worker.buffer((piece.end - piece.start) as usize);
        let bytes = buf.as_mut_slice();
        if let Some(head) = head.as_ref().filter(|_| piece.start == whole.start) {
            bytes[..block as usize].copy_from_slice(head.as_slice());
        }
        if let Some(tail) = tail.as_ref().filter(|_| piece.end == whole.end) {
            let at = bytes.len() - block as usize;
            bytes[at..].copy_from_slice(tail.as_slice());
        }
        let (within, at) = common(&piece, offset, len);
        bufs.copy_to(at, &mut bytes[within]);
        worker.transfer(file, OpKind::Write, piece.start, buf.into(), None).await.0?;
    }
    if whole.end > len_after {
        worker.plain(file, OpKind::SetLen, len_after, 0, None).await?;
    }
    Ok(())
}

/// The block at `offset`; past the end of the file it is zero.
async fn read_block(worker: &Worker, file: &File, offset: u64) -> Result<IoBuf, i32> {
    let buf = worker.buffer(block(file.alignment()) as usize);
    let (result, mut bufs) = worker.transfer(file, OpKind::Read, offset, buf.into(), None).await;
    if !sabotage::is(Fault::IgnoreFailedBlockRead) {
        result?;
    }
    bufs.0.pop().ok_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECT: Alignment = Alignment { memory: 512, offset: 512, length: 512 };

    #[test]
    fn requests_are_told_apart() {
        let whole = || IoBufs::from(IoBuf::zeroed(4096));
        assert_eq!(fit(DIRECT, 512, &whole()), Fit::Exact);
        assert_eq!(fit(DIRECT, 100, &whole()), Fit::WrongRange);
        assert_eq!(fit(DIRECT, 0, &IoBuf::zeroed(100).into()), Fit::WrongRange);
        let mut odd = IoBuf::zeroed(4096 + 8);
        let _ = odd.split_to(8);
        assert_eq!(fit(DIRECT, 0, &odd.into()), Fit::WrongMemory);
        // The whole is aligned, its parts are not.
        let mut parts = IoBufs::from(IoBuf::zeroed(100));
        parts.push(IoBuf::zeroed(412));
        assert_eq!(fit(DIRECT, 0, &parts), Fit::WrongMemory);
        assert_eq!(fit(Alignment { memory: 1, offset: 1, length: 1 }, 7, &parts), Fit::Exact);
    }

    #[test]
    fn ranges_are_widened_cut_and_matched() {
        assert_eq!(widened(DIRECT, 1000, 100), 512..1536);
        assert_eq!(widened(DIRECT, 512, 512), 512..1024);
        let cut: Vec<_> = pieces(PIECE - 512..3 * PIECE + 512).collect();
        assert_eq!(
            cut,
            [PIECE - 512..PIECE, PIECE..2 * PIECE, 2 * PIECE..3 * PIECE, 3 * PIECE..3 * PIECE + 512]
        );
        assert_eq!(common(&(512..1536), 1000, 100), (488..588, 0));
        assert_eq!(common(&(1024..2048), 1000, 5000), (0..1024, 24));
    }
}
