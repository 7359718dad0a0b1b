//! Power failures while snapshots are taken, applied and deleted.
//!
//! In every state that a crash leaves: the disk holds what a guest may find, after an apply that was under way the old
//! content or the snapshot's; the snapshots are those from before the operation or from after it, and each holds what
//! it held; a check finds leaks at most, or what the dirty bit announces; version 2, which has no such bit, may have
//! COPIED flags that do not agree with the counts. After the next writer there is nothing to find but leaks.

use crate::crash::guest::Guest;
use crate::crash::judge::{judge_by_qemu, read_all};
use crate::crash::setup::{Files, Setup, TOP};
use futures_util::future::join_all;
use std::rc::Rc;
use zebu_engine::check::{CheckOptions, FindingKind, Severity, check_file};
use zebu_engine::storage::Worker;
use zebu_engine::{ErrorKind, Image, NewSnapshot, OpenOptions, SnapshotRef};
use zebu_sim::{CrashOptions, CrashState, GuestModel, Seeds, SimFileConfig, SimRng, SimWorld, Tally, Tear};

/// A snapshot as it has to be.
#[derive(Clone)]
struct Taken {
    name: String,
    content: Vec<u8>,
    /// The disk at that time.
    model: GuestModel,
}

/// Disks and snapshots that a crash may leave.
struct Allowed {
    /// The disk is as one of these says.
    disks: Vec<GuestModel>,
    /// The snapshots are one of these lists.
    lists: Vec<Vec<Taken>>,
}

fn setup(rng: &mut SimRng) -> Setup {
    loop {
        let setup = Setup::random(rng);
        if !setup.external_data
            && setup.refcount_bits > 1
            && setup.origin != crate::crash::setup::Origin::Snapshot
        {
            return setup;
        }
    }
}

struct Life<'a> {
    setup: &'a Setup,
    world: &'a SimWorld,
    workers: Vec<Worker>,
    guest: Rc<Guest>,
    taken: Vec<Taken>,
    rng: SimRng,
    states: u64,
}

impl Life<'_> {
    fn requests(&mut self) -> Result<(), String> {
        let streams = (0..3).map(|i: usize| {
            let worker = self.workers[i % self.workers.len()].clone();
            worker.spawn(self.guest.clone().stream(worker.clone(), self.rng.fork(), 6))
        });
        let streams: Vec<_> = streams.collect();
        self.world.block_on(join_all(streams)).map_err(|stuck| stuck.to_string())?;
        match self.guest.violation.borrow_mut().take() {
            Some(violation) => Err(violation),
            None => Ok(()),
        }
    }

    fn operation(&mut self) -> Result<(), String> {
        let before = self.taken.clone();
        let model = self.guest.model.borrow().clone();
        let worker = self.workers[self.rng.below(self.workers.len() as u64) as usize].clone();
        let image = self.guest.image.clone();
        match self.rng.below(if before.is_empty() { 1 } else { 3 }) {
            0 => {
                let name = format!("s{}", self.rng.next_u64());
                let len = image.virtual_size();
                let content =
                    self.world.block_on(read_all(&worker, &image, len)).map_err(|s| s.to_string())??;
                let mut durable = model.clone();
                durable.adopt(0, &content).map_err(|v| v.to_string())?;
                let mut after = before.clone();
                after.push(Taken { name: name.clone(), content, model: durable.clone() });
                let new = NewSnapshot::named(name).date(Some(std::time::UNIX_EPOCH));
                let allowed = Allowed { disks: vec![model], lists: vec![before, after.clone()] };
                if self.during(&allowed, async { image.create_snapshot(&worker, new).await.map(drop) })? {
                    self.taken = after;
                    *self.guest.model.borrow_mut() = durable;
                }
            }
            1 => {
                let target = self.rng.pick(&before).clone();
                let allowed = Allowed { disks: vec![model, target.model.clone()], lists: vec![before] };
                let which = SnapshotRef::Name(target.name.clone());
                if self.during(&allowed, async { image.apply_snapshot(&worker, &which).await })? {
                    *self.guest.model.borrow_mut() = target.model;
                }
            }
            _ => {
                let index = self.rng.below(before.len() as u64) as usize;
                let mut after = before.clone();
                let gone = after.remove(index);
                let which = SnapshotRef::Name(gone.name);
                let allowed = Allowed { disks: vec![model], lists: vec![before, after.clone()] };
                assert!(self.during(&allowed, async { image.delete_snapshot(&worker, &which).await })?);
                self.taken = after;
            }
        }
        Ok(())
    }

    /// Runs an operation; whether it was done. It may be refused where refcounts are too narrow.
    fn during(
        &mut self,
        allowed: &Allowed,
        work: impl Future<Output = zebu_engine::Result<()>>,
    ) -> Result<bool, String> {
        let (setup, world) = (self.setup, self.world);
        let (mut rng, mut states, mut blame) = (self.rng.fork(), self.states, None);
        let ended = world.block_on_watched(work, |_| {
            if blame.is_none() && rng.chance(1, 8) {
                let options = CrashOptions {
                    max_states: 4,
                    tear: if setup.direct == 4096 { Tear::Block } else { Tear::Sector },
                    seed: rng.next_u64(),
                };
                for state in world.crash_states(&options) {
                    states += 1;
                    if let Err(what) = judge_crash(setup, &state, allowed, states) {
                        blame = Some(format!("crash at {:?}, {state}: {what}", world.now()));
                        return;
                    }
                }
            }
        });
        self.states = states;
        if let Some(what) = blame {
            return Err(what);
        }
        match ended.map_err(|stuck| stuck.to_string())? {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::Unsupported && setup.refcount_bits == 2 => Ok(false),
            Err(e) => Err(format!("the operation failed: {e}")),
        }
    }
}

