//! Images as block devices of this machine (`--ublk`).

use crate::failure::Failure;
use crate::output::stdout;
use crate::serve::serve_args::ServeArgs;
use crate::session::Session;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::configure_io_flusher_behavior;
use std::path::Path;
use std::str::FromStr;
use zebu::storage::WorkerKind;
use zebu_export::ublk::{UblkConfig, UblkDevice, WhenStopped};
use zebu_export::{Exports, Level, Log, MemoryBudget, WorkerPool};

/// The number of a device, as `--ublk` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceNumber {
    /// One that is free.
    Any,
    This(u32),
}

impl FromStr for DeviceNumber {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "any" => Ok(Self::Any),
            number => number
                .parse()
                .map(Self::This)
                .map_err(|_| "a device has a number, as in --ublk=0 for /dev/ublkb0".to_owned()),
        }
    }
}

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

/// The devices of a server.
pub(crate) struct KernelDevices(Vec<UblkDevice>);

impl KernelDevices {
    /// Makes them, or takes them over, and has the workers of `pool` serve them.
    pub(crate) fn start(
        args: &ServeArgs,
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
        let mut devices = Self(Vec::new());
        for (number, export) in args.ublk.iter().zip(exports.iter()) {
            let config =
                UblkConfig::default().queues(args.queues as u16).memory(memory.clone()).log(args.log());
            devices.0.push(match (number, args.recover) {
                (DeviceNumber::This(id), true) => UblkDevice::recover(export, *id, config)?,
                (DeviceNumber::This(id), false) => UblkDevice::add(export, Some(*id), config)?,
                (DeviceNumber::Any, false) => UblkDevice::add(export, None, config)?,
                (DeviceNumber::Any, true) => {
                    return Err(Failure::usage(
                        "--recover needs the number of each device (--ublk=ID): zebu devices lists them",
                    ));
                }
            });
        }
        for device in &mut devices.0 {
            device.start(pool)?;
        }
        Ok(devices)
    }

    /// Their files.
    pub(crate) fn paths(&self) -> Vec<&Path> {
        self.0.iter().map(UblkDevice::path).collect()
    }

    /// Prints the file of each, a line for each.
    pub(crate) fn announce(&self) -> Result<(), Failure> {
        self.paths().iter().try_for_each(|path| stdout::print(&format!("{}\n", path.display())))
    }

    /// Stops them. Those in use stay for the next server, which is told.
    pub(crate) fn stop(self, log: &Log) {
        for device in self.0 {
            let (id, path) = (device.id(), device.path().display().to_string());
            if device.stop() == WhenStopped::Stays {
                let what = "is in use and stays: its requests wait for";
                log.write(Level::Warning, format_args!("{path} {what} 'zebu serve --ublk={id} --recover'"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_numbers() {
        assert_eq!("any".parse(), Ok(DeviceNumber::Any));
        assert_eq!("12".parse(), Ok(DeviceNumber::This(12)));
        for wrong in ["", "-1", "/dev/ublkb0", "4294967296"] {
            assert!(wrong.parse::<DeviceNumber>().is_err(), "{wrong}");
        }
    }
}
