//! Operations on the whole image beside a step of a commit: what they have done when they say so, and what a crash may
//! leave of the snapshots that they take.

use crate::crash::guest::Guest;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Durability, ExtentKind, Image, NewBitmap, NewSnapshot, SnapshotRef};
use zebu_sim::{GuestModel, GuestOp, GuestRequest};

/// The name of what was there before the step.
const OLD: &str = "old";
/// The name of what is made beside it.
const NEW: &str = "new";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    TakeSnapshot,
    /// Takes a snapshot, writes the disk's bytes again, to other clusters, and goes back: the disk stays as it is throughout.
    GoBack,
    DeleteSnapshot,
    AddBitmap,
    ClearBitmap,
}

impl Change {
    pub(crate) fn is_of_snapshots(self) -> bool {
        matches!(self, Self::TakeSnapshot | Self::GoBack | Self::DeleteSnapshot)
    }
}

/// The operation of one cell.
pub(crate) struct Whole {
    guest: Rc<Guest>,
    /// Bytes of the disk that hold data.
    pattern: u64,
    /// The content of the old snapshot.
    old: RefCell<Vec<u8>>,
    /// The new snapshot may hold what a read may return that begins with it.
    new: Cell<Option<GuestOp>>,
    /// Where the disk's first cluster lay then.
    place: Cell<Option<u64>>,
    is_under_way: Cell<bool>,
    result: RefCell<Option<zebu_engine::Result<()>>>,
}

impl Whole {
    pub(crate) fn new(guest: Rc<Guest>, pattern: u64) -> Self {
        Self {
            guest,
            pattern,
            old: RefCell::default(),
            new: Cell::new(None),
            place: Cell::new(None),
            is_under_way: Cell::new(false),
            result: RefCell::default(),
        }
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.is_under_way.get()
    }

    pub(crate) async fn take_old_snapshot(&self, worker: &Worker) {
        let image = &self.guest.image;
        *self.old.borrow_mut() =
            crate::crash::judge::read_all(worker, image, image.virtual_size()).await.unwrap();
        image.create_snapshot(worker, snapshot(OLD)).await.unwrap();
    }

    pub(crate) async fn add_old_bitmap(&self, worker: &Worker) {
        self.guest.image.add_bitmap(worker, &bitmap(OLD)).await.unwrap();
    }

    /// Does it, beside whatever else happens.
    pub(crate) async fn begin(&self, worker: &Worker, change: Change) {
        self.is_under_way.set(true);
        let result = self.make(worker, change).await;
        self.is_under_way.set(false);
        if let Err(error) = &result {
            self.guest.note_failure(error);
        }
        *self.result.borrow_mut() = Some(result);
    }

    async fn make(&self, worker: &Worker, change: Change) -> zebu_engine::Result<()> {
        let image = &self.guest.image;
        match change {
            Change::TakeSnapshot => self.take(worker).await,
            Change::GoBack => self.go_back(worker).await,
            Change::DeleteSnapshot => {
                image.delete_snapshot(worker, &SnapshotRef::Name(OLD.to_owned())).await.map(drop)
            }
            Change::AddBitmap => image.add_bitmap(worker, &bitmap(NEW)).await.map(drop),
            Change::ClearBitmap => image.clear_bitmap(worker, OLD).await.map(drop),
        }
    }

    async fn take(&self, worker: &Worker) -> zebu_engine::Result<()> {
        self.new.set(Some(self.guest.model.borrow_mut().begin(GuestRequest::Read)));
        self.place.set(first_cluster(&self.guest.image, worker).await?);
        self.guest.image.create_snapshot(worker, snapshot(NEW)).await.map(drop)
    }

