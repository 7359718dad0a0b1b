//! Exports that are added and removed while others are served, and a configuration that is read again.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::Path;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::wait_until;
use zebu_tests::program::{Finished, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

fn images(scratch: &Scratch) {
    let dir = scratch.path();
    for image in ["a.qcow2", "b.qcow2", "c.qcow2"] {
        zebu(dir, ["create", "-q", "-f", "qcow2", image, "64M"]).ok();
    }
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", "c.qcow2", "-F", "qcow2", "overlay.qcow2"]).ok();
    for image in ["d.raw", "e.raw"] {
        zebu(dir, ["create", "-q", "-f", "raw", image, "1M"]).ok();
    }
}

fn ctl(dir: &Path, line: &str) -> Finished {
    zebu(dir, ["ctl", "ctl.sock"].into_iter().chain(line.split_whitespace()))
}

fn told(dir: &Path, line: &str) -> Value {
    serde_json::from_str(&ctl(dir, line).ok().stdout).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let stats = told(dir, "stats");
    stats["exports"].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap().to_owned()).collect()
}

fn refused(dir: &Path, line: &str, expected: &str) {
    let out = ctl(dir, line).exits(1);
    assert!(out.stderr.contains(expected), "{line}: {out}");
}

#[test]
fn exports_come_and_go_under_clients() {
    for options in ["", "--no-sandbox", "-t none"] {
        let scratch = Scratch::new("come-and-go");
        images(&scratch);
        let dir = scratch.path();
        let server =
            Server::start(dir, &format!("--control ctl.sock --export-name a {options} -f qcow2 a.qcow2"));
        let mut of_a = Client::open(server.socket(), "a").unwrap();
        assert_eq!(of_a.write(0, 0, &[1; 4096]).unwrap(), 0);
        ctl(dir, "export-add b b.qcow2").ok();
        ctl(dir, "export-add d -f raw d.raw").ok();
        ctl(dir, "export-add read --read-only c.qcow2").ok();
        assert_eq!(names(dir), ["a", "b", "d", "read"]);
        let mut of_b = Client::open(server.socket(), "b").unwrap();
        assert_eq!(of_b.write(0, 0, &[2; 4096]).unwrap(), 0);
        assert_ne!(Client::open(server.socket(), "read").unwrap().write(0, 0, &[2; 512]).unwrap(), 0);
        for (line, expected) in [
            ("export-add b c.qcow2", "there is an export 'b' already"),
            ("export-add e b.qcow2", "lock"),
            ("export-add e nosuch.qcow2", "could not open 'nosuch.qcow2'"),
            ("export-add e e.raw", "-f raw"),
            ("export-remove nosuch", "there is no export 'nosuch'"),
            ("export-remove b", "1 client uses the export 'b'"),
        ] {
            refused(dir, line, expected);
        }
        assert_eq!(of_b.read(0, 4096).unwrap(), [2; 4096]);
        drop(of_b);
        wait_until("b is free", || ctl(dir, "export-remove b").code == Some(0));
        assert!(Client::open(server.socket(), "b").is_err());
        let read = zebu(dir, ["io", "-f", "qcow2", "-c", "read -P 2 0 4096", "b.qcow2"]).ok();
        assert!(!read.stdout.contains("failed"), "{read}");
        zebu(dir, ["check", "b.qcow2"]).ok();
        // It may come again, and is taken away from who uses it.
        ctl(dir, "export-add b b.qcow2").ok();
        let mut of_b = Client::open(server.socket(), "b").unwrap();
        assert_eq!(of_b.write(0, 0, &[3; 4096]).unwrap(), 0);
        ctl(dir, "export-remove --force b").ok();
        assert!(of_b.read(0, 512).is_err());
        zebu(dir, ["check", "b.qcow2"]).ok();
        // The first goes: the empty name is that of no other disk.
        ctl(dir, "export-remove --force a").ok();
        assert!(of_a.is_closed() && Client::open(server.socket(), "").is_err());
        assert_eq!(names(dir), ["d", "read"]);
        server.stop();
    }
}

