//! `zebu devices` and `zebu detach`: block devices of this machine that zebu, or another server of ublk, has made.

use crate::attached::Device;
use crate::failure::Failure;
use crate::output::{json, stdout};
use crate::values::OutputFormat;
use serde_json::json;
use std::fmt::Write as _;
use std::time::{Duration, Instant};
use zebu_disks::Context;
use zebu_export::is_in_use;
use zebu_export::kernel_nbd::disconnect_device;
use zebu_export::ublk::{DeviceState, KernelDevice, kernel_devices, remove_device};

/// How long the kernel may take to let go of a device that was unmounted.
const RELEASE: Duration = Duration::from_secs(10);
/// How often is looked whether it has.
const STEP: Duration = Duration::from_millis(20);

/// Arguments of `zebu devices`.
#[derive(Debug, clap::Args)]
pub(crate) struct DevicesArgs {
    /// Form of the list
    #[arg(long, value_enum, value_name = "human|json", hide_possible_values = true, default_value_t)]
    output: OutputFormat,
}

/// Arguments of `zebu detach`.
#[derive(Debug, clap::Args)]
pub(crate) struct DetachArgs {
    /// Remove it although it is served or in use: requests of those who use it fail
    #[arg(long)]
    force: bool,

    /// The device: /dev/ublkbN, its number, or /dev/nbdN
    #[arg(value_name = "DEVICE")]
    device: Device,
}

fn state(device: &KernelDevice) -> &'static str {
    match device.state {
        DeviceState::Stopped => "stopped",
        DeviceState::Served => "served",
        DeviceState::Waiting => "waits for a server",
        _ => "fails",
    }
}

/// Runs `zebu devices`.
pub(crate) fn list(args: &DevicesArgs, context: &Context) -> Result<u8, Failure> {
    let devices = kernel_devices()?;
    let text = match args.output {
        OutputFormat::Json => {
            json::to_text(context.dialect, &json!(devices.iter().map(as_json).collect::<Vec<_>>()))?
        }
        OutputFormat::Human => devices.iter().fold(String::new(), |mut text, device| {
            let access = if device.is_read_only { ", read-only" } else { "" };
            let _ =
                write!(text, "{}: {} bytes{access}, {}", device.path.display(), device.size, state(device));
            if let (Some(server), DeviceState::Served) = (device.server, device.state) {
                let _ = write!(text, " by process {server}");
            }
            text.push('\n');
            text
        }),
    };
    stdout::print(&text)?;
    Ok(0)
}

fn as_json(device: &KernelDevice) -> serde_json::Value {
    json!({
        "id": device.id,
        "path": device.path.to_string_lossy(),
        "state": match device.state {
            DeviceState::Stopped => "stopped",
            DeviceState::Served => "served",
            DeviceState::Waiting => "waiting",
            _ => "failing",
        },
        "size": device.size,
        "read-only": device.is_read_only,
        "in-use": device.is_in_use,
        "server": device.server,
    })
}

/// Ends the server of a device that was unmounted, which takes the device along.
pub(crate) fn detach_in_the_end(device: Device) -> Result<(), Failure> {
    let path = device.path();
    let begun = Instant::now();
    // The kernel lets go of the device some time after the mount is gone.
    while is_in_use(&path) && begun.elapsed() < RELEASE {
        std::thread::sleep(STEP);
    }
    device.end_server()?;
    if path.exists() && is_in_use(&path) {
        let path = path.display();
        return Err(Failure::new(format!("{path} is in use: zebu detach {path} removes it when it is free")));
    }
    device.forget();
    Ok(())
}

/// Runs `zebu detach`.
pub(crate) fn detach(args: &DetachArgs) -> Result<u8, Failure> {
    let device = args.device;
    let path = device.path();
    let in_use = || {
        let path = path.display();
        Failure::new(format!(
            "{path} is in use: unmount it first, or give --force, which makes requests of its users fail"
        ))
    };
    if !args.force && path.exists() && is_in_use(&path) {
        return Err(in_use());
    }
    // A server that ends takes its device along, unless somebody has begun to use it meanwhile.
    let had_server = device.end_server()?;
    match device {
        Device::Ublk(id) => {
            let found = kernel_devices()?.into_iter().find(|device| device.id == id);
            match found {
                None if had_server => {}
                Some(found) if !args.force && found.is_in_use => return Err(in_use()),
                Some(KernelDevice { state: DeviceState::Served, server, .. }) if !args.force => {
                    let (path, server) = (path.display(), server.unwrap_or(0));
                    return Err(Failure::new(format!(
                        "process {server} serves {path}: end it, which removes the device, or give --force"
                    )));
                }
                _ => remove_device(id)?,
            }
        }
        Device::Nbd(index) if args.force || !had_server => disconnect_device(index)?,
        Device::Nbd(_) => {}
    }
    device.forget();
    Ok(0)
}
