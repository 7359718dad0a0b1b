//! Functions and storages of the program that call back, panic, or take their time, on whichever thread they are called.

use super::handles::open_when_closed;
use super::{ENGINES, create, for_writing, must_be_clean, open};
use std::fs::File as StdFile;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::{Duration, Instant};
use zebu_engine::jobs::JobControl;
use zebu_engine::storage::{
    Access, Completer, Engine, File, IoBuf, OpenFlags, Storage, StorageAbilities, StorageDone, StorageOp,
    Worker, WorkerConfig,
};
use zebu_engine::{
    Disk, Durability, ErrorKind, Format, NewSnapshot, OpenOptions, OpenedFile, Preallocation, Request,
    Result, Shrink,
};

/// The time within which whatever does not hang has ended, on a machine with other work.
const AGES: Duration = Duration::from_secs(600);

/// A change of size reports its progress on the thread of the image's own, while it keeps all other changes out.
#[test]
fn a_report_of_progress_of_a_change_of_size_is_told_that_it_cannot_wait() {
    type Call = fn(&Disk) -> Result<()>;
    let calls: [(&str, Call); 5] = [
        ("read", |disk| disk.read(0, &mut [0; 512])),
        ("write", |disk| disk.write(0, &[3; 512])),
        ("flush", |disk| disk.flush()),
        ("snapshot", |disk| disk.create_snapshot(NewSnapshot::named("one")).map(drop)),
        ("close", |disk| disk.close()),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    let (tell, told) = mpsc::channel();
    let theirs = Mutex::new(Some(disk.clone()));
    let control = JobControl::default().progress(move |_| {
        if let Some(disk) = theirs.lock().unwrap().take() {
            for (name, call) in calls {
                tell.send((name, call(&disk))).unwrap();
            }
        }
    });
    let job = disk.start(async move |image, worker| {
        let size = image.virtual_size() * 2;
        image.resize_controlled(&worker, size, Shrink::Refuse, Preallocation::Full, &control).await
    });
    for (name, _) in calls {
        let (called, result) = told.recv_timeout(AGES).unwrap_or_else(|_| panic!("{name}: hangs"));
        assert_eq!((called, result.unwrap_err().kind()), (name, ErrorKind::InvalidArgument));
    }
    job.unwrap().wait().unwrap();
    assert_eq!(disk.virtual_size(), 128 << 20);
    disk.close().unwrap();
    must_be_clean(&path);
}

/// The last handle goes there, too.
#[test]
fn the_last_handle_may_go_in_a_report_of_a_change_of_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    disk.write(0, &[7; 4096]).unwrap();
    let (tell, told) = mpsc::channel();
    let (go, went) = mpsc::channel::<()>();
    let last = Mutex::new(Some((disk.clone(), went)));
    let control = JobControl::default().progress(move |_| {
        if let Some((disk, went)) = last.lock().unwrap().take() {
            went.recv().unwrap();
            drop(disk);
            tell.send(()).unwrap();
        }
    });
    let image = disk.image().clone();
    let resizing = std::thread::spawn(move || {
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        let size = image.virtual_size() * 2;
        let resized = image.resize_controlled(&worker, size, Shrink::Refuse, Preallocation::Full, &control);
        worker.block_on(resized)
    });
    drop(disk);
    go.send(()).unwrap();
    told.recv_timeout(AGES).expect("it hangs");
    resizing.join().unwrap().unwrap();
    let disk = open_when_closed(&path);
    let mut found = [0; 4096];
    disk.read(0, &mut found).unwrap();
    assert_eq!(found, [7; 4096]);
    disk.close().unwrap();
    must_be_clean(&path);
}

