//! The reach of an attacker who has taken over a thread of a server: nothing to files, sockets and processes that the server
//! was not given. Tried from every thread, by system calls and through every ring.

#![cfg(target_arch = "x86_64")]

use std::collections::BTreeSet;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::program::zebu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::taken_over::{ASYNC, Operation, Ring, TakenOver, descriptors, threads};
use zebu_tests::vhost_guest::VhostGuest;

const REFUSED: i64 = -(libc::EPERM as i64);
const NO_RIGHTS: i64 = -(libc::EACCES as i64);
const UNKNOWN: i64 = -(libc::EINVAL as i64);
/// A command of io_uring_register(2) that lets a ring do everything again, if it were taken.
const REGISTER_RESTRICTIONS: u64 = 11;

/// `IORING_OP_*` of <linux/io_uring.h>.
mod ring {
    pub(crate) const ACCEPT: u8 = 13;
    pub(crate) const CONNECT: u8 = 16;
    pub(crate) const OPENAT: u8 = 18;
    pub(crate) const STATX: u8 = 21;
    pub(crate) const READ: u8 = 22;
    pub(crate) const OPENAT2: u8 = 28;
    pub(crate) const UNLINKAT: u8 = 36;
    pub(crate) const MSG_RING: u8 = 40;
    pub(crate) const SOCKET: u8 = 45;
    pub(crate) const URING_CMD: u8 = 46;
    pub(crate) const BIND: u8 = 56;
}

