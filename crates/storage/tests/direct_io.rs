//! Requests of any alignment, on files of any length, from several workers, against a model in memory: with O_DIRECT
//! and without, on the file system of the temporary directory and, where this may mount, on XFS, btrfs and devices.

mod fixtures;

use fixtures::{
    ENGINES, LoopDevice, Mode, Mounted, Random, bytes_of, open, or_skip, pattern, scattered, worker,
};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use zebu_storage::{Alignment, Create, Engine, File, FileKind, FsKind, IoBuf, IoErrorKind, Worker};

/// Runs a test in every place that there is: with the path of a file to make or a device to use.
fn in_each_place(test: impl Fn(&Path)) {
    let dir = tempfile::tempdir().unwrap();
    test(&dir.path().join("f"));
    for kind in ["xfs", "btrfs"] {
        if let Some(mounted) = or_skip(kind, Mounted::new(kind)) {
            test(&mounted.dir.path().join("f"));
        }
    }
    for block in [512, 4096] {
        if let Some(device) = or_skip("loop device", LoopDevice::new(1 << 20, block)) {
            test(&device.path);
        }
    }
}

fn fresh(path: &Path, mode: Mode) -> File {
    open(path, mode, Create::Truncate)
}

fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// One random operation on the file and on the model.
async fn random_step(worker: &Worker, file: &File, model: &mut Vec<u8>, limit: u64, random: &mut Random) {
    let device = file.kind() == FileKind::BlockDevice;
    let mut offset = random.below(limit);
    let most = if random.below(4) == 0 { 40_000 } else { 3000 };
    let mut len = 1 + random.below(most);
    match random.below(4) {
        0 => (offset, len) = (offset & !4095, len.next_multiple_of(4096)),
        1 => (offset, len) = (offset & !511, len.next_multiple_of(512)),
        _ => {}
    }
    len = len.min(limit - offset);
    let (from, to) = (offset as usize, (offset + len) as usize);
    let grow = |model: &mut Vec<u8>| model.resize(model.len().max(to), 0);
    match random.below(12) {
        0..5 => {
            let data = pattern(len as usize, random.next() as u32);
            let bufs = scattered(&data, random);
            let (result, bufs) = worker.write(file, offset, bufs).await;
            result.unwrap();
            assert_eq!(bytes_of(&bufs), data, "a write leaves its buffers as they were");
            grow(model);
            model[from..to].copy_from_slice(&data);
        }
        5..8 => {
            let bufs = scattered(&vec![0xEE; len as usize], random);
            let (result, bufs) = worker.read(file, offset, bufs).await;
            result.unwrap();
            let mut expected = model.get(from.min(model.len())..to.min(model.len())).unwrap().to_vec();
            expected.resize(len as usize, 0);
            assert!(bytes_of(&bufs) == expected, "{offset}+{len}");
        }
        8 => match worker.punch_hole(file, offset, len).await {
            Ok(()) => {
                let end = to.min(model.len());
                model[from.min(end)..end].fill(0);
            }
            Err(error) => assert_eq!(error.kind, IoErrorKind::Unsupported),
        },
        9 => match worker.zero_range(file, offset, len).await {
            Ok(()) => {
                grow(model);
                model[from..to].fill(0);
            }
            Err(error) => assert_eq!(error.kind, IoErrorKind::Unsupported),
        },
        10 => {
            worker.write_zero_bytes(file, offset, len).await.unwrap();
            grow(model);
            model[from..to].fill(0);
        }
        _ if device => {
            let error = worker.set_len(file, offset).await.unwrap_err();
            assert_eq!(error.kind, IoErrorKind::Unsupported);
        }
        _ => {
            worker.set_len(file, offset).await.unwrap();
            model.resize(from, 0);
        }
    }
    assert_eq!(file.len(), model.len() as u64);
}

