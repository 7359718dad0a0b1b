//! Whether the simulator finds what it is for: a toy engine that redirects every write, right and with known faults.
//!
//! It is also the pattern for crash tests of a real engine: tasks on several workers tell a [`GuestModel`] when each
//! request begins and ends; at random steps the power fails in every way that the disk allows, and what a fresh
//! engine then reads is compared with the model.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use zebu_sim::{
    Content, CrashOptions, DiscardLeaves, FaultPlan, FaultRates, GuestConfig, GuestModel, GuestRequest,
    GuestResult, LogKeep, Seeds, SimConfig, SimDisk, SimFileConfig, SimRng, SimWorld,
};
use zebu_storage::{File, IoBuf, IoError, Worker};

const CLUSTER: u64 = 4096;
/// Clusters of the virtual disk.
const GUEST: usize = 24;
/// Clusters of the file: the map (two blocks, so that it can be torn), and data.
const MAP_BLOCKS: u64 = 2;
const HOST: u32 = 48;
const FILE: &str = "toy";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    SkipFirstBarrier,
    SkipSecondBarrier,
    /// A freed cluster may be used again at once.
    ReuseEarly,
    /// The map points to a cluster before its data is written.
    LinkBeforeWrite,
    /// A failed write of data is linked.
    IgnoreFailedWrite,
    /// A flush that finds another one under way returns at once.
    JoinFrozenCommit,
    /// A read does not keep its cluster from being reused.
    ForgetReaders,
    /// Every 16th write goes one sector too far to the left.
    Misplace,
}

/// The map lies in the first blocks of the file, 4 bytes per guest cluster, spread over both; 0 is unallocated.
struct Toy {
    file: File,
    fault: Fault,
    map: RefCell<Vec<u32>>,
    free: RefCell<Vec<u32>>,
    quarantine: RefCell<Vec<u32>>,
    committing: Cell<bool>,
    readers: Cell<usize>,
    writes: Cell<u64>,
}

fn map_offset(cluster: usize) -> usize {
    (cluster % MAP_BLOCKS as usize) * CLUSTER as usize + cluster / MAP_BLOCKS as usize * 4
}

impl Toy {
    async fn open(worker: &Worker, file: File, fault: Fault) -> Result<Self, String> {
        let bytes = read(worker, &file, 0, MAP_BLOCKS * CLUSTER).await.map_err(|e| e.to_string())?;
        let mut map = Vec::new();
        let mut free: Vec<u32> = (MAP_BLOCKS as u32..HOST).collect();
        for cluster in 0..GUEST {
            let entry = &bytes[map_offset(cluster)..][..4];
            let host = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            if host != 0 && (host >= HOST || map.contains(&host)) {
                return Err(format!(
                    "guest cluster {cluster} points to {host}, which is used twice or nonsense"
                ));
            }
            free.retain(|f| *f != host);
            map.push(host);
        }
        let (map, free) = (RefCell::new(map), RefCell::new(free));
        let (committing, readers, writes) = (Cell::new(false), Cell::new(0), Cell::new(0));
        Ok(Self { file, fault, map, free, quarantine: RefCell::default(), committing, readers, writes })
    }

    fn let_go(&self, host: u32) {
        if host != 0 {
            let list = if self.fault == Fault::ReuseEarly { &self.free } else { &self.quarantine };
            list.borrow_mut().push(host);
        }
    }

    async fn write(&self, worker: &Worker, cluster: usize, bytes: &[u8]) -> Result<(), IoError> {
        let host = loop {
            // The latest one that was freed, so that a cluster that is free too early does harm soon.
            let latest = self.free.borrow_mut().pop();
            if let Some(host) = latest {
                break host;
            }
            self.flush(worker).await?;
            worker.sleep(Duration::from_micros(5)).await;
        };
        if self.fault == Fault::LinkBeforeWrite {
            let old = std::mem::replace(&mut self.map.borrow_mut()[cluster], host);
            self.let_go(old);
        }
        self.writes.set(self.writes.get() + 1);
        let off = if self.fault == Fault::Misplace && self.writes.get().is_multiple_of(16) { 512 } else { 0 };
        let data = IoBuf::copy_of(bytes);
        let (result, _) = worker.write(&self.file, u64::from(host) * CLUSTER - off, data.into()).await;
        if let (Err(error), true) = (result, self.fault != Fault::IgnoreFailedWrite) {
            self.free.borrow_mut().push(host);
            return Err(error);
        }
        if self.fault != Fault::LinkBeforeWrite {
            let old = std::mem::replace(&mut self.map.borrow_mut()[cluster], host);
            self.let_go(old);
        }
        Ok(())
    }