#[test]
fn in_the_sandbox_only_single_files_are_added() {
    let scratch = Scratch::new("come-and-go");
    images(&scratch);
    let dir = scratch.path();
    let options = "--control ctl.sock --export-name a -f qcow2 a.qcow2";
    let server = Server::start(dir, options);
    refused(dir, "export-add o overlay.qcow2", "has the backing file 'c.qcow2'");
    refused(dir, "export-add o nbd://localhost:1/x", "a local file is needed");
    // Nothing of it is left: no lock, no name.
    zebu(dir, ["io", "-f", "qcow2", "-c", "write 0 512", "overlay.qcow2"]).ok();
    assert_eq!(names(dir), ["a"]);
    server.stop();
    let server = Server::start(dir, &format!("--no-sandbox {options}"));
    ctl(dir, "export-add o overlay.qcow2").ok();
    assert_eq!(Client::open(server.socket(), "o").unwrap().read(0, 512).unwrap().len(), 512);
    server.stop();
}

#[test]
fn jobs_are_listed_and_cancelled() {
    let scratch = Scratch::new("come-and-go");
    images(&scratch);
    let dir = scratch.path();
    let server = Server::start(dir, "--control ctl.sock --export-name a -f qcow2 a.qcow2");
    assert_eq!(ctl(dir, "jobs").ok().stdout, "no jobs\n");
    refused(dir, "cancel", "no job of the export 'a' is running");
    let mut client = Client::open(server.socket(), "a").unwrap();
    for at in 0..16 {
        assert_eq!(client.write(0, at << 20, &vec![1; 1 << 20]).unwrap(), 0);
    }
    assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    drop(client);
    ctl(dir, "backup-start -r 1 a target.qcow2").ok();
    let jobs = told(dir, "jobs --output json");
    let job = &jobs["jobs"][0];
    assert_eq!(
        (&job["kind"], &job["export"], &job["status"]),
        (&"backup".into(), &"a".into(), &"running".into())
    );
    wait_until("a has no client", || told(dir, "stats a")["clients"] == 0);
    refused(dir, "export-remove a", "a backup of the export 'a' is running");
    ctl(dir, "cancel").ok();
    assert!(ctl(dir, "jobs").ok().stdout.contains("cancelled"));
    refused(dir, "cancel a", "no job of the export 'a' is running");
    ctl(dir, "export-remove a").ok();
    server.stop();
}

#[test]
fn of_an_export_that_is_gone_no_hydration_is_left() {
    let scratch = Scratch::new("come-and-go");
    images(&scratch);
    let dir = scratch.path();
    let server = Server::start(dir, "--no-sandbox --control ctl.sock --export-name a -f qcow2 a.qcow2");
    let count = || told(dir, "jobs --output json")["jobs"].as_array().unwrap().len();
    ctl(dir, "export-add o overlay.qcow2").ok();
    ctl(dir, "hydrate -w o").ok();
    assert_eq!(count(), 1);
    ctl(dir, "export-remove o").ok();
    assert_eq!(count(), 0);
    server.stop();
}

const CONFIG: &str = "zebu.toml";

fn configure(dir: &Path, text: &str) {
    std::fs::write(dir.join("new.toml"), text).unwrap();
    std::fs::rename(dir.join("new.toml"), dir.join(CONFIG)).unwrap();
}

fn export(name: &str, more: &str) -> String {
    format!("[[exports]]\nname = \"{name}\"\nfile = \"{name}.qcow2\"\nformat = \"qcow2\"\n{more}\n")
}

