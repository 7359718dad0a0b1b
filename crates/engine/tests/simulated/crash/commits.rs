//! Commits that random streams hardly ever make.

use crate::crash::guest::Guest;
use crate::crash::judge::{Leaks, judge};
use crate::crash::setup::{Files, Origin, Setup};
use std::rc::Rc;
use zebu_engine::storage::Worker;
use zebu_engine::{Durability, ZeroMode};
use zebu_sim::{CrashOptions, Tear};

/// Runs `work` on `files`; afterwards every state that a crash may leave has what was flushed.
fn survives(setup: &Setup, files: &Files, work: impl AsyncFnOnce(&Guest, &Worker)) {
    let world = setup.world(files, 1);
    let worker = world.worker();
    let guest = Rc::new(Guest::new(setup.open(&world, &worker).unwrap(), setup.model(), setup));
    world.block_on(work(&guest, &worker)).unwrap();
    assert_eq!(guest.violation.borrow_mut().take(), None);
    let options = CrashOptions { max_states: 64, tear: Tear::Sector, seed: 1 };
    let mut states = 0;
    for state in world.crash_states(&options) {
        states += 1;
        judge(setup, &state.files().to_vec(), &guest.model.borrow(), Leaks::Allowed)
            .unwrap_or_else(|e| panic!("{state}: {e}"));
    }
    assert!(states > 0);
}

/// Nothing is allocated and nothing freed, no data is written: only entries of a table that is there change. What is lost
/// with them shows the backing image.
#[test]
fn zeroes_over_a_backing_image_are_durable_although_the_data_file_has_no_part_in_them() {
    let setup = Setup { external_data: true, origin: Origin::RawBase, pattern: 64 << 10, ..Setup::plain() };
    for mode in [ZeroMode::Keep, ZeroMode::Unmap] {
        survives(&setup, &setup.make(1), async |guest, worker| {
            guest.write(worker, 0, 4096, Durability::Volatile).await;
            guest.flush(worker).await;
            guest.zero(worker, 8192, 16384, mode).await;
            guest.flush(worker).await;
        });
    }
}

/// Refcount blocks and L2 tables of four slices each, new and changed, in space that held other things before: the blocks
/// are written whole.
#[test]
fn new_blocks_and_tables_of_several_slices_are_written_to_their_places() {
    let setup = Setup {
        cluster_size: 2048,
        refcount_bits: 64,
        slice_size: Some(512),
        size: 3 << 20,
        ..Setup::plain()
    };
    let mut files = setup.make(1);
    let (_, top) = &mut files[0];
    let start = top.len().next_multiple_of(setup.cluster_size);
    top.write(start, &vec![0xaa; 4 << 20]);
    survives(&setup, &files, async |guest, worker| {
        for offset in (0..setup.size).step_by(256 << 10) {
            guest.write(worker, offset, 200 << 10, Durability::Volatile).await;
        }
        guest.flush(worker).await;
        // A part of some tables and blocks: those are written in place.
        for offset in (0..setup.size).step_by(1 << 20) {
            guest.discard(worker, offset, 8192).await;
        }
        guest.flush(worker).await;
    });
}

/// Entries in blocks all over a slice change, few of them in each commit.
#[test]
fn changed_blocks_far_from_each_other_in_one_table_are_written() {
    let setup = Setup { cluster_size: 65536, slice_size: Some(65536), size: 64 << 20, ..Setup::plain() };
    survives(&setup, &setup.make(1), async |guest, worker| {
        for round in 0..3 {
            for offset in [0, 5, 9, 31, 37, 63] {
                guest.write(worker, offset << 20, 4096 << round, Durability::Volatile).await;
            }
            guest.flush(worker).await;
            guest.discard(worker, 9 << 20, 65536).await;
            guest.zero(worker, 37 << 20, 65536, ZeroMode::Unmap).await;
            guest.flush(worker).await;
        }
    });
}
