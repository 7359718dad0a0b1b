//! Every deliberate fault is caught within a stated number of seeds, and the same seed passes without it.
//!
//! `ZEBU_MUTANT_ROUNDS=10` asks for ten catches of each, from ten ranges of seeds.

use crate::crash::{forks, vm_state};
use crate::faults::{
    calls, checkpoints, copy_on_read, damage_mark, failed_tables, fragmented, full_disk, growth, held, idle,
    moved_source, old_content, poison, snapshots, space, stalls, unending,
};
use crate::mutants::streams::Shape::*;
use crate::mutants::streams::Stream::{self, *};
use crate::mutants::{bases, encrypted, hostile, plain_text, recovered, undone, unfinished};
use rustix::io::Errno;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;
use zebu_sim::OpClass;
use zebu_storage::sabotage::{Fault, under};

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs a stream; a panic is a catch like any other, and says nothing on the terminal.
fn outcome(fault: Option<Fault>, stream: Stream, seed: u64) -> (Result<(), String>, u64) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                usual(info);
            }
        }));
    });
    QUIET.set(true);
    let mut felt = 0;
    let result = catch_unwind(AssertUnwindSafe(|| {
        let (result, times) = under(fault, || {
            catch_unwind(AssertUnwindSafe(|| stream.run(seed))).unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().cloned();
                Err(text
                    .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                    .unwrap_or_default())
            })
        });
        felt = times;
        result
    }));
    QUIET.set(false);
    (result.unwrap_or_else(|_| Err("a panic while it was taken down".to_owned())), felt)
}

/// Requires that `fault` is caught by one of `streams` within `seeds` seeds.
fn is_caught(fault: Fault, streams: &[Stream], seeds: u64) {
    let rounds: u64 = std::env::var("ZEBU_MUTANT_ROUNDS").map_or(1, |text| text.parse().unwrap());
    for round in 0..rounds {
        let first = round * 100_000;
        let mut felt = 0;
        let caught = (first..first + seeds).find_map(|seed| {
            streams.iter().find_map(|stream| {
                let (result, times) = outcome(Some(fault), *stream, seed);
                felt += times;
                result.err().map(|violation| (seed, *stream, violation))
            })
        });
        let Some((seed, stream, violation)) = caught else {
            panic!("{fault:?} survives {seeds} seeds of {streams:?} (its place was passed {felt} times)");
        };
        let brief: String = violation.lines().next().unwrap_or_default().chars().take(150).collect();
        eprintln!("{fault:?}: caught with seed {seed} of {stream:?}: {brief}");
        if let (Err(violation), _) = outcome(None, stream, seed) {
            panic!("seed {seed} of {stream:?} fails without {fault:?} as well: {violation}");
        }
        if matches!(stream, Scenario(_)) {
            break;
        }
    }
}

macro_rules! mutants {
    ($($name:ident: $fault:ident, within $seeds:literal of [$($stream:expr),+];)+) => {
        $(
            #[test]
            fn $name() {
                is_caught(Fault::$fault, &[$($stream),+], $seeds);
            }
        )+
    };
}

