//! Memory of a file that the front end keeps, and may cut short at any time.

use rustix::fs::fstatfs;
use rustix::param::page_size;
use std::fs::File;
use std::io;
use vm_memory::{FileOffset, MmapRegion};
use zebu_storage::MappingGuard;

/// File systems whose pages come from memory or from a disk of this machine, by their magic numbers (statfs(2)). On
/// others, such as FUSE or NFS, touching a page may wait for somebody, and the thread with it.
const TRUSTED: &[u32] = &[
    0x0102_1994, // tmpfs, memory files
    0x9584_58f6, // hugetlbfs
    0x8584_58f6, // ramfs
    0x0000_ef53, // ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // ZFS
];

/// Maps a part of a file. The guard must be dropped before the mapping is, and tells when the memory has vanished.
///
/// # Errors
/// The part is empty or goes past the file's end, its file system is none of [`TRUSTED`], or the system does not map it.
pub(crate) fn map(file: File, offset: u64, len: u64) -> io::Result<(MappingGuard, MmapRegion)> {
    let refuse = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
    let end = offset.checked_add(len).ok_or_else(|| refuse("memory past all offsets".to_owned()))?;
    let size = file.metadata()?.len();
    if len == 0 || size < end {
        return Err(refuse(format!("memory up to byte {end} of a file of {size} bytes")));
    }
    let len = usize::try_from(len).map_err(io::Error::other)?;
    let system = fstatfs(&file)?;
    if !TRUSTED.contains(&(system.f_type as u32)) {
        let magic = system.f_type as u32;
        return Err(refuse(format!(
            "memory on a file system that may keep others waiting ({magic:#x}): use a memory file (memfd), tmpfs or \
             hugetlbfs"
        )));
    }
    // Of hugetlbfs a mapping has whole huge pages.
    let page = usize::try_from(system.f_bsize).unwrap_or(0).max(page_size());
    let whole =
        len.checked_next_multiple_of(page).ok_or_else(|| refuse("memory past all addresses".to_owned()))?;
    let region = MmapRegion::from_file(FileOffset::new(file, offset), len).map_err(io::Error::other)?;
    // SAFETY: the mapping was made just now, readable and writable, with whole pages. Guests change it at any time, so
    // that nothing relies on what is in it. The caller drops the guard first.
    let guard = unsafe { MappingGuard::new(region.as_ptr(), whole) }?;
    Ok((guard, region))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn what_is_not_there_is_not_mapped() {
        let file = || {
            let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(8192).unwrap();
            file
        };
        for (offset, len) in [(0, 8192), (4096, 4096), (0, 100)] {
            assert!(map(file(), offset, len).is_ok());
        }
        for (offset, len) in [(0, 8193), (8192, 1), (0, 0), (u64::MAX, 2), (0, u64::MAX)] {
            assert!(map(file(), offset, len).is_err());
        }
        let odd = map(File::open("/proc/self/exe").unwrap(), 0, 100);
        assert!(odd.is_err(), "it can't be written");
        let error = map(File::open("/proc/version").unwrap(), 0, 0).map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn memory_that_was_cut_is_seen() {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(8192).unwrap();
        let (guard, region) = map(file.try_clone().unwrap(), 0, 8192).unwrap();
        file.set_len(0).unwrap();
        assert!(!guard.has_vanished());
        let slice = vm_memory::VolatileMemory::as_volatile_slice(&region);
        assert_eq!(vm_memory::Bytes::read_obj::<u8>(&slice, 5000).unwrap(), 0);
        assert!(guard.has_vanished());
        drop(guard);
    }
}
