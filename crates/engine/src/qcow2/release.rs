//! Giving freed host clusters back, after the commit that made their unlinking durable.
//!
//! Invariant I2: a cluster is not overwritten while a durable pointer, or I/O in flight, may still use it. The commit
//! took care of the pointers; here a grace period takes care of the I/O, and a punch is waited for before the space
//! is free.

use crate::qcow2::space::Content;
use crate::qcow2::state::{AfterFree, Freed, Qcow2};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::task::Poll;
use zebu_storage::Worker;
use zebu_storage::commit_steps::{CommitStep, begins};
use zebu_storage::sabotage::{self, Fault};

impl Qcow2 {
    /// Releases what a commit freed. Errors leak the space (a check finds it), nothing else.
    pub(crate) async fn release(self: Arc<Self>, worker: &Worker, freed: Vec<Freed>) {
        if !sabotage::is(Fault::ReleaseWithoutGrace) {
            self.grace.wait().await;
        }
        for Freed { clusters, then } in freed {
            self.clusters.forget(&clusters, self.geometry.cluster_bits);
            let count = clusters.end - clusters.start;
            if then == AfterFree::Punch {
                self.punch_and_free(worker, clusters).await;
            } else {
                let content = match then {
                    AfterFree::Untouched(content) => content,
                    AfterFree::Reuse | AfterFree::Punch => Content::Recycled,
                };
                self.lower_and_free(worker, clusters, content).await;
            }
            self.clusters_released.fetch_add(count, Relaxed);
        }
        self.releases.fetch_sub(1, AcqRel);
        self.commit.wake_all();
    }

    /// Punches what nobody else refers to, and only then lets it be found free: a punch that is still under way must
    /// not hit what a new owner writes.
    async fn punch_and_free(&self, worker: &Worker, clusters: Range<u64>) {
        let bits = self.geometry.cluster_bits;
        let Ok(unshared) = self.refcount_runs(worker, clusters.clone(), 1).await else { return };
        let mut at = clusters.start;
        for run in unshared {
            self.lower_and_free(worker, at..run.start, Content::Recycled).await;
            at = run.end;
            let mut content = Content::Recycled;
            if sabotage::is(Fault::LowerBeforePunch) {
                self.lower_and_free(worker, run.clone(), Content::Punched).await;
                let (start, len) = (run.start << bits, (run.end - run.start) << bits);
                let _ = worker.punch_hole(&self.file, start, len).await;
                continue;
            }
            if self.file.can_punch() {
                let (start, len) = (run.start << bits, (run.end - run.start) << bits);
                begins(CommitStep::Punch);
                if worker.punch_hole(&self.file, start, len).await.is_ok() {
                    content = Content::Punched;
                }
            }
            self.lower_and_free(worker, run, content).await;
        }
        self.lower_and_free(worker, at..clusters.end, Content::Recycled).await;
    }

    /// Lowers the refcounts and takes what is 0 then into the free space, in one step as seen by the allocator: a scan
    /// in between would find the clusters by their refcount and hand them out twice.
    async fn lower_and_free(&self, worker: &Worker, clusters: Range<u64>, content: Content) {
        if clusters.is_empty() {
            return;
        }
        let _no_scan = self.space_gate.enter().await;
        let Ok(runs) = self.lower(worker, clusters).await else { return };
        let mut space = self.space();
        for run in runs {
            // A table that was shared, such as one that a snapshot kept, is metadata no longer.
            self.metadata.remove(run.clone());
            space.free.insert_missing(run, content);
        }
    }

    /// Waits until no release is under way.
    pub(crate) async fn releases_done(&self) {
        self.released_until(|| self.releases.load(Acquire) == 0).await;
    }

    /// Waits until more than `released` clusters were released since the open, or nothing is on its way. (Where one
    /// commit follows the other, a release is always under way.)
    pub(crate) async fn some_are_released(&self, released: u64) {
        let is_enough =
            || self.clusters_released.load(Acquire) != released || self.releases.load(Acquire) == 0;
        self.released_until(is_enough).await;
    }

    async fn released_until(&self, is_enough: impl Fn() -> bool) {
        poll_fn(|cx| {
            if is_enough() {
                return Poll::Ready(());
            }
            self.commit.wake_me(cx.waker());
            if is_enough() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
