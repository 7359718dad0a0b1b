//! Crash replay: every state that a crash may leave is consistent, holds what was flushed, and can be gone on from.

use crate::crash::judge::{Leaks, judge, judge_by_qemu};
use crate::crash::life::{Extent, Tally, live};
use crate::crash::limits::Limits;
use crate::crash::setup::{Origin, Setup};
use zebu_sim::{Seeds, SimRng};

const EXTENT: Extent =
    Extent { phases: 3, streams: 4, requests: 12, moments: 4, states: 8, generations: 2, by_qemu: 100 };

fn run(seed: u64, setup: &Setup, extent: Extent, tally: &mut Tally) -> Result<(), String> {
    let mut rng = SimRng::new(seed ^ 0x6372_6173_6800_0000);
    Limits::of_seed(seed).set();
    let files = setup.make(seed);
    tally.seeds += 1;
    live(setup, &files, setup.model(), &mut rng, extent, tally)
}

/// Crash states that a test is to judge at least, if the environment says so.
fn states_wanted() -> Option<u64> {
    std::env::var("ZEBU_CRASH_STATES").ok().map(|text| text.parse().expect("ZEBU_CRASH_STATES is a number"))
}

fn run_seeds(default_seeds: u64, setup: impl Fn(&mut SimRng) -> Setup) {
    let wanted = states_wanted();
    let seeds = Seeds::new(if wanted.is_some() { u64::MAX } else { default_seeds });
    let mut tally = Tally { simulated: seeds.tally().clone(), ..Tally::default() };
    seeds.run_until(|seed| {
        let setup = setup(&mut SimRng::new(seed));
        if let Err(violation) = run(seed, &setup, EXTENT, &mut tally) {
            panic!("seed {seed}, {}: {violation}\n{setup:?}", Limits::of_seed(seed));
        }
        wanted.is_some_and(|wanted| tally.states >= wanted)
    });
    eprintln!("{tally:?}");
}

#[test]
fn a_plain_image_survives_crashes() {
    run_seeds(10, |_| Setup::plain());
}

#[test]
fn bitmaps_know_what_crashes_leave() {
    run_seeds(20, |rng| {
        loop {
            let setup = Setup { bitmaps: true, ..Setup::random(rng) };
            if setup.version == 3 {
                return setup;
            }
        }
    });
}

#[test]
fn every_image_survives_crashes() {
    run_seeds(60, Setup::random);
}

/// A write fills the old host cluster of zeroes again while an earlier write in place is still on its way there.
#[test]
fn zeroes_hold_whatever_lands_late() {
    let seed = 1_795_298_677_039_000_035;
    run(seed, &Setup::random(&mut SimRng::new(seed)), EXTENT, &mut Tally::default()).unwrap();
}

#[test]
fn the_images_are_sound_before_anything_happens() {
    for seed in 0..40 {
        let mut rng = SimRng::new(seed);
        let mut setup = Setup::random(&mut rng);
        if seed % 2 == 0 && setup.refcount_bits > 1 && !setup.external_data {
            setup.origin = Origin::Snapshot;
            setup.pattern = (setup.size / 2) & !511;
        }
        let files = setup.make(seed);
        judge(&setup, &files, &setup.model(), Leaks::Forbidden)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}\n{setup:?}"));
        judge_by_qemu(&files, Leaks::Forbidden).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{setup:?}"));
    }
}
