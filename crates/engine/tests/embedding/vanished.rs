//! A storage that panics: a request or an operation vanishes with it. What is flushed afterwards is there, or the flush fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use zebu_engine::check::{CheckOptions, check_file};
use zebu_engine::storage::{
    Access, Completer, File, IoBuf, OpenFlags, Storage, StorageAbilities, StorageOp, Worker, WorkerConfig,
};
use zebu_engine::{
    CreateOptions, Durability, Format, Image, NewBitmap, NewSnapshot, OpenedFile, Preallocation, Result,
    Shrink, SnapshotRef, ZeroMode,
};
use zebu_storage::sabotage::{Fault, under};

use crate::for_writing;
use crate::in_memory::perform;

/// Fate of an operation of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Do,
    Panic,
    DoAndPanic,
    Hold,
    HoldAndPanic,
}

/// A disk in memory. Some operations end otherwise than they should.
struct Memory {
    abilities: StorageAbilities,
    bytes: Mutex<Vec<u8>>,
    held: Mutex<Vec<Completer>>,
    act: Box<dyn Fn(&Completer) -> Act + Send + Sync>,
}

struct Shared(Arc<Memory>);

impl Memory {
    fn of(bytes: Vec<u8>, act: impl Fn(&Completer) -> Act + Send + Sync + 'static) -> Arc<Self> {
        let abilities = StorageAbilities::WRITE | StorageAbilities::PUNCH | StorageAbilities::SET_LEN;
        Self::with_abilities(abilities, bytes, act)
    }

    fn with_abilities(
        abilities: StorageAbilities,
        bytes: Vec<u8>,
        act: impl Fn(&Completer) -> Act + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { abilities, bytes: Mutex::new(bytes), held: Mutex::default(), act: Box::new(act) })
    }

    fn file(self: &Arc<Self>) -> File {
        let flags = OpenFlags::default().access(Access::ReadWrite);
        File::from_storage(Arc::new(Shared(self.clone())), "memory", &flags).unwrap()
    }

    async fn open(self: &Arc<Self>, worker: &Worker) -> Result<Image> {
        Image::open_files(worker, vec![OpenedFile::new(self.file(), Format::Qcow2)], &for_writing()).await
    }

    fn copy(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    fn finish(&self, mut done: Completer) {
        let result = perform(&mut self.bytes.lock().unwrap(), &mut done);
        done.finish(result);
    }
}

impl Storage for Shared {
    fn len(&self) -> u64 {
        self.0.bytes.lock().unwrap().len() as u64
    }
    fn identity(&self) -> u64 {
        Arc::as_ptr(&self.0) as u64
    }
    fn abilities(&self) -> StorageAbilities {
        self.0.abilities
    }
    fn submit(&self, _: StorageOp, mut done: Completer) {
        let act = (self.0.act)(&done);
        match act {
            Act::Do => return self.0.finish(done),
            Act::DoAndPanic => drop(perform(&mut self.0.bytes.lock().unwrap(), &mut done)),
            Act::Hold | Act::HoldAndPanic => self.0.held.lock().unwrap().push(done),
            Act::Panic => {}
        }
        assert_eq!(act, Act::Hold, "as intended");
    }
}

fn worker() -> Worker {
    Worker::new(&WorkerConfig::default()).unwrap()
}

async fn put(worker: &Worker, image: &Image, at: u64, bytes: &[u8]) -> Result<()> {
    image.write(worker, at, IoBuf::copy_of(bytes).into(), Durability::Volatile).await.0
}

#[derive(Debug, Clone, Copy)]
enum Operation {
    Apply,
    Take,
    Delete,
    Grow,
    Shrink,
    AddBitmap,
    WriteState,
    Write,
    FillNewTables,
    ZeroAndWriteAgain,
}

const SMALL: u64 = 512;
const SIZE: u64 = 256 << 10;
/// Bytes that are written after the panic.
const AFTERWARDS: u64 = 90 << 10;

async fn operate(worker: &Worker, image: &Image, operation: Operation) -> Result<()> {
    let one = SnapshotRef::Name("one".to_owned());
    match operation {
        Operation::Apply => image.apply_snapshot(worker, &one).await,
        Operation::Take => image.create_snapshot(worker, NewSnapshot::named("two")).await.map(drop),
        Operation::Delete => image.delete_snapshot(worker, &one).await,
        Operation::Grow => image.resize(worker, 64 << 20, Shrink::Refuse, Preallocation::Off).await,
        Operation::Shrink => image.resize(worker, 100 << 10, Shrink::Allow, Preallocation::Off).await,
        Operation::AddBitmap => image.add_bitmap(worker, &NewBitmap::named("one")).await,
        Operation::WriteState => {
            image.write_vm_state(worker, 20 << 20, IoBuf::copy_of(&vec![5; 70_000]).into()).await
        }
        Operation::Write => {
            put(worker, image, 150 << 10, &vec![3; 20 << 10]).await?;
            image.flush(worker).await
        }
        Operation::FillNewTables => {
            image.resize(worker, 16 << 20, Shrink::Refuse, Preallocation::Off).await?;
            for at in 0..24 {
                put(worker, image, (512 << 10) + at * (256 << 10), &vec![4; 256 << 10]).await?;
            }
            Ok(())
        }
        Operation::ZeroAndWriteAgain => {
            image.write_zeroes(worker, 0, 60 << 10, ZeroMode::Unmap).await?;
            image.discard(worker, 60 << 10, 30 << 10).await?;
            image.flush(worker).await?;
            put(worker, image, 0, &vec![7; 100 << 10]).await?;
            image.flush(worker).await
        }
    }
}

