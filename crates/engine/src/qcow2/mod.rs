//! The qcow2 driver. Each file is one concept; [`state`] is what they share.

mod backup_mark;
mod bitmap_changes;
pub(crate) mod bitmaps;
pub(crate) mod cache;
pub(crate) mod commit;
pub(crate) mod compressed;
mod disk;
pub(crate) mod encryption;
pub(crate) mod files;
mod flush;
mod forget;
pub(crate) mod header;
mod l2_tables;
pub(crate) mod life;
pub(crate) mod map;
mod prepare_write;
pub(crate) mod read_barrier;
pub(crate) mod read_tables;
mod refill;
mod replace_table;
mod settle;
pub(crate) mod snapshots;
pub(crate) mod space;
pub(crate) mod state;
pub(crate) mod text;
mod turns;
pub(crate) mod write;
