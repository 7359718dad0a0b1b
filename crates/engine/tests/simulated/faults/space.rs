//! Where space comes from in images that random streams hardly make.

use crate::crash::guest::Failures;
use crate::crash::judge::{Leaks, judge};
use crate::crash::setup::{Files, Setup, TOP};
use crate::faults::bench::Bench;
use zebu_engine::storage::IoBuf;
use zebu_engine::{Durability, ErrorKind, NewSnapshot, SnapshotRef};
use zebu_sim::{FailedEffect, Fault, FaultPlan, FaultRule, GuestRequest, OpClass, OpFilter, SimFileConfig};
use zebu_storage::sabotage::{self, Limit};

/// Clusters and counts so that the refcount table is long for what it counts: 64 entries in each of its clusters, each of
/// them for 64 clusters.
fn small_clusters(size: u64) -> Setup {
    Setup { cluster_size: 512, refcount_bits: 64, slice_size: Some(512), workers: 1, size, ..Setup::plain() }
}

fn write(bench: &Bench, offset: u64, len: u64) {
    bench.world.block_on(bench.guest.write(&bench.workers[0], offset, len, Durability::Volatile)).unwrap();
}

fn discard(bench: &Bench, offset: u64, len: u64) {
    bench.world.block_on(bench.guest.discard(&bench.workers[0], offset, len)).unwrap();
}

/// The content of the files after the image was closed; nothing in them is lost.
fn closed(bench: &Bench) -> Files {
    assert_eq!(bench.guest.violation.borrow_mut().take(), None);
    bench.world.block_on(bench.guest.image.close(&bench.workers[0])).unwrap().unwrap();
    bench.guest.model.borrow_mut().apply(GuestRequest::Flush);
    let files = bench.files();
    judge(&bench.setup, &files, &bench.guest.model.borrow(), Leaks::Forbidden).unwrap();
    files
}

/// An image in `files`, for a guest that knows what `earlier` wrote.
fn opened_again(earlier: &Bench, files: &Files) -> Bench {
    let bench = Bench::with_files(&earlier.setup, files, 2);
    bench.guest.model.replace(earlier.guest.model.borrow().clone());
    bench
}

/// How many counts of 64 bits are 0, of clusters that the file has.
pub(crate) fn free_clusters(bench: &Bench) -> u64 {
    let (top, cluster) = (bench.world.content(TOP).unwrap(), bench.setup.cluster_size);
    let words = |at: u64, len: u64| -> Vec<u64> {
        top.bytes(at..at + len).chunks(8).map(|word| u64::from_be_bytes(word.try_into().unwrap())).collect()
    };
    let table_clusters = words(56, 8)[0] >> 32;
    let blocks = words(words(48, 8)[0], table_clusters * cluster);
    let counts = blocks.iter().flat_map(|block| match block {
        0 => vec![0; cluster as usize / 8],
        block => words(*block, cluster),
    });
    counts.take((top.len() / cluster) as usize).filter(|count| *count == 0).count() as u64
}

/// Where the table was is given to data, if not before then when the file may not grow: it is neither lost nor taken for a
/// table any more.
#[test]
fn a_refcount_table_that_moved_leaves_its_place_to_others() {
    let bench = Bench::new(&small_clusters(8 << 20), 1);
    let most = 5 << 20;
    for offset in (0..most).step_by(256 << 10) {
        write(&bench, offset, 256 << 10);
        bench.flush().unwrap();
    }
    bench.crash_states(1, 8).unwrap();
    discard(&bench, 0, most);
    bench.flush().unwrap();
    let max_len = Some(bench.world.content(TOP).unwrap().len());
    bench.world.open(TOP, SimFileConfig { max_len, ..SimFileConfig::default() });
    bench.guest.failures.set(Failures::ForSpace);
    for offset in (0..bench.setup.size).step_by(4096) {
        write(&bench, offset, 4096);
    }
    assert!(!bench.guest.failed.borrow().is_empty(), "the file was never full");
    bench.guest.failures.set(Failures::Forbidden);
    bench.flush().unwrap();
    assert_eq!(free_clusters(&bench), 0, "free clusters that the refcount table can count");
    bench.read_whole().unwrap();
    closed(&bench);
}