    fn zero(&self, cluster: usize) {
        let old = std::mem::take(&mut self.map.borrow_mut()[cluster]);
        self.let_go(old);
    }

    async fn read(&self, worker: &Worker, cluster: usize) -> Result<Vec<u8>, IoError> {
        let host = self.map.borrow()[cluster];
        if host == 0 {
            return Ok(vec![0; CLUSTER as usize]);
        }
        self.readers.set(self.readers.get() + 1);
        let bytes = read(worker, &self.file, u64::from(host) * CLUSTER, CLUSTER).await;
        self.readers.set(self.readers.get() - 1);
        bytes
    }

    async fn flush(&self, worker: &Worker) -> Result<(), IoError> {
        while self.committing.replace(true) {
            if self.fault == Fault::JoinFrozenCommit {
                return Ok(());
            }
            worker.sleep(Duration::from_micros(20)).await;
        }
        let result = self.commit(worker).await;
        self.committing.set(false);
        result
    }

    async fn commit(&self, worker: &Worker) -> Result<(), IoError> {
        let mut bytes = vec![0; (MAP_BLOCKS * CLUSTER) as usize];
        for (cluster, host) in self.map.borrow().iter().enumerate() {
            bytes[map_offset(cluster)..][..4].copy_from_slice(&host.to_le_bytes());
        }
        let freed = std::mem::take(&mut *self.quarantine.borrow_mut());
        let result = self.commit_map(worker, &bytes).await;
        // A reader may still be at it; and what a failed commit freed may be pointed to by the old map.
        let quiet = self.readers.get() == 0 || self.fault == Fault::ForgetReaders;
        let list = if result.is_ok() && quiet { &self.free } else { &self.quarantine };
        list.borrow_mut().extend(freed);
        result
    }

    async fn commit_map(&self, worker: &Worker, bytes: &[u8]) -> Result<(), IoError> {
        if self.fault != Fault::SkipFirstBarrier {
            worker.flush(&self.file).await?;
        }
        worker.write(&self.file, 0, IoBuf::copy_of(bytes).into()).await.0?;
        if self.fault != Fault::SkipSecondBarrier {
            worker.flush(&self.file).await?;
        }
        Ok(())
    }
}

async fn read(worker: &Worker, file: &File, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
    let (result, bufs) = worker.read(file, offset, IoBuf::zeroed(len as usize).into()).await;
    result?;
    let mut bytes = vec![0; len as usize];
    bufs.copy_to(0, &mut bytes);
    Ok(bytes)
}

/// One guest: random requests, each told to the model.
async fn guest(
    worker: Worker,
    toy: Rc<Toy>,
    model: Rc<RefCell<GuestModel>>,
    mut rng: SimRng,
) -> Result<(), String> {
    for _ in 0..40 {
        let cluster = rng.index(GUEST);
        let (offset, len) = (cluster as u64 * CLUSTER, CLUSTER);
        let request = match rng.below(10) {
            0..4 => GuestRequest::Write { offset, len },
            4 => GuestRequest::Zero { offset, len },
            5 | 6 => GuestRequest::Flush,
            _ => GuestRequest::Read,
        };
        let op = model.borrow_mut().begin(request.clone());
        let result = match request {
            GuestRequest::Write { .. } => {
                let mut bytes = vec![0; CLUSTER as usize];
                op.value().fill(offset, &mut bytes);
                toy.write(&worker, cluster, &bytes).await
            }
            GuestRequest::Zero { .. } => {
                toy.zero(cluster);
                Ok(())
            }
            GuestRequest::Flush => toy.flush(&worker).await,
            _ => match toy.read(&worker, cluster).await {
                Ok(bytes) => {
                    let checked = model.borrow().check_read(op, offset, &bytes);
                    checked.map_err(|violation| format!("a read: {violation}"))?;
                    Ok(())
                }
                Err(error) => Err(error),
            },
        };
        let result = if result.is_ok() { GuestResult::Done } else { GuestResult::FailedUnchanged };
        model.borrow_mut().end(op, result);
    }
    Ok(())
}

