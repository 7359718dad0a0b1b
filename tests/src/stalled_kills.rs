//! Servers that are killed while their disk stands still, each with a successor at once: it waits, or nothing of the old one
//! lands behind its back.

use crate::aging::{BLOCK, content};
use crate::killed::wait_for_writes_to;
use crate::nbd_client::{Client, command};
use crate::patience::Patience;
use crate::program::zebu;
use crate::qemu::Qemu;
use crate::random::Random;
use crate::scratch::Scratch;
use crate::server::Server;
use crate::stalling_disk::{Kind, StallingDisk};
use rustix::process::Signal;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Bytes of the disk.
const SIZE: u64 = 16 << 20;
/// Bytes of a device that has an image with metadata.
const DEVICE: usize = 32 << 20;
/// Guests of the server that is killed.
const GUESTS: usize = 4;
/// Requests of guests after which a stall that meets nothing is given up.
const LONG: usize = 600;
/// Writes of the successor.
const LATER: usize = 48;
/// The refusal of an image that a living process writes; a killed one lives as long as a thread of it is with the disk.
const IN_USE: &str = "Is another process using the image";

/// The place of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A block device.
    Device,
    /// A file.
    File,
}

/// One kill.
#[derive(Debug, Clone)]
pub struct Kill {
    /// The format of the image.
    pub format: &'static str,
    /// The place of the image.
    pub place: Place,
    /// The options of the servers beside it.
    pub options: &'static str,
    /// The operations that stand still: the next one of a kind, or all.
    pub kind: Option<Kind>,
    /// Requests of the guests before that.
    pub before: usize,
    /// The time from the kill to the end of the stall.
    pub time: Duration,
    /// Seed of the guests.
    pub seed: u64,
}

/// The way of a successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Succession {
    /// It served after the stall.
    Waited,
    /// It served beside the stall, which kept nothing of the dead server's that could land.
    Early,
    /// No operation of the disk was held when the server was killed.
    NothingHeld,
}

impl fmt::Display for Kill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, place, options, kind, before, time, seed } = self;
        let kind = kind.map_or("all".to_owned(), |kind| format!("{kind:?}"));
        write!(f, "seed {seed}: {format} on a {place:?}, {options}, {kind} held after {before} requests")?;
        write!(f, " until {:.2} s after the kill", time.as_secs_f64())
    }
}

/// The writes that each block may show: the last one that was flushed, and all after it. 0 stands for zeroes.
type Blocks = Vec<Vec<u32>>;

impl Kill {
    /// One beside a stall of up to `longest`, chosen by a seed.
    pub fn chosen_by(seed: u64, longest: Duration) -> Self {
        let mut random = Random::new(seed ^ 0x6b69_6c6c);
        let place = *random.pick(&[Place::Device, Place::Device, Place::File]);
        let kinds: &[Option<Kind>] = match place {
            Place::Device => {
                &[Some(Kind::Write), Some(Kind::Write), Some(Kind::Sync), Some(Kind::Read), None]
            }
            Place::File => &[Some(Kind::Write), Some(Kind::Sync), Some(Kind::Read), Some(Kind::Punch), None],
        };
        Self {
            format: *random.pick(&["qcow2", "qcow2", "qcow2", "raw"]),
            place,
            options: *random.pick(&[
                "-t none",
                "-t none --queues 2",
                "-t none --aio threads",
                "-t writeback",
                "-t writeback --aio threads",
            ]),
            kind: *random.pick(kinds),
            before: random.between(1, 200) as usize,
            time: longest.mul_f64((1 + random.below(100)) as f64 / 100.0),
            seed,
        }
    }

