//! Free space in more pieces than are looked at, or are known; and files that grow.

use crate::crash::guest::Failures;
use crate::crash::judge::{Leaks, judge};
use crate::crash::limits::Limits;
use crate::crash::setup::{Files, Origin, Setup, TOP};
use crate::faults::bench::Bench;
use crate::faults::space::free_clusters;
use zebu_engine::{Durability, NewSnapshot};
use zebu_sim::{GuestRequest, SimFileConfig};
use zebu_storage::sabotage::{Limit, limit};

const CLUSTER: u64 = 4096;

fn write(bench: &Bench, offset: u64, len: u64) {
    bench.world.block_on(bench.guest.write(&bench.workers[0], offset, len, Durability::Volatile)).unwrap();
}

fn discard(bench: &Bench, offset: u64, len: u64) {
    bench.world.block_on(bench.guest.discard(&bench.workers[0], offset, len)).unwrap();
}

/// Every other of `clusters` goes back, and stays away from the next.
fn fragment(bench: &Bench, clusters: u64) {
    write(bench, 0, clusters * CLUSTER);
    bench.flush().unwrap();
    for cluster in (0..clusters).step_by(2) {
        discard(bench, cluster * CLUSTER, CLUSTER);
    }
    bench.flush().unwrap();
    bench.read_whole().unwrap();
}

fn len_of_file(bench: &Bench) -> u64 {
    bench.world.content(TOP).unwrap().len()
}

fn closed(bench: &Bench, leaks: Leaks) -> Files {
    assert_eq!(bench.guest.violation.borrow_mut().take(), None);
    bench.world.block_on(bench.guest.image.close(&bench.workers[0])).unwrap().unwrap();
    bench.guest.model.borrow_mut().apply(GuestRequest::Flush);
    let files = bench.files();
    judge(&bench.setup, &files, &bench.guest.model.borrow(), leaks).unwrap();
    files
}

/// More free runs than are looked at first, none of them long enough for a window: the file grows, once, and the window lies
/// in what it grew by.
#[test]
pub(crate) fn a_file_grows_once_for_a_window_that_no_free_run_holds() {
    Limits::ORDINARY.set();
    // So many runs are known; an eighth of them used to be looked at.
    limit(Limit::FreeRuns, 64);
    limit(Limit::WindowBytes, u64::MAX);
    let bench = Bench::new(&Setup { cluster_size: CLUSTER, size: 4 << 20, workers: 1, ..Setup::plain() }, 1);
    fragment(&bench, 60);
    let before = len_of_file(&bench);
    write(&bench, 1 << 20, 512 << 10);
    write(&bench, 2 << 20, 512 << 10);
    let grown = len_of_file(&bench) - before;
    assert!(grown <= (1 << 20) + (1 << 20), "for 1 MiB the file grew by {grown} bytes");
    bench.flush().unwrap();
    bench.read_whole().unwrap();
    closed(&bench, Leaks::Forbidden);
    limit(Limit::FreeRuns, u64::MAX);
}

/// More free runs than are known: those that were forgotten are found by their counts before the file grows, and before a
/// request is refused.
#[test]
pub(crate) fn forgotten_space_is_found_again() {
    Limits::ORDINARY.set();
    limit(Limit::FreeRuns, 3);
    limit(Limit::ScanSlices, 1);
    limit(Limit::WindowBytes, 1);
    let setup = Setup {
        cluster_size: CLUSTER,
        refcount_bits: 64,
        slice_size: Some(512),
        size: 4 << 20,
        workers: 1,
        ..Setup::plain()
    };
    let bench = Bench::new(&setup, 1);
    let clusters = 200;
    fragment(&bench, clusters);
    let len = len_of_file(&bench);
    for cluster in (0..clusters).step_by(2) {
        write(&bench, cluster * CLUSTER, CLUSTER);
    }
    assert_eq!(len_of_file(&bench), len, "there was space");
    for cluster in (0..clusters).step_by(2) {
        discard(&bench, cluster * CLUSTER, CLUSTER);
    }
    bench.flush().unwrap();
    bench.read_whole().unwrap();
    bench.world.open(TOP, SimFileConfig { max_len: Some(len), ..SimFileConfig::default() });
    bench.guest.failures.set(Failures::ForSpace);
    for offset in (0..setup.size).step_by(CLUSTER as usize) {
        write(&bench, offset, CLUSTER);
    }
    assert!(!bench.guest.failed.borrow().is_empty(), "the file was never full");
    bench.guest.failures.set(Failures::Forbidden);
    bench.flush().unwrap();
    assert_eq!(free_clusters(&bench), 0, "a write was refused although there was space");
    bench.read_whole().unwrap();
    closed(&bench, Leaks::Forbidden);
    for which in [Limit::FreeRuns, Limit::ScanSlices, Limit::WindowBytes] {
        limit(which, u64::MAX);
    }
}

