//! Block devices of the kernel's NBD client (`/dev/nbdN`), whose server is this process. The kernel gets its connections over
//! netlink, so nobody has to stay in a system call for a device.
//!
//! A device outlives its server: requests wait until the next one brings other connections ([`NbdDevice::recover`]).

mod client;
mod device;
mod netlink;

pub use device::{NbdDevice, NbdDeviceConfig, disconnect_device, free_device};
