//! Disks over the network.
//!
//! A disk here is a [`zebu_storage::Storage`]: [`zebu_storage::File::from_storage`] makes a file of it, which the engine
//! opens as any other. Each disk has threads and sockets of its own, and no async runtime.
//!
//! | feature | names | |
//! |---|---|---|
//! | `http` | `http://HOST[:PORT]/PATH`, `https://`; objects of stores at signed URLs | [`http::HttpDisk`] |
//! | `nbd` | `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`, `nbds://`, `nbds+unix://`, QEMU's `nbd:HOST:PORT[:exportname=NAME]` and `nbd:unix:PATH[:exportname=NAME]` | [`nbd::NbdDisk`] |
//!
//! The feature `cache` has [`range_cache`]: ranges of such disks on a local one. All three are default features. `fuzzing` is for zebu's own fuzz targets, and no part of what versions promise.
//!
//! A server is not trusted: whatever it sends, a request ends with an answer or with EIO at its deadline, and memory
//! stays bounded.

#[cfg(feature = "http")]
mod afresh;
mod error;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "nbd")]
pub mod nbd;
#[cfg(any(feature = "nbd", feature = "http"))]
mod network;
mod percent;
#[cfg(feature = "cache")]
pub mod range_cache;
#[cfg(any(feature = "http", feature = "cache"))]
mod reader;
mod stats;
#[cfg(any(feature = "http", feature = "cache"))]
mod streaks;
#[cfg(any(feature = "nbd", feature = "http"))]
mod stream;
#[cfg(any(feature = "nbd", feature = "http"))]
mod tls;

#[cfg(feature = "http")]
pub use afresh::Afresh;
pub use error::{RemoteError, RemoteRemedy};
#[cfg(any(feature = "nbd", feature = "http"))]
pub use network::{Broker, Network, Peer, SignedText};
pub use stats::{RemoteStats, StatsSnapshot};
