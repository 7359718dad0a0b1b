//! An image as a file with the bytes of the disk.

mod device;
mod extents;
mod filesystem;
mod mount;
mod mount_table;
mod wire;

pub use mount::{FuseConfig, FuseMount};
pub use mount_table::{MountedOver, mounted_over, unmount_unless_used};