fn judge_crash(setup: &Setup, state: &CrashState, allowed: &Allowed, number: u64) -> Result<(), String> {
    let files: Files = state.files().to_vec();
    let world = setup.world(&files, 0);
    let worker = world.worker();
    world.block_on(judge_in(setup, &world, &worker, allowed)).map_err(|s| s.to_string())??;
    if number.is_multiple_of(40) && setup.version == 3 {
        // By now the next writer has been there.
        let mended: Files =
            files.iter().map(|(name, _)| (name.clone(), world.content(name).unwrap())).collect();
        judge_by_qemu(&mended, crate::crash::judge::Leaks::Allowed)?;
    }
    Ok(())
}

/// Whether `check` finds nothing but leaks and what `may_pass` lets pass.
async fn check(
    world: &SimWorld,
    worker: &Worker,
    may_pass: impl Fn(&FindingKind) -> bool,
) -> Result<(), String> {
    let top = world.open(TOP, SimFileConfig::default()).unwrap();
    let report =
        check_file(worker, &top, &CheckOptions::default()).await.map_err(|e| format!("check: {e}"))?;
    let bad = report.findings.iter().find(|f| f.kind.severity() != Severity::Leak && !may_pass(&f.kind));
    match bad {
        Some(finding) => Err(format!("check: {finding}")),
        None => Ok(()),
    }
}

async fn judge_in(setup: &Setup, world: &SimWorld, worker: &Worker, allowed: &Allowed) -> Result<(), String> {
    let header = world.content(TOP).unwrap().bytes(72..80);
    let dirty = setup.version == 3 && header[7] & 1 == 1;
    let flags = |kind: &FindingKind| {
        matches!(kind, FindingKind::CopiedFlagL1 { .. } | FindingKind::CopiedFlagL2 { .. })
    };
    check(world, worker, |kind| dirty || (setup.version == 2 && flags(kind))).await?;
    let image = Image::open_files(worker, setup.chain(world), &setup.options())
        .await
        .map_err(|e| format!("open: {e}"))?;
    let disk = read_all(worker, &image, image.virtual_size()).await?;
    let verdicts: Vec<_> = allowed.disks.iter().map(|model| model.check(0, &disk)).collect();
    let lengths = allowed.disks.iter().any(|model| model.may_have_len(disk.len() as u64));
    if !lengths || verdicts.iter().all(Result::is_err) {
        let what = verdicts.into_iter().find_map(Result::err);
        return Err(format!("{} bytes: {}", disk.len(), what.map(|v| v.to_string()).unwrap_or_default()));
    }
    let names: Vec<String> = image.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
    image.close(worker).await.map_err(|e| format!("close: {e}"))?;
    // A dirty image was repaired by this opening; in version 2 flags stay until a repair.
    check(world, worker, |kind| setup.version == 2 && flags(kind)).await?;
    let list = allowed
        .lists
        .iter()
        .find(|list| list.iter().map(|taken| &taken.name).eq(&names))
        .ok_or_else(|| format!("the snapshots are {names:?}"))?;
    for taken in list {
        let options = OpenOptions::default().snapshot(Some(taken.name.clone()));
        let image = Image::open_files(worker, setup.chain(world), &options)
            .await
            .map_err(|e| format!("open snapshot {}: {e}", taken.name))?;
        if read_all(worker, &image, image.virtual_size()).await? != taken.content {
            return Err(format!("snapshot {} has changed", taken.name));
        }
    }
    Ok(())
}

