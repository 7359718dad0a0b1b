//! Clients of the control socket and of the metrics that say anything.

use super::odd::{descriptor, drain, number, send, spoil};
use crate::random::Random;
use rustix::fs::{MemfdFlags, memfd_create};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const CONNECTIONS: u64 = 20;
const LINES: u64 = 25;

const COMMANDS: [&str; 14] = [
    "stats",
    "resize",
    "cache-size",
    "flush",
    "snapshot-create",
    "snapshot-list",
    "snapshot-delete",
    "backup-start",
    "backup-query",
    "backup-cancel",
    "bitmaps",
    "bitmap-add",
    "bitmap-remove",
    "bitmap-clear",
];

/// Talks over some connections; how many lines were sent.
pub(super) fn converse(dir: &Path, random: &mut Random) -> u64 {
    let connect = |name: &str| {
        let stream = UnixStream::connect(dir.join(name)).ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(stream)
    };
    let count = if random.chance(90) { random.between(1, 3) } else { random.between(4, CONNECTIONS) };
    let mut streams: Vec<UnixStream> = (0..count).filter_map(|_| connect("ctl.sock")).collect();
    let mut sent = 0;
    for _ in 0..random.below(LINES) {
        if streams.is_empty() {
            break;
        }
        let at = random.below(streams.len() as u64) as usize;
        sent += 1;
        let mut goes_on = say(random, &streams[at]);
        if random.chance(80) {
            goes_on &= drain(&streams[at]);
        }
        if !goes_on || random.chance(5) {
            streams.swap_remove(at);
        }
        if random.chance(20) {
            std::thread::sleep(Duration::from_millis(random.below(4)));
        }
    }
    if random.chance(30)
        && let Some(stream) = connect("metrics.sock")
    {
        let mut request = b"GET /metrics HTTP/1.1\r\nHost: zebu\r\n\r\n".to_vec();
        if random.chance(60) {
            spoil(random, &mut request);
        }
        send(&stream, &request, &[]);
        sent += 1;
    }
    sent
}

fn say(random: &mut Random, stream: &UnixStream) -> bool {
    let mut line = match random.below(30) {
        0 => vec![b'['; random.below(70_000) as usize],
        1 => vec![b' '; random.below(200) as usize],
        2 => (0..random.below(100)).map(|_| random.bits() as u8).collect(),
        _ => command(random).into_bytes(),
    };
    if random.chance(10) {
        spoil(random, &mut line);
    }
    if random.chance(97) {
        line.push(b'\n');
    }
    let descriptors: Vec<OwnedFd> = match random.below(5) {
        0 => (0..random.below(4)).map(|_| descriptor(random)).collect(),
        // What a backup may be written to.
        1 | 2 => vec![memfd_create("target", MemfdFlags::CLOEXEC).expect("memory")],
        _ => Vec::new(),
    };
    send(stream, &line, &descriptors)
}

fn command(random: &mut Random) -> String {
    let command = random.pick(&COMMANDS);
    let mut fields = vec![format!("\"command\":\"{command}\"")];
    let export = if random.chance(90) { "root" } else { "none" };
    if random.chance(95) {
        fields.push(format!("\"export\":\"{export}\""));
    }
    let name = |random: &mut Random| format!("\"{}\"", random.pick(&["a", "b", "c", "", "\\u0000", "ä\\n"]));
    match *command {
        "resize" => {
            let size =
                if random.chance(70) { (64 << 20) + random.below(64 << 20) } else { number(random) >> 20 };
            fields.push(format!("\"size\":{size}"));
        }
        "cache-size" => {
            let size = if random.chance(70) { random.below(8 << 20) } else { number(random) };
            fields.push(format!("\"size\":{size}"));
        }
        "snapshot-create" | "snapshot-delete" | "bitmap-remove" | "bitmap-clear" => {
            fields.push(format!("\"name\":{}", name(random)));
        }
        "bitmap-add" => {
            fields.push(format!("\"name\":{}", name(random)));
            if random.chance(50) {
                fields.push(format!("\"granularity\":{}", number(random)));
            }
        }
        "backup-start" => {
            if random.chance(60) {
                let target = random.pick(&["target.qcow2", "root.qcow2", "other.qcow2", "", "none/x"]);
                fields.push(format!("\"target\":\"{target}\""));
            }
            if random.chance(30) {
                fields.push("\"compression\":\"zstd\"".to_owned());
            }
            if random.chance(30) {
                fields.push(format!("\"cluster-size\":{}", number(random)));
            }
            if random.chance(30) {
                fields.push(format!("\"bitmap\":{}", name(random)));
            }
            if random.chance(20) {
                fields.push(format!("\"previous\":{}", name(random)));
            }
            if random.chance(20) {
                fields.push(format!("\"previous-id\":{}", name(random)));
            }
            if random.chance(20) {
                fields.push(format!("\"rate-limit\":{}", number(random)));
            }
            if random.chance(20) {
                fields.push("\"on-error\":\"request\"".to_owned());
            }
        }
        _ => {}
    }
    if random.chance(20) {
        fields.push(format!("\"id\":{}", random.pick(&["1", "\"x\"", "[[]]", "{\"a\":1e999}", "null"])));
    }
    format!("{{{}}}", fields.join(","))
}
