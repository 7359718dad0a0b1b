//! Block devices of this machine's kernel (`/dev/ublkbN`), whose requests its driver ublk hands to a server.
//!
//! Each queue belongs to one worker. Its requests are taken, done and answered through the ring that the image's I/O goes through as
//! well. The kernel copies data to and from buffers of the queue, one for each request that may be under way.
//!
//! A device outlives its server. Requests that a server had and did not answer are given to the next one
//! ([`UblkDevice::recover`]). A request is answered when the engine has done it, and not before.

mod control;
mod descriptions;
mod device;
mod queue;
mod uapi;

pub use device::{KernelDevice, UblkConfig, UblkDevice, kernel_devices, remove_device};
pub use uapi::DeviceState;
