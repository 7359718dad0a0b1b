//! Handles that are dropped, moved and closed where nobody expects it, and functions of the caller that panic.

use super::{ENGINES, create, for_writing, must_be_clean, open};
use rustix::event::{PollFd, PollFlags, poll};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use zebu_engine::check::{CheckOptions, check};
use zebu_engine::jobs::{
    ConvertOptions, ConvertTarget, HydrateOptions, JobControl, LiveBackup, LiveBackupOptions, NewTarget,
    Progress, VerifyOptions, convert, hydrate, verify,
};
use zebu_engine::storage::{Engine, IoBuf, Worker};
use zebu_engine::{
    CreateOptions, Disk, Durability, ErrorKind, Image, NewSnapshot, Preallocation, Request, Result, Shrink,
};

/// The time within which whatever does not hang has ended, on a machine with other work.
const AGES: Duration = Duration::from_secs(600);

/// Opens an image that another thread is about to close.
pub(crate) fn open_when_closed(path: &Path) -> Disk {
    let start = Instant::now();
    loop {
        match Disk::open(path, &for_writing()) {
            Ok(disk) => return disk,
            Err(error) => {
                assert!(error.kind() == ErrorKind::Locked && start.elapsed() < AGES, "{error}");
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write(offset: u64) -> Request {
    Request::Write { offset, bufs: IoBuf::copy_of(&[7; 4096]).into(), durability: Durability::Volatile }
}

/// A queue goes from thread to thread until it is attached, does requests there, and ends there with more under way.
#[test]
fn a_queue_that_moves_ends_where_it_is_dropped() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let never_attached = disk.queue().engine(engine).detached().unwrap();
        std::thread::spawn(move || drop(never_attached)).join().unwrap();
        let detached = disk.queue().engine(engine).detached().unwrap();
        let detached = std::thread::spawn(move || detached).join().unwrap();
        // The queue is the last that holds the disk: its end closes the image, on its thread.
        drop(disk);
        std::thread::spawn(move || {
            let queue = detached.attach();
            (0..64).for_each(|i| queue.submit(write(i * 65536), i));
            queue.start();
            (64..128).for_each(|i| queue.submit(write(i * 65536), i));
        })
        .join()
        .unwrap();
        must_be_clean(&path);
        let disk = open_when_closed(&path);
        for i in [0, 63, 64, 127] {
            let mut byte = [0];
            disk.read(i * 65536, &mut byte).unwrap();
            assert_eq!(byte, [7], "{engine:?}: {i}");
        }
    }
}

/// Several handles close at once, while others do requests.
#[test]
fn closing_many_times_at_once_closes_once() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        disk.write(0, &[1; 512]).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let disk = &disk;
                scope.spawn(move || {
                    for i in 0..1000 {
                        match disk.write((thread * 1000 + i) % 1000 * 65536, &[1; 512]) {
                            Ok(()) => {}
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                                return;
                            }
                        }
                    }
                });
            }
            (0..4).for_each(|_| drop(scope.spawn(|| disk.close().unwrap())));
        });
        disk.close().unwrap();
        drop(disk);
        must_be_clean(&path);
    }
}

/// The last handle is dropped by a function that reports progress, on the disk's own thread.
#[test]
fn the_last_handle_may_go_in_a_report_of_progress() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    disk.write(0, &vec![1; 1 << 20]).unwrap();
    let last = Arc::new(Mutex::new(Some(disk.clone())));
    let (tell, told) = mpsc::channel();
    let control = JobControl::default().progress(move |_| {
        if let Some(disk) = last.lock().unwrap().take() {
            // No call of the disk can be waited for here.
            tell.send(disk.read(0, &mut [0; 512]).unwrap_err().kind()).unwrap();
            drop(disk);
        }
    });
    let options = VerifyOptions::default().control(control);
    let job = disk.start(async move |image, worker| verify(&worker, &image, &options).await);
    drop((disk, job));
    assert_eq!(told.recv_timeout(AGES).unwrap(), ErrorKind::InvalidArgument);
    open_when_closed(&path).close().unwrap();
    must_be_clean(&path);
}

/// The function that is told of a failed close uses and drops other disks.
#[test]
fn a_function_that_is_told_of_an_error_may_use_disks() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let other = open(
        Engine::Auto,
        &create(&std::fs::create_dir(dir.path().join("o")).map(|()| dir.path().join("o")).unwrap()),
    );
    let told = Arc::new(AtomicU64::new(0));
    let (theirs, count) = (Mutex::new(Some(other)), told.clone());
    let disk = Disk::builder()
        .on_drop_error(move |error| {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            let other = theirs.lock().unwrap().take().unwrap();
            other.write(0, &[1; 512]).unwrap();
            drop(other);
            count.fetch_add(1, SeqCst);
        })
        .open(&path, &for_writing())
        .unwrap();
    // A request of a worker that is never driven again is in the way of the close.
    let worker = Worker::new(&zebu_engine::storage::WorkerConfig::default()).unwrap();
    let (image, on) = (disk.image().clone(), worker.clone());
    drop(worker.spawn(async move {
        image.write(&on, 0, IoBuf::zeroed(512).into(), Durability::Volatile).await.0.unwrap();
    }));
    worker.poll();
    drop(disk);
    assert_eq!(told.load(SeqCst), 1);
    drop(worker);
    must_be_clean(&dir.path().join("o/disk.qcow2"));
}

