//! Writes that a killed server has left on their way: nobody has its image before they have landed.
//! `docs/design/locks.md` tells why and how.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::program::{zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::server::{Server, end_of};
use zebu_tests::stalling_disk::StallingDisk;

const SIZE: u64 = 8 << 20;
const BLOCK: usize = 4096;
/// Where the write that is held goes.
const AT: u64 = 8192;
/// The words of a program that waits.
const WAITS: &str = "writes of a process that has ended are still under way";

fn image(disk: &StallingDisk) {
    zebu(disk.dir(), ["create", "-f", "qcow2", disk.name(), &SIZE.to_string()]).ok();
}

fn options(disk: &StallingDisk) -> String {
    format!("-t none -f qcow2 {}", disk.name())
}

/// Starts a server, and kills it when a write of 1s has gone to the disk, which holds it.
fn leave_a_write(disk: &StallingDisk) {
    image(disk);
    let server = Server::start(disk.dir(), &options(disk));
    let mut client = Client::open(server.socket(), "").expect("it serves");
    assert_eq!(client.write(0, 0, &vec![b'0'; 1 << 16]).expect("it answers"), 0);
    assert_eq!(client.call(0, command::FLUSH, 0, 0).expect("it answers").error, 0);
    disk.hold_next_write();
    client.request(0, command::WRITE, 7, AT, BLOCK as u64).expect("it listens");
    client.say(&[b'1'; BLOCK]).expect("it listens");
    disk.wait_for_held();
    server.kill_amid_writes();
    assert_eq!(disk.held(), 1, "the process is gone, its write is not");
}

fn read(client: &mut Client) -> Vec<u8> {
    client.read(AT, BLOCK as u64).expect("it answers")
}

#[test]
fn a_killed_servers_write_lands_before_the_next_one_serves() {
    let Some(disk) = StallingDisk::new(16 << 20) else { return };
    leave_a_write(&disk);
    let mut next = Server::begin(disk.dir(), &options(&disk));
    next.wait_for_words(WAITS);
    if let Some(qemu) = Qemu::find() {
        for how in ["-f qcow2 -n", "-r -f qcow2 -n"] {
            let out = qemu.io(disk.dir(), how, disk.name(), &["read 0 512"]);
            assert!(out.code == Some(1) && out.stderr.contains("Failed to get "), "{out}");
        }
        let out = qemu.io(disk.dir(), "-f raw -n", disk.name(), &["write 0 512"]);
        assert!(out.code == Some(1) && out.stderr.contains("Failed to get \"write\" lock"), "{out}");
    }
    assert_eq!(disk.held(), 1);
    assert!(!next.is_ready(), "it serves before the write has landed");
    disk.release();
    next.becomes_ready();
    let mut client = Client::open(next.socket(), "").expect("it serves");
    assert_eq!(read(&mut client), [b'1'; BLOCK]);
    assert_eq!(client.write(0, AT, &[b'2'; BLOCK]).expect("it answers"), 0);
    assert_eq!(client.call(0, command::FLUSH, 0, 0).expect("it answers").error, 0);
    next.kill();
    let last = Server::start(disk.dir(), &options(&disk));
    let mut client = Client::open(last.socket(), "").expect("it serves");
    assert_eq!(read(&mut client), [b'2'; BLOCK]);
    drop(client);
    last.stop();
    zebu(disk.dir(), ["check", "-f", "qcow2", disk.name()]).ok();
}

