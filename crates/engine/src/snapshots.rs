//! Internal snapshots, as the public handle offers them.

use crate::node::Driver;
use crate::qcow2::life::info::snapshot_info;
use crate::qcow2::snapshots::SnapshotRequest;
use crate::{Image, Result, SnapshotInfo};
use std::time::{SystemTime, UNIX_EPOCH};
use zebu_qcow2::snapshot::SnapshotEntry;
use zebu_storage::Worker;

/// A snapshot to be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewSnapshot {
    /// Its name, at most 255 bytes, none of them zero. It may be empty, and need not be unique. Its id, which is unique, is
    /// chosen by the image.
    pub name: String,
    /// When it is taken; `None`: now. The format has dates from 1970 to 2106; another counts as the nearest of these.
    pub date: Option<SystemTime>,
    /// Time that the guest had been running, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// Instructions that the guest had run, where they were counted.
    pub icount: Option<u64>,
}

zebu_storage::option_setters!(NewSnapshot {
    name: impl Into<String>,
    date: impl Into<Option<SystemTime>>,
    vm_clock_nsec: u64,
    icount: impl Into<Option<u64>>,
});

impl NewSnapshot {
    /// A snapshot of this name, taken now.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), date: None, vm_clock_nsec: 0, icount: None }
    }
}

/// Which snapshot is meant. Of several with one name it is the first.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotRef {
    /// The one with this id.
    Id(String),
    /// The one with this name.
    Name(String),
    /// The one with this id or, failing that, with this name.
    IdOrName(String),
}

impl SnapshotRef {
    fn find(&self, entries: &[SnapshotEntry]) -> Option<usize> {
        let by_id = |id: &str| entries.iter().position(|entry| entry.id == id.as_bytes());
        let by_name = |name: &str| entries.iter().position(|entry| entry.name == name.as_bytes());
        match self {
            SnapshotRef::Id(id) => by_id(id),
            SnapshotRef::Name(name) => by_name(name),
            SnapshotRef::IdOrName(text) => by_id(text).or_else(|| by_name(text)),
        }
    }
}

/// Internal snapshots. They are taken, applied and deleted while other requests of the image are under way: changes
/// wait until the operation is done, reads go on.
impl Image {
    /// The snapshots in the image, oldest first. None for raw.
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        match &self.0.driver {
            Driver::Qcow2(qcow2) => {
                qcow2.snapshots().entries().iter().map(|entry| snapshot_info(entry, qcow2.header())).collect()
            }
            Driver::Raw(_) | Driver::Foreign(_) => Vec::new(),
        }
    }

    /// Takes a snapshot of what the disk holds when all changes that were under way at the call are done. It is durable
    /// when this returns, and so is everything that was written before.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with an external data file, or if a refcount is too narrow to count one more
    /// reference; [`crate::ErrorKind::InvalidArgument`] for a name that is too long or has a zero byte; no space; the limits of the format. The
    /// image is as before then.
    pub async fn create_snapshot(&self, worker: &Worker, new: NewSnapshot) -> Result<SnapshotInfo> {
        let qcow2 = self.qcow2("internal snapshots")?.clone();
        qcow2.check_writable()?;
        let date = new.date.unwrap_or_else(SystemTime::now);
        let date = date.duration_since(UNIX_EPOCH).unwrap_or_default();
        let request = SnapshotRequest::new(new.name, date, new.vm_clock_nsec, new.icount);
        self.alone(worker, async move |_, on| {
            let entry = qcow2.create_snapshot(on, request).await?;
            Ok(snapshot_info(&entry, qcow2.header()))
        })
        .await
    }

    /// Makes the disk hold what it held when the snapshot was taken, and as large as it was. The snapshot stays. It is
    /// durable when this returns.
    ///
    /// # Errors
    /// [`crate::ErrorKind::NotFound`]; [`crate::ErrorKind::Unsupported`] if a refcount is too narrow to count one more reference, or if the
    /// image has bitmaps, which an older state would make wrong; no space; damage. The disk is as before then, unless the last steps fail, which only leak space.
    pub async fn apply_snapshot(&self, worker: &Worker, which: &SnapshotRef) -> Result<()> {
        let qcow2 = self.qcow2("internal snapshots")?.clone();
        qcow2.check_writable()?;
        let which = which.clone();
        self.alone(worker, async move |me, on| {
            me.check_nothing_is_copied("goes back to a snapshot")?;
            qcow2.apply_snapshot(on, |entries| which.find(entries)).await
        })
        .await
    }

    /// Deletes a snapshot and gives back the space that only it needed. It is durable when this returns.
    ///
    /// # Errors
    /// [`crate::ErrorKind::NotFound`]; a failure on the way may leave the image marked dirty: the next writer makes its counts
    /// right.
    pub async fn delete_snapshot(&self, worker: &Worker, which: &SnapshotRef) -> Result<()> {
        let qcow2 = self.qcow2("internal snapshots")?.clone();
        qcow2.check_writable()?;
        let which = which.clone();
        self.alone(worker, async move |_, on| qcow2.delete_snapshot(on, |entries| which.find(entries)).await)
            .await
    }
}
