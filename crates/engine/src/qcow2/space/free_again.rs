//! Making host clusters free again, at the end of their quarantine.

use crate::qcow2::space::HostSpace;
use crate::qcow2::space::free::SpaceContent;
use crate::qcow2::space::quarantine::{FreeMode, Quarantined};
use std::ops::Range;
use zebu_storage::Worker;
use zebu_storage::commit_steps::{CommitStep, begins};
use zebu_storage::sabotage::{self, Fault};

impl HostSpace {
    /// Lowers the references of clusters that nobody uses any more, and makes free what has none then. Errors leak the
    /// space (a check finds it), nothing else.
    pub(crate) async fn free(&self, worker: &Worker, quarantined: Quarantined) {
        let Quarantined { clusters, mode, .. } = quarantined;
        match mode {
            FreeMode::Punch => self.punch_and_free(worker, clusters).await,
            FreeMode::Untouched(content) => self.lower_and_free(worker, clusters, content).await,
            FreeMode::Reuse => self.lower_and_free(worker, clusters, SpaceContent::Recycled).await,
        }
    }

    /// Punches what nobody else refers to, and only then lets it be found free: a punch that is still under way must
    /// not hit what a new owner writes.
    async fn punch_and_free(&self, worker: &Worker, clusters: Range<u64>) {
        let bits = self.geometry.cluster_bits;
        let Ok(unshared) = self.refcount_runs(worker, clusters.clone(), 1).await else { return };
        let mut at = clusters.start;
        for run in unshared {
            self.lower_and_free(worker, at..run.start, SpaceContent::Recycled).await;
            at = run.end;
            let mut content = SpaceContent::Recycled;
            if sabotage::is(Fault::LowerBeforePunch) {
                self.lower_and_free(worker, run.clone(), SpaceContent::Punched).await;
                let (start, len) = (run.start << bits, (run.end - run.start) << bits);
                let _ = worker.punch_hole(self.files.file(), start, len).await;
                continue;
            }
            if self.files.file().can_punch() {
                let (start, len) = (run.start << bits, (run.end - run.start) << bits);
                begins(CommitStep::Punch);
                if worker.punch_hole(self.files.file(), start, len).await.is_ok() {
                    content = SpaceContent::Punched;
                }
            }
            self.lower_and_free(worker, run, content).await;
        }
        self.lower_and_free(worker, at..clusters.end, SpaceContent::Recycled).await;
    }

    /// Lowers the refcounts and takes what is 0 then into the free space, in one step as seen by the allocator: a scan
    /// in between would find the clusters by their refcount and hand them out twice.
    async fn lower_and_free(&self, worker: &Worker, clusters: Range<u64>, content: SpaceContent) {
        if clusters.is_empty() {
            return;
        }
        let _no_scan = self.space_mutex.lock().await;
        let Ok(runs) = self.lower(worker, clusters).await else { return };
        let mut pool = self.pool();
        for run in runs {
            // A table that was shared, such as one that a snapshot kept, is metadata no longer.
            self.metadata.remove(run.clone());
            pool.free.insert_missing(run, content);
        }
    }
}
