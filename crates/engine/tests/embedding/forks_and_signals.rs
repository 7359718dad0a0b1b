//! A disk in a process that forks, and on a thread that gets signals.

use super::{ENGINES, create, for_writing, must_be_clean, open};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use zebu_engine::storage::{IoBuf, Worker, WorkerConfig};
use zebu_engine::{Disk, Durability, ErrorKind, NewSnapshot, Preallocation, Shrink, ZeroMode};

/// Runs `work` in a child of fork(2), which ends with 0 if it is true.
fn holds_in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child allocates and makes threads, which glibc makes work after a fork; it ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let holds = work();
        // SAFETY: plain system call.
        unsafe { libc::_exit(i32::from(!holds)) };
    }
    let mut status = -1;
    // SAFETY: plain system call with a place for the result.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status == 0
}

#[test]
fn a_child_of_fork_gets_errors_and_its_parent_goes_on() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        disk.write(0, &[1; 4096]).unwrap();
        let other = dir.path().join("other.qcow2");
        std::fs::copy(&path, &other).unwrap();
        let theirs = disk.clone();
        let holds = holds_in_child(move || {
            let errors =
                [theirs.read(0, &mut [0; 512]), theirs.write(0, &[9; 512]), theirs.flush(), theirs.close()];
            let are_refused = errors
                .into_iter()
                .all(|result| result.is_err_and(|error| error.kind() == ErrorKind::InvalidArgument));
            drop(theirs);
            let own = Disk::builder().engine(engine).open(&other, &for_writing());
            are_refused && own.is_ok_and(|own| own.write(0, &[3; 512]).is_ok() && own.close().is_ok())
        });
        assert!(holds, "{engine:?}");
        disk.write(4096, &[2; 4096]).unwrap();
        let mut found = [0; 8192];
        disk.read(0, &mut found).unwrap();
        assert!(found[..4096] == [1; 4096] && found[4096..] == [2; 4096]);
        disk.close().unwrap();
        must_be_clean(&path);
    }
}

/// An image itself is for workers of any thread; one of a child would write beside its parent, under the parent's locks.
#[test]
fn a_worker_of_a_child_gets_errors_of_its_parents_image() {
    for is_changed in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(ENGINES[0], &path);
        if is_changed {
            disk.write(0, &[1; 4096]).unwrap();
        }
        let image = disk.image().clone();
        let holds = holds_in_child(move || {
            // SAFETY: plain system call. A child that hangs ends.
            unsafe { libc::alarm(100) };
            let worker = Worker::new(&WorkerConfig::default()).unwrap();
            let results = worker.block_on(async {
                let bufs = || IoBuf::copy_of(&[9; 512]).into();
                [
                    image.read(&worker, 0, bufs()).await.0,
                    image.write(&worker, 0, bufs(), Durability::Durable).await.0,
                    image.write_zeroes(&worker, 0, 512, ZeroMode::Keep).await,
                    image.discard(&worker, 0, 512).await,
                    image.flush(&worker).await,
                    image.extent(&worker, 0, 512).await.map(drop),
                    image.create_snapshot(&worker, NewSnapshot::named("one")).await.map(drop),
                    image.resize(&worker, 1 << 30, Shrink::Refuse, Preallocation::Off).await,
                    image.close(&worker).await,
                ]
            });
            let is_refused = |result: zebu_engine::Result<()>| {
                result.is_err_and(|error| error.kind() == ErrorKind::InvalidArgument)
            };
            results.into_iter().all(is_refused)
        });
        assert!(holds, "changed: {is_changed}");
        let mut found = [0; 512];
        disk.read(0, &mut found).unwrap();
        assert_eq!(found, [u8::from(is_changed); 512]);
        disk.close().unwrap();
        must_be_clean(&path);
    }
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn signals_in_the_middle_of_requests_change_nothing() {
    // SAFETY: the handler only adds to an atomic. It interrupts system calls (no SA_RESTART).
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as extern "C" fn(libc::c_int) as libc::sighandler_t;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let before = SIGNALS.load(Ordering::Relaxed);
        let is_over = AtomicBool::new(false);
        // SAFETY: plain system call.
        let caller = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    // SAFETY: the thread of the test lives until this one has ended.
                    unsafe { libc::pthread_kill(caller, libc::SIGUSR1) };
                    std::thread::sleep(Duration::from_micros(20));
                }
            });
            let begin = Instant::now();
            for turn in 0.. {
                let (offset, len) = ((turn % 61) << 20, if turn % 2 == 0 { 4096 } else { 1 << 20 });
                let written = vec![turn as u8 | 1; len];
                disk.write(offset, &written).unwrap();
                if turn % 5 == 0 {
                    disk.flush().unwrap();
                }
                let mut found = vec![0; len];
                disk.read(offset, &mut found).unwrap();
                assert!(found == written, "{engine:?} {turn}");
                let (elapsed, signals) = (begin.elapsed(), SIGNALS.load(Ordering::Relaxed) - before);
                let is_enough = signals > 100 || elapsed > Duration::from_secs(600);
                if elapsed > Duration::from_millis(300) && is_enough {
                    break;
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert!(SIGNALS.load(Ordering::Relaxed) - before > 100);
        disk.close().unwrap();
        must_be_clean(&path);
    }
}
