//! A host cluster of streams that is written in parts: what the first of them is on its way to is given to nobody else.

use crate::judge::read_all;
use crate::setup::{Files, Origin, Setup, TOP};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use zebu::check::{CheckOptions, check_file};
use zebu::storage::sabotage;
use zebu::storage::sim::{OpClass, OpFilter, SimFileConfig, SimRng, SimWorld};
use zebu::storage::{IoBuf, Worker};
use zebu::{Durability, Image, ZeroMode};

const CLUSTER: u64 = 16 << 10;
/// Guest clusters before this one hold a pattern.
const FREE: u64 = 384;
/// Guest clusters that one slice maps.
const SLICE: u64 = 64;

struct Bench {
    world: SimWorld,
    workers: [Worker; 2],
    image: Image,
    /// What the disk has to hold.
    disk: Rc<RefCell<Vec<u8>>>,
    rng: RefCell<SimRng>,
}

#[derive(Clone, Copy)]
enum Change {
    Plain,
    /// Random bytes that the stream of the cluster has about; the rest of the cluster is zero.
    Compressed(usize),
    Zero,
}

impl Bench {
    /// Starts a change of a guest cluster; the flag says when it is over.
    fn start(&self, worker: usize, cluster: u64, change: Change) -> Rc<Cell<bool>> {
        let mut bytes = vec![0; CLUSTER as usize];
        let random = match change {
            Change::Plain => CLUSTER as usize,
            Change::Compressed(len) => len,
            Change::Zero => 0,
        };
        bytes[..random].fill_with(|| self.rng.borrow_mut().next_u64() as u8);
        let at = cluster * CLUSTER;
        self.disk.borrow_mut()[at as usize..(at + CLUSTER) as usize].copy_from_slice(&bytes);
        let (worker, image) = (self.workers[worker].clone(), self.image.clone());
        let over = Rc::new(Cell::new(false));
        let flag = over.clone();
        let on = worker.clone();
        drop(worker.spawn(async move {
            let bufs = IoBuf::copy_of(&bytes).into();
            let result = match change {
                Change::Plain => image.write(&on, at, bufs, Durability::Volatile).await.0,
                Change::Compressed(_) => image.write_compressed(&on, at, bufs, Durability::Volatile).await.0,
                Change::Zero => image.write_zeroes(&on, at, CLUSTER, ZeroMode::Unmap).await,
            };
            result.unwrap();
            flag.set(true);
        }));
        self.world.run_until_idle().unwrap();
        over
    }

    #[track_caller]
    fn change(&self, worker: usize, cluster: u64, change: Change) {
        assert!(self.start(worker, cluster, change).get(), "nothing holds it up");
    }

    /// Starts a flush; the flag says when it is over.
    fn flush(&self, worker: usize) -> Rc<Cell<bool>> {
        let (worker, image) = (self.workers[worker].clone(), self.image.clone());
        let over = Rc::new(Cell::new(false));
        let flag = over.clone();
        let on = worker.clone();
        drop(worker.spawn(async move {
            image.flush(&on).await.unwrap();
            flag.set(true);
        }));
        self.world.run_until_idle().unwrap();
        over
    }

    fn reads_as_it_should(&self) {
        let read = read_all(&self.workers[1], &self.image, self.image.virtual_size());
        let found = self.world.block_on(read).unwrap().unwrap();
        let differs = found.iter().zip(&*self.disk.borrow()).position(|(found, wanted)| found != wanted);
        assert_eq!(differs, None, "the disk holds what was not written there");
    }
}

/// The references of a part are late, since the slice of refcounts that they belong to is being loaded. Meanwhile the
/// part that comes after it in the same host cluster is written, and all other streams in the cluster are zeroed.
#[test]
pub(crate) fn a_cluster_is_not_free_before_an_earlier_part_has_its_references() {
    sabotage::limit_windows(u64::MAX);
    let setup = Setup {
        cluster_size: CLUSTER,
        refcount_bits: 64,
        origin: Origin::Own,
        size: 8 << 20,
        pattern: FREE * CLUSTER,
        cache_size: Some(0),
        slice_size: Some(512),
        // Segments of one cluster.
        gather_memory: Some(2 * CLUSTER as usize),
        ..Setup::plain()
    };
    let world = setup.world(&setup.make(1), 1);
    let workers = [world.worker(), world.worker()];
    let image = setup.open(&world, &workers[0]).unwrap();
    let disk = world.block_on(read_all(&workers[0], &image, setup.size)).unwrap().unwrap();
    let disk = Rc::new(RefCell::new(disk));
    let bench = Bench { world, workers, image, disk, rng: RefCell::new(SimRng::new(1)) };
    let [first, plain, early, late, next] = [FREE, FREE + 1, FREE + 2, FREE + 3, FREE + 4];

    // A host cluster with one stream in it, and the one behind it, so that no stream reaches from it into another.
    bench.change(1, first, Change::Compressed(100));
    bench.change(1, plain, Change::Plain);
    assert!(bench.flush(1).get());
    // The refcounts of both make room for other slices, and are loaded again by the second worker.
    bench.reads_as_it_should();
    let top = bench.world.content(TOP).unwrap();
    let word = |at: u64| u64::from_be_bytes(top.bytes(at..at + 8).try_into().unwrap());
    let refcounts = word(word(48));
    let hold = bench
        .world
        .hold(OpFilter::of(OpClass::Read).on_file(TOP).touching(refcounts..refcounts + CLUSTER).by_worker(1));
    bench.change(1, plain, Change::Zero);
    assert!(bench.flush(1).get());
    assert_eq!(bench.world.held(hold).len(), 1, "a slice of refcounts is loaded");
    // Room for others beside it, though not for all.
    bench.image.set_cache_size(8 * 700).unwrap();

    // The first worker waits for them, and then stands still.
    bench.change(0, early, Change::Compressed(100));
    let flushed = bench.flush(0);
    assert!(!flushed.get(), "the early part has no references yet");
    bench.world.pause(0);
    bench.change(1, late, Change::Compressed(6000));
    bench.change(1, next, Change::Compressed(6000));
    let mut under_way = vec![flushed];
    under_way.push(bench.start(1, first, Change::Zero));
    under_way.push(bench.start(1, late, Change::Zero));
    // More slices are dirty than fit: they are committed, though nobody flushes.
    under_way.extend((0..FREE / SLICE).map(|slice| bench.start(1, slice * SLICE, Change::Zero)));
    bench.world.release(hold);
    bench.world.run_until_idle().unwrap();
    // Whatever is free now is used.
    under_way.extend((FREE + 8..FREE + 100).map(|cluster| bench.start(1, cluster, Change::Plain)));
    bench.world.resume(0);
    bench.world.run_until_idle().unwrap();
    assert!(under_way.iter().all(|over| over.get()));
    bench.reads_as_it_should();
    bench.world.block_on(bench.image.close(&bench.workers[1])).unwrap().unwrap();

    let files: Files = vec![(TOP.to_owned(), bench.world.content(TOP).unwrap())];
    let left = setup.world(&files, 0);
    let worker = left.worker();
    left.block_on(async {
        let file = left.open(TOP, SimFileConfig::default()).unwrap();
        let report = check_file(&worker, &file, &CheckOptions::default()).await.unwrap();
        assert_eq!(report.counts.corruptions + report.counts.check_errors, 0, "{:?}", report.counts);
        let image = Image::open_files(&worker, setup.chain(&left), &setup.options()).await.unwrap();
        assert!(read_all(&worker, &image, setup.size).await.unwrap() == *bench.disk.borrow());
    })
    .unwrap();
}
