//! One operation by system calls that wait, for threads.

use crate::buf::IoBufs;
use crate::file::File;
use crate::file_types::FileExtent;
use crate::request::{OpDone, OpKind, OpRequest};
use smallvec::SmallVec;
use std::io;

/// The most vectors that the kernel takes in one call (`UIO_MAXIOV`).
pub(crate) const MAX_VECTORS: usize = 1024;
/// The most bytes moved in one call: what the kernel takes at most (`MAX_RW_COUNT`), in whole MiB.
#[cfg(feature = "io-uring")]
pub(crate) const MAX_BYTES: usize = 0x7ff0_0000;

/// Does the operation and adds the system calls that it took to `calls`.
pub(crate) fn execute(request: &mut OpRequest, calls: &mut u64) -> Result<OpDone, i32> {
    let Some(os) = request.file.os() else { return Err(libc::EBADF) };
    let fd = os.raw_fd();
    let (offset, len) = (request.offset as libc::off64_t, request.len as libc::off64_t);
    match &request.kind {
        OpKind::Read | OpKind::Write => return transfer(request, fd, calls),
        // SAFETY: a system call without pointers, on a descriptor that the request's file keeps open.
        OpKind::Flush => retry(calls, || i64::from(unsafe { libc::fdatasync(fd) }))?,
        OpKind::Punch | OpKind::ZeroRange | OpKind::Allocate => {
            let mode = fallocate_mode(&request.kind);
            // SAFETY: as above.
            retry(calls, || i64::from(unsafe { libc::fallocate64(fd, mode, offset, len) }))?
        }
        // SAFETY: as above.
        OpKind::SetLen => retry(calls, || i64::from(unsafe { libc::ftruncate64(fd, offset) }))?,
        OpKind::ExtentAt => return extent_at(&request.file, fd, request.offset, calls).map(OpDone::Extent),
        OpKind::CopyRange { src, src_offset } => {
            let Some(src) = src.os() else { return Err(libc::EBADF) };
            let (mut from, mut to) = (*src_offset as libc::off64_t, offset);
            let len = usize::try_from(request.len).unwrap_or(usize::MAX).min(1 << 30);
            // SAFETY: both offsets live through the call.
            let copied = retry(calls, || unsafe {
                libc::copy_file_range(src.raw_fd(), &raw mut from, fd, &raw mut to, len, 0) as i64
            })?;
            return Ok(OpDone::Copied(copied as u64));
        }
        OpKind::CloneRange { src, src_offset } => {
            let Some(src) = src.os() else { return Err(libc::EBADF) };
            let range = FileCloneRange {
                src_fd: src.raw_fd().into(),
                src_offset: *src_offset,
                src_length: request.len,
                dest_offset: request.offset,
            };
            // SAFETY: the request reads one `file_clone_range`.
            retry(calls, || i64::from(unsafe { libc::ioctl(fd, FICLONERANGE, &raw const range) }))?
        }
    };
    Ok(OpDone::Done)
}

/// The mode for fallocate(2) of the three kinds that use it.
pub(crate) fn fallocate_mode(kind: &OpKind) -> libc::c_int {
    match kind {
        OpKind::Punch => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        OpKind::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
        _ => 0,
    }
}

/// `struct file_clone_range` of linux/fs.h.
#[repr(C)]
struct FileCloneRange {
    src_fd: i64,
    src_offset: u64,
    src_length: u64,
    dest_offset: u64,
}

const FICLONERANGE: libc::Ioctl = libc::_IOW::<FileCloneRange>(0x94, 13);

/// The vectors for what is left of the buffers after the first `done` bytes, as many as one call takes.
pub(crate) fn vectors(bufs: &mut IoBufs, done: usize) -> impl Iterator<Item = libc::iovec> {
    let mut skip = done;
    let left = bufs.0.iter_mut().filter_map(move |buf| {
        let len = buf.len();
        if skip >= len {
            skip -= len;
            return None;
        }
        let base = buf.as_mut_ptr().wrapping_add(skip);
        let vector = libc::iovec { iov_base: base.cast(), iov_len: len - skip };
        skip = 0;
        Some(vector)
    });
    left.take(MAX_VECTORS)
}

