//! Disk images in OCI registries and layouts.
//!
//! [`OciName`] is the name of an image, [`open()`] the way to its disk: a plain qcow2 or raw blob is read by ranges
//! ([`zebu_remote::http::HttpDisk`], [`HashedDisk`]), all others are unpacked into a file without a name, whose digest was
//! compared. [`pull()`] makes a file of an image, [`push()`] an image of a file.
//!
//! Requests go through [`zebu_remote::http::HttpClient`], so certificates, proxies and sandboxes are as for web servers.

mod auth;
mod blob;
mod client;
mod content;
mod digest;
mod document;
mod failure;
mod frames_disk;
mod hashed_disk;
mod hashes;
mod hosts;
mod image;
mod kind;
mod layers;
mod layout;
mod mirror;
mod name;
mod open;
mod options;
mod pack;
mod pull;
mod push;
mod referrers;
mod registry;
mod seek_table;
mod spool;
mod stack;
mod unpack;
mod upload;
mod whole;

pub use auth::{is_token_name, token_for_broker};
pub use digest::{Digest, DigestError};
pub use frames_disk::FramesDisk;
pub use hashed_disk::HashedDisk;
pub use hashes::Hashes;
pub use mirror::Mirror;
pub use name::{OciName, Reference};
pub use open::{Lazy, Opened, StackLayer, open, stack_digest};
pub use options::{OciOptions, Platform};
pub use pull::{Pulled, pull};
pub use push::{PushAs, PushOptions, Pushed, PushedBlob, StackFile, push, push_stack};
pub use stack::LayerFormat;
pub use whole::Readers;
