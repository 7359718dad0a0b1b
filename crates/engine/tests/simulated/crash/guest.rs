//! A guest that sends random requests, several at once, and tells the model.

use crate::crash::bitmaps::Known;
use crate::crash::setup::Setup;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Durability, ErrorKind, Image, Preallocation, ZeroMode};
use zebu_sim::{GuestModel, GuestOp, GuestRequest, GuestResult, SimRng};

/// Which requests may fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failures {
    /// None: nothing is wrong with the disk.
    Forbidden,
    /// Any but for damage: the disk fails.
    OfTheDisk,
    /// Changes and flushes, for want of space.
    ForSpace,
    /// Requests that find the disk shorter than it was when they were sent.
    PastTheEnd,
    /// Requests that find the image closed.
    Closed,
}

/// A request of a guest: offsets and lengths in bytes, multiples of 512.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    Write {
        offset: u64,
        len: u64,
        durability: Durability,
    },
    /// Whole clusters.
    WriteCompressed {
        offset: u64,
        len: u64,
        durability: Durability,
    },
    Zero {
        offset: u64,
        len: u64,
        mode: ZeroMode,
    },
    Discard {
        offset: u64,
        len: u64,
    },
    Flush,
    Read {
        offset: u64,
        len: u64,
    },
}

impl Request {
    /// Any request to a disk of `len` bytes.
    pub(crate) fn random(rng: &mut SimRng, len: u64, cluster: u64, compressed: bool) -> Self {
        let end = len;
        let (offset, len) = random_range(rng, end, cluster);
        match rng.below(100) {
            0..45 => {
                let durability = if rng.chance(1, 8) { Durability::Durable } else { Durability::Volatile };
                if compressed && rng.chance(1, 2) {
                    // The clusters that the range touches.
                    let start = offset / cluster * cluster;
                    let end = (offset + len).next_multiple_of(cluster).min(end);
                    Self::WriteCompressed { offset: start, len: end - start, durability }
                } else {
                    Self::Write { offset, len, durability }
                }
            }
            45..57 => Self::Zero { offset, len, mode: *rng.pick(&[ZeroMode::Keep, ZeroMode::Unmap]) },
            57..70 => Self::Discard { offset, len },
            70..85 => Self::Flush,
            _ => Self::Read { offset, len },
        }
    }
}

/// A range of a disk of `len` bytes: often near its start, often whole clusters.
fn random_range(rng: &mut SimRng, len: u64, cluster: u64) -> (u64, u64) {
    let sectors = len / 512;
    let cluster = cluster / 512;
    let hot = if rng.chance(1, 3) { sectors.min(cluster * 2) } else { sectors };
    let mut start = rng.below(hot.max(1));
    let longest = match rng.below(4) {
        0 => 1,
        1 => 8,
        2 => cluster.max(2),
        _ => cluster * 4,
    };
    if rng.chance(1, 3) {
        start -= start % cluster;
    }
    let mut len = rng.between(1, longest);
    if rng.chance(1, 3) {
        len = len.next_multiple_of(cluster);
    }
    (start * 512, len.min(sectors - start) * 512)
}

/// State that the requests of a guest share.
pub(crate) struct Guest {
    pub(crate) image: Image,
    pub(crate) model: RefCell<GuestModel>,
    pub(crate) cluster: u64,
    pub(crate) failures: Cell<Failures>,
    /// Requests that failed, by the kind of their error.
    pub(crate) failed: RefCell<Vec<ErrorKind>>,
    /// Some writes are compressed.
    pub(crate) compressed: bool,
    /// Reads copy into the image what they find below it.
    pub(crate) copy_on_read: bool,
    /// Changes that the dirty bitmaps of the image have to know.
    pub(crate) bitmaps: RefCell<Known>,
    /// The first violation.
    pub(crate) violation: RefCell<Option<String>>,
}

impl Guest {
    pub(crate) fn new(image: Image, model: GuestModel, setup: &Setup) -> Self {
        Self {
            image,
            model: RefCell::new(model),
            cluster: setup.cluster_size,
            compressed: setup.gather_memory.is_some(),
            copy_on_read: setup.copy_on_read,
            failures: Cell::new(Failures::Forbidden),
            failed: RefCell::default(),
            bitmaps: RefCell::default(),
            violation: RefCell::default(),
        }
    }

    pub(crate) fn blame(&self, what: String) {
        self.violation.borrow_mut().get_or_insert(what);
    }

    fn begin(&self, request: GuestRequest) -> GuestOp {
        self.model.borrow_mut().begin(request)
    }

    fn end(&self, op: GuestOp, result: zebu_engine::Result<()>, success: GuestResult) {
        let outcome = match result {
            Ok(()) => success,
            Err(error) => {
                self.note_failure(&error);
                GuestResult::Failed
            }
        };
        self.model.borrow_mut().end(op, outcome);
    }

    /// Notes that something failed: nothing but what may fail now.
    pub(crate) fn note_failure(&self, error: &zebu_engine::Error) {
        let kind = error.kind();
        let allowed = match self.failures.get() {
            Failures::Forbidden => false,
            Failures::OfTheDisk => {
                matches!(kind, ErrorKind::Io | ErrorKind::NoSpace | ErrorKind::Poisoned)
            }
            Failures::ForSpace => kind == ErrorKind::NoSpace,
            // What was whole clusters up to the end is not, when the end is another.
            Failures::PastTheEnd => {
                matches!(kind, ErrorKind::OutOfRange | ErrorKind::InvalidArgument)
            }
            Failures::Closed => kind == ErrorKind::InvalidArgument && self.image.is_closed(),
        };
        if !allowed {
            self.blame(format!("a request failed ({kind:?}): {error}"));
        }
        self.failed.borrow_mut().push(kind);
    }

