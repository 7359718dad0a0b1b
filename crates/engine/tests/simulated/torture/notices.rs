//! Tests of the tests: the strict mode notices a defence that is taken away, and a failing plan becomes a small one.

use crate::torture::plan::{Plan, Size, Watch};
use crate::torture::shrink::{outcome, pieces, shrunk};
use zebu_storage::sabotage::{Fault, under};

const SIZE: Size = Size { lives: 1, phases: 2, streams: 4, requests: 15 };

fn plan(seed: u64) -> Plan {
    Plan::random(seed, SIZE, Watch::EveryStep, |setup| {
        setup.direct != 4096 && setup.cluster_size <= 4096 && setup.size <= 128 << 10
    })
}

/// The first seed, of so many, whose plan fails under the fault.
fn caught(fault: Fault, seeds: u64) -> Option<(Plan, String)> {
    (0..seeds).find_map(|seed| {
        let plan = plan(seed);
        let violation = under(Some(fault), || outcome(&plan)).0.err()?;
        Some((plan, violation))
    })
}

/// Each of these leaves, for moments, a state on disk that a crash must not find. No crash state is sampled here.
#[test]
fn the_strict_mode_notices_missing_barriers_and_orders() {
    for fault in [
        Fault::SkipBarrier1,
        Fault::SkipBarrier2,
        Fault::L1BeforeItsTable,
        Fault::WriteTheLiveBlock,
        Fault::ReleaseWithoutCommit,
        Fault::LowerBeforePunch,
        Fault::LinkBeforeData,
        Fault::ForgetDataBarrier,
        Fault::SkipRaise,
        Fault::WindowOffByOne,
        Fault::JoinFrozenCommit,
    ] {
        let Some((plan, violation)) = caught(fault, 600) else { panic!("{fault:?} is not noticed") };
        let first = violation.lines().next().unwrap_or_default();
        eprintln!("{fault:?}: {first}");
        outcome(&plan).unwrap_or_else(|e| panic!("without {fault:?} it fails as well: {e}"));
    }
}

#[test]
fn a_failing_plan_becomes_small() {
    let (plan, _) = caught(Fault::ReleaseWithoutCommit, 60).expect("it is noticed");
    let (small, again) = under(Some(Fault::ReleaseWithoutCommit), || {
        let small = shrunk(&plan);
        let again = outcome(&small);
        (small, again)
    })
    .0;
    assert!(again.is_err(), "it still fails");
    let (count, of) = (pieces(&small).len(), pieces(&plan).len());
    assert!(count <= 8 && count < of, "{count} of {of} requests are left:\n{small}");
}
