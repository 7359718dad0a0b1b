//! Giving freed host clusters back, after the commit that made their unlinking durable.
//!
//! Invariant I2: a cluster is not overwritten while a durable pointer, or I/O in flight, may still use it. The commit
//! took care of the pointers; here a grace period takes care of the I/O, and a punch is waited for before the space
//! is free.

use crate::qcow2::space::Content;
use crate::qcow2::state::{AfterFree, Freed, Qcow2};
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::task::Poll;
use zebu_storage::Worker;

impl Qcow2 {
    /// Releases what a commit freed. Errors leak the space (a check finds it), nothing else.
    pub(crate) async fn release(self: Arc<Self>, worker: &Worker, freed: Vec<Freed>) {
        self.grace.wait().await;
        for Freed { clusters, then } in freed {
            self.clusters.forget(&clusters, self.geometry.cluster_bits);
            let Ok(runs) = self.lower(worker, clusters).await else { continue };
            for run in runs {
                let content = match then {
                    AfterFree::Reuse => Content::Recycled,
                    AfterFree::Untouched(content) => content,
                    AfterFree::Punch => self.punch(worker, run.start, run.end).await,
                };
                // A scan may have found it by its refcount meanwhile.
                self.space().free.insert_missing(run, content);
            }
        }
        self.releases.fetch_sub(1, AcqRel);
        self.commit.wake_all();
    }

    async fn punch(&self, worker: &Worker, start: u64, end: u64) -> Content {
        let bits = self.geometry.cluster_bits;
        if !self.file.can_punch() {
            return Content::Recycled;
        }
        match worker.punch_hole(&self.file, start << bits, (end - start) << bits).await {
            Ok(()) => Content::Punched,
            Err(_) => Content::Recycled,
        }
    }

    /// Waits until no release is under way.
    pub(crate) async fn releases_done(&self) {
        poll_fn(|cx| {
            if self.releases.load(Acquire) == 0 {
                return Poll::Ready(());
            }
            self.commit.wake_me(cx.waker());
            if self.releases.load(Acquire) == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