    /// Runs it; nothing where a file system of its own is not allowed.
    ///
    /// # Errors
    /// What failed or was lost.
    ///
    /// # Panics
    /// If a server or a command does not start.
    pub fn run(&self, qemu: &Qemu) -> Result<Option<Succession>, String> {
        let bytes = if self.format == "raw" { SIZE as usize } else { DEVICE };
        let disk = match self.place {
            Place::Device => StallingDisk::new(bytes),
            Place::File => StallingDisk::file_alone(),
        };
        let Some(disk) = disk else { return Ok(None) };
        let image = match self.place {
            Place::Device => PathBuf::from(disk.name()),
            Place::File => disk.file(),
        };
        let name = image.to_str().expect("scratch has plain names");
        if self.format == "qcow2" || self.place == Place::File {
            zebu(disk.dir(), ["create", "-q", "-f", self.format, name, &SIZE.to_string()]).ok();
        }
        let mut blocks: Blocks = vec![vec![0]; (SIZE / BLOCK) as usize];
        let scratch = Scratch::new("stalled-kill");
        let (next, how) = self.kill_and_succeed(&disk, &scratch, name, &mut blocks)?;
        let expected = self.go_on(next, &image, &blocks)?;
        if self.format == "qcow2" {
            // Clusters that a kill has leaked may stay so.
            let out = qemu.img(scratch.path(), ["check", "-q", "-f", "qcow2", name]);
            if !matches!(out.code, Some(0 | 3)) {
                return Err(out.to_string());
            }
        }
        let raw = scratch.file("expected");
        crate::aging::write_blocks(&raw, &expected).map_err(|e| e.to_string())?;
        let out = qemu.img(scratch.path(), ["compare", "-f", "raw", "-F", self.format, "expected", name]);
        if out.code == Some(0) { Ok(Some(how)) } else { Err(out.to_string()) }
    }

    fn line(&self, image: &str) -> String {
        format!("{} -f {} {image}", self.options, self.format)
    }

    /// Kills the first server beside a stall, and starts the next one at once.
    fn kill_and_succeed(
        &self,
        disk: &StallingDisk,
        scratch: &Scratch,
        image: &str,
        blocks: &mut [Vec<u32>],
    ) -> Result<(Server, Succession), String> {
        let server = Server::start(disk.dir(), &self.line(image));
        let (done, failed) = (AtomicUsize::new(0), Mutex::new(None));
        let part = blocks.len() / GUESTS;
        let outcome = std::thread::scope(|scope| {
            for (number, blocks) in blocks.chunks_mut(part).enumerate() {
                let client = Client::open(server.socket(), "").expect("it serves");
                let random = Random::new(self.seed ^ (number as u64) << 56);
                let mut guest =
                    Guest { client, random, first: (number * part) as u64, blocks, writes: 0, done: &done };
                let failed = &failed;
                scope.spawn(move || {
                    if let Err(what) = guest.go_on_until_killed() {
                        *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
                    }
                });
            }
            let patience = Patience::begin();
            while done.load(Relaxed) < self.before {
                patience.pause("the guests are at work");
            }
            disk.hold(self.kind);
            let until = done.load(Relaxed) + LONG;
            while disk.held() == 0 && done.load(Relaxed) < until {
                patience.pause("an operation is held");
            }
            let was_held = disk.held() > 0;
            server.signal(Signal::KILL);
            let next = scope.spawn(|| {
                let next = self.successor(scratch.path(), image)?;
                let left = disk.held_of(Kind::Write) + disk.held_of(Kind::Punch);
                Ok::<_, String>((next, disk.held() > 0, left))
            });
            std::thread::sleep(self.time);
            disk.release();
            server.kill_amid_writes();
            next.join().map_err(|_| "the successor panicked".to_owned())?.map(|found| (found, was_held))
        });
        let ((next, is_early, left), was_held) = outcome?;
        if let Some(what) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(what);
        }
        if left > 0 && self.options.starts_with("-t none") {
            return Err(format!("the successor serves, and {left} operations of the dead server may land"));
        }
        let how = match (was_held, is_early) {
            (false, _) => Succession::NothingHeld,
            (true, true) => Succession::Early,
            (true, false) => Succession::Waited,
        };
        Ok((next, how))
    }

    /// The next server, with the patience that the killed one's threads ask for.
    fn successor(&self, dir: &Path, image: &str) -> Result<Server, String> {
        let patience = Patience::begin();
        loop {
            match Server::try_start(dir, &self.line(image)) {
                Ok(server) => return Ok(server),
                Err(said) if said.contains(IN_USE) => patience.pause(&said),
                Err(said) => return Err(said),
            }
        }
    }

    /// Judges what the next server finds, writes to the places where the old one was writing, and ends it. What the disk must show.
    fn go_on(&self, server: Server, image: &Path, blocks: &[Vec<u32>]) -> Result<Vec<u32>, String> {
        let mut random = Random::new(!self.seed);
        let mut client = Client::open(server.socket(), "").map_err(|e| e.to_string())?;
        let mut shown = read_all(&mut client, blocks)?;
        let unsettled: Vec<usize> = (0..blocks.len()).filter(|block| blocks[*block].len() > 1).collect();
        let number = shown.iter().copied().max().unwrap_or(0) + 1_000_000;
        for write in (0..).take(LATER).map(|later| number + later) {
            let block = if unsettled.is_empty() || random.chance(30) {
                random.below(blocks.len() as u64) as usize
            } else {
                *random.pick(&unsettled)
            };
            let range = block..(block + random.between(1, 4) as usize).min(blocks.len());
            let bytes = content(range.start as u64..range.end as u64, write);
            answered("write", client.write(0, range.start as u64 * BLOCK, &bytes))?;
            shown[range].fill(write);
        }
        answered("flush", client.call(0, command::FLUSH, 0, 0).map(|reply| reply.error))?;
        let settled: Blocks = shown.iter().map(|write| vec![*write]).collect();
        read_all(&mut client, &settled)?;
        drop(client);
        if random.chance(50) {
            server.stop_with_messages();
        } else {
            server.kill_amid_writes();
            wait_for_writes_to(image);
        }
        Ok(shown)
    }
}

