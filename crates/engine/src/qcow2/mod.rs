//! The qcow2 driver. Each file is one concept; [`state`] is what they share.

pub(crate) mod alloc;
pub(crate) mod close;
pub(crate) mod commit;
pub(crate) mod create;
pub(crate) mod decompress;
pub(crate) mod first_write;
pub(crate) mod grace;
pub(crate) mod header_block;
pub(crate) mod inflight;
pub(crate) mod info;
pub(crate) mod mapping;
pub(crate) mod metadata_map;
pub(crate) mod open;
pub(crate) mod padding;
pub(crate) mod preallocate;
pub(crate) mod refcounts;
pub(crate) mod release;
pub(crate) mod resize;
pub(crate) mod slices;
pub(crate) mod space;
pub(crate) mod state;
pub(crate) mod tables;
pub(crate) mod top_table;
pub(crate) mod transfer;
pub(crate) mod write;
pub(crate) mod zero;
