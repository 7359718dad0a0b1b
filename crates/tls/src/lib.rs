//! TLS sessions without I/O: bytes of the network go in and come out of a [`Session`].
//!
//! Certificates are rustls's. Pre-shared keys ([`psk`]), which rustls has not, are those of the system's OpenSSL. It is
//! loaded when the first keys are read.

mod authorization;
mod client_name;
pub mod psk;
mod session;

pub use authorization::{Authorization, Permission, Rule};
pub use session::{Session, TlsError};
