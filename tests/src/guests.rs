//! Guests of a server, each with a part of the disk of its own and a model of what it must show.

use crate::aging::{BLOCK, content};
use crate::nbd_client::{Client, command};
use crate::random::Random;
use crate::server::Server;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Guests of a disk.
const GUESTS: u64 = 4;
/// Blocks of a cluster of the image.
const CLUSTER: u64 = (64 << 10) / BLOCK;

/// Times of a guest's requests since they were taken last, in microseconds.
pub type Times = Mutex<Vec<u32>>;

/// The content of clusters that were trimmed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trims {
    /// They read as zero.
    ReadAsZero,
    /// Nothing, so guests write zeroes instead.
    Nothing,
}

/// Runs guests beside `work`, until that ends or one of them fails. `blocks`: what the disk shows, 0 for zeroes, else the number of
/// the write.
///
/// # Errors
/// What failed, in a guest or in `work`.
pub fn beside<T>(
    server: &Server,
    blocks: &mut [u32],
    seed: u64,
    trims: Trims,
    work: impl FnOnce(&[Times], &AtomicBool) -> Result<T, String>,
) -> Result<T, String> {
    let part = blocks.len() as u64 / GUESTS / CLUSTER * CLUSTER;
    let times: Vec<Times> = (0..GUESTS).map(|_| Times::default()).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guests: Vec<_> = blocks
            .chunks_mut(part as usize)
            .zip(&times)
            .zip(0..GUESTS)
            .map(|((blocks, times), number)| {
                let stop = &stop;
                scope.spawn(move || {
                    let client = Client::open(server.socket(), "").map_err(|e| format!("connecting: {e}"))?;
                    let random = Random::new(seed ^ number << 56);
                    let mut guest = Guest { client, random, first: number * part, blocks, times, trims };
                    let done = guest.go_on(stop);
                    // The others end, too.
                    stop.store(true, Relaxed);
                    done.map_err(|e| format!("guest {number}: {e}"))
                })
            })
            .collect();
        let done = work(&times, &stop);
        stop.store(true, Relaxed);
        for guest in guests {
            guest.join().map_err(|_| "a guest panicked".to_owned())??;
        }
        done
    })
}

/// A guest, and its part of the disk.
struct Guest<'a> {
    client: Client,
    random: Random,
    /// The first block of its part.
    first: u64,
    /// The write that made each block of its part: 0 for zeroes, else its number.
    blocks: &'a mut [u32],
    times: &'a Times,
    trims: Trims,
}

impl Guest<'_> {
    fn go_on(&mut self, stop: &AtomicBool) -> Result<(), String> {
        let mut writes = self.blocks.iter().copied().max().unwrap_or(0);
        while !stop.load(Relaxed) {
            let start = Instant::now();
            match self.random.below(100) {
                0..50 => {
                    writes += 1;
                    let range = self.range(16);
                    let bytes = content(self.on_disk(&range), writes);
                    let error = self.client.write(0, (self.first + range.start) * BLOCK, &bytes);
                    succeeded("write", error)?;
                    self.note(range, writes);
                }
                50..60 => {
                    let range = self.clusters();
                    match self.trims {
                        Trims::ReadAsZero => self.ask("trim", command::TRIM, &range)?,
                        Trims::Nothing => self.ask("zeroes", command::WRITE_ZEROES, &range)?,
                    }
                    self.note(range, 0);
                }
                60..65 => {
                    let range = self.range(64);
                    self.ask("zeroes", command::WRITE_ZEROES, &range)?;
                    self.note(range, 0);
                }
                65..68 => {
                    succeeded("flush", self.client.call(0, command::FLUSH, 0, 0).map(|reply| reply.error))?;
                }
                _ => {
                    let range = self.range(64);
                    self.verify(range)?;
                }
            }
            let micros = u32::try_from(start.elapsed().as_micros()).unwrap_or(u32::MAX);
            self.times.lock().unwrap_or_else(PoisonError::into_inner).push(micros);
        }
        Ok(())
    }

    /// Up to so many blocks of the part.
    fn range(&mut self, most: u64) -> Range<u64> {
        let len = self.random.between(1, most);
        let start = self.random.below(self.blocks.len() as u64 - len);
        start..start + len
    }

    /// Up to eight whole clusters of the part.
    fn clusters(&mut self) -> Range<u64> {
        let all = self.blocks.len() as u64 / CLUSTER;
        let len = self.random.between(1, 8);
        let start = self.random.below(all - len);
        start * CLUSTER..(start + len) * CLUSTER
    }

    fn on_disk(&self, range: &Range<u64>) -> Range<u64> {
        self.first + range.start..self.first + range.end
    }

    fn note(&mut self, range: Range<u64>, write: u32) {
        self.blocks[range.start as usize..range.end as usize].fill(write);
    }

    fn ask(&mut self, what: &str, command: u16, range: &Range<u64>) -> Result<(), String> {
        let (offset, len) = ((self.first + range.start) * BLOCK, (range.end - range.start) * BLOCK);
        succeeded(what, self.client.call(0, command, offset, len).map(|reply| reply.error))
    }

    fn verify(&mut self, range: Range<u64>) -> Result<(), String> {
        let (offset, len) = ((self.first + range.start) * BLOCK, (range.end - range.start) * BLOCK);
        let bytes = self.client.read(offset, len).map_err(|e| format!("read at {offset}: {e}"))?;
        for (block, found) in range.zip(bytes.chunks(BLOCK as usize)) {
            let (number, write) = (self.first + block, self.blocks[block as usize]);
            let is_right = match write {
                0 => found.iter().all(|byte| *byte == 0),
                write => found == content(number..number + 1, write),
            };
            if !is_right {
                return Err(format!("block {number} is not what write {write} made"));
            }
        }
        Ok(())
    }
}

fn succeeded(what: &str, answer: std::io::Result<u32>) -> Result<(), String> {
    match answer {
        Ok(0) => Ok(()),
        Ok(error) => Err(format!("{what}: error {error}")),
        Err(error) => Err(format!("{what}: {error}")),
    }
}
