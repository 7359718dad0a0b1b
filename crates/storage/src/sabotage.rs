//! Deliberate faults: each takes one defence away, so that a test can show that it would be missed.
//!
//! The feature `test-faults` compiles them in; without it, [`is`] is a constant and costs nothing. One fault is active
//! per thread, which is one simulated world: threads of other tests feel nothing. A program that a test starts has the one
//! that `ZEBU_FAULT` names in all of its threads.

/// A defence that is taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Commit: no barrier between new refcount blocks and the table that names them.
    SkipBarrier0,
    /// Commit: no barrier between counts, new tables and data, and the links to them.
    SkipBarrier1,
    /// Commit: no barrier before the flush is answered and freed space is released.
    SkipBarrier2,
    /// Commit: no barrier 1 where it is the last one.
    SkipOnlyBarrier,
    /// Commit: the external data file is not flushed.
    SkipDataFileBarrier,
    /// Commit: refcount blocks, and a table that has moved, are named before the counts of their places are written.
    NameUncounted,
    /// Commit: no barrier between a moved refcount table and the header that names it.
    SkipMovedTableBarrier,
    /// Commit: L1 entries and links are written before the tables and counts that they need.
    L1BeforeItsTable,
    /// Commit: the new tables are copied before the slices that say which of them matter.
    FreezeTablesFirst,
    /// Commit: blocks are written as they are now, not as they were frozen.
    WriteTheLiveBlock,
    /// Commit: what was freed since the freeze is released with what was freed before.
    FreezeFreedLast,
    /// Commit: after a failure, what was frozen counts as written.
    ForgetFailedCommit,
    /// Commit: a failure is not reported to the flush.
    SwallowCommitError,
    /// Commit: a flush joins a commit that has frozen already.
    JoinFrozenCommit,
    /// Commit, snapshot: when one write fails, the others are not waited for, and flushes succeed all the same.
    LeaveFailedBatch,
    /// Close: a commit that another has under way is not waited for.
    CloseBesideCommit,
    /// Close: after it failed, the locks go while a commit that another has under way writes.
    UnlockBesideCommit,
    /// Close: the locks go while a write that was abandoned may still land.
    UnlockBesideAbandoned,
    /// Locks: they go with the process, whatever requests of it are under way.
    LockWithProcess,
    /// Alone: after an operation vanished, others are let in before writing has stopped.
    LetInFirst,
    /// Another backing file: what was freed is not waited for before it, but while the image is alone.
    RenameBesideReads,
    /// Commit, release: they run on the worker of the request that started them.
    RunOnCaller,
    /// Release: freed clusters go back before the commit that unlinks them.
    ReleaseWithoutCommit,
    /// Release: freed clusters go back while requests may use them.
    ReleaseWithoutGrace,
    /// Release: the space is free before its punch is over.
    LowerBeforePunch,
    /// Write: the entry is set while the data is still on its way.
    LinkBeforeData,
    /// Write: the entry is set although the data could not be written.
    LinkAfterFailedWrite,
    /// Write: replaced content needs no barrier before its link.
    ForgetDataBarrier,
    /// Write: what surrounds a write is not copied.
    SkipCopy,
    /// Write: the copy goes on when its read failed.
    IgnoreFailedCopy,
    /// Write: recycled space is not padded with zeroes.
    SkipPadding,
    /// Write: a used cluster with subclusters is zeroed as a whole before it is written.
    ZeroUsedSubclusters,
    /// Checkpoint: of several disks, requests of one are waited for and kept out.
    CloseOneGate,
    /// Checkpoint: the bitmaps end and begin when requests have been let in again.
    BeginBitmapLate,
    /// Checkpoint: a request does not wait until what it changes is kept.
    KeepAfterWrite,
    /// Checkpoint: a request does not wait for another that keeps what both change.
    WriteBesideKeeping,
    /// Checkpoint: a read does not look at the spill again when it has read the image.
    TrustSourceRead,
    /// Checkpoint: a read does not look whether the checkpoint has ended meanwhile.
    ReadPastCheckpoint,
    /// Checkpoint: the guest's request fails when the spill is full.
    FailGuestForSpill,
    /// Filling from the backing image: it reads, and then writes as a guest does.
    FillAsAGuest,
    /// Filling from the backing image: it reads before its clusters are in flight, and looks at no entry later.
    FillFromEarlier,
    /// Write: shared clusters are written in place.
    WriteSharedInPlace,
    /// Write: shared L2 tables are changed in place.
    ChangeSharedTable,
    /// Write: two allocations of one guest cluster may be in flight.
    AllocateTwice,
    /// Write: a cluster that was zeroed in its place is written while earlier writes may still reach it.
    WriteWhereOthersReach,
    /// Write: who waits for an allocation in flight is not woken.
    ForgetInFlightWaiters,
    /// Write: a cluster that is given another place counts as filled though nothing was written there.
    ShowEmptyPlace,
    /// Write: data may land on metadata.
    SkipOverlapCheck,
    /// Write: the space of a failed write counts as fresh.
    FailedWriteIsFresh,
    /// Compressed: a stream needs no barrier before its link.
    ForgetStreamBarrier,
    /// Compressed: more streams are packed into a host cluster than its refcount can say.
    PackTooMany,
    /// Compressed: packing in a host cluster ends before the references of its earlier parts are there.
    CloseEarly,
    /// Compressed: a part that failed is not tried again.
    ForgetFailedPart,
    /// Compressed: whoever waits for the references of a part goes on waiting when it has failed.
    WaitForFailedPart,
    /// Compressed: a part that failed has another number when it is tried again.
    RenumberFailedPart,
    /// Compressed: inflated clusters are kept when the space of their streams is given back.
    KeepInflated,
    /// Snapshots: the mapping cache keeps what it knew of tables that were rewritten.
    KeepMapping,
    /// Snapshots: what was read of tables before they were rewritten still gets into the mapping cache.
    KeepLoads,
    /// Snapshots: the header names a snapshot table that is not durable.
    NameTableEarly,
    /// Snapshots: what a deleted snapshot refers to goes back while the header still names the snapshot.
    LowerBeforeDeletion,
    /// Snapshots: metadata that a damaged entry leads to is counted, given back or rewritten as if it were the snapshot's.
    TakeMetadata,
    /// Bitmaps: no barrier between the marks of use and the first write.
    SkipBarrierOfMarks,
    /// Bitmaps: a bitmap that goes on recording is stored as one that is complete.
    StoreUnfinishedBits,
    /// Bitmaps: the backups that the header names for them are believed, whatever directory they were written for.
    BelieveBrokenSeal,
    /// Bitmaps: one that is cleared still goes on from the backup before.
    KeepBaseOfCleared,
    /// Bitmaps: one that does not record any more still goes on from the backup before.
    KeepBaseOfStopped,
    /// Bitmaps: a change does not wait for the record that tells of it.
    ChangeBeforeRecord,
    /// Bitmaps: no barrier between the record of changes and the changes.
    SkipBarrierOfRecord,
    /// Bitmaps: what a crash left is believed without the record.
    ForgetRecord,
    /// Bitmaps: a record is believed though another program has written it since.
    BelieveForeignRecord,
    /// Bitmaps: a record begins anew, and the bits of that moment are not stored.
    ForgetMoment,
    /// Bitmaps: bits that a backup works with are left out of those that a record stands on.
    ForgetLentBits,
    /// Bitmaps: the record goes on to be believed while the disk gets another size.
    KeepRecordOfResized,
    /// Jobs: a backup that is written stays marked as that backup.
    KeepBackupMark,
    /// Jobs: the magic number is written before the image is whole.
    MagicFirst,
    /// Commit: a refcount table that has moved is named by the worker of whoever leads the commit.
    ChangeHeaderOnLeader,
    /// Storage: a flush that succeeds is believed though one beside it may have failed.
    BelieveEachSync,
    /// Storage: where flushes do nothing, one succeeds after a change was abandoned.
    BelieveUnsafeFlush,
    /// Storage: a write of parts of blocks whose request vanished is not abandoned, as long as its task goes on.
    ForgetOwnTask,
    /// Cache: who waits for a slice is not woken.
    ForgetLoadWaiters,
    /// Cache: a slice may be read from the place of a table that is not written yet.
    LookAtNewTablesFirst,
    /// Cache: a slice may be evicted before who loaded it has looked at it.
    LoadUnpinned,
    /// Cache: room that was not there is given back all the same.
    GiveBackUntaken,
    /// Cache: two load one slice at the same time.
    LoadTwice,
    /// Cache: a load that made its slice present ends the other loads of it a moment later.
    EndLoadsLate,
    /// Cache: an entry of a table that is held in memory is seen a moment before it is noted as changed.
    NoteEntriesLate,
    /// Cache: what was derived from a slice that has changed since is kept.
    KeepStaleDerived,
    /// Cache: a slice that a commit is writing may be evicted.
    EvictInWriting,
    /// Cache: a change of a slice that a commit is writing is not noted as dirty.
    ForgetChangeInWriting,
    /// Cache: a slice is loaded outside any grace period.
    LoadOutsideGrace,
    /// Space: a move of the refcount table that vanishes stops writing when others may have seen the table.
    PoisonAfterTurn,
    /// Space: what is set aside may be found free a second time.
    ForgetSetAside,
    /// Space: of the free runs, those that lie first are looked at and no more, so that what a file grew by is not seen.
    LookAtFirstRuns,
    /// Space: free runs that are forgotten are not looked for again.
    ForgetForGood,
    /// Space: a table gets its place behind the file though what the file just grew by is free.
    PlaceBehindGrowth,
    /// Space: a file grows by what is counted already.
    GrowIntoCounted,
    /// Space: a write into a hole of a full file system does not wait for what was given back.
    FailBesideReads,
    /// Space: what a commit writes in place gets no room before it.
    CommitWithoutRoom,
    /// Space: a window hands its last cluster out twice.
    WindowOffByOne,
    /// Space: recycled space counts as zero.
    RecycledIsFresh,
    /// Space: the counts of a window are not raised.
    SkipRaise,
    /// Space: a window whose counts could not all be raised keeps those that were, and is given back.
    KeepRaised,
    /// Space: a new refcount block does not count itself.
    UncountedBlock,
    /// Zeroing: what a backing image holds may show.
    ZeroShowsBacking,
    /// Resize: other requests go on meanwhile.
    ResizeBesideWrites,
    /// Resize: what was derived while the disk had its old end stays when it has grown.
    KeepOldEnd,
    /// Resize: added space is in use before it reads as zero.
    ShowGrowthEarly,
    /// Resize: what the disk grows by is not zeroed.
    SkipGrowthZeroing,
    /// Resize: VM state where the disk grows stays, and a guest reads it.
    ShowVmState,
    /// VM state: a backing image shows where nobody wrote.
    VmStateShowsBacking,
    /// VM state: the disk stays as long as the state, for requests too.
    KeepReach,
    /// Resize: the cluster in which the disk of a raw data file ended counts as what the disk grows by.
    OldEndIsFresh,
    /// Resize: the header keeps the old size.
    ForgetHeaderSize,
    /// Resize: after a failure, memory keeps the new size.
    KeepFailedSize,
    /// Header: the mark of a corrupt image is not made durable.
    ForgetMarkBarrier,
    /// Image: a failed sync is forgotten.
    ForgetPoison,
    /// Chain: a shorter image lets what lies below it through.
    ShowBelowShortImage,
    /// Storage: a read-modify-write goes on when its read failed.
    IgnoreFailedBlockRead,
    /// Storage: read-modify-writes of one block go on beside each other.
    SkipWriteTable,
    /// Storage: a claim is not shown to the writes that come after it.
    HideClaim,
    /// Gate: who leaves wakes one of those who wait, who may have gone.
    WakeOneAtMutex,
    /// Turnstile: a request looks whether somebody is alone, and then counts itself.
    LookBeforeCount,
    /// Turnstile, cache: who waits does not look again after it has said so.
    LookOnce,
    /// Grace: the phase is changed once.
    FlipOnce,
    /// Waits: a request that can never end is waited for.
    WaitWithoutBound,
    /// Waits: one that is driven is given up like one that is not.
    GiveUpOnDriven,
    /// Waits: a promise to drive a worker counts for nothing.
    DoubtPromise,
    /// Waits: reads count as writes that may still reach a place.
    CountReadsAsWrites,
    /// Close: requests that are under way are not waited for, and later ones are not refused.
    CloseBesideRequests,
    /// Close: it waits for the image's own worker while it keeps operations there from being alone.
    IdleWhileAlone,
    /// Convert: the kernel copies from where the source's bytes lay when they were looked up.
    MoveFromOldPlace,
    /// Encryption: guest data is written as it is.
    WritePlainText,
    /// Encryption: writes of parts of one sector go on beside each other.
    ShareSectors,
    /// Encryption: unwritten space counts as zero, as if it were not encrypted.
    PlainPadding,
    /// Encryption: fresh space needs no barrier before its link, as if it were not encrypted.
    PlainBarrier,
    /// Encryption: the data file is punched where a cluster is to read as zero.
    PunchEncrypted,
    /// Encryption: the steps of a change of key slots are not kept apart.
    SkipBarrierOfKeySlots,
    /// Calling thread: a call ends when its value is there, whatever it has begun.
    LeaveBehind,
    /// Calling thread: it sleeps although an operation that it did itself is over.
    SleepOnDone,
    /// Calling thread: it sleeps although another thread has woken it since it looked.
    SleepOnWake,
    /// Close: it is alone with the image on the worker of its caller.
    CloseOnCaller,
    /// Close: reads that have begun are not waited for before it.
    CloseBesideReads,
    /// Snapshots: one that the header names gives its references back, if a write fails after that.
    LowerNamedSnapshot,
    /// Block devices: a write is answered before its data is on its way.
    AnswerBeforeData,
    /// Fork: writes under way do not end before it.
    ForkBesideWrites,
    /// Fork: the first change goes to the overlay before the image is sealed.
    SealAfterGate,
    /// Fork: the seal is not durable before the first change goes to the overlay.
    SkipBarrierOfSeal,
    /// Fork: a change that waited for it is made in the sealed image, which others may write as well.
    WriteSealed,
    /// Fork: seals stay although another one failed.
    KeepOtherSeals,
}

