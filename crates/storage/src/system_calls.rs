//! The system calls of workers, for the filters of jails.

/// System calls that a worker and its threads make once files are open and the worker is made
/// ([`DetachedWorker`](crate::DetachedWorker)), in the ways of all engines. A filter (seccomp) that is put on a thread with a
/// worker, or on one that calls a disk whose methods wait, allows them; whoever calls from that thread needs further ones of
/// its own. It also answers [`SYSTEM_CALLS_TO_REFUSE`].
///
/// The numbers are those of this architecture. `clone3` may be answered with ENOSYS instead: then `clone` is called.
pub const SYSTEM_CALLS: &[core::ffi::c_long] = &[
    // Files that are open.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_sync_file_range,
    libc::SYS_copy_file_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_fcntl,
    libc::SYS_close,
    // Extent size hints, and copies that share blocks.
    libc::SYS_ioctl,
    // Completion queues and waiting. Rings register files and buffers as they go (`RING_REGISTRATIONS`).
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_eventfd2,
    libc::SYS_ppoll,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mprotect,
    libc::SYS_membarrier,
    // Threads that help, and their ends.
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_prctl,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Seeds of hash tables.
    libc::SYS_getrandom,
];

/// System calls that are made as well, and may be refused with an errno, but must not end the process. The allocator of glibc
/// opens a file of sysfs to count the processors when a new thread allocates.
pub const SYSTEM_CALLS_TO_REFUSE: &[core::ffi::c_long] = &[libc::SYS_openat];