#[test]
fn a_configuration_is_made_true_again_by_sighup() {
    for options in ["", "--no-sandbox"] {
        let scratch = Scratch::new("come-and-go");
        images(&scratch);
        let dir = scratch.path();
        let sockets = "[server]\ncontrol = \"ctl.sock\"\n";
        configure(
            dir,
            &format!("{sockets}[groups.g]\niops = 50\n{}", export("a", "group = \"g\"\nbps = \"1M\"")),
        );
        let server = Server::start(dir, &format!("--config {CONFIG} --log-level info {options}"));
        let limits = |name: &str| told(dir, &format!("limit {name} --output json"));
        assert_eq!((&limits("a")["group"], &limits("a")["limits"]["bps"]), (&"g".into(), &(1 << 20).into()));
        let mut client = Client::open(server.socket(), "a").unwrap();
        // What ctl changes, what the file changes, and a socket.
        ctl(dir, "limit a iops=9,bps=none").ok();
        ctl(dir, "limit --group own iops=9").ok();
        ctl(dir, "export-add c c.qcow2").ok();
        let text = "[server]\ncontrol = \"other.sock\"\n[groups.g]\niops = 70\n".to_owned()
            + &export("a", "group = \"g\"\nbps = \"2M\"")
            + &export("b", "read-only = true");
        configure(dir, &text);
        server.signal(Signal::HUP);
        server.wait_for_words("was read again");
        assert_eq!(names(dir), ["a", "b"]);
        assert_eq!(limits("a")["limits"], serde_json::json!({ "bps": 2 << 20 }));
        assert_eq!(told(dir, "limit --group g --output json")["limits"]["iops"], 70);
        refused(dir, "limit --group own", "there is no group 'own'");
        server.wait_for_words("undone: the limits that ctl gave the export 'a' (iops=9,group=g)");
        server.wait_for_words("undone: the limits that ctl gave the group 'own' (iops=9)");
        server.wait_for_words("undone: the export 'c', which ctl had added, is removed");
        server.wait_for_words("line 2: control has changed, which takes effect when the server is restarted");
        assert_ne!(Client::open(server.socket(), "b").unwrap().write(0, 0, &[1; 512]).unwrap(), 0);
        // A mistake leaves all as it is, and so does a file that can't be opened.
        for (more, expected) in [
            ("[[exports]]\nname = \"x\"\n", "missing field `file`"),
            (&export("nosuch", ""), "nosuch.qcow2"),
            (&export("a", ""), "the export 'a' is in line"),
        ] {
            configure(dir, &(text.replace("iops = 70", "iops = 80") + more));
            server.signal(Signal::HUP);
            server.wait_for_words(expected);
            wait_until("it is done", || told(dir, "limit --group g --output json")["limits"]["iops"] == 70);
            assert_eq!(names(dir), ["a", "b"]);
        }
        // One that is in use stays, the other goes.
        configure(dir, sockets);
        server.signal(Signal::HUP);
        server.wait_for_words("not removed: 1 client uses the export 'a'");
        wait_until("b is gone", || names(dir) == ["a"]);
        assert_eq!(client.write(0, 0, &[1; 512]).unwrap(), 0);
        drop(client);
        wait_until("a is free", || told(dir, "stats a")["clients"] == 0);
        server.signal(Signal::HUP);
        wait_until("a is gone", || names(dir).is_empty());
        zebu(dir, ["check", "a.qcow2"]).ok();
        server.stop_with_messages();
    }
}

