//! Hydration beside snapshots: the backing file is dropped only if nothing shows it any more.

use crate::support::{Images, assert_same_bytes, disk, guest_bytes, on_worker, qemu_img, text, write_sparse};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use zebu_engine::jobs::{AfterHydration, HydrateOptions, JobControl, hydrate};
use zebu_engine::storage::Worker;
use zebu_engine::{Access, ErrorKind, Image, NewSnapshot, OpenOptions, RefPolicy, Result, SnapshotRef};

/// Bytes that a hydration copies a second.
const RATE: u64 = 4 << 20;

/// An overlay without clusters of a raw base of 2 MiB, and the bytes of the disk.
fn overlay(images: &Images) -> (PathBuf, Vec<u8>) {
    let (base, top) = (images.path("base"), images.path("top"));
    let bytes = disk(77, 4096);
    write_sparse(&base, &bytes);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "raw", text(&top)]);
    (top, bytes)
}

async fn open(worker: &Worker, path: &Path) -> Image {
    let options = OpenOptions::default().access(Access::ReadWrite).refs(RefPolicy::All);
    Image::open(worker, path, &options).await.unwrap()
}

/// Hydrates, and drops the backing file; `beside` runs when something was copied.
async fn hydrated_beside(
    worker: &Worker,
    image: &Image,
    beside: impl AsyncFnOnce(&Worker, &Image, &AtomicU64),
) -> Result<u64> {
    let done = Arc::new(AtomicU64::new(0));
    let seen = done.clone();
    let control = JobControl::default()
        .rate_limit(NonZeroU64::new(RATE))
        .progress(move |progress| seen.store(progress.done, Ordering::Relaxed));
    let options = HydrateOptions::default().after(AfterHydration::DropBacking).requests(1).control(control);
    let (on, own) = (worker.clone(), image.clone());
    let job = worker.spawn(async move { hydrate(&on, &own, &options).await });
    while done.load(Ordering::Relaxed) == 0 {
        worker.sleep(Duration::from_millis(1)).await;
    }
    beside(worker, image, &done).await;
    job.await.map(|report| report.copied)
}

#[test]
fn a_snapshot_that_is_made_meanwhile_keeps_the_backing_file() {
    let images = Images::new();
    let (top, bytes) = overlay(&images);
    on_worker(async |worker| {
        let image = open(worker, &top).await;
        let error = hydrated_beside(worker, &image, async |worker, image, _| {
            image.create_snapshot(worker, NewSnapshot::named("s")).await.unwrap();
        })
        .await
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        image.apply_snapshot(worker, &SnapshotRef::Name("s".to_owned())).await.unwrap();
        image.close(worker).await.unwrap();
    });
    assert_same_bytes(&guest_bytes(&top, "qcow2"), &bytes, "the snapshot shows the base");
}

#[test]
fn what_a_snapshot_takes_back_is_copied_again() {
    let images = Images::new();
    let (top, bytes) = overlay(&images);
    on_worker(async |worker| {
        let image = open(worker, &top).await;
        let copied = hydrated_beside(worker, &image, async |worker, image, done| {
            let snapshot = SnapshotRef::Name("s".to_owned());
            image.create_snapshot(worker, NewSnapshot::named("s")).await.unwrap();
            let before = done.load(Ordering::Relaxed);
            while done.load(Ordering::Relaxed) == before {
                worker.sleep(Duration::from_millis(1)).await;
            }
            image.apply_snapshot(worker, &snapshot).await.unwrap();
            image.delete_snapshot(worker, &snapshot).await.unwrap();
        })
        .await
        .unwrap();
        assert!(copied > 0);
        image.close(worker).await.unwrap();
    });
    assert!(!qemu_img(&["info", text(&top)]).contains("backing"));
    assert_same_bytes(&guest_bytes(&top, "qcow2"), &bytes, "the disk");
    qemu_img(&["check", "-f", "qcow2", text(&top)]);
}

/// The overlay's cluster holds many of the backing file: the one that is missing must not become zeroes.
#[test]
fn a_backing_file_that_was_cut_short_is_not_taken_for_zeroes() {
    let images = Images::new();
    let (raw, base, top) = (images.path("raw"), images.path("base"), images.path("top"));
    let bytes = disk(78, 512);
    write_sparse(&raw, &bytes);
    qemu_img(&[
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-o",
        "cluster_size=4096",
        "-S",
        "0",
        text(&raw),
        text(&base),
    ]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", text(&top)]);
    let whole = std::fs::read(&base).unwrap();
    std::fs::write(&base, &whole[..whole.len() - 4096]).unwrap();
    on_worker(async |worker| {
        let image = open(worker, &top).await;
        for _ in 0..2 {
            let options = HydrateOptions::default().after(AfterHydration::DropBacking);
            let error = hydrate(worker, &image, &options).await.unwrap_err();
            assert!(error.message().contains("was cut short"), "{error}");
        }
        image.close(worker).await.unwrap();
    });
    std::fs::write(&base, whole).unwrap();
    assert_same_bytes(&guest_bytes(&top, "qcow2"), &bytes, "nothing was copied that the base did not hold");
}
