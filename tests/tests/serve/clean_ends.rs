//! Servers that end under load, by a signal or with their terminal: what was acknowledged is on the disk, and whoever was not
//! answered finds the end of the connection. `ZEBU_CLEAN_END_ROUNDS` of each kind are done.

use rustix::process::Signal;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::{wait_for, wait_until};
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const IMAGE: &str = "disk.qcow2";
const BLOCK: usize = 4096;
const CLIENTS: u64 = 4;
/// Blocks of each client, every one of which is written once at most.
const BLOCKS: u64 = 4096;
/// Requests of a client in flight.
const DEPTH: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Term,
    Hangup,
    Terminal,
}

fn rounds() -> u64 {
    std::env::var("ZEBU_CLEAN_END_ROUNDS").map_or(2, |rounds| rounds.parse().expect("a number"))
}

fn content(block: u64) -> Vec<u8> {
    (block + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes().repeat(BLOCK / 8)
}

/// Writes its blocks until the connection ends, and counts the answers; those that were acknowledged.
fn write(socket: &Path, number: u64, answers: &AtomicU64) -> BTreeSet<u64> {
    let mut acknowledged = BTreeSet::new();
    let Ok(mut client) = Client::open(socket, "") else { return acknowledged };
    let (mut sent, mut takes) = (0, true);
    loop {
        while takes && sent < BLOCKS && sent < acknowledged.len() as u64 + DEPTH {
            let block = number * BLOCKS + sent;
            let mut bytes = client.header(0, command::WRITE, block, block * BLOCK as u64, BLOCK as u64);
            bytes.extend(content(block));
            takes = client.say(&bytes).is_ok();
            sent += u64::from(takes);
        }
        // Whoever has nothing left to do waits for the end, too.
        match client.reply() {
            Ok(reply) => {
                assert_eq!(reply.error, 0, "a request that was taken fails");
                assert!(acknowledged.insert(reply.cookie), "{} is answered twice", reply.cookie);
                answers.fetch_add(1, Relaxed);
            }
            // Not a client that waits for an answer in vain.
            Err(error) => {
                assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "neither an answer nor the end");
                return acknowledged;
            }
        }
    }
}

fn one(qemu: &Qemu, end: End, options: &str, seed: u64) -> usize {
    let scratch = Scratch::new("ends");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let options = format!("{options} --queues 2 -f qcow2 {IMAGE}");
    let mut terminal = None;
    let server = if end == End::Terminal {
        let (server, its_terminal) = Server::start_in_terminal(dir, &options);
        terminal = Some(its_terminal);
        server
    } else {
        Server::start(dir, &options)
    };
    let socket = server.socket().to_owned();
    let answers = AtomicU64::new(0);
    let acknowledged = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let (socket, answers) = (&socket, &answers);
                scope.spawn(move || write(socket, number, answers))
            })
            .collect();
        wait_until(format_args!("{end:?}, seed {seed}: somebody is served"), || answers.load(Relaxed) > 0);
        std::thread::sleep(Duration::from_micros(5_000 + Random::new(seed).below(60_000)));
        let (code, said) = match end {
            End::Term => server.end_by(Signal::TERM),
            End::Hangup => server.end_by(Signal::HUP),
            End::Terminal => {
                terminal.take().expect("a terminal").close();
                server.wait()
            }
        };
        assert_eq!(code, Some(0), "{end:?}, seed {seed}: {said}");
        assert!(!socket.exists(), "the socket is left behind");
        let parts: Vec<BTreeSet<u64>> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        parts.into_iter().flatten().collect::<BTreeSet<u64>>()
    });
    qemu.check_clean(dir, IMAGE).unwrap();
    let disk = qemu.read_all(dir, IMAGE, None);
    for &block in &acknowledged {
        let at = block as usize * BLOCK;
        assert!(disk[at..at + BLOCK] == content(block), "{end:?}, seed {seed}: block {block} is lost");
    }
    acknowledged.len()
}

#[test]
fn what_was_acknowledged_is_there_and_nobody_waits_for_an_answer_in_vain() {
    let Some(qemu) = Qemu::find() else { return };
    for end in [End::Term, End::Hangup, End::Terminal] {
        let mut acknowledged = 0;
        for round in 0..rounds() {
            let options =
                ["--aio io_uring -t none", "--aio threads", "--aio io_uring", "--aio threads -t none"];
            acknowledged += one(&qemu, end, options[(round % 4) as usize], round);
        }
        println!("{end:?}: {} rounds, {acknowledged} writes acknowledged, all there", rounds());
        assert!(acknowledged > 0, "{end:?}: nobody was served");
    }
}

/// Signals that come together, as timeout(1), supervisors and wrappers send them to a process and its group. They are
/// different ones: of the same kind, one may be all that comes. None is taken before the others are there.
const TOGETHER: [Signal; 5] = [Signal::STOP, Signal::TERM, Signal::INT, Signal::HUP, Signal::CONT];
/// Blocks that a client writes and never flushes: enough that some are in memory only.
const UNFLUSHED: u64 = 64;

fn write_unflushed(client: &mut Client) {
    for block in 0..UNFLUSHED {
        assert_eq!(client.write(0, block * BLOCK as u64, &content(block)).unwrap(), 0);
    }
}

fn has_unflushed(qemu: &Qemu, dir: &Path, image: &str) {
    qemu.check_clean(dir, image).unwrap();
    let disk = qemu.read_all(dir, image, None);
    for block in 0..UNFLUSHED {
        let at = block as usize * BLOCK;
        assert!(disk[at..at + BLOCK] == content(block), "block {block} is lost");
    }
}

