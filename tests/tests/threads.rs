//! Threads that share an image: a few fixed seeds, and every scenario once. `cargo xtask threads` runs as many as wanted.

use std::path::PathBuf;
use std::time::Duration;
use zebu_tests::qemu::Qemu;
use zebu_tests::thread_stress::judge::Verdict;
use zebu_tests::thread_stress::runner::Runner;
use zebu_tests::thread_stress::scenarios::Scenario;

fn run(seeds: std::ops::Range<u64>, each: impl Fn(&Runner<'_>, u64) -> Verdict) {
    let Some(qemu) = Qemu::find() else { return };
    let program = PathBuf::from(env!("CARGO_BIN_EXE_threads"));
    let runner = Runner { program, qemu: &qemu, patience: Duration::from_secs(60), requests: 4000 };
    let mut violations = Vec::new();
    for seed in seeds {
        violations.extend(each(&runner, seed).violations);
    }
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn what_threads_see_is_explained_by_an_order_of_their_requests() {
    run(1..25, |runner, seed| runner.case(seed));
}

/// One test each, so that a failure names it.
macro_rules! scenarios {
    ($($test:ident: $scenario:ident,)*) => {
        $(#[test]
        fn $test() {
            run(1..2, |runner, seed| runner.scenario(Scenario::$scenario, seed));
        })*

        #[test]
        fn no_scenario_is_left_out() {
            assert_eq!([$(Scenario::$scenario),*], Scenario::ALL);
        }
    };
}

scenarios! {
    a_commit_beside_new_tables_loses_nothing: CommitBesideNewTables,
    a_commit_beside_recycled_tables_loses_nothing: CommitBesideRecycledTables,
    a_slice_is_loaded_from_the_table_that_is_written: LoadBesideCopiedTable,
    runs_that_are_set_aside_are_given_out_once: RunsSetAside,
    what_a_disk_grows_by_is_zero_whoever_reads: GrowthBesideReads,
    requests_with_a_small_cache_come_to_their_end: SmallCache,
    a_cache_under_pressure_keeps_to_its_limit: CacheLimit,
    a_flush_that_was_dropped_holds_nobody_up: DroppedFlush,
    a_commit_that_was_dropped_holds_nobody_up: DroppedCommit,
    a_release_that_was_dropped_holds_nobody_up: DroppedRelease,
    a_thread_that_ended_holds_nobody_up: EndedThread,
    an_idle_blocking_handle_holds_up_no_flush: IdleBlockingFlush,
    an_idle_blocking_handle_holds_up_no_close: IdleBlockingClose,
}