/// An image with a snapshot, and clusters of its own.
fn template(worker: &Worker) -> Vec<u8> {
    let memory = Memory::of(Vec::new(), |_| Act::Do);
    let made = async {
        let create = CreateOptions::default().size(SIZE).cluster_size(SMALL).refcount_bits(64);
        Image::create_in(worker, &memory.file(), &create).await?;
        let image = memory.open(worker).await?;
        put(worker, &image, 0, &vec![1; 128 << 10]).await?;
        image.create_snapshot(worker, NewSnapshot::named("one")).await?;
        put(worker, &image, 0, &vec![2; 64 << 10]).await?;
        image.close(worker).await
    };
    worker.block_on(made).unwrap();
    memory.copy()
}

/// Judges `bytes`, as a kill left them after a flush of what was written after the panic.
async fn judged(worker: &Worker, bytes: Vec<u8>) -> std::result::Result<(), String> {
    let memory = Memory::of(bytes, |_| Act::Do);
    let image = memory.open(worker).await.map_err(|e| format!("open: {e}"))?;
    let (result, bufs) = image.read(worker, 0, IoBuf::zeroed(AFTERWARDS as usize).into()).await;
    result.map_err(|e| format!("read: {e}"))?;
    let mut found = vec![0; AFTERWARDS as usize];
    bufs.copy_to(0, &mut found);
    let lost = found.iter().filter(|byte| **byte != 9).count();
    if lost > 0 {
        return Err(format!("{lost} flushed bytes are lost"));
    }
    image.close(worker).await.map_err(|e| format!("close: {e}"))?;
    let report = check_file(worker, &memory.file(), &CheckOptions::default()).await;
    match report.map_err(|e| format!("check: {e}"))?.counts.corruptions {
        0 => Ok(()),
        corruptions => Err(format!("{corruptions} corruptions")),
    }
}

/// The image's own worker meets the panic, at each operation of the disk in turn.
fn what_is_flushed_stays(operation: Operation) {
    let worker = worker();
    let template = template(&worker);
    for act in [Act::Panic, Act::DoAndPanic] {
        for nth in 0.. {
            let left = Arc::new(AtomicI64::new(-1));
            let theirs = left.clone();
            let memory = Memory::of(template.clone(), move |_| {
                let is_own = std::thread::current().name() == Some("zebu-image");
                if is_own && theirs.fetch_sub(1, SeqCst) == 0 { act } else { Act::Do }
            });
            let image = worker.block_on(memory.open(&worker)).unwrap();
            worker.block_on(put(&worker, &image, 200 << 10, &[3; SMALL as usize])).unwrap();
            worker.block_on(image.flush(&worker)).unwrap();
            left.store(nth, SeqCst);
            let done = catch_unwind(AssertUnwindSafe(|| {
                worker.block_on(Box::pin(operate(&worker, &image, operation)))
            }));
            if left.swap(-1, SeqCst) >= 0 {
                assert!(matches!(done, Ok(Ok(()))), "{done:?}");
                assert!(nth > 0, "{operation:?} does nothing on the image's own worker");
                worker.block_on(image.close(&worker)).unwrap();
                break;
            }
            let goes_on = worker.block_on(async {
                put(&worker, &image, 0, &vec![9; AFTERWARDS as usize]).await?;
                image.flush(&worker).await
            });
            if goes_on.is_ok() {
                let judged = worker.block_on(judged(&worker, memory.copy()));
                assert!(judged.is_ok(), "{operation:?}, {act:?} at {nth}: {}", judged.unwrap_err());
            }
        }
    }
}

macro_rules! vanish {
    ($($name:ident: $operation:ident;)+) => {
        $(
            #[test]
            fn $name() {
                what_is_flushed_stays(Operation::$operation);
            }
        )+
    };
}

vanish! {
    an_applied_snapshot_vanishes: Apply;
    a_new_snapshot_vanishes: Take;
    a_deletion_vanishes: Delete;
    a_growth_vanishes: Grow;
    a_shrink_vanishes: Shrink;
    a_new_bitmap_vanishes: AddBitmap;
    a_write_of_vm_state_vanishes: WriteState;
    a_commit_vanishes: Write;
    a_growth_of_the_refcount_table_vanishes: FillNewTables;
    a_release_vanishes: ZeroAndWriteAgain;
}

const CLUSTER: usize = 4096;

