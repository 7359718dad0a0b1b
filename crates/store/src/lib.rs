//! Disk images in object stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.
//!
//! An object is read by [`zebu_remote::http::HttpDisk`] at URLs that are signed here ([`signed_urls`]). One is written as an
//! [`Upload`], a [`zebu_storage::Storage`] that takes each byte once.
//!
//! [`points`] keeps points in time of a disk, as layers and manifests.
//!
//! Requests are those of the crate `object_store`. Its futures run on the thread that waits for them, and their bytes go through
//! [`zebu_remote::http::HttpClient`]: certificates, proxies and sandboxes are as for web servers.

mod access;
mod environment;
mod failure;
mod hex;
mod name;
pub mod points;
mod profiles;
mod runtime;
mod signing;
mod transport;
mod upload;

pub use name::{StoreKind, StoreName};
pub use signing::{sign_for_broker, signed_urls};
pub use upload::{Existing, Length, Upload, UploadOptions, UploadStats};
