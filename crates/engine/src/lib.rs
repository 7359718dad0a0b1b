//! The zebu block engine.

mod chain;
mod error;
mod gate;
mod image;
pub mod jobs;
mod node;
mod open;
mod options;
mod qcow2;
mod raw;
mod refs;
mod status;

pub use error::{Error, ErrorKind, Result};
pub use image::Image;
pub use options::*;
pub use status::*;
pub use zebu_storage as storage;