#[test]
fn what_a_configuration_can_not_be_is_refused_at_the_start() {
    let scratch = Scratch::new("come-and-go");
    images(&scratch);
    let dir = scratch.path();
    configure(dir, &format!("[server]\ncontrol = \"ctl.sock\"\n{}", export("a", "iops = 0")));
    let run = |line: &str| zebu(dir, ["serve"].into_iter().chain(line.split_whitespace())).exits(1);
    let out = run(&format!("--config {CONFIG}"));
    assert!(out.stderr.contains("line 7: iops: a limit of zero"), "{out}");
    configure(dir, &format!("[server]\ncontrol = \"ctl.sock\"\n{}", export("a", "")));
    for (line, expected) in [
        ("--config nosuch.toml".to_owned(), "could not read"),
        (format!("--config {CONFIG}"), "nothing serves clients"),
        (
            format!("--nbd unix:n.sock --control c.sock --config {CONFIG}"),
            "line 2: control: the command line has it",
        ),
        (format!("--nbd unix:n.sock --isolate --config {CONFIG}"), "--isolate"),
        (format!("--nbd unix:n.sock --config {CONFIG} --export-name a b.qcow2"), "two exports are named 'a'"),
    ] {
        let out = run(&line);
        assert!(out.stderr.contains(expected), "{line}: {out}");
    }
    // Without a file, SIGHUP ends the server and says so.
    let server = Server::start(dir, "-f qcow2 a.qcow2");
    let said = server.stop_by(Signal::HUP);
    assert!(said.contains("SIGHUP ends the server"), "{said}");
}

#[test]
fn an_export_that_is_removed_is_named() {
    let scratch = Scratch::new("come-and-go");
    images(&scratch);
    let dir = scratch.path();
    let server = Server::start(dir, "--control ctl.sock --export-name a -f qcow2 a.qcow2");
    let out = ctl(dir, "export-remove");
    assert!(out.code != Some(0) && out.stderr.contains("EXPORT"), "{out}");
    // The empty name leads clients to the first export, and removes none.
    let out = zebu(dir, ["ctl", "ctl.sock", "export-remove", ""]).exits(1);
    assert!(
        out.stderr.contains("there is no export '' (there are 'a'; name the one that is meant)"),
        "{out}"
    );
    assert_eq!(names(dir), ["a"]);
    ctl(dir, "export-remove a").ok();
    server.stop();
}

/// Warnings are of what differs from what is served, however often and whatever the file said in between.
#[test]
fn a_configuration_is_compared_with_what_is_in_effect() {
    let scratch = Scratch::new("come-and-go");
    images(&scratch);
    let dir = scratch.path();
    let text =
        |control: &str, of_a: &str| format!("[server]\ncontrol = \"{control}\"\n{}", export("a", of_a));
    configure(dir, &text("ctl.sock", ""));
    let server = Server::start(dir, &format!("--config {CONFIG} --log-level info --no-sandbox"));
    let mut reads = 0;
    // How often these words were said after the configuration was read once more.
    let mut reload = |text: &str| {
        configure(dir, text);
        server.signal(Signal::HUP);
        reads += 1;
        wait_until("it was read again", || server.heard().matches("was read again").count() == reads);
        let said = server.heard();
        ["control has changed", "control is gone", "read-only of 'a' has changed", "undone:"]
            .map(|words| said.matches(words).count())
    };
    assert_eq!(reload(&text("other.sock", "read-only = true")), [1, 0, 1, 0]);
    // It is as before, and takes no effect yet.
    assert_eq!(reload(&text("other.sock", "read-only = true")), [2, 0, 2, 0]);
    assert_eq!(reload(&text("ctl.sock", "")), [2, 0, 2, 0]);
    assert_eq!(reload(&format!("[server]\n{}", export("a", ""))), [2, 1, 2, 0]);
    // What ctl removed comes again as the file says now, so that nothing has to be restarted.
    ctl(dir, "export-remove a").ok();
    assert_eq!(reload(&text("ctl.sock", "read-only = true")), [2, 1, 2, 1]);
    assert_eq!(reload(&text("ctl.sock", "read-only = true")), [2, 1, 2, 1]);
    assert_eq!(told(dir, "stats a")["read-only"], true);
    // What could not be opened was not there: nobody has removed it.
    ctl(dir, "export-remove a").ok();
    ctl(dir, "export-add z b.qcow2").ok();
    let both = text("ctl.sock", "") + &export("z", "");
    std::fs::remove_file(dir.join("a.qcow2")).unwrap();
    configure(dir, &both);
    server.signal(Signal::HUP);
    server.wait_for_words("the configuration stays as it is");
    zebu(dir, ["create", "-q", "-f", "qcow2", "a.qcow2", "64M"]).ok();
    let said = reload(&text("ctl.sock", ""));
    assert_eq!(said, [2, 1, 2, 3], "{}", server.heard());
    server.stop_with_messages();
}

