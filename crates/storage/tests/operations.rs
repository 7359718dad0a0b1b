//! Every operation on both kinds of worker, against plain std::fs as the oracle.

use std::fs;
use std::path::Path;
use std::time::Duration;
use zebu_storage::{Access, Create, Engine, File, IoBuf, IoBufs, OpenFlags, Worker, WorkerConfig};

fn worker(engine: Engine) -> Worker {
    Worker::new(&WorkerConfig::default().engine(engine)).unwrap()
}

fn open_new(path: &Path) -> File {
    let flags = OpenFlags::default()
        .access(Access::ReadWrite)
        .create(Create::New)
        .lock(zebu_storage::LockMode::Write);
    File::open(path, &flags).unwrap()
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as u8
        })
        .collect()
}

async fn read(worker: &Worker, file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = worker.buffer(len);
    buf.as_mut_slice().fill(0xEE);
    let (result, bufs) = worker.read(file, offset, buf.into()).await;
    result.unwrap();
    let mut bytes = vec![0; len];
    bufs.copy_to(0, &mut bytes);
    bytes
}

fn each_engine(test: impl Fn(&Worker, &Path)) {
    for engine in [Engine::Threads, Engine::IoUring] {
        let dir = tempfile::tempdir().unwrap();
        test(&worker(engine), dir.path());
    }
}

#[test]
fn what_is_written_is_read_and_the_file_ends_in_zeroes() {
    each_engine(|worker, dir| {
        let path = dir.join("f");
        let file = open_new(&path);
        let data = pattern(100_000, 1);
        worker.block_on(async {
            let mut bufs = IoBufs::new();
            for part in data.chunks(30_000) {
                bufs.push(IoBuf::copy_of(part));
            }
            let (result, bufs) = worker.write(&file, 777, bufs).await;
            result.unwrap();
            assert_eq!(bufs.len(), data.len());
            assert_eq!(file.len(), 777 + 100_000);
            worker.flush(&file).await.unwrap();
            let mut expected = vec![0; 777];
            expected.extend(&data);
            assert_eq!(fs::read(&path).unwrap(), expected);
            expected.resize(120_000, 0);
            assert_eq!(read(worker, &file, 0, 120_000).await, expected);
            assert_eq!(read(worker, &file, 1 << 40, 5).await, [0; 5]);
        });
        let stats = worker.stats();
        assert_eq!((stats.writes, stats.write_bytes, stats.flushes), (1, 100_000, 1));
    });
}

#[test]
fn many_operations_are_in_flight_at_once() {
    each_engine(|worker, dir| {
        let file = open_new(&dir.join("f"));
        worker.block_on(async {
            worker.set_len(&file, 1 << 20).await.unwrap();
            let handles: Vec<_> = (0..256u64)
                .map(|i| {
                    let (worker, file) = (worker.clone(), file.clone());
                    worker.clone().spawn(async move {
                        let buf = IoBuf::copy_of(&pattern(4096, i as u32));
                        worker.write(&file, i * 4096, buf.into()).await.0.unwrap();
                        read(&worker, &file, i * 4096, 4096).await
                    })
                })
                .collect();
            for (i, handle) in handles.into_iter().enumerate() {
                assert_eq!(handle.await, pattern(4096, i as u32));
            }
        });
    });
}

#[test]
fn holes_are_punched_found_and_zeroed() {
    each_engine(|worker, dir| {
        let path = dir.join("f");
        let file = open_new(&path);
        worker.block_on(async {
            let data = pattern(1 << 20, 3);
            worker.write(&file, 0, IoBuf::copy_of(&data).into()).await.0.unwrap();
            worker.flush(&file).await.unwrap();
            worker.punch_hole(&file, 256 << 10, 256 << 10).await.unwrap();
            let first = worker.extent_at(&file, 4096).await.unwrap();
            assert_eq!((first.offset, first.len, first.hole), (4096, (256 << 10) - 4096, false));
            let second = worker.extent_at(&file, 256 << 10).await.unwrap();
            assert_eq!((second.len, second.hole), (256 << 10, true));
            let past = worker.extent_at(&file, 1 << 20).await.unwrap();
            assert_eq!((past.len, past.hole), (u64::MAX - (1 << 20), true));
            worker.zero_range(&file, 100, 1000).await.unwrap();
            worker.write_zero_bytes(&file, 600_001, 70_000).await.unwrap();
            let mut expected = data;
            expected[100..1100].fill(0);
            expected[256 << 10..512 << 10].fill(0);
            expected[600_001..670_001].fill(0);
            assert_eq!(fs::read(&path).unwrap(), expected);
            worker.allocate(&file, 1 << 20, 1 << 20).await.unwrap();
            assert_eq!((file.len(), fs::metadata(&path).unwrap().len()), (2 << 20, 2 << 20));
            worker.set_len(&file, 12_345).await.unwrap();
            assert_eq!((file.len(), fs::metadata(&path).unwrap().len()), (12_345, 12_345));
        });
    });
}

#[test]
fn ranges_are_copied_between_files() {
    each_engine(|worker, dir| {
        let (a, b) = (open_new(&dir.join("a")), open_new(&dir.join("b")));
        worker.block_on(async {
            let data = pattern(65_536, 4);
            worker.write(&a, 0, IoBuf::copy_of(&data).into()).await.0.unwrap();
            match worker.copy_range(&a, 0, &b, 4096, 65_536).await {
                Ok(copied) => {
                    assert_eq!(read(worker, &b, 4096, copied as usize).await, data[..copied as usize]);
                }
                Err(error) => assert_eq!(error.kind, zebu_storage::IoErrorKind::Unsupported),
            }
            // ext4 has no reflinks, btrfs and XFS do.
            match worker.clone_range(&a, 0, &b, 0, 65_536).await {
                Ok(()) => assert_eq!(read(worker, &b, 0, 65_536).await, data),
                Err(error) => assert_eq!(error.kind, zebu_storage::IoErrorKind::Unsupported),
            }
        });
    });
}

#[test]
fn time_passes_and_blocking_work_is_done_elsewhere() {
    each_engine(|worker, _| {
        let start = std::time::Instant::now();
        let other = worker.block_on(async {
            worker.sleep(Duration::from_millis(20)).await;
            worker.run_blocking(|| std::thread::current().id()).await
        });
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert_ne!(other, std::thread::current().id());
    });
}

#[test]
fn dropped_futures_and_workers_leave_finished_operations() {
    for engine in [Engine::Threads, Engine::IoUring] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let file = open_new(&path);
        {
            let worker = worker(engine);
            worker.block_on(async {
                worker.set_len(&file, 65 * 4096).await.unwrap();
                for i in 0..64u64 {
                    // Begun, then abandoned: the buffer stays the worker's.
                    let buf = IoBuf::copy_of(&pattern(4096, i as u32));
                    let mut write = Box::pin(worker.write(&file, i * 4096, buf.into()));
                    let polled =
                        std::future::poll_fn(|cx| std::task::Poll::Ready(write.as_mut().poll(cx).is_ready()));
                    assert!(!polled.await);
                }
                let (inner, file) = (worker.clone(), file.clone());
                drop(worker.spawn(async move {
                    inner.sleep(Duration::from_millis(5)).await;
                    let buf = IoBuf::copy_of(&pattern(4096, 64));
                    inner.write(&file, 64 * 4096, buf.into()).await.0.unwrap();
                }));
            });
            assert!(worker.drain(Duration::ZERO));
        }
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 65 * 4096);
        for (i, part) in bytes.chunks(4096).enumerate() {
            assert_eq!(part, pattern(4096, i as u32));
        }
    }
}
