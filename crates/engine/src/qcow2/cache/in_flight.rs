//! Allocations in flight: guest clusters whose new place is chosen but not linked yet.
//!
//! The table belongs to the shard of the slice that maps the clusters and is guarded by its lock, so that choosing a
//! place and marking the cluster are one step. A request that overlaps waits for the clusters that it overlaps, and
//! for nothing else.

use crate::sync::{WaitList, Wakers};
use foldhash::fast::FixedState;
use std::collections::HashMap;
use std::task::Waker;

/// Guest clusters with an allocation in flight, and who waits for each.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    clusters: HashMap<u64, WaitList, FixedState>,
}

impl InFlight {
    /// Whether `cluster` has an allocation in flight.
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        !self.clusters.is_empty() && self.clusters.contains_key(&cluster)
    }

    /// Marks a cluster that is not marked.
    pub(crate) fn begin(&mut self, cluster: u64) {
        let before = self.clusters.insert(cluster, WaitList::default());
        debug_assert!(before.is_none(), "guest cluster {cluster} is allocated twice at once");
    }

    /// Has `waker` woken when `cluster` is no longer marked; `false` if it is not marked.
    pub(crate) fn wait(&mut self, cluster: u64, waker: &Waker) -> bool {
        let Some(waiting) = self.clusters.get_mut(&cluster) else { return false };
        waiting.add(waker);
        true
    }

    /// Unmarks a cluster. The wakers are to be woken after the lock is released.
    pub(crate) fn end(&mut self, cluster: u64) -> Wakers {
        self.clusters.remove(&cluster).map(|mut waiting| waiting.take()).unwrap_or_default()
    }
}
