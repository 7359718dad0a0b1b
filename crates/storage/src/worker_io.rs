//! The worker's operations on files.

use crate::buf::IoBufs;
use crate::drive::{BETWEEN_LOOKS, while_driven};
use crate::error::{IoError, IoErrorKind, Op};
use crate::file::{Capability, File};
use crate::file_types::{FileExtent, FileKind};
use crate::operation::Claim;
use crate::request::{OpDone, OpKind, OpRequest};
use crate::sabotage::{self, Fault};
use crate::syncs::{SeenBy, SyncNumber};
use crate::unaligned::{self, Fit};
use crate::worker::Worker;
use std::ops::Range;
use std::sync::Arc;

/// Block devices punch and zero whole logical blocks only; no device has larger ones, and partial discards are of
/// no use to any.
const DEVICE_BLOCK: u64 = 4096;
/// A multiple of the block of every file system: the page cache keeps no part of a block.
const LARGEST_BLOCK: u64 = 65536;
/// The most zero bytes written at once.
const ZEROES: u64 = 1 << 20;

/// The error of an operation on a file.
fn error(file: &File, op: Op, kind: IoErrorKind, offset: u64, len: u64) -> IoError {
    IoError { op, kind, path: file.path().to_owned(), offset, len, detail: None }
}

/// Whether the errno means that the file cannot do this at all.
fn is_refusal(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::ENOTTY)
}

/// Whether the range ends where files may end.
fn is_within_limits(offset: u64, len: u64) -> bool {
    // Room is left to round up to whole blocks.
    offset.checked_add(len).is_some_and(|end| end <= i64::MAX as u64 - (1 << 30))
}

impl Worker {
    /// Reads `bufs.len()` bytes at `offset`. What lies past the end of the file reads as zero.
    pub async fn read(&self, file: &File, offset: u64, bufs: IoBufs) -> (Result<(), IoError>, IoBufs) {
        let len = bufs.len() as u64;
        if len == 0 {
            return (Ok(()), bufs);
        }
        let fail = |errno| error(file, Op::Read, IoErrorKind::Os(errno), offset, len);
        if !is_within_limits(offset, len) {
            return (Err(fail(libc::EFBIG)), bufs);
        }
        let (result, bufs) = if unaligned::fit(file.alignment(), offset, &bufs) == Fit::Exact {
            self.transfer(file, OpKind::Read, offset, bufs, None).await
        } else {
            self.count(|stats| stats.misaligned += 1);
            Box::pin(unaligned::read(self, file, offset, bufs)).await
        };
        (result.map_err(fail), bufs)
    }

    /// Writes `bufs` at `offset`, all of it or an error. Unaligned parts under O_DIRECT are read-modify-write,
    /// serialised against every other write of the same blocks of this file in this process; if their read fails,
    /// nothing is written. (Where that pads the last block of a file, the file is cut back at once; a crash in between
    /// leaves it up to a block longer, with zeroes.)
    ///
    /// # Panics
    /// In debug builds, if another request past the end of the file is in flight, and this one is past it too.
    pub async fn write(&self, file: &File, offset: u64, bufs: IoBufs) -> (Result<(), IoError>, IoBufs) {
        let len = bufs.len() as u64;
        if len == 0 {
            return (Ok(()), bufs);
        }
        let fail = |errno| error(file, Op::Write, IoErrorKind::Os(errno), offset, len);
        if !is_within_limits(offset, len) {
            return (Err(fail(libc::EFBIG)), bufs);
        }
        let fit = unaligned::fit(file.alignment(), offset, &bufs);
        if fit == Fit::Exact {
            let hold = self.hold_write(file, offset, len).await;
            let (result, bufs) = self.transfer(file, OpKind::Write, offset, bufs, hold).await;
            return (result.map_err(fail), bufs);
        }
        self.count(|stats| stats.misaligned += 1);
        let (result, bufs) = if fit == Fit::WrongMemory {
            Box::pin(unaligned::write_blocks(self, file, offset, bufs)).await
        } else {
            Box::pin(unaligned::write(self, file, offset, bufs)).await
        };
        (result.map_err(fail), bufs)
    }