#[test]
fn signals_that_come_together_end_qemu_nbd_in_good_order() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("ends-twice");
    let (dir, socket) = (scratch.path(), scratch.file("socket"));
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    std::fs::create_dir(dir.join("names")).unwrap();
    zebu(dir, ["install-names", "names"]).ok();
    let mut server = Command::new(dir.join("names/qemu-nbd"));
    let mut server =
        server.args(["-t", "-k"]).arg(&socket).args(["-f", "qcow2", IMAGE]).current_dir(dir).spawn().unwrap();
    let mut client = wait_for("the server serves", || {
        assert_eq!(server.try_wait().unwrap(), None, "the server does not start");
        Client::open(&socket, "").ok()
    });
    write_unflushed(&mut client);
    let pid = rustix::process::Pid::from_raw(server.id().cast_signed()).expect("a number");
    for signal in TOGETHER {
        rustix::process::kill_process(pid, signal).unwrap();
    }
    assert_eq!(server.wait().unwrap().code(), Some(0));
    has_unflushed(&qemu, dir, IMAGE);
}

#[test]
fn signals_that_come_together_end_a_server_in_good_order() {
    let Some(qemu) = Qemu::find() else { return };
    let mut kinds = vec!["", "--no-sandbox", "--isolate"];
    if zebu_tests::program::is_root() && Path::new("/dev/fuse").exists() {
        kinds.push("--fuse disk.raw");
    }
    for kind in kinds {
        let scratch = Scratch::new("ends-twice");
        let dir = scratch.path();
        zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
        let server = Server::start(dir, &format!("{kind} -f qcow2 {IMAGE}"));
        let mut client = Client::open(server.socket(), "").unwrap();
        write_unflushed(&mut client);
        for signal in TOGETHER {
            server.signal(signal);
        }
        let (code, said) = server.wait();
        // Whichever signal comes first.
        let said: Vec<_> = said.lines().filter(|line| !line.contains("SIGHUP ends the server")).collect();
        assert_eq!((code, said), (Some(0), vec![]), "{kind}");
        has_unflushed(&qemu, dir, IMAGE);
    }
}

/// timeout(1) sends its signal to the process, and to its own group a moment later.
#[test]
fn a_server_under_timeout_ends_in_good_order() {
    let Some(qemu) = Qemu::find() else { return };
    for kind in ["", "--isolate"] {
        let scratch = Scratch::new("ends-timeout");
        let dir = scratch.path();
        zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
        let server = Server::start_under_timeout(dir, &format!("{kind} -f qcow2 {IMAGE}"));
        let mut client = Client::open(server.socket(), "").unwrap();
        write_unflushed(&mut client);
        let (code, said) = server.end_by(Signal::TERM);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{kind}");
        has_unflushed(&qemu, dir, IMAGE);
    }
}

/// One signal after the other: the first that comes a second after the first one insists.
#[test]
fn a_person_who_insists_ends_a_server_at_once() {
    for kind in ["", "--isolate"] {
        let scratch = Scratch::new("ends-at-once");
        let dir = scratch.path();
        zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
        let mut server = Server::start(dir, &format!("{kind} -f qcow2 {IMAGE}"));
        // A client that does not take its reply holds up the end.
        let mut client = Client::open(server.socket(), "").unwrap();
        write_unflushed(&mut client);
        client.say(&client.header(0, command::READ, 1, 0, 32 << 20)).unwrap();
        client.take(4).unwrap();
        let (code, said) = wait_for("it ends", || {
            server.signal(Signal::TERM);
            server.has_ended()
        });
        assert_eq!(code, Some(1), "{kind}: {said}");
        assert!(said.contains("ended at once by a second signal"), "{kind}: {said}");
        assert!(said.contains("bytes were written since the last flush"), "{kind}: {said}");
    }
}

#[test]
fn an_image_below_a_driver_is_closed_at_the_end_too() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("below");
    let dir = scratch.path();
    let mut noise = vec![0; 40 << 20];
    Random::new(5).fill(&mut noise);
    std::fs::write(dir.join("noise.raw"), noise).unwrap();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "40M"]).ok();
    let file = format!("file.driver=qcow2,file.file.driver=file,file.file.filename={IMAGE}");
    let server = Server::start(dir, &format!("--image-opts driver=compress,{file}"));
    let target = format!("nbd+unix:///?socket={}", server.socket().display());
    qemu.img(dir, ["convert", "-n", "-f", "raw", "-O", "raw", "noise.raw", &target]).ok();
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
    qemu.same_content(dir, "noise.raw", IMAGE).unwrap();
}

#[test]
fn an_image_below_a_driver_that_can_not_be_closed_is_told() {
    let scratch = Scratch::new("below-fails");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "40M"]).ok();
    std::fs::write(
        dir.join("rules"),
        "[inject-error]\nevent = \"none\"\niotype = \"flush\"\nerrno = \"28\"\n",
    )
    .unwrap();
    let file = format!("file.file.driver=blkdebug,file.file.config=rules,file.file.image.filename={IMAGE}");
    let server = Server::start(dir, &format!("--image-opts driver=compress,file.driver=qcow2,{file}"));
    let mut client = Client::open(server.socket(), "").unwrap();
    assert_eq!(client.write(0, 0, &vec![7; 65536]).unwrap(), 0);
    drop(client);
    let (code, said) = server.end_by(Signal::TERM);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(IMAGE) && said.contains("No space left on device"), "{said}");
}
