//! A process for each export (`serve --isolate`): one that is killed leaves the others serving, signals reach all of them once.

use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::path::Path;
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::wait_until;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::vhost_guest::{DATA, VhostGuest};

const IMAGES: [&str; 3] = ["a.qcow2", "b.qcow2", "c.qcow2"];
const BLOCK: usize = 64 << 10;

fn images(scratch: &Scratch) {
    for image in IMAGES {
        zebu(scratch.path(), ["create", "-q", "-f", "qcow2", image, "64M"]).ok();
    }
}

/// The first two over NBD, the third as a device.
fn serve(scratch: &Scratch, options: &str) -> Server {
    let three = IMAGES.join(" ");
    // The device's socket is the third image's: each list is in the order of the images.
    let doors =
        "--nbd unix:second.sock --vhost-user-blk v1.sock --vhost-user-blk v2.sock --vhost-user-blk v3.sock";
    Server::start(scratch.path(), &format!("--isolate {doors} {options} -f qcow2 {three}"))
}

/// The processes of the exports, by the image that each has open.
fn processes(server: &Server) -> [u32; 3] {
    let children = server.children();
    IMAGES.map(|image| {
        let having: Vec<u32> =
            children.iter().copied().filter(|pid| open_files(*pid).contains(image)).collect();
        assert_eq!(having.len(), 1, "{image}: {children:?}");
        having[0]
    })
}

fn open_files(pid: u32) -> BTreeSet<String> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let names = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    names.filter_map(|name| Some(name.file_name()?.to_str()?.to_owned())).collect()
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).expect("a number"), signal).expect("it runs");
}

fn write(socket: &Path, export: &str, content: u8) -> Client {
    let mut client = Client::open(socket, export).expect("connected");
    assert_eq!(client.write(0, 0, &vec![content; BLOCK]).expect("served"), 0);
    client
}

#[test]
fn a_process_that_is_killed_leaves_the_others_serving() {
    let Some(qemu) = Qemu::find() else { return };
    for engine in ["--aio io_uring", "--aio threads"] {
        let scratch = Scratch::new("isolate");
        images(&scratch);
        let server = serve(&scratch, engine);
        let all = processes(&server);
        // Each has its own image and no other, and is in its sandbox.
        for (pid, own) in all.into_iter().zip(IMAGES) {
            let files = open_files(pid);
            assert!(IMAGES.iter().all(|image| files.contains(*image) == (*image == own)), "{files:?}");
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
            assert!(status.contains("Seccomp:\t2"), "{status}");
        }
        let second = scratch.file("second.sock");
        let mut first = write(server.socket(), "a.qcow2", 1);
        let mut other = write(&second, "b.qcow2", 2);
        let mut guest = VhostGuest::connect(&scratch.file("v3.sock"), 1);
        signal(all[0], Signal::KILL);
        assert!(first.write(0, 0, &vec![9; BLOCK]).and_then(|_| first.read(0, 512)).is_err());
        for round in 0..20u8 {
            assert_eq!(other.write(0, 0, &vec![round; BLOCK]).expect("served"), 0);
            assert_eq!(write(&second, "b.qcow2", round).read(0, 512).expect("served"), [round; 512]);
            guest.put(DATA, &[round; 512]);
            assert_eq!(guest.call(0, 1, 0, 512, 0), (0, 1));
        }
        drop((other, guest));
        // What it says of the first depends on whether the others have ended by then.
        server.wait_for_words("has ended");
        server.signal(Signal::TERM);
        let (code, said) = server.wait();
        assert_eq!(code, Some(1), "{said}");
        assert!(
            said.contains("'a.qcow2' has ended by signal 9") && said.contains("the others go on"),
            "{said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
        for (image, content) in [("b.qcow2", BLOCK), ("c.qcow2", 512)] {
            qemu.check_clean(scratch.path(), image).unwrap();
            assert!(qemu.read_all(scratch.path(), image, None)[..content].iter().all(|byte| *byte == 19));
        }
    }
}

// A service manager signals all processes of a service, and the one that started the others tells them as well: that is one
// signal, not two.
#[test]
fn signals_end_all_in_good_order_once() {
    let Some(qemu) = Qemu::find() else { return };
    for (number, end) in [Signal::TERM, Signal::HUP, Signal::INT].into_iter().enumerate() {
        for reaches_all in [false, true] {
            let scratch = Scratch::new("isolate");
            images(&scratch);
            let server = serve(&scratch, "");
            let clients =
                [write(server.socket(), "a.qcow2", 3), write(&scratch.file("second.sock"), "b.qcow2", 4)];
            if reaches_all {
                for pid in processes(&server) {
                    signal(pid, end);
                }
            }
            let said = server.stop_by(end);
            // A hangup is told of by each that has no file to read again.
            let is_hangup = |line: &&str| end == Signal::HUP && line.contains("SIGHUP ends the server");
            let said: Vec<&str> = said.lines().filter(|line| !is_hangup(line)).collect();
            let said = said.join("\n");
            assert!(said.is_empty() || reaches_all && said.contains("in good order"), "{number}: {said}");
            drop(clients);
            assert!(!scratch.file("second.sock").exists() && !scratch.file("v3.sock").exists());
            for (image, content) in [("a.qcow2", 3), ("b.qcow2", 4)] {
                qemu.check_clean(scratch.path(), image).unwrap();
                assert_eq!(qemu.read_all(scratch.path(), image, None)[..BLOCK], vec![content; BLOCK]);
            }
        }
    }
}

#[test]
fn when_the_one_that_started_them_is_killed_they_end_in_good_order() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("isolate");
    images(&scratch);
    let server = serve(&scratch, "");
    let all = processes(&server);
    let client = write(server.socket(), "a.qcow2", 5);
    server.kill();
    wait_until("they end", || !all.iter().any(|pid| open_files_if_there(*pid)));
    drop(client);
    qemu.check_clean(scratch.path(), "a.qcow2").unwrap();
    assert_eq!(qemu.read_all(scratch.path(), "a.qcow2", None)[..BLOCK], vec![5; BLOCK]);
}

