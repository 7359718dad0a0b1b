//! Any one operation of any kind fails under a random stream: the requests concerned fail, nothing else does, nothing
//! acknowledged is lost, and the image works on.

use crate::crash::guest::Failures;
use crate::crash::setup::Setup;
use crate::faults::bench::Bench;
use rustix::io::Errno;
use zebu_engine::ErrorKind;
use zebu_sim::{
    FailedEffect, Fault, FaultPlan, FaultRates, FaultRule, OpClass, OpFilter, Seeds, SimRng, Tally,
};

const STREAMS: u64 = 4;

/// One stream with one failing operation. Returns how many requests failed.
pub(crate) fn one_failure(seed: u64, class: OpClass, errno: Errno, tally: &Tally) -> Result<usize, String> {
    let mut rng = SimRng::new(seed ^ 0x6661_756c_7400_0000);
    let setup = Setup::random(&mut rng);
    let bench = Bench::new(&setup, seed);
    bench.count_in(tally);
    let often = if matches!(class, OpClass::Read | OpClass::Write) { 60 } else { 6 };
    let effect = match errno {
        Errno::NOSPC => FailedEffect::Nothing,
        _ => *rng.pick(&[FailedEffect::Nothing, FailedEffect::Part, FailedEffect::All]),
    };
    let fault = Fault::Fail { errno: errno.raw_os_error(), effect };
    let rule = FaultRule::new(OpFilter::of(class), fault).nth(rng.below(often));
    bench.world.set_faults(FaultPlan::random(FaultRates { delays: 50, ..FaultRates::default() }).with(rule));
    let said = |e: String| format!("{e}\n{class:?} {errno:?} {effect:?} {setup:?}");
    bench.streams(&mut rng, STREAMS, 14, Failures::OfTheDisk).map_err(said)?;
    bench.world.set_faults(FaultPlan::none());
    bench.read_whole().map_err(said)?;
    let failed = bench.guest.failed.borrow().clone();
    let want = if errno == Errno::NOSPC { ErrorKind::NoSpace } else { ErrorKind::Io };
    if class == OpClass::Flush {
        // What is durable is unknown: nothing is promised but what was flushed before.
        bench.crash_states(rng.next_u64(), 8).map_err(said)?;
        return Ok(failed.len());
    }
    if failed.len() > STREAMS as usize || failed.iter().any(|kind| *kind != want) {
        return Err(said(format!("one failure of the disk failed {failed:?}")));
    }
    bench.streams(&mut rng, STREAMS, 8, Failures::Forbidden).map_err(said)?;
    bench.close().map_err(said)?;
    Ok(failed.len())
}

fn over_seeds(class: OpClass, errno: Errno, seeds: u64) {
    let mut failed = 0;
    let all = Seeds::new(seeds);
    let ran = all.run(|seed| match one_failure(seed, class, errno, all.tally()) {
        Ok(requests) => failed += requests,
        Err(violation) => panic!("seed {seed}: {violation}"),
    });
    eprintln!("{class:?} {errno:?}: {failed} requests failed in {ran} seeds");
    assert!(failed > 0 || ran < seeds, "no failure was felt: the test shows nothing");
}

/// As `over_seeds`, where no request needs to fail.
fn unfelt(class: OpClass, errno: Errno, seeds: u64) {
    let all = Seeds::new(seeds);
    all.run(|seed| {
        one_failure(seed, class, errno, all.tally()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    });
}

#[test]
fn a_read_fails() {
    over_seeds(OpClass::Read, Errno::IO, 40);
}

#[test]
fn a_write_fails() {
    over_seeds(OpClass::Write, Errno::IO, 60);
}

#[test]
fn a_write_finds_no_space() {
    over_seeds(OpClass::Write, Errno::NOSPC, 60);
}

/// Growth ahead of use is tried again with less.
#[test]
fn a_growth_finds_no_space() {
    unfelt(OpClass::SetLen, Errno::NOSPC, 30);
}

#[test]
fn a_growth_fails() {
    unfelt(OpClass::SetLen, Errno::IO, 30);
}

/// Space may be found elsewhere.
#[test]
fn reserving_space_finds_none() {
    unfelt(OpClass::Allocate, Errno::NOSPC, 30);
}

#[test]
fn reserving_space_fails() {
    over_seeds(OpClass::Allocate, Errno::IO, 30);
}

#[test]
fn zeroing_a_range_fails() {
    over_seeds(OpClass::ZeroRange, Errno::IO, 80);
}

#[test]
fn zeroing_a_range_finds_no_space() {
    over_seeds(OpClass::ZeroRange, Errno::NOSPC, 80);
}

#[test]
fn a_sync_fails() {
    over_seeds(OpClass::Flush, Errno::IO, 60);
}

/// A punch that fails leaks nothing and fails no request of an image: its space is used again all the same. (Of an
/// external data file, the punch is the request.)
#[test]
fn a_punch_fails() {
    unfelt(OpClass::Punch, Errno::IO, 30);
}

/// Many failures of all kinds but of syncs.
#[test]
fn everything_fails_now_and_then() {
    let seeds = Seeds::new(60);
    seeds.run(|seed| many_failures(seed, seeds.tally()).unwrap_or_else(|e| panic!("seed {seed}: {e}")));
}

pub(crate) fn many_failures(seed: u64, tally: &Tally) -> Result<(), String> {
    let mut rng = SimRng::new(seed ^ 0x6d61_6e79_0000);
    let setup = Setup::random(&mut rng);
    let bench = Bench::new(&setup, seed);
    bench.count_in(tally);
    let said = |e: String| format!("{e}\n{setup:?}");
    bench.world.set_faults(FaultPlan::random(FaultRates {
        read_errors: 20,
        write_errors: 40,
        no_space: 10,
        fallocate_errors: 50,
        splits: 100,
        delays: 50,
        ..FaultRates::default()
    }));
    bench.streams(&mut rng, STREAMS, 20, Failures::OfTheDisk).map_err(said)?;
    bench.world.set_faults(FaultPlan::none());
    bench.read_whole().map_err(said)?;
    bench.streams(&mut rng, STREAMS, 8, Failures::Forbidden).map_err(said)?;
    bench.close().map_err(said)
}