#[derive(Debug, Clone, Copy)]
enum Clusters {
    Plain,
    Compressed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flushes {
    Sync,
    /// As with `cache=unsafe`.
    DoNothing,
}

/// A cluster that does not become shorter by compression.
fn noise(head: [u8; 8], seed: u64) -> Vec<u8> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    })
    .take(CLUSTER)
    .collect();
    bytes[..8].copy_from_slice(&head);
    bytes
}

/// No cluster.
const NOTHING: [u64; 0] = [];

/// The clusters that were flushed and then overwritten by a late write. The first writes of the doomed request meet `acts`; they
/// are under way when the request vanishes.
fn overwritten_late(acts: &'static [Act], clusters: Clusters, flushes: Flushes) -> Vec<u64> {
    let worker = worker();
    // Commits then run on this thread, which feels a fault.
    worker.promise_to_drive();
    let turn = AtomicI64::new(i64::MAX);
    // It can't grow, so that space is used again.
    let memory = Memory::with_abilities(StorageAbilities::WRITE, vec![0; 300 * CLUSTER], move |done| {
        let StorageOp::Write { len, .. } = done.op() else { return Act::Do };
        let mut head = [0; 8];
        done.bufs().copy_to(0, &mut head[..len.min(8) as usize]);
        if &head != b"DOOMED!!" {
            return Act::Do;
        }
        turn.compare_exchange(i64::MAX, 0, SeqCst, SeqCst).ok();
        let turn = turn.fetch_add(1, SeqCst);
        acts.get(turn as usize).copied().unwrap_or(Act::Do)
    });
    let image = worker.block_on(async {
        let create = CreateOptions::default().size(4 << 20).cluster_size(CLUSTER as u64);
        Image::create_in(&worker, &memory.file(), &create).await.unwrap();
        let flags = OpenFlags::default().access(Access::ReadWrite).no_flush(flushes == Flushes::DoNothing);
        let file = File::from_storage(Arc::new(Shared(memory.clone())), "memory", &flags).unwrap();
        let files = vec![OpenedFile::new(file, Format::Qcow2)];
        Image::open_files(&worker, files, &for_writing()).await.unwrap()
    });
    let at = |cluster: u64| cluster * CLUSTER as u64;
    // Tables and windows are there afterwards.
    worker.block_on(put(&worker, &image, at(900), &noise(*b"GUEST!!!", 900))).unwrap();
    let doomed = IoBuf::copy_of(&[noise(*b"DOOMED!!", 1), noise(*b"DOOMED!!", 2)].concat()).into();
    let vanished = catch_unwind(AssertUnwindSafe(|| {
        worker.block_on(async {
            match clusters {
                Clusters::Plain => image.write(&worker, 0, doomed, Durability::Volatile).await.0,
                Clusters::Compressed => {
                    image.write_compressed(&worker, 0, doomed, Durability::Volatile).await.0
                }
            }
        })
    }));
    assert!(vanished.is_err());
    let held = std::mem::take(&mut *memory.held.lock().unwrap());
    assert_eq!(held.len(), 1, "a write is under way");
    // What the request was given is free again afterwards, unless writing has stopped.
    let _ = worker.block_on(image.flush(&worker));
    let mut written = Vec::new();
    for cluster in 10..400 {
        match worker.block_on(put(&worker, &image, at(cluster), &noise(*b"GUEST!!!", cluster))) {
            Ok(()) => written.push(cluster),
            Err(_) => break,
        }
    }
    let is_flushed = worker.block_on(image.flush(&worker)).is_ok();
    for done in held {
        memory.finish(done);
    }
    let mut overwritten = Vec::new();
    for cluster in written {
        let (result, bufs) = worker.block_on(image.read(&worker, at(cluster), IoBuf::zeroed(CLUSTER).into()));
        result.unwrap();
        let mut bytes = vec![0; CLUSTER];
        bufs.copy_to(0, &mut bytes);
        if is_flushed && bytes != noise(*b"GUEST!!!", cluster) {
            overwritten.push(cluster);
        }
    }
    let _ = worker.block_on(image.close(&worker));
    overwritten
}

#[test]
fn a_write_that_vanishes_lands_on_nothing_that_was_flushed() {
    assert_eq!(overwritten_late(&[Act::HoldAndPanic], Clusters::Plain, Flushes::Sync), NOTHING);
}

#[test]
fn a_lane_of_a_write_that_vanishes_lands_on_nothing_that_was_flushed() {
    assert_eq!(overwritten_late(&[Act::Hold, Act::Panic], Clusters::Compressed, Flushes::Sync), NOTHING);
}

/// Without syncs the promise is off for power failures, and not for this.
#[test]
fn a_write_that_vanishes_lands_on_nothing_where_flushes_do_nothing() {
    let overwritten = || overwritten_late(&[Act::HoldAndPanic], Clusters::Plain, Flushes::DoNothing);
    assert_eq!(overwritten(), NOTHING);
    assert_ne!(under(Some(Fault::BelieveUnsafeFlush), overwritten).0, NOTHING, "it lands on nothing anyway");
}
