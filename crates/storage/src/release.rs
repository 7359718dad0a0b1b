//! Giving memory that was freed back to the system.

/// Gives memory that the process has freed back to the system, where the allocator would keep it for later. Takes
/// some milliseconds at most; to be called after much was freed, not after every request.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` touches only memory that the allocator has not given out, and takes its own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}