fn live(seed: u64, tally: &Tally) -> Result<u64, String> {
    let mut rng = SimRng::new(seed ^ 0x736e_6170);
    let setup = setup(&mut rng);
    let files = setup.make(seed);
    let world = setup.world(&files, rng.next_u64());
    world.count_in(tally);
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0])?;
    let mut model = setup.model();
    model.count_in(tally);
    let guest = Rc::new(Guest::new(image, model, &setup));
    let mut life = Life { setup: &setup, world: &world, workers, guest, taken: Vec::new(), rng, states: 0 };
    for _ in 0..6 {
        life.requests().map_err(|e| format!("{e}\n{setup:?}"))?;
        life.operation().map_err(|e| format!("{e}\n{setup:?}"))?;
    }
    life.requests().map_err(|e| format!("{e}\n{setup:?}"))?;
    let image = life.guest.image.clone();
    world
        .block_on(image.close(&life.workers[0]))
        .map_err(|s| s.to_string())?
        .map_err(|e| format!("close: {e}\n{setup:?}"))?;
    let end: Files = files.iter().map(|(name, _)| (name.clone(), world.content(name).unwrap())).collect();
    judge_by_qemu(&end, crate::crash::judge::Leaks::Forbidden)
        .map_err(|e| format!("at the end: {e}\n{setup:?}"))?;
    Ok(life.states)
}

#[test]
fn snapshots_survive_crashes_of_what_is_done_to_them() {
    let mut states = 0;
    let seeds = Seeds::new(40);
    seeds.run(|seed| states += live(seed, seeds.tally()).unwrap_or_else(|e| panic!("seed {seed}: {e}")));
    eprintln!("{states} states");
}

/// Requests of several queues go on while snapshots come and go; nothing that a guest wrote is lost, nothing leaks.
#[test]
fn requests_go_on_beside_snapshot_operations() {
    let seeds = Seeds::new(30);
    seeds.run(|seed| {
        let mut rng = SimRng::new(seed ^ 0x6265_7369);
        let mut setup = setup(&mut rng);
        // Two snapshots stay.
        setup.refcount_bits = setup.refcount_bits.max(16);
        let files = setup.make(seed);
        let world = setup.world(&files, rng.next_u64());
        world.count_in(seeds.tally());
        let workers: Vec<Worker> = (0..3).map(|_| world.worker()).collect();
        let image = setup.open(&world, &workers[0]).unwrap();
        let mut model = setup.model();
        model.count_in(seeds.tally());
        let guest = Rc::new(Guest::new(image.clone(), model, &setup));
        let mut tasks: Vec<_> = (0..4_usize)
            .map(|i| {
                let worker = workers[i % workers.len()].clone();
                worker.spawn(guest.clone().stream(worker.clone(), rng.fork(), 25))
            })
            .collect();
        let (worker, on) = (workers[2].clone(), image.clone());
        tasks.push(workers[2].spawn(async move {
            for round in 0..5 {
                let name = format!("s{round}");
                on.create_snapshot(&worker, NewSnapshot::named(name.clone())).await.unwrap();
                if round % 2 == 0 {
                    on.delete_snapshot(&worker, &SnapshotRef::Name(name)).await.unwrap();
                }
            }
        }));
        world.block_on(join_all(tasks)).unwrap();
        if let Some(violation) = guest.violation.borrow_mut().take() {
            panic!("seed {seed}: {violation}\n{setup:?}");
        }
        world.block_on(image.close(&workers[0])).unwrap().unwrap();
        let end: Files = files.iter().map(|(name, _)| (name.clone(), world.content(name).unwrap())).collect();
        judge_by_qemu(&end, crate::crash::judge::Leaks::Forbidden)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}\n{setup:?}"));
        let bytes = world.block_on(async {
            let worker = world.worker();
            let image =
                Image::open_files(&worker, setup.chain(&world), &OpenOptions::default()).await.unwrap();
            assert_eq!(image.snapshots().len(), 2);
            read_all(&worker, &image, image.virtual_size()).await.unwrap()
        });
        guest.model.borrow().check(0, &bytes.unwrap()).unwrap_or_else(|v| panic!("seed {seed}: {v}"));
    });
}
