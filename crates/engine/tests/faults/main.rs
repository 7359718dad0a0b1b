//! The engine on a simulated disk that fails: every kind of operation, at every place, once or for good.
//!
//! What is tested and how to run more of it is described in `docs/faults.md`.

mod bench;
#[path = "../crash/bitmaps.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod bitmaps;
mod full_disk;
#[path = "../crash/guest.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod guest;
mod header_writes;
mod held;
#[path = "../crash/judge.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod judge;
mod nth_operation;
mod old_content;
mod poison;
mod refusals;
#[path = "../crash/setup.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod setup;
#[path = "../crash/snapshot.rs"]
mod snapshot;
mod space;
