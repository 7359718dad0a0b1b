//! Threads that share an image: a few fixed seeds, and every scenario once. `cargo xtask threads` runs as many as wanted.

use std::os::unix::thread::JoinHandleExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zebu_engine::storage::{Engine, IoBuf, Worker, WorkerConfig};
use zebu_engine::{Access, CreateOptions, Disk, Durability, ErrorKind, OpenOptions, Queue, Request};
use zebu_tests::patience::LONGEST;
use zebu_tests::qemu::Qemu;
use zebu_tests::thread_stress::judge::Verdict;
use zebu_tests::thread_stress::plan::Images;
use zebu_tests::thread_stress::runner::Runner;
use zebu_tests::thread_stress::scenarios::Scenario;

fn run(seeds: std::ops::Range<u64>, each: impl Fn(&Runner<'_>, u64) -> Verdict) {
    let Some(qemu) = Qemu::find() else { return };
    let program = PathBuf::from(env!("CARGO_BIN_EXE_threads"));
    let runner = Runner { program, qemu: &qemu, patience: LONGEST, requests: 4000 };
    let mut violations = Vec::new();
    for seed in seeds {
        violations.extend(each(&runner, seed).violations);
    }
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn what_threads_see_is_explained_by_an_order_of_their_requests() {
    run(1..25, |runner, seed| runner.case(seed, Images::Any));
}

#[test]
fn what_threads_see_of_encrypted_images_is_explained_by_an_order_of_their_requests() {
    run(1..7, |runner, seed| runner.case(seed, Images::Encrypted));
}

#[test]
fn what_threads_see_while_reads_copy_is_explained_by_an_order_of_their_requests() {
    run(1..6, |runner, seed| runner.case(seed, Images::CopyOnRead));
}

/// One test each, so that a failure names it.
macro_rules! scenarios {
    ($($test:ident: $scenario:ident,)*) => {
        $(#[test]
        fn $test() {
            run(1..2, |runner, seed| runner.scenario(Scenario::$scenario, seed));
        })*

        #[test]
        fn no_scenario_is_left_out() {
            assert_eq!([$(Scenario::$scenario),*], Scenario::ALL);
        }
    };
}

scenarios! {
    a_commit_beside_new_tables_loses_nothing: CommitBesideNewTables,
    a_commit_beside_recycled_tables_loses_nothing: CommitBesideRecycledTables,
    a_slice_is_loaded_from_the_table_that_is_written: LoadBesideCopiedTable,
    runs_that_are_set_aside_are_given_out_once: RunsSetAside,
    what_a_disk_grows_by_is_zero_whoever_reads: GrowthBesideReads,
    requests_with_a_small_cache_come_to_their_end: SmallCache,
    a_cache_under_pressure_keeps_to_its_limit: CacheLimit,
    a_flush_that_was_dropped_holds_nobody_up: DroppedFlush,
    a_commit_that_was_dropped_holds_nobody_up: DroppedCommit,
    a_release_that_was_dropped_holds_nobody_up: DroppedRelease,
    a_thread_that_ended_holds_nobody_up: EndedThread,
    an_idle_blocking_handle_holds_up_no_flush: IdleBlockingFlush,
    an_idle_blocking_handle_holds_up_no_close: IdleBlockingClose,
}

/// Uses what its parent made, in a child of fork(2). Returns 0 if all is as documented.
fn looked_at_by_a_child(disk: Disk, queue: Queue, worker: &Worker, other: &Path) -> i32 {
    let refused =
        |result: zebu_engine::Result<()>| result.is_err_and(|e| e.kind() == ErrorKind::InvalidArgument);
    let mut done = Vec::new();
    queue.submit(Request::Flush, 7);
    queue.wait(&mut done, None);
    let checks = [
        refused(disk.write(0, &[2; 512])),
        refused(disk.read(0, &mut [0; 512])),
        refused(disk.flush()),
        refused(disk.close()),
        refused(disk.run(async |_, _| Ok(()))),
        done.pop().is_some_and(|completion| completion.user_data == 7 && refused(completion.result)),
        catch_unwind(AssertUnwindSafe(|| worker.poll())).is_err(),
        // This thread did requests of a disk before the fork.
        Disk::open(other, &OpenOptions::default().access(Access::ReadWrite)).is_ok_and(|own| {
            let mut byte = [0];
            let used = own
                .write(0, &[7; 4096])
                .and_then(|()| own.write(70, &[5]))
                .and_then(|()| own.read(70, &mut byte));
            used.is_ok() && byte == [5] && own.close().is_ok()
        }),
    ];
    drop((queue, disk));
    checks.iter().position(|passed| !passed).map_or(0, |which| which as i32 + 1)
}

#[test]
fn a_child_of_a_fork_gets_errors_and_leaves_its_parent_alone() {
    for engine in [Engine::Threads, Engine::IoUring] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        let other = dir.path().join("other.qcow2");
        for path in [&path, &other] {
            Disk::create(path, &CreateOptions::default().size(Some(1 << 20))).unwrap();
        }
        let options = OpenOptions::default().access(Access::ReadWrite);
        let disk = Disk::builder().engine(engine).open(&path, &options).unwrap();
        let queue = disk.queue().engine(engine).build().unwrap();
        let worker = Worker::new(&WorkerConfig::default().engine(engine)).unwrap();
        disk.write(0, &[1; 512]).unwrap();
        disk.read(0, &mut [0; 512]).unwrap();
        // Some of it is under way.
        for i in 0..8 {
            let bufs = IoBuf::copy_of(&[1; 4096]).into();
            let write = Request::Write { offset: i * 65536, bufs, durability: Durability::Volatile };
            queue.submit(write, i);
        }
        let mut done = Vec::new();
        queue.poll(&mut done);
        // SAFETY: the child does what this test is about: it calls the library, which notices, and ends by `_exit`. Its
        // allocator is usable after a fork (glibc, musl). An alarm ends a child that hangs.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(LONGEST.as_secs() as u32) };
            let (disk, queue) = (disk, queue);
            let code = looked_at_by_a_child(disk, queue, &worker, &other);
            drop(worker);
            // SAFETY: as above.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: plain system call with a place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "{engine:?}");
        while queue.pending() > 0 {
            queue.wait(&mut done, None);
        }
        assert!(done.len() == 8 && done.iter().all(|completion| completion.result.is_ok()));
        // The locks are still there.
        assert_eq!(Disk::open(&path, &options).unwrap_err().kind(), ErrorKind::Locked);
        disk.write(512, &[1; 512]).unwrap();
        drop(queue);
        disk.close().unwrap();
    }
}

extern "C" fn on_signal(_: libc::c_int) {}

/// Signals without SA_RESTART, so that each system call which waits ends early.
#[test]
fn signals_in_the_middle_of_requests_change_nothing() {
    // SAFETY: an empty handler may interrupt anything; no other test of this program uses the signal.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as libc::sighandler_t;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    for engine in [Engine::Threads, Engine::IoUring] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        Disk::create(&path, &CreateOptions::default().size(16 << 20)).unwrap();
        let options = OpenOptions::default().access(Access::ReadWrite);
        let disk = Disk::builder().engine(engine).open(&path, &options).unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let [first_ends, second_ends] = [Arc::clone(&is_over), Arc::clone(&is_over)];
        let waiting = move |disk: Disk| {
            let mut rounds = 0u64;
            while rounds == 0 || !first_ends.load(Ordering::Relaxed) {
                let (offset, byte) = (rounds % 64 * 65536, rounds as u8);
                disk.write(offset, &[byte; 5000]).unwrap();
                let mut back = [0; 5000];
                disk.read(offset, &mut back).unwrap();
                assert!(back == [byte; 5000]);
                if rounds.is_multiple_of(8) {
                    disk.flush().unwrap();
                }
                rounds += 1;
            }
            rounds
        };
        let queued = move |disk: Disk| {
            let queue = disk.queue().engine(engine).build().unwrap();
            let (mut rounds, mut done) = (0u64, Vec::new());
            while rounds == 0 || !second_ends.load(Ordering::Relaxed) {
                for i in 0..8 {
                    let bufs = IoBuf::copy_of(&[i as u8; 4096]).into();
                    let offset = (8 << 20) + (rounds % 32 * 8 + i) * 4096;
                    queue.submit(Request::Write { offset, bufs, durability: Durability::Volatile }, i);
                }
                queue.submit(Request::Flush, 8);
                while done.len() < 9 {
                    queue.wait(&mut done, None);
                }
                assert!(done.drain(..).all(|completion| completion.result.is_ok()));
                rounds += 1;
            }
            rounds
        };
        let (first, second) = (disk.clone(), disk.clone());
        let threads =
            [std::thread::spawn(move || waiting(first)), std::thread::spawn(move || queued(second))];
        let (begin, mut sent) = (Instant::now(), 0);
        while threads.iter().any(|thread| !thread.is_finished()) {
            for thread in &threads {
                // SAFETY: the thread is not joined yet, so that its handle is good.
                sent += unsafe { i32::from(libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) == 0) };
            }
            let time = begin.elapsed();
            assert!(time < LONGEST, "threads go on");
            if sent >= 200 && time > Duration::from_millis(700) {
                is_over.store(true, Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        assert!(sent > 100, "{sent} signals");
        for thread in threads {
            assert!(thread.join().unwrap() > 0);
        }
        disk.close().unwrap();
        let report = Disk::check(&path, &zebu_engine::check::CheckOptions::default()).unwrap();
        assert!(report.is_clean() && report.counts.leaks == 0, "{report:?}");
    }
}
