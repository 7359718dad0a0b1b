//! An image that is opened with a mapping cache of a given size, by zebu or QEMU, for a benchmark or to be served.

use super::fio::{Ask, Found, fio};
use super::lab::Lab;
use super::load::{Load, Program, SMALL};
use super::servers::{Door, Running, Server};
use crate::Outcome;
use crate::ab::{Metric, Sample, Side};
use std::path::Path;
use std::process::Command;

/// How long one load lasts: more rounds tell more than longer loads.
const SECONDS: u32 = 1;

/// How an image is opened, and by whom.
#[derive(Debug, Clone)]
pub(super) struct Opened<'a> {
    pub(super) program: Program,
    pub(super) label: &'static str,
    format: &'static str,
    file: &'a Path,
    budget: Option<u64>,
    slice: u64,
    /// More image options, which zebu alone knows.
    options: &'static str,
    /// Its file can't be written to.
    read_only: bool,
    /// More arguments of `bench`.
    more: &'static [&'static str],
}

impl<'a> Opened<'a> {
    pub(super) fn zebu(label: &'static str, file: &'a Path, budget: u64) -> Self {
        Self {
            program: Program::Zebu,
            label,
            format: "qcow2",
            file,
            budget: Some(budget),
            slice: SMALL,
            options: "",
            read_only: false,
            more: &[],
        }
    }
    pub(super) fn qemu(file: &'a Path, budget: u64) -> Self {
        Self { program: Program::Qemu, label: "QEMU, slices", ..Self::zebu("", file, budget) }
    }
    pub(super) fn raw(file: &'a Path) -> Self {
        Self { format: "raw", budget: None, ..Self::zebu("raw", file, 0) }
    }
    /// Slices alone, without the extents in front of them.
    pub(super) fn without_index(self) -> Self {
        Self { options: ",extent-index=off", ..self }
    }
    /// For a file that can't be written to.
    pub(super) fn for_reading(self) -> Self {
        Self { read_only: true, ..self }
    }
    pub(super) fn with_slices_of(self, slice: u64) -> Self {
        Self { slice, ..self }
    }
    /// Under another name in tables.
    pub(super) fn labelled(self, label: &'static str) -> Self {
        Self { label, ..self }
    }
    pub(super) fn with(self, more: &'static [&'static str]) -> Self {
        Self { more, ..self }
    }

    fn image_options(&self) -> String {
        let mut options = format!("driver={},file.filename={}", self.format, self.file.display());
        if let Some(bytes) = self.budget {
            options += &format!(",l2-cache-size={bytes},l2-cache-entry-size={}", self.slice);
        }
        options + self.options
    }

    /// A `bench` of it.
    pub(super) fn bench(&self, lab: &Lab, load: Load) -> Command {
        let mut command = self.program.command(lab);
        command.args(["bench", "-t", "none"]);
        // QEMU's own best under O_DIRECT.
        command.args(["-i", if self.program == Program::Qemu { "native" } else { "io_uring" }]);
        command.args(["-d", &load.depth.to_string(), "-c", &load.count.to_string()]);
        command.args(["-s", &load.block.to_string(), "-S", &load.step.to_string()]);
        if load.write {
            command.arg("-w");
        }
        command.args(self.more).arg("--image-opts").arg(self.image_options());
        command
    }

    pub(super) fn benched(self, lab: &'a Lab, load: Load) -> Side<'a> {
        let label = self.label.to_owned();
        Side { label, run: Box::new(move || load.timed(self.bench(lab, load))) }
    }

    /// A server of it for NBD.
    fn server(&self, lab: &Lab) -> Outcome<Running> {
        let door = Running::place(lab);
        let address = door.display();
        let (server, command) = match self.program {
            Program::Zebu => {
                let mut command = lab.zebu();
                command.args(["serve", "-t", "none", "-i", "io_uring", "--nbd", &format!("unix:{address}")]);
                if self.read_only {
                    command.arg("--read-only");
                }
                command.arg("--image-opts").arg(self.image_options());
                (Server::Zebu, command)
            }
            Program::Qemu => {
                let read_only = if self.read_only { "on" } else { "off" };
                let writable = if self.read_only { "off" } else { "on" };
                let mut command = Command::new("qemu-storage-daemon");
                let file = self.file.display();
                command.arg("--blockdev").arg(format!(
                    "driver=file,node-name=file,filename={file},aio=native,cache.direct=on,read-only={read_only}"
                ));
                let mut image =
                    format!("driver={},node-name=disk,file=file,read-only={read_only}", self.format);
                if let Some(bytes) = self.budget {
                    image += &format!(",l2-cache-size={bytes},l2-cache-entry-size={}", self.slice);
                }
                command.arg("--blockdev").arg(image);
                command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={address}"));
                command
                    .arg("--export")
                    .arg(format!("type=nbd,name=,id=export,node-name=disk,writable={writable}"));
                (Server::Qemu, command)
            }
        };
        Running::of(server, command, Door::Nbd, door)
    }

    /// Serves it to fio.
    fn serve(&self, lab: &Lab, ask: Ask, size: u64) -> Outcome<(Found, f64)> {
        let running = self.server(lab)?;
        let uri = format!("--uri=nbd+unix:///?socket={}", running.path().display());
        let before = running.cpu()?;
        let found = fio(ask, size, SECONDS, &["--ioengine=nbd", &uri])?;
        let cpu = running.cpu()?.saturating_sub(before).as_secs_f64();
        Ok((found, cpu * 1e6 / found.requests.max(1.0)))
    }

    /// Requests all over `size` bytes.
    pub(super) fn served(self, lab: &'a Lab, ask: Ask, size: u64) -> Side<'a> {
        let label = self.label.to_owned();
        let run = move || -> Outcome<Sample> {
            let (found, cpu) = self.serve(lab, ask, size)?;
            Ok(vec![
                (Metric::RequestsPerSecond, found.iops),
                (Metric::LatencyP99Micros, found.p99_nanoseconds / 1000.0),
                (Metric::CpuMicrosPerRequest, cpu),
            ])
        };
        Side { label, run: Box::new(run) }
    }

    /// What many requests in flight gain.
    pub(super) fn scaled(self, lab: &'a Lab, ask: Ask, size: u64) -> Side<'a> {
        let label = self.label.to_owned();
        let run = move || -> Outcome<Sample> {
            let (one, _) = self.serve(lab, Ask { depth: 1, ..ask }, size)?;
            let (many, _) = self.serve(lab, ask, size)?;
            Ok(vec![(Metric::DepthScaling, many.iops / one.iops.max(f64::MIN_POSITIVE))])
        };
        Side { label, run: Box::new(run) }
    }
}