/// Whether a process has anything open: one that nobody has waited for is still there.
fn open_files_if_there(pid: u32) -> bool {
    std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|mut files| files.next().is_some())
}

#[test]
fn each_has_a_control_socket_and_metrics_of_its_own() {
    let scratch = Scratch::new("isolate");
    images(&scratch);
    let server = serve(&scratch, "--control ctl.sock --metrics unix:metrics.sock --export-name first");
    for (number, name) in [(1, "first"), (2, "b.qcow2"), (3, "c.qcow2")] {
        let said = zebu(scratch.path(), ["ctl", &format!("ctl.sock.{number}"), "stats"]).ok().stdout;
        assert_eq!(said.matches("\"virtual-size\"").count(), 1, "{said}");
        assert!(said.contains(name), "{said}");
        assert!(scratch.file(&format!("metrics.sock.{number}")).exists());
    }
    server.stop();
    assert!(!scratch.file("ctl.sock.1").exists() && !scratch.file("metrics.sock.3").exists());
}

#[test]
fn either_all_images_are_served_or_none() {
    let scratch = Scratch::new("isolate");
    images(&scratch);
    let doors = ["--nbd", "unix:1.sock", "--nbd", "unix:2.sock"];
    let fails = |words: &[&str]| {
        let arguments = [&["serve", "--isolate"], words].concat();
        zebu(scratch.path(), arguments).exits(1).stderr
    };
    let said = fails(&[&doors[..], &["-f", "qcow2", "a.qcow2", "none.qcow2"]].concat());
    assert!(said.contains("none.qcow2"), "{said}");
    assert!(!scratch.file("1.sock").exists());
    let said = fails(&["--nbd", "systemd", "-f", "qcow2", "a.qcow2"]);
    assert!(said.contains("--isolate") && said.contains("systemd"), "{said}");
    let said = fails(&["--nbd", "unix:1.sock", "-f", "qcow2", "a.qcow2", "b.qcow2"]);
    assert!(said.contains("'b.qcow2' has no --nbd"), "{said}");
    let said = fails(&[&doors[..], &["-f", "qcow2", "a.qcow2"]].concat());
    assert!(said.contains("2 are given, but 1 images"), "{said}");
    let said =
        fails(&["--nbd", ":10809", "--metrics", "localhost:65535", "--nbd", ":10810", "a.qcow2", "b.qcow2"]);
    assert!(said.contains("too few ports"), "{said}");
}
