//! Tests of the tests: each defence is taken away in turn, and the random streams must notice.
//!
//! What is tested and how to run more of it is described in `docs/faults.md`.

#[path = "../faults/bench.rs"]
mod bench;
#[path = "../crash/bitmaps.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod bitmaps;
mod closing;
#[path = "../faults/full_disk.rs"]
#[allow(dead_code, reason = "its tests run with the fault tests")]
mod full_disk;
#[path = "../crash/guest.rs"]
mod guest;
#[path = "../faults/header_writes.rs"]
#[allow(dead_code, reason = "its tests run with the fault tests")]
mod header_writes;
#[path = "../faults/held.rs"]
#[allow(dead_code, reason = "its tests run with the fault tests")]
mod held;
mod hostile;
#[path = "../crash/judge.rs"]
mod judge;
mod killed;
#[path = "../crash/life.rs"]
#[allow(dead_code, reason = "shared with the crash tests")]
mod life;
mod marks;
#[path = "../faults/nth_operation.rs"]
#[allow(dead_code, reason = "its tests run with the fault tests")]
mod nth_operation;
#[path = "../faults/old_content.rs"]
#[allow(dead_code, reason = "its tests run with the fault tests")]
mod old_content;
#[path = "../faults/poison.rs"]
#[allow(dead_code, reason = "its tests run with the fault tests")]
mod poison;
#[path = "../crash/resizes.rs"]
#[allow(dead_code, reason = "its tests run with the crash tests")]
mod resizes;
#[path = "../crash/setup.rs"]
mod setup;
#[path = "../crash/snapshot.rs"]
mod snapshot;
mod snapshot_lives;
mod streams;
mod undone;
mod unfinished;
