//! The engine on the simulated disk: power failures at any moment, faults, operations that are late.
//!
//! `docs/testing.md` tells what is tested, and how to run more of it.

pub(crate) mod bitmaps;
mod chain_operations;
mod commits;
pub(crate) mod forks;
pub(crate) mod guest;
pub(crate) mod judge;
pub(crate) mod left_behind;
pub(crate) mod life;
pub(crate) mod limits;
mod replay;
pub(crate) mod resizes;
pub(crate) mod setup;
pub(crate) mod snapshot;
mod snapshot_operations;
pub(crate) mod vm_state;
