//! A run that is written down before it begins, so that parts of it can be left out: lives of an image, each of phases
//! of requests from several queues, each but the last ended by a power failure.

use crate::crash::guest::{Failures, Guest, Request};
use crate::crash::judge::{Leaks, judge, judge_by_qemu, read_all};
use crate::crash::limits::Limits;
use crate::crash::setup::{Files, NAMES, Origin, Setup};
use crate::torture::invariants::Invariants;
use crate::torture::length::Length;
use futures_util::future::join_all;
use std::fmt;
use std::rc::Rc;
use zebu_engine::ErrorKind;
use zebu_engine::storage::Worker;
use zebu_sim::{
    CrashOptions, CrashState, FaultPlan, FaultRates, GuestModel, GuestRequest, GuestResult, LogKeep, SimRng,
    SimWorld, Tally, Tear,
};
use zebu_storage::sabotage::{self, Limit};

/// The observations while a plan runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watch {
    /// The bytes that reads return, and the image at the end.
    Reads,
    /// Besides, after each step of the world, everything that the disk may hold.
    EveryStep,
    /// Besides, crash states at about so many moments of each phase, so many of each at most.
    Crashes { moments: u64, states: usize },
}

/// How large a plan is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) lives: u64,
    pub(crate) phases: u64,
    pub(crate) streams: u64,
    pub(crate) requests: u64,
}

/// Requests that are under way together, and then perhaps a resize.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Phase {
    pub(crate) streams: Vec<Vec<Request>>,
    pub(crate) resize: Option<u64>,
}

/// A random run, chosen by a seed. Equal plans run equally.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) setup: Setup,
    pub(crate) lives: Vec<Vec<Phase>>,
    /// Failures of the disk, in operations of 1000.
    pub(crate) rates: FaultRates,
    /// Bytes of an allocation window at most.
    pub(crate) window: u64,
    pub(crate) limits: Limits,
    /// Decides about the order of everything.
    pub(crate) seed: u64,
    pub(crate) watch: Watch,
    /// One crash state in so many is judged by `qemu-img check` too; 0: none.
    pub(crate) by_qemu: u64,
    pub(crate) tally: Tally,
}

/// Rates of the disk's failures, by the seed.
fn rates(rng: &mut SimRng) -> FaultRates {
    let delays = *rng.pick(&[0, 50, 300]);
    let quiet = FaultRates { delays, splits: 100, ..FaultRates::default() };
    match rng.below(4) {
        0 => FaultRates {
            read_errors: 20,
            write_errors: 40,
            no_space: 10,
            fallocate_errors: 50,
            splits: 200,
            ..quiet
        },
        1 => FaultRates { flush_errors: 60, write_errors: 20, no_space: 20, ..quiet },
        _ => quiet,
    }
}

impl Plan {
    /// The plan of a seed, on an image that `chosen` accepts.
    pub(crate) fn random(seed: u64, size: Size, watch: Watch, chosen: impl Fn(&Setup) -> bool) -> Self {
        let mut rng = SimRng::new(seed ^ 0x746f_7274_7572_6500);
        let setup = loop {
            let setup = Setup::random(&mut rng);
            if chosen(&setup) {
                break setup;
            }
        };
        let rates = rates(&mut rng);
        // A failed sync ends the writing, and what a failed resize left is not known before the next opening.
        let resizes = rates.write_errors == 0
            && rates.flush_errors == 0
            && (setup.version == 3 || setup.origin != Origin::Snapshot);
        let mut lives = Vec::new();
        let mut len = setup.size;
        for _ in 0..size.lives {
            let mut phases = Vec::new();
            for _ in 0..rng.between(1, size.phases) {
                let streams = (0..rng.between(1, size.streams))
                    .map(|_| {
                        let compressed = setup.gather_memory.is_some();
                        (0..rng.between(1, size.requests))
                            .map(|_| Request::random(&mut rng, len, setup.cluster_size, compressed))
                            .collect()
                    })
                    .collect();
                let resize = (resizes && rng.chance(1, 4)).then(|| {
                    let shortest = if setup.can_shrink() { 1 } else { len / 512 };
                    rng.between(shortest, (setup.size * 3 / 2 / 512).max(shortest)) * 512
                });
                len = resize.unwrap_or(len);
                phases.push(Phase { streams, resize });
            }
            lives.push(phases);
        }
        let window = *rng.pick(&[1, 1, 4096, u64::MAX]);
        let limits = Limits::of_seed(seed);
        let (seed, tally) = (rng.next_u64(), Tally::default());
        Self { setup, lives, rates, window, limits, seed, watch, by_qemu: 0, tally }
    }

