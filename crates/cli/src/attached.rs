//! Devices of this machine that a server in the background has (`zebu attach`), and the notes on them.
//!
//! Each has a file of notes, a control socket and a log in [`NOTES`]. The control socket also says which process has it now: a
//! number in a file may be another's.

use crate::failure::{EXIT_FAILURE, Failure};
use crate::serve::serve_args::READY;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

/// The directory of the notes.
const NOTES: &str = "/run/zebu/devices";

/// A block device of this machine that zebu can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    /// `/dev/ublkbN`.
    Ublk(u32),
    /// `/dev/nbdN`.
    Nbd(u32),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = text.strip_prefix("/dev/").unwrap_or(text);
        let number = |digits: &str| digits.parse().ok();
        if let Some(id) = number(name).or_else(|| number(name.strip_prefix("ublkb")?)) {
            return Ok(Self::Ublk(id));
        }
        let index = name.strip_prefix("nbd").and_then(number);
        index.map(Self::Nbd).ok_or_else(|| "a device is /dev/ublkbN, its number, or /dev/nbdN".to_owned())
    }
}

impl Device {
    fn name(self) -> String {
        match self {
            Self::Ublk(id) => format!("ublkb{id}"),
            Self::Nbd(index) => format!("nbd{index}"),
        }
    }

    /// Its file.
    pub(crate) fn path(self) -> PathBuf {
        Path::new("/dev").join(self.name())
    }

    fn note(self, ending: &str) -> PathBuf {
        Path::new(NOTES).join(self.name() + ending)
    }

    fn control(self) -> PathBuf {
        self.note(".ctl")
    }

    /// The process that was started for it, if that is still there.
    pub(crate) fn server(self) -> Option<Pid> {
        let socket = UnixStream::connect(self.control()).ok()?;
        Some(rustix::net::sockopt::socket_peercred(&socket).ok()?.pid)
    }

    /// Ends that process in good order, and waits for it. False if there is none.
    pub(crate) fn end_server(self) -> Result<bool, Failure> {
        let fail =
            |error: io::Error| Failure::new(format!("could not end the server of {}: {error}", self.name()));
        let Some(server) = self.server() else { return Ok(false) };
        let server = pidfd_open(server, PidfdFlags::empty()).map_err(|errno| fail(errno.into()))?;
        pidfd_send_signal(&server, Signal::TERM).map_err(|errno| fail(errno.into()))?;
        let mut end = [PollFd::new(&server, PollFlags::IN)];
        rustix::io::retry_on_intr(|| poll(&mut end, None)).map_err(|errno| fail(errno.into()))?;
        Ok(true)
    }

    /// Forgets it.
    pub(crate) fn forget(self) {
        for ending in [".json", ".log"] {
            // One that was not attached has none.
            let _ = fs::remove_file(self.note(ending));
        }
    }
}

/// Whether a device is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    New,
    TakeOver,
}

/// The words by which a device was attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attached {
    pub(crate) device: Device,
    pub(crate) image: PathBuf,
    /// Options of `zebu serve`.
    pub(crate) options: Vec<String>,
}

impl Attached {
    /// The notes on a device.
    pub(crate) fn read(device: Device) -> Result<Self, Failure> {
        let path = device.note(".json");
        let fail = |why: String| Failure::new(format!("'{}': {why}", path.display()));
        let text = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                Failure::new(format!("{} was not attached by zebu attach", device.path().display()))
            }
            _ => fail(error.to_string()),
        })?;
        Self::parse(device, &text).ok_or_else(|| fail("no notes of zebu attach".to_owned()))
    }

    fn parse(device: Device, text: &[u8]) -> Option<Self> {
        let notes: Value = serde_json::from_slice(text).ok()?;
        let image = notes["image"].as_array()?.iter().map(|byte| byte.as_u64()?.try_into().ok());
        let image = std::ffi::OsString::from_vec(image.collect::<Option<Vec<u8>>>()?).into();
        let options = notes["options"].as_array()?.iter().map(|word| Some(word.as_str()?.to_owned()));
        Some(Self { device, image, options: options.collect::<Option<Vec<_>>>()? })
    }

    fn text(&self) -> String {
        // A name has any bytes; `name` is for people.
        let notes = json!({
            "device": self.device.path().to_string_lossy(),
            "name": self.image.to_string_lossy(),
            "image": self.image.as_os_str().as_bytes(),
            "options": self.options,
            "control": self.device.control().to_string_lossy(),
        });
        notes.to_string() + "\n"
    }

    /// Starts the server in the background, and waits until the device is there.
    ///
    /// # Errors
    /// What the server said.
    pub(crate) fn start(&self, begin: Begin) -> Result<(), Failure> {
        let fail = |error: io::Error| Failure::new(format!("could not note the device in {NOTES}: {error}"));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(NOTES).map_err(fail)?;
        if self.device.server().is_some() {
            let path = self.device.path();
            return Err(Failure::new(format!("{} is attached already", path.display())));
        }
        let log_path = self.device.note(".log");
        let log = File::options().create(true).write(true).truncate(true).mode(0o600).open(&log_path);
        let mut command = self.command(begin);
        command.stderr(log.map_err(fail)?);
        let cannot = |error: io::Error| Failure::new(format!("could not start the server: {error}"));
        let mut child = command.spawn().map_err(cannot)?;
        let mut lines =
            BufReader::new(child.stdout.take().ok_or_else(|| cannot(io::ErrorKind::BrokenPipe.into()))?)
                .lines();
        let is_ready = lines.any(|line| line.is_ok_and(|line| line == READY));
        let said = fs::read(&log_path).unwrap_or_default();
        // What it warns of is for whoever attached it.
        let _ = io::stderr().write_all(&said);
        if is_ready {
            return fs::write(self.device.note(".json"), self.text()).map_err(fail);
        }
        let ended = child.wait().map_err(cannot)?;
        if begin == Begin::New {
            let _ = fs::remove_file(&log_path);
        }
        Err(Failure::silent(ended.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(EXIT_FAILURE)))
    }

    fn command(&self, begin: Begin) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.arg("serve");
        match self.device {
            Device::Ublk(id) => command.arg(format!("--ublk={id}")),
            Device::Nbd(_) => command.arg("--nbd-device").arg(self.device.path()),
        };
        if begin == Begin::TakeOver {
            command.arg("--recover");
        }
        command.args(&self.options).arg("--control").arg(self.device.control()).arg("--").arg(&self.image);
        // What a terminal sends to those who use it is not for it.
        command.process_group(0).current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        for (text, device) in [
            ("/dev/ublkb3", Device::Ublk(3)),
            ("ublkb0", Device::Ublk(0)),
            ("7", Device::Ublk(7)),
            ("/dev/nbd15", Device::Nbd(15)),
        ] {
            assert_eq!(text.parse(), Ok(device));
        }
        for wrong in ["", "/dev/sda", "/dev/nbd0p1", "-1", "nbd"] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn notes_are_read_as_they_were_written() {
        let image = PathBuf::from(std::ffi::OsString::from_vec(b"/images/\xff \"disk\".qcow2".to_vec()));
        let options = vec!["--read-only".to_owned(), "--format=qcow2".to_owned()];
        let attached = Attached { device: Device::Nbd(2), image, options };
        assert_eq!(Attached::parse(Device::Nbd(2), attached.text().as_bytes()), Some(attached));
        for wrong in ["", "[]", "{}", r#"{"image":[256],"options":[]}"#, r#"{"image":[],"options":[1]}"#] {
            assert_eq!(Attached::parse(Device::Nbd(2), wrong.as_bytes()), None, "{wrong}");
        }
    }
}
