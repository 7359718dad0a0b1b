//! A served disk that several clients change at once, each in a part of its own, with a model of what is in it.

use crate::nbd_client::{Client, command};
use crate::random::Random;
use crate::server::Server;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Clients.
const LANES: usize = 3;

/// A part of the disk that one client changes, and what is in it.
pub struct Lane {
    /// Its connection.
    pub client: Client,
    random: Random,
    start: usize,
    /// Its content.
    pub model: Vec<u8>,
}

impl Lane {
    /// A write, zeroing or trim of a random range.
    pub fn change(&mut self) {
        let random = &mut self.random;
        let unit = *random.pick(&[512, 4096, 65536]);
        let offset = random.below((self.model.len() / unit) as u64) as usize * unit;
        let most = if random.chance(10) { 40 } else { 4 };
        let len = (unit * random.between(1, most) as usize).min(self.model.len() - offset);
        let at = (self.start + offset) as u64;
        let part = &mut self.model[offset..offset + len];
        match random.below(8) {
            0 => {
                assert_eq!(self.client.call(0, command::WRITE_ZEROES, at, len as u64).unwrap().error, 0);
                part.fill(0);
            }
            1 => {
                assert_eq!(self.client.call(0, command::TRIM, at, len as u64).unwrap().error, 0);
                let shown = self.client.read(at, len as u64).unwrap();
                self.model[offset..offset + len].copy_from_slice(&shown);
            }
            _ => {
                random.fill(part);
                assert_eq!(self.client.write(0, at, part).unwrap(), 0);
            }
        }
    }
}

/// The first export of a server, of `size` bytes, in lanes.
pub fn lanes(server: &Server, size: usize, seed: u64) -> Vec<Lane> {
    let share = size / LANES / 65536 * 65536;
    (0..LANES)
        .map(|lane| {
            let mut client = Client::open(server.socket(), "").unwrap();
            let start = lane * share;
            let len = if lane + 1 == LANES { size - start } else { share };
            let model = client.read(start as u64, len as u64).unwrap();
            Lane { client, random: Random::new(seed * 10 + lane as u64), start, model }
        })
        .collect()
}

/// Every lane is changed by a thread of its own until `stop`.
pub fn change_until(lanes: &mut [Lane], stop: &AtomicBool, work: impl FnOnce()) {
    std::thread::scope(|scope| {
        for lane in lanes {
            scope.spawn(|| {
                while !stop.load(SeqCst) {
                    lane.change();
                }
            });
        }
        work();
        stop.store(true, SeqCst);
    });
}

/// The content of the whole disk.
pub fn content(lanes: &[Lane]) -> Vec<u8> {
    lanes.iter().flat_map(|lane| lane.model.clone()).collect()
}
