//! Limits of requests and bytes per second: counted by the server's own statistics, and by times that may not be shorter.

use serde_json::Value;
use std::num::NonZeroU64;
use std::path::Path;
use std::time::{Duration, Instant};
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::wait_until;
use zebu_tests::program::zebu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

fn serve(options: &str) -> (Scratch, Server) {
    let scratch = Scratch::new("limits");
    for image in ["a.qcow2", "b.qcow2"] {
        zebu(scratch.path(), ["create", "-q", "-f", "qcow2", image, "64M"]).ok();
    }
    let options =
        format!("--control ctl.sock --export-name a --export-name b {options} -f qcow2 a.qcow2 b.qcow2");
    let server = Server::start(scratch.path(), &options);
    (scratch, server)
}

fn ctl(dir: &Path, line: &str) {
    zebu(dir, ["ctl", "ctl.sock"].into_iter().chain(line.split_whitespace())).ok();
}

fn told(dir: &Path, line: &str) -> Value {
    let words = ["ctl", "ctl.sock"].into_iter().chain(line.split_whitespace());
    serde_json::from_str(&zebu(dir, words).ok().stdout).unwrap()
}

/// Requests of an export that wait, and that have waited.
fn waits(dir: &Path, export: &str) -> (u64, u64) {
    let stats = told(dir, &format!("stats {export}"));
    let number = |key: &str| stats["limit"][key].as_u64().unwrap();
    (number("waiting"), number("waited"))
}

fn ask_for(client: &mut Client, kind: u16, count: u64, len: u64) {
    for cookie in 0..count {
        client.request(0, kind, cookie, cookie * len, len).unwrap();
    }
}

fn take(client: &mut Client, count: u64) {
    for _ in 0..count {
        let mut reply = client.reply().unwrap();
        while !reply.done {
            assert_eq!(reply.error, 0);
            reply = client.reply().unwrap();
        }
        assert_eq!(reply.error, 0);
    }
}

#[test]
fn requests_beyond_the_burst_take_the_time_of_the_limit() {
    let (scratch, server) = serve("");
    let dir = scratch.path();
    for (limits, count, least) in [
        ("iops=100,burst=10", 60, Duration::from_millis(490)),
        ("iops=none,bps=4M,bps-burst=64k", 32, Duration::from_millis(220)),
        ("bps=none,iops-read=100,burst=1", 40, Duration::from_millis(380)),
    ] {
        ctl(dir, &format!("limit a {limits}"));
        let mut client = Client::open(server.socket(), "a").unwrap();
        let began = Instant::now();
        ask_for(&mut client, command::READ, count, 32 << 10);
        take(&mut client, count);
        assert!(began.elapsed() >= least, "{limits}: {:?}", began.elapsed());
    }
    assert!(waits(dir, "a").1 > 0);
    server.stop();
}

