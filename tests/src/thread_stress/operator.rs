//! The thread that changes the image as a whole while the others use it: its size, snapshots, bitmaps, the cache.

use super::disk;
use super::journal::{Kind, Outcome};
use super::plan::{Case, Data};
use super::recorder::{Recorder, fail};
use super::sector::{SECTOR, Seen, look_at_all};
use super::threads::bytes_of;
use crate::driver::worker;
use crate::random::Random;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use zebu_engine::storage::{Engine, IoBuf, Worker};
use zebu_engine::{Access, Error, Image, NewBitmap, NewSnapshot, Preallocation, Shrink, SnapshotRef};

/// State of the operator over the rounds of a case.
pub struct Operator {
    case: Case,
    dir: PathBuf,
    random: Random,
    snapshots: Vec<u64>,
    next_snapshot: u64,
    next_bitmap: u64,
}

/// The name of the snapshot of this number.
pub fn snapshot_name(number: u64) -> String {
    format!("s{number}")
}

fn must<T>(what: &str, result: Result<T, Error>) -> T {
    result.unwrap_or_else(|e| fail(&format!("{what}: {e}")))
}

impl Operator {
    /// The operator of a case.
    pub fn new(case: Case, dir: &std::path::Path) -> Self {
        let random = Random::new(case.seed ^ 0x6f70_6572);
        Self { case, dir: dir.to_owned(), random, snapshots: Vec::new(), next_snapshot: 0, next_bitmap: 0 }
    }

    /// Works until no other thread is busy, at a pace that the seed chooses.
    pub fn run(&mut self, image: &Image, recorder: &Recorder, round: u64, busy: &AtomicU64) {
        let engine = *self.random.pick(&[Engine::IoUring, Engine::Threads]);
        let worker = worker(engine);
        let pause = *self.random.pick(&[0, 1, 5, 20]);
        // In some rounds the others are alone.
        let is_quiet = round > 0 && self.random.chance(20);
        worker.block_on(async {
            while busy.load(Ordering::SeqCst) > 0 {
                if is_quiet {
                    worker.sleep(Duration::from_millis(2)).await;
                    continue;
                }
                self.step(image, &worker, recorder).await;
                if pause > 0 {
                    worker.sleep(Duration::from_millis(self.random.below(pause))).await;
                }
            }
        });
    }

    async fn step(&mut self, image: &Image, worker: &Worker, recorder: &Recorder) {
        let has_bitmaps = self.case.data == Data::Inside;
        match self.random.below(20) {
            0..3 => self.resize(image, worker, recorder).await,
            3..5 if self.case.has_snapshots() => self.take(image, worker, recorder).await,
            5 if self.case.has_snapshots() => self.apply(image, worker, recorder).await,
            6 if self.case.has_snapshots() => self.delete(image, worker, recorder).await,
            7..9 if has_bitmaps => self.bitmap(image, worker, recorder).await,
            9..11 => {
                let above = self.random.below(200_000);
                // The least grows with the disk.
                let _ = image.set_cache_size(image.min_cache_size() + above);
            }
            11..13 => self.extents(image, worker, recorder).await,
            _ => {
                let number = recorder.begin(Kind::Flush, 0, 0, 0);
                must("flush", image.flush(worker).await);
                recorder.end(number, Outcome::Done, Vec::new());
            }
        }
    }

    async fn resize(&mut self, image: &Image, worker: &Worker, recorder: &Recorder) {
        let now = image.virtual_size() / SECTOR as u64;
        let new = self.random.between(self.case.sectors, self.case.most_sectors);
        let number = if new < now {
            recorder.begin(Kind::Resize, new, self.case.most_sectors - new, 0)
        } else {
            recorder.begin(Kind::Other, 0, 0, 0)
        };
        let preallocation = match self.random.below(6) {
            0 => Preallocation::Metadata,
            1 => Preallocation::Falloc,
            _ => Preallocation::Off,
        };
        let preallocation = if new > now { preallocation } else { Preallocation::Off };
        let result = image.resize(worker, new * SECTOR as u64, Shrink::Allow, preallocation).await;
        must(&format!("resize from {now} to {new} sectors, {preallocation:?}"), result);
        recorder.end(number, Outcome::Done, Vec::new());
    }

