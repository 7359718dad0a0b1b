//! The system calls that a server needs once everything is open; all others are refused (seccomp).
//!
//! A call that is refused fails with EPERM and ends nobody: a server with a guest on it is not to die because a library
//! tries something new. Files are Landlock's subject: what opens them is let through to it, so that it can say no. What
//! a ring is asked for is no system call and not seen here: the rings that are there refuse by themselves what serving
//! does not need (`storage/uring_rights.rs`), and new ones can't be made.

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};
use std::collections::BTreeMap;
use zebu_storage::{RING_REGISTRATIONS, SYSTEM_CALLS};

/// System calls of a server, beside those of its workers, on every architecture.
const ALLOWED: &[libc::c_long] = &[
    // Open files, and waiting.
    libc::SYS_flock,
    libc::SYS_dup,
    libc::SYS_dup3,
    // Paths, of which Landlock has the say.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    // Signals to the front ends of vhost-user (`storage/foreign_event.rs`).
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_pselect6,
    libc::SYS_pipe2,
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
    // Memory; the log of requests in flight is a memory file.
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_memfd_create,
    // Threads and signals.
    libc::SYS_get_robust_list,
    libc::SYS_sched_setaffinity,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getcpu,
    // About the machine and the process.
    libc::SYS_getrusage,
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

/// New namespaces, which a process without rights may make with a user namespace.
const NAMESPACES: u64 = (libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP) as u64;
/// Characters put into the input of a terminal, which whoever reads it next takes for typed ones.
const TYPING: [u64; 2] = [TIOCSTI, TIOCLINUX];
/// As in <asm-generic/ioctls.h>. (The types of libc's constants differ between C libraries.)
const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541c;

/// System calls that are allowed with some arguments only.
fn by_arguments() -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>, BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let this = u64::from(std::process::id());
    let is = |argument, op, value| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value);
    let stream = libc::SOCK_STREAM as u64;
    let register = |&what: &u8| SeccompRule::new(vec![is(1, Eq, what.into())?]);
    Ok(vec![
        // Signals to threads of this process.
        (libc::SYS_tgkill, vec![SeccompRule::new(vec![is(0, Eq, this)?])?]),
        // Limits of this process.
        (
            libc::SYS_prlimit64,
            vec![SeccompRule::new(vec![is(0, Eq, 0)?])?, SeccompRule::new(vec![is(0, Eq, this)?])?],
        ),
        // Datagram sockets could send to any address that has a path.
        (libc::SYS_socketpair, vec![SeccompRule::new(vec![is(1, MaskedEq(0xf), stream)?])?]),
        (libc::SYS_io_uring_register, RING_REGISTRATIONS.iter().map(register).collect::<Result<_, _>>()?),
        (libc::SYS_clone, vec![SeccompRule::new(vec![is(0, MaskedEq(NAMESPACES), 0)?])?]),
        (libc::SYS_ioctl, vec![SeccompRule::new(vec![is(1, Ne, TYPING[0])?, is(1, Ne, TYPING[1])?])?]),
    ])
}

/// From now on, no thread of this process can make other system calls: run programs, make sockets and connect them,
/// mount, change its identity, look into other processes, load code into the kernel.
///
/// # Errors
/// Why the kernel (or the architecture) does not do that, in words.
pub(crate) fn restrict() -> Result<(), String> {
    for program in programs()? {
        apply_filter_all_threads(&program).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The filters. The last one lets no further ones be installed.
fn programs() -> Result<[BpfProgram; 2], String> {
    let architecture = std::env::consts::ARCH.try_into().map_err(in_words)?;
    let mut rules: BTreeMap<i64, Vec<_>> =
        SYSTEM_CALLS.iter().chain(ALLOWED).chain(OLDER).map(|&call| (call, Vec::new())).collect();
    rules.extend(by_arguments().map_err(in_words)?);
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let most = SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture).map_err(in_words)?;
    // Its arguments lie in memory, where a filter does not look. A library that is told that there is no such call
    // uses `clone`.
    let newer = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    let newer = SeccompFilter::new(newer, SeccompAction::Allow, unknown, architecture).map_err(in_words)?;
    Ok([newer.try_into().map_err(in_words)?, most.try_into().map_err(in_words)?])
}

fn in_words(error: BackendError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind::PermissionDenied;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::process::Command;

    #[test]
    fn what_a_server_needs_goes_on_and_the_rest_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let parent = rustix::process::getppid();
        // A thread of its own, and that one only.
        std::thread::spawn(move || {
            for program in programs().unwrap() {
                seccompiler::apply_filter(&program).unwrap();
            }
            let limits = rustix::process::Rlimit { current: Some(100), maximum: Some(100) };
            let refused = [
                rustix::process::prlimit(parent, rustix::process::Resource::Nofile, limits)
                    .map(drop)
                    .map_err(Into::into),
                UnixDatagram::pair().map(drop),
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
