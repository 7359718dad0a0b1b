//! A load that `zebu bench` and `qemu-img bench` both know, and its figures.

use super::lab::Lab;
use crate::Outcome;
use crate::ab::{Metric, Sample, Side};
use crate::process::{measure_ok, shown};
use std::path::Path;
use std::process::Command;

pub(super) const SMALL: u64 = 4096;
pub(super) const LARGE: u64 = 1 << 20;

/// The largest step that `qemu-img bench` takes.
const MAX_STEP: u64 = i32::MAX as u64;

/// Who serves a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Program {
    Zebu,
    Qemu,
}

impl Program {
    pub(super) fn label(self) -> &'static str {
        match self {
            Program::Zebu => "zebu",
            Program::Qemu => "QEMU",
        }
    }

    pub(super) fn command(self, lab: &Lab) -> Command {
        match self {
            Program::Zebu => lab.zebu(),
            Program::Qemu => lab.qemu_img(),
        }
    }
}

/// What one benchmark asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Bytes of a request.
    pub(super) block: u64,
    /// Distance between the offsets of two requests, in bytes.
    pub(super) step: u64,
    pub(super) count: u64,
    pub(super) depth: u64,
    pub(super) write: bool,
}

/// A step that scatters requests over units of `unit` bytes of a disk, each once before any comes again: an odd number
/// of units near the golden section of the disk (or of the largest step that `qemu-img bench` takes, which has no random
/// mode). The number of units should be a power of two.
pub(super) fn scattering_step(disk: u64, unit: u64) -> u64 {
    let units = disk.min(MAX_STEP) / unit;
    ((units as f64 * 0.381_966) as u64 | 1) * unit
}

impl Load {
    /// The options that both share; the cache covers the whole disk by default in both.
    pub(super) fn command(&self, program: &Path, image: &Path) -> Command {
        self.command_of_format(program, image, "qcow2")
    }

    pub(super) fn command_of_format(&self, program: &Path, image: &Path, format: &str) -> Command {
        let mut command = Command::new(program);
        command.args(["bench", "-f", format, "-t", "none", "-i", "io_uring"]);
        command.args(["-d", &self.depth.to_string(), "-c", &self.count.to_string()]);
        command.args(["-s", &self.block.to_string(), "-S", &self.step.to_string()]);
        if self.write {
            command.arg("-w");
        }
        command.arg(image);
        command
    }

    /// Runs the load on an image that is there.
    pub(super) fn on<'a>(self, lab: &'a Lab, program: Program, image: &'a Path) -> Side<'a> {
        let run = move || self.timed(self.command(program.command(lab).get_program().as_ref(), image));
        Side { label: program.label().into(), run: Box::new(run) }
    }

    /// Runs a benchmark that says `Run completed in N seconds.`: the time of the requests, without opening the image.
    pub(super) fn timed(&self, mut command: Command) -> Outcome<Sample> {
        let usage = measure_ok(&mut command)?;
        let seconds: f64 = usage
            .stdout
            .split("Run completed in ")
            .nth(1)
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|n| n.parse().ok())
            .ok_or_else(|| format!("{}: no time in its output", shown(&command)))?;
        Ok(self.figures(seconds, usage.cpu.as_secs_f64(), usage.max_rss))
    }

    pub(super) fn figures(&self, seconds: f64, cpu: f64, max_rss: u64) -> Sample {
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