    /// fdatasync. After one failed, every later one of this file fails too, and so does one that ran beside it. So does every one
    /// after a change of the file was abandoned while it was under way.
    ///
    /// Syncs of other workers that began before this one ended are waited for, however long they take: one of them may have
    /// been told of the loss of what this one was to make durable. One whose worker nobody drives is given up after a while
    /// ([`crate::drive`]): if it failed, later flushes say so.
    pub async fn flush(&self, file: &File) -> Result<(), IoError> {
        let fail = |kind| error(file, Op::Flush, kind, 0, 0);
        if file.skips_flush() && (!file.has_flush_failed() || sabotage::is(Fault::BelieveUnsafeFlush)) {
            return Ok(());
        }
        if file.has_flush_failed() {
            return Err(fail(IoErrorKind::FlushFailedBefore));
        }
        self.count(|stats| stats.flushes += 1);
        let mut request = OpRequest::new(file.clone(), OpKind::Flush, 0, 0, IoBufs::new(), None);
        request.sync = Some(file.syncs().begin(SeenBy::Worker(Arc::clone(self.drive()))));
        let (_, result) = self.shown(file, "a flush", self.operate(file, Box::new(request))).await;
        result.map_err(|errno| fail(IoErrorKind::Os(errno)))?;
        // One that ran beside it may have failed and taken the kernel's only report of the loss.
        if let Some(last) = file.syncs().last() {
            self.shown(file, "other flushes", self.see_the_end_of(file, last)).await;
        }
        if file.has_flush_failed() {
            return Err(fail(IoErrorKind::FlushFailedBefore));
        }
        self.drop_durable(file).await;
        Ok(())
    }

    /// Waits until the syncs of a file up to `last` have ended, or can't be seen to end.
    async fn see_the_end_of(&self, file: &File, last: SyncNumber) {
        let syncs = file.syncs();
        let pause = async || self.sleep(BETWEEN_LOOKS).await;
        while let Err(undriven) = while_driven(pause, || syncs.seen_by(last), syncs.wait(last)).await {
            syncs.give_up(last, &undriven);
        }
    }

    /// An fallocate; a refusal is remembered and told as `Unsupported`.
    async fn fallocate(
        &self,
        file: &File,
        kind: OpKind,
        needs: Capability,
        offset: u64,
        len: u64,
    ) -> Result<(), IoErrorKind> {
        if !file.can(needs) {
            return Err(IoErrorKind::Unsupported);
        }
        if len == 0 {
            return Ok(());
        }
        if !is_within_limits(offset, len) {
            return Err(IoErrorKind::Os(libc::EFBIG));
        }
        let hold = self.hold_write(file, offset, len).await;
        self.count(|stats| stats.fallocates += 1);
        match self.plain(file, kind, offset, len, hold).await {
            Ok(_) => Ok(()),
            Err(errno) if is_refusal(errno) => {
                file.refuse(needs);
                Err(IoErrorKind::Unsupported)
            }
            Err(errno) => Err(IoErrorKind::Os(errno)),
        }
    }

    /// Gives a range back to the file system; it reads as zero afterwards. The length of the file stays.
    /// `Unsupported` where it can't (remembered, not tried again). Of a block device, whole blocks of 4096 bytes are
    /// given back; the rest of the range is written.
    pub async fn punch_hole(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        if len == 0 {
            return Ok(());
        }
        let whole = whole_blocks(file, offset, len);
        self.fallocate(file, OpKind::Punch, Capability::Punch, whole.start, whole.end - whole.start)
            .await
            .map_err(|kind| error(file, Op::Punch, kind, offset, len))?;
        self.write_zero_edges(file, offset, len, whole).await
    }