mutants! {
    barrier_0: SkipBarrier0, within 60 of [Crash(ManyBlocks)];
    barrier_1: SkipBarrier1, within 20 of [Crash(Any)];
    barrier_2: SkipBarrier2, within 20 of [Crash(Any)];
    barrier_1_where_it_is_the_last: SkipOnlyBarrier, within 20 of [Crash(Any), Crash(ManyBlocks)];
    barrier_of_the_data_file: SkipDataFileBarrier, within 20 of [Crash(External)];
    a_moved_table_is_named_before_it_is_counted: NameUncounted, within 1 of
        [Scenario(fragmented::a_moved_table_is_counted_where_it_lies)];
    barrier_of_a_moved_table: SkipMovedTableBarrier, within 30 of [Crash(GrowingTable)];
    l1_before_its_table: L1BeforeItsTable, within 20 of [Crash(Any)];
    the_live_block_is_written: WriteTheLiveBlock, within 60 of [Crash(Any)];
    freed_is_frozen_last: FreezeFreedLast, within 60 of [Crash(Any)];
    a_failed_commit_is_forgotten: ForgetFailedCommit, within 60 of [Fails(OpClass::Write, Errno::NOSPC)];
    a_commit_error_is_swallowed: SwallowCommitError, within 600 of
        [Fails(OpClass::Write, Errno::IO), Fails(OpClass::Write, Errno::NOSPC), Full];
    a_flush_joins_a_frozen_commit: JoinFrozenCommit, within 20 of [Crash(Any)];
    a_failed_batch_is_left: LeaveFailedBatch, within 1 of
        [Scenario(held::a_write_of_a_failed_commit_never_lands_on_a_later_one)];
    a_failed_batch_of_tables_is_left: LeaveFailedBatch, within 1 of
        [Scenario(failed_tables::a_table_of_a_snapshot_that_failed_never_lands_on_a_later_one)];
    a_failed_batch_of_tables_is_left_by_a_deletion: LeaveFailedBatch, within 1 of
        [Scenario(failed_tables::a_table_of_a_deletion_that_failed_never_lands_on_a_later_one)];
    another_name_waits_for_every_read: RenameBesideReads, within 1 of
        [Scenario(unending::another_backing_file_does_not_wait_without_end_for_a_read_that_began_meanwhile)];
    the_mark_is_left_to_whoever_found_the_damage: ChangeHeaderOnLeader, within 1 of
        [Scenario(damage_mark::a_mark_waits_for_no_worker_that_stands_still)];
    commits_run_on_the_callers_worker: RunOnCaller, within 1 of
        [Scenario(idle::a_worker_that_is_not_polled_holds_up_nobody_else)];
    unending_requests_are_waited_for: WaitWithoutBound, within 1 of
        [Scenario(unending::a_full_disk_is_not_waited_for_without_end)];
    closed_beside_requests: CloseBesideRequests, within 1 of
        [Scenario(unending::a_close_has_no_writes_beside_it)];
    a_close_runs_on_the_callers_worker: CloseOnCaller, within 1 of
        [Scenario(unending::a_close_whose_worker_stands_still_holds_up_nobody)];
    a_close_begins_beside_reads: CloseBesideReads, within 1 of
        [Scenario(unending::a_close_does_not_wait_without_end_for_a_read)];
    a_leader_changes_the_header: ChangeHeaderOnLeader, within 1 of
        [Scenario(unending::a_leader_leaves_the_header_to_the_own_worker)];
    driven_requests_are_given_up: GiveUpOnDriven, within 1 of
        [Scenario(stalls::a_write_that_takes_minutes_fails_no_other)];
    promises_are_doubted: DoubtPromise, within 1 of
        [Scenario(stalls::a_thread_that_has_promised_to_go_on_is_waited_for)];
    reads_count_as_writes: CountReadsAsWrites, within 1 of
        [Scenario(stalls::a_read_that_takes_minutes_holds_up_no_write)];
    a_close_is_alone_while_it_waits: IdleWhileAlone, within 1 of
        [Scenario(unending::a_close_waits_for_no_operation_that_waits_for_it)];
    a_named_snapshot_loses_its_references: LowerNamedSnapshot, within 1 of
        [Scenario(snapshots::a_named_snapshot_keeps_its_references)];
    a_call_leaves_work_behind: LeaveBehind, within 1 of [Scenario(calls::a_call_ends_with_what_it_reads_ahead)];
    released_without_commit: ReleaseWithoutCommit, within 20 of [Crash(Any)];
    released_without_grace: ReleaseWithoutGrace, within 1 of
        [Scenario(held::a_cluster_is_not_used_again_while_it_is_read)];
    free_before_the_punch: LowerBeforePunch, within 60 of [Crash(Any)];
    linked_before_the_data: LinkBeforeData, within 20 of [Crash(Any)];
    linked_after_a_failed_write: LinkAfterFailedWrite, within 150 of [Fails(OpClass::Write, Errno::IO)];
    no_barrier_for_replaced_data: ForgetDataBarrier, within 60 of [Crash(Any)];
    nothing_is_copied: SkipCopy, within 10 of [Crash(Backed)];
    a_failed_copy_goes_on: IgnoreFailedCopy, within 150 of [Fails(OpClass::Read, Errno::IO)];
    nothing_is_padded: SkipPadding, within 20 of [Crash(Any)];
    used_subclusters_are_zeroed: ZeroUsedSubclusters, within 60 of [Crash(Subclusters)];
    a_copy_on_read_lands_on_a_write: FillAsAGuest, within 1 of
        [Scenario(copy_on_read::what_is_changed_beside_a_copy_stays)];
    a_copy_on_read_lands_on_zeroes: FillFromEarlier, within 1 of
        [Scenario(copy_on_read::what_is_changed_beside_a_copy_stays)];
    a_moment_is_of_one_disk: CloseOneGate, within 1 of
        [Scenario(checkpoints::all_disks_are_shown_as_at_one_moment)];
    bitmaps_begin_after_the_moment: BeginBitmapLate, within 1 of
        [Scenario(checkpoints::all_disks_are_shown_as_at_one_moment)];
    old_bytes_are_kept_after_the_write: KeepAfterWrite, within 1 of
        [Scenario(checkpoints::all_disks_are_shown_as_at_one_moment)];
    a_write_lands_beside_the_keeping: WriteBesideKeeping, within 1 of
        [Scenario(checkpoints::all_disks_are_shown_as_at_one_moment)];
    a_read_does_not_look_at_the_spill_again: TrustSourceRead, within 1 of
        [Scenario(checkpoints::all_disks_are_shown_as_at_one_moment)];
    a_read_goes_on_past_the_end: ReadPastCheckpoint, within 1 of
        [Scenario(checkpoints::a_spill_that_fails_ends_the_checkpoint_and_no_guest)];
    a_full_spill_fails_the_guest: FailGuestForSpill, within 1 of
        [Scenario(checkpoints::a_spill_that_fails_ends_the_checkpoint_and_no_guest)];
    shared_clusters_are_written: WriteSharedInPlace, within 10 of [Crash(Snapshot)];
    shared_tables_are_changed: ChangeSharedTable, within 10 of [Crash(Snapshot)];
    two_allocations_of_a_cluster: AllocateTwice, within 20 of [Crash(Any)];
    written_where_others_reach: WriteWhereOthersReach, within 1 of
        [Scenario(held::a_cluster_zeroed_in_its_place_is_left_to_earlier_writes)];
    written_where_others_reach_and_must: WriteWhereOthersReach, within 1 of
        [Scenario(held::a_place_that_a_cluster_must_keep_is_waited_for)];
    waiters_for_an_allocation_sleep_on: ForgetInFlightWaiters, within 20 of [Crash(Any)];
    data_on_metadata: SkipOverlapCheck, within 1 of
        [Scenario(hostile::data_that_would_land_on_metadata_is_refused)];
    a_failed_write_leaves_fresh_space: FailedWriteIsFresh, within 2400 of [ManyFail];
    evicted_while_written: EvictInWriting, within 40 of [Crash(TwoSlices)];
    changes_while_written_are_forgotten: ForgetChangeInWriting, within 20 of [Crash(Any)];
    a_slice_is_loaded_outside_grace: LoadOutsideGrace, within 1 of
        [Scenario(held::a_table_is_not_used_again_while_a_slice_is_read_from_it)];
    a_window_is_off_by_one: WindowOffByOne, within 5 of [Crash(Any)];
    recycled_space_counts_as_zero: RecycledIsFresh, within 20 of [Crash(Any)];
    windows_are_not_raised: SkipRaise, within 5 of [Crash(Any)];
    the_first_free_runs_are_looked_at: LookAtFirstRuns, within 1 of
        [Scenario(fragmented::a_file_grows_once_for_a_window_that_no_free_run_holds)];
    forgotten_runs_are_lost: ForgetForGood, within 1 of [Scenario(fragmented::forgotten_space_is_found_again)];
    a_file_grows_into_what_is_counted: GrowIntoCounted, within 1 of
        [Scenario(fragmented::a_long_table_goes_past_what_is_counted_behind_the_file)];
    a_full_file_system_does_not_wait_for_reads: FailBesideReads, within 1 of
        [Scenario(full_disk::what_is_given_back_beside_a_slow_read_is_waited_for)];
    a_commit_has_no_room: CommitWithoutRoom, within 1 of
        [Scenario(fragmented::a_new_image_on_a_full_file_system_can_be_flushed)];
    a_table_lies_behind_a_growth: PlaceBehindGrowth, within 1 of
        [Scenario(fragmented::a_table_that_moves_lies_in_what_the_file_has_grown_by)];
    a_window_is_given_back_half_counted: KeepRaised, within 1 of
        [Scenario(space::a_window_that_could_not_be_counted_is_given_back_whole)];
    a_block_does_not_count_itself: UncountedBlock, within 20 of [Crash(ManyBlocks)];
    zeroes_show_the_backing_image: ZeroShowsBacking, within 10 of [Crash(Backed)];
    a_resize_is_not_alone: ResizeBesideWrites, within 1 of
        [Scenario(held::a_resize_waits_for_writes_and_writes_for_it)];
    growth_shows_early: ShowGrowthEarly, within 1 of
        [Scenario(growth::growing_beside_reads_shows_nothing_of_the_backing_file)];
    what_has_the_old_end_is_kept: KeepOldEnd, within 1 of
        [Scenario(growth::growing_beside_reads_shows_nothing_of_the_backing_file)];
    a_place_counts_as_filled: ShowEmptyPlace, within 1 of
        [Scenario(growth::preallocation_beside_a_snapshot_hides_nothing)];
    growth_is_not_zeroed: SkipGrowthZeroing, within 40 of [Resizes];
    vm_state_shows: ShowVmState, within 40 of [VmState];
    vm_state_shows_the_backing_image: VmStateShowsBacking, within 1 of
        [Scenario(vm_state::a_longer_backing_file_does_not_show)];
    the_disk_stays_as_long_as_vm_state: KeepReach, within 20 of [VmState];
    vm_state_is_not_flushed: SkipBarrier2, within 40 of [VmState];
    an_old_end_counts_as_new: OldEndIsFresh, within 1 of
        [Scenario(undone::a_growing_disk_does_not_show_a_write_that_a_crash_undid)];
    the_header_keeps_the_old_size: ForgetHeaderSize, within 20 of [Crash(Any)];
    a_failed_growth_stays_in_memory: KeepFailedSize, within 40 of [FailedGrowth];
    the_mark_of_damage_is_not_durable: ForgetMarkBarrier, within 1 of
        [Scenario(damage_mark::a_damaged_image_is_marked_before_its_writer_is_told)];
    a_failed_sync_is_forgotten: ForgetPoison, within 1 of
        [Scenario(poison::a_failed_sync_is_final_until_the_image_is_opened_again)];
    a_short_image_lets_through: ShowBelowShortImage, within 10 of [Crash(DeepChain)];
    a_failed_block_read_goes_on: IgnoreFailedBlockRead, within 1 of
        [Scenario(old_content::a_read_modify_write_under_o_direct)];
    block_writes_beside_each_other: SkipWriteTable, within 40 of [Crash(Direct)];
    no_barrier_for_streams: ForgetStreamBarrier, within 80 of [Crash(NarrowCounts)];
    too_many_streams_in_a_cluster: PackTooMany, within 20 of [Crash(NarrowCounts)];
    inflated_clusters_are_kept: KeepInflated, within 60 of [Crash(Compressed)];
    rewritten_tables_are_not_forgotten: KeepMapping, within 10 of [Snapshots];
    a_deleted_snapshot_takes_metadata_along: TakeMetadata, within 1 of
        [Scenario(hostile::a_deleted_snapshot_gives_back_no_metadata)];
    an_applied_snapshot_rewrites_metadata: TakeMetadata, within 1 of
        [Scenario(hostile::going_back_to_a_snapshot_clears_no_flags_in_what_is_no_table)];
    a_snapshot_rewrites_metadata: TakeMetadata, within 1 of
        [Scenario(hostile::a_snapshot_clears_no_flags_in_what_is_no_table)];
    loads_of_rewritten_tables_are_kept: KeepLoads, within 1 of
        [Scenario(snapshots::what_was_read_of_a_table_before_a_snapshot_is_dropped)];
    a_snapshot_table_is_named_early: NameTableEarly, within 10 of [Snapshots];
    a_named_snapshot_is_given_back: LowerBeforeDeletion, within 20 of [Snapshots];
    no_barrier_of_marks: SkipBarrierOfMarks, within 10 of [Marks];
    unfinished_bits_are_stored: StoreUnfinishedBits, within 20 of [Crash(Bitmaps)];
    a_change_comes_before_its_record: ChangeBeforeRecord, within 1 of
        [Scenario(recovered::changes_in_place_are_known_after_a_crash)];
    changes_come_before_their_record: ChangeBeforeRecord, within 40 of [Crash(Bitmaps), Marks];
    the_record_is_not_durable: SkipBarrierOfRecord, within 1 of
        [Scenario(recovered::changes_in_place_are_known_after_a_crash)];
    the_record_is_not_durable_before_links: SkipBarrierOfRecord, within 1 of
        [Scenario(recovered::changes_that_are_linked_are_known_after_a_crash)];
    the_record_is_forgotten: ForgetRecord, within 1 of
        [Scenario(recovered::changes_in_place_are_known_after_a_crash)];
    a_record_of_another_program_is_believed: BelieveForeignRecord, within 1 of
        [Scenario(recovered::a_record_that_another_program_has_written_is_not_believed)];
    what_is_known_when_a_record_begins_is_not_stored: ForgetMoment, within 1 of
        [Scenario(recovered::a_record_that_begins_anew_loses_nothing)];
    what_a_backup_has_is_not_stored: ForgetLentBits, within 1 of
        [Scenario(recovered::bits_that_a_backup_has_are_not_lost)];
    the_record_of_another_size_is_believed: KeepRecordOfResized, within 60 of [Crash(Bitmaps)];
    a_broken_seal_is_believed: BelieveBrokenSeal, within 1 of
        [Scenario(bases::a_header_that_another_program_has_written_names_no_backup)];
    a_cleared_bitmap_keeps_its_base: KeepBaseOfCleared, within 1 of
        [Scenario(bases::a_bitmap_that_is_cleared_goes_on_from_nothing)];
    a_stopped_bitmap_keeps_its_base: KeepBaseOfStopped, within 1 of
        [Scenario(bases::a_bitmap_that_stops_goes_on_from_nothing)];
    a_backup_that_is_written_keeps_its_mark: KeepBackupMark, within 1 of
        [Scenario(bases::a_backup_that_is_written_is_none)];
    copied_from_an_old_place: MoveFromOldPlace, within 1 of
        [Scenario(moved_source::what_the_kernel_moves_is_the_sources_own)];
    plain_text_is_written: WritePlainText, within 5 of [Crash(Encrypted)];
    plain_text_shows_in_the_log: WritePlainText, within 1 of
        [Scenario(plain_text::no_write_holds_plain_text)];
    parts_of_a_sector_beside_each_other: ShareSectors, within 1 of
        [Scenario(encrypted::writes_of_parts_of_a_sector_all_arrive)];
    unwritten_space_counts_as_zero: PlainPadding, within 20 of [Crash(Encrypted)];
    no_barrier_for_fresh_encrypted_space: PlainBarrier, within 60 of [Crash(Encrypted)];
    encrypted_clusters_are_punched: PunchEncrypted, within 20 of [Crash(EncryptedExternal)];
    steps_of_key_slots_are_not_kept_apart: SkipBarrierOfKeySlots, within 1 of
        [Scenario(encrypted::a_key_slot_that_counts_as_used_opens)];
    locks_go_with_the_process: LockWithProcess, within 60 of [Killed];
    writes_do_not_end_before_a_fork: ForkBesideWrites, within 20 of [Forks];
    the_overlay_is_written_before_the_seal: SealAfterGate, within 20 of [Forks];
    the_seal_is_not_durable: SkipBarrierOfSeal, within 20 of [Forks];
    a_sealed_image_is_written: WriteSealed, within 40 of [Forks];
    a_sealed_image_is_opened: WriteSealed, within 1 of
        [Scenario(forks::a_sealed_image_is_not_opened_for_writing)];
    seals_stay_beside_one_that_failed: KeepOtherSeals, within 1 of
        [Scenario(forks::a_seal_that_fails_leaves_no_disk_forked)];
    the_magic_number_comes_first: MagicFirst, within 1 of
        [Scenario(unfinished::an_image_is_none_before_it_is_whole)];
}