    async fn go_back(&self, worker: &Worker) -> zebu_engine::Result<()> {
        let image = &self.guest.image;
        // What failed may have come to the end of its first part.
        if !has_snapshot(image, NEW) {
            self.take(worker).await?;
        }
        let (read, bufs) = image.read(worker, 0, IoBuf::zeroed(self.pattern as usize).into()).await;
        read?;
        image.write(worker, 0, bufs, Durability::Volatile).await.0?;
        if first_cluster(image, worker).await? == self.place.get() {
            self.guest.blame("a write went to a cluster of the snapshot".to_owned());
        }
        image.apply_snapshot(worker, &SnapshotRef::Name(NEW.to_owned())).await?;
        if first_cluster(image, worker).await? != self.place.get() {
            self.guest.blame("the disk has not gone back to the snapshot's clusters".to_owned());
        }
        Ok(())
    }

    /// Checks that a change which reported success is done, and that a failed one has changed nothing and can be done now.
    pub(crate) async fn must_have_done(&self, worker: &Worker, change: Change) -> Result<(), String> {
        let image = &self.guest.image;
        let result = self.result.borrow_mut().take();
        if let Err(error) = result.ok_or("the operation was not begun")? {
            if change != Change::GoBack && self.is_done(worker, image, change).await? {
                return Err(format!("{change:?} failed ({error}), and is done"));
            }
            self.make(worker, change).await.map_err(|e| format!("{change:?} once more: {e}"))?;
        }
        *self.result.borrow_mut() = Some(Ok(()));
        self.judge_image(worker, image, change).await
    }

    /// Once the operation has said that it is done, it is in whatever is left of the image.
    pub(crate) async fn judge_image(
        &self,
        worker: &Worker,
        image: &Image,
        change: Change,
    ) -> Result<(), String> {
        let has_said_so = matches!(*self.result.borrow(), Some(Ok(())));
        if has_said_so && !self.is_done(worker, image, change).await? {
            let snapshots: Vec<String> =
                image.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
            let bitmaps: Vec<String> = image.bitmaps().into_iter().map(|bitmap| bitmap.name).collect();
            return Err(format!(
                "{change:?} is done, and is not; snapshots: {snapshots:?}, bitmaps: {bitmaps:?}"
            ));
        }
        Ok(())
    }

    async fn is_done(&self, worker: &Worker, image: &Image, change: Change) -> Result<bool, String> {
        Ok(match change {
            Change::TakeSnapshot | Change::GoBack => has_snapshot(image, NEW),
            Change::DeleteSnapshot => !has_snapshot(image, OLD),
            Change::AddBitmap => image.bitmaps().iter().any(|bitmap| bitmap.name == NEW),
            // Something was written when there was no step yet.
            Change::ClearBitmap => {
                let bits = image.bitmap_bits(worker, OLD).await.map_err(|e| e.to_string())?;
                !bits.run_at(self.pattern + (16 << 10)).0
            }
        })
    }

    /// Judges the content of a snapshot that a crash has left.
    pub(crate) fn judge_snapshot(&self, model: &GuestModel, name: &str, bytes: &[u8]) -> Result<(), String> {
        match (name, self.new.get()) {
            (OLD, _) if *self.old.borrow() == bytes => Ok(()),
            (NEW, Some(taken)) => {
                model.check_read(taken, 0, bytes).map_err(|v| format!("the new snapshot: {v}"))
            }
            _ => Err(format!("the snapshot {name} holds what it never held")),
        }
    }
}

fn snapshot(name: &str) -> NewSnapshot {
    NewSnapshot::named(name.to_owned())
}

fn bitmap(name: &str) -> NewBitmap {
    NewBitmap::named(name.to_owned()).granularity(Some(512))
}

fn has_snapshot(image: &Image, name: &str) -> bool {
    image.snapshots().iter().any(|snapshot| snapshot.name == name)
}

/// Where the first byte of the disk lies.
async fn first_cluster(image: &Image, worker: &Worker) -> zebu_engine::Result<Option<u64>> {
    Ok(match image.extent(worker, 0, 1).await?.kind {
        ExtentKind::Data { host } => Some(host),
        _ => None,
    })
}