/// Work that nobody waits for goes on when no handle is left, and the disk is closed after it.
#[test]
fn work_that_was_begun_keeps_the_disk_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    let (go, went) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let job = disk.start(async move |image, worker| {
        while went.try_recv().is_err() {
            worker.sleep(Duration::from_millis(1)).await;
        }
        let bufs = IoBuf::copy_of(&[5; 512]).into();
        tell.send(image.write(&worker, 0, bufs, Durability::Volatile).await.0).unwrap();
        Ok(())
    });
    drop((disk, job));
    go.send(()).unwrap();
    told.recv_timeout(AGES).unwrap().unwrap();
    let disk = open_when_closed(&path);
    let mut found = [0; 512];
    disk.read(0, &mut found).unwrap();
    assert_eq!(found, [5; 512]);
    disk.close().unwrap();
    must_be_clean(&path);
}

/// A storage that answers as a file does, unless it is told otherwise.
struct Scripted {
    file: StdFile,
    panics: AtomicBool,
    /// Has the next operation of the image's own thread take so long.
    delay: Mutex<Option<Duration>>,
    delays: AtomicBool,
}

impl Scripted {
    fn over(file: StdFile) -> Arc<Self> {
        let (panics, delays) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { file, panics, delay: Mutex::new(None), delays })
    }

    fn open(self: &Arc<Self>, format: Format) -> Disk {
        let flags = OpenFlags::default().access(Access::ReadWrite);
        let file = File::from_storage(Arc::new(Shared(self.clone())), "scripted", &flags).unwrap();
        Disk::open_files(vec![OpenedFile::new(file, format)], &for_writing()).unwrap()
    }
}

struct Shared(Arc<Scripted>);

impl Storage for Shared {
    fn len(&self) -> u64 {
        self.0.file.metadata().unwrap().len()
    }
    fn identity(&self) -> u64 {
        Arc::as_ptr(&self.0) as u64
    }
    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::WRITE | StorageAbilities::SET_LEN
    }
    fn submit(&self, op: StorageOp, mut done: Completer) {
        assert!(!self.0.panics.load(SeqCst), "as intended");
        let is_images_own = std::thread::current().name() == Some("zebu-image");
        let delay = self.0.delay.lock().unwrap().take_if(|_| is_images_own);
        let file = self.0.file.try_clone().unwrap();
        let work = move || {
            let result = act(&file, op, &mut done);
            done.finish(result);
        };
        match delay {
            None => work(),
            Some(delay) => {
                self.0.delays.store(true, SeqCst);
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    work();
                });
            }
        }
    }
}

fn act(file: &StdFile, op: StorageOp, done: &mut Completer) -> std::result::Result<StorageDone, i32> {
    match op {
        StorageOp::Read { offset, len } => {
            let mut bytes = vec![0; len as usize];
            file.read_exact_at(&mut bytes, offset).unwrap();
            done.bufs_mut().copy_from(0, &bytes);
            Ok(StorageDone::Moved(len))
        }
        StorageOp::Write { offset, len } => {
            let mut bytes = vec![0; len as usize];
            done.bufs().copy_to(0, &mut bytes);
            file.write_all_at(&bytes, offset).unwrap();
            Ok(StorageDone::Moved(len))
        }
        StorageOp::SetLen { len } => file.set_len(len).map(|()| StorageDone::Done).map_err(|_| libc::EIO),
        StorageOp::Flush => Ok(StorageDone::Done),
        _ => Err(libc::EOPNOTSUPP),
    }
}

#[test]
fn a_storage_that_panics_under_a_queue_ends_its_request_only() {
    for engine in ENGINES {
        let raw = tempfile::tempfile().unwrap();
        raw.set_len(1 << 20).unwrap();
        let storage = Scripted::over(raw);
        let disk = storage.open(Format::Raw);
        let queue = disk.queue().engine(engine).build().unwrap();
        storage.panics.store(true, SeqCst);
        queue.submit(Request::Read { offset: 0, bufs: IoBuf::zeroed(512).into() }, 7);
        let mut done = Vec::new();
        let start = Instant::now();
        while queue.pending() > 0 && start.elapsed() < AGES {
            // The panic itself comes out here.
            let _ =
                catch_unwind(AssertUnwindSafe(|| queue.wait(&mut done, Some(Duration::from_millis(100)))));
        }
        assert_eq!((queue.pending(), done.len()), (0, 1), "{engine:?}");
        let completion = done.pop().unwrap();
        assert_eq!((completion.user_data, completion.result.unwrap_err().kind()), (7, ErrorKind::Panicked));
        storage.panics.store(false, SeqCst);
        queue.submit(Request::Read { offset: 0, bufs: IoBuf::zeroed(512).into() }, 8);
        queue.wait(&mut done, Some(AGES));
        assert!(done.pop().unwrap().result.is_ok());
    }
}

