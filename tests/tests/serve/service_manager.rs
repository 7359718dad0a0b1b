//! Servers as a service manager starts them: it hears when clients can connect, that all threads take turns, and of the end.

use rustix::process::{Pid, Signal, kill_process};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::{wait_for, wait_until};
use zebu_tests::program::{zebu, zebu_program};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::end_of;
use zebu_tests::taken_over::{TakenOver, threads};

/// Time within which a watchdog wants to hear of the server.
const PATIENCE: Duration = Duration::from_millis(200);

/// A server and its service manager.
struct Service {
    manager: UnixDatagram,
    server: Child,
}

impl Service {
    fn start(dir: &Path, manager: UnixDatagram, name: &str, options: &str) -> Self {
        let mut command = Command::new(zebu_program());
        command.arg("serve").args(options.split_whitespace()).current_dir(dir).stdout(Stdio::null());
        command.env("NOTIFY_SOCKET", name).env("WATCHDOG_USEC", PATIENCE.as_micros().to_string());
        Self { manager, server: command.spawn().unwrap() }
    }

    /// A server of two disks, whose manager has a socket with a path.
    fn of_disks(dir: &Path, options: &str) -> Self {
        for disk in ["a.qcow2", "b.qcow2"] {
            zebu(dir, ["create", "-q", "-f", "qcow2", disk, "64M"]).ok();
        }
        let path = dir.join("manager.sock");
        let manager = UnixDatagram::bind(&path).unwrap();
        Self::start(dir, manager, path.to_str().unwrap(), &format!("{options} -f qcow2 a.qcow2 b.qcow2"))
    }

    /// The next message.
    fn hear(&mut self) -> String {
        let mut bytes = [0; 256];
        self.manager.set_read_timeout(Some(PATIENCE)).unwrap();
        let len = wait_for("a message", || {
            assert!(self.server.try_wait().unwrap().is_none(), "the server has ended");
            self.manager.recv(&mut bytes).ok()
        });
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    /// The next message that tells of more than life.
    fn hear_news(&mut self) -> String {
        std::iter::repeat_with(|| self.hear()).find(|message| message != "WATCHDOG=1").expect("endless")
    }

    /// The next message, whether the server has ended or not.
    fn hear_left(&self) -> String {
        let mut bytes = [0; 256];
        let len = wait_for("a message", || self.manager.recv(&mut bytes).ok());
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    /// Ends the server, which says so.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.server), Signal::TERM).unwrap();
        assert!(end_of(&mut self.server).success());
        // What tells of it may take a moment longer.
        let mut heard = vec![self.hear_left()];
        while heard.last().is_some_and(|message| message == "WATCHDOG=1") {
            heard.push(self.hear_left());
        }
        assert_eq!(heard.last().unwrap(), "STOPPING=1");
    }
}

#[test]
fn a_server_is_ready_when_clients_can_connect_and_says_when_it_ends() {
    for options in ["--nbd unix:nbd.sock", "--nbd unix:nbd.sock --no-sandbox"] {
        let scratch = Scratch::new("manager");
        let dir = scratch.path();
        let mut service = Service::of_disks(dir, options);
        assert_eq!(service.hear_news(), "READY=1");
        let mut client = Client::open(&dir.join("nbd.sock"), "a.qcow2").unwrap();
        assert_eq!(client.write(0, 0, &[1; 4096]).unwrap(), 0);
        for _ in 0..3 {
            assert_eq!(service.hear(), "WATCHDOG=1");
        }
        drop(client);
        service.stop();
    }
}

#[test]
fn a_service_manager_may_have_a_name_instead_of_a_path() {
    let scratch = Scratch::new("manager-name");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]).ok();
    let name = format!("zebu-test-{}", std::process::id());
    let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let options = "--nbd unix:nbd.sock -f qcow2 disk.qcow2";
    let mut service = Service::start(dir, manager, &format!("@{name}"), options);
    assert_eq!(service.hear_news(), "READY=1");
    service.stop();
}

#[test]
fn isolated_servers_are_ready_together() {
    let scratch = Scratch::new("manager-isolate");
    let dir = scratch.path();
    let mut service = Service::of_disks(dir, "--isolate --nbd unix:0.sock --nbd unix:1.sock");
    assert_eq!(service.hear_news(), "READY=1");
    for number in 0..2 {
        Client::open(&dir.join(format!("{number}.sock")), "").unwrap();
    }
    assert_eq!(service.hear(), "WATCHDOG=1");
    service.stop();
}

#[test]
fn a_thread_that_takes_no_turn_silences_the_server() {
    let scratch = Scratch::new("manager-stuck");
    let mut service = Service::of_disks(scratch.path(), "--nbd unix:nbd.sock");
    assert_eq!(service.hear_news(), "READY=1");
    let pid = service.server.id();
    let (thread, _) = threads(pid).into_iter().find(|(_, name)| name == "zebu-serve-0").expect("a thread");
    let stuck = TakenOver::stop(pid, thread).expect("it runs");
    // What was said before comes first, however much that is.
    service.manager.set_read_timeout(Some(5 * PATIENCE)).unwrap();
    let mut bytes = [0; 256];
    wait_until("it says no more that all threads take turns", || service.manager.recv(&mut bytes).is_err());
    drop(stuck);
    assert_eq!(service.hear(), "WATCHDOG=1");
    service.stop();
}