/// The power failed: whether a fresh engine finds what the guest may expect.
fn check_crashes(disk: &SimDisk, model: &GuestModel, seed: u64, checked: &Cell<u64>) -> Result<(), String> {
    for state in disk.crash_states(&CrashOptions { max_states: 24, seed, ..CrashOptions::default() }) {
        let fresh =
            SimWorld::with_config(&SimConfig { keep_log: LogKeep::Digest, ..SimConfig::seeded(seed) });
        let content = state.file(FILE).unwrap().clone();
        let file = fresh.file(FILE, content, SimFileConfig::default());
        let worker = fresh.worker();
        let found = fresh.block_on(async {
            let toy = Toy::open(&worker, file, Fault::None).await?;
            for cluster in 0..GUEST {
                let bytes = toy.read(&worker, cluster).await.map_err(|e| e.to_string())?;
                model.check(cluster as u64 * CLUSTER, &bytes).map_err(|v| v.to_string())?;
            }
            Ok::<_, String>(())
        });
        checked.set(checked.get() + 1);
        found
            .map_err(|stuck| stuck.to_string())?
            .map_err(|error| format!("after a crash, {state}: {error}"))?;
    }
    Ok(())
}

fn run(seed: u64, fault: Fault, rates: FaultRates, checked: &Cell<u64>) -> Result<(), String> {
    let world = SimWorld::with_config(&SimConfig { max_steps: 200_000, ..SimConfig::seeded(seed) });
    let empty = Content::hole(u64::from(HOST) * CLUSTER);
    let file = world.file(FILE, empty, SimFileConfig::default());
    let config = GuestConfig { len: GUEST as u64 * CLUSTER, backing_len: 0, discard: DiscardLeaves::Zero };
    let model = Rc::new(RefCell::new(GuestModel::new(config)));
    let mut rng = SimRng::new(seed);
    let workers = [world.worker(), world.worker()];
    let toy = world.block_on(Toy::open(&workers[0], file, fault)).map_err(|s| s.to_string())??;
    world.set_faults(FaultPlan::random(rates));
    let toy = Rc::new(toy);
    let guests: Vec<_> = (0..4)
        .map(|number| {
            let worker = workers[number % 2].clone();
            worker.spawn(guest(worker.clone(), Rc::clone(&toy), Rc::clone(&model), rng.fork()))
        })
        .collect();
    let mut failure = None;
    let outcome = world.block_on_watched(
        async {
            for guest in guests {
                guest.await?;
            }
            Ok(())
        },
        |_| {
            if failure.is_none() && rng.chance(1, 40) {
                let crash_seed = rng.next_u64();
                failure = check_crashes(&world, &model.borrow(), crash_seed, checked).err();
            }
        },
    );
    let result = outcome.map_err(|stuck| stuck.to_string())?;
    failure.map_or(result, Err)
}

#[test]
fn a_sound_engine_survives() {
    let checked = Cell::new(0);
    Seeds::new(12).run(|seed| {
        let outcome = run(seed, Fault::None, FaultRates::default(), &checked);
        assert_eq!(outcome, Ok(()), "seed {seed}");
        let rates = FaultRates {
            read_errors: 20,
            write_errors: 30,
            no_space: 20,
            delays: 20,
            ..FaultRates::default()
        };
        assert_eq!(run(seed, Fault::None, rates, &checked), Ok(()), "seed {seed}, with faults");
    });
    eprintln!("{} crash states", checked.get());
}

/// The first seed that shows the fault.
fn found_at(fault: Fault, rates: FaultRates) -> Option<u64> {
    (0..60).find(|&seed| {
        let outcome = run(seed, fault, rates, &Cell::new(0));
        if let Err(error) = &outcome {
            eprintln!("{fault:?} found at seed {seed}: {error}");
        }
        outcome.is_err()
    })
}

#[test]
fn every_known_fault_is_found() {
    let errors = FaultRates { write_errors: 30, ..FaultRates::default() };
    let missed: Vec<Fault> = [
        (Fault::SkipFirstBarrier, FaultRates::default()),
        (Fault::SkipSecondBarrier, FaultRates::default()),
        (Fault::ReuseEarly, FaultRates::default()),
        (Fault::LinkBeforeWrite, FaultRates::default()),
        (Fault::IgnoreFailedWrite, errors),
        (Fault::JoinFrozenCommit, FaultRates::default()),
        (Fault::ForgetReaders, FaultRates::default()),
        (Fault::Misplace, FaultRates::default()),
    ]
    .into_iter()
    .filter(|(fault, rates)| found_at(*fault, *rates).is_none())
    .map(|(fault, _)| fault)
    .collect();
    assert_eq!(missed, [], "not found within 60 seeds");
}
