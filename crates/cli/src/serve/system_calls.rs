//! The system calls that a server needs once everything is open; all others are refused (seccomp).
//!
//! A call that is refused fails with EPERM and ends nobody: a server with a guest on it is not to die because a library
//! tries something new. Files are Landlock's subject: what opens them is let through to it, so that it can say no. What
//! a ring is asked for is no system call and not seen here; Landlock sees it.

use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, apply_filter_all_threads};
use std::collections::BTreeMap;

/// What is let through on every architecture.
const ALLOWED: &[libc::c_long] = &[
    // Open files.
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
    libc::SYS_copy_file_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_ioctl,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    // Paths, of which Landlock has the say.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_unlinkat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    // Completion queues and waiting.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_pipe2,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    // Sockets that are there, and their clients.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_socketpair,
    // Memory; the log of requests in flight is a memory file.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mprotect,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    // Threads and signals.
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_prctl,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getcpu,
    libc::SYS_tgkill,
    libc::SYS_tkill,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // About the machine and the process.
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_prlimit64,
    libc::SYS_sysinfo,
    libc::SYS_times,
    libc::SYS_uname,
];

/// Older forms of the above, which newer architectures do not have.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_dup2,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_pipe,
    libc::SYS_getrlimit,
    libc::SYS_time,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];

/// From now on, no thread of this process can make other system calls: run programs, make sockets and connect them,
/// mount, change its identity, look into other processes, load code into the kernel.
///
/// # Errors
/// Why the kernel (or the architecture) does not do that, in words.
pub(crate) fn restrict() -> Result<(), String> {
    apply_filter_all_threads(&program()?).map_err(|error| error.to_string())
}

fn program() -> Result<BpfProgram, String> {
    let architecture = std::env::consts::ARCH.try_into().map_err(in_words)?;
    let rules: BTreeMap<i64, Vec<_>> = ALLOWED.iter().chain(OLDER).map(|&call| (call, Vec::new())).collect();
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture).map_err(in_words)?;
    filter.try_into().map_err(in_words)
}

fn in_words(error: BackendError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind::PermissionDenied;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    #[test]
    fn what_a_server_needs_goes_on_and_the_rest_is_refused() {
        let listener = TcpListener::bind("localhost:0").unwrap();
        let address = listener.local_addr().unwrap();
        // A thread of its own, and that one only.
        std::thread::spawn(move || {
            seccompiler::apply_filter(&program().unwrap()).unwrap();
            let refused = [
                TcpStream::connect(address).map(drop),
                Command::new("true").spawn().map(drop),
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::URG)
                    .map_err(Into::into),
            ];
            for result in refused {
                assert_eq!(result.unwrap_err().kind(), PermissionDenied);
            }
            let (mut a, b) = UnixStream::pair().unwrap();
            let file = tempfile::tempfile().unwrap();
            std::thread::spawn(move || file.set_len(10).unwrap()).join().unwrap();
            std::io::Write::write_all(&mut a, b"x").unwrap();
            drop(b);
        })
        .join()
        .unwrap();
    }
}