/// A writer that crashed has counted clusters behind the end of the file. A long table gets its place behind them.
#[test]
pub(crate) fn a_long_table_goes_past_what_is_counted_behind_the_file() {
    Limits::ORDINARY.set();
    let setup = Setup {
        cluster_size: 512,
        refcount_bits: 64,
        slice_size: Some(512),
        workers: 1,
        size: 64 << 21,
        ..Setup::plain()
    };
    for distance in [0, 1, 2, 5] {
        let bench = Bench::new(&setup, 1);
        write(&bench, 0, 64 << 10);
        let mut files = closed(&bench, Leaks::Forbidden);
        let (_, top) = files.iter_mut().find(|(name, _)| name == TOP).unwrap();
        let word = |at: u64| u64::from_be_bytes(top.bytes(at..at + 8).try_into().unwrap());
        let (last, table) = (top.len() / 512 - 1, word(48));
        // The block that counts the last cluster counts some behind it.
        let counted = (last + 1 + distance).min(last / 64 * 64 + 63);
        assert!(counted > last, "the file ends with what a block counts");
        top.write(word(table + last / 64 * 8) + counted % 64 * 8, &1_u64.to_be_bytes());
        let model = bench.guest.model.borrow().clone();
        let bench = Bench::with_files(&setup, &files, 2);
        bench.guest.model.replace(model);
        let made = bench.guest.image.create_snapshot(&bench.workers[0], NewSnapshot::named("long"));
        bench.world.block_on(made).unwrap().unwrap();
        write(&bench, 1 << 20, 2 << 20);
        bench.flush().unwrap();
        bench.read_whole().unwrap();
        closed(&bench, Leaks::Allowed);
    }
}

/// The file system is full before the first flush: what was acknowledged becomes durable, and what is given back is used
/// again.
#[test]
pub(crate) fn a_new_image_on_a_full_file_system_can_be_flushed() {
    Limits::ORDINARY.set();
    limit(Limit::WindowBytes, u64::MAX);
    for cluster_size in [512, CLUSTER, 64 << 10] {
        let bench = Bench::new(&Setup { cluster_size, size: 8 << 20, workers: 1, ..Setup::plain() }, 1);
        let used = bench.world.content(TOP).unwrap().disk_usage();
        bench.world.set_space(TOP, Some(used + (1 << 20)));
        bench.guest.failures.set(Failures::ForSpace);
        let count = |bench: &Bench| bench.guest.failed.borrow().len();
        for offset in (4 << 20..8 << 20).step_by(16 << 10) {
            write(&bench, offset, 16 << 10);
        }
        assert!(count(&bench) > 0, "it was never full");
        bench.flush().unwrap();
        discard(&bench, 4 << 20, 256 << 10);
        bench.flush().unwrap();
        bench.read_whole().unwrap();
        let failed = count(&bench);
        write(&bench, 4 << 20, 64 << 10);
        assert_eq!(count(&bench), failed, "there is room again");
        bench.flush().unwrap();
        closed(&bench, Leaks::Forbidden);
    }
}

/// The file grows for data beyond what the refcount table counts, and the table moves into what it grew by.
#[test]
pub(crate) fn a_table_that_moves_lies_in_what_the_file_has_grown_by() {
    Limits::ORDINARY.set();
    limit(Limit::WindowBytes, 1);
    // The refcount table of one cluster counts 2 MiB, of which data takes the most.
    for data in (1860..2000).step_by(20) {
        let setup = Setup {
            cluster_size: 512,
            refcount_bits: 64,
            slice_size: Some(512),
            workers: 1,
            size: 2600 << 10,
            pattern: data << 10,
            origin: Origin::Own,
            ..Setup::plain()
        };
        let bench = Bench::new(&setup, 1);
        let begin = len_of_file(&bench);
        let step: u64 = 4 << 10;
        for written in (0..64 << 10).step_by(step as usize) {
            write(&bench, (2000 << 10) + written, step);
            // Of 64 clusters each, an L2 table and a refcount block; and tables.
            let used = (written + step) * 66 / 64 + (32 << 10);
            let grown = len_of_file(&bench) - begin;
            assert!(grown <= used + (1 << 20), "the file grew by {grown:#x} bytes for {used:#x}");
        }
        bench.flush().unwrap();
        closed(&bench, Leaks::Forbidden);
    }
    limit(Limit::WindowBytes, u64::MAX);
}

/// The refcount table moves into free space that a block on disk counts. It is counted there before the header names it.
#[test]
pub(crate) fn a_moved_table_is_counted_where_it_lies() {
    Limits::ORDINARY.set();
    limit(Limit::WindowBytes, 1);
    // The refcount table of one cluster counts 2 MiB, which the L1 table would go past.
    for data in [1976, 1980] {
        let setup = Setup {
            cluster_size: 512,
            refcount_bits: 64,
            slice_size: Some(512),
            workers: 1,
            size: 2 << 20,
            pattern: data << 10,
            origin: Origin::Own,
            ..Setup::plain()
        };
        let bench = Bench::new(&setup, 1);
        // Room for the refcount table, and none for an L1 table of 16 clusters.
        discard(&bench, 64 << 10, 6 << 10);
        bench.flush().unwrap();
        bench.read_whole().unwrap();
        let place = || bench.world.content(TOP).unwrap().bytes(48..56);
        let before = place();
        // A length that is not preallocated.
        let resize = bench.guest.resize(&bench.workers[0], (32 << 20) - 512);
        let (mut seen, mut violation) = (0, None);
        let resized = bench.world.block_on_watched(resize, |_| {
            if seen < 8 && violation.is_none() && place() != before {
                seen += 1;
                violation = bench.crash_states(seen, 3).err();
            }
        });
        resized.unwrap();
        assert_eq!(violation, None);
        assert_eq!(seen, 8, "the table stayed where it was");
        bench.flush().unwrap();
        closed(&bench, Leaks::Forbidden);
    }
    limit(Limit::WindowBytes, u64::MAX);
}