/// The places that take each of the defences away, as they are written: no fault may be there that nothing catches.
#[test]
fn each_fault_has_to_be_caught_somewhere() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let read = |file: &Path| std::fs::read_to_string(file).unwrap();
    let faults = read(&crates.join("storage/src/sabotage.rs"));
    let (_, faults) = faults.split_once("pub enum Fault {\n").unwrap();
    let (faults, _) = faults.split_once("\n}\n").unwrap();
    let faults: Vec<&str> = faults.lines().filter_map(|line| line.trim().strip_suffix(',')).collect();
    assert!(
        faults.len() > 50 && faults.contains(&"SkipBarrier0") && faults.contains(&"FlipOnce"),
        "{faults:?}"
    );
    let mut tests = read(&crates.join("engine/tests/simulated/mutants/killed.rs"));
    tests += &read(&crates.join("storage/src/write_table.rs"));
    tests += &read(&crates.join("storage/src/calling_thread.rs"));
    tests += &read(&crates.join("sim/tests/worlds.rs"));
    tests += &read(&crates.join("engine/src/node.rs"));
    tests += &read(&crates.join("engine/src/qcow2/space/growth.rs"));
    tests += &read(&crates.join("engine/tests/embedding/vanished.rs"));
    tests += &read(&crates.join("engine/tests/simulated/schedules/caught.rs"));
    tests += &read(&crates.join("../tests/tests/serve/ublk.rs"));
    for file in std::fs::read_dir(crates.join("engine/src/interleavings")).unwrap() {
        tests += &read(&file.unwrap().path());
    }
    let is_caught = |fault: &&str| {
        [
            format!(": {fault}, within "),
            format!("is_caught(Fault::{fault}, "),
            format!("under(Some(Fault::{fault}), "),
            format!("under(Some(sabotage::Fault::{fault}), "),
            format!("fault: Fault::{fault},"),
        ]
        .iter()
        .any(|place| tests.contains(place))
    };
    let not_caught: Vec<&str> = faults.into_iter().filter(|fault| !is_caught(fault)).collect();
    assert!(not_caught.is_empty(), "{not_caught:?}");
}
