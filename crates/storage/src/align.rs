//! The alignment that O_DIRECT asks of requests to a file.
//!
//! The kernel says so since Linux 6.1 (`STATX_DIOALIGN`, statx(2)). Before, devices report their logical block, and
//! for files it has to be found out by reading: a read that is aligned too little fails with EINVAL.

use crate::buf::IoBuf;
use crate::file_types::{Alignment, FileKind};
use crate::memory::PAGE;
use rustix::fs::{AtFlags, StatxFlags};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Blocks larger than this are not taken from the kernel: they would make every request a read-modify-write.
const LARGEST: u32 = 1 << 20;

/// The alignment that direct requests to the file need, or words on why there is none.
pub(crate) fn of_direct(fd: BorrowedFd<'_>, kind: FileKind) -> Result<Alignment, &'static str> {
    if let Some(alignment) = told_by_statx(fd) {
        return Ok(alignment);
    }
    let block = match kind {
        FileKind::BlockDevice => rustix::fs::ioctl_blksszget(fd).ok().filter(|&block| is_sane(block)),
        _ => None,
    };
    let mut buffer = IoBuf::zeroed(3 * PAGE);
    let mut accepts = |address: usize, len: usize| {
        let part = &mut buffer.as_mut_slice()[address..address + len];
        // SAFETY: `part` is `len` writable bytes.
        let read = unsafe { libc::pread(fd.as_raw_fd(), part.as_mut_ptr().cast(), part.len(), 0) };
        // Any other failure says nothing about alignment.
        read >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL)
    };
    probe(block, &mut accepts)
}

fn told_by_statx(fd: BorrowedFd<'_>) -> Option<Alignment> {
    let statx = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let told = statx.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    let (memory, offset) = (statx.stx_dio_mem_align, statx.stx_dio_offset_align);
    // 0 means that direct I/O would silently be buffered; then the probe decides.
    (told && is_sane(memory) && is_sane(offset)).then_some(Alignment { memory, offset, length: offset })
}

/// Finds the alignment from whether the file `accepts(address, len)`, a read at offset 0 into a buffer that begins
/// `address` bytes after the start of a page. `block` is the length that requests need, where it is known.
fn probe(
    block: Option<u32>,
    accepts: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<Alignment, &'static str> {
    const REFUSED: &str = "no alignment was found at which O_DIRECT works; open it with buffered I/O";
    const STEPS: [u32; 5] = [1, 512, 1024, 2048, 4096];
    let page = PAGE as u32;
    let block = match block {
        Some(block) => block,
        None => match STEPS.into_iter().find(|&len| accepts(0, len as usize)) {
            // Nothing is checked here (a hole, an empty file): what is written later may be.
            Some(1) => page,
            Some(len) => len,
            None => return Err(REFUSED),
        },
    };
    let memory = match STEPS.into_iter().find(|&address| accepts(address as usize, block.max(page) as usize))
    {
        Some(1) => block,
        Some(address) => address,
        None => return Err(REFUSED),
    };
    Ok(Alignment { memory, offset: block, length: block })
}

fn is_sane(block: u32) -> bool {
    block.is_power_of_two() && block <= LARGEST
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that checks addresses to `memory` and lengths to `length`.
    fn checked(memory: usize, length: usize) -> impl FnMut(usize, usize) -> bool {
        move |address, len| address.is_multiple_of(memory) && len.is_multiple_of(length)
    }

    #[test]
    fn probing_finds_what_the_file_checks() {
        let found = |memory, length| probe(None, &mut checked(memory, length));
        assert_eq!(found(512, 512), Ok(Alignment { memory: 512, offset: 512, length: 512 }));
        assert_eq!(found(512, 4096), Ok(Alignment { memory: 512, offset: 4096, length: 4096 }));
        assert_eq!(found(4096, 512), Ok(Alignment { memory: 4096, offset: 512, length: 512 }));
        // Every address passes: the length is the safe guess.
        assert_eq!(found(1, 512), Ok(Alignment { memory: 512, offset: 512, length: 512 }));
        // Everything passes: nothing was learned.
        assert_eq!(found(1, 1), Ok(Alignment { memory: 4096, offset: 4096, length: 4096 }));
        assert!(found(8192, 512).is_err());
        assert!(found(512, 8192).is_err());
        assert_eq!(
            probe(Some(512), &mut checked(4096, 512)),
            Ok(Alignment { memory: 4096, offset: 512, length: 512 })
        );
    }
}
