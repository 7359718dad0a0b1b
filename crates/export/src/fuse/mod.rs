//! An image as a file with the bytes of the disk.

mod device;
mod extents;
mod filesystem;
mod mount;
mod wire;

pub use mount::{FuseConfig, FuseMount};
