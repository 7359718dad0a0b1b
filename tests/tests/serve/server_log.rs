//! The log of a server: clients can cause as many messages as they like, and whoever reads them may take none.

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::{LONGEST, wait_for};
use zebu_tests::program::{zebu, zebu_program};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::{Server, end_of};
use zebu_tests::vhost_guest::{VhostGuest, is_readable};

/// More than a pipe holds, by far.
const MANY: usize = 3000;

/// A server whose messages nobody takes.
fn start_unheard(dir: &Path) -> Child {
    zebu(dir, ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]).ok();
    let mut command = Command::new(zebu_program());
    let options = "serve --nbd unix:nbd.sock --log-level debug -f qcow2 disk.qcow2";
    command.args(options.split_whitespace()).current_dir(dir);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

/// Ends it by one signal, or by one after the other until it has ended.
fn end_by(child: &mut Child, insists: bool) -> Option<i32> {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::INT).unwrap();
    if insists {
        let ended = || {
            kill_process(pid, Signal::TERM).unwrap();
            child.try_wait().expect("our child")
        };
        return wait_for("it ends", ended).code();
    }
    end_of(child).code()
}

#[test]
fn a_log_that_nobody_reads_holds_nobody_up() {
    for is_cut_short in [false, true] {
        let scratch = Scratch::new("log");
        let mut child = start_unheard(scratch.path());
        let socket = scratch.file("nbd.sock");
        let mut client = Client::open(&socket, "").unwrap();
        for _ in 0..MANY {
            drop(UnixStream::connect(&socket).unwrap());
        }
        // Nobody has taken a line by now.
        assert_eq!(client.write(0, 4096, &[5; 4096]).unwrap(), 0);
        assert_eq!(client.read(4096, 4096).unwrap(), [5; 4096]);
        // A request under way, so that the second signal finds the server there.
        let _keeps_it = is_cut_short.then(|| {
            client.say(&client.header(0, 0, 1, 0, 32 << 20)).unwrap();
            client.take(4).unwrap();
            client
        });
        let code = end_by(&mut child, is_cut_short);
        assert_eq!(code, Some(i32::from(is_cut_short)));
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("connects"), "{said}");
    }
}

#[test]
fn front_ends_that_misbehave_all_the_time_are_told_of_now_and_then() {
    let scratch = Scratch::new("log");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]).ok();
    let began = Instant::now();
    let server = Server::start_vhost_user(dir, "-f qcow2 disk.qcow2");
    for _ in 0..100 {
        let mut guest = VhostGuest::connect(server.socket(), 1);
        let error = guest.watch_errors(0);
        guest.offer(0, 50_000);
        guest.kick(0);
        assert!(is_readable(error.as_raw_fd(), LONGEST), "the front end is not told");
        drop(guest);
    }
    let said = server.stop_with_messages();
    // Which of the two is told depends on when the front end goes.
    let is_told = said.contains("broke its ring") || said.contains("took its used ring away");
    assert!(is_told, "{said}");
    let most = 20 * (1 + began.elapsed().as_secs() as usize / 60) + 1;
    assert!(said.lines().count() <= most, "{} lines: {said}", said.lines().count());
}
