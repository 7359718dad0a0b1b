//! NBD clients that say anything.

use super::odd::{drain, number, send, spoil};
use crate::random::Random;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Connections of one turn at most, and messages of one.
const CONNECTIONS: u64 = 4;
const MESSAGES: u64 = 40;

/// A connection, as far as it has come.
struct Session {
    stream: UnixStream,
    /// Requests may be sent.
    is_chosen: bool,
    has_extended: bool,
    /// Replies are taken.
    reads: bool,
}

/// Talks to the server over some connections; how many messages were sent.
pub(super) fn converse(socket: &Path, random: &mut Random) -> u64 {
    let count = random.between(1, CONNECTIONS);
    let mut sessions: Vec<Session> = (0..count).filter_map(|_| begin(socket, random)).collect();
    let mut sent = 0;
    for _ in 0..random.below(MESSAGES) {
        if sessions.is_empty() {
            break;
        }
        let at = random.below(sessions.len() as u64) as usize;
        let session = &mut sessions[at];
        sent += 1;
        let bytes =
            if session.is_chosen { request(random, session.has_extended) } else { option(random, session) };
        let goes_on = send(&session.stream, &bytes, &[]) && (!session.reads || drain(&session.stream));
        match random.below(60) {
            0 => drop(session.stream.shutdown(Shutdown::Write)),
            1 => drop(session.stream.shutdown(Shutdown::Read)),
            2 => std::thread::sleep(Duration::from_millis(random.below(5))),
            3 => drop(sessions.swap_remove(at)),
            _ if !goes_on => drop(sessions.swap_remove(at)),
            _ => {}
        }
    }
    sent
}

fn begin(socket: &Path, random: &mut Random) -> Option<Session> {
    let stream = UnixStream::connect(socket).ok()?;
    stream.set_nonblocking(true).ok()?;
    let mut session = Session { stream, is_chosen: false, has_extended: false, reads: random.chance(80) };
    let flags = if random.chance(95) { random.below(4) as u32 } else { random.bits() as u32 };
    send(&session.stream, &flags.to_be_bytes(), &[]);
    if random.chance(70) {
        // As a client does it that knows what it wants.
        if random.chance(70) {
            session.has_extended = random.chance(50);
            let code = if session.has_extended { 11 } else { 8 };
            send(&session.stream, &framed(code, b""), &[]);
            if random.chance(60) {
                send(&session.stream, &framed(10, &contexts(random)), &[]);
            }
        }
        send(&session.stream, &framed(7, &counted(b"root", &[0, 0])), &[]);
        session.is_chosen = true;
    }
    Some(session)
}

fn framed(code: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &code.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

fn counted(name: &[u8], rest: &[u8]) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name, rest].concat()
}

fn name(random: &mut Random) -> Vec<u8> {
    match random.below(5) {
        0 => Vec::new(),
        1 => b"none".to_vec(),
        2 => vec![b'x'; random.below(5000) as usize],
        _ => b"root".to_vec(),
    }
}

fn contexts(random: &mut Random) -> Vec<u8> {
    let known: [&[u8]; 6] = [
        b"base:allocation",
        b"base:",
        b"qemu:",
        b"qemu:allocation-depth",
        b"qemu:dirty-bitmap:",
        b"other:thing",
    ];
    let count = random.below(4) as u32;
    let mut data = counted(b"root", &count.to_be_bytes());
    for _ in 0..count {
        data.extend(counted(random.pick::<&[u8]>(&known), b""));
    }
    data
}

fn option(random: &mut Random, session: &mut Session) -> Vec<u8> {
    let code = if random.chance(90) { random.between(1, 12) as u32 } else { random.bits() as u32 };
    let data = match code {
        1 => name(random),
        6 | 7 => {
            let kinds = random.below(4) as u16;
            let kinds: Vec<u8> = std::iter::once(kinds).chain(0..kinds).flat_map(u16::to_be_bytes).collect();
            counted(&name(random), &kinds)
        }
        9 | 10 => contexts(random),
        _ => Vec::new(),
    };
    let mut bytes = framed(code, &data);
    if random.chance(15) {
        spoil(random, &mut bytes);
    } else {
        session.has_extended |= code == 11;
        session.is_chosen |= matches!(code, 1 | 7) && random.chance(70);
    }
    bytes
}

fn request(random: &mut Random, has_extended: bool) -> Vec<u8> {
    let magic: u32 = if has_extended { 0x21e4_1c71 } else { 0x2560_9513 };
    let command = if random.chance(92) { random.below(9) as u16 } else { random.bits() as u16 };
    let flags = if random.chance(70) { 0 } else { random.bits() as u16 & 0x7f };
    let offset = if random.chance(80) { random.below(64 << 20) } else { number(random) };
    let len = match random.below(10) {
        0 => number(random),
        1 => random.below(33 << 20),
        _ => random.below(200 << 10),
    };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(random.bits().to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    if has_extended {
        bytes.extend(len.to_be_bytes());
    } else {
        bytes.extend((len as u32).to_be_bytes());
    }
    if command == 1 {
        // What is not sent is taken from what follows.
        let payload = if random.chance(90) { len.min(1 << 20) } else { random.below(5000) };
        bytes.resize(bytes.len() + payload as usize, random.bits() as u8);
    }
    if random.chance(4) {
        bytes.truncate(bytes.len().min(64));
        spoil(random, &mut bytes);
    }
    bytes
}
