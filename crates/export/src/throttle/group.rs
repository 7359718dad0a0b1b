//! Limits of an export, and of groups that share one.

use super::gate::{Gate, Passed};
use super::limits::{Direction, Limits};
use super::queue::Member;
use crate::metrics::RequestKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Instant;
use zebu_engine::storage::Worker;
use zebu_storage::sync::Mutex;

/// Limits that several exports share, fairly. Cheap to clone.
#[derive(Debug, Clone)]
pub struct LimitGroup(Arc<Group>);

#[derive(Debug)]
struct Group {
    name: String,
    gate: Gate,
}

impl LimitGroup {
    /// A group without members.
    pub fn new(name: impl Into<String>, limits: &Limits) -> Self {
        let group = Self(Arc::new(Group { name: name.into(), gate: Gate::default() }));
        group.set_limits(limits);
        group
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The limits of all members together.
    pub fn limits(&self) -> Limits {
        self.0.gate.limits()
    }

    /// Changes the limits. Requests that wait go on under the new ones.
    pub fn set_limits(&self, limits: &Limits) {
        self.0.gate.set(limits);
    }

    /// Exports that share the limits.
    pub fn members(&self) -> usize {
        self.0.gate.members()
    }

    /// Requests that wait for the limits.
    pub fn waiting(&self) -> u64 {
        self.0.gate.waiting() as u64
    }
}

/// An export's place in a group. It leaves when nobody has this any more, and none of its requests waits then.
#[derive(Debug)]
struct Membership {
    group: LimitGroup,
    member: Member,
}

impl Membership {
    fn of(group: &LimitGroup) -> Self {
        Self { group: group.clone(), member: group.0.gate.join() }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.group.0.gate.leave(self.member);
    }
}

/// Requests of an export that waited for its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ThrottleStats {
    /// Requests that wait now.
    pub waiting: u64,
    /// Requests that had to wait and went.
    pub waited: u64,
    /// How long these waited, added up, in nanoseconds.
    pub nanoseconds: u64,
}

/// The limits of an export: its own and those of its group.
#[derive(Debug)]
pub(crate) struct ExportThrottle {
    own: Gate,
    member: Member,
    group: Mutex<Option<Arc<Membership>>>,
    /// Whether there is a group, so that nobody takes the lock for nothing.
    has_group: AtomicBool,
    is_released: AtomicBool,
    waiting: AtomicU64,
    waited: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Default for ExportThrottle {
    fn default() -> Self {
        let own = Gate::default();
        let member = own.join();
        Self {
            own,
            member,
            group: Mutex::default(),
            has_group: AtomicBool::new(false),
            is_released: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
        }
    }
}

/// Counts a request that waits, whichever way that ends.
struct Counted<'a>(&'a AtomicU64);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl ExportThrottle {
    pub(crate) fn limits(&self) -> Limits {
        self.own.limits()
    }

    pub(crate) fn set_limits(&self, limits: &Limits) {
        self.own.set(limits);
    }

    pub(crate) fn group(&self) -> Option<LimitGroup> {
        self.group.lock().as_ref().map(|membership| membership.group.clone())
    }

    pub(crate) fn set_group(&self, group: Option<&LimitGroup>) {
        let membership = group.map(|group| Arc::new(Membership::of(group)));
        let mut place = self.group.lock();
        self.has_group.store(membership.is_some(), SeqCst);
        let before = std::mem::replace(&mut *place, membership);
        drop(place);
        drop(before);
    }

    pub(crate) fn stats(&self) -> ThrottleStats {
        ThrottleStats {
            waiting: self.waiting.load(Relaxed),
            waited: self.waited.load(Relaxed),
            nanoseconds: self.nanoseconds.load(Relaxed),
        }
    }

    /// From now on nothing waits: the export ends.
    pub(crate) fn release(&self) {
        self.is_released.store(true, SeqCst);
        self.own.release(self.member);
        let membership = self.group.lock().clone();
        if let Some(membership) = membership {
            membership.group.0.gate.release(membership.member);
        }
    }

    /// Waits until a request may go. `bytes` count for reads and writes.
    pub(crate) async fn pass(&self, worker: &Worker, kind: RequestKind, bytes: u64) {
        let is_unlimited = !self.own.is_limited() && !self.has_group.load(SeqCst);
        if kind == RequestKind::Flush || is_unlimited || self.is_released.load(SeqCst) {
            return;
        }
        let (direction, bytes) = match kind {
            RequestKind::Write => (Direction::Write, bytes),
            RequestKind::Discard | RequestKind::WriteZeroes => (Direction::Write, 0),
            _ => (Direction::Read, bytes),
        };
        self.waiting.fetch_add(1, Relaxed);
        let counted = Counted(&self.waiting);
        let since = Instant::now();
        let mut passed = self.own.pass(worker, self.member, direction, bytes).await;
        let membership = self.group.lock().clone();
        if let Some(membership) = membership
            && !self.is_released.load(SeqCst)
        {
            let gate = &membership.group.0.gate;
            if gate.pass(worker, membership.member, direction, bytes).await == Passed::Waited {
                passed = Passed::Waited;
            }
        }
        drop(counted);
        if passed == Passed::Waited {
            let took = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.waited.fetch_add(1, Relaxed);
            self.nanoseconds.fetch_add(took, Relaxed);
        }
    }
}
