//! NBD servers that stop: in the middle of writes, of a handshake, and while `zebu serve` is told to end.

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use zebu_tests::fault_proxy::{Fault, FaultProxy};
use zebu_tests::patience::{LONGEST, wait_until};
use zebu_tests::program::{find, zebu, zebu_program};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::{Server, end_of, wait_for_listener};
use zebu_tests::web_proxy::{Mishap, WebProxy};
use zebu_tests::web_server::WebServer;

/// A running qemu-nbd. Killed on drop.
struct QemuNbd {
    child: Child,
    socket: PathBuf,
}

impl QemuNbd {
    fn start(dir: &Path, file: &str) -> Self {
        let socket = dir.join("qemu.sock");
        // One that was killed leaves it behind.
        let _ = std::fs::remove_file(&socket);
        let program = find("qemu-nbd").expect("qemu-nbd is missing: `cargo xtask setup` installs it");
        let mut command = Command::new(program);
        command.args(["-t", "--shared=8", "-f", "raw", "-k"]).arg(&socket).arg(file).current_dir(dir);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = child.spawn().expect("the server starts");
        wait_for_listener(&socket);
        Self { child, socket }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Stops it: its connections stay, and nothing comes.
    fn freeze(&self) {
        kill_process(Pid::from_child(&self.child), Signal::STOP).expect("a process");
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `zebu io`, given one command after the other.
struct Shell {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Shell {
    fn start(dir: &Path, words: &[&str]) -> Self {
        let mut command = Command::new(zebu_program());
        command.arg("io").args(words).current_dir(dir);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = piped.spawn().expect("zebu starts");
        let (input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { child, input, lines }
    }

    /// Does a command. The length of the disk behind it tells that it is over.
    fn run(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}\nlength").expect("it reads");
        let mut said = String::new();
        loop {
            let line = self.lines.recv_timeout(LONGEST).expect("it answers");
            if line.ends_with("MiB") || line.ends_with("8388608") {
                return said;
            }
            said += &format!("{line}\n");
        }
    }

    fn end(mut self) -> Option<i32> {
        let _ = writeln!(self.input, "quit");
        end_of(&mut self.child).code()
    }
}

/// A server that is stopped and started again in the middle of writes: a flush that succeeds says that all is there.
#[test]
fn a_server_that_starts_again_amid_writes_fails_the_flush_or_has_the_data() {
    let scratch = Scratch::new("remote-again");
    let dir = scratch.path();
    for is_flushed in [true, false] {
        std::fs::write(dir.join("target.raw"), vec![0; 8 << 20]).unwrap();
        let server = QemuNbd::start(dir, "target.raw");
        let uri = server.uri();
        let mut shell = Shell::start(dir, &["-f", "raw", "-t", "writeback", &uri]);
        for number in 0..20 {
            let said = shell.run(&format!("write -P {} {}k 64k", number + 1, number * 100));
            assert!(said.contains("wrote"), "{said}");
        }
        if is_flushed {
            let said = shell.run("flush");
            assert!(!said.contains("failed"), "{said}");
        }
        drop(server);
        let server = QemuNbd::start(dir, "target.raw");
        let written = shell.run("write -P 77 4M 64k");
        assert!(written.contains("wrote"), "a broken connection is replaced: {written}");
        let flushed = shell.run("flush");
        // What was flushed is durable, and nothing of the rest was lost with the old server's connection.
        assert_eq!(flushed.contains("failed"), !is_flushed, "flushed before: {is_flushed}: {flushed}");
        shell.end();
        drop(server);
        if is_flushed {
            let found = std::fs::read(dir.join("target.raw")).unwrap();
            assert!(found[4 << 20..][..64 << 10].iter().all(|byte| *byte == 77));
            for number in 0..20 {
                let part = &found[number * 100 * 1024..][..64 << 10];
                assert!(part.iter().all(|byte| *byte == number as u8 + 1), "{number}");
            }
        }
    }
}

/// A server that says nothing any more, and `zebu serve` that is told to end meanwhile.
#[test]
fn a_server_of_a_silent_disk_ends_when_it_is_told_to() {
    let scratch = Scratch::new("remote-told");
    let dir = scratch.path();
    std::fs::write(dir.join("target.raw"), vec![0; 8 << 20]).unwrap();
    let backend = QemuNbd::start(dir, "target.raw");
    let below = dir.join("serve");
    std::fs::create_dir(&below).unwrap();
    // Requests alone would be waited for much longer.
    let options = format!("driver=raw,file.driver=nbd,file.server.path={}", backend.socket.display());
    let options = format!("--control ctl.sock --image-opts {options},file.reconnect-delay=86400");
    let server = Server::start(&below, &options);
    let ours = format!("nbd+unix:///?socket={}", server.socket().display());
    zebu(dir, ["io", "-f", "raw", &ours, "-c", "write 0 4k"]).ok();
    backend.freeze();
    let mut client = Command::new(zebu_program());
    client.args(["io", "-f", "raw", &ours, "-c", "read 0 64k"]).current_dir(dir);
    let client = client.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut client = client.spawn().expect("zebu starts");
    wait_until("the request is under way", || {
        let stats = zebu(&below, ["ctl", "ctl.sock", "stats", ""]).ok().stdout;
        serde_json::from_str::<serde_json::Value>(&stats).unwrap()["in-flight"] == 1
    });
    let (code, said) = server.end_by(Signal::TERM);
    assert_eq!(code, Some(1), "what was written was not flushed: {said}");
    assert!(said.contains("the server did not answer in time"), "{said}");
    let _ = client.kill();
    let _ = client.wait();
}

/// The same of a web server.
#[test]
fn a_server_of_a_silent_web_server_ends_when_it_is_told_to() {
    let scratch = Scratch::new("http-told");
    let dir = scratch.path();
    std::fs::create_dir_all(dir.join("www")).unwrap();
    std::fs::write(dir.join("www/disk.raw"), vec![7; 8 << 20]).unwrap();
    let backend = WebServer::start(dir);
    let proxy = WebProxy::start(backend.port(), |_, _| Mishap::None);
    let below = dir.join("serve");
    std::fs::create_dir(&below).unwrap();
    // Requests alone would be waited for much longer.
    let options =
        format!("driver=raw,file.driver=http,file.url={},file.timeout=86400", proxy.url("/disk.raw"));
    let server = Server::start(&below, &format!("-r --image-opts {options}"));
    let ours = format!("nbd+unix:///?socket={}", server.socket().display());
    proxy.change(|_, _| Mishap::SilentAfter(0));
    let before = proxy.requests();
    let mut client = Command::new(zebu_program());
    client.args(["io", "-r", "-f", "raw", &ours, "-c", "read 5M 64k"]).current_dir(dir);
    let client = client.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut client = client.spawn().expect("zebu starts");
    wait_until("something is asked for", || proxy.requests() > before);
    let begin = Instant::now();
    let (_, said) = server.end_by(Signal::TERM);
    let took = begin.elapsed();
    assert!(took > Duration::from_secs(3), "{took:?}: {said}");
    let _ = client.kill();
    let _ = client.wait();
}

/// A request has its time during a handshake, too, and says why it failed.
#[test]
fn a_request_is_given_up_while_its_connection_is_made_again() {
    let scratch = Scratch::new("remote-handshake");
    let dir = scratch.path();
    std::fs::write(dir.join("target.raw"), vec![0; 8 << 20]).unwrap();
    let backend = QemuNbd::start(dir, "target.raw");
    // The first connection breaks; those that follow are never greeted.
    let faults = [vec![Fault::CutAfter(20_000)], vec![Fault::SilentAfter(0); 100]].concat();
    let proxy = FaultProxy::start(&dir.join("proxy"), &backend.socket, faults);
    let options = format!("driver=nbd,server.path={},reconnect-delay=2", proxy.path().display());
    let out = zebu(dir, ["convert", "--image-opts", "-O", "raw", &options, "flat.raw"]).exits(1);
    assert!(out.stderr.contains("the server"), "{out}");
    let reason =
        out.stderr.lines().any(|line| line.contains("closed the connection") || line.contains("answer"));
    assert!(reason, "{out}");
}
