//! The state of a machine past the end of the disk, beside requests, snapshots, growth and crashes.
//!
//! It is judged like a disk of its own: what was flushed survives, what was read is one of the contents that it may have. A
//! snapshot keeps its own. A guest never sees it: the disk is judged as ever, also where it grew over it.

use crate::crash::guest::Guest;
use crate::crash::judge::{Leaks, judge, judge_by_qemu, read_all};
use crate::crash::setup::{BASE, Files, NAMES, Origin, Setup};
use futures_util::future::join_all;
use std::cell::RefCell;
use std::rc::Rc;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, CreateOptions, Durability, ErrorKind, Format, Image, NewSnapshot, OpenOptions, OpenedFile,
    Preallocation, Shrink, SnapshotRef,
};
use zebu_sim::{
    CrashOptions, DiscardLeaves, GuestConfig, GuestModel, GuestRequest, GuestResult, Seeds, SimFileConfig,
    SimRng, SimWorld, Tear,
};

/// Sectors of the state.
const SECTORS: u64 = 12;
const BYTES: usize = (SECTORS * 512) as usize;

/// A snapshot with the state that it has to have.
struct Taken {
    name: String,
    state: Vec<u8>,
    /// The disk and the state at that time.
    models: (GuestModel, GuestModel),
}

struct Life<'a> {
    setup: &'a Setup,
    world: &'a SimWorld,
    workers: Vec<Worker>,
    guest: Rc<Guest>,
    state: Rc<RefCell<GuestModel>>,
    taken: Option<Taken>,
    rng: SimRng,
    states: u64,
}

/// Bytes of the disk that an L2 table maps.
fn bytes_per_table(setup: &Setup) -> u64 {
    setup.cluster_size * (setup.cluster_size / if setup.extended_l2 { 16 } else { 8 })
}

/// A state that nobody wrote.
fn nothing_written() -> GuestModel {
    GuestModel::new(GuestConfig { len: SECTORS * 512, backing_len: 0, discard: DiscardLeaves::Zero })
}

async fn read_state(worker: &Worker, image: &Image) -> Result<Vec<u8>, String> {
    let bufs = IoBuf::zeroed(BYTES).into();
    let bufs = image.read_vm_state(worker, 0, bufs).await.map_err(|e| format!("read of the state: {e}"))?;
    let mut bytes = vec![0; BYTES];
    bufs.copy_to(0, &mut bytes);
    Ok(bytes)
}

/// Writes, flushes and reads of the state, one after the other.
async fn machine(guest: Rc<Guest>, state: Rc<RefCell<GuestModel>>, worker: Worker, mut rng: SimRng) {
    for _ in 0..8 {
        match rng.below(4) {
            0 => {
                let op = state.borrow_mut().begin(GuestRequest::Flush);
                let result = guest.image.flush(&worker).await;
                state.borrow_mut().end(op, GuestResult::Done);
                if let Err(e) = result {
                    guest.blame(format!("flush: {e}"));
                }
            }
            1 => {
                let op = state.borrow_mut().begin(GuestRequest::Read);
                match read_state(&worker, &guest.image).await {
                    Ok(bytes) => {
                        if let Err(violation) = state.borrow().check_read(op, 0, &bytes) {
                            guest.blame(format!("a read of the state got what it must not: {violation}"));
                        }
                    }
                    Err(e) => guest.blame(e),
                }
                state.borrow_mut().end(op, GuestResult::Done);
                if guest.image.virtual_size() != guest.model.borrow().len() {
                    guest.blame(format!("the disk has {} bytes", guest.image.virtual_size()));
                }
            }
            _ => {
                let first = rng.below(SECTORS);
                let (offset, len) = (first * 512, rng.between(1, SECTORS - first) * 512);
                let op = state.borrow_mut().begin(GuestRequest::Write { offset, len });
                let mut bytes = vec![0; len as usize];
                op.value().fill(offset, &mut bytes);
                let result = guest.image.write_vm_state(&worker, offset, IoBuf::copy_of(&bytes).into()).await;
                state.borrow_mut().end(op, GuestResult::Done);
                if let Err(e) = result {
                    guest.blame(format!("write of the state: {e}"));
                }
            }
        }
    }
}

/// A request past the end of the disk, which is refused however long the state is.
async fn look_past_the_end(guest: Rc<Guest>, worker: Worker) {
    for _ in 0..6 {
        let end = guest.image.virtual_size();
        let (read, _) = guest.image.read(&worker, end, IoBuf::zeroed(512).into()).await;
        let (written, _) =
            guest.image.write(&worker, end, IoBuf::zeroed(512).into(), Durability::Volatile).await;
        for result in [read, written] {
            if !result.is_err_and(|e| e.kind() == ErrorKind::OutOfRange) {
                guest.blame("a request past the end of the disk was not refused".to_owned());
            }
        }
    }
}

