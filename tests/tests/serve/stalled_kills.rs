//! Kills of servers whose disk stands still: `ZEBU_KILLS=500` for a long run, `ZEBU_KILLS_FROM=17` to begin with another seed.
//! `cargo xtask stalls --kill` has several at a time.

use std::time::Duration;
use zebu_tests::qemu::Qemu;
use zebu_tests::stalled_kills::Kill;

#[test]
fn a_successor_finds_what_was_flushed_and_keeps_what_it_writes() {
    let Some(qemu) = Qemu::find() else { return };
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, kills) = (number("ZEBU_KILLS_FROM").unwrap_or(1), number("ZEBU_KILLS").unwrap_or(8));
    for seed in first..first + kills {
        let kill = Kill::chosen_by(seed, Duration::from_millis(300));
        kill.run(&qemu).unwrap_or_else(|what| panic!("{kill}: {what}"));
    }
}
