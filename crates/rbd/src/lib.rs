//! Images of Ceph RBD as disks.
//!
//! [`RbdDisk`] is a [`zebu_storage::Storage`]: [`zebu_storage::File::from_storage`] makes a file of it, which the engine opens
//! as any other. [`RbdName`] reads the names that QEMU has for such images.
//!
//! The work is librbd's, which is loaded when the first disk is opened (Debian: `librbd1`). All requests are its asynchronous
//! ones, answered from its threads. What it has for waiting callers only (new sizes, looking for holes) is done by one
//! thread of the disk.
//!
//! Every request ends. The time that librados waits for an answer is bounded ([`RbdOptions::timeout`]), and what librbd does not
//! answer in twice that time is given up. So data is copied on its way: librbd may still use its memory then.

#![deny(unsafe_code)]

mod disk;
mod error;
mod extents;
#[allow(unsafe_code)]
mod ffi;
mod jobs;
mod name;
mod open;
mod options;
mod pending;
mod shared;

pub use disk::RbdDisk;
pub use error::RbdError;
pub use name::RbdName;
pub use options::RbdOptions;
pub use shared::RbdStats;
