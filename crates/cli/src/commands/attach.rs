//! `zebu attach`: an image as a block device of this machine, by a server in the background.
//!
//! The words are noted, so that another server can take the device over with the same ones, and that it can be detached by its name.

use crate::attached::{Attached, Begin, Device};
use crate::failure::Failure;
use crate::output::stdout;
use std::ffi::OsString;
use std::path::PathBuf;
use zebu_export::ublk::kernel_devices;

/// Numbers of devices that are tried, if others take those that were free.
const TRIES: u32 = 16;

/// Arguments of `zebu attach`.
#[derive(Debug, clap::Args)]
pub(crate) struct AttachArgs {
    /// Format of the image [default: probed; writing to a raw image needs it]
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,

    /// Cache mode of the image [default: writeback]
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,

    /// The device can't be written
    #[arg(short, long)]
    read_only: bool,

    /// Show this internal snapshot (id or name) instead of the active state; the device can't be written
    #[arg(short = 'l', long, value_name = "NAME")]
    snapshot: Option<String>,

    /// Queues of the device, with a thread each [default: 1]
    #[arg(long, value_name = "NUM", value_parser = clap::value_parser!(u32).range(1..=256))]
    queues: Option<u32>,

    /// Take over a device that was attached before and whose server has ended: only the device is named
    #[arg(long, conflicts_with_all = ["format", "cache", "read_only", "snapshot", "queues", "device"])]
    recover: bool,

    /// The image file; with --recover, the device
    #[arg(value_name = "FILENAME")]
    filename: OsString,

    /// The device: /dev/ublkbN, or /dev/nbdN of the kernel's NBD client [default: a free one of ublk]
    #[arg(value_name = "DEVICE")]
    device: Option<Device>,
}

/// Runs the command.
pub(crate) fn run(args: &AttachArgs) -> Result<u8, Failure> {
    if args.recover {
        let name = args.filename.to_string_lossy();
        let device: Device = name.parse().map_err(Failure::usage)?;
        let attached = Attached::read(device)?;
        attached.start(Begin::TakeOver)?;
        stdout::print(&format!("{}\n", device.path().display()))?;
        return Ok(0);
    }
    let device = match args.device {
        Some(device) => {
            attached(args, device).start(Begin::New)?;
            device
        }
        None => on_a_free_one(args)?,
    };
    stdout::print(&format!("{}\n", device.path().display()))?;
    Ok(0)
}

/// Attaches the image to a device of ublk that is free.
fn on_a_free_one(args: &AttachArgs) -> Result<Device, Failure> {
    for _ in 0..TRIES {
        let taken: Vec<u32> = kernel_devices()?.iter().map(|device| device.id).collect();
        let free = (0..=u32::MAX).find(|id| !taken.contains(id)).unwrap_or(0);
        let device = Device::Ublk(free);
        match attached(args, device).start(Begin::New) {
            Ok(()) => return Ok(device),
            // Another has taken it meanwhile.
            Err(_) if kernel_devices()?.iter().any(|device| device.id == free) => {}
            Err(failure) => return Err(failure),
        }
    }
    Err(Failure::new("others take every free device: name one (/dev/ublkbN)"))
}

fn attached(args: &AttachArgs, device: Device) -> Attached {
    let queues = args.queues.map(|queues| queues.to_string());
    let given =
        [("cache", &args.cache), ("format", &args.format), ("snapshot", &args.snapshot), ("queues", &queues)];
    let mut options: Vec<String> =
        given.iter().filter_map(|(name, value)| Some(format!("--{name}={}", value.as_ref()?))).collect();
    options.extend(args.read_only.then(|| "--read-only".to_owned()));
    let image = PathBuf::from(&args.filename);
    // Whoever takes it over may be in another directory.
    let image = std::path::absolute(&image).unwrap_or(image);
    Attached { device, image, options }
}