#[test]
fn random_operations_agree_with_a_model() {
    in_each_place(|path| {
        for (engine, mode) in ENGINES.into_iter().flat_map(|e| [(e, Mode::Direct), (e, Mode::Buffered)]) {
            let worker = worker(engine);
            let mut random = Random::new(7);
            let file = fresh(path, mode);
            let limit = if is_device(path) { file.len() } else { 300_000 };
            let mut model = Vec::new();
            if is_device(path) {
                worker.block_on(worker.write_zero_bytes(&file, 0, limit)).unwrap();
                model.resize(limit as usize, 0);
            }
            for step in 0..400 {
                worker.block_on(random_step(&worker, &file, &mut model, limit, &mut random));
                if step % 50 == 49 {
                    worker.block_on(worker.flush(&file)).unwrap();
                    let found = fs::read(path).unwrap();
                    assert_eq!(found.len(), model.len(), "{path:?} {engine:?} {mode:?} {step}");
                    assert!(found == model, "{path:?} {engine:?} {mode:?} {step}");
                }
            }
            if mode == Mode::Direct {
                assert!(worker.stats().misaligned > 100);
            } else {
                assert_eq!(worker.stats().misaligned, 0);
            }
        }
    });
}

/// Several workers write, each only its own bytes, while they share most blocks. Any update that is lost shows.
fn neighbours_do_not_lose_updates(path: &Path, ends_within_a_block: bool) {
    const LEN: u64 = 40_000;
    const WRITERS: u32 = 4;
    let file = fresh(path, Mode::Direct);
    let len = if is_device(path) { LEN } else { LEN - u64::from(ends_within_a_block) * 100 };
    let first = worker(Engine::Threads);
    first.block_on(first.write_zero_bytes(&file, 0, len)).unwrap();
    // Who owns which bytes: short stretches in turn, and now and then some whole blocks.
    let mut random = Random::new(11);
    let mut stretches = Vec::new();
    let mut at = 0;
    while at < len {
        let end = match random.below(8) {
            0 => at.next_multiple_of(4096) + 4096,
            _ => at + 1 + random.below(900),
        }
        .min(len);
        stretches.push((at, end, random.below(WRITERS.into()) as u32));
        at = end;
    }
    let stretches = Arc::new(stretches);
    let round = Arc::new(AtomicU32::new(0));
    let threads: Vec<_> = (0..WRITERS)
        .map(|number| {
            let (file, stretches, round) = (file.clone(), Arc::clone(&stretches), Arc::clone(&round));
            std::thread::spawn(move || {
                let worker = worker(ENGINES[number as usize % 2]);
                let tasks: Vec<_> = stretches
                    .iter()
                    .filter(|(_, _, owner)| *owner == number)
                    .map(|&(start, end, _)| {
                        let (inner, file, round) = (worker.clone(), file.clone(), Arc::clone(&round));
                        worker.spawn(async move {
                            let mut random = Random::new(start);
                            let mut own = vec![0; (end - start) as usize];
                            for _ in 0..12 {
                                let from = random.below(end - start) as usize;
                                let to = from + 1 + random.below((own.len() - from) as u64) as usize;
                                let data = pattern(to - from, round.fetch_add(1, Ordering::Relaxed));
                                own[from..to].copy_from_slice(&data);
                                let buf = IoBuf::copy_of(&data).into();
                                inner.write(&file, start + from as u64, buf).await.0.unwrap();
                                let read = inner.read(&file, start, IoBuf::zeroed(own.len()).into()).await;
                                read.0.unwrap();
                                assert!(bytes_of(&read.1) == own, "{start}..{end} while others write");
                            }
                            (start, own)
                        })
                    })
                    .collect();
                worker.block_on(async {
                    let mut owned = Vec::new();
                    for task in tasks {
                        owned.push(task.await);
                    }
                    owned
                })
            })
        })
        .collect();
    let mut model = vec![0; len as usize];
    for thread in threads {
        for (start, own) in thread.join().unwrap() {
            model[start as usize..][..own.len()].copy_from_slice(&own);
        }
    }
    let found = fs::read(path).unwrap();
    if !is_device(path) {
        assert_eq!(
            (found.len() as u64, file.len()),
            (len, len),
            "the file is not longer than what was written"
        );
    }
    assert!(found[..len as usize] == model);
}

#[test]
fn neighbours_in_a_block_do_not_lose_updates() {
    in_each_place(|path| {
        neighbours_do_not_lose_updates(path, false);
        neighbours_do_not_lose_updates(path, true);
    });
}

