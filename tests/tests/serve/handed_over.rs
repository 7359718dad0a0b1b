//! Descriptors that clients hand over and that keep whoever closes them waiting: others are served meanwhile, and the server
//! ends in good order.

use rustix::net::sockopt::set_socket_linger;
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use zebu_tests::handed_over::{hand_over, lingering};
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::wait_until;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

/// Longer than a test takes, and than it waits for anything: whoever waits so long is found.
const FOR_EVER: Duration = Duration::from_secs(1_000_000);
const ENGINES: [&str; 2] = ["--aio io_uring", "--aio threads"];

fn serve(options: &str) -> (Scratch, Server) {
    let scratch = Scratch::new("handed-over");
    for image in ["root.qcow2", "other.qcow2"] {
        zebu(scratch.path(), ["create", "-q", "-f", "qcow2", image, "64M"]).ok();
    }
    let sockets = "--vhost-user-blk vhost.sock --control ctl.sock --metrics unix:metrics.sock";
    let names = "--export-name root --export-name other -f qcow2 root.qcow2 other.qcow2";
    let server = Server::start(scratch.path(), &format!("{options} {sockets} {names}"));
    (scratch, server)
}

/// A connection that hands a descriptor over.
fn attack(socket: &Path, bytes: &[u8]) -> (UnixStream, TcpStream, std::io::Result<()>) {
    let trap = lingering(FOR_EVER);
    let stream = UnixStream::connect(socket).unwrap();
    let sent = hand_over(&stream, bytes, trap.descriptor.as_fd());
    if sent.is_err() {
        // The last descriptor is this process's own still: nothing may linger when it is closed.
        trap.peer.shutdown(std::net::Shutdown::Both).unwrap();
        set_socket_linger(&trap.descriptor, None).unwrap();
    }
    (stream, trap.peer, sent)
}

/// Waits until the other end of a connection has no descriptor any more (proc_net_tcp(5)).
fn wait_for_close(peer: &TcpStream) {
    const ESTABLISHED: &str = "01";
    let port = peer.peer_addr().unwrap().port();
    let address = format!("{:08X}:{port:04X}", u32::from_ne_bytes([127, 0, 0, 1]));
    wait_until("what was handed over is closed", || {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        // A number, the own address, the peer's, the state.
        let mut lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        lines.any(|words| words[1] == address && words[3] != ESTABLISHED)
    });
}

#[track_caller]
fn is_served(client: &mut Client) {
    assert_eq!(client.write(0, 4096, &[5; 4096]).unwrap(), 0);
    assert_eq!(client.read(4096, 4096).unwrap(), [5; 4096]);
}

#[test]
fn clients_of_nbd_and_metrics_hand_nothing_over() {
    for options in ENGINES {
        let (scratch, server) = serve(options);
        let mut other = Client::open(server.socket(), "other").unwrap();
        is_served(&mut other);
        let metrics = scratch.file("metrics.sock");
        let mut kept = Vec::new();
        for (socket, bytes) in
            [(server.socket(), &[0, 0, 0, 3][..]), (&metrics, b"GET /metrics HTTP/1.1\r\n\r\n")]
        {
            let (stream, peer, sent) = attack(socket, bytes);
            if sent.is_ok() {
                eprintln!("skipped: the kernel, before 6.16, can't refuse descriptors");
                drop(peer);
                return;
            }
            assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM), "{options}");
            kept.push((stream, peer));
            is_served(&mut other);
        }
        zebu(scratch.path(), ["ctl", "ctl.sock", "flush", "root"]).ok();
        server.stop();
    }
}

/// A message of a front end, version 1.
fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    [&request.to_ne_bytes(), &1u32.to_ne_bytes(), &(payload.len() as u32).to_ne_bytes(), payload].concat()
}

/// Chooses features of the protocol alone.
fn negotiate(stream: &mut UnixStream, protocol_features: u64) {
    let mut ask = |request: u32, payload: &[u8], answers: bool| {
        stream.write_all(&message(request, payload)).unwrap();
        if answers {
            stream.read_exact(&mut [0; 20]).unwrap();
        }
    };
    // GET_FEATURES, SET_FEATURES, and the same of the protocol.
    ask(1, &[], true);
    ask(2, &(1u64 << 30).to_ne_bytes(), false);
    ask(15, &[], true);
    ask(16, &protocol_features.to_ne_bytes(), false);
}

#[test]
fn a_front_end_holds_up_its_own_device_only_and_no_end() {
    let Some(qemu) = Qemu::find() else { return };
    for options in ENGINES {
        let (scratch, server) = serve(options);
        let mut other = Client::open(server.socket(), "other").unwrap();
        // SET_VRING_CALL with what is no eventfd: it is refused, and closed.
        // The server's descriptor has to be the last one that is closed: it looks when this process has none.
        server.freeze();
        let (_stream, peer, sent) = attack(&scratch.file("vhost.sock"), &message(13, &0u64.to_ne_bytes()));
        server.signal(Signal::CONT);
        sent.unwrap();
        wait_for_close(&peer);
        is_served(&mut other);
        zebu(scratch.path(), ["ctl", "ctl.sock", "resize", "root", "+1M"]).ok();
        drop(other);
        let said = server.stop_with_messages();
        assert!(said.contains("does not let go"), "{options}: {said}");
        qemu.check_clean(scratch.path(), "other.qcow2").unwrap();
        qemu.io(scratch.path(), "-f qcow2 -r", "other.qcow2", &["read -P 5 4096 4096"]).ok();
    }
}

/// Each region takes a descriptor and a mapping, of which a process has so many.
#[test]
fn regions_of_memory_are_as_many_as_there_are_slots() {
    let (scratch, server) = serve("");
    let before = server.descriptors();
    let mut stream = UnixStream::connect(scratch.file("vhost.sock")).unwrap();
    negotiate(&mut stream, 1 << 15);
    let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 4096).unwrap();
    // Regions lie one behind the other, for the guest and for the front end.
    let mut taken = 0;
    for number in 0..2000u64 {
        let words = [0, number << 12, 4096, 1 << 40 | number << 12, 0];
        let payload: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        if hand_over(&stream, &message(37, &payload), memory.as_fd()).is_err() {
            break;
        }
        taken = number + 1;
    }
    let most = server.descriptors();
    assert!((509..1500).contains(&taken), "{taken} regions are taken");
    assert!(most < before + 530, "{most} descriptors, {before} before");
    drop(stream);
    let said = server.stop_with_messages();
    assert!(said.contains("more regions of memory than slots"), "{said}");
}
