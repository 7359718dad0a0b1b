//! Compressed clusters: packing their streams, writing what is packed, reading.

pub(crate) mod clusters;
pub(crate) mod pack_buffer;
mod read;
mod read_packed;
mod room;
pub(crate) mod stream_packer;
pub(crate) mod write_out;
