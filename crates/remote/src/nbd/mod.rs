//! A client of network block devices (`doc/proto.md` of the reference implementation).
//!
//! Each connection has a thread that sends and receives. Requests wait in one queue, from which every connection takes.
//! When a connection breaks, its unanswered requests go back to the queue and are sent again, until their deadlines.

mod address;
mod connection;
mod coverage;
mod disk;
mod durability;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod handshake;
mod protocol;
mod queue;
mod request;
mod wire;

pub use crate::tls::{PskFile, TlsClient, TlsFiles};
pub use address::{Endpoint, NbdAddress};
pub use disk::{NbdDisk, NbdOptions};
pub use request::StatusRun;