/// A request waits for hours, until the limit is changed.
#[test]
fn who_waits_holds_up_nobody_else_and_goes_when_the_limit_is_lifted() {
    let (scratch, server) = serve("--queues 2");
    let dir = scratch.path();
    ctl(dir, "limit a iops-write=1,burst=1");
    ctl(dir, "limit a bps-write=1,bps-burst=1");
    let mut flood = Client::open(server.socket(), "a").unwrap();
    assert_eq!(flood.write(0, 0, &[1; 8192]).unwrap(), 0);
    // The next one waits for more than two hours.
    for cookie in 0..100 {
        flood.request(0, command::WRITE, cookie, cookie * 4096, 4096).unwrap();
        flood.say(&[2; 4096]).unwrap();
    }
    wait_until("all wait", || waits(dir, "a").0 == 100);
    // Reads and flushes of the same export, and another export.
    let mut other = Client::open(server.socket(), "a").unwrap();
    assert_eq!(other.read(0, 4096).unwrap(), [1; 4096]);
    assert_eq!(other.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    let mut b = Client::open(server.socket(), "b").unwrap();
    assert_eq!(b.write(0, 0, &[3; 4096]).unwrap(), 0);
    assert_eq!(waits(dir, "b"), (0, 0));
    assert_eq!(waits(dir, "a").0, 100);
    ctl(dir, "limit a none");
    take(&mut flood, 100);
    assert_eq!(waits(dir, "a"), (0, 100));
    server.stop();
}

#[test]
fn a_group_is_one_budget_for_its_exports() {
    let (scratch, server) = serve("");
    let dir = scratch.path();
    ctl(dir, "limit --group tenant bps=1,bps-burst=1");
    ctl(dir, "limit a group=tenant");
    ctl(dir, "limit b group=tenant");
    let mut a = Client::open(server.socket(), "a").unwrap();
    let mut b = Client::open(server.socket(), "b").unwrap();
    assert_eq!(a.read(0, 65536).unwrap().len(), 65536);
    ask_for(&mut a, command::READ, 50, 4096);
    ask_for(&mut b, command::READ, 5, 4096);
    wait_until("both wait", || waits(dir, "a").0 == 50 && waits(dir, "b").0 == 5);
    let group = told(dir, "limit --group tenant --output json");
    assert_eq!((&group["waiting"], &group["limits"]["bps"]), (&55.into(), &1.into()), "{group}");
    assert_eq!(group["exports"], serde_json::json!(["a", "b"]));
    // A wider limit: both go, in turns.
    ctl(dir, "limit --group tenant bps=1M,bps-burst=none");
    take(&mut b, 5);
    take(&mut a, 50);
    let lines = zebu(dir, ["ctl", "ctl.sock", "limit"]).ok().stdout;
    assert!(lines.contains("group 'tenant': bps=1048576\n") && lines.contains("group=tenant; "), "{lines}");
    ctl(dir, "limit a group=none");
    assert_eq!(told(dir, "limit a --output json")["group"], Value::Null);
    server.stop();
}

#[test]
fn a_server_that_ends_answers_who_waits() {
    let (scratch, server) = serve("");
    let dir = scratch.path();
    ctl(dir, "limit a iops=1,bps=1,bps-burst=1");
    let mut client = Client::open(server.socket(), "a").unwrap();
    ask_for(&mut client, command::READ, 101, 65536);
    wait_until("all but one wait", || waits(dir, "a").0 == 100);
    let answered = std::thread::spawn(move || take(&mut client, 101));
    server.stop();
    answered.join().unwrap();
}

#[test]
fn metrics_tell_of_limits() {
    let (scratch, server) = serve("--metrics unix:metrics.sock");
    let dir = scratch.path();
    ctl(dir, "limit --group tenant iops=7");
    ctl(dir, "limit a bps=1M,group=tenant");
    let mut stream = std::os::unix::net::UnixStream::connect(dir.join("metrics.sock")).unwrap();
    std::io::Write::write_all(&mut stream, b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut body = String::new();
    std::io::Read::read_to_string(&mut stream, &mut body).unwrap();
    for line in [
        "zebu_limit{export=\"a\",limit=\"bps\"} 1048576",
        "zebu_limit{group=\"tenant\",limit=\"iops\"} 7",
        "zebu_limit_waiting{export=\"b\"} 0",
        "zebu_limit_waited_total{export=\"a\"} 0",
        "zebu_limit_waited_seconds_total{export=\"a\"} 0",
    ] {
        assert!(body.lines().any(|other| other == line), "{line} is missing in {body}");
    }
    server.stop();
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let (scratch, server) = serve("");
    let dir = scratch.path();
    let most = NonZeroU64::MAX;
    for (line, expected) in [
        ("limit a iops=0", "iops=none takes the limit away"),
        ("limit a bps=0", "a limit of zero"),
        ("limit a group=nosuch", "there is no group 'nosuch' (there are none yet)"),
        ("limit --group nosuch", "there is no group 'nosuch'"),
        ("limit --group nosuch none", "there is no group 'nosuch'"),
        ("limit --group x group=y", "a group is in no other group"),
        ("limit nosuch iops=1", "there is no export 'nosuch'"),
        ("limit iops=1", "there are 2 exports: say which"),
        ("limit a burst=5", "iops=N"),
        ("limit a iops=18446744073709551616", "below 2^64"),
        ("limit a speed=1", "there is no limit 'speed'"),
        ("limit a iops=1,iops=2", "twice"),
    ] {
        let words = ["ctl", "ctl.sock"].into_iter().chain(line.split_whitespace());
        let out = zebu(dir, words).exits(1);
        assert!(out.stderr.contains(expected), "{line}: {out}");
    }
    ctl(dir, &format!("limit a iops={most},bps={most},burst={most},bps-burst={most}"));
    let mut client = Client::open(server.socket(), "a").unwrap();
    assert_eq!(client.write(0, 0, &[1; 4096]).unwrap(), 0);
    assert_eq!(told(dir, "limit a --output json")["limits"]["iops"], most.get());
    server.stop();
}

#[test]
fn groups_have_names_and_go_when_nothing_is_left_of_them() {
    let (scratch, server) = serve("");
    let dir = scratch.path();
    let words = ["ctl", "ctl.sock", "limit", "--group"];
    for name in ["", "none", "a b", "a,b", "a=b", "a/b", "\n", "b\u{e4}r", &"g".repeat(129)] {
        let out = zebu(dir, words.into_iter().chain([name, "iops=5"])).exits(1);
        assert!(out.stderr.contains("can't be the name of a group: use letters"), "{out}");
    }
    let groups = || told(dir, "limit --output json")["groups"].as_array().unwrap().len();
    for name in ["a", "a-b_c.d", "9", &"g".repeat(128)] {
        ctl(dir, &format!("limit --group {name} iops=5"));
        assert_eq!(groups(), 1);
        ctl(dir, &format!("limit --group {name} none"));
        assert_eq!(groups(), 0);
    }
    // One that limits nothing any more stays as long as an export is in it.
    ctl(dir, "limit --group g iops=5");
    ctl(dir, "limit a group=g");
    ctl(dir, "limit b group=g");
    ctl(dir, "limit --group g none");
    assert_eq!(groups(), 1);
    ctl(dir, "limit a group=none");
    assert_eq!(groups(), 1);
    ctl(dir, "export-remove b");
    assert_eq!(groups(), 0);
    // One that has limits waits for exports.
    ctl(dir, "limit --group g iops=5");
    ctl(dir, "limit a group=g");
    ctl(dir, "limit a group=none");
    assert_eq!(groups(), 1);
    server.stop();
}
