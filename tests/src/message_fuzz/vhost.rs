//! A front end of vhost-user-blk that says anything, and a guest that has anything in its memory.

use super::odd::{descriptor, drain, number, send, spoil};
use crate::random::Random;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Requests of a front end (vhost-user, "Front-end message types").
mod request {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const SET_OWNER: u32 = 3;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(super) const GET_CONFIG: u32 = 24;
    pub(super) const SET_CONFIG: u32 = 25;
    pub(super) const GET_INFLIGHT_FD: u32 = 31;
    pub(super) const SET_INFLIGHT_FD: u32 = 32;
    pub(super) const ADD_MEM_REG: u32 = 37;
    pub(super) const REM_MEM_REG: u32 = 38;
    pub(super) const LAST: u64 = 45;
}

const MESSAGES: u64 = 40;
const MEMORY: u64 = 2 << 20;
/// Where the front end sees the memory, and where the guest does.
const HERE: u64 = 0x7f00_0000_0000;
const GUEST: u64 = 0x4000_0000;
const RING: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const ENTRIES: u16 = 64;
/// Where headers of requests are.
const HEADERS: u64 = 0x4_0000;

struct FrontEnd {
    stream: UnixStream,
    memory: File,
    log: File,
    kicks: [OwnedFd; 2],
    available: [u16; 2],
}

/// Sets a device up, well or badly, and makes use of it; how many messages and kicks were sent.
pub(super) fn converse(socket: &Path, random: &mut Random) -> u64 {
    let Ok(stream) = UnixStream::connect(socket) else { return 0 };
    stream.set_nonblocking(true).expect("a socket");
    let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory"));
    memory.set_len(MEMORY).expect("memory");
    let log = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("memory"));
    log.set_len(64 << 10).expect("memory");
    if random.chance(30) {
        // Whatever an earlier process may have left there, and more.
        let mut lies = vec![0; 8192];
        random.fill(&mut lies);
        for byte in &mut lies {
            *byte &= if random.chance(50) { 1 } else { 0xff };
        }
        lies[8] = 1;
        log.write_all_at(&lies, 0).expect("memory");
    }
    let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let mut front_end = FrontEnd { stream, memory, log, kicks: [event(), event()], available: [0; 2] };
    front_end.talk(random)
}

impl FrontEnd {
    fn talk(&mut self, random: &mut Random) -> u64 {
        let mut sent = 0;
        let spoils = *random.pick(&[0, 0, 2, 10]);
        let of_rings = (0..2).flat_map(|ring| PER_RING.iter().map(move |what| (*what, ring)));
        for (what, ring) in SETUP.iter().map(|what| (*what, 0)).chain(of_rings) {
            if random.chance(spoils) {
                continue;
            }
            sent += 1;
            if !self.say(random, what, ring, spoils) {
                return sent;
            }
        }
        for _ in 0..random.below(MESSAGES) {
            sent += 1;
            let goes_on = match random.below(10) {
                0 => {
                    let what = match random.below(4) {
                        0 | 1 => random.between(1, request::LAST) as u32,
                        2 => *random.pick(PER_RING),
                        _ => *random.pick(SETUP),
                    };
                    let ring = random.below(3) as u32;
                    self.say(random, what, ring, 20)
                }
                1 => {
                    let pause = random.below(3);
                    std::thread::sleep(Duration::from_millis(pause));
                    drain(&self.stream)
                }
                2 if random.chance(10) => {
                    let file = if random.chance(70) { &self.memory } else { &self.log };
                    let _ = ftruncate(file, random.below(MEMORY) & !4095);
                    true
                }
                _ => {
                    self.offer(random);
                    true
                }
            };
            if !goes_on {
                break;
            }
        }
        sent
    }

    /// Sends a message as it should be, or, in so many of a hundred cases, not.
    fn say(&self, random: &mut Random, what: u32, ring: u32, spoils: u64) -> bool {
        let mut body = Self::body(random, what, ring);
        let mut descriptors = self.descriptors(what, ring);
        if random.chance(spoils) {
            spoil(random, &mut body);
        }
        if random.chance(spoils) {
            descriptors.clear();
            descriptors.extend((0..random.below(4)).map(|_| descriptor(random)));
        }
        let mut flags = 1 | if random.chance(80) { 8 } else { 0 };
        let mut size = body.len() as u32;
        if random.chance(spoils / 4) {
            flags = random.bits() as u32;
        }
        if random.chance(spoils / 4) {
            size = number(random) as u32;
        }
        let mut bytes: Vec<u8> = [what, flags, size].into_iter().flat_map(u32::to_ne_bytes).collect();
        bytes.extend(body);
        send(&self.stream, &bytes, &descriptors) && drain(&self.stream)
    }

