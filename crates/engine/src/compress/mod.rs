//! Compressing and inflating clusters: the codecs, and the threads that run them.

mod burst;
mod codec;
mod constant_clusters;
mod method;
mod options;
mod pool;

pub(crate) use burst::Bursts;
pub(crate) use method::{Method, Packing};
pub use options::{CompressOptions, DeflateWindow};
pub use pool::CodecPool;
pub(crate) use pool::{Hurry, Outcome, Work};
