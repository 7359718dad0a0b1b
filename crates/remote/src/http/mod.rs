//! Disks that are files on web servers, read by ranges (RFC 9110, section 14).
//!
//! Threads have a connection each and take fetches from one queue. Small reads go through a cache of bounded memory, with
//! read-ahead; large ones go straight to the reader's memory. The object is pinned when the disk is opened: a reply that
//! belongs to another version of it is never taken.
//!
//! An object of a store is read the same way, at URLs that are signed for a while ([`SignedUrls`]).

mod authorizations;
mod cache;
mod client;
mod connection;
mod credentials;
mod disk;
mod fetch;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod headers;
mod options;
mod proxy;
mod ranged;
mod read_around;
mod signed;
mod source;
mod store_errors;
mod streamed;
mod url;

pub use authorizations::Authorizations;
pub use client::{ClientError, ClientErrorKind, HttpClient};
pub use credentials::{Credentials, password_of};
pub use disk::HttpDisk;
pub use options::{Cookie, HttpOptions, Redirects, ServersWithoutRanges, Verification};
pub use signed::{SignedUrl, SignedUrls, Signing, SigningError};
pub use store_errors::explain_store_error;
pub use url::HttpUrl;