    /// Writes zeroes to what `whole` leaves of a range.
    async fn write_zero_edges(
        &self,
        file: &File,
        offset: u64,
        len: u64,
        whole: Range<u64>,
    ) -> Result<(), IoError> {
        if whole.start > offset {
            self.write_zero_bytes(file, offset, whole.start - offset).await?;
        }
        if whole.end < offset + len {
            self.write_zero_bytes(file, whole.end, offset + len - whole.end).await?;
        }
        Ok(())
    }

    /// Makes a range read as zero and keeps its space. The length of the file stays or grows to the range's end.
    /// `Unsupported` where it can't without writing zeroes.
    pub async fn zero_range(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        if len == 0 {
            return Ok(());
        }
        let fail = |kind| error(file, Op::ZeroRange, kind, offset, len);
        if file.kind() == FileKind::BlockDevice {
            let whole = whole_blocks(file, offset, len);
            let (kind, needs) = (OpKind::ZeroRange, Capability::ZeroRange);
            self.fallocate(file, kind, needs, whole.start, whole.end - whole.start).await.map_err(fail)?;
            return self.write_zero_edges(file, offset, len, whole).await;
        }
        match self.fallocate(file, OpKind::ZeroRange, Capability::ZeroRange, offset, len).await {
            Ok(()) => return Ok(()),
            // EINVAL: some file systems have it, but not for this range.
            Err(IoErrorKind::Unsupported | IoErrorKind::Os(libc::EINVAL)) => {}
            Err(kind) => return Err(fail(kind)),
        }
        if !file.can_allocate() {
            return Err(fail(IoErrorKind::Unsupported));
        }
        // Space that a hole gets, and space past the end, reads as zero. A crash in between leaves a hole: zeroes
        // as well.
        if offset < file.len() {
            self.fallocate(file, OpKind::Punch, Capability::Punch, offset, len).await.map_err(fail)?;
        }
        self.fallocate(file, OpKind::Allocate, Capability::Allocate, offset, len).await.map_err(fail)
    }

    /// Reserves space for a range; bytes that were holes read as zero. Grows the file to the range's end.
    pub async fn allocate(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        if len == 0 {
            return Ok(());
        }
        self.fallocate(file, OpKind::Allocate, Capability::Allocate, offset, len)
            .await
            .map_err(|kind| error(file, Op::Allocate, kind, offset, len))
    }

    /// Writes zero bytes (real writes, unaligned edges as [`Worker::write`]).
    pub async fn write_zero_bytes(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        let mut done = 0;
        let mut zeroes = IoBufs::new();
        while done < len {
            // Pieces end at multiples of their size, so that only the edges can be unaligned.
            let at = offset.saturating_add(done);
            let piece = (ZEROES - at % ZEROES).min(len - done);
            if (zeroes.len() as u64) < piece {
                let mut buf = self.buffer((len - done).min(ZEROES) as usize);
                buf.as_mut_slice().fill(0);
                zeroes = buf.into();
            }
            let (result, mut used) = {
                let part = zeroes.split_to(piece as usize);
                self.write(file, at, part).await
            };
            result?;
            used.append(zeroes);
            zeroes = used;
            done += piece;
        }
        Ok(())
    }

    /// Cuts or extends a regular file; what is new reads as zero. Devices are `Unsupported`.
    pub async fn set_len(&self, file: &File, len: u64) -> Result<(), IoError> {
        let fail = |kind| error(file, Op::SetLen, kind, len, 0);
        if file.kind() == FileKind::BlockDevice {
            return Err(fail(IoErrorKind::Unsupported));
        }
        if !is_within_limits(len, 0) {
            return Err(fail(IoErrorKind::Os(libc::EFBIG)));
        }
        let from = len.min(file.len());
        let hold = if from.is_multiple_of(LARGEST_BLOCK) {
            self.hold_write(file, from, u64::MAX).await
        } else {
            // The rest of the last block is zeroed through the page cache. ext4 does so without waiting for direct
            // writes in flight to the block: it fails the next flush with EIO, or writes stale bytes over them.
            Claim::take(file, from - from % LARGEST_BLOCK..u64::MAX).await.into_hold()
        };
        let done = self.plain(file, OpKind::SetLen, len, 0, hold).await;
        done.map_err(|errno| fail(IoErrorKind::Os(errno)))?;
        Ok(())
    }