/// A limit of the engine that a test may lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    /// Bytes of an allocation window.
    WindowBytes,
    /// Bytes of a refcount table.
    RefcountTableBytes,
    /// Free runs in memory.
    FreeRuns,
    /// Slices of counts that one step of the search for free clusters looks at.
    ScanSlices,
    /// Steps of that search for one window.
    ScanSteps,
    /// Ranges of a shard that were cleared in their place.
    ClearedRanges,
    /// Windows of sequential streams.
    DataWindows,
    /// Ends of scattered allocations that are remembered.
    RecentEnds,
    /// Writes of a commit that are under way together.
    CommitWrites,
    /// Pieces of one write of a commit.
    CommitPieces,
    /// Counts that a snapshot changes at once.
    CountBatch,
    /// L2 tables that are read at once.
    TablesAtOnce,
    /// Parts of one request that are under way together.
    PartsAtOnce,
    /// Images of a chain whose slices are loaded at once.
    ImagesAtOnce,
    /// Entries that are looked at for the length of a run.
    LongestLook,
    /// Bytes of the record of changes.
    RecordBytes,
}

impl Limit {
    /// The limits that are counts of things: an image works with any of them from 2 on.
    pub const COUNTS: [Self; 13] = [
        Self::FreeRuns,
        Self::ScanSlices,
        Self::ScanSteps,
        Self::ClearedRanges,
        Self::DataWindows,
        Self::RecentEnds,
        Self::CommitWrites,
        Self::CommitPieces,
        Self::CountBatch,
        Self::TablesAtOnce,
        Self::PartsAtOnce,
        Self::ImagesAtOnce,
        Self::LongestLook,
    ];
    #[cfg(feature = "test-faults")]
    const COUNT: usize = Self::RecordBytes as usize + 1;
}

