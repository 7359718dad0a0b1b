//! Images as block devices of this machine (`--ublk`, `--nbd-device`).

use crate::failure::Failure;
use crate::output::stdout;
use crate::serve::device_number::DeviceNumber;
use crate::serve::serve_args::ServeArgs;
use crate::session::Session;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::configure_io_flusher_behavior;
use std::path::Path;
use zebu_engine::storage::WorkerKind;
use zebu_export::kernel_nbd::{NbdDevice, NbdDeviceConfig};
use zebu_export::nbd::NbdServer;
use zebu_export::ublk::{UblkConfig, UblkDevice};
use zebu_export::{Exports, Level, Log, MemoryBudget, WhenStopped, WorkerPool};

/// Has this process go on when memory is short, perhaps because what was written to its own devices waits for it. To be called
/// before there are other threads. What can't be had is told.
pub(crate) fn prepare_process(log: &Log) {
    let tell = |what: &str, error: rustix::io::Errno| {
        let risk = "a device that is used on this machine may hang when memory is short";
        log.write(Level::Warning, format_args!("{what}: {error}: {risk}"));
    };
    // Looking for memory does not wait for writing to devices then.
    if let Err(error) = configure_io_flusher_behavior(true) {
        tell("could not become an I/O flusher (CAP_SYS_RESOURCE)", error);
    }
    // What was touched once stays in memory, the program's own code included.
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = mlockall(all) {
        tell("could not lock memory (RLIMIT_MEMLOCK)", error);
    }
}

/// Whether devices are new, or those of a server that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    New,
    TakenOver,
}

/// The devices of a server.
pub(crate) struct KernelDevices {
    ublk: Vec<UblkDevice>,
    nbd: Vec<NbdDevice>,
    origin: Origin,
}

impl KernelDevices {
    /// Makes those of ublk, or takes them over, and has the workers of `pool` serve them. Prepares those of NBD.
    pub(crate) fn start(
        args: &ServeArgs,
        log: &Log,
        session: &Session,
        pool: &WorkerPool,
        exports: &Exports,
        memory: &MemoryBudget,
    ) -> Result<Self, Failure> {
        if !args.ublk.is_empty() && session.worker().kind() != WorkerKind::IoUring {
            let why = session.worker().fallback_reason().unwrap_or_else(|| "--aio threads".to_owned());
            return Err(Failure::new(format!(
                "a block device (--ublk) needs io_uring, which is not used: {why}"
            )));
        }
        if args.recover && args.ublk.is_empty() && args.nbd_device.is_empty() {
            return Err(Failure::usage("--recover takes over devices: name them (--ublk=ID, --nbd-device)"));
        }
        let origin = if args.recover { Origin::TakenOver } else { Origin::New };
        let mut devices = Self { ublk: Vec::new(), nbd: Vec::new(), origin };
        for (number, export) in args.ublk.iter().zip(exports.iter()) {
            let config =
                UblkConfig::default().queues(args.queues as u16).memory(memory.clone()).log(log.clone());
            devices.ublk.push(match (number, origin) {
                (DeviceNumber::This(id), Origin::TakenOver) => UblkDevice::recover(&export, *id, config)?,
                (DeviceNumber::This(id), Origin::New) => UblkDevice::add(&export, Some(*id), config)?,
                (DeviceNumber::Any, Origin::New) => UblkDevice::add(&export, None, config)?,
                (DeviceNumber::Any, Origin::TakenOver) => {
                    return Err(Failure::usage(
                        "--recover needs the number of each device (--ublk=ID): zebu devices lists them",
                    ));
                }
            });
        }
        for (index, export) in args.nbd_device.iter().zip(exports.iter()) {
            let config = NbdDeviceConfig::default().connections(args.queues as usize).log(log.clone());
            devices.nbd.push(NbdDevice::new(&export, *index, config)?);
        }
        for device in &mut devices.ublk {
            device.start(pool)?;
        }
        Ok(devices)
    }

    /// Connects those of NBD to `server`.
    pub(crate) fn connect(&mut self, server: &NbdServer) -> Result<(), Failure> {
        for device in &mut self.nbd {
            match self.origin {
                Origin::New => device.connect(server)?,
                Origin::TakenOver => device.recover(server)?,
            }
        }
        Ok(())
    }

    /// Their files.
    pub(crate) fn paths(&self) -> Vec<&Path> {
        self.ublk.iter().map(UblkDevice::path).chain(self.nbd.iter().map(NbdDevice::path)).collect()
    }

    /// Prints the file of each of ublk, a line for each; those of NBD were named.
    pub(crate) fn announce(&self) -> Result<(), Failure> {
        let lines = self.ublk.iter().map(|device| format!("{}\n", device.path().display()));
        lines.into_iter().try_for_each(|line| stdout::print(&line))
    }

    /// Stops them. Those in use stay for the next server, which is told.
    pub(crate) fn stop(self, log: &Log) {
        let tell = |path: &str, option: &str| {
            let what = "is in use and stays: its requests wait for";
            log.write(Level::Warning, format_args!("{path} {what} 'zebu serve {option} --recover'"));
        };
        for device in self.ublk {
            let (id, path) = (device.id(), device.path().display().to_string());
            if device.stop() == WhenStopped::Stays {
                tell(&path, &format!("--ublk={id}"));
            }
        }
        for device in self.nbd {
            let path = device.path().display().to_string();
            if device.stop() == WhenStopped::Stays {
                tell(&path, &format!("--nbd-device {path}"));
            }
        }
    }
}
