//! Space set aside for a disk: what is reported on the way, and that it can be stopped.

use std::path::Path;
use std::sync::{Arc, Mutex};
use zebu_engine::jobs::{Cancel, JobControl, Phase, Progress};
use zebu_engine::storage::{IoBuf, Worker, WorkerConfig};
use zebu_engine::{
    Access, CreateOptions, Durability, ErrorKind, Format, Image, OpenOptions, Preallocation, Shrink,
};

const SIZE: u64 = 24 << 20;

/// A control that notes what is reported, and stops the job once `stop_at` bytes are done.
fn control(stop_at: u64) -> (JobControl, Arc<Mutex<Vec<Progress>>>) {
    let (seen, cancel) = (Arc::new(Mutex::new(Vec::new())), Cancel::new());
    let (sink, switch) = (Arc::clone(&seen), cancel.clone());
    let progress = move |now: Progress| {
        sink.lock().unwrap().push(now);
        if now.done >= stop_at {
            switch.cancel();
        }
    };
    (JobControl::default().cancel(cancel).progress(progress).rate_limit(None), seen)
}

fn worker() -> Worker {
    Worker::new(&WorkerConfig::default()).unwrap()
}

fn modes() -> impl Iterator<Item = (Format, Preallocation)> {
    use Preallocation::{Falloc, Full, Metadata};
    let qcow2 = [Metadata, Falloc, Full].map(|mode| (Format::Qcow2, mode));
    qcow2.into_iter().chain([Falloc, Full].map(|mode| (Format::Raw, mode)))
}

fn options(format: Format, preallocation: Preallocation) -> CreateOptions {
    CreateOptions::default().format(format).preallocation(preallocation).size(Some(SIZE - 512))
}

fn assert_goes_up_to(total: u64, seen: &[Progress], what: &str) {
    assert!(seen.iter().all(|p| p.phase == Phase::Reserving && p.total == total), "{what}: {seen:?}");
    assert!(seen.is_sorted_by_key(|p| p.done), "{what}: {seen:?}");
    let ends = (seen.first().map(|p| p.done), seen.last().map(|p| p.done));
    assert_eq!(ends, (Some(0), Some(total)), "{what}: {seen:?}");
}

#[test]
fn all_that_is_set_aside_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (path, worker) = (dir.path().join("disk"), worker());
    for (format, mode) in modes() {
        let what = format!("{format:?} {mode:?}");
        let (control, seen) = control(u64::MAX);
        worker.block_on(Image::create_controlled(&worker, &path, &options(format, mode), &control)).unwrap();
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert_goes_up_to(SIZE - 512, &seen, &what);
        assert!(mode != Preallocation::Full || seen.len() > 5, "{what}: too few reports: {seen:?}");
    }
}

#[test]
fn what_is_being_made_is_removed_when_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let (path, worker) = (dir.path().join("disk"), worker());
    for format in [Format::Qcow2, Format::Raw] {
        let (control, _) = control(1);
        let options = options(format, Preallocation::Full);
        let made = worker.block_on(Image::create_controlled(&worker, &path, &options, &control));
        assert_eq!(made.unwrap_err().kind(), ErrorKind::Cancelled, "{format:?}");
        assert!(!path.exists(), "{format:?}: left behind");
    }
}

async fn grow(worker: &Worker, path: &Path, format: Format, control: &JobControl) -> zebu_engine::Result<()> {
    let open = OpenOptions::default().format(Some(format)).access(Access::ReadWrite);
    let image = Image::open(worker, path, &open).await.unwrap();
    let data = IoBuf::copy_of(&[7; 4096]).into();
    image.write(worker, SIZE - 8192, data, Durability::Volatile).await.0.unwrap();
    let grown = image.resize_controlled(worker, 3 * SIZE, Shrink::Refuse, Preallocation::Full, control).await;
    let expected = if grown.is_ok() { 3 * SIZE } else { SIZE - 512 };
    assert_eq!(image.virtual_size(), expected, "{format:?}");
    image.close(worker).await.unwrap();
    grown
}

#[test]
fn growth_that_is_stopped_leaves_the_disk_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (path, worker) = (dir.path().join("disk"), worker());
    for format in [Format::Qcow2, Format::Raw] {
        worker.block_on(Image::create(&worker, &path, &options(format, Preallocation::Off))).unwrap();
        let length = || std::fs::metadata(&path).unwrap().len();
        let (stopping, _) = control(SIZE);
        let stopped = worker.block_on(grow(&worker, &path, format, &stopping));
        assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Cancelled, "{format:?}");
        let left = length();
        assert!(left < SIZE, "{format:?}: what was set aside is still there: {left} bytes");
        let (watching, seen) = control(u64::MAX);
        worker.block_on(grow(&worker, &path, format, &watching)).unwrap();
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        // A qcow2 image's last cluster was there already, in part.
        let added = if format == Format::Raw { 2 * SIZE + 512 } else { 2 * SIZE + 65536 };
        assert_goes_up_to(added, &seen, &format!("{format:?}"));
        assert!(length() >= 2 * SIZE, "{format:?}: less than what was added");
    }
}
