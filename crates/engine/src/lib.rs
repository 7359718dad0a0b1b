//! The zebu block engine.

pub mod check;
mod error;
mod image;
pub mod jobs;
mod options;
mod status;

pub use error::{Error, ErrorKind, Result};
pub use image::Image;
pub use options::*;
pub use status::*;
pub use zebu_storage as storage;
