//! An image as a file with the bytes of the disk.

mod budget;
mod extents;
mod filesystem;
mod mount;

pub use mount::{FuseConfig, FuseMount};