/// The next step after the kernel moved `moved` bytes more: the end, an errno, or (`None`) another call for the
/// rest. At the end of the file, fills what is left of a read with zeroes.
pub(crate) fn after_transfer(
    request: &mut OpRequest,
    done: &mut usize,
    moved: usize,
) -> Result<Option<OpDone>, i32> {
    let total = request.len as usize;
    *done += moved;
    if *done >= total {
        return Ok(Some(OpDone::Done));
    }
    if matches!(request.kind, OpKind::Read) {
        // A direct read that ends within a block has met the end of the file; the rest can't be asked for.
        let at_end = moved == 0 || !done.is_multiple_of(request.file.alignment().length as usize);
        if at_end {
            request.bufs.fill(*done, total - *done, 0);
            return Ok(Some(OpDone::Done));
        }
    } else if moved == 0 {
        return Err(libc::ENOSPC);
    }
    Ok(None)
}

/// Reads or writes all of the buffers, however the kernel cuts it.
fn transfer(request: &mut OpRequest, fd: libc::c_int, calls: &mut u64) -> Result<OpDone, i32> {
    let is_read = matches!(request.kind, OpKind::Read);
    let flags = request.transfer_flags();
    let mut done = 0;
    loop {
        let vectors: SmallVec<[libc::iovec; 8]> = vectors(&mut request.bufs, done).collect();
        let (base, count) = (vectors.as_ptr(), vectors.len() as libc::c_int);
        let at = (request.offset + done as u64) as libc::off64_t;
        let moved = retry(calls, || {
            // SAFETY: the vectors cover exactly the request's own buffers, which live and stay put through the call
            // and which only this thread has access to.
            let moved = unsafe {
                match (is_read, &vectors[..]) {
                    (true, _) if flags != 0 => libc::preadv2(fd, base, count, at, flags),
                    (false, _) if flags != 0 => libc::pwritev2(fd, base, count, at, flags),
                    (true, [one]) => libc::pread64(fd, one.iov_base, one.iov_len, at),
                    (false, [one]) => libc::pwrite64(fd, one.iov_base, one.iov_len, at),
                    (true, _) => libc::preadv64(fd, base, count, at),
                    (false, _) => libc::pwritev64(fd, base, count, at),
                }
            };
            moved as i64
        })?;
        if let Some(end) = after_transfer(request, &mut done, moved as usize)? {
            return Ok(end);
        }
    }
}

/// The run at `offset`, which lies before the end of the file.
fn extent_at(file: &File, fd: libc::c_int, offset: u64, calls: &mut u64) -> Result<FileExtent, i32> {
    let end = file.len().max(offset + 1);
    let run = |until: u64, hole| Ok(FileExtent { offset, len: until.clamp(offset + 1, end) - offset, hole });
    // SAFETY: a system call without pointers. The file's position, which it moves, is used by nobody.
    let data = match retry(calls, || unsafe { libc::lseek64(fd, offset as libc::off64_t, libc::SEEK_DATA) }) {
        Ok(data) => data as u64,
        // No data up to the end.
        Err(libc::ENXIO) => return run(end, true),
        // The file can't tell.
        Err(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS) => return run(end, false),
        Err(errno) => return Err(errno),
    };
    if data > offset {
        return run(data, true);
    }
    // SAFETY: as above.
    match retry(calls, || unsafe { libc::lseek64(fd, offset as libc::off64_t, libc::SEEK_HOLE) }) {
        // A hole punched since the first question makes a run of no bytes: `run` makes that one byte of data, which
        // is slow and right.
        Ok(hole) => run(hole as u64, false),
        Err(libc::ENXIO) => run(end, true),
        Err(errno) => Err(errno),
    }
}

/// Makes a system call again while it is interrupted.
fn retry(calls: &mut u64, mut call: impl FnMut() -> i64) -> Result<i64, i32> {
    loop {
        *calls += 1;
        let result = call();
        if result >= 0 {
            return Ok(result);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error.raw_os_error().unwrap_or(libc::EIO));
        }
    }
}