/// Reads the disk. Fails unless each block shows one of its writes; tells which.
fn read_all(client: &mut Client, blocks: &[Vec<u32>]) -> Result<Vec<u32>, String> {
    let mut shown = Vec::with_capacity(blocks.len());
    for (first, part) in (0..).step_by(256).zip(blocks.chunks(256)) {
        let bytes =
            client.read(first * BLOCK, part.len() as u64 * BLOCK).map_err(|e| format!("read: {e}"))?;
        for ((block, writes), found) in (first..).zip(part).zip(bytes.chunks(BLOCK as usize)) {
            let is_shown = |write: &&u32| match **write {
                0 => found.iter().all(|byte| *byte == 0),
                write => found == content(block..block + 1, write),
            };
            let write = writes.iter().find(is_shown);
            shown.push(*write.ok_or_else(|| format!("block {block} shows none of the writes {writes:?}"))?);
        }
    }
    Ok(shown)
}

/// A guest of the server that is killed, and its part of the disk.
struct Guest<'a> {
    client: Client,
    random: Random,
    /// The first block of its part.
    first: u64,
    blocks: &'a mut [Vec<u32>],
    writes: u32,
    done: &'a AtomicUsize,
}

impl Guest<'_> {
    /// Goes on until the server is gone. Fails if a request does.
    fn go_on_until_killed(&mut self) -> Result<(), String> {
        loop {
            let number = self.random.below(100);
            let answer = match number {
                0..60 => {
                    self.writes += 1;
                    let range = self.range(16);
                    self.note(&range, self.writes);
                    let on_disk = self.first + range.start as u64..self.first + range.end as u64;
                    self.client.write(0, on_disk.start * BLOCK, &content(on_disk, self.writes))
                }
                60..70 => {
                    let range = self.range(64);
                    self.note(&range, 0);
                    self.ask(command::WRITE_ZEROES, &range)
                }
                70..85 => self.client.call(0, command::FLUSH, 0, 0).map(|reply| reply.error),
                _ => {
                    let range = self.range(64);
                    self.ask(command::READ, &range)
                }
            };
            match answer {
                Ok(0) => {}
                Ok(error) => return Err(format!("a request is answered with error {error}")),
                Err(_) => return Ok(()),
            }
            if (70..85).contains(&number) {
                for writes in &mut *self.blocks {
                    writes.drain(..writes.len() - 1);
                }
            }
            self.done.fetch_add(1, Relaxed);
        }
    }

    /// Up to so many blocks of the part.
    fn range(&mut self, most: u64) -> Range<usize> {
        let len = self.random.between(1, most);
        let start = self.random.below(self.blocks.len() as u64 - len);
        start as usize..(start + len) as usize
    }

    fn note(&mut self, range: &Range<usize>, write: u32) {
        self.blocks[range.clone()].iter_mut().for_each(|writes| writes.push(write));
    }

    fn ask(&mut self, command: u16, range: &Range<usize>) -> std::io::Result<u32> {
        let (offset, len) = ((self.first + range.start as u64) * BLOCK, range.len() as u64 * BLOCK);
        self.client.call(0, command, offset, len).map(|reply| reply.error)
    }
}

fn answered(what: &str, answer: std::io::Result<u32>) -> Result<(), String> {
    match answer {
        Ok(0) => Ok(()),
        Ok(error) => Err(format!("{what}: error {error}")),
        Err(error) => Err(format!("{what}: {error}")),
    }
}