#[cfg(feature = "test-faults")]
mod active {
    use super::{Fault, Limit};
    use std::cell::Cell;
    use std::sync::LazyLock;

    /// Name of the fault that the whole process has.
    static OF_PROCESS: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("ZEBU_FAULT").ok());

    thread_local! {
        static ACTIVE: Cell<Option<Fault>> = const { Cell::new(None) };
        static FELT: Cell<u64> = const { Cell::new(0) };
        static LIMITS: Cell<[u64; Limit::COUNT]> = const { Cell::new([u64::MAX; Limit::COUNT]) };
    }

    /// The `usual` limit of the engine, or the one that [`limit`] has set on this thread, if that is less.
    #[inline]
    pub fn at_most(which: Limit, usual: u64) -> u64 {
        let limits = LIMITS.get();
        limits.get(which as usize).copied().unwrap_or(u64::MAX).min(usual)
    }

    /// Sets a limit on this thread: those of the engine are reached by large and old images only.
    pub fn limit(which: Limit, most: u64) {
        let mut limits = LIMITS.get();
        if let Some(limit) = limits.get_mut(which as usize) {
            *limit = most;
        }
        LIMITS.set(limits);
    }

    /// Whether this defence is taken away on this thread.
    #[inline]
    pub fn is(fault: Fault) -> bool {
        let active = ACTIVE.get() == Some(fault)
            || OF_PROCESS.as_deref().is_some_and(|name| name == format!("{fault:?}"));
        if active {
            FELT.set(FELT.get() + 1);
        }
        active
    }

    /// Runs `work` with a defence taken away on this thread, also if it panics. Returns what it returned, and how often
    /// the place of the fault was passed.
    pub fn under<T>(fault: Option<Fault>, work: impl FnOnce() -> T) -> (T, u64) {
        struct Restore(Option<Fault>);
        impl Drop for Restore {
            fn drop(&mut self) {
                ACTIVE.set(self.0);
            }
        }
        FELT.set(0);
        let _restore = Restore(ACTIVE.replace(fault));
        let value = work();
        (value, FELT.get())
    }
}

#[cfg(feature = "test-faults")]
pub use active::{at_most, is, limit, under};

/// The `usual` limit: this build has no other.
#[cfg(not(feature = "test-faults"))]
#[inline(always)]
pub const fn at_most(_: Limit, usual: u64) -> u64 {
    usual
}

/// Never: this build has no deliberate faults.
#[cfg(not(feature = "test-faults"))]
#[inline(always)]
pub const fn is(_: Fault) -> bool {
    false
}