/// A server in use: an image with a backing file that has compressed clusters, over NBD and vhost-user-blk.
fn serve(options: &str) -> (Scratch, Server, Client, VhostGuest) {
    let scratch = Scratch::new("sandbox");
    let dir = scratch.path();
    std::fs::write(dir.join("base.raw"), vec![7; 1 << 20]).unwrap();
    zebu(dir, ["convert", "-c", "-O", "qcow2", "-f", "raw", "base.raw", "base.qcow2"]).ok();
    for image in ["disk.qcow2", "other.qcow2"] {
        zebu(dir, ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", image, "64M"]).ok();
    }
    let options = format!(
        "--queues 2 --control ctl.sock --vhost-user-blk vhost.sock --export-name disk --export-name other {options} \
         -f qcow2 disk.qcow2 other.qcow2"
    );
    let server = Server::start(dir, &options);
    let mut client = Client::open(server.socket(), "other").unwrap();
    let guest = VhostGuest::connect(&dir.join("vhost.sock"), 1);
    // The codec, and the worker of the image.
    assert_eq!(client.read(0, 65536).unwrap(), vec![7; 65536]);
    assert_eq!(client.write(0, 1 << 20, &[1; 4096]).unwrap(), 0);
    assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    (scratch, server, client, guest)
}

/// Tries what the kernel shall refuse to a thread; what it did not.
fn try_calls(thread: &mut TakenOver, ring: Option<i32>) -> Vec<String> {
    let this = u64::from(std::process::id());
    let mut allowed = Vec::new();
    let mut refused = |what: &str, result: i64, expected: &[i64]| {
        if !expected.contains(&result) {
            allowed.push(format!("{what}: {result}"));
        }
    };
    let here = libc::AT_FDCWD as u64;
    let (read, make) = (libc::O_RDONLY as u64, (libc::O_CREAT | libc::O_RDWR) as u64);
    let path = thread.put(b"/etc/passwd\0");
    refused("open", thread.call(libc::SYS_openat, [here, path, read, 0, 0, 0]), &[NO_RIGHTS]);
    refused("execve", thread.call(libc::SYS_execve, [path, 0, 0, 0, 0, 0]), &[REFUSED]);
    refused("unlink", thread.call(libc::SYS_unlink, [path, 0, 0, 0, 0, 0]), &[REFUSED]);
    // An image beside the sockets, and a socket, from the server's own directory.
    for name in [&b"base.raw\0"[..], b"ctl.sock\0"] {
        let path = thread.put(name);
        refused("unlink", thread.call(libc::SYS_unlink, [path, 0, 0, 0, 0, 0]), &[REFUSED]);
        refused("unlinkat", thread.call(libc::SYS_unlinkat, [here, path, 0, 0, 0, 0]), &[REFUSED]);
    }
    let path = thread.put(b"/proc/self/mem\0");
    refused("own memory", thread.call(libc::SYS_openat, [here, path, read, 0, 0, 0]), &[NO_RIGHTS]);
    let path = thread.put(b"/tmp/made-by-a-server\0");
    refused("make", thread.call(libc::SYS_openat, [here, path, make, 0o600, 0, 0]), &[NO_RIGHTS]);
    for (family, kind) in [(libc::AF_UNIX, libc::SOCK_STREAM), (libc::AF_INET, libc::SOCK_DGRAM)] {
        let result = thread.call(libc::SYS_socket, [family as u64, kind as u64, 0, 0, 0, 0]);
        refused("socket", result, &[REFUSED]);
    }
    let pair = thread.put(&[0; 8]);
    let datagrams = [libc::AF_UNIX as u64, libc::SOCK_DGRAM as u64, 0, pair, 0, 0];
    refused("socketpair", thread.call(libc::SYS_socketpair, datagrams), &[REFUSED]);
    let user_namespace = libc::CLONE_NEWUSER as u64;
    for (what, call, arguments) in [
        ("kill", libc::SYS_kill, [this, 0, 0, 0, 0, 0]),
        ("tgkill", libc::SYS_tgkill, [this, this, 0, 0, 0, 0]),
        ("tkill", libc::SYS_tkill, [this, 0, 0, 0, 0, 0]),
        ("prlimit64", libc::SYS_prlimit64, [this, libc::RLIMIT_NOFILE as u64, 0, pair, 0, 0]),
        ("ptrace", libc::SYS_ptrace, [libc::PTRACE_SEIZE.into(), this, 0, 0, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [this, pair, 0, pair, 0, 0]),
        ("pidfd_open", libc::SYS_pidfd_open, [this, 0, 0, 0, 0, 0]),
        ("connect", libc::SYS_connect, [0, pair, 8, 0, 0, 0]),
        ("bind", libc::SYS_bind, [0, pair, 8, 0, 0, 0]),
        ("unshare", libc::SYS_unshare, [user_namespace, 0, 0, 0, 0, 0]),
        ("clone", libc::SYS_clone, [user_namespace, 0, 0, 0, 0, 0]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [8, pair, 0, 0, 0, 0]),
        ("bpf", libc::SYS_bpf, [0, pair, 8, 0, 0, 0]),
        ("mount", libc::SYS_mount, [pair, pair, pair, 0, 0, 0]),
    ] {
        refused(what, thread.call(call, arguments), &[REFUSED]);
    }
    if let Some(ring) = ring {
        let arguments = [ring as u64, REGISTER_RESTRICTIONS, pair, 0, 0, 0];
        refused("io_uring_register", thread.call(libc::SYS_io_uring_register, arguments), &[REFUSED]);
    }
    // Or none of the above says anything.
    let own = thread.call(libc::SYS_getpid, [0; 6]);
    assert!(own > 0, "system calls are not made: {own}");
    allowed
}

/// Tries what a ring of the thread shall refuse; what it did not. `None` if the ring is another's.
fn try_ring(thread: &mut TakenOver, ring: &Ring, image: i32) -> Option<Vec<String>> {
    let buffer = thread.put(&[0; 16]);
    let magic = Operation { code: ring::READ, fd: image, address: buffer, length: 4, ..Operation::default() };
    for flags in [0, ASYNC] {
        assert_eq!(thread.ask(ring, &Operation { flags, ..magic })?, 4, "an open file is read");
    }
    let path = thread.put(b"/etc/passwd\0");
    let at_path = Operation { fd: libc::AT_FDCWD, address: path, ..Operation::default() };
    let socket = Operation { fd: libc::AF_UNIX, offset: libc::SOCK_STREAM as u64, ..Operation::default() };
    let mut allowed = Vec::new();
    for (what, code, operation) in [
        ("open", ring::OPENAT, at_path),
        ("open by openat2", ring::OPENAT2, at_path),
        ("unlink", ring::UNLINKAT, at_path),
        ("statx", ring::STATX, at_path),
        ("socket", ring::SOCKET, socket),
        ("connect", ring::CONNECT, Operation { fd: image, ..at_path }),
        ("bind", ring::BIND, Operation { fd: image, ..at_path }),
        ("accept", ring::ACCEPT, Operation { fd: image, ..Operation::default() }),
        ("a message to a ring", ring::MSG_RING, Operation { fd: image, ..Operation::default() }),
        ("a command to a device", ring::URING_CMD, Operation { fd: image, ..Operation::default() }),
    ] {
        for flags in [0, ASYNC] {
            let result = i64::from(thread.ask(ring, &Operation { code, flags, ..operation })?);
            // Before Linux 6.11, no ring knows it.
            let is_unknown = code == ring::BIND && result == UNKNOWN;
            if result != NO_RIGHTS && !is_unknown {
                allowed.push(format!("{what} through a ring, flags {flags}: {result}"));
            }
        }
    }
    Some(allowed)
}

/// The kind of a thread, from its name.
fn kind(name: &str) -> &str {
    name.trim_end_matches(|letter: char| letter.is_ascii_digit()).trim_end_matches('-')
}

#[test]
fn no_thread_reaches_what_the_server_was_not_given() {
    if zebu_storage::landlock_version() == 0 {
        eprintln!("skipped: the kernel has no Landlock");
        return;
    }
    for (options, expected) in [
        ("", &["zebu", "zebu-codec", "zebu-image", "zebu-serve", "zebu-signals", "zebu-vhost"][..]),
        ("--aio threads", &["zebu", "zebu-codec", "zebu-image", "zebu-io", "zebu-serve", "zebu-signals"][..]),
    ] {
        let (scratch, server, mut client, guest) = serve(options);
        let rings = descriptors(server.pid(), "[io_uring]");
        let mapped: Vec<Ring> = rings.iter().map(|&ring| Ring::of(server.pid(), ring)).collect();
        let image = descriptors(server.pid(), "/disk.qcow2")[0];
        let mut kinds = BTreeSet::new();
        let mut tried = 0;
        for (number, name) in threads(server.pid()) {
            let Some(mut thread) = TakenOver::stop(server.pid(), number) else {
                assert!(name.starts_with("iou-"), "{name} can't be stopped");
                continue;
            };
            let allowed = try_calls(&mut thread, rings.first().copied());
            assert!(allowed.is_empty(), "{options}: {name}: {allowed:?}");
            for ring in &mapped {
                if let Some(allowed) = try_ring(&mut thread, ring, image) {
                    assert!(allowed.is_empty(), "{options}: {name}: {allowed:?}");
                    tried += 1;
                }
            }
            kinds.insert(kind(&name).to_owned());
        }
        for expected in expected {
            assert!(kinds.contains(*expected), "{options}: no {expected} among {kinds:?}");
        }
        assert_eq!(tried, rings.len(), "{options}: each ring belongs to a thread");
        assert_eq!(rings.is_empty(), options == "--aio threads");
        // Who was stopped goes on.
        assert_eq!(client.write(0, 2 << 20, &[3; 4096]).unwrap(), 0);
        assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        assert_eq!(client.read(2 << 20, 4096).unwrap(), [3; 4096]);
        drop((client, guest));
        server.stop();
        assert!(scratch.file("base.raw").exists());
        for socket in ["nbd.sock", "vhost.sock", "ctl.sock"] {
            assert!(!scratch.file(socket).exists(), "{socket} is left behind");
        }
        zebu(scratch.path(), ["check", "-q", "other.qcow2"]).ok();
    }
}

/// Backups one after the other: their targets have rings that were there before the sandbox.
#[test]
fn targets_of_backups_have_rings_in_the_sandbox() {
    let (scratch, server, mut client, guest) = serve("");
    let dir = scratch.path();
    let rings = || descriptors(server.pid(), "[io_uring]").len();
    let before = rings();
    // The command's own, two queues, two images, two targets.
    assert_eq!(before, 7);
    for round in 0..4 {
        assert_eq!(client.write(0, round << 20, &[round as u8; 4096]).unwrap(), 0);
        let target = format!("backup-{round}.qcow2");
        zebu(dir, ["ctl", "ctl.sock", "backup-start", "-w", "other", &target]).ok();
        zebu(dir, ["check", "-q", &target]).ok();
        assert_eq!(rings(), before);
        assert_eq!(server.threads().iter().filter(|name| *name == "zebu-image").count(), 4);
        assert!(descriptors(server.pid(), &target).is_empty(), "{target} is held open");
    }
    drop((client, guest));
    server.stop();
}
