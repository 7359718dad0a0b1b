//! A short run of what `cargo xtask days` does for long.

use std::time::Duration;
use zebu_tests::days::{Plan, run};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;

/// Two runs on one image: memory, descriptors, threads and the file's length are not more at the end than in the middle.
#[test]
fn a_server_under_load_takes_no_more_as_time_goes_by() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("days");
    let mut plan = Plan {
        directory: scratch.path().to_owned(),
        size: 64 << 20,
        time: Duration::from_secs(12),
        sample: Duration::from_secs(1),
        snapshot: Duration::from_secs(1),
        options: String::new(),
        seed: 1,
    };
    for seed in [1, 2] {
        plan.seed = seed;
        let samples = run(&qemu, &plan).unwrap_or_else(|what| panic!("{what}"));
        let (middle, last) = (&samples[samples.len() / 2], samples.last().expect("at least one"));
        assert!(last.resident <= middle.resident + (24 << 10), "{samples:?}");
        assert!(last.descriptors <= middle.descriptors + 8, "{samples:?}");
        // The disk, three snapshots and a fourth in quarantine, and as much again for free runs that are too short for a window.
        assert!(last.file <= 2 * 5 * (64 << 20), "{samples:?}");
    }
}
