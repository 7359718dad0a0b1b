//! Restrictions of a ring, for good: the operations of `uring.rs` and `uring_sockets.rs` alone.
//!
//! A filter of system calls sees no operation of a ring, so the ring itself has to refuse what opens files, makes and
//! connects sockets, or reaches other rings. The kernel takes restrictions (since 5.10) only before a ring is enabled,
//! and once.

use crate::thread_rights::RING_REGISTRATIONS;
use crate::worker_types::Commands;
use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode};
use std::io;

/// Operations on files and sockets that are open.
const OPERATIONS: [u8; 11] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
    opcode::SendMsg::CODE,
];

/// Lets the ring, which is not enabled yet, do nothing but what a worker asks for.
pub(crate) fn restrict(ring: &IoUring, commands: Commands) -> io::Result<()> {
    let flags = Flags::ASYNC | Flags::FIXED_FILE | Flags::SKIP_SUCCESS;
    let operations = OPERATIONS.map(Restriction::sqe_op).into_iter();
    let registrations = RING_REGISTRATIONS.map(Restriction::register_op).into_iter();
    let mut restrictions: Vec<Restriction> = operations.chain(registrations).collect();
    if commands == Commands::Taken {
        restrictions.push(Restriction::sqe_op(opcode::UringCmd16::CODE));
    }
    restrictions.push(Restriction::sqe_flags_allowed(flags.bits()));
    ring.submitter().register_restrictions(&mut restrictions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::squeue::Entry;
    use io_uring::types::Fd;

    fn result_of(ring: &mut IoUring, entry: &Entry) -> i32 {
        // SAFETY: the entries of the test below have no pointers but to a static string.
        unsafe { ring.submission().push(entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn a_restricted_ring_opens_nothing() {
        let file = tempfile::tempfile().unwrap();
        let fd = Fd(std::os::fd::AsRawFd::as_raw_fd(&file));
        let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build();
        let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), c"/etc/passwd".as_ptr()).build();
        let linked = opcode::Fsync::new(fd).build().flags(Flags::IO_LINK);
        for is_restricted in [false, true] {
            let Ok(mut ring) = IoUring::builder().setup_r_disabled().build(8) else {
                eprintln!("skipped: there is no io_uring");
                return;
            };
            if is_restricted {
                restrict(&ring, Commands::Refused).unwrap();
            }
            ring.submitter().register_enable_rings().unwrap();
            for entry in [&socket, &open, &socket.clone().flags(Flags::ASYNC), &linked] {
                let result = result_of(&mut ring, entry);
                assert_eq!(result == -libc::EACCES, is_restricted, "{entry:?}: {result}");
            }
            assert_eq!(result_of(&mut ring, &opcode::Fsync::new(fd).build()), 0);
            let again = restrict(&ring, Commands::Refused);
            assert!(again.is_err(), "a ring that is enabled is not restricted anew");
            let probed = ring.submitter().register_probe(&mut io_uring::Probe::new());
            assert_eq!(probed.is_err(), is_restricted);
        }
    }
}
