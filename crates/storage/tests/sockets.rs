//! Socket operations of workers: both kinds of worker do the same.

use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, socketpair};
use std::time::Duration;
use zebu_storage::{Engine, IoBuf, IoBufs, Socket, Worker, WorkerConfig, WorkerKind};

fn pair() -> (Socket, Socket) {
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    (Socket::new(a).unwrap(), Socket::new(b).unwrap())
}

fn workers() -> Vec<Worker> {
    [Engine::Auto, Engine::Threads]
        .map(|engine| Worker::new(&WorkerConfig::default().engine(engine)).unwrap())
        .into()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

/// Receives until `len` bytes are there.
async fn receive_all(worker: &Worker, socket: &Socket, len: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < len {
        let bufs = IoBufs::from(IoBuf::zeroed((len - all.len()).min(100_000)));
        let (received, bufs) = worker.receive(socket, bufs).await;
        let received = received.unwrap();
        assert!(received > 0, "the end after {} bytes", all.len());
        let start = all.len();
        all.resize(start + received, 0);
        bufs.copy_to(0, &mut all[start..]);
    }
    all
}

#[test]
fn more_than_a_socket_holds_arrives_whole() {
    for worker in workers() {
        let (a, b) = pair();
        let data = pattern(3_000_000);
        let mut bufs = IoBufs::new();
        for part in data.chunks(70_001) {
            bufs.push(IoBuf::copy_of(part));
        }
        let sender = worker.clone();
        let sending = worker.spawn(async move { sender.send(&a, bufs).await.0 });
        let received = worker.block_on(receive_all(&worker, &b, data.len()));
        worker.block_on(sending).unwrap();
        assert!(received == data);
    }
}

#[test]
fn lazy_sends_go_out_with_the_wait() {
    for worker in workers() {
        let (a, b) = pair();
        let peer = std::thread::spawn(move || {
            let worker = Worker::new(&WorkerConfig::default()).unwrap();
            for turn in 0..100 {
                let received = worker.block_on(receive_all(&worker, &b, 30));
                assert!(received == pattern(30), "turn {turn}");
                worker.block_on(worker.send(&b, IoBuf::copy_of(b"x").into())).0.unwrap();
            }
        });
        let calls = worker.stats().syscalls;
        worker.block_on(async {
            let mut last = None;
            for _ in 0..100 {
                if let Some(last) = last.take() {
                    let (result, bufs): (std::io::Result<usize>, IoBufs) = last.await;
                    assert_eq!((result.unwrap(), bufs.len()), (30, 30));
                }
                last = Some(worker.send_lazily(&a, IoBuf::copy_of(&pattern(30)).into()));
                // What wakes this is the answer, which does not come before the bytes have left.
                receive_all(&worker, &a, 1).await;
            }
            assert_eq!(last.unwrap().await.0.unwrap(), 30);
        });
        let calls = worker.stats().syscalls - calls;
        if worker.kind() == WorkerKind::IoUring {
            assert!(calls <= 150, "{calls} system calls for 100 messages and answers");
        }
        peer.join().unwrap();
    }
}

#[test]
fn lazy_sends_that_find_no_room_arrive_whole_and_in_order() {
    for worker in workers() {
        let (a, b) = pair();
        let data = pattern(3_000_000);
        let sending = {
            let (worker, data) = (worker.clone(), data.clone());
            worker.clone().spawn(async move {
                for part in data.chunks(300_001) {
                    let mut bufs = IoBufs::new();
                    part.chunks(100_003).for_each(|part| bufs.push(IoBuf::copy_of(part)));
                    // Nobody else is there to wake it.
                    assert_eq!(worker.send_lazily(&a, bufs).await.0.unwrap(), part.len());
                }
            })
        };
        let received = worker.block_on(async {
            // Long enough for the socket to be full.
            worker.sleep(Duration::from_millis(20)).await;
            receive_all(&worker, &b, data.len()).await
        });
        worker.block_on(sending);
        assert!(received == data);
    }
}

#[test]
fn a_lazy_send_into_a_broken_connection_fails() {
    for worker in workers() {
        let (a, b) = pair();
        drop(a);
        let error = worker.block_on(worker.send_lazily(&b, IoBuf::zeroed(10).into())).0.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
        // One that nobody waits for leaves nothing behind.
        let (a, b) = pair();
        drop(worker.send_lazily(&b, IoBuf::copy_of(&pattern(10)).into()));
        assert_eq!(worker.block_on(receive_all(&worker, &a, 10)), pattern(10));
    }
}

#[test]
fn several_buffers_are_filled_in_order() {
    for worker in workers() {
        let (a, b) = pair();
        worker.block_on(async {
            worker.send(&a, IoBuf::copy_of(&pattern(50)).into()).await.0.unwrap();
            let mut bufs = IoBufs::from(IoBuf::zeroed(20));
            bufs.push(IoBuf::zeroed(100));
            let (received, bufs) = worker.receive(&b, bufs).await;
            assert_eq!(received.unwrap(), 50);
            let mut bytes = vec![0; 50];
            bufs.copy_to(0, &mut bytes);
            assert_eq!(bytes, pattern(50));
        });
    }
}

#[test]
fn the_end_and_a_broken_connection_are_told() {
    for worker in workers() {
        let (a, b) = pair();
        drop(a);
        worker.block_on(async {
            worker.readable(&b).await.unwrap();
            assert_eq!(worker.receive(&b, IoBuf::zeroed(10).into()).await.0.unwrap(), 0);
            let error = worker.send(&b, IoBuf::zeroed(10).into()).await.0.unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
        });
    }
}

#[test]
fn an_operation_that_is_dropped_is_cancelled() {
    for worker in workers() {
        let (a, b) = pair();
        worker.block_on(async {
            for _ in 0..1000 {
                let mut receive = Box::pin(worker.receive(&b, IoBuf::zeroed(100).into()));
                let mut readable = Box::pin(worker.readable(&b));
                std::future::poll_fn(|cx| {
                    assert!(
                        receive.as_mut().poll(cx).is_pending() && readable.as_mut().poll(cx).is_pending()
                    );
                    std::task::Poll::Ready(())
                })
                .await;
            }
            worker.sleep(Duration::from_millis(1)).await;
            // Nobody else takes it away.
            worker.send(&a, IoBuf::copy_of(&pattern(30)).into()).await.0.unwrap();
            assert_eq!(worker.receive(&b, IoBuf::zeroed(100).into()).await.0.unwrap(), 30);
        });
    }
}

#[test]
fn many_that_wait_leave_room_for_files() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, pattern(8192)).unwrap();
    for engine in [Engine::Auto, Engine::Threads] {
        let config = WorkerConfig::default().engine(engine).depth(8);
        let worker = Worker::new(&config).unwrap();
        let pairs: Vec<_> = (0..200).map(|_| pair()).collect();
        let waiting: Vec<_> = pairs
            .iter()
            .map(|(_, b)| {
                let (on, b) = (worker.clone(), b.clone());
                worker.spawn(async move { on.receive(&b, IoBuf::zeroed(16).into()).await.0.unwrap() })
            })
            .collect();
        let file = zebu_storage::File::open(
            &path,
            &zebu_storage::OpenFlags::default()
                .access(zebu_storage::Access::ReadOnly)
                .create(zebu_storage::Create::No)
                .lock(zebu_storage::LockMode::None),
        )
        .unwrap();
        worker.block_on(async {
            for _ in 0..50 {
                let (result, bufs) = worker.read(&file, 0, IoBuf::zeroed(8192).into()).await;
                result.unwrap();
                assert!(bufs.parts()[0].as_slice() == pattern(8192));
            }
            for (a, _) in &pairs {
                worker.send(a, IoBuf::copy_of(b"x").into()).await.0.unwrap();
            }
            for task in waiting {
                assert_eq!(task.await, 1);
            }
        });
    }
}

