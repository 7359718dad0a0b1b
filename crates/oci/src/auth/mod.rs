//! The one who asks a registry: users and passwords from the files of docker and podman, and tokens that are got for them.

mod challenge;
mod files;
mod helper;
mod secret;
mod tokens;

pub(crate) use challenge::Challenge;
pub(crate) use tokens::{Access, Tokens};
pub use tokens::{is_token_name, token_for_broker};