/// Jobs whose function that reports progress panics, at the first report and at a later one.
#[test]
fn a_report_of_progress_that_panics_ends_its_job_only() {
    type Job = fn(Image, Worker, JobControl, std::path::PathBuf) -> zebu_job::Running;
    let jobs: [(&str, Job); 6] = [
        ("verify", |image, worker, control, _| {
            Box::pin(async move {
                verify(&worker, &image, &VerifyOptions::default().control(control)).await.map(drop)
            })
        }),
        ("resize", |image, worker, control, _| {
            Box::pin(async move {
                let size = image.virtual_size() + (64 << 20);
                image.resize_controlled(&worker, size, Shrink::Refuse, Preallocation::Full, &control).await
            })
        }),
        ("convert", |image, worker, control, dir| {
            Box::pin(async move {
                let target = ConvertTarget::New(Box::new(NewTarget::new(dir.join("converted"))));
                // Reports come from further threads as well.
                let options = ConvertOptions::default().workers(3).control(control);
                convert(&worker, &[image], target, &options).await.map(drop)
            })
        }),
        ("hydrate", |image, worker, control, _| {
            Box::pin(async move {
                hydrate(&worker, &image, &HydrateOptions::default().control(control)).await.map(drop)
            })
        }),
        ("live backup", |image, worker, control, dir| {
            Box::pin(async move {
                let path = dir.join("live");
                Image::create(&worker, &path, &CreateOptions::default().size(image.virtual_size())).await?;
                let target = Image::open(&worker, &path, &for_writing()).await?;
                let options = LiveBackupOptions::default().control(control);
                let backup = LiveBackup::start(&worker, &image, &target, options).await?;
                backup.run(&worker).await.map(drop)
            })
        }),
        ("check", |image, worker, control, _| {
            Box::pin(async move {
                let path = image.path().to_owned();
                let options =
                    CheckOptions::default().sharing(zebu_engine::Sharing::Unlocked).control(control);
                check(&worker, &path, &options).await.map(drop)
            })
        }),
    ];
    for (name, job) in jobs {
        // A check of so small an image reports once.
        for nth in 0..=u64::from(name != "check") {
            let dir = tempfile::tempdir().unwrap();
            let path = create(dir.path());
            let disk = open(Engine::Auto, &path);
            (0..8).for_each(|i| disk.write(i * (4 << 20), &vec![1; 1 << 20]).unwrap());
            // The check looks at the file, and reports tables.
            disk.flush().unwrap();
            let reports = AtomicU64::new(0);
            let control = JobControl::default().progress(move |_: Progress| {
                assert!(reports.fetch_add(1, SeqCst) < nth, "as intended");
            });
            let folder = dir.path().to_owned();
            let started = disk.start(async move |image, worker| job(image, worker, control, folder).await);
            let (tell, told) = mpsc::channel();
            let waits = started.unwrap();
            std::thread::spawn(move || tell.send(waits.wait()));
            let result: Result<()> = told.recv_timeout(AGES).unwrap_or_else(|_| panic!("{name}: hangs"));
            let error = result.expect_err(name);
            assert_eq!(error.kind(), ErrorKind::Panicked, "{name}, report {nth}: {error}");
            disk.write(0, &vec![2; 65536]).unwrap();
            disk.create_snapshot(NewSnapshot::named("after")).unwrap();
            disk.close().unwrap();
            must_be_clean(&path);
        }
    }
}

mod zebu_job {
    /// A job that runs on a disk's thread.
    pub(super) type Running = std::pin::Pin<Box<dyn Future<Output = zebu_engine::Result<()>>>>;
}

/// A queue whose disk is closed while its requests are under way, from a thread that is no queue's.
#[test]
fn a_close_beside_a_queue_that_is_driven_waits_for_its_requests() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let queue = disk.queue().engine(engine).build().unwrap();
        (0..64).for_each(|i| queue.submit(write(i * 65536), i));
        queue.start();
        let closing = std::thread::spawn(move || disk.close());
        let mut done = Vec::new();
        while queue.pending() > 0 {
            poll(&mut [PollFd::new(&queue, PollFlags::IN)], None).unwrap();
            queue.poll(&mut done);
        }
        for completion in done {
            let kind = completion.result.err().map(|error| error.kind());
            assert!(matches!(kind, None | Some(ErrorKind::InvalidArgument)), "{kind:?}");
        }
        closing.join().unwrap().unwrap();
        drop(queue);
        must_be_clean(&path);
    }
}
