//! Servers whose disk stands still for a while: no request fails, no image is damaged, and what was written is there.

use crate::aging::BLOCK;
use crate::guests::{self, Trims};
use crate::patience::wait_until;
use crate::program::{Finished, zebu};
use crate::qemu::Qemu;
use crate::random::Random;
use crate::scratch::Scratch;
use crate::server::Server;
use crate::stalling_disk::{Kind, StallingDisk};
use std::fmt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const SIZE: u64 = 64 << 20;

/// One stall, and what happens beside it.
#[derive(Debug, Clone)]
pub struct Stall {
    /// The format of the image.
    pub format: &'static str,
    /// The options of the server beside it.
    pub options: &'static str,
    /// The operations that stand still: the next one of a kind, or all.
    pub kind: Option<Kind>,
    /// For how long.
    pub time: Duration,
    /// Requests of the guests before that.
    pub before: usize,
    /// The command that is given meanwhile: words of `zebu ctl`.
    pub beside: &'static str,
    /// Seed of the guests.
    pub seed: u64,
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, options, kind, time, before, beside, seed } = self;
        let kind = kind.map_or("all".to_owned(), |kind| format!("{kind:?}"));
        write!(f, "seed {seed}: {format} {options}, {kind} for {:.1} s after {before}", time.as_secs_f64())?;
        write!(f, " requests, beside '{beside}'")
    }
}

impl Stall {
    /// One of up to `longest`, chosen by a seed.
    pub fn chosen_by(seed: u64, longest: Duration) -> Self {
        let mut random = Random::new(seed);
        let format = *random.pick(&["qcow2", "qcow2", "qcow2", "raw"]);
        let kinds = [Kind::Read, Kind::Write, Kind::Sync, Kind::Punch].map(Some);
        let beside: &[&str] = match format {
            "qcow2" => &["snapshot-create  one", "resize  +1M", "backup-start -w  COPY", "flush "],
            _ => &["resize  +1M", "backup-start -w  COPY", "flush "],
        };
        Self {
            format,
            options: *random.pick(&[
                "-t none",
                "-t writeback",
                "-t none --aio threads",
                "-t writeback --aio threads",
            ]),
            kind: *random.pick(&[kinds[0], kinds[1], kinds[2], kinds[3], None]),
            time: longest.mul_f64((1 + random.below(100)) as f64 / 100.0),
            before: random.between(1, 400) as usize,
            beside: *random.pick(beside),
            seed,
        }
    }

    /// Runs it; nothing where a file system of its own is not allowed.
    ///
    /// # Errors
    /// What failed or was lost.
    ///
    /// # Panics
    /// If the server or a command does not start.
    pub fn run(&self, qemu: &Qemu) -> Result<(), String> {
        let Some(disk) = StallingDisk::file_alone() else { return Ok(()) };
        let scratch = Scratch::new("stall");
        let (dir, image) = (scratch.path(), disk.file());
        let name = image.to_str().expect("scratch has plain names");
        zebu(dir, ["create", "-q", "-f", self.format, name, &SIZE.to_string()]).ok();
        let server =
            Server::start(dir, &format!("--control ctl.sock {} -f {} {name}", self.options, self.format));
        let mut blocks = vec![0u32; (SIZE / BLOCK) as usize];
        let trims = if self.format == "qcow2" { Trims::ReadAsZero } else { Trims::Nothing };
        guests::beside(&server, &mut blocks, self.seed, trims, |times, stop| {
            let done = || -> usize {
                times.iter().map(|times| times.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
            };
            wait_until("the guests are at work", || done() >= self.before || stop.load(Relaxed));
            disk.hold(self.kind);
            std::thread::scope(|scope| {
                let command = scope.spawn(|| self.command(&scratch));
                std::thread::sleep(self.time);
                disk.release();
                let out = command.join().map_err(|_| "the command panicked".to_owned())?;
                if out.code == Some(0) { Ok(()) } else { Err(out.to_string()) }
            })?;
            let until = done() + 200;
            wait_until("the guests go on", || done() >= until || stop.load(Relaxed));
            Ok(())
        })?;
        server.stop();
        if self.format == "qcow2" {
            qemu.check_clean(dir, name)?;
        }
        self.compare(qemu, &scratch, name, &blocks)
    }

    fn command(&self, scratch: &Scratch) -> Finished {
        let words = self.beside.split(' ').map(|word| match word {
            "COPY" => "copy.qcow2",
            word => word,
        });
        zebu(scratch.path(), ["ctl", "ctl.sock"].into_iter().chain(words))
    }

    /// Compares the disk with what was written.
    fn compare(&self, qemu: &Qemu, scratch: &Scratch, name: &str, blocks: &[u32]) -> Result<(), String> {
        crate::aging::write_blocks(&scratch.file("expected"), blocks).map_err(|e| e.to_string())?;
        let out = qemu.img(scratch.path(), ["compare", "-f", "raw", "-F", self.format, "expected", name]);
        if out.code == Some(0) { Ok(()) } else { Err(out.to_string()) }
    }
}
