//! A failed sync: what is durable is unknown, so nothing more is written until the image is opened again.

use crate::crash::setup::{DATA, Setup, TOP};
use crate::faults::bench::Bench;
use rustix::io::Errno;
use zebu_engine::storage::IoBuf;
use zebu_engine::{Durability, ErrorKind, ZeroMode};
use zebu_sim::{FailedEffect, Fault, FaultRule, OpClass, OpFilter};

fn fail_the_nth_sync_of(bench: &Bench, file: &str, n: u64) {
    let fault = Fault::Fail { errno: Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
    bench.world.inject(FaultRule::new(OpFilter::of(OpClass::Flush).on_file(file), fault).nth(n));
}

fn write(bench: &Bench, offset: u64, len: u64) {
    bench.world.block_on(bench.guest.write(&bench.workers[0], offset, len, Durability::Volatile)).unwrap();
    assert_eq!(bench.guest.violation.borrow().as_deref(), None);
}

/// Everything that changes the image is refused by name; reading goes on.
fn is_poisoned(bench: &Bench) {
    let (image, worker) = (&bench.guest.image, &bench.workers[0]);
    bench
        .world
        .block_on(async {
            for _ in 0..2 {
                let buf = IoBuf::zeroed(512).into();
                let results = [
                    ("write", image.write(worker, 0, buf, Durability::Volatile).await.0),
                    ("zero", image.write_zeroes(worker, 0, 4096, ZeroMode::Unmap).await),
                    ("discard", image.discard(worker, 0, 4096).await),
                    ("flush", image.flush(worker).await),
                    (
                        "resize",
                        image
                            .resize(
                                worker,
                                1 << 20,
                                zebu_engine::Shrink::Refuse,
                                zebu_engine::Preallocation::Off,
                            )
                            .await,
                    ),
                ];
                for (what, result) in results {
                    let error = result.expect_err(what);
                    assert_eq!(error.kind(), ErrorKind::Poisoned, "{what}: {error}");
                    assert!(error.is_poisoned() && !error.is_retryable(), "{what}: {error}");
                    assert!(error.to_string().contains("open the image again"), "{what}: {error}");
                }
            }
        })
        .unwrap();
    bench.read_whole().unwrap();
}

fn every_sync_of_a_flush(setup: &Setup, file: &str) {
    let mut failed = 0;
    for n in 0..4 {
        let bench = Bench::new(setup, n);
        write(&bench, 0, 8192);
        bench.flush().unwrap();
        write(&bench, 4096, 8192);
        fail_the_nth_sync_of(&bench, file, n);
        let Err(error) = bench.flush() else { continue };
        failed += 1;
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert_eq!(error.errno(), Errno::IO.raw_os_error());
        is_poisoned(&bench);
        bench.crash_states(n, 200).unwrap();
        let closed = bench.world.block_on(bench.guest.image.close(&bench.workers[0])).unwrap();
        assert!(closed.is_err_and(|e| e.is_poisoned()));
        // Opened again, it works again, with all that was flushed.
        let again = Bench::with_files(setup, &bench.files(), n);
        let mut model = bench.guest.model.borrow().clone();
        model.crash();
        *again.guest.model.borrow_mut() = model;
        again.read_whole().unwrap();
        write(&again, 8192, 4096);
        again.flush().unwrap();
        again.close().unwrap();
    }
    assert!(failed > 0, "no sync failed");
}

#[test]
pub(crate) fn a_failed_sync_is_final_until_the_image_is_opened_again() {
    every_sync_of_a_flush(&Setup::plain(), TOP);
}

#[test]
pub(crate) fn a_failed_sync_of_the_data_file_is_as_final() {
    every_sync_of_a_flush(&Setup { external_data: true, ..Setup::plain() }, DATA);
}
