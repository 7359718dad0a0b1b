//! The NBD server: fixed newstyle, structured replies, extended headers, block status.

mod config;
mod contexts;
mod handshake;
mod inbox;
mod listener;
mod option;
mod origin;
mod outbox;
mod peers;
pub(crate) mod protocol;
mod reply;
mod request;
mod server;
mod session;
mod status;
#[cfg(feature = "tls")]
mod tls;
mod transport;

pub use config::{NbdConfig, WhenFull};
pub use listener::Listener;
pub use option::{
    ClientOption, ContextRequest, InfoRequest, MAX_NAME, OptionHeader, OptionRefusal, parse_option,
};
pub use protocol::TransmissionFlags;
pub use request::{
    Command, HeaderStyle, MAX_PAYLOAD, Refusal, RequestHeader, Terms, Verdict, Zeroing, judge,
};
pub(crate) use server::Entrance;
pub use server::NbdServer;
#[cfg(feature = "tls")]
pub use tls::{CertificateFiles, TlsConfig};
#[cfg(feature = "tls")]
pub use zebu_tls::{Authorization, Permission, Rule};