/// It moves seven times, and each time its refcount blocks are new.
#[test]
fn a_refcount_table_grows_with_the_file() {
    let bench = Bench::new(&small_clusters(40 << 20), 1);
    for offset in (0..bench.setup.size).step_by(512 << 10) {
        write(&bench, offset, 512 << 10);
        if offset % (4 << 20) == 0 {
            bench.flush().unwrap();
        }
    }
    bench.read_whole().unwrap();
    closed(&bench);
}

/// A mapping that points to where the refcount table will have moved to is no way to write to the table.
#[test]
fn a_refcount_table_that_moved_is_written_by_nobody_else() {
    let (guest, fills) = (6 << 20, 3 << 20);
    let table = |bench: &Bench| {
        let top = bench.world.content(TOP).unwrap();
        u64::from_be_bytes(top.bytes(48..56).try_into().unwrap())
    };
    let setup = small_clusters(8 << 20);
    let bench = Bench::new(&setup, 1);
    write(&bench, guest, 512);
    let mut files = closed(&bench);
    let moves = |files: &Files| {
        let bench = opened_again(&bench, files);
        let before = table(&bench);
        write(&bench, 0, fills);
        bench.flush().unwrap();
        assert_ne!(table(&bench), before);
        bench
    };
    let moved = table(&moves(&files));
    // The entry of the guest's cluster, of 64 in each table.
    let (_, top) = files.iter_mut().find(|(name, _)| name == TOP).unwrap();
    let word = |at: u64| u64::from_be_bytes(top.bytes(at..at + 8).try_into().unwrap());
    let offset = |entry: u64| entry & 0x00ff_ffff_ffff_fe00;
    let cluster = guest / setup.cluster_size;
    let entry = offset(word(word(40) + cluster / 64 * 8)) + cluster % 64 * 8;
    assert_ne!(offset(word(entry)), 0);
    top.write(entry, &(moved | 1 << 63).to_be_bytes());
    let bench = moves(&files);
    assert_eq!(table(&bench), moved);
    let data = IoBuf::copy_of(&[7; 512]).into();
    let written = bench.guest.image.write(&bench.workers[0], guest, data, Durability::Volatile);
    let (result, _) = bench.world.block_on(written).unwrap();
    let error = result.expect_err("a write on the refcount table");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("refcount table"), "{error}");
}

/// Where the refcount table can't get any longer, what it counts is used to the end, and no file grows in vain.
#[test]
fn a_refcount_table_of_the_largest_size_ends_the_growth_of_the_file() {
    // Two clusters of entries: 4 MiB are counted.
    sabotage::limit(Limit::RefcountTableBytes, 1024);
    let counted = 4 << 20;
    let bench = Bench::new(&small_clusters(8 << 20), 1);
    bench.world.open(TOP, SimFileConfig { max_len: Some(256 << 20), ..SimFileConfig::default() });
    bench.guest.failures.set(Failures::ForSpace);
    for offset in (0..bench.setup.size).step_by(4096) {
        write(&bench, offset, 4096);
    }
    assert!(!bench.guest.failed.borrow().is_empty(), "the file was never full");
    bench.guest.failures.set(Failures::Forbidden);
    bench.flush().unwrap();
    let len = bench.world.content(TOP).unwrap().len();
    assert!(len < 2 * counted, "the file has {len} bytes");
    assert!(free_clusters(&bench) < 8, "{} are counted and free", free_clusters(&bench));
    // There is room again.
    discard(&bench, 0, 1 << 20);
    bench.flush().unwrap();
    write(&bench, 512 << 10, 256 << 10);
    bench.read_whole().unwrap();
    closed(&bench);
    sabotage::limit(Limit::RefcountTableBytes, u64::MAX);
}

