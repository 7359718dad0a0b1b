//! Releases: the quarantine's end, after the commit that made the unlinking of its clusters durable.
//!
//! The commit took care of durable pointers; here the wait for older readers takes care of I/O in flight, and a punch is
//! waited for before the space is free (invariant I2).

use crate::image_worker::vanished;
use crate::qcow2::space::quarantine::Quarantined;
use crate::qcow2::state::Qcow2;
use std::sync::Arc;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// A release that others wait for. One that vanishes in the middle may have done a part of a step: nothing is written any
/// more.
struct CountedRelease {
    image: Arc<Qcow2>,
    has_ended: bool,
}

impl CountedRelease {
    fn end(mut self) {
        self.has_ended = true;
    }
}

impl Drop for CountedRelease {
    fn drop(&mut self) {
        if !self.has_ended {
            self.image.files.poison(&vanished(self.image.path()));
        }
        self.image.space.quarantine().end_release();
    }
}

impl Qcow2 {
    /// Has the image's worker release what a commit took from quarantine. The worker was started by the change that
    /// unlinked it.
    pub(super) fn start_release(self: &Arc<Self>, caller: &Worker, taken: Vec<Quarantined>) {
        if taken.is_empty() {
            return;
        }
        let counted = CountedRelease { image: self.clone(), has_ended: false };
        if sabotage::is(Fault::RunOnCaller) {
            let on = caller.clone();
            drop(caller.spawn(async move {
                counted.image.release(&on, taken).await;
                counted.end();
            }));
            return;
        }
        // Without a worker, the image is poisoned.
        let Some(own) = self.own_worker.get() else { return };
        drop(own.run(move |on| async move {
            counted.image.release(&on, taken).await;
            counted.end();
        }));
    }

    async fn release(&self, worker: &Worker, taken: Vec<Quarantined>) {
        let (read, unread): (Vec<_>, Vec<_>) = taken.into_iter().partition(Quarantined::may_be_read);
        self.free_all(worker, unread).await;
        if !read.is_empty() && !sabotage::is(Fault::ReleaseWithoutGrace) {
            self.readers().wait(worker).await;
        }
        self.free_all(worker, read).await;
    }

    async fn free_all(&self, worker: &Worker, all: Vec<Quarantined>) {
        for quarantined in all {
            let clusters = quarantined.clusters().clone();
            let is_to_punch = quarantined.is_to_punch();
            self.inflated.forget(&clusters, self.geometry().cluster_bits);
            self.space.free(worker, quarantined).await;
            if is_to_punch {
                self.space.quarantine().note_punched(clusters.end - clusters.start);
            }
            self.space.quarantine().note_released(clusters.end - clusters.start);
        }
    }
}
