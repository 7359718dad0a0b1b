//! Open disks: calls that return when their work is done.

use crate::arguments::{self, bytes, bytes_mut, known_flags, options, path};
use crate::failure::{Failure, Outcome, answer, answer_long, handle};
use crate::options::{creation, opening};
use crate::{handles, job};
use std::ffi::{c_char, c_int, c_void};
use std::io::IoSlice;
use zebu_disks::packed::{Order, PackedChoice, Reader, prepare};
use zebu_disks::{Context, DiskError, Watch, opener};
use zebu_engine::jobs::Cancel;
use zebu_engine::{Disk, Durability, ErrorKind, Image, ZeroMode};

/// The flag of a write that is durable when it has ended.
const FUA: u32 = 1;
/// The flag of zeroes that keep their space.
const KEEP: u32 = 1;

/// A disk, behind a handle.
#[repr(C)]
pub struct ZebuDisk {
    _nothing: [u8; 0],
}

/// The durability that flags of a write ask for.
pub(crate) fn durability(flags: u32) -> Outcome<Durability> {
    known_flags(flags, FUA)?;
    Ok(if flags & FUA == 0 { Durability::Volatile } else { Durability::Durable })
}

/// The treatment of space that flags of zeroing ask for.
pub(crate) fn zero_mode(flags: u32) -> Outcome<ZeroMode> {
    known_flags(flags, KEEP)?;
    Ok(if flags & KEEP == 0 { ZeroMode::Unmap } else { ZeroMode::Keep })
}

/// Does `work` with a disk.
fn on(disk: *mut ZebuDisk, work: impl FnOnce(&Disk) -> Outcome<()>) -> c_int {
    answer(|| {
        work(&handles::disk(disk)?)?;
        Ok(0)
    })
}

/// Opens an image.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_open(name: *const c_char, words: *const c_char) -> *mut ZebuDisk {
    handle(|| {
        // SAFETY: strings of the caller's, during the call.
        let (name, words) = unsafe { (arguments::name(name, "name")?, options(words)?) };
        let opening = opening(words)?;
        let context = Context::default();
        let allowed = opening.options.refs.clone();
        let remote = opener(&context, &opening.refs)?;
        let mut spec = context.describe(name, opening.options.remote(remote).refs(allowed))?;
        let reader = || Ok::<_, DiskError>(Reader { order: Order::Any, target_size: None });
        prepare(
            &context,
            &PackedChoice::default(),
            &mut spec,
            &[],
            reader,
            &Watch::new(Cancel::default(), &|_, _, _| {}),
        )?;
        if !spec.filters.is_empty() {
            let message = format!("{}: drivers above an image are not opened from C", name.display());
            return Err(Failure::new(libc::ENOTSUP, message));
        }
        let disk = Disk::builder().engine(opening.engine).open(&spec.path, &spec.options)?;
        Ok(handles::add(disk, context))
    })
}

/// Makes an image.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_create(name: *const c_char, size: u64, words: *const c_char) -> c_int {
    answer(|| {
        // SAFETY: strings of the caller's, during the call.
        let (path, words) = unsafe { (path(name, "name")?, options(words)?) };
        let (options, engine) = creation(words)?;
        let options = options.size(size);
        job::run(engine, async |worker| Image::create(worker, path, &options).await.map_err(|e| e.on(path)))?;
        Ok(0)
    })
}

/// Flushes and closes a disk.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_close(disk: *mut ZebuDisk) -> c_int {
    if disk.is_null() {
        return 0;
    }
    on(disk, |open| {
        let closed = open.close();
        if closed.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy) {
            // It is still open.
            return Ok(closed?);
        }
        let removed = handles::remove(disk);
        closed?;
        removed
    })
}

/// The size of a disk in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_size(disk: *mut ZebuDisk) -> i64 {
    answer_long(|| Ok(i64::try_from(handles::disk(disk)?.virtual_size()).unwrap_or(i64::MAX)))
}

/// Reads.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_pread(disk: *mut ZebuDisk, buf: *mut c_void, len: usize, offset: u64) -> c_int {
    // SAFETY: a buffer of the caller's, which nobody else uses during the call.
    on(disk, |disk| Ok(disk.read(offset, unsafe { bytes_mut(buf, len)? })?))
}

/// Writes.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_pwrite(
    disk: *mut ZebuDisk,
    buf: *const c_void,
    len: usize,
    offset: u64,
    flags: u32,
) -> c_int {
    on(disk, |disk| {
        // SAFETY: a buffer of the caller's, which nobody changes during the call.
        let bytes = unsafe { bytes(buf, len)? };
        Ok(disk.write_vectored(offset, &[IoSlice::new(bytes)], durability(flags)?)?)
    })
}

/// Makes a range read as zeroes.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_write_zeroes(disk: *mut ZebuDisk, offset: u64, len: u64, flags: u32) -> c_int {
    on(disk, |disk| Ok(disk.write_zeroes(offset, len, zero_mode(flags)?)?))
}

/// Gives a range up.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_discard(disk: *mut ZebuDisk, offset: u64, len: u64) -> c_int {
    on(disk, |disk| Ok(disk.discard(offset, len)?))
}

/// Makes durable what was written.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_flush(disk: *mut ZebuDisk) -> c_int {
    on(disk, |disk| Ok(disk.flush()?))
}
