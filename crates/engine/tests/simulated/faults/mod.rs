//! The engine on a simulated disk that fails: every kind of operation, at every place, once or for good.
//!
//! `docs/testing.md` tells what is tested, and how to run more of it.

pub(crate) mod bench;
pub(crate) mod calls;
pub(crate) mod checkpoints;
pub(crate) mod copy_on_read;
pub(crate) mod damage_mark;
pub(crate) mod failed_tables;
pub(crate) mod fragmented;
pub(crate) mod full_disk;
pub(crate) mod growth;
pub(crate) mod header_writes;
pub(crate) mod held;
pub(crate) mod idle;
mod late_reads;
pub(crate) mod moved_source;
pub(crate) mod nth_operation;
pub(crate) mod old_content;
pub(crate) mod poison;
mod refusals;
pub(crate) mod snapshots;
pub(crate) mod space;
pub(crate) mod stalls;
mod still_readers;
mod still_workers;
pub(crate) mod unending;
