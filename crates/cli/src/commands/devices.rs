//! `zebu devices` and `zebu detach`: block devices of this machine that zebu, or another server of ublk, has made.

use crate::failure::Failure;
use crate::output::{json, stdout};
use crate::values::OutputFormat;
use serde_json::json;
use std::fmt::Write as _;
use zebu_export::ublk::{DeviceState, KernelDevice, kernel_devices, remove_device};

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

    /// The device: its number, or /dev/ublkbN
    #[arg(value_name = "DEVICE", value_parser = device_argument)]
    device: u32,
}

fn device_argument(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix("/dev/ublkb").unwrap_or(text);
    number.parse().map_err(|_| "a device is a number, or /dev/ublkbN".to_owned())
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
pub(crate) fn list(args: &DevicesArgs) -> Result<u8, Failure> {
    let devices = kernel_devices()?;
    let text = match args.output {
        OutputFormat::Json => json::to_text(&json!(devices.iter().map(as_json).collect::<Vec<_>>()))?,
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

/// Runs `zebu detach`.
pub(crate) fn detach(args: &DetachArgs) -> Result<u8, Failure> {
    let id = args.device;
    if !args.force {
        let devices = kernel_devices()?;
        let device = devices.iter().find(|device| device.id == id);
        let device = device.ok_or_else(|| Failure::new(format!("there is no ublk device {id}")))?;
        let (path, server) = (device.path.display(), device.server.unwrap_or(0));
        if device.is_in_use {
            return Err(Failure::new(format!(
                "{path} is in use: unmount it first, or have the requests of those who use it fail (--force)"
            )));
        }
        if device.state == DeviceState::Served {
            return Err(Failure::new(format!(
                "process {server} serves {path}: end it, which removes the device, or give --force"
            )));
        }
    }
    remove_device(id)?;
    Ok(0)
}
