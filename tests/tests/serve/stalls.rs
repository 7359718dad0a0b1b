//! Short stalls; `cargo xtask stalls` has long ones.

use std::time::Duration;
use zebu_tests::qemu::Qemu;
use zebu_tests::stalls::Stall;

#[test]
fn a_disk_that_stands_still_for_a_moment_fails_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    for seed in 1..=8 {
        let stall = Stall::chosen_by(seed, Duration::from_millis(500));
        stall.run(&qemu).unwrap_or_else(|what| panic!("{stall}: {what}"));
    }
}
