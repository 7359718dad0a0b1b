//! A short slice of the message fuzzing of a running server, with fixed seeds. `cargo xtask messages` runs it for as long as
//! one wants, under AddressSanitizer.

use zebu_tests::message_fuzz::{Build, Extent, run};

/// `ZEBU_MESSAGE_TURNS` of the environment, or few.
fn turns() -> u64 {
    std::env::var("ZEBU_MESSAGE_TURNS").map_or(60, |turns| turns.parse().expect("a number"))
}

#[test]
fn a_server_bears_whatever_it_is_told() {
    let sums = run(1, Extent::Turns(turns()), Build::Plain);
    // Most of what was said got to the server.
    assert!(sums.nbd > sums.turns && sums.vhost > 10 * sums.turns && sums.control > sums.turns, "{sums:?}");
}
