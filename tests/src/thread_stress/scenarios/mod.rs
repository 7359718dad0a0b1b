//! Threads in situations that chance rarely finds: each has hurt once, or was read to be able to.

mod cache;
mod endings;
mod growth;
mod space;
mod stage;
mod tables;

use crate::qemu::Qemu;
use std::path::Path;

/// A named situation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// One thread flushes while another one makes copies of L2 tables.
    CommitBesideNewTables,
    /// The same in space that was used before, without snapshots, and with a small cache.
    CommitBesideRecycledTables,
    /// One thread loads slices of a table while another one makes its copy.
    LoadBesideCopiedTable,
    /// A long table is placed where short runs were set aside and are found again.
    RunsSetAside,
    /// An overlay grows while its last cluster is read.
    GrowthBesideReads,
    /// Many requests on one worker, and a cache for few of them.
    SmallCache,
    /// The cache of an overlay under pressure keeps to its limit.
    CacheLimit,
    /// A worker is dropped with a flush under way.
    DroppedFlush,
    /// A worker is dropped while its flush waits for another worker.
    DroppedCommit,
    /// A worker is dropped while it gives space back.
    DroppedRelease,
    /// A thread ends while its flush waits for another worker.
    EndedThread,
    /// A thread with a `Disk` is idle while another one flushes.
    IdleBlockingFlush,
    /// A thread with a `Disk` is idle while another one closes the image.
    IdleBlockingClose,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 13] = [
        Scenario::CommitBesideNewTables,
        Scenario::CommitBesideRecycledTables,
        Scenario::LoadBesideCopiedTable,
        Scenario::RunsSetAside,
        Scenario::GrowthBesideReads,
        Scenario::SmallCache,
        Scenario::CacheLimit,
        Scenario::DroppedFlush,
        Scenario::DroppedCommit,
        Scenario::DroppedRelease,
        Scenario::EndedThread,
        Scenario::IdleBlockingFlush,
        Scenario::IdleBlockingClose,
    ];

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Scenario::CommitBesideNewTables => "commit-beside-new-tables",
            Scenario::CommitBesideRecycledTables => "commit-beside-recycled-tables",
            Scenario::LoadBesideCopiedTable => "load-beside-copied-table",
            Scenario::RunsSetAside => "runs-set-aside",
            Scenario::GrowthBesideReads => "growth-beside-reads",
            Scenario::SmallCache => "small-cache",
            Scenario::CacheLimit => "cache-limit",
            Scenario::DroppedFlush => "dropped-flush",
            Scenario::DroppedCommit => "dropped-commit",
            Scenario::DroppedRelease => "dropped-release",
            Scenario::EndedThread => "ended-thread",
            Scenario::IdleBlockingFlush => "idle-blocking-flush",
            Scenario::IdleBlockingClose => "idle-blocking-close",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scenario| scenario.name() == name)
    }

    /// Runs it in this process. A failure ends the process; one that stands still is for others to see.
    pub fn run(self, seed: u64, dir: &Path) {
        let mut stage = stage::Stage::new(seed, dir);
        match self {
            Scenario::CommitBesideNewTables => tables::commit_beside_new_tables(&mut stage),
            Scenario::CommitBesideRecycledTables => tables::commit_beside_recycled_tables(&mut stage),
            Scenario::LoadBesideCopiedTable => tables::load_beside_copied_table(&mut stage),
            Scenario::RunsSetAside => space::runs_set_aside(&mut stage),
            Scenario::GrowthBesideReads => growth::growth_beside_reads(&mut stage),
            Scenario::SmallCache => cache::small_cache(&mut stage),
            Scenario::CacheLimit => cache::cache_limit(&mut stage),
            Scenario::DroppedFlush => endings::dropped_flush(&mut stage),
            Scenario::DroppedCommit => endings::dropped_commit(&mut stage),
            Scenario::DroppedRelease => endings::dropped_release(&mut stage),
            Scenario::EndedThread => endings::ended_thread(&mut stage),
            Scenario::IdleBlockingFlush => endings::idle_blocking_flush(&mut stage),
            Scenario::IdleBlockingClose => endings::idle_blocking_close(&mut stage),
        }
        stage.over();
    }

    /// Judges what it left: QEMU finds no errors, and reads what was expected.
    ///
    /// # Errors
    /// The fault, in words.
    pub fn judge(self, qemu: &Qemu, dir: &Path) -> Result<(), String> {
        if dir.join(stage::EXPECTED).exists() {
            qemu.same_content(dir, stage::EXPECTED, stage::IMAGE)?;
        }
        if dir.join(stage::IMAGE).exists() && !dir.join(stage::MAY_LEAK).exists() {
            qemu.check_clean(dir, stage::IMAGE)?;
        }
        Ok(())
    }
}