/// L1 tables of snapshots, of as many clusters as a refcount block counts, and one less, and more.
#[test]
fn a_table_as_long_as_what_a_refcount_block_counts_is_counted_whole() {
    for clusters in [62, 63, 64, 65, 96, 130] {
        let bench = Bench::new(&small_clusters(clusters << 21), 1);
        for round in 0..4 {
            write(&bench, round << 20, 64 << 10);
            let snapshot = NewSnapshot::named(format!("snapshot {round}"));
            let made = bench.guest.image.create_snapshot(&bench.workers[0], snapshot);
            bench.world.block_on(made).unwrap().unwrap();
        }
        let gone = SnapshotRef::Name("snapshot 1".to_owned());
        let deleted = bench.guest.image.delete_snapshot(&bench.workers[0], &gone);
        bench.world.block_on(deleted).unwrap().unwrap();
        write(&bench, 0, 4 << 20);
        bench.flush().unwrap();
        closed(&bench);
    }
}

/// Files of all lengths around the one from which on the table does not fit into what the refcount table counts.
#[test]
fn a_long_table_at_the_border_of_what_the_refcount_table_counts_is_counted_whole() {
    // One cluster of 64 entries counts 64 * 64 clusters; the L1 table has 64.
    let counted = 64 * 64;
    let setup = small_clusters(64 << 21);
    for distance in 60..74 {
        let bench = Bench::new(&setup, 1);
        write(&bench, 0, 4096);
        let mut files = closed(&bench);
        let (_, top) = files.iter_mut().find(|(name, _)| name == TOP).unwrap();
        top.set_len((counted - distance) * setup.cluster_size);
        let bench = opened_again(&bench, &files);
        let made = bench.guest.image.create_snapshot(&bench.workers[0], NewSnapshot::named("then"));
        bench.world.block_on(made).unwrap().unwrap();
        write(&bench, 0, 64 << 10);
        bench.flush().unwrap();
        bench.crash_states(1, 4).unwrap();
        closed(&bench);
    }
}

/// The free clusters of an image that is opened are looked for little by little. Where the file may not grow, the last
/// one is found before a request is refused.
#[test]
fn free_clusters_deep_in_a_full_file_are_found() {
    let setup = small_clusters(6 << 20);
    let bench = Bench::new(&setup, 1);
    let (deep, free) = (setup.size / 8 * 7, 64 << 10);
    write(&bench, 0, setup.size);
    bench.flush().unwrap();
    discard(&bench, deep, free);
    let files = closed(&bench);
    let len = files.iter().find(|(name, _)| name == TOP).unwrap().1.len();
    let bench = opened_again(&bench, &files);
    bench.world.open(TOP, SimFileConfig { max_len: Some(len), ..SimFileConfig::default() });
    write(&bench, deep, free);
    bench.flush().unwrap();
    bench.read_whole().unwrap();
    closed(&bench);
}

/// A copy of a file may have been cut short. A write to what is past its end makes the file reach there first: what it grows
/// by later begins behind it.
#[test]
fn a_file_that_was_cut_short_reaches_again_to_what_is_written() {
    let bench = Bench::new(&Setup { workers: 1, ..Setup::plain() }, 1);
    write(&bench, 0, 32 << 10);
    let mut files = closed(&bench);
    let (_, top) = files.iter_mut().find(|(name, _)| name == TOP).unwrap();
    top.set_len(top.len() - (8 << 10) - 512);
    let bench = opened_again(&bench, &files);
    write(&bench, 0, 32 << 10);
    write(&bench, 64 << 10, 32 << 10);
    bench.flush().unwrap();
    bench.crash_states(1, 16).unwrap();
    bench.read_whole().unwrap();
    closed(&bench);
}

