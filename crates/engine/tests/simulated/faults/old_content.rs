//! A read inside a write fails (read-modify-write under O_DIRECT, copy-on-write of a backing image or a snapshot):
//! the write fails, and what was there before is what is there.

use crate::crash::guest::Failures;
use crate::crash::setup::{BASE, Origin, Setup, TOP};
use crate::faults::bench::Bench;
use rustix::io::Errno;
use zebu_engine::storage::IoBuf;
use zebu_engine::{Durability, ErrorKind};
use zebu_sim::{
    FailedEffect, Fault, FaultRule, GuestRequest, GuestResult, OpClass, OpFilter, backing_pattern,
};

/// Writes 512 bytes into a cluster of pattern while reads of `file` fail.
fn read_inside_fails(setup: &Setup, file: &str) {
    let bench = Bench::new(setup, 11);
    let (image, worker) = (&bench.guest.image, &bench.workers[0]);
    // The mapping is in the cache: the only reads left are those of data.
    bench.read_whole().unwrap();
    bench.world.block_on(bench.guest.write(worker, 60 << 10, 4096, Durability::Volatile)).unwrap();
    let fault = Fault::Fail { errno: Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
    bench.world.inject(FaultRule::new(OpFilter::of(OpClass::Read).on_file(file), fault).span(0, 1));
    let op = bench.guest.model.borrow_mut().begin(GuestRequest::Write { offset: 512, len: 512 });
    let mut bytes = vec![0; 512];
    op.value().fill(512, &mut bytes);
    let write = image.write(worker, 512, IoBuf::copy_of(&bytes).into(), Durability::Volatile);
    let (result, _) = bench.world.block_on(write).unwrap();
    let error = result.expect_err("the read inside failed");
    assert_eq!((error.kind(), error.errno()), (ErrorKind::Io, Errno::IO.raw_os_error()), "{error}");
    // Nothing has changed, not even the bytes of the write.
    bench.guest.model.borrow_mut().end(op, GuestResult::FailedUnchanged);
    bench.read_whole().unwrap();
    let (result, bufs) = bench.world.block_on(image.read(worker, 0, IoBuf::zeroed(4096).into())).unwrap();
    result.unwrap();
    let mut got = vec![0; 4096];
    bufs.copy_to(0, &mut got);
    assert_eq!(got, backing_pattern(0, 4096));
    bench.flush().unwrap();
    bench.crash_states(11, 100).unwrap();
    // And the same write works when the disk does.
    bench.world.block_on(bench.guest.write(worker, 512, 512, Durability::Volatile)).unwrap();
    bench.guest.failures.set(Failures::Forbidden);
    assert_eq!(bench.guest.violation.borrow().as_deref(), None);
    bench.flush().unwrap();
    bench.close().unwrap();
}

fn setup(origin: Origin) -> Setup {
    Setup { origin, pattern: 32 << 10, workers: 1, ..Setup::plain() }
}

#[test]
pub(crate) fn a_read_modify_write_under_o_direct() {
    read_inside_fails(&Setup { direct: 4096, ..setup(Origin::Own) }, TOP);
}

#[test]
pub(crate) fn a_copy_of_a_raw_backing_image() {
    read_inside_fails(&setup(Origin::RawBase), BASE);
}

#[test]
pub(crate) fn a_copy_of_a_qcow2_backing_image() {
    read_inside_fails(&setup(Origin::Qcow2Base), BASE);
}

#[test]
pub(crate) fn a_copy_of_what_a_snapshot_shares() {
    read_inside_fails(&setup(Origin::Snapshot), TOP);
}
