//! A disk whose methods wait.

use super::{ENGINES, create, for_writing, must_be_clean, open};
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use zebu_engine::jobs::{BackupOptions, Cancel, JobControl, backup};
use zebu_engine::{
    BitmapRecording, CacheMode, Disk, Durability, ErrorKind, NewBitmap, NewSnapshot, OpenOptions, Shrink,
    SnapshotRef, ZeroMode,
};

#[test]
fn threads_share_a_disk_and_the_last_one_closes_it() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let threads = (0..8u64).map(|thread| {
            let disk = disk.clone();
            std::thread::spawn(move || {
                for i in 0..16u64 {
                    // Of odd lengths and places: neither the caller nor the file aligns anything.
                    let offset = thread * (8 << 20) + i * 70_001;
                    let bytes = vec![(thread * 16 + i) as u8; 5003];
                    disk.write(offset, &bytes).unwrap();
                    let mut back = vec![0; 5003];
                    disk.read(offset, &mut back).unwrap();
                    assert_eq!(back, bytes);
                    if i % 5 == 0 {
                        disk.flush().unwrap();
                    }
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        drop(disk);
        for thread in threads {
            thread.join().unwrap();
        }
        must_be_clean(&path);
        let disk = open(engine, &path);
        let mut byte = [0];
        disk.read((8 << 20) + 70_001, &mut byte).unwrap();
        assert_eq!(byte, [17]);
    }
}

#[test]
fn buffers_of_any_place_and_length_suit_a_file_without_a_cache() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = create(dir.path());
    let options = for_writing().cache(CacheMode::None);
    let disk = Disk::open(&path, &options).unwrap();
    let bytes: Vec<u8> = (0..200_000u32).map(|i| (i / 251) as u8).collect();
    let parts = [IoSlice::new(&bytes[..777]), IoSlice::new(&[]), IoSlice::new(&bytes[777..])];
    disk.write_vectored(12_345, &parts, Durability::Durable).unwrap();
    let (mut first, mut second) = (vec![0; 100_001], vec![0; 99_999]);
    disk.read_vectored(12_345, &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)]).unwrap();
    first.extend(second);
    assert!(first == bytes);
    disk.read_vectored(0, &mut []).unwrap();
}

#[test]
fn snapshots_bitmaps_extents_and_sizes_need_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(ENGINES[1], &path);
    disk.write_compressed(0, &vec![3; 65536]).unwrap();
    disk.write(65536, &vec![1; 65536]).unwrap();
    let taken = disk.create_snapshot(NewSnapshot::named("before")).unwrap();
    assert_eq!(disk.snapshots(), [taken]);
    disk.discard(65536, 65536).unwrap();
    disk.write_zeroes(10, 10, ZeroMode::Keep).unwrap();
    disk.apply_snapshot(&SnapshotRef::Name("before".into())).unwrap();
    let mut back = [0; 2];
    disk.read(65535, &mut back).unwrap();
    assert_eq!(back, [3, 1]);
    disk.delete_snapshot(&SnapshotRef::Name("before".into())).unwrap();

    disk.add_bitmap(&NewBitmap::named("changed")).unwrap();
    disk.write(1 << 20, &[1]).unwrap();
    let bits = disk.bitmap_bits("changed").unwrap();
    assert_eq!(bits.dirty_bytes(), 65536);
    disk.set_bitmap_recording("changed", BitmapRecording::Off).unwrap();
    disk.clear_bitmap("changed").unwrap();
    disk.merge_bitmap("changed", &bits).unwrap();
    assert_eq!(disk.bitmaps().len(), 1);
    disk.remove_bitmap("changed").unwrap();

    disk.resize(128 << 20, Shrink::Refuse).unwrap();
    assert_eq!((disk.virtual_size(), disk.info().unwrap().virtual_size), (128 << 20, 128 << 20));
    // More extents than one hop to the disk's thread brings.
    for i in 0..600 {
        disk.write((2 << 20) + i * 131_072, &[1]).unwrap();
    }
    let extents = disk.extents(0..disk.virtual_size()).collect::<zebu_engine::Result<Vec<_>>>().unwrap();
    assert!(extents.len() > 1200);
    assert!(extents.windows(2).all(|pair| pair[0].end() == pair[1].offset));
    assert_eq!(extents.last().unwrap().end(), 128 << 20);
    disk.close().unwrap();
    must_be_clean(&path);
}

#[test]
fn jobs_run_beside_requests_show_how_far_they_are_and_stop_when_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(ENGINES[1], &path);
    for i in 0..32 {
        disk.write(i << 20, &vec![1; 65536]).unwrap();
    }
    let reports = Arc::new(AtomicUsize::new(0));
    let cancel = Cancel::new();
    let (seen, stop) = (reports.clone(), cancel.clone());
    let mut options = BackupOptions::new(dir.path().join("copy.qcow2"));
    options.control = JobControl::default().cancel(cancel.clone()).progress(move |_| {
        if seen.fetch_add(1, SeqCst) == 1 {
            stop.cancel();
        }
    });
    let stopped = options.clone();
    let job =
        disk.start(async move |image, worker| Box::pin(backup(&worker, &image, &stopped)).await).unwrap();
    disk.read(0, &mut [0; 512]).unwrap();
    assert_eq!(job.wait().unwrap_err().kind(), ErrorKind::Cancelled);
    assert!(reports.load(SeqCst) >= 2);

    options.control = JobControl::default();
    disk.run(async move |image, worker| Box::pin(backup(&worker, &image, &options)).await).unwrap();
    let copy = Disk::open(&dir.path().join("copy.qcow2"), &OpenOptions::default()).unwrap();
    let mut byte = [0];
    copy.read(31 << 20, &mut byte).unwrap();
    assert_eq!(byte, [1]);
}
