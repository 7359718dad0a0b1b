//! A file system that fills up under an image that is in use, and gets room again.

use std::path::Path;
use zebu_engine::storage::{IoBuf, Worker, WorkerConfig};
use zebu_engine::{Access, CacheMode, Durability, ErrorKind, Format, Image, OpenOptions};
use zebu_tests::mount::Mounted;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;

const DISK: u64 = 256 << 20;
/// Bytes of a write; each goes to a place of its own.
const LEN: u64 = 20 << 10;
/// Bytes that the image may take while there is no room.
const ROOM: u64 = 6 << 20;

/// Where write `number` goes: all over the disk, so that tables are needed all the time.
fn offset(number: u64) -> u64 {
    number * 7919 % (DISK / (32 << 10)) * (32 << 10)
}

fn pattern(number: u64) -> u8 {
    (number % 250 + 1) as u8
}

fn read(worker: &Worker, image: &Image, number: u64) -> Vec<u8> {
    let buf = IoBuf::zeroed(LEN as usize);
    let (result, bufs) = worker.block_on(image.read(worker, offset(number), buf.into()));
    result.unwrap_or_else(|e| panic!("read {number}: {e}"));
    let mut bytes = vec![0; LEN as usize];
    bufs.copy_to(0, &mut bytes);
    bytes
}

/// Fills the file system but for [`ROOM`].
fn leave_room(dir: &Path) -> std::path::PathBuf {
    let ballast = dir.join("ballast");
    let file = std::fs::File::create(&ballast).expect("there is room");
    let mut len = 0;
    // What is free by the numbers, but kept for the file system itself, can't be had.
    for step in [64 << 20, 8 << 20, 1 << 20, 64 << 10] {
        while rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), len, step).is_ok() {
            len += step;
        }
    }
    file.set_len(len - ROOM).and_then(|()| file.sync_all()).expect("shorter");
    ballast
}

fn fills_up(qemu: &Qemu, dir: &Path, options: &str, cache: CacheMode) {
    let what = format!("{options}, {cache:?}");
    zebu(dir, ["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", &DISK.to_string()]).ok();
    let ballast = leave_room(dir);
    let worker = Worker::new(&WorkerConfig::default()).expect("a worker");
    let open = OpenOptions::default().format(Some(Format::Qcow2)).access(Access::ReadWrite).cache(cache);
    let image = worker.block_on(Image::open(&worker, &dir.join("disk.qcow2"), &open)).expect("opens");
    let write = |number: u64| {
        let buf = IoBuf::copy_of(&vec![pattern(number); LEN as usize]);
        worker.block_on(image.write(&worker, offset(number), buf.into(), Durability::Volatile)).0
    };
    let (mut written, mut failed) = (Vec::new(), Vec::new());
    for number in 0..1000 {
        match write(number) {
            Ok(()) => written.push(number),
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::NoSpace, "{what}: write {number}: {e}");
                failed.push(number);
            }
        }
        if number % 50 == 0
            && let Err(e) = worker.block_on(image.flush(&worker))
        {
            assert_eq!(e.kind(), ErrorKind::NoSpace, "{what}: flush: {e}");
        }
    }
    assert!(written.len() > 50 && failed.len() > 50, "{what}: {} of 1000 written", written.len());
    for number in &written {
        assert!(
            read(&worker, &image, *number).iter().all(|byte| *byte == pattern(*number)),
            "{what}: {number}"
        );
    }
    for number in &failed {
        // A part of what failed may be there, sector by sector.
        let is_one =
            |sector: &[u8]| [0, pattern(*number)].iter().any(|p| sector.iter().all(|byte| byte == p));
        assert!(read(&worker, &image, *number).chunks(512).all(is_one), "{what}: failed {number}");
    }
    std::fs::remove_file(ballast).expect("it is there");
    for number in failed {
        write(number).unwrap_or_else(|e| panic!("{what}: with room again, {number}: {e}"));
        written.push(number);
    }
    worker.block_on(image.flush(&worker)).unwrap_or_else(|e| panic!("{what}: flush with room again: {e}"));
    worker.block_on(image.close(&worker)).unwrap_or_else(|e| panic!("{what}: close: {e}"));
    qemu.check_clean(dir, "disk.qcow2").unwrap_or_else(|e| panic!("{what}: {e}"));
    let reads: Vec<String> =
        written.iter().map(|n| format!("read -q -P {} {} {LEN}", pattern(*n), offset(*n))).collect();
    qemu.io(dir, "-f qcow2", "disk.qcow2", &reads).ok();
    std::fs::remove_file(dir.join("disk.qcow2")).expect("it is there");
}

const OPTIONS: [&str; 4] = [
    "cluster_size=64k",
    "cluster_size=64k,extended_l2=on",
    "cluster_size=4k",
    "cluster_size=1k,refcount_bits=64",
];

#[test]
fn what_was_acknowledged_stays_and_all_goes_on_when_there_is_room_again() {
    let Some(qemu) = Qemu::find() else { return };
    if let Some(tmpfs) = Mounted::tmpfs(96 << 20) {
        for options in OPTIONS {
            fills_up(&qemu, &tmpfs.path(), options, CacheMode::Writeback);
        }
    }
    for mkfs in ["mkfs.ext4", "mkfs.xfs"] {
        let Some(mounted) = Mounted::on_loop(mkfs, 400 << 20) else { return };
        for options in OPTIONS {
            fills_up(&qemu, &mounted.path(), options, CacheMode::None);
        }
    }
}
