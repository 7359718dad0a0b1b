//! Callers that do what they should not, and the errors that a disk gives them.

use super::{ENGINES, create, for_writing, must_be_clean, open};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zebu_engine::jobs::{BackupOptions, JobControl, backup};
use zebu_engine::storage::{IoBuf, Worker, WorkerConfig};
use zebu_engine::{
    Disk, Durability, ErrorKind, NewBitmap, NewSnapshot, Preallocation, Request, Shrink, ZeroMode,
};

#[test]
fn a_closed_disk_answers_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(ENGINES[0], &path);
    disk.write(0, &[1; 512]).unwrap();
    disk.close().unwrap();
    disk.close().unwrap();
    let mut extents = disk.extents(0..512);
    let errors = [
        disk.read(0, &mut [0; 512]),
        disk.write(0, &[0; 512]),
        disk.flush(),
        disk.write_zeroes(0, 512, ZeroMode::Keep),
        disk.discard(0, 512),
        disk.resize(1 << 20, Shrink::Allow),
        disk.run(async |_, _| Ok(())),
        disk.start(async |_, _| Ok(())).map(drop),
        disk.info().map(drop),
        extents.next().unwrap().map(drop),
    ];
    for error in errors {
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    must_be_clean(&path);
}

/// Another program may write the image when its locks are gone: what the closed one knows of it is out of date.
#[test]
fn nothing_is_read_of_a_closed_image() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        disk.write(0, &vec![1; 65536]).unwrap();
        let queue = disk.queue().engine(engine).build().unwrap();
        disk.close().unwrap();
        let other = open(engine, &path);
        other.discard(0, 65536).unwrap();
        other.close().unwrap();
        let other = open(engine, &path);
        other.write(128 << 10, &vec![2; 512 << 10]).unwrap();

        queue.submit(Request::Read { offset: 0, bufs: IoBuf::zeroed(512).into() }, 1);
        let mut done = Vec::new();
        queue.wait(&mut done, None);
        assert_eq!(done.remove(0).result.unwrap_err().kind(), ErrorKind::InvalidArgument);
        let worker = Worker::new(&WorkerConfig::default().engine(engine)).unwrap();
        let image = disk.image();
        let (read, _) = worker.block_on(image.read(&worker, 0, IoBuf::zeroed(512).into()));
        let extent = worker.block_on(image.extent(&worker, 0, 512)).map(drop);
        for result in [read, extent] {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        drop((queue, other));
        must_be_clean(&path);
    }
}

#[test]
fn ranges_past_the_end_are_refused_whole() {
    let dir = tempfile::tempdir().unwrap();
    let disk = open(ENGINES[1], &create(dir.path()));
    for offset in [(64 << 20) - 511, u64::MAX - 100] {
        let mut buf = [7; 512];
        assert_eq!(disk.read(offset, &mut buf).unwrap_err().kind(), ErrorKind::OutOfRange);
        assert_eq!(disk.write(offset, &buf).unwrap_err().kind(), ErrorKind::OutOfRange);
        assert_eq!(buf, [7; 512]);
    }
}

#[test]
fn the_disks_own_thread_is_told_instead_of_waiting_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(ENGINES[1], &path);
    let theirs = disk.clone();
    disk.run(async move |_, _| {
        for result in [theirs.flush(), theirs.read(0, &mut [0; 512]), theirs.close()] {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        Ok(())
    })
    .unwrap();
    // The last handle goes there: the image is closed all the same.
    let (go, went) = mpsc::channel::<()>();
    let theirs = disk.clone();
    let job = disk.start(async move |_, _| {
        went.recv().unwrap();
        drop(theirs);
        Ok(())
    });
    drop((job, disk));
    go.send(()).unwrap();
    let start = Instant::now();
    let disk = loop {
        match Disk::open(&path, &for_writing()) {
            Ok(disk) => break disk,
            Err(error) => assert!(error.kind() == ErrorKind::Locked && start.elapsed().as_secs() < 600),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    disk.close().unwrap();
}

#[test]
fn a_function_of_the_caller_that_panics_ends_its_job_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(ENGINES[1], &path);
    disk.write(0, &vec![1; 65536]).unwrap();
    let mut options = BackupOptions::new(dir.path().join("copy.qcow2"));
    options.control = JobControl::default().progress(|_| panic!("as intended"));
    let error =
        disk.run(async move |image, worker| Box::pin(backup(&worker, &image, &options)).await).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Panicked);
    let error = disk.run(async |_, _| -> zebu_engine::Result<()> { panic!("as intended") }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Panicked);
    disk.write(65536, &vec![1; 65536]).unwrap();
    disk.close().unwrap();
    must_be_clean(&path);
}

