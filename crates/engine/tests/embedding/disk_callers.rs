//! Threads that do their requests themselves.

use super::{ENGINES, create, for_writing, must_be_clean, open};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::ThreadId;
use zebu_engine::storage::{
    Completer, Engine, File, OpenFlags, Storage, StorageAbilities, StorageDone, StorageOp,
};
use zebu_engine::{
    CacheMode, Disk, ErrorKind, Format, NewSnapshot, OpenOptions, OpenedFile, Shrink, SnapshotRef, ZeroMode,
};

/// The descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A disk of zeroes that notes who asks for them.
#[derive(Default)]
struct Zeroes {
    asked_by: Mutex<Vec<ThreadId>>,
    panics: AtomicBool,
}

struct Shared(Arc<Zeroes>);

impl Storage for Shared {
    fn len(&self) -> u64 {
        64 << 20
    }
    fn identity(&self) -> u64 {
        Arc::as_ptr(&self.0) as u64
    }
    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::empty()
    }
    fn submit(&self, op: StorageOp, mut done: Completer) {
        assert!(!self.0.panics.load(SeqCst), "as intended");
        self.0.asked_by.lock().unwrap().push(std::thread::current().id());
        let StorageOp::Read { len, .. } = op else { panic!("nothing else is asked for") };
        done.bufs_mut().fill(0, len as usize, 0);
        done.finish(Ok(StorageDone::Moved(len)));
    }
}

fn of_zeroes(zeroes: &Arc<Zeroes>) -> Disk {
    let file = File::from_storage(Arc::new(Shared(zeroes.clone())), "zeroes", &OpenFlags::default()).unwrap();
    Disk::open_files(vec![OpenedFile::new(file, Format::Raw)], &OpenOptions::default()).unwrap()
}

#[test]
fn small_requests_are_done_by_the_thread_that_calls_and_large_ones_by_the_disks() {
    let zeroes = Arc::new(Zeroes::default());
    let disk = of_zeroes(&zeroes);
    let asked_here = |len: usize| {
        zeroes.asked_by.lock().unwrap().clear();
        disk.read(512, &mut vec![1; len]).unwrap();
        let asked = zeroes.asked_by.lock().unwrap();
        asked.iter().all(|thread| *thread == std::thread::current().id())
    };
    assert_eq!([512, 65536, 65537, 1 << 20].map(asked_here), [true, true, false, false]);
}

#[test]
fn a_storage_that_panics_ends_the_request_and_neither_the_thread_nor_the_disk() {
    let zeroes = Arc::new(Zeroes::default());
    let disk = of_zeroes(&zeroes);
    for len in [512, 1 << 20] {
        zeroes.panics.store(true, SeqCst);
        assert_eq!(disk.read(0, &mut vec![1; len]).unwrap_err().kind(), ErrorKind::Panicked);
        zeroes.panics.store(false, SeqCst);
        let mut buf = vec![1; len];
        disk.read(0, &mut buf).unwrap();
        assert!(buf.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn threads_that_call_have_no_descriptors_and_leave_none() {
    const THREADS: usize = 300;
    let dir = tempfile::tempdir().unwrap();
    let disk = open(Engine::Auto, &create(dir.path()));
    disk.write(0, &[1; 512]).unwrap();
    let before = descriptors();
    let (begun, counted) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    std::thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let (disk, begun, counted) = (&disk, &begun, &counted);
            scope.spawn(move || {
                disk.write(thread * 512, &[7; 512]).unwrap();
                disk.read(thread * 512, &mut [0; 512]).unwrap();
                begun.wait();
                counted.wait();
            });
        }
        begun.wait();
        // Other tests open and close files meanwhile, but not one for each thread.
        assert!(descriptors() < before + THREADS / 2);
        counted.wait();
    });
}

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// Threads whose sectors lie in the same clusters, beside snapshots, bitmaps, growth and flushes. Each knows what its own
/// sectors hold; all of it is there when the image is opened again.
#[test]
fn threads_find_what_they_wrote_whatever_else_goes_on() {
    const THREADS: u64 = 4;
    const SECTORS: u64 = 512;
    let rounds = std::env::var("ZEBU_EMBEDDING_ROUNDS").map_or(400, |rounds| rounds.parse().unwrap());
    for (engine, cache) in ENGINES.into_iter().flat_map(|e| [(e, CacheMode::Writeback), (e, CacheMode::None)])
    {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = create(dir.path());
        let disk = Disk::builder().engine(engine).open(&path, &for_writing().cache(cache)).unwrap();
        let is_over = AtomicBool::new(false);
        let done = AtomicU64::new(0);
        let models = std::thread::scope(|scope| {
            let (disk, is_over, done) = (&disk, &is_over, &done);
            let writers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    scope.spawn(move || {
                        let model = writer(disk, thread, THREADS, SECTORS, rounds);
                        if done.fetch_add(1, SeqCst) == THREADS - 1 {
                            is_over.store(true, SeqCst);
                        }
                        model
                    })
                })
                .collect();
            scope.spawn(move || disturb(disk, is_over));
            writers.into_iter().map(|writer| writer.join().unwrap()).collect::<Vec<_>>()
        });
        drop(disk);
        must_be_clean(&path);
        let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
        for (thread, model) in models.iter().enumerate() {
            for (sector, byte) in model.iter().enumerate() {
                let mut found = [0; 512];
                disk.read(place(thread as u64, sector as u64, THREADS), &mut found).unwrap();
                assert_eq!(found, [*byte; 512], "{engine:?} {cache:?} thread {thread} sector {sector}");
            }
        }
    }
}

/// The sectors of all threads alternate; 16 of each lie in a cluster, and then comes a gap.
fn place(thread: u64, sector: u64, threads: u64) -> u64 {
    (sector / 16) * 98_304 + (sector % 16 * threads + thread) * 512
}

fn writer(disk: &Disk, thread: u64, threads: u64, sectors: u64, rounds: u64) -> Vec<u8> {
    let mut numbers = Numbers(thread + 1);
    let mut model = vec![0; sectors as usize];
    for round in 0..rounds {
        let sector = numbers.below(sectors);
        let at = place(thread, sector, threads);
        let held = &mut model[sector as usize];
        match numbers.below(8) {
            0 => {
                disk.write_zeroes(at, 512, ZeroMode::Unmap).unwrap();
                *held = 0;
            }
            1 if round % 4 == 0 => disk.flush().unwrap(),
            2..=4 => {
                *held = numbers.below(255) as u8 + 1;
                disk.write(at, &[*held; 512]).unwrap();
            }
            _ => {
                let mut found = [0xee; 512];
                disk.read(at, &mut found).unwrap();
                assert_eq!(found, [*held; 512], "thread {thread} sector {sector}");
            }
        }
    }
    model
}

/// Keeps all others out for a moment, over and over.
fn disturb(disk: &Disk, is_over: &AtomicBool) {
    let mut times = 0;
    while !is_over.load(SeqCst) {
        let name = format!("s{times}");
        disk.create_snapshot(NewSnapshot::named(name.as_str())).unwrap();
        if times >= 2 {
            disk.delete_snapshot(&SnapshotRef::Name(format!("s{}", times - 2))).unwrap();
        }
        disk.resize(disk.virtual_size() + 65536, Shrink::Refuse).unwrap();
        disk.flush().unwrap();
        times += 1;
    }
}