    /// The same on an encrypted image.
    pub(crate) fn encrypted(mut self) -> Self {
        self.setup = self.setup.encrypted();
        for request in self.lives.iter_mut().flatten().flat_map(|phase| phase.streams.iter_mut().flatten()) {
            if let Request::WriteCompressed { offset, len, durability } = *request {
                *request = Request::Write { offset, len, durability };
            }
        }
        self
    }

    /// The same on an image into which reads copy what they find below it.
    pub(crate) fn copying(mut self) -> Self {
        self.setup = self.setup.copying();
        self
    }

    fn fails(&self) -> bool {
        let FaultRates { read_errors, write_errors, no_space, flush_errors, fallocate_errors, .. } =
            self.rates;
        read_errors + write_errors + no_space + flush_errors + fallocate_errors > 0
    }

    /// Runs it. `Err`: what must not be.
    pub(crate) fn run(&self) -> Result<(), String> {
        self.run_keeping(LogKeep::Digest).0
    }

    /// Runs it; besides, what the disk was asked in its last life, as text, if that was kept.
    pub(crate) fn run_keeping(&self, keep: LogKeep) -> (Result<(), String>, String) {
        sabotage::limit(Limit::WindowBytes, self.window);
        self.limits.set();
        let mut rng = SimRng::new(self.seed);
        let mut files = self.setup.make(self.seed);
        let mut model = self.setup.model();
        model.count_in(&self.tally);
        for (number, phases) in self.lives.iter().enumerate() {
            let world = self.setup.world_keeping(keep, &files, rng.next_u64());
            world.count_in(&self.tally);
            let life = Life {
                plan: self,
                world: &world,
                rng: rng.fork(),
                survivor: None,
                states: 0,
                is_poisoned: false,
            };
            let lived = life.live(phases, model, number + 1 == self.lives.len());
            let log = if keep == LogKeep::All { world.log().to_string() } else { String::new() };
            match lived {
                Err(violation) => return (Err(violation), log),
                Ok(None) => return (Ok(()), log),
                Ok(Some(next)) => (files, model) = next,
            }
        }
        (Ok(()), String::new())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}", self.setup)?;
        writeln!(
            f,
            "windows of {} bytes at most, {}; of 1000 operations: {:?}",
            self.window, self.limits, self.rates
        )?;
        for (life, phases) in self.lives.iter().enumerate() {
            for (phase, Phase { streams, resize }) in phases.iter().enumerate() {
                for (stream, requests) in streams.iter().enumerate() {
                    for request in requests {
                        writeln!(f, "  life {life}, phase {phase}, stream {stream}: {request:x?}")?;
                    }
                }
                if let Some(len) = resize {
                    writeln!(f, "  life {life}, phase {phase}: resize to {len:#x}")?;
                }
            }
        }
        Ok(())
    }
}

/// One life of the image.
struct Life<'a> {
    plan: &'a Plan,
    world: &'a SimWorld,
    rng: SimRng,
    /// A crash state to go on from, and what may be in it.
    survivor: Option<(Files, GuestModel)>,
    states: u64,
    is_poisoned: bool,
}

