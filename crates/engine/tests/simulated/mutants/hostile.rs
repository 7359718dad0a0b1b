//! Images whose mapping points into their own metadata: what would change that is refused, nothing is damaged further.

use crate::crash::setup::{Files, Origin, Setup, TOP};
use crate::faults::bench::Bench;
use zebu_engine::storage::IoBuf;
use zebu_engine::{Durability, ErrorKind, NewSnapshot, SnapshotRef};
use zebu_sim::Content;

/// The bits of an entry of a mapping table that are an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;

fn word(file: &Content, at: u64) -> u64 {
    u64::from_be_bytes(file.bytes(at..at + 8).try_into().unwrap())
}

#[test]
pub(crate) fn data_that_would_land_on_metadata_is_refused() {
    let setup = Setup { origin: Origin::Own, pattern: 64 << 10, workers: 1, ..Setup::plain() };
    let mut files = setup.make(1);
    let top = &files[0].1;
    let (l1, reftable) = (word(top, 40), word(top, 48));
    let table = word(top, l1) & OFFSET;
    for target in [l1, reftable, table] {
        files[0].1.write(table + 24, &(target | COPIED).to_be_bytes());
        let bench = Bench::with_files(&setup, &files, 1);
        let write = bench.guest.image.write(
            &bench.workers[0],
            3 * 4096,
            IoBuf::copy_of(&[7; 4096]).into(),
            Durability::Volatile,
        );
        let (result, _) = bench.world.block_on(write).unwrap();
        let error = result.expect_err("a write on metadata");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(bench.world.content(TOP).unwrap().same_bytes(&files[0].1), "nothing was written");
    }
}

/// The files of an image with a snapshot.
fn with_a_snapshot(setup: &Setup) -> (Files, SnapshotRef) {
    let mut files = setup.make(1);
    let bench = Bench::with_files(setup, &files, 1);
    let taken = bench.guest.image.create_snapshot(&bench.workers[0], NewSnapshot::named("one"));
    bench.world.block_on(taken).unwrap().unwrap();
    bench.world.block_on(bench.guest.image.close(&bench.workers[0])).unwrap().unwrap();
    files[0].1 = bench.world.content(TOP).unwrap();
    (files, SnapshotRef::Name("one".to_owned()))
}

/// A snapshot's entry that calls metadata its data does not have it freed with the snapshot.
#[test]
pub(crate) fn a_deleted_snapshot_gives_back_no_metadata() {
    let setup = Setup { origin: Origin::Own, pattern: 64 << 10, workers: 1, ..Setup::plain() };
    let (mut files, one) = with_a_snapshot(&setup);
    let top = files[0].1.clone();
    let (l1, reftable) = (word(&top, 40), word(&top, 48));
    let (table, block) = (word(&top, l1) & OFFSET, word(&top, reftable));
    for target in [l1, reftable, block] {
        files[0].1 = top.clone();
        files[0].1.write(table + 24, &target.to_be_bytes());
        let bench = Bench::with_files(&setup, &files, 1);
        let deleted = bench.guest.image.delete_snapshot(&bench.workers[0], &one);
        bench.world.block_on(deleted).unwrap().unwrap();
        bench.world.block_on(bench.guest.image.close(&bench.workers[0])).unwrap().unwrap();
        let after = bench.world.content(TOP).unwrap();
        assert_eq!(word(&after, l1) & OFFSET, table, "the L1 table, where {target:#x} is called data");
        assert_eq!(word(&after, reftable), block, "the refcount table, where {target:#x} is called data");
        assert_ne!(word(&after, block), 0, "the refcount block, where {target:#x} is called data");
    }
}

/// Taking a snapshot clears flags in the tables of the disk. An L1 entry that leads to metadata does not have that changed.
#[test]
pub(crate) fn a_snapshot_clears_no_flags_in_what_is_no_table() {
    let setup = Setup { origin: Origin::Own, pattern: 64 << 10, workers: 1, ..Setup::plain() };
    let mut files = setup.make(1);
    let l1 = word(&files[0].1, 40);
    files[0].1.write(l1, &(l1 | COPIED).to_be_bytes());
    let bench = Bench::with_files(&setup, &files, 1);
    let taken = bench.guest.image.create_snapshot(&bench.workers[0], NewSnapshot::named("one"));
    let error = bench.world.block_on(taken).unwrap().expect_err("a table of metadata");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let after = bench.world.content(TOP).unwrap();
    assert_eq!(word(&after, l1), l1 | COPIED, "the L1 table was written as an L2 table");
}

/// The same for going back to a snapshot, which clears flags in the snapshot's tables.
#[test]
pub(crate) fn going_back_to_a_snapshot_clears_no_flags_in_what_is_no_table() {
    let setup = Setup { origin: Origin::Own, pattern: 64 << 10, workers: 1, ..Setup::plain() };
    let (mut files, one) = with_a_snapshot(&setup);
    let l1 = word(&files[0].1, 40);
    let table = word(&files[0].1, word(&files[0].1, 64));
    // The snapshot calls the active L1 table, whose entry has the flag, an L2 table.
    let active = word(&files[0].1, l1) | COPIED;
    files[0].1.write(l1, &active.to_be_bytes());
    files[0].1.write(table, &l1.to_be_bytes());
    let bench = Bench::with_files(&setup, &files, 1);
    let applied = bench.guest.image.apply_snapshot(&bench.workers[0], &one);
    let error = bench.world.block_on(applied).unwrap().expect_err("a table of metadata");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let after = bench.world.content(TOP).unwrap();
    assert_eq!(word(&after, l1), active, "the L1 table was written as an L2 table");
}
