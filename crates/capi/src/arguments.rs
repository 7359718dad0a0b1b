//! Arguments of C, as values of Rust.

use crate::failure::{Failure, Outcome};
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use zebu_storage::{IoBuf, IoBufs, IoMemory};

/// The most parts of one request, as of readv(2).
const MOST_PARTS: usize = 1024;

/// The name of a disk.
///
/// # Safety
/// `name` is NULL, or a string that lives as long as `'a`.
pub(crate) unsafe fn name<'a>(name: *const c_char, argument: &str) -> Outcome<&'a OsStr> {
    if name.is_null() {
        return Err(Failure::invalid(format!("{argument} is NULL")));
    }
    // SAFETY: the caller's word.
    let bytes = unsafe { CStr::from_ptr(name) }.to_bytes();
    if bytes.is_empty() {
        return Err(Failure::invalid(format!("{argument} is empty")));
    }
    Ok(OsStr::from_bytes(bytes))
}

/// The path of an image.
///
/// # Safety
/// As [`name`].
pub(crate) unsafe fn path<'a>(given: *const c_char, argument: &str) -> Outcome<&'a Path> {
    // SAFETY: the caller's word.
    let path = Path::new(unsafe { name(given, argument)? });
    if path.as_os_str().as_bytes().windows(3).any(|three| three == b"://") {
        let message = format!(
            "{}: the library of C opens URLs to read and write them, and does no more with them; the command zebu does",
            path.display()
        );
        return Err(Failure::new(libc::ENOTSUP, message));
    }
    Ok(path)
}

/// A string of options. NULL is none.
///
/// # Safety
/// `options` is NULL, or a string that lives as long as `'a`.
pub(crate) unsafe fn options<'a>(options: *const c_char) -> Outcome<&'a str> {
    if options.is_null() {
        return Ok("");
    }
    // SAFETY: the caller's word.
    let text = unsafe { CStr::from_ptr(options) };
    text.to_str().map_err(|_| Failure::invalid("options are not in UTF-8"))
}

/// Bytes at `buf`, which are there.
fn part(buf: *const c_void, len: usize) -> Outcome<*mut u8> {
    if buf.is_null() && len > 0 {
        return Err(Failure::invalid(format!("the buffer of {len} bytes is NULL")));
    }
    if isize::try_from(len).is_err() {
        return Err(Failure::invalid(format!("a buffer of {len} bytes is longer than memory can be")));
    }
    Ok(if buf.is_null() { std::ptr::dangling_mut() } else { buf.cast_mut().cast() })
}

/// Bytes that are only read.
///
/// # Safety
/// `buf` is NULL or points to `len` bytes, which nobody changes during `'a`.
pub(crate) unsafe fn bytes<'a>(buf: *const c_void, len: usize) -> Outcome<&'a [u8]> {
    let start = part(buf, len)?;
    // SAFETY: the caller's word; none of the bytes are at an address that dangles.
    Ok(unsafe { std::slice::from_raw_parts(start, len) })
}

/// Bytes that are filled.
///
/// # Safety
/// `buf` is NULL or points to `len` bytes, which nobody else uses during `'a`.
pub(crate) unsafe fn bytes_mut<'a>(buf: *mut c_void, len: usize) -> Outcome<&'a mut [u8]> {
    let start = part(buf, len)?;
    // SAFETY: the caller's word; none of the bytes are at an address that dangles. What they hold is no matter: any byte is one.
    Ok(unsafe { std::slice::from_raw_parts_mut(start, len) })
}

/// Memory of the caller's, which lasts until the completion of the request.
struct OfCaller;

// SAFETY: `buffers` has it from its caller that the memory stays as long as views of it.
unsafe impl IoMemory for OfCaller {}

/// The buffers of a request that goes on after the call.
///
/// # Safety
/// `iov` is NULL or points to `count` parts. Each is NULL or memory that stays until the request has ended, and that nobody
/// uses meanwhile but for what is only written to the disk, which others may read.
pub(crate) unsafe fn buffers(iov: *const libc::iovec, count: c_int) -> Outcome<IoBufs> {
    let count = usize::try_from(count).ok().filter(|count| *count <= MOST_PARTS);
    let Some(count) = count else {
        return Err(Failure::invalid(format!("a request has from 0 to {MOST_PARTS} buffers")));
    };
    if iov.is_null() && count > 0 {
        return Err(Failure::invalid("iov is NULL"));
    }
    let parts = if count == 0 {
        &[]
    } else {
        // SAFETY: the caller's word.
        unsafe { std::slice::from_raw_parts(iov, count) }
    };
    let mut bufs = IoBufs::new();
    let mut total = 0_usize;
    for iovec in parts {
        let start = part(iovec.iov_base, iovec.iov_len)?;
        total = total.saturating_add(iovec.iov_len);
        if iovec.iov_len == 0 {
            continue;
        }
        // An owner for each, so that no two are taken for neighbours in one allocation.
        // SAFETY: the caller's word. Two requests may name the same bytes, as guests do.
        bufs.push_part(unsafe { IoBuf::from_memory(Arc::new(OfCaller), start, iovec.iov_len) });
    }
    if isize::try_from(total).is_err() {
        return Err(Failure::invalid(format!("a request of {total} bytes is longer than memory can be")));
    }
    Ok(bufs)
}

/// Fails for flags that the function does not know.
pub(crate) fn known_flags(flags: u32, known: u32) -> Outcome<()> {
    if flags & !known == 0 {
        Ok(())
    } else {
        Err(Failure::invalid(format!("unknown flags {:#x}", flags & !known)))
    }
}