    /// One random request.
    pub(crate) async fn request(&self, worker: &Worker, rng: &mut SimRng) {
        let len = self.model.borrow().len();
        let request = Request::random(rng, len, self.cluster, self.compressed);
        self.perform(worker, request).await;
    }

    /// Sends a request and tells the model. What lies past the end of the disk is left out.
    pub(crate) async fn perform(&self, worker: &Worker, request: Request) {
        let end = self.model.borrow().len();
        let cut = |offset: u64, len: u64| (offset.min(end), (offset + len).min(end) - offset.min(end));
        match request {
            Request::Write { offset, len, durability } => {
                let (offset, len) = cut(offset, len);
                self.write(worker, offset, len, durability).await;
            }
            Request::WriteCompressed { offset, len, durability } => {
                let (offset, len) = cut(offset, len);
                // The end of the disk may have been elsewhere when the request was made up.
                let mut end = offset + len;
                if end < self.image.virtual_size() {
                    end -= end % self.image.cluster_size();
                }
                if offset < end {
                    self.write_compressed(worker, offset, end - offset, durability).await;
                }
            }
            Request::Zero { offset, len, mode } => {
                let (offset, len) = cut(offset, len);
                self.zero(worker, offset, len, mode).await;
            }
            Request::Discard { offset, len } => {
                let (offset, len) = cut(offset, len);
                self.discard(worker, offset, len).await;
            }
            Request::Flush => self.flush(worker).await,
            Request::Read { offset, len } => {
                let (offset, len) = cut(offset, len);
                self.read(worker, offset, len).await;
            }
        }
    }

    pub(crate) async fn write(&self, worker: &Worker, offset: u64, len: u64, durability: Durability) {
        let op = self.begin(GuestRequest::Write { offset, len });
        let mut bytes = vec![0; len as usize];
        op.value().fill(offset, &mut bytes);
        let (result, _) = self.image.write(worker, offset, IoBuf::copy_of(&bytes).into(), durability).await;
        let success =
            if durability == Durability::Durable { GuestResult::Durable } else { GuestResult::Done };
        self.end(op, result, success);
    }

    pub(crate) async fn zero(&self, worker: &Worker, offset: u64, len: u64, mode: ZeroMode) {
        let op = self.begin(GuestRequest::Zero { offset, len });
        let result = self.image.write_zeroes(worker, offset, len, mode).await;
        self.end(op, result, GuestResult::Done);
    }

    pub(crate) async fn discard(&self, worker: &Worker, offset: u64, len: u64) {
        let op = self.begin(GuestRequest::Discard { offset, len });
        let result = self.image.discard(worker, offset, len).await;
        self.end(op, result, GuestResult::Done);
    }

    pub(crate) async fn write_compressed(
        &self,
        worker: &Worker,
        offset: u64,
        len: u64,
        durability: Durability,
    ) {
        let op = self.begin(GuestRequest::Write { offset, len });
        let mut bytes = vec![0; len as usize];
        op.value().fill(offset, &mut bytes);
        let bufs = IoBuf::copy_of(&bytes).into();
        let (result, _) = self.image.write_compressed(worker, offset, bufs, durability).await;
        let success =
            if durability == Durability::Durable { GuestResult::Durable } else { GuestResult::Done };
        self.end(op, result, success);
    }

    pub(crate) async fn flush(&self, worker: &Worker) {
        self.try_flush(worker).await;
    }

    /// Whether it was done.
    pub(crate) async fn try_flush(&self, worker: &Worker) -> bool {
        let op = self.begin(GuestRequest::Flush);
        let result = self.image.flush(worker).await;
        let is_done = result.is_ok();
        self.end(op, result, GuestResult::Done);
        is_done
    }

    pub(crate) async fn read(&self, worker: &Worker, offset: u64, len: u64) {
        let op = self.begin(GuestRequest::Read);
        if self.copy_on_read
            && let Err(error) = self.image.fill_from_backing(worker, offset, len).await
        {
            self.note_failure(&error);
        }
        let (result, bufs) = self.image.read(worker, offset, IoBuf::zeroed(len as usize).into()).await;
        if result.is_ok() {
            let mut bytes = vec![0; len as usize];
            bufs.copy_to(0, &mut bytes);
            let checked = self.model.borrow().check_read(op, offset, &bytes);
            if let Err(violation) = checked {
                self.blame(format!("a read got what it must not: {violation}"));
            }
        }
        self.end(op, result, GuestResult::Done);
    }

    /// Changes the length of the disk; nothing else but flushes and reads of what stays may be under way.
    pub(crate) async fn resize(&self, worker: &Worker, len: u64) {
        let op = self.begin(GuestRequest::Resize { len });
        let mode = how_to_grow(self.image.virtual_size(), len);
        crate::crash::bitmaps::cut_off(&mut self.bitmaps.borrow_mut(), len);
        let result = self.image.resize(worker, len, zebu_engine::Shrink::Allow, mode).await;
        // A resize is durable when it completes.
        self.end(op, result, GuestResult::Durable);
    }

    /// Several requests one after the other; a stream of its own.
    pub(crate) async fn stream(self: Rc<Self>, worker: Worker, mut rng: SimRng, requests: u64) {
        for _ in 0..requests {
            if self.violation.borrow().is_some() {
                return;
            }
            self.request(&worker, &mut rng).await;
        }
    }
}

/// The preallocation of a resize: any, by the new length.
pub(crate) fn how_to_grow(from: u64, to: u64) -> Preallocation {
    match to / 512 % 4 {
        _ if to <= from => Preallocation::Off,
        0 => Preallocation::Metadata,
        1 => Preallocation::Falloc,
        2 => Preallocation::Full,
        _ => Preallocation::Off,
    }
}
