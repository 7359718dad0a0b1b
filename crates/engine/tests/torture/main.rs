//! Long runs on the simulated disk: random operations, all crash states at every step, crash states one by one, and
//! every step of a commit with every kind of failure.
//!
//! What is tested and how to run more of it is described in `docs/trust.md`.

#[path = "../crash/bitmaps.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod bitmaps;
#[path = "../crash/guest.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod guest;
mod invariants;
#[path = "../crash/judge.rs"]
mod judge;
mod notices;
mod plan;
mod possible_image;
mod runs;
#[path = "../crash/setup.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod setup;
mod shrink;
#[path = "../crash/snapshot.rs"]
mod snapshot;
mod steps;
mod whole;
