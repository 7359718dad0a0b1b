//! The runs over seeds.

use crate::crash::setup::{Origin, Setup};
use crate::torture::plan::{Plan, Size, Watch};
use crate::torture::shrink::{outcome, report};
use zebu_sim::Seeds;

/// Runs the plan of each seed.
fn run(default_seeds: u64, plan: impl Fn(u64) -> Plan) {
    let seeds = Seeds::new(default_seeds);
    seeds.run(|seed| run_plan(seed, &Plan { tally: seeds.tally().clone(), ..plan(seed) }));
}

/// Runs one plan; if it fails it is shrunk and shown.
fn run_plan(seed: u64, plan: &Plan) {
    if let Err(violation) = outcome(plan) {
        panic!("seed {seed}: {}", report(plan, &violation));
    }
}

fn many_requests(seed: u64) -> Plan {
    Plan::random(seed, Size { lives: 1, phases: 4, streams: 6, requests: 150 }, Watch::Reads, |_| true)
}

/// Many requests, no crashes: what reads return, what is there at the end.
#[test]
fn random_operations() {
    run(20, many_requests);
}

/// A cluster is written in two parts, and the second is done, linked and overwritten before the first one is.
#[test]
fn a_cluster_of_streams_is_not_freed_while_an_earlier_part_is_written() {
    let seed = 1_795_289_335_011_000_031;
    run_plan(seed, &many_requests(seed));
}

/// The second of the two parts that hold a stream can't be written, and the stream is read.
#[test]
fn a_stream_whose_end_could_not_be_written_can_be_read() {
    let seed = 1_795_361_847_026_000_356;
    run_plan(seed, &many_requests(seed));
}

/// After each step, every crash state at once.
#[test]
fn invariants_at_every_step() {
    let size = Size { lives: 2, phases: 3, streams: 4, requests: 12 };
    // The sectors of a disk that writes 4096 bytes as a whole are not independent. All of a disk is looked at in each step.
    run(15, |seed| {
        Plan::random(seed, size, Watch::EveryStep, |setup| setup.direct != 4096 && setup.size <= 256 << 10)
    });
}

/// The same on small images in small clusters, where the same places are used again and again.
#[test]
fn invariants_at_every_step_of_crowded_images() {
    let size = Size { lives: 2, phases: 3, streams: 5, requests: 25 };
    run(8, |seed| {
        Plan::random(seed, size, Watch::EveryStep, |setup| {
            setup.direct != 4096 && setup.cluster_size <= 4096 && setup.size <= 96 << 10
        })
    });
}

/// The write of a block of the L1 table fails, though the disk has taken it: the new table that it names can be reached.
#[test]
fn a_failed_write_of_an_l1_entry_may_have_arrived() {
    let size = Size { lives: 2, phases: 3, streams: 5, requests: 25 };
    let crowded =
        |setup: &Setup| setup.direct != 4096 && setup.cluster_size <= 4096 && setup.size <= 96 << 10;
    for seed in [1_795_289_335_060_000_121, 1_795_289_335_043_000_063] {
        run_plan(seed, &Plan::random(seed, size, Watch::EveryStep, crowded));
    }
}

/// Crash states one by one, opened, checked and read as after a real crash, and gone on from.
#[test]
fn crash_states() {
    let size = Size { lives: 3, phases: 3, streams: 4, requests: 12 };
    let watch = Watch::Crashes { moments: 6, states: 24 };
    run(8, |seed| Plan { by_qemu: 100, ..Plan::random(seed, size, watch, small) });
}

/// Many requests to encrypted images.
#[test]
fn random_operations_on_encrypted_images() {
    run(10, |seed| many_requests(seed).encrypted());
}

/// Crash states of encrypted images.
#[test]
fn crash_states_of_encrypted_images() {
    let size = Size { lives: 3, phases: 3, streams: 4, requests: 12 };
    let watch = Watch::Crashes { moments: 6, states: 24 };
    run(6, |seed| Plan::random(seed, size, watch, small).encrypted());
}

/// After each step, every crash state of an encrypted image at once.
#[test]
fn invariants_at_every_step_of_encrypted_images() {
    let size = Size { lives: 2, phases: 3, streams: 5, requests: 25 };
    run(8, |seed| {
        let chosen = |setup: &Setup| setup.direct != 4096 && setup.size <= 256 << 10;
        Plan::random(seed, size, Watch::EveryStep, chosen).encrypted()
    });
}

/// Many requests to images into which reads copy what they find below.
#[test]
fn random_operations_with_copies_on_read() {
    let size = Size { lives: 1, phases: 4, streams: 6, requests: 150 };
    run(15, |seed| Plan::random(seed, size, Watch::Reads, Setup::is_backed).copying());
}

/// Crash states of images into which reads copy what they find below.
#[test]
fn crash_states_with_copies_on_read() {
    let size = Size { lives: 3, phases: 3, streams: 4, requests: 12 };
    let watch = Watch::Crashes { moments: 6, states: 24 };
    run(8, |seed| {
        let backed = |setup: &Setup| setup.is_backed() && setup.size <= 512 << 10;
        Plan { by_qemu: 100, ..Plan::random(seed, size, watch, backed).copying() }
    });
}

/// After each step, every crash state at once of an image into which reads copy what they find below.
#[test]
fn invariants_at_every_step_with_copies_on_read() {
    let size = Size { lives: 2, phases: 3, streams: 5, requests: 25 };
    run(8, |seed| {
        let backed = |setup: &Setup| setup.is_backed() && setup.direct != 4096 && setup.size <= 256 << 10;
        Plan::random(seed, size, Watch::EveryStep, backed).copying()
    });
}

/// A write that a crash undid left its data in the raw data file, in the cluster in which the disk ended; growing the disk
/// with preallocation links that cluster.
#[test]
fn a_growing_disk_does_not_show_a_write_that_a_crash_undid() {
    let size = Size { lives: 3, phases: 3, streams: 4, requests: 12 };
    let watch = Watch::Crashes { moments: 6, states: 24 };
    let seed = 3_736_494_680_047_000_022;
    run_plan(seed, &Plan { by_qemu: 100, ..Plan::random(seed, size, watch, small) });
}

/// Images whose states are quickly read.
fn small(setup: &Setup) -> bool {
    setup.size <= 512 << 10 && setup.origin != Origin::DeepChain
}