    fn body(random: &mut Random, what: u32, ring: u32) -> Vec<u8> {
        let start = RING * u64::from(ring);
        let words = |list: &[u32]| -> Vec<u8> { list.iter().flat_map(|word| word.to_ne_bytes()).collect() };
        let longs = |list: &[u64]| -> Vec<u8> { list.iter().flat_map(|long| long.to_ne_bytes()).collect() };
        let inflight = |len: u64| {
            let mut bytes = longs(&[len, 0]);
            bytes.extend([2u16, ENTRIES].into_iter().flat_map(u16::to_ne_bytes));
            bytes.extend([0; 4]);
            bytes
        };
        match what {
            request::SET_FEATURES => {
                let declined = if random.chance(50) { 0 } else { 1 << random.between(0, 33) };
                longs(&[(1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 0x7644) & !declined])
            }
            // Several queues, replies, configuration, back channel, log, memory slots, reset.
            request::SET_PROTOCOL_FEATURES => {
                longs(&[1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15])
            }
            request::SET_MEM_TABLE => {
                let mut bytes = words(&[1, 0]);
                bytes.extend(longs(&[GUEST, MEMORY, HERE, 0]));
                bytes
            }
            request::ADD_MEM_REG | request::REM_MEM_REG => {
                longs(&[0, GUEST + MEMORY, MEMORY, HERE + MEMORY, 0])
            }
            request::SET_VRING_NUM => words(&[ring, ENTRIES.into()]),
            request::SET_VRING_BASE | request::GET_VRING_BASE => words(&[ring, 0]),
            request::SET_VRING_ENABLE => words(&[ring, u32::from(random.chance(90))]),
            request::SET_VRING_ADDR => {
                let mut bytes = words(&[ring, 0]);
                let at = HERE + start;
                bytes.extend(longs(&[at, at + USED, at + AVAILABLE, 0]));
                bytes
            }
            request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR => {
                longs(&[ring.into()])
            }
            request::GET_CONFIG | request::SET_CONFIG => {
                let mut bytes = words(&[0, 60, 0]);
                bytes.extend([0; 60]);
                bytes
            }
            request::GET_INFLIGHT_FD => inflight(0),
            request::SET_INFLIGHT_FD => inflight(8192),
            _ if random.chance(30) => longs(&[number(random)]),
            _ => Vec::new(),
        }
    }

    fn descriptors(&self, what: u32, ring: u32) -> Vec<OwnedFd> {
        let copy = |file: &File| file.try_clone().expect("cloned").into();
        match what {
            request::SET_MEM_TABLE | request::ADD_MEM_REG => vec![copy(&self.memory)],
            request::SET_INFLIGHT_FD => vec![copy(&self.log)],
            request::SET_VRING_KICK => vec![rustix::io::dup(&self.kicks[ring as usize % 2]).expect("a copy")],
            request::SET_VRING_CALL | request::SET_VRING_ERR => {
                vec![eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")]
            }
            request::SET_BACKEND_REQ_FD => vec![UnixStream::pair().expect("sockets").0.into()],
            _ => Vec::new(),
        }
    }

    /// Puts some requests into a ring, good ones and others, and kicks.
    fn offer(&mut self, random: &mut Random) {
        let ring = random.below(2) as usize;
        let start = RING * ring as u64;
        for _ in 0..random.between(1, 12) {
            let head = random.below(u64::from(ENTRIES) / 3) as u16 * 3;
            self.put_request(random, start, head);
            let index = self.available[ring];
            let at = start + AVAILABLE + 4 + u64::from(index % ENTRIES) * 2;
            let offered = if random.chance(99) { head } else { random.bits() as u16 };
            self.put(at, &offered.to_le_bytes());
            self.available[ring] = index.wrapping_add(1);
        }
        let mut index = self.available[ring];
        if random.chance(1) {
            index = random.bits() as u16;
        }
        self.put(start + AVAILABLE + 2, &index.to_le_bytes());
        let _ = rustix::io::write(&self.kicks[ring], &1u64.to_ne_bytes());
    }

    fn put_request(&self, random: &mut Random, table: u64, head: u16) {
        let header = HEADERS + table / 4 + u64::from(head) * 32;
        let kind =
            if random.chance(95) { *random.pick(&[0u32, 1, 4, 8, 11, 13]) } else { random.bits() as u32 };
        let sector = if random.chance(90) { random.below(64 << 11) } else { number(random) };
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(sector.to_le_bytes());
        self.put(header, &bytes);
        let writes = if matches!(kind, 0 | 8) { 2 } else { 0 };
        let len = match kind {
            11 | 13 => 16,
            8 => 20,
            _ => random.below(128) as u32 * 512,
        };
        let data = 0x10_0000 + random.below(0x8_0000);
        if matches!(kind, 11 | 13) {
            let range = [sector.to_le_bytes(), (random.below(4096)).to_le_bytes()].concat();
            self.put(data, &range);
        }
        let chain = [(header, 16, 1), (data, len, 1 | writes), (header + 16, 1, 2)];
        for (place, (offset, len, flags)) in (head..).zip(chain) {
            let address = if random.chance(98) { GUEST + offset } else { number(random) };
            let len: u32 = if random.chance(98) { len } else { number(random) as u32 };
            let flags: u16 = if random.chance(98) { flags } else { random.below(8) as u16 };
            let next: u16 = if random.chance(98) { place + 1 } else { random.below(70) as u16 };
            let mut descriptor = address.to_le_bytes().to_vec();
            descriptor.extend(len.to_le_bytes());
            descriptor.extend(flags.to_le_bytes());
            descriptor.extend(next.to_le_bytes());
            self.put(table + u64::from(place) * 16, &descriptor);
        }
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        // Where the file was cut, it is as long again as is written.
        let _ = self.memory.write_all_at(bytes, offset);
    }
}

/// Messages for the device, and for each ring.
const SETUP: &[u32] = &[
    request::SET_OWNER,
    request::GET_FEATURES,
    request::SET_FEATURES,
    request::GET_PROTOCOL_FEATURES,
    request::SET_PROTOCOL_FEATURES,
    request::SET_BACKEND_REQ_FD,
    request::GET_CONFIG,
    request::SET_MEM_TABLE,
    request::SET_INFLIGHT_FD,
];
const PER_RING: &[u32] = &[
    request::SET_VRING_NUM,
    request::SET_VRING_ADDR,
    request::SET_VRING_BASE,
    request::SET_VRING_CALL,
    request::SET_VRING_KICK,
    request::SET_VRING_ENABLE,
];
