//! Internal snapshots that are taken, applied and deleted between requests of a guest, with power failures while they are.
//!
//! The judge: before an operation begins, the disk is flushed and read, so that it is known byte by byte. In every
//! state that a crash leaves it holds these bytes, or after an apply those of the snapshot; the snapshots are those from
//! before the operation or from after it, and each holds what the disk held when it was taken.

use crate::crash::guest::Guest;
use crate::crash::judge::read_all;
use crate::crash::setup::{Files, NAMES, Origin, Setup, TOP};
use futures_util::future::join_all;
use std::rc::Rc;
use zebu_engine::check::{CheckOptions, FindingKind, Severity, check_file};
use zebu_engine::storage::Worker;
use zebu_engine::{Image, NewSnapshot, OpenOptions, SnapshotRef};
use zebu_sim::{CrashOptions, GuestModel, SimFileConfig, SimRng, SimWorld, Tear};

/// Operations in a life.
const OPERATIONS: u64 = 6;

/// A snapshot as it has to be.
#[derive(Clone)]
struct Taken {
    name: String,
    disk: Vec<u8>,
    model: GuestModel,
}

/// The allowed findings: one of the disks, one of the lists of snapshots.
struct Allowed {
    disks: Vec<Vec<u8>>,
    lists: Vec<Vec<Taken>>,
}

struct Life<'a> {
    setup: &'a Setup,
    world: &'a SimWorld,
    workers: Vec<Worker>,
    guest: Rc<Guest>,
    taken: Vec<Taken>,
    rng: SimRng,
}

/// The life of a seed. `Err`: what must not be.
pub(crate) fn live(seed: u64) -> Result<(), String> {
    let mut rng = SimRng::new(seed ^ 0x6c69_7665_7300_0000);
    let setup = loop {
        let setup = Setup::random(&mut rng);
        // The snapshots of a life never make a count of 16 bits too large.
        if !setup.external_data && setup.refcount_bits >= 16 && setup.origin != Origin::Snapshot {
            break setup;
        }
    };
    let world = setup.world(&setup.make(seed), rng.next_u64());
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0])?;
    let guest = Rc::new(Guest::new(image, setup.model(), &setup));
    let mut life = Life { setup: &setup, world: &world, workers, guest, taken: Vec::new(), rng };
    life.live().map_err(|e| format!("{e}\n{setup:?}"))
}

impl Life<'_> {
    fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, String> {
        let value = self.world.block_on(work).map_err(|stuck| stuck.to_string())?;
        self.guest.violation.borrow_mut().take().map_or(Ok(value), Err)
    }

    fn live(&mut self) -> Result<(), String> {
        for _ in 0..OPERATIONS {
            self.requests()?;
            self.operation()?;
        }
        self.requests()?;
        let disk = self.settled()?;
        self.run(self.guest.image.close(&self.workers[0]))?.map_err(|e| format!("close: {e}"))?;
        let files: Files =
            NAMES.iter().filter_map(|name| Some(((*name).to_owned(), self.world.content(name)?))).collect();
        let allowed = Allowed { disks: vec![disk], lists: vec![self.taken.clone()] };
        judge(self.setup, &files, &allowed).map_err(|e| format!("after close: {e}"))
    }

    fn requests(&mut self) -> Result<(), String> {
        let streams: Vec<_> = (0..3)
            .map(|i| {
                let worker = self.workers[i % self.workers.len()].clone();
                worker.spawn(self.guest.clone().stream(worker.clone(), self.rng.fork(), 6))
            })
            .collect();
        self.run(join_all(streams)).map(drop)
    }

    /// The durable content of the disk.
    fn settled(&self) -> Result<Vec<u8>, String> {
        self.run(self.guest.flush(&self.workers[0]))?;
        let disk =
            self.run(read_all(&self.workers[0], &self.guest.image, self.guest.image.virtual_size()))??;
        self.guest.model.borrow_mut().adopt(0, &disk).map_err(|v| format!("before an operation: {v}"))?;
        Ok(disk)
    }

    fn operation(&mut self) -> Result<(), String> {
        let disk = self.settled()?;
        let before = self.taken.clone();
        let (image, worker) = (self.guest.image.clone(), self.workers[self.workers.len() - 1].clone());
        match self.rng.below(if before.is_empty() { 1 } else { 3 }) {
            0 => {
                let name = format!("s{}", self.rng.next_u64());
                let model = self.guest.model.borrow().clone();
                self.taken.push(Taken { name: name.clone(), disk: disk.clone(), model });
                let allowed = Allowed { disks: vec![disk], lists: vec![before, self.taken.clone()] };
                let new = NewSnapshot::named(name).date(Some(std::time::UNIX_EPOCH));
                self.during(&allowed, async { image.create_snapshot(&worker, new).await.map(drop) })
            }
            1 => {
                let target = self.rng.pick(&before).clone();
                let allowed = Allowed { disks: vec![disk, target.disk], lists: vec![before] };
                let which = SnapshotRef::Name(target.name);
                self.during(&allowed, image.apply_snapshot(&worker, &which))?;
                self.guest.model.replace(target.model);
                Ok(())
            }
            _ => {
                let index = self.rng.below(before.len() as u64) as usize;
                let which = SnapshotRef::Name(self.taken.remove(index).name);
                let allowed = Allowed { disks: vec![disk], lists: vec![before, self.taken.clone()] };
                self.during(&allowed, image.delete_snapshot(&worker, &which))
            }
        }
    }

    /// Runs an operation; crash states on the way.
    fn during(
        &mut self,
        allowed: &Allowed,
        work: impl Future<Output = zebu_engine::Result<()>>,
    ) -> Result<(), String> {
        let (setup, world, mut rng) = (self.setup, self.world, self.rng.fork());
        let tear = if setup.direct == 4096 { Tear::Block } else { Tear::Sector };
        let mut found = Ok(());
        let done = world.block_on_watched(work, |_| {
            if found.is_err() || !rng.chance(1, 8) {
                return;
            }
            let options = CrashOptions { max_states: 4, tear, seed: rng.next_u64() };
            found = world.crash_states(&options).try_for_each(|state| {
                judge(setup, &state.files().to_vec(), allowed)
                    .map_err(|e| format!("crash at {:?}, {state}: {e}", world.now()))
            });
        });
        found?;
        done.map_err(|stuck| stuck.to_string())?.map_err(|e| format!("the operation failed: {e}"))
    }
}

