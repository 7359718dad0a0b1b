//! `zebu mount`: the file system of an image, in a directory of this machine.
//!
//! The image becomes a block device by the first way that this machine has: ublk, or its NBD client. mount(8) looks for the type of
//! the file system.

use crate::attached::{Attached, Begin, Device};
use crate::commands::devices::detach_in_the_end;
use crate::failure::Failure;
use crate::output::stdout;
use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_disks::{Context, Program};
use zebu_export::kernel_nbd::free_device;
use zebu_export::ublk::kernel_devices;

/// Arguments of `zebu mount`.
#[derive(Debug, clap::Args)]
pub(crate) struct MountArgs {
    /// Format of the image [default: probed; writing to a raw image needs it]
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,

    /// Cache mode of the image [default: writeback]
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,

    /// Let the file system be written; without it, neither it nor the image is
    #[arg(short, long)]
    write: bool,

    /// Mount this partition [default: the whole disk]
    #[arg(short, long, value_name = "NUM", value_parser = clap::value_parser!(u32).range(1..))]
    partition: Option<u32>,

    /// The image file
    #[arg(value_name = "FILENAME")]
    filename: OsString,

    /// The directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Runs the command.
pub(crate) fn run(args: &MountArgs, context: &Context) -> Result<u8, Failure> {
    let directory = fs::canonicalize(&args.directory)
        .map_err(|error| Failure::new(format!("'{}': {error}", args.directory.display())))?;
    // Before anything is to be undone.
    let (signal, told) = UnixStream::pair().map_err(|error| Failure::new(error.to_string()))?;
    for number in [SIGINT, SIGTERM, SIGHUP] {
        let told = told.try_clone().map_err(|error| Failure::new(error.to_string()))?;
        signal_hook::low_level::pipe::register(number, told)
            .map_err(|error| Failure::new(format!("could not watch for signals: {error}")))?;
    }
    let attached = attach(args)?;
    let result = mount(args, attached.device, &directory).and_then(|()| {
        stdout::print("ready\n")?;
        wait(context.dialect, &signal, &directory)
    });
    result.and(detach_in_the_end(attached.device)).map(|()| 0)
}

/// Makes the image a device, by the first way that there is.
fn attach(args: &MountArgs) -> Result<Attached, Failure> {
    let device = match kernel_devices() {
        Ok(taken) => (0..=u32::MAX).find(|id| taken.iter().all(|device| device.id != *id)).map(Device::Ublk),
        Err(no_ublk) => match free_device() {
            Ok(index) => index.map(Device::Nbd),
            Err(no_nbd) => {
                return Err(Failure::new(format!(
                    "this machine can't make block devices of images: {no_ublk}; {no_nbd}; without either, \
                     `zebu serve --fuse FILE IMAGE` shows the disk as a file, which `mount -o loop` takes"
                )));
            }
        },
    };
    let device =
        device.ok_or_else(|| Failure::new("all devices are in use (modprobe nbd nbds_max=N makes more)"))?;
    let given = [("cache", &args.cache), ("format", &args.format)];
    let mut options: Vec<String> =
        given.iter().filter_map(|(name, value)| Some(format!("--{name}={}", value.as_ref()?))).collect();
    options.extend((!args.write).then(|| "--read-only".to_owned()));
    let image = PathBuf::from(&args.filename);
    let image = std::path::absolute(&image).unwrap_or(image);
    let attached = Attached { device, image, options };
    attached.start(Begin::New)?;
    Ok(attached)
}

/// The device's part with the file system.
fn part(device: Device, partition: Option<u32>) -> Result<PathBuf, Failure> {
    let whole = device.path();
    let Some(number) = partition else { return Ok(whole) };
    let path = PathBuf::from(format!("{}p{number}", whole.display()));
    if path.exists() { Ok(path) } else { Err(Failure::new(format!("the disk has no partition {number}"))) }
}

fn mount(args: &MountArgs, device: Device, directory: &Path) -> Result<(), Failure> {
    let path = part(device, args.partition)?;
    // A journal is not replayed into what is only read.
    let ways: &[&str] = if args.write { &["rw"] } else { &["ro", "ro,norecovery"] };
    let mut said = String::new();
    for options in ways {
        let mut command = Command::new("mount");
        command.args(["-o", options]).arg(&path).arg(directory);
        let ended =
            command.output().map_err(|error| Failure::new(format!("could not run mount(8): {error}")))?;
        if ended.status.success() {
            return Ok(());
        }
        String::from_utf8_lossy(&ended.stderr).trim().clone_into(&mut said);
    }
    let has_parts = args.partition.is_none() && part(device, Some(1)).is_ok();
    let hint = if has_parts { "; the disk has partitions: give --partition" } else { "" };
    Err(Failure::new(format!("could not mount it: {said}{hint}")))
}

/// Waits for a signal, and unmounts the directory then; or until somebody else does.
fn wait(dialect: Program, signal: &UnixStream, directory: &Path) -> Result<(), Failure> {
    let fail = |what: &str, error: &dyn std::fmt::Display| Failure::new(format!("could not {what}: {error}"));
    let mounts = File::open("/proc/self/mountinfo").map_err(|error| fail("watch mounts", &error))?;
    let mut is_told = false;
    while is_mounted(directory) {
        if is_told {
            let ended = Command::new("umount").arg(directory).output();
            let ended = ended.map_err(|error| fail("run umount(8)", &error))?;
            if !ended.status.success() {
                let said = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
                crate::output::stderr::tell(
                    dialect,
                    &format!("{said}: unmounted when it is free, or by umount"),
                );
                is_told = false;
            }
            continue;
        }
        let mut events =
            [PollFd::new(signal, PollFlags::IN), PollFd::new(&mounts, PollFlags::PRI | PollFlags::ERR)];
        rustix::io::retry_on_intr(|| poll(&mut events, None)).map_err(|errno| fail("wait", &errno))?;
        if events[0].revents().contains(PollFlags::IN) {
            let _ = rustix::io::read(signal, &mut [0; 16]);
            is_told = true;
        }
    }
    Ok(())
}

/// Whether a file system is mounted there, as /proc tells it.
fn is_mounted(directory: &Path) -> bool {
    let mounts = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let wanted = escaped(directory);
    mounts.split(|byte| *byte == b'\n').any(|line| line.split(|byte| *byte == b' ').nth(4) == Some(&wanted))
}

/// A path as mountinfo writes it: blanks and backslashes as octal numbers.
fn escaped(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &byte in path.as_os_str().as_encoded_bytes() {
        if matches!(byte, b' ' | b'\t' | b'\n' | b'\\') {
            bytes.extend(format!("\\{byte:03o}").bytes());
        } else {
            bytes.push(byte);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_escaped_as_the_kernel_does() {
        assert_eq!(escaped(Path::new("/mnt/a b\\c")), b"/mnt/a\\040b\\134c");
        assert!(is_mounted(Path::new("/proc")));
        assert!(!is_mounted(Path::new("/proc/self")));
    }
}
