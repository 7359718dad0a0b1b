//! The programs that are measured, and the load that all of them know from `qemu-img bench`.

use crate::Outcome;
use crate::lab::Lab;
use crate::metric::{Metric, Sample};
use crate::process::{measure_ok, shown};
use crate::run::Side;
use std::path::Path;
use std::process::Command;

pub(crate) const SMALL: u64 = 4096;
pub(crate) const LARGE: u64 = 1 << 20;
pub(crate) const CLUSTER: u64 = 64 << 10;

/// QEMU's fastest way to convert: 16 coroutines, writes in any order.
pub(crate) const FASTEST: [&str; 3] = ["-m", "16", "-W"];

/// A program that serves a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Program {
    Zebu,
    Qemu,
    Imago,
    Qcow2Rs,
}

pub(crate) const BOTH: [Program; 2] = [Program::Zebu, Program::Qemu];
pub(crate) const ALL: [Program; 4] = [Program::Zebu, Program::Qemu, Program::Imago, Program::Qcow2Rs];
pub(crate) const RUST: [Program; 3] = [Program::Zebu, Program::Imago, Program::Qcow2Rs];

impl Program {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Program::Zebu => "zebu",
            Program::Qemu => "QEMU",
            Program::Imago => "imago",
            Program::Qcow2Rs => "qcow2-rs",
        }
    }

    /// The command with the habits of `qemu-img`: that of QEMU for the engines that have none.
    pub(crate) fn img(self, lab: &Lab) -> Command {
        if self == Program::Zebu { lab.zebu() } else { lab.qemu_img() }
    }
}

/// One load: offsets in regular steps that begin again at the end of the disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    /// Bytes of a request.
    pub(crate) block: u64,
    /// Bytes between the offsets of two requests.
    pub(crate) step: u64,
    pub(crate) count: u64,
    pub(crate) depth: u64,
    pub(crate) write: bool,
}

/// The largest step that `qemu-img bench` takes.
const MAX_STEP: u64 = i32::MAX as u64;

/// A step that scatters requests over units of `unit` bytes of a disk, each once before any comes again: an odd number
/// of units near the golden section of the disk (or of the largest step that `qemu-img bench` takes, which has no random
/// mode). The number of units should be a power of two.
pub(crate) fn scattering_step(disk: u64, unit: u64) -> u64 {
    let units = disk.min(MAX_STEP) / unit;
    ((units as f64 * 0.381_966) as u64 | 1) * unit
}

impl Load {
    /// 4 KiB into each of many clusters, scattered.
    pub(crate) fn first_writes(disk: u64, cluster: u64, count: u64) -> Self {
        let step = scattering_step(disk, cluster);
        Self { block: SMALL, step, count: count.min(disk / cluster), depth: 32, write: true }
    }

    /// 1 MiB each, one after the other.
    pub(crate) fn in_order(bytes: u64, write: bool) -> Self {
        Self { block: LARGE, step: LARGE, count: bytes / LARGE, depth: 8, write }
    }

    pub(crate) fn options(&self, command: &mut Command) {
        command.args(["-d", &self.depth.to_string(), "-c", &self.count.to_string()]);
        command.args(["-s", &self.block.to_string(), "-S", &self.step.to_string()]);
        if self.write {
            command.arg("-w");
        }
    }

    /// `bench` with O_DIRECT, without its last argument.
    pub(crate) fn bench(&self, program: Program, lab: &Lab, engine: &str) -> Command {
        let mut command = program.img(lab);
        command.args(["bench", "-t", "none", "-i", engine]);
        self.options(&mut command);
        command
    }

    /// The load on an image; the cache of both covers the whole disk by default.
    pub(crate) fn command(
        &self,
        program: Program,
        lab: &Lab,
        image: &Path,
        format: &str,
    ) -> Outcome<Command> {
        let mut command = match program {
            Program::Zebu | Program::Qemu => self.bench(program, lab, "io_uring"),
            Program::Imago | Program::Qcow2Rs => {
                let mut command = Command::new(lab.peers.program()?);
                self.options(command.arg(program.name()));
                command
            }
        };
        if BOTH.contains(&program) {
            command.args(["-f", format]);
        }
        command.arg(image);
        Ok(command)
    }

    pub(crate) fn run(&self, program: Program, lab: &Lab, image: &Path) -> Outcome<Sample> {
        self.timed(&mut self.command(program, lab, image, "qcow2")?)
    }

    /// The load on an image that is there, by each of the programs.
    pub(crate) fn by<'a>(
        self,
        programs: &'a [Program],
        lab: &'a Lab,
        image: &'a Path,
    ) -> impl Iterator<Item = Side<'a>> {
        let side = move |program: &Program| {
            let program = *program;
            Side::new(program.name(), move || self.run(program, lab, image))
        };
        programs.iter().map(side)
    }

    /// Runs a benchmark that says `Run completed in N seconds.`: the time of the requests, without opening the image.
    pub(crate) fn timed(&self, command: &mut Command) -> Outcome<Sample> {
        self.timed_with_waits(command).map(|(sample, _)| sample)
    }

    /// As [`Load::timed`], and how often threads of the program waited.
    pub(crate) fn timed_with_waits(&self, command: &mut Command) -> Outcome<(Sample, u64)> {
        let usage = measure_ok(command)?;
        let rest = usage.stdout.split("Run completed in ").nth(1);
        let seconds = rest.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        let seconds: f64 = seconds.ok_or_else(|| format!("{}: no time in its output", shown(command)))?;
        Ok((self.figures(seconds, usage.cpu.as_secs_f64(), usage.max_rss), usage.waits))
    }

    pub(crate) fn figures(&self, seconds: f64, cpu: f64, max_rss: u64) -> Sample {
        let count = self.count as f64;
        let rate = if self.block >= LARGE {
            (Metric::MibPerSecond, count * self.block as f64 / 1048576.0 / seconds)
        } else {
            (Metric::RequestsPerSecond, count / seconds)
        };
        let cpu = (Metric::CpuMicrosPerRequest, cpu * 1e6 / count);
        vec![rate, cpu, (Metric::MaxRssMib, max_rss as f64 / 1048576.0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scattering_step_meets_every_unit_once() {
        for (disk, unit) in [(4 << 30, 4096), (1 << 30, 65536), (16 << 30, 65536)] {
            let step = scattering_step(disk, unit);
            assert!(step <= MAX_STEP && step.is_multiple_of(unit));
            let units = disk / unit;
            let mut seen = vec![false; units as usize];
            for i in 0..units {
                let at = (i * (step / unit) % units) as usize;
                assert!(!std::mem::replace(&mut seen[at], true));
            }
        }
    }
}