    /// The run of data or hole at `offset` (SEEK_DATA, SEEK_HOLE), at most to the end of the file; where the file
    /// can't tell, everything is data. `offset` at or past the end: a hole of `u64::MAX - offset` bytes.
    pub async fn extent_at(&self, file: &File, offset: u64) -> Result<FileExtent, IoError> {
        if offset >= file.len() {
            return Ok(FileExtent { offset, len: u64::MAX - offset, hole: true });
        }
        match self.plain(file, OpKind::ExtentAt, offset, 0, None).await {
            Ok(OpDone::Extent(extent)) => Ok(extent),
            Ok(OpDone::Done | OpDone::Copied(_)) => {
                Ok(FileExtent { offset, len: file.len().saturating_sub(offset).max(1), hole: false })
            }
            Err(errno) => Err(error(file, Op::Seek, IoErrorKind::Os(errno), offset, 0)),
        }
    }

    /// Copies between files in the kernel (copy_file_range). Returns the bytes copied, which may be fewer;
    /// 0 at the end of the source. `Unsupported` where the kernel can't between these files.
    pub async fn copy_range(
        &self,
        src: &File,
        src_offset: u64,
        dst: &File,
        dst_offset: u64,
        len: u64,
    ) -> Result<u64, IoError> {
        if len == 0 {
            return Ok(0);
        }
        if !(is_within_limits(src_offset, len) && is_within_limits(dst_offset, len)) {
            return Err(error(dst, Op::CopyRange, IoErrorKind::Os(libc::EFBIG), dst_offset, len));
        }
        let hold = self.hold_write(dst, dst_offset, len).await;
        let kind = OpKind::CopyRange { src: src.clone(), src_offset };
        match self.plain(dst, kind, dst_offset, len, hold).await {
            Ok(OpDone::Copied(copied)) => Ok(copied),
            Ok(OpDone::Done | OpDone::Extent(_)) => Ok(0),
            Err(errno) => Err(error(dst, Op::CopyRange, copy_error(errno), dst_offset, len)),
        }
    }

    /// Shares a block-aligned range between files of one file system (FICLONERANGE), all or an error.
    /// `Unsupported` where it can't: other file systems, ranges that are not whole blocks.
    pub async fn clone_range(
        &self,
        src: &File,
        src_offset: u64,
        dst: &File,
        dst_offset: u64,
        len: u64,
    ) -> Result<(), IoError> {
        if len == 0 {
            return Ok(());
        }
        if !(is_within_limits(src_offset, len) && is_within_limits(dst_offset, len)) {
            return Err(error(dst, Op::CopyRange, IoErrorKind::Os(libc::EFBIG), dst_offset, len));
        }
        let hold = self.hold_write(dst, dst_offset, len).await;
        let kind = OpKind::CloneRange { src: src.clone(), src_offset };
        match self.plain(dst, kind, dst_offset, len, hold).await {
            Ok(_) => Ok(()),
            Err(errno) => Err(error(dst, Op::CopyRange, copy_error(errno), dst_offset, len)),
        }
    }
}

/// The part of a range that fallocate can do: all of a file's, the whole blocks of a device's.
fn whole_blocks(file: &File, offset: u64, len: u64) -> Range<u64> {
    let end = offset.saturating_add(len);
    if file.kind() != FileKind::BlockDevice {
        return offset..end;
    }
    let start = offset.checked_next_multiple_of(DEVICE_BLOCK).unwrap_or(offset).min(end);
    start..start.max(end - end % DEVICE_BLOCK)
}

/// Why the kernel did not copy or clone. EINVAL is its word for ranges and kinds of file that it can't do.
fn copy_error(errno: i32) -> IoErrorKind {
    if is_refusal(errno) || matches!(errno, libc::EXDEV | libc::EINVAL) {
        IoErrorKind::Unsupported
    } else {
        IoErrorKind::Os(errno)
    }
}