impl Life<'_> {
    /// Runs one life; returns what the next one begins with, if there is to be one.
    fn live(
        mut self,
        phases: &[Phase],
        model: GuestModel,
        is_last: bool,
    ) -> Result<Option<(Files, GuestModel)>, String> {
        let setup = &self.plan.setup;
        let workers = setup.make_workers(self.world);
        let image = setup.open(self.world, &workers[0])?;
        let guest = Rc::new(Guest::new(image, model, setup));
        if self.plan.fails() {
            guest.failures.set(Failures::OfTheDisk);
        }
        let mut length = Length::at_open(self.plan, self.world);
        let mut invariants = Invariants::new(setup, self.world);
        self.world.set_faults(FaultPlan::random(self.plan.rates));
        for phase in phases {
            let requests: u64 = phase.streams.iter().map(|stream| stream.len() as u64).sum();
            let streams: Vec<_> = phase
                .streams
                .iter()
                .enumerate()
                .map(|(i, requests)| {
                    let worker = workers[i % workers.len()].clone();
                    worker.spawn(requests_in_turn(guest.clone(), worker.clone(), requests.clone()))
                })
                .collect();
            self.watch(&guest, &mut invariants, requests * 12, join_all(streams))?;
            length.check_after(phase)?;
            if let Some(len) = phase.resize {
                self.watch(&guest, &mut invariants, 60, guest.resize(&workers[0], len))?;
            }
        }
        self.is_poisoned = guest.failed.borrow().contains(&ErrorKind::Poisoned);
        self.world.set_faults(FaultPlan::none());
        self.read_whole(&guest, &workers[0])?;
        if !is_last && self.survivor.is_none() {
            self.crash(&guest, 8)?;
        }
        if is_last || self.survivor.is_none() {
            self.end(&guest, &workers[0])?;
            return Ok(None);
        }
        let Some((files, mut model)) = self.survivor.take() else { return Ok(None) };
        let disk = judge(setup, &files, &model, Leaks::Allowed)?;
        model.crash();
        model
            .adopt_len(disk.len() as u64)
            .map_err(|lengths| format!("length {} of {lengths:?}", disk.len()))?;
        model.adopt(0, &disk).map_err(|v| v.to_string())?;
        Ok(Some((files, model)))
    }

    /// Runs `work` and looks on.
    fn watch(
        &mut self,
        guest: &Guest,
        invariants: &mut Invariants<'_>,
        steps: u64,
        work: impl Future<Output: Sized>,
    ) -> Result<(), String> {
        let world = self.world;
        let ended = world.block_on_watched(work, |_| {
            if guest.violation.borrow().is_some() {
                return;
            }
            let seen = match self.plan.watch {
                Watch::EveryStep => invariants.check(&guest.model.borrow()),
                Watch::Crashes { moments, states } if self.rng.chance(moments, steps) => {
                    self.crash(guest, states)
                }
                Watch::Reads | Watch::Crashes { .. } => Ok(()),
            };
            if let Err(violation) = seen {
                guest.blame(format!("at {:?}: {violation}", world.now()));
            }
        });
        ended.map_err(|stuck| stuck.to_string())?;
        guest.violation.borrow_mut().take().map_or(Ok(()), Err)
    }

    fn crash(&mut self, guest: &Guest, states: usize) -> Result<(), String> {
        let setup = &self.plan.setup;
        let tear = if setup.direct == 4096 { Tear::Block } else { Tear::Sector };
        let options = CrashOptions { max_states: states, tear, seed: self.rng.next_u64() };
        for state in self.world.crash_states(&options) {
            self.judge(guest, &state).map_err(|violation| format!("crash, {state}: {violation}"))?;
        }
        Ok(())
    }

    fn judge(&mut self, guest: &Guest, state: &CrashState) -> Result<(), String> {
        self.states += 1;
        let files = state.files().to_vec();
        let model = guest.model.borrow();
        judge(&self.plan.setup, &files, &model, Leaks::Allowed)?;
        // Which one in so many, the seed decides: short runs have their share too.
        if self.plan.by_qemu > 0 && self.rng.chance(1, self.plan.by_qemu) {
            judge_by_qemu(&files, Leaks::Allowed)?;
        }
        if self.survivor.is_none() || self.rng.chance(1, 40) {
            self.survivor = Some((files, model.clone()));
        }
        Ok(())
    }

    /// The whole disk reads as it may.
    fn read_whole(&self, guest: &Guest, worker: &Worker) -> Result<(), String> {
        let len = guest.model.borrow().len().min(guest.image.virtual_size());
        let op = guest.model.borrow_mut().begin(GuestRequest::Read);
        let read = read_all(worker, &guest.image, len);
        let disk = self.world.block_on(read).map_err(|stuck| stuck.to_string())??;
        guest.model.borrow().check_read(op, 0, &disk).map_err(|v| format!("read of the whole: {v}"))?;
        guest.model.borrow_mut().end(op, GuestResult::Done);
        Ok(())
    }

    /// Closes the image; what is left is sound.
    fn end(&self, guest: &Guest, worker: &Worker) -> Result<(), String> {
        let setup = &self.plan.setup;
        let closed = self.world.block_on(guest.image.close(worker)).map_err(|stuck| stuck.to_string())?;
        match closed {
            Ok(()) => guest.model.borrow_mut().apply(GuestRequest::Flush),
            // After a failed sync nothing more is promised than before it.
            Err(error) if self.plan.rates.flush_errors > 0 && error.kind() == ErrorKind::Poisoned => {}
            Err(error) => return Err(format!("close: {error}")),
        }
        let files: Files =
            NAMES.iter().filter_map(|name| Some(((*name).to_owned(), self.world.content(name)?))).collect();
        judge(setup, &files, &guest.model.borrow(), Leaks::Allowed)
            .map(drop)
            .map_err(|e| format!("after close: {e}"))
    }
}

async fn requests_in_turn(guest: Rc<Guest>, worker: Worker, requests: Vec<Request>) {
    for request in requests {
        if guest.violation.borrow().is_some() {
            return;
        }
        guest.perform(&worker, request).await;
    }
}
