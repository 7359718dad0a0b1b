//! Writes fail while the disk is resized: its length is the old one or the new one, for memory and disk alike, and
//! no table is given away that the header may still name.

use crate::crash::guest::Failures;
use crate::crash::setup::{Origin, Setup};
use crate::faults::bench::Bench;
use rustix::io::Errno;
use zebu_sim::{FailedEffect, Fault, FaultPlan, FaultRule, OpClass, OpFilter, SimRng};

pub(crate) fn resize_with_a_failing(
    class: OpClass,
    n: u64,
    effect: FailedEffect,
    len: u64,
) -> Result<bool, String> {
    // Clusters of 512 bytes: growth moves the L1 table.
    let setup =
        Setup { cluster_size: 512, origin: Origin::Own, size: 64 << 10, pattern: 40 << 10, ..Setup::plain() };
    let bench = Bench::new(&setup, n);
    let mut rng = SimRng::new(n);
    bench.streams(&mut rng, 3, 8, Failures::Forbidden)?;
    bench.flush().map_err(|e| e.to_string())?;
    let errno = if class == OpClass::SetLen { Errno::NOSPC } else { Errno::IO };
    let fault = Fault::Fail { errno: errno.raw_os_error(), effect };
    bench.world.set_faults(FaultPlan::none().with(FaultRule::new(OpFilter::of(class), fault).nth(n)));
    bench.guest.failures.set(Failures::OfTheDisk);
    bench.world.block_on(bench.guest.resize(&bench.workers[0], len)).map_err(|stuck| stuck.to_string())?;
    let failed = !bench.guest.failed.borrow().is_empty();
    bench.world.set_faults(FaultPlan::none());
    if bench.guest.image.virtual_size() != bench.guest.model.borrow().len() {
        return Err(format!("the length is {} in memory", bench.guest.image.virtual_size()));
    }
    bench.crash_states(n, 60)?;
    bench.read_whole()?;
    if class == OpClass::Flush && failed {
        return Ok(true);
    }
    bench.streams(&mut rng, 3, 30, Failures::Forbidden)?;
    bench.crash_states(n, 20)?;
    bench.flush().map_err(|e| e.to_string())?;
    bench.crash_states(n, 20)?;
    bench.close()?;
    Ok(failed)
}

fn every_failure(class: OpClass, len: u64) {
    let mut failures = 0;
    for effect in [FailedEffect::Nothing, FailedEffect::Part, FailedEffect::All] {
        for n in 0..40 {
            match resize_with_a_failing(class, n, effect, len) {
                Ok(true) => failures += 1,
                // The resize has no such operation: all were tried.
                Ok(false) if n > 20 => break,
                Ok(false) => {}
                Err(violation) => panic!("{class:?} {n} {effect:?}: {violation}"),
            }
        }
    }
    eprintln!("{failures} resizes failed");
    assert!(failures > 0, "no resize failed");
}

#[test]
fn a_write_fails_while_the_disk_grows() {
    every_failure(OpClass::Write, 4 << 20);
}

#[test]
fn a_sync_fails_while_the_disk_grows() {
    every_failure(OpClass::Flush, 4 << 20);
}

#[test]
fn a_write_fails_while_the_disk_shrinks() {
    every_failure(OpClass::Write, 20 << 10);
}

#[test]
fn a_sync_fails_while_the_disk_shrinks() {
    every_failure(OpClass::Flush, 20 << 10);
}