impl Life<'_> {
    fn requests(&mut self) -> Result<(), String> {
        let mut tasks: Vec<_> = (0..2_usize)
            .map(|i| {
                let worker = self.workers[i % self.workers.len()].clone();
                worker.spawn(self.guest.clone().stream(worker.clone(), self.rng.fork(), 6))
            })
            .collect();
        let worker = self.workers[0].clone();
        tasks.push(worker.spawn(look_past_the_end(self.guest.clone(), worker.clone())));
        let worker = self.workers.last().unwrap().clone();
        let (guest, state) = (self.guest.clone(), self.state.clone());
        tasks.push(worker.spawn(machine(guest, state, worker.clone(), self.rng.fork())));
        self.watched(join_all(tasks)).map(drop)?;
        self.guest.violation.borrow_mut().take().map_or(Ok(()), Err)
    }

    /// Runs `work`, and judges states that a crash would leave.
    fn watched<T>(&mut self, work: impl Future<Output = T>) -> Result<T, String> {
        let (mut rng, mut blame) = (self.rng.fork(), None);
        let tear = if self.setup.direct == 4096 { Tear::Block } else { Tear::Sector };
        let (world, mut states) = (self.world, self.states);
        let ended = world.block_on_watched(work, |_| {
            if blame.is_none() && rng.chance(1, 40) {
                let options = CrashOptions { max_states: 3, tear, seed: rng.next_u64() };
                for state in world.crash_states(&options) {
                    states += 1;
                    if let Err(what) = self.judge(state.files()) {
                        blame = Some(format!("crash at {:?}, {state}: {what}", world.now()));
                        return;
                    }
                }
            }
        });
        self.states = states;
        match blame {
            Some(what) => Err(what),
            None => ended.map_err(|stuck| stuck.to_string()),
        }
    }

    fn judge(&self, files: &[(String, zebu_sim::Content)]) -> Result<(), String> {
        let files: Files = files.to_vec();
        judge(self.setup, &files, &self.guest.model.borrow(), Leaks::Allowed)?;
        let world = self.setup.world(&files, 0);
        let worker = world.worker();
        let judged = world.block_on(async {
            let image = self.setup.open(&world, &worker)?;
            let bytes = read_state(&worker, &image).await?;
            self.state.borrow().check(0, &bytes).map_err(|v| format!("the state: {v}"))?;
            image.close(&worker).await.map_err(|e| format!("close: {e}"))?;
            self.judge_snapshot(&world, &worker).await
        });
        judged.map_err(|stuck| stuck.to_string())?
    }

    async fn judge_snapshot(&self, world: &SimWorld, worker: &Worker) -> Result<(), String> {
        let Some(taken) = &self.taken else { return Ok(()) };
        let options = OpenOptions::default().snapshot(Some(taken.name.clone()));
        let image = Image::open_files(worker, self.setup.chain(world), &options)
            .await
            .map_err(|e| format!("open the snapshot: {e}"))?;
        if read_state(worker, &image).await? != taken.state {
            return Err("the state in the snapshot has changed".to_owned());
        }
        Ok(())
    }

    fn run<T>(&self, work: impl Future<Output = zebu_engine::Result<T>>) -> Result<T, String> {
        self.world.block_on(work).map_err(|stuck| stuck.to_string())?.map_err(|e| e.to_string())
    }

    /// A change of the whole image.
    fn change(&mut self) -> Result<(), String> {
        let (image, worker) = (self.guest.image.clone(), self.workers[0].clone());
        match (self.rng.below(3), self.taken.take()) {
            // A disk that grows within its last table keeps the state where it was; one that grows more starts without any.
            (0, taken) if self.setup.version == 3 || taken.is_none() => {
                self.taken = taken;
                let before = image.virtual_size();
                let len = before + self.rng.between(1, 400) * 512;
                let op = self.guest.model.borrow_mut().begin(GuestRequest::Resize { len });
                self.run(image.resize(&worker, len, Shrink::Refuse, Preallocation::Off))?;
                self.guest.model.borrow_mut().end(op, GuestResult::Durable);
                let table = bytes_per_table(self.setup);
                if len.div_ceil(table) != before.div_ceil(table) {
                    *self.state.borrow_mut() = nothing_written();
                }
            }
            (1, Some(taken)) => {
                let which = SnapshotRef::Name(taken.name.clone());
                // Version 2 does not keep the size of the disk.
                if self.setup.version == 3 {
                    self.run(image.apply_snapshot(&worker, &which))?;
                    if self.current_state(&worker)? != taken.state {
                        return Err("the state of the snapshot did not come back".to_owned());
                    }
                    (*self.guest.model.borrow_mut(), *self.state.borrow_mut()) = taken.models;
                }
                self.run(image.delete_snapshot(&worker, &which))?;
            }
            (_, None) => {
                let state = self.current_state(&worker)?;
                let disk = read_all(&worker, &image, image.virtual_size());
                let disk = self.world.block_on(disk).map_err(|stuck| stuck.to_string())??;
                let name = format!("s{}", self.rng.next_u64());
                let new = NewSnapshot::named(name.clone()).date(Some(std::time::UNIX_EPOCH));
                match self.world.block_on(image.create_snapshot(&worker, new)).map_err(|s| s.to_string())? {
                    Ok(_) => {
                        let mut model = self.guest.model.borrow_mut();
                        model.adopt(0, &disk).map_err(|v| v.to_string())?;
                        self.state.borrow_mut().adopt(0, &state).map_err(|v| v.to_string())?;
                        let models = (model.clone(), self.state.borrow().clone());
                        self.taken = Some(Taken { name, state, models });
                    }
                    Err(e) if e.kind() == ErrorKind::Unsupported => {}
                    Err(e) => return Err(format!("snapshot: {e}")),
                }
            }
            (_, taken) => self.taken = taken,
        }
        Ok(())
    }

    fn current_state(&self, worker: &Worker) -> Result<Vec<u8>, String> {
        self.world.block_on(read_state(worker, &self.guest.image)).map_err(|stuck| stuck.to_string())?
    }
}