/// The same, with counts that say that the clusters are free: they would be given to somebody else as well.
#[test]
fn a_cluster_past_the_end_that_nobody_counts_is_not_written() {
    let bench = Bench::new(&Setup { workers: 1, ..Setup::plain() }, 1);
    write(&bench, 0, 32 << 10);
    let mut files = closed(&bench);
    let (_, top) = files.iter_mut().find(|(name, _)| name == TOP).unwrap();
    let clusters = top.len() / bench.setup.cluster_size;
    let word = |at: u64| u64::from_be_bytes(top.bytes(at..at + 8).try_into().unwrap());
    let block = word(word(48));
    top.write(block + (clusters - 2) * 2, &[0; 4]);
    top.set_len((clusters - 2) * bench.setup.cluster_size);
    let bench = opened_again(&bench, &files);
    let bufs = IoBuf::zeroed(32 << 10).into();
    let (result, _) = bench
        .world
        .block_on(bench.guest.image.write(&bench.workers[0], 0, bufs, Durability::Volatile))
        .unwrap();
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("refcount 0"), "{error}");
}

/// Of plain clusters, in an image without compressed ones and in one with them, where all share a window.
#[test]
fn clusters_that_come_and_go_are_counted() {
    for gather_memory in [None, Some(16 << 10)] {
        let bench = Bench::new(&Setup { workers: 1, gather_memory, ..Setup::plain() }, 1);
        if gather_memory.is_some() {
            let write = bench.guest.write_compressed(&bench.workers[0], 128 << 10, 4096, Durability::Durable);
            bench.world.block_on(write).unwrap();
        }
        let counts = || {
            let stats = bench.guest.image.stats();
            (stats.clusters_allocated, stats.clusters_released)
        };
        let before = counts();
        for _ in 0..2 {
            write(&bench, 0, 16 << 10);
            bench.flush().unwrap();
        }
        assert_eq!(counts(), (before.0 + 4, before.1));
        discard(&bench, 0, 12 << 10);
        bench.flush().unwrap();
        // The space goes back after the flush.
        bench.read_whole().unwrap();
        assert_eq!(counts(), (before.0 + 4, before.1 + 3));
        closed(&bench);
    }
}

/// A window whose counts lie in several slices: one of them can't be read, the others are raised already. What is given back
/// then is free by its counts, too, or the next window would call the image corrupt.
#[test]
pub(crate) fn a_window_that_could_not_be_counted_is_given_back_whole() {
    let setup = Setup {
        cluster_size: 4096,
        refcount_bits: 64,
        slice_size: Some(512),
        cache_size: Some(1216),
        workers: 1,
        size: 4 << 20,
        ..Setup::plain()
    };
    // The counts of a small window lie in one slice.
    sabotage::limit(Limit::WindowBytes, u64::MAX);
    let mut failed = 0;
    for nth in 0..30 {
        let bench = Bench::new(&setup, nth);
        let fault =
            Fault::Fail { errno: rustix::io::Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
        let rule = FaultRule::new(OpFilter::of(OpClass::Read).on_file(TOP), fault).nth(nth);
        bench.world.set_faults(FaultPlan::none().with(rule));
        bench.guest.failures.set(Failures::OfTheDisk);
        for offset in (0..1 << 20).step_by(64 << 10) {
            write(&bench, offset, 64 << 10);
        }
        failed += bench.guest.failed.borrow().len();
        bench.world.set_faults(FaultPlan::none());
        bench.guest.failures.set(Failures::Forbidden);
        for offset in (0..setup.size).step_by(64 << 10) {
            write(&bench, offset, 64 << 10);
        }
        bench.read_whole().unwrap();
        let violation = bench.guest.violation.borrow_mut().take();
        assert_eq!(violation, None, "read {nth} failed");
        bench.close().unwrap();
    }
    assert!(failed > 0, "no failure was felt");
}
