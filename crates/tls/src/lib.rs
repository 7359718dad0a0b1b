//! TLS sessions without I/O: bytes of the network go in and come out of a [`Session`].
//!
//! Certificates are rustls's. Pre-shared keys ([`psk`]), which rustls has not, are those of the system's OpenSSL. It is
//! loaded when the first keys are read.

mod authorities;
mod authorization;
mod client_name;
mod path_rules;
mod pem_files;
pub mod psk;
mod session;
mod verifiers;

pub use authorities::Authorities;
pub use authorization::{Authorization, Permission, Rule};
pub use pem_files::{FileError, own_certificate, private_key};
pub use session::{Session, TlsError};