#[test]
fn an_unaligned_write_extends_a_file_to_its_own_end_only() {
    in_each_place(|path| {
        if is_device(path) {
            return;
        }
        for engine in ENGINES {
            let worker = worker(engine);
            let file = fresh(path, Mode::Direct);
            let mut model = Vec::new();
            for (offset, len) in [(0, 100), (100, 1), (1000, 24), (5000, 5000), (9999, 513), (12_288, 4096)] {
                let data = pattern(len, offset);
                worker.block_on(worker.write(&file, offset.into(), IoBuf::copy_of(&data).into())).0.unwrap();
                model.resize(model.len().max(offset as usize + len), 0);
                model[offset as usize..offset as usize + len].copy_from_slice(&data);
                assert_eq!(fs::metadata(path).unwrap().len(), model.len() as u64);
                assert!(fs::read(path).unwrap() == model);
            }
        }
    });
}

/// ext4 zeroes the rest of the last block in the page cache when a file grows, without waiting for direct writes there:
/// it says so with EIO at the next flush, or writes the block back over them.
#[test]
fn a_file_that_grows_keeps_what_is_being_written_to_its_last_block() {
    in_each_place(|path| {
        if is_device(path) {
            return;
        }
        for engine in ENGINES {
            let worker = worker(engine);
            let file = fresh(path, Mode::Direct);
            for round in 0..200u64 {
                // Whole sectors, so that nothing is padded; the end is within a block of the file system.
                let end = round * 65536 + 512 * (1 + round % 7);
                worker.block_on(worker.set_len(&file, end)).unwrap();
                let blank = IoBuf::zeroed(end as usize % 4096).into();
                worker.block_on(worker.write(&file, round * 65536, blank)).0.unwrap();
                let data = pattern(512, round as u32);
                let write = {
                    let (worker, file, bufs) = (worker.clone(), file.clone(), IoBuf::copy_of(&data).into());
                    move || async move { worker.write(&file, end - 512, bufs).await.0 }
                };
                let write = worker.spawn(write());
                worker.block_on(worker.set_len(&file, (round + 1) * 65536)).unwrap();
                worker.block_on(write).unwrap();
                worker.block_on(worker.flush(&file)).unwrap();
                let found = fs::read(path).unwrap();
                let (from, to) = (end as usize - 512, end as usize);
                assert!(found.get(from..to) == Some(&data[..]), "{path:?} {engine:?} {round}");
            }
        }
    });
}

#[test]
fn the_alignment_is_what_the_kernel_says() {
    in_each_place(|path| {
        let file = fresh(path, Mode::Direct);
        let Alignment { memory, offset, length } = file.alignment();
        for value in [memory, offset, length] {
            assert!(value.is_power_of_two());
        }
        // The kernel takes what is aligned so, and for the offset (the only one it always checks) no less.
        let direct = fs::OpenOptions::new().read(true).custom_direct().open(path).unwrap();
        let mut buf = IoBuf::zeroed(3 * 4096);
        let at = |buf: &mut IoBuf, shift: u32, len: u32, offset: u32| {
            let part = &mut buf.as_mut_slice()[shift as usize..][..len as usize];
            std::os::unix::fs::FileExt::read_at(&direct, part, offset.into()).map(drop)
        };
        let worker = worker(Engine::Threads);
        worker.block_on(worker.write_zero_bytes(&file, 0, 65_536)).unwrap();
        at(&mut buf, memory % 4096, length, offset).unwrap();
        if file.fs() != FsKind::Btrfs {
            // btrfs quietly reads the rest through the page cache.
            assert!(at(&mut buf, 0, length, offset / 2).is_err());
        }
        drop(file);
        let buffered = open(path, Mode::Buffered, Create::No);
        assert_eq!(buffered.alignment(), fixtures::no_alignment());
    });
}

/// Opens with O_DIRECT.
trait CustomDirect {
    fn custom_direct(&mut self) -> &mut Self;
}

impl CustomDirect for fs::OpenOptions {
    fn custom_direct(&mut self) -> &mut Self {
        std::os::unix::fs::OpenOptionsExt::custom_flags(self, libc::O_DIRECT)
    }
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "both go past the end of the file at once")]
fn two_requests_past_the_end_at_once_are_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let file = fresh(&dir.path().join("f"), Mode::Direct);
    let worker = worker(Engine::IoUring);
    worker.block_on(async {
        let mut first = Box::pin(worker.write(&file, 1 << 20, IoBuf::zeroed(4096).into()));
        let _ = std::future::poll_fn(|cx| std::task::Poll::Ready(first.as_mut().poll(cx).is_ready())).await;
        let _ = worker.allocate(&file, 2 << 20, 4096).await;
    });
}