/// The commit of a queue's flush waits for the image's own thread, whose disk takes longer than the end of a worker has patience
/// with other tasks. The queue is dropped meanwhile.
#[test]
fn a_queue_that_is_dropped_while_the_disk_is_slow_does_not_stop_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let storage = Scripted::over(StdFile::options().read(true).write(true).open(&path).unwrap());
    let disk = storage.open(Format::Qcow2);
    disk.write(0, &vec![1; 65536]).unwrap();
    disk.flush().unwrap();
    let queue = disk.queue().promise_to_drive().build().unwrap();
    *storage.delay.lock().unwrap() = Some(Duration::from_secs(8));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| disk.write(1 << 20, &vec![2; 48 << 20]));
        let start = Instant::now();
        while !storage.delays.load(SeqCst) {
            assert!(start.elapsed() < AGES);
            std::thread::sleep(Duration::from_millis(1));
        }
        let bufs = IoBuf::copy_of(&[3; 4096]).into();
        queue.submit(Request::Write { offset: 0, bufs, durability: Durability::Durable }, 1);
        queue.start();
        drop(queue);
        writer.join().unwrap().unwrap();
    });
    disk.write(0, &[4; 512]).unwrap();
    disk.flush().unwrap();
    disk.close().unwrap();
    must_be_clean(&path);
    let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
    let mut found = [0; 1024];
    disk.read(0, &mut found).unwrap();
    assert!(found[..512] == [4; 512] && found[512..] == [3; 512]);
}

/// Blocking calls of a disk whose thread is blocked end with an error after half a minute.
#[test]
fn a_disk_whose_thread_is_blocked_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    let (go, went) = mpsc::channel::<()>();
    let job = disk.start(async move |_, _| Ok(went.recv().is_ok())).unwrap();
    // Small requests are done by the thread that calls.
    disk.read(0, &mut [0; 512]).unwrap();
    let mut large = vec![7; 1 << 20];
    let calls: [&(dyn Fn() -> Result<()> + Sync); 3] =
        [&|| disk.write(0, &vec![1; 1 << 20]), &|| disk.flush(), &|| {
            disk.start(async |_, _| Ok(())).and_then(|job| job.wait())
        }];
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| disk.read(0, &mut large));
        for call in calls.map(|call| scope.spawn(call)).into_iter().chain([reads]) {
            let error = call.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert!(error.to_string().contains("blocked"), "{error}");
        }
    });
    assert!(large.iter().all(|byte| *byte == 7));
    go.send(()).unwrap();
    assert!(job.wait().unwrap());
    disk.read(0, &mut large).unwrap();
    assert!(large.iter().all(|byte| *byte == 0), "what was taken back was written");
    disk.close().unwrap();
    must_be_clean(&path);
}

#[test]
fn disks_whose_work_waits_for_each_other_end_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (second_dir, barrier) = (tempfile::tempdir().unwrap(), Arc::new(Barrier::new(2)));
    let disks = [dir.path(), second_dir.path()].map(|dir| open(Engine::Auto, &create(dir)));
    let jobs = [0, 1].map(|index: usize| {
        let (other, barrier) = (disks[1 - index].clone(), Arc::clone(&barrier));
        let work = async move |_, _| {
            barrier.wait();
            other.flush()
        };
        disks[index].start(work).unwrap()
    });
    let results = jobs.map(|job| job.wait());
    for result in &results {
        assert!(matches!(result.as_ref().map_err(|error| error.kind()), Ok(()) | Err(ErrorKind::Busy)));
    }
    assert!(results.iter().any(|result| result.is_err()), "they met before they waited");
    for disk in disks {
        disk.close().unwrap();
    }
}