#[test]
fn an_export_of_the_configuration_gets_another_name() {
    for options in ["", "--no-sandbox"] {
        let scratch = Scratch::new("come-and-go");
        images(&scratch);
        let dir = scratch.path();
        let named = |name: &str, more: &str| {
            let export = export("a", more).replace("name = \"a\"", &format!("name = \"{name}\""));
            format!("[server]\ncontrol = \"ctl.sock\"\n{export}")
        };
        configure(dir, &named("a", ""));
        let server = Server::start(dir, &format!("--config {CONFIG} --log-level info {options}"));
        let mut client = Client::open(server.socket(), "a").unwrap();
        assert_eq!(client.write(0, 0, &[7; 512]).unwrap(), 0);
        // Not under a client.
        configure(dir, &named("z", "iops = 5000"));
        server.signal(Signal::HUP);
        server.wait_for_words("the export 'z' is not added, since 'a' still has its file");
        assert_eq!(names(dir), ["a"]);
        drop(client);
        wait_until("a is free", || told(dir, "stats a")["clients"] == 0);
        server.signal(Signal::HUP);
        wait_until("it has another name", || names(dir) == ["z"]);
        assert_eq!(Client::open(server.socket(), "z").unwrap().read(0, 512).unwrap(), [7; 512]);
        wait_until("its limits are set", || {
            told(dir, "limit z --output json")["limits"] == serde_json::json!({ "iops": 5000 })
        });
        // A name that ctl gave gives way, too.
        wait_until("z is free", || told(dir, "stats z")["clients"] == 0);
        ctl(dir, "export-remove z").ok();
        ctl(dir, "export-add -f qcow2 c a.qcow2").ok();
        server.signal(Signal::HUP);
        wait_until("the name is that of the file", || names(dir) == ["z"]);
        let said = server.heard();
        assert!(!said.contains("stays as it is"), "{said}");
        server.stop_with_messages();
    }
}

/// A server that never answers, and a process that opens no file: neither keeps the server from its end.
#[test]
fn a_configuration_that_does_not_answer_holds_up_no_end() {
    for options in ["", "--no-sandbox"] {
        let scratch = Scratch::new("come-and-go");
        images(&scratch);
        let dir = scratch.path();
        let silent = std::os::unix::net::UnixListener::bind(dir.join("silent.sock")).unwrap();
        let text = format!("[server]\ncontrol = \"ctl.sock\"\n{}", export("a", ""));
        configure(dir, &text);
        let server = Server::start(dir, &format!("--config {CONFIG} --log-level info {options}"));
        let name = format!("nbd+unix:///?socket={}", dir.join("silent.sock").display());
        configure(dir, &format!("{text}[[exports]]\nname = \"s\"\nfile = \"{name}\"\nformat = \"raw\"\n"));
        let opener = server.children().into_iter().find(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains("open-for-a-server")
        });
        assert_eq!(opener.is_some(), options.is_empty());
        let opener = opener.and_then(|pid| Pid::from_raw(pid.cast_signed()));
        if let Some(opener) = opener {
            kill_process(opener, Signal::STOP).unwrap();
        }
        server.signal(Signal::HUP);
        server.wait_for_words("is read again");
        let connected = opener.is_none().then(|| silent.accept().unwrap());
        server.stop_with_messages();
        drop(connected);
        if let Some(opener) = opener {
            // It ends by itself once it goes on.
            kill_process(opener, Signal::CONT).unwrap();
        }
        zebu(dir, ["check", "a.qcow2"]).ok();
    }
}