// A change of the socket's state wakes whoever waits for it, though nothing can be moved.
#[test]
fn operations_that_were_woken_for_nothing_go_on() {
    for worker in workers() {
        let (a, b) = pair();
        let data = pattern(3_000_000);
        let (sender, socket, bufs) = (worker.clone(), a.clone(), IoBufs::from(IoBuf::copy_of(&data)));
        let sending = worker.spawn(async move { sender.send(&socket, bufs).await.0 });
        let received = worker.block_on(async {
            let mut all = receive_all(&worker, &b, 100_000).await;
            rustix::net::shutdown(&a, Shutdown::Read).unwrap();
            worker.sleep(Duration::from_millis(20)).await;
            all.extend(receive_all(&worker, &b, data.len() - 100_000).await);
            all
        });
        worker.block_on(sending).unwrap();
        assert!(received == data);

        let (a, b) = pair();
        let (receiver, socket) = (worker.clone(), a.clone());
        let receiving = worker.spawn(async move { receive_all(&receiver, &socket, 5).await });
        worker.block_on(worker.sleep(Duration::from_millis(5)));
        rustix::net::shutdown(&a, Shutdown::Write).unwrap();
        worker.block_on(worker.sleep(Duration::from_millis(20)));
        worker.block_on(worker.send(&b, IoBuf::copy_of(b"bytes").into())).0.unwrap();
        assert_eq!(worker.block_on(receiving), b"bytes");
    }
}
