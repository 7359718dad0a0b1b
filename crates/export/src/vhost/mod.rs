//! vhost-user-blk: a virtio block device for a virtual machine monitor that shares its guest's memory. Requests are read
//! and written in the guest's memory in place.

mod back_channel;
mod chain;
mod config;
mod device;
mod foreign_memory;
mod handler;
mod inflight;
mod memory;
mod own_memory;
mod request;
mod ring;
mod ring_control;
mod server;

pub use config::VhostConfig;
pub use request::{BlkRequest, Parts, parse_header, split_front, split_last_byte};
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use ring::fuzzing::look_at_ring;
pub use server::VhostUserBlk;
