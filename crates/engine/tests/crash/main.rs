//! The engine on the simulated disk: power failures at any moment, faults, operations that are late.
//!
//! What is tested and how to run more of it is described in `docs/crash-tests.md`.

#[allow(dead_code, reason = "shared with the fault tests")]
mod bitmaps;
mod chain_operations;
mod commits;
#[allow(dead_code, reason = "shared with the fault tests")]
mod guest;
mod judge;
mod life;
mod replay;
mod resizes;
mod setup;
mod snapshot;
mod snapshot_operations;