    async fn take(&mut self, image: &Image, worker: &Worker, recorder: &Recorder) {
        if self.snapshots.len() >= 3 {
            return self.delete(image, worker, recorder).await;
        }
        let snapshot = self.next_snapshot;
        self.next_snapshot += 1;
        let name = snapshot_name(snapshot);
        let number = recorder.begin(Kind::TakeSnapshot, 0, self.case.most_sectors, snapshot);
        must("taking a snapshot", image.create_snapshot(worker, NewSnapshot::named(name.clone())).await);
        let ended = recorder.now();
        let seen = must("reading a snapshot", self.read_snapshot(worker, &name).await);
        recorder.end_at(number, ended, Outcome::Done, seen);
        self.snapshots.push(snapshot);
    }

    /// The content of a snapshot, read by another handle, which knows nothing of what the first one has cached.
    async fn read_snapshot(&self, worker: &Worker, name: &str) -> Result<Vec<Seen>, Error> {
        let options = disk::options(&self.case)
            .access(Access::ReadOnly)
            .sharing(zebu_engine::Sharing::Unlocked)
            .snapshot(Some(name.to_owned()));
        let image = Image::open(worker, &self.dir.join(disk::IMAGE), &options).await?;
        let size = image.virtual_size();
        let mut seen = Vec::new();
        let mut at = 0;
        while at < size {
            let len = (256 << 10).min(size - at);
            let (result, bufs) = image.read(worker, at, IoBuf::zeroed(len as usize).into()).await;
            result?;
            seen.extend(look_at_all(&bytes_of(&bufs), at / SECTOR as u64));
            at += len;
        }
        image.close(worker).await?;
        Ok(seen)
    }

    async fn apply(&mut self, image: &Image, worker: &Worker, recorder: &Recorder) {
        if self.snapshots.is_empty() {
            return;
        }
        // The engine does not go back while bitmaps record what changes.
        for bitmap in image.bitmaps() {
            must("removing a bitmap", image.remove_bitmap(worker, &bitmap.name).await);
        }
        let snapshot = *self.random.pick(&self.snapshots);
        let number = recorder.begin(Kind::ApplySnapshot, 0, self.case.most_sectors, snapshot);
        let which = SnapshotRef::Name(snapshot_name(snapshot));
        must("going back to a snapshot", image.apply_snapshot(worker, &which).await);
        recorder.end(number, Outcome::Done, Vec::new());
    }

    async fn delete(&mut self, image: &Image, worker: &Worker, recorder: &Recorder) {
        if self.snapshots.is_empty() {
            return;
        }
        let snapshot = self.snapshots.remove(self.random.below(self.snapshots.len() as u64) as usize);
        let number = recorder.begin(Kind::Other, 0, 0, snapshot);
        let which = SnapshotRef::Name(snapshot_name(snapshot));
        must("deleting a snapshot", image.delete_snapshot(worker, &which).await);
        recorder.end(number, Outcome::Done, Vec::new());
    }

    async fn bitmap(&mut self, image: &Image, worker: &Worker, recorder: &Recorder) {
        let number = recorder.begin(Kind::Other, 0, 0, 0);
        let names: Vec<String> = image.bitmaps().into_iter().map(|bitmap| bitmap.name).collect();
        if names.len() < 2 && (names.is_empty() || self.random.chance(50)) {
            let name = format!("b{}", self.next_bitmap);
            self.next_bitmap += 1;
            must("adding a bitmap", image.add_bitmap(worker, &NewBitmap::named(name)).await);
        } else {
            let name = self.random.pick(&names);
            if self.random.chance(50) {
                must("removing a bitmap", image.remove_bitmap(worker, name).await);
            } else {
                must("clearing a bitmap", image.clear_bitmap(worker, name).await);
            }
        }
        recorder.end(number, Outcome::Done, Vec::new());
    }

    /// Asks for all extents of the part that the disk surely has.
    async fn extents(&mut self, image: &Image, worker: &Worker, recorder: &Recorder) {
        let number = recorder.begin(Kind::Other, 0, 0, 0);
        let size = self.case.sectors * SECTOR as u64;
        let mut extents = image.extents(0..size);
        while must("extents", extents.next(worker).await).is_some() {}
        recorder.end(number, Outcome::Done, Vec::new());
    }
}
