//! The worker's operations on files.

use crate::buf::IoBufs;
use crate::error::{IoError, IoErrorKind, Op};
use crate::file::{Capability, File};
use crate::file_types::{FileExtent, FileKind};
use crate::request::{OpDone, OpKind, OpRequest};
use crate::worker::Worker;

/// The most zero bytes written at once.
const ZEROES: u64 = 1 << 20;

/// What an operation on a file failed with.
fn error(file: &File, op: Op, kind: IoErrorKind, offset: u64, len: u64) -> IoError {
    IoError { op, kind, path: file.path().to_owned(), offset, len, detail: None }
}

/// Whether the errno means that the file cannot do this at all (Q3.5's map).
fn is_refusal(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::ENOTTY)
}

impl Worker {
    /// Reads `bufs.len()` bytes at `offset`. What lies past the end of the file reads as zero.
    pub async fn read(&self, file: &File, offset: u64, bufs: IoBufs) -> (Result<(), IoError>, IoBufs) {
        self.transfer(file, OpKind::Read, offset, bufs).await
    }

    /// Writes `bufs` at `offset`, all of it or an error. Unaligned parts under O_DIRECT are read-modify-write,
    /// serialised against every other write of the same blocks of this file in this process; if their read fails,
    /// nothing is written.
    pub async fn write(&self, file: &File, offset: u64, bufs: IoBufs) -> (Result<(), IoError>, IoBufs) {
        self.transfer(file, OpKind::Write, offset, bufs).await
    }

    async fn transfer(
        &self,
        file: &File,
        kind: OpKind,
        offset: u64,
        bufs: IoBufs,
    ) -> (Result<(), IoError>, IoBufs) {
        let len = bufs.len() as u64;
        if len == 0 {
            return (Ok(()), bufs);
        }
        let op = kind.op();
        if offset.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return (Err(error(file, op, IoErrorKind::Os(libc::EFBIG), offset, len)), bufs);
        }
        self.count(|stats| {
            if op == Op::Read {
                stats.reads += 1;
                stats.read_bytes += len;
            } else {
                stats.writes += 1;
                stats.write_bytes += len;
            }
        });
        let request = Box::new(OpRequest { file: file.clone(), kind, offset, len, bufs });
        let (request, result) = self.operate(request).await;
        let result = result.map(drop).map_err(|errno| error(file, op, IoErrorKind::Os(errno), offset, len));
        (result, request.bufs)
    }

    /// An operation without buffers; the errno if it failed.
    async fn plain(&self, file: &File, kind: OpKind, offset: u64, len: u64) -> Result<OpDone, i32> {
        if offset.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return Err(libc::EFBIG);
        }
        let request = Box::new(OpRequest { file: file.clone(), kind, offset, len, bufs: IoBufs::new() });
        self.operate(request).await.1
    }

    /// fdatasync. After one failed, every later one of this file fails too.
    pub async fn flush(&self, file: &File) -> Result<(), IoError> {
        if file.skips_flush() {
            return Ok(());
        }
        let fail = |kind| error(file, Op::Flush, kind, 0, 0);
        if file.has_flush_failed() {
            return Err(fail(IoErrorKind::FlushFailedBefore));
        }
        self.count(|stats| stats.flushes += 1);
        self.plain(file, OpKind::Flush, 0, 0).await.map_err(|errno| fail(IoErrorKind::Os(errno)))?;
        // One that ran beside it may have failed and taken the kernel's only report of the loss.
        if file.has_flush_failed() {
            return Err(fail(IoErrorKind::FlushFailedBefore));
        }
        Ok(())
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
        self.count(|stats| stats.fallocates += 1);
        match self.plain(file, kind, offset, len).await {
            Ok(_) => Ok(()),
            Err(errno) if is_refusal(errno) => {
                file.refuse(needs);
                Err(IoErrorKind::Unsupported)
            }
            Err(errno) => Err(IoErrorKind::Os(errno)),
        }
    }

    /// Gives a range back to the file system; it reads as zero afterwards. The length of the file stays.
    /// `Unsupported` where it can't (remembered, not tried again).
    pub async fn punch_hole(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        if len == 0 {
            return Ok(());
        }
        self.fallocate(file, OpKind::Punch, Capability::Punch, offset, len)
            .await
            .map_err(|kind| error(file, Op::Punch, kind, offset, len))
    }

    /// Makes a range read as zero and keeps its space. The length of the file stays or grows to the range's end.
    /// `Unsupported` where it can't without writing zeroes.
    pub async fn zero_range(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        if len == 0 {
            return Ok(());
        }
        let fail = |kind| error(file, Op::ZeroRange, kind, offset, len);
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
        self.plain(file, OpKind::SetLen, len, 0).await.map_err(|errno| fail(IoErrorKind::Os(errno)))?;
        Ok(())
    }

    /// The run of data or hole at `offset` (SEEK_DATA, SEEK_HOLE), at most to the end of the file; where the file
    /// can't tell, everything is data. `offset` at or past the end: a hole of `u64::MAX - offset` bytes.
    pub async fn extent_at(&self, file: &File, offset: u64) -> Result<FileExtent, IoError> {
        if offset >= file.len() {
            return Ok(FileExtent { offset, len: u64::MAX - offset, hole: true });
        }
        match self.plain(file, OpKind::ExtentAt, offset, 0).await {
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
        let kind = OpKind::CopyRange { src: src.clone(), src_offset };
        match self.plain(dst, kind, dst_offset, len).await {
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
        let kind = OpKind::CloneRange { src: src.clone(), src_offset };
        match self.plain(dst, kind, dst_offset, len).await {
            Ok(_) => Ok(()),
            Err(errno) => Err(error(dst, Op::CopyRange, copy_error(errno), dst_offset, len)),
        }
    }
}

/// Why the kernel did not copy or clone. EINVAL is its word for ranges and kinds of file that it can't do.
fn copy_error(errno: i32) -> IoErrorKind {
    if is_refusal(errno) || matches!(errno, libc::EXDEV | libc::EINVAL) {
        IoErrorKind::Unsupported
    } else {
        IoErrorKind::Os(errno)
    }
}
