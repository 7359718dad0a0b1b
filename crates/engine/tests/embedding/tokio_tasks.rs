//! The futures of an image as tasks of tokio, beside a task that drives the worker.

use super::rounds::{disturb, rounds};
use super::{ENGINES, create, must_be_clean, open};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::task::LocalSet;
use zebu_engine::Durability;
use zebu_engine::storage::{IoBuf, Worker, WorkerConfig};

/// Polls the worker whenever its descriptor, which is registered once, or its timer says so.
async fn drive(worker: Worker) {
    // Newer versions prefer `register`, which is unsafe: the owner of the descriptor must not close it meanwhile.
    #[allow(deprecated)]
    let readable = AsyncFd::new(worker.as_fd().try_clone_to_owned().unwrap()).unwrap();
    loop {
        let ready = match worker.next_timer() {
            None => Some(readable.readable().await),
            Some(left) => tokio::time::timeout(left, readable.readable()).await.ok(),
        };
        if let Some(ready) = ready {
            // Before the poll: what comes during it shows again.
            ready.unwrap().clear_ready();
        }
        worker.poll();
    }
}

#[test]
fn tasks_of_tokio_lose_nothing() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let until = Arc::<AtomicBool>::default();
        let other = disturb(&disk, &until);
        let worker = Worker::new(&WorkerConfig::default().engine(engine)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let tasks = LocalSet::new();
        tasks.spawn_local(drive(worker.clone()));
        tasks.block_on(&runtime, async {
            for round in 0..rounds() {
                let requests = (0..8u64).map(|i| {
                    let (image, worker) = (disk.image().clone(), worker.clone());
                    tokio::task::spawn_local(async move {
                        let offset = (round % 8) * (4 << 20) + i * 65536;
                        let data = IoBuf::copy_of(&[round as u8; 4096]).into();
                        image.write(&worker, offset, data, Durability::Volatile).await.0.unwrap();
                        if i == round % 8 {
                            image.flush(&worker).await.unwrap();
                        }
                        let (result, bufs) =
                            image.read(&worker, offset + 1, IoBuf::zeroed(4095).into()).await;
                        result.unwrap();
                        let mut byte = [0];
                        bufs.copy_to(4094, &mut byte);
                        assert_eq!(byte, [round as u8]);
                    })
                });
                for request in requests.collect::<Vec<_>>() {
                    let ended = tokio::time::timeout(Duration::from_secs(600), request).await;
                    ended.unwrap_or_else(|_| panic!("{engine:?}: round {round} hangs")).unwrap();
                }
            }
        });
        until.store(true, SeqCst);
        assert!(other.join().unwrap() > 0);
        drop((tasks, worker, disk));
        must_be_clean(&path);
    }
}