/// One life of an image. `Err`: what must not be.
pub(crate) fn live(seed: u64) -> Result<u64, String> {
    let mut rng = SimRng::new(seed ^ 0x766d_7374);
    let setup = loop {
        let setup = Setup::random(&mut rng);
        if !setup.external_data && setup.origin != Origin::Snapshot && setup.size <= 512 << 10 {
            break setup;
        }
    };
    let mut files = setup.make(seed);
    if setup.origin == Origin::RawBase {
        // The backing file is long enough to show where the state has its place.
        let place = setup.size.next_multiple_of(bytes_per_table(&setup));
        let base = files.iter_mut().find(|(name, _)| name == BASE);
        let base = &mut base.ok_or("there is no backing file")?.1;
        base.write(place.min(4 << 20), &vec![0xaa; 64 << 10]);
    }
    let world = setup.world(&files, rng.next_u64());
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0])?;
    let guest = Rc::new(Guest::new(image, setup.model(), &setup));
    let state = Rc::new(RefCell::new(nothing_written()));
    let mut life = Life { setup: &setup, world: &world, workers, guest, state, taken: None, rng, states: 0 };
    let mut lived = || {
        for _ in 0..5 {
            life.requests()?;
            life.change()?;
        }
        life.requests()?;
        let image = life.guest.image.clone();
        life.run(image.close(&life.workers[0]))?;
        life.guest.model.borrow_mut().apply(GuestRequest::Flush);
        life.state.borrow_mut().apply(GuestRequest::Flush);
        let end: Files =
            NAMES.iter().filter_map(|name| Some(((*name).to_owned(), world.content(name)?))).collect();
        life.judge(&end)?;
        judge_by_qemu(&end, Leaks::Forbidden)?;
        Ok(life.states)
    };
    lived().map_err(|e: String| format!("{e}\n{setup:?}"))
}

#[test]
fn the_state_of_a_machine_survives_crashes_and_stays_hidden() {
    let mut states = 0;
    Seeds::new(30).run(|seed| states += live(seed).unwrap_or_else(|e| panic!("seed {seed}: {e}")));
    eprintln!("{states} states");
}

/// Bytes of the state that nobody wrote are zero, in a cluster that was written in part too: no backing file shows.
#[test]
pub(crate) fn a_longer_backing_file_does_not_show() {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let base =
        world.file("base", zebu_sim::Content::from_bytes(&vec![0xaa; 128 << 10]), SimFileConfig::default());
    let top = world.file("top", zebu_sim::Content::new(), SimFileConfig::default());
    let ran = world.block_on(async {
        let create = CreateOptions::default()
            .size(Some(16 << 10))
            .cluster_size(512)
            .backing(Some(("base".to_owned(), Format::Raw)));
        Image::create_in(&worker, &top, &create).await?;
        let chain = vec![OpenedFile::new(top.clone(), Format::Qcow2), OpenedFile::new(base, Format::Raw)];
        let image =
            Image::open_files(&worker, chain, &OpenOptions::default().access(Access::ReadWrite)).await?;
        let read = async || read_state(&worker, &image).await;
        let before = read().await;
        image.write_vm_state(&worker, 1000, IoBuf::copy_of(&[1; 100]).into()).await?;
        let after = read().await;
        image.close(&worker).await?;
        Ok::<_, zebu_engine::Error>((before, after))
    });
    let (before, after) = ran.unwrap().unwrap();
    assert!(before.unwrap().iter().all(|byte| *byte == 0), "the backing file shows before a write");
    let mut expected = vec![0; BYTES];
    expected[1000..1100].fill(1);
    assert!(after.unwrap() == expected, "the backing file shows beside what was written");
}