#[test]
fn a_resize_whose_progress_function_panics_is_undone() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    for panics_at in [0, 3] {
        let disk = open(ENGINES[1], &path);
        let size = disk.virtual_size();
        let reports = AtomicU32::new(0);
        let control = JobControl::default()
            .progress(move |_| assert!(reports.fetch_add(1, SeqCst) != panics_at, "as intended"));
        let metadata = Preallocation::Metadata;
        let error =
            disk.resize_controlled(size + (64 << 20), Shrink::Refuse, metadata, &control).unwrap_err();
        assert_eq!((error.kind(), disk.virtual_size()), (ErrorKind::Panicked, size), "{error}");
        disk.resize(size + (64 << 20), Shrink::Refuse).unwrap();
        disk.write(size + (32 << 20), &[2; 4096]).unwrap();
        disk.close().unwrap();
        assert_eq!(open(ENGINES[1], &path).virtual_size(), size + (64 << 20));
        must_be_clean(&path);
    }
}

/// In a process of its own, whose files can't grow any more from some time on.
#[test]
fn the_error_of_a_close_by_dropping_is_told() {
    const CHILD: &str = "ZEBU_TEST_DISK_DROP";
    if std::env::var_os(CHILD).is_none() {
        let this = std::env::current_exe().unwrap();
        // The signal that comes with the limit is ignored; the system call fails.
        let status = Command::new("sh")
            .args(["-c", r#"trap "" XFSZ; exec "$0" "$@""#])
            .arg(this)
            .args(["--exact", "disk_misuse::the_error_of_a_close_by_dropping_is_told"])
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let told = Arc::new(Mutex::new(Vec::new()));
    let hears = told.clone();
    let disk = Disk::builder()
        .on_drop_error(move |error| {
            hears.lock().unwrap().push(error.kind());
            panic!("which is nobody's trouble");
        })
        .open(&path, &for_writing())
        .unwrap();
    disk.write(0, &[1; 4096]).unwrap();
    setrlimit(Resource::Fsize, Rlimit { current: Some(0), maximum: None }).unwrap();
    drop(disk);
    setrlimit(Resource::Fsize, Rlimit { current: None, maximum: None }).unwrap();
    assert_eq!(*told.lock().unwrap(), [ErrorKind::NoSpace]);
}

/// Methods that need the end of a request of the caller's own queue, which nobody drives, give it up.
#[test]
fn methods_that_wait_for_a_queue_that_is_not_driven_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(ENGINES[0], &path);
    let queue = disk.queue().build().unwrap();
    let bufs = IoBuf::copy_of(&[1; 4096]).into();
    queue.submit(Request::Write { offset: 0, bufs, durability: Durability::Volatile }, 1);
    queue.start();
    let start = Instant::now();
    let results = std::thread::scope(|scope| {
        let snapshot = scope.spawn(|| disk.create_snapshot(NewSnapshot::named("one")).map(drop));
        let bitmap = scope.spawn(|| disk.add_bitmap(&NewBitmap::named("changed")));
        let growth = scope.spawn(|| disk.resize(128 << 20, Shrink::Refuse));
        let close = scope.spawn(|| disk.close());
        [snapshot, bitmap, growth, close].map(|thread| thread.join().unwrap())
    });
    for result in results {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.is_retryable() && error.to_string().contains("its queue or worker is not driven"));
    }
    assert!(start.elapsed() < Duration::from_secs(600));
    let mut done = Vec::new();
    while queue.pending() > 0 {
        queue.wait(&mut done, None);
    }
    assert!(done.iter().all(|completion| completion.result.is_ok()));
    disk.create_snapshot(NewSnapshot::named("one")).unwrap();
    drop(queue);
    disk.close().unwrap();
    must_be_clean(&path);
}
