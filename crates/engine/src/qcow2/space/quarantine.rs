//! Quarantine: host clusters that were unlinked, until they may be used again.
//!
//! Invariant I2: a cluster is not overwritten while a durable pointer, or I/O in flight, may still use it. So a commit
//! takes what is here when it begins, and what it took is released when it has ended and older readers have left.

use crate::qcow2::space::free::SpaceContent;
use crate::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use crate::sync::{Mutex, MutexGuard, WaitQueue};
use std::ops::Range;

/// Host clusters whose refcount is to be lowered by one each, once the change that unlinked them is durable and
/// nobody uses them any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Quarantined {
    pub(super) clusters: Range<u64>,
    pub(super) mode: FreeMode,
    reached: Reached,
}

/// The reads that may have found clusters before they were unlinked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reached {
    /// Reads that are under way may use them.
    ByReads,
    /// No read that is under way can use them: the release need not wait for any.
    ByNoRead,
}

impl Quarantined {
    /// Host cluster numbers.
    pub(crate) fn clusters(&self) -> &Range<u64> {
        &self.clusters
    }

    /// Whether the file system gets their space back.
    pub(crate) fn is_to_punch(&self) -> bool {
        self.mode == FreeMode::Punch
    }

    /// Whether a read that is under way may use them.
    pub(crate) fn may_be_read(&self) -> bool {
        self.reached == Reached::ByReads
    }
}

/// The way in which space becomes free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FreeMode {
    /// It may be used again.
    Reuse,
    /// It is given back to the file system first.
    Punch,
    /// It was never written since it was handed out.
    Untouched(SpaceContent),
}

impl FreeMode {
    /// Of what was handed out, or set aside, and not used.
    pub(crate) fn unused(content: SpaceContent) -> Self {
        if content == SpaceContent::Reserved { FreeMode::Punch } else { FreeMode::Untouched(content) }
    }
}

/// The clusters in quarantine, and the releases that are under way.
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    /// Unlinked and in no commit. Pushed after the change that unlinked, under the same lock.
    waiting: Mutex<Vec<Quarantined>>,
    /// Releases under way, from the freeze of the commit that frees their clusters on. Raised under the lock of
    /// `waiting`.
    releases: AtomicUsize,
    /// Waiters for the end of releases.
    queue: WaitQueue,
    clusters_freed: AtomicU64,
    clusters_released: AtomicU64,
    /// Clusters that are on their way back to the file system, and those that have come there.
    to_punch: AtomicU64,
    punched: AtomicU64,
}

impl Quarantine {
    fn waiting(&self) -> MutexGuard<'_, Vec<Quarantined>> {
        self.waiting.lock()
    }

    /// Puts host clusters into quarantine; called after they were unlinked, under the lock that unlinked them.
    pub(crate) fn push(&self, clusters: Range<u64>, mode: FreeMode) {
        self.push_reached(clusters, mode, Reached::ByReads);
    }

    /// The same for clusters that no read under way uses: tables that are in memory while the image is open, or what is
    /// referred to by a snapshot.
    pub(crate) fn push_unread(&self, clusters: Range<u64>, mode: FreeMode) {
        self.push_reached(clusters, mode, Reached::ByNoRead);
    }

    fn push_reached(&self, clusters: Range<u64>, mode: FreeMode, reached: Reached) {
        if clusters.is_empty() {
            return;
        }
        let count = clusters.end - clusters.start;
        self.clusters_freed.fetch_add(count, Relaxed);
        let mut waiting = self.waiting();
        // Under the lock: who takes them out counts them down.
        if mode == FreeMode::Punch {
            self.to_punch.fetch_add(count, SeqCst);
        }
        if let Some(last) = waiting.last_mut()
            && (last.mode, last.reached) == (mode, reached)
            && last.clusters.end == clusters.start
        {
            last.clusters.end = clusters.end;
            return;
        }
        waiting.push(Quarantined { clusters, mode, reached });
    }

    /// Takes all clusters that wait, to be released by the caller. They count as a release from now on, so that whoever
    /// runs out of space waits for it.
    pub(crate) fn take(&self) -> Vec<Quarantined> {
        let mut waiting = self.waiting();
        if !waiting.is_empty() {
            self.releases.fetch_add(1, Relaxed);
        }
        std::mem::take(&mut *waiting)
    }

    /// Puts back what [`Quarantine::take`] took, because its commit failed.
    pub(crate) fn put_back(&self, taken: Vec<Quarantined>) {
        if !taken.is_empty() {
            self.waiting().extend(taken);
            self.end_release();
        }
    }

    /// Ends what [`Quarantine::take`] began.
    pub(crate) fn end_release(&self) {
        // What those who wait look at: see [`WaitQueue`].
        self.releases.fetch_sub(1, SeqCst);
        self.queue.wake_all();
    }

    /// Counts clusters that came out of quarantine.
    pub(crate) fn note_released(&self, clusters: u64) {
        // What those who wait for space look at: see [`WaitQueue`].
        self.clusters_released.fetch_add(clusters, SeqCst);
        self.queue.wake_all();
    }

    /// Counts clusters whose space the file system has again, or never will have.
    pub(crate) fn note_punched(&self, clusters: u64) {
        self.punched.fetch_add(clusters, SeqCst);
        self.to_punch.fetch_sub(clusters, SeqCst);
        self.queue.wake_all();
    }

    /// Whether the file system gets space back, once a commit and the reads of it have ended.
    pub(crate) fn has_any_to_punch(&self) -> bool {
        self.to_punch.load(SeqCst) > 0
    }

    /// Clusters that were given back to the file system since the open.
    pub(crate) fn punched(&self) -> u64 {
        self.punched.load(SeqCst)
    }

    /// Waits until more than `punched` clusters were given back to the file system since the open, or nothing is on its way.
    pub(crate) async fn some_are_punched(&self, punched: u64) {
        let is_enough = || self.punched() != punched || !self.is_releasing();
        self.queue.until(|| is_enough().then_some(())).await;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting().is_empty()
    }

    /// Whether clusters are on their way back: they wait for a commit, or for the end of one and what follows it.
    pub(crate) fn has_any(&self) -> bool {
        let waiting = self.waiting();
        !waiting.is_empty() || self.is_releasing()
    }

    fn is_releasing(&self) -> bool {
        self.releases.load(SeqCst) != 0
    }

    /// Clusters that were put in since the open.
    pub(crate) fn freed(&self) -> u64 {
        self.clusters_freed.load(Relaxed)
    }

    /// Clusters that came out since the open.
    pub(crate) fn released(&self) -> u64 {
        self.clusters_released.load(SeqCst)
    }

    /// Waits until no release is under way. There is no bound: an operation that gave up here would end halfway, with
    /// counts that are lowered later than it says.
    pub(crate) async fn releases_done(&self) {
        self.queue.until(|| (!self.is_releasing()).then_some(())).await;
    }

    /// Waits until more than `released` clusters were released since the open, or nothing is on its way. (Where one
    /// commit follows the other, a release is always under way.)
    pub(crate) async fn some_are_released(&self, released: u64) {
        let is_enough = || self.released() != released || !self.is_releasing();
        self.queue.until(|| is_enough().then_some(())).await;
    }
}