fn judge(setup: &Setup, files: &Files, allowed: &Allowed) -> Result<(), String> {
    let world = setup.world(files, 0);
    let worker = world.worker();
    world.block_on(judge_in(setup, &world, &worker, allowed)).map_err(|stuck| stuck.to_string())?
}

async fn judge_in(setup: &Setup, world: &SimWorld, worker: &Worker, allowed: &Allowed) -> Result<(), String> {
    // The dirty bit announces counts and flags that the next writer mends; version 2, which has none, may have flags that
    // do not agree with the counts.
    let announced = setup.version == 3 && world.content(TOP).unwrap().bytes(79..80)[0] & 1 == 1;
    if !announced {
        check(setup, world, worker).await?;
    }
    let image = Image::open_files(worker, setup.chain(world), &setup.options())
        .await
        .map_err(|e| format!("open: {e}"))?;
    let disk = read_all(worker, &image, image.virtual_size()).await?;
    if !allowed.disks.contains(&disk) {
        return Err("the disk holds something else".to_owned());
    }
    let names: Vec<String> = image.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
    let list = allowed.lists.iter().find(|list| list.iter().map(|taken| &taken.name).eq(&names));
    let list = list.ok_or_else(|| format!("the snapshots are {names:?}"))?;
    image.close(worker).await.map_err(|e| format!("close: {e}"))?;
    check(setup, world, worker).await?;
    for Taken { name, disk, .. } in list {
        let options = OpenOptions::default().snapshot(Some(name.clone()));
        let image = Image::open_files(worker, setup.chain(world), &options)
            .await
            .map_err(|e| format!("open snapshot {name}: {e}"))?;
        if read_all(worker, &image, image.virtual_size()).await? != *disk {
            return Err(format!("snapshot {name} has changed"));
        }
    }
    Ok(())
}

/// A check finds leaks at most, and in version 2 flags.
async fn check(setup: &Setup, world: &SimWorld, worker: &Worker) -> Result<(), String> {
    let top = world.open(TOP, SimFileConfig::default()).unwrap();
    let report =
        check_file(worker, &top, &CheckOptions::default()).await.map_err(|e| format!("check: {e}"))?;
    let may_be = |kind: &FindingKind| {
        let flag = matches!(kind, FindingKind::CopiedFlagL1 { .. } | FindingKind::CopiedFlagL2 { .. });
        kind.severity() == Severity::Leak || (flag && setup.version == 2)
    };
    match report.findings.iter().find(|finding| !may_be(&finding.kind)) {
        Some(finding) => Err(format!("check: {finding}")),
        None => Ok(()),
    }
}