#[test]
fn an_export_that_is_added_waits_beside_all_else() {
    let Some(disk) = StallingDisk::new(16 << 20) else { return };
    leave_a_write(&disk);
    let dir = disk.dir();
    for image in ["a.qcow2", "c.qcow2"] {
        zebu(dir, ["create", "-q", "-f", "qcow2", image, "64M"]).ok();
    }
    let server =
        Server::start(dir, "--no-sandbox --control ctl.sock --export-name a -f qcow2 -t none a.qcow2");
    let mut adding = Command::new(zebu_program())
        .args(["ctl", "ctl.sock", "export-add", "b", "-f", "qcow2", disk.name()])
        .current_dir(dir)
        .spawn()
        .expect("it runs");
    server.wait_for_words(WAITS);
    zebu(dir, ["ctl", "ctl.sock", "stats"]).ok();
    zebu(dir, ["ctl", "ctl.sock", "export-add", "c", "c.qcow2"]).ok();
    assert_eq!(disk.held(), 1);
    assert!(adding.try_wait().expect("our child").is_none(), "it is served before the write has landed");
    disk.release();
    assert!(end_of(&mut adding).success());
    let mut client = Client::open(server.socket(), "b").expect("it serves");
    assert_eq!(read(&mut client), [b'1'; BLOCK]);
    drop(client);
    server.stop_with_messages();
}

#[test]
fn who_waits_is_ended_by_a_signal() {
    let Some(disk) = StallingDisk::new(16 << 20) else { return };
    leave_a_write(&disk);
    let next = Server::begin(disk.dir(), &options(&disk));
    next.wait_for_words(WAITS);
    let (code, said) = next.end_by(rustix::process::Signal::TERM);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&format!("may still land [{}]", disk.name())), "{said}");
    // A reader waits, too: it would see half of them.
    let mut reader = Command::new(zebu_program());
    reader.args(["info", "-f", "qcow2", disk.name()]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut reader = reader.spawn().expect("zebu starts");
    let mut said = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(reader.stderr.take().expect("piped")),
        &mut said,
    )
    .expect("readable");
    assert!(said.contains(WAITS), "{said}");
    rustix::process::kill_process(rustix::process::Pid::from_child(&reader), rustix::process::Signal::INT)
        .expect("our child");
    assert_eq!(end_of(&mut reader).code(), None, "the signal ends it");
    // Without locks, at the reader's own risk.
    zebu(disk.dir(), ["info", "-U", "-f", "qcow2", disk.name()]).ok();
    assert_eq!(disk.held(), 1);
    disk.release();
    zebu(disk.dir(), ["check", "-f", "qcow2", disk.name()]).ok();
}

/// Whether a process has a file open.
fn has_open(pid: u32, file: &Path) -> bool {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    descriptors
        .filter_map(|descriptor| std::fs::read_link(descriptor.ok()?.path()).ok())
        .any(|path| path == file)
}

/// A descriptor in another process would keep the locks of one that was killed.
#[test]
fn no_other_process_has_the_file_of_a_server() {
    let scratch = zebu_tests::scratch::Scratch::new("left-writes");
    let dir = scratch.path();
    let image = std::fs::canonicalize(dir).expect("it is there").join("disk.qcow2");
    zebu(dir, ["create", "-f", "qcow2", "disk.qcow2", "1M"]).ok();
    // What unmounts in the end.
    if zebu_tests::program::is_root() && Path::new("/dev/fuse").exists() {
        let server = Server::start(dir, "--fuse mounted -f qcow2 disk.qcow2");
        let children = server.children();
        assert!(!children.is_empty() && has_open(server.pid(), &image));
        assert_eq!(children.into_iter().find(|child| has_open(*child, &image)), None);
        server.stop();
    }
    // The parent of the processes of `--isolate`.
    let parent = Server::start(dir, "--isolate -f qcow2 disk.qcow2");
    let children = parent.children();
    assert!(!has_open(parent.pid(), &image));
    assert_eq!(children.iter().filter(|child| has_open(**child, &image)).count(), 1);
    parent.stop();
    // What connects for a server in its sandbox.
    let below = Server::start(dir, "-r -f qcow2 disk.qcow2");
    let top = PathBuf::from("top");
    std::fs::create_dir(dir.join(&top)).expect("scratch is writable");
    let options = format!("--overlay over.qcow2 {}", below.uri(""));
    let server = Server::start(&dir.join(&top), &options);
    let overlay = image.with_file_name("top").join("over.qcow2");
    let children = server.children();
    assert!(!children.is_empty() && has_open(server.pid(), &overlay));
    assert_eq!(children.into_iter().find(|child| has_open(*child, &overlay)), None);
    server.stop();
    below.stop();
}
