//! The life of an image: phases of requests, crashes at random moments, and going on after some of them.

use crate::crash::bitmaps::{Known, judge_bitmaps, none_in_use, operation, tidy};
use crate::crash::guest::Guest;
use crate::crash::judge::{Leaks, judge, judge_by_qemu, read_all};
use crate::crash::setup::{Files, Setup};
use futures_util::future::join_all;
use std::rc::Rc;
use zebu_sim::{CrashOptions, CrashState, GuestModel, GuestRequest, SimRng, SimWorld, Tear};

/// How much of everything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) phases: u64,
    /// Streams of requests at once.
    pub(crate) streams: u64,
    pub(crate) requests: u64,
    /// Moments at which crash states are taken, about.
    pub(crate) moments: u64,
    /// Crash states of one moment at most.
    pub(crate) states: usize,
    /// Crashes after which life goes on.
    pub(crate) generations: u64,
    /// One state in this many is judged by `qemu-img check` too; 0: none.
    pub(crate) by_qemu: u64,
}

/// Counts of what was done.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) seeds: u64,
    pub(crate) lives: u64,
    pub(crate) moments: u64,
    pub(crate) states: u64,
    pub(crate) judged_by_qemu: u64,
    /// Counts of the simulation.
    pub(crate) simulated: zebu_sim::Tally,
}

/// An image after a crash, and what it may hold.
struct Survivor {
    files: Files,
    model: GuestModel,
    bitmaps: Known,
}

/// Lives a life that begins with `files`. `Err`: what must not be.
pub(crate) fn live(
    setup: &Setup,
    files: &Files,
    mut model: GuestModel,
    rng: &mut SimRng,
    extent: Extent,
    tally: &mut Tally,
) -> std::result::Result<(), String> {
    model.count_in(&tally.simulated);
    live_with(setup, files, model, Known::new(), rng, extent, tally)
}

fn live_with(
    setup: &Setup,
    files: &Files,
    model: GuestModel,
    bitmaps: Known,
    rng: &mut SimRng,
    extent: Extent,
    tally: &mut Tally,
) -> std::result::Result<(), String> {
    tally.lives += 1;
    let world = setup.world(files, rng.next_u64());
    world.count_in(&tally.simulated);
    let survivor = live_in(setup, &world, model, bitmaps, rng, extent, tally)?;
    drop(world);
    let Some(Survivor { files, mut model, bitmaps }) = survivor else { return Ok(()) };
    if extent.generations == 0 {
        return Ok(());
    }
    let disk = judge(setup, &files, &model, Leaks::Allowed)?;
    model.crash();
    model.adopt_len(disk.len() as u64).map_err(|lengths| format!("length {} of {lengths:?}", disk.len()))?;
    model.adopt(0, &disk).map_err(|v| v.to_string())?;
    let extent = Extent { generations: extent.generations - 1, ..extent };
    live_with(setup, &files, model, bitmaps, rng, extent, tally).map_err(|e| format!("after recovery: {e}"))
}

fn live_in(
    setup: &Setup,
    world: &SimWorld,
    model: GuestModel,
    bitmaps: Known,
    rng: &mut SimRng,
    extent: Extent,
    tally: &mut Tally,
) -> std::result::Result<Option<Survivor>, String> {
    let workers = setup.make_workers(world);
    let guest = Rc::new(Guest::new(setup.open(world, &workers[0])?, model, setup));
    let mut survivor = None;
    // Of its own, so that a seed means the same with bitmaps and without.
    let mut bitmap_rng = rng.clone();
    if setup.bitmaps {
        guest.bitmaps.replace(bitmaps);
        world.block_on(tidy(&workers[0], &guest)).map_err(|s| s.to_string())??;
    }
    for _ in 0..extent.phases {
        for _ in 0..if setup.bitmaps { bitmap_rng.below(4) } else { 0 } {
            let mut crashes = Crashes {
                setup,
                world,
                guest: &guest,
                rng: bitmap_rng.fork(),
                steps: 60,
                extent,
                tally,
                survivor: &mut survivor,
            };
            crashes.during(operation(&workers[0], &guest, bitmap_rng.fork()))??;
        }
        let streams = (0..extent.streams).map(|i| {
            let worker = workers[i as usize % workers.len()].clone();
            worker.spawn(guest.clone().stream(worker.clone(), rng.fork(), extent.requests))
        });
        let streams: Vec<_> = streams.collect();
        let steps = extent.streams * extent.requests * 12;
        let mut crashes = Crashes {
            setup,
            world,
            guest: &guest,
            rng: rng.fork(),
            steps,
            extent,
            tally,
            survivor: &mut survivor,
        };
        crashes.during(join_all(streams))?;
        if rng.chance(1, 3) {
            let shortest = if setup.can_shrink() { 1 } else { guest.model.borrow().len() / 512 };
            let len = rng.between(shortest, (setup.size * 3 / 2 / 512).max(shortest)) * 512;
            // Version 2 can't be resized while it has snapshots.
            if setup.version == 3 || setup.origin != crate::crash::setup::Origin::Snapshot {
                let mut crashes = Crashes {
                    setup,
                    world,
                    guest: &guest,
                    rng: rng.fork(),
                    steps: 60,
                    extent,
                    tally,
                    survivor: &mut survivor,
                };
                crashes.during(guest.resize(&workers[0], len))?;
            }
        }
        if setup.cache_size.is_some() || rng.chance(1, 2) {
            let len = guest.model.borrow().len();
            let op = guest.model.borrow_mut().begin(GuestRequest::Read);
            let disk =
                world.block_on(read_all(&workers[0], &guest.image, len)).map_err(|s| s.to_string())??;
            guest.model.borrow().check_read(op, 0, &disk).map_err(|v| format!("between phases: {v}"))?;
            guest.model.borrow_mut().end(op, zebu_sim::GuestResult::Done);
        }
    }
    world
        .block_on(guest.image.close(&workers[0]))
        .map_err(|s| s.to_string())?
        .map_err(|e| format!("close: {e}"))?;
    guest.model.borrow_mut().apply(GuestRequest::Flush);
    let files: Files = crate::crash::setup::NAMES
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), world.content(name)?)))
        .collect();
    let disk = judge(setup, &files, &guest.model.borrow(), Leaks::Allowed)
        .map_err(|e| format!("after close: {e}"))?;
    none_in_use(setup, &files)?;
    judge_bitmaps(setup, &files, &guest.bitmaps.borrow(), &disk).map_err(|e| format!("after close: {e}"))?;
    Ok(survivor)
}

/// Takes crash states while something runs.
struct Crashes<'a> {
    setup: &'a Setup,
    world: &'a SimWorld,
    guest: &'a Guest,
    rng: SimRng,
    /// Steps that the thing takes, about.
    steps: u64,
    extent: Extent,
    tally: &'a mut Tally,
    survivor: &'a mut Option<Survivor>,
}

impl Crashes<'_> {
    fn during<T>(&mut self, work: impl Future<Output = T>) -> std::result::Result<T, String> {
        let world = self.world;
        let ended = world.block_on_watched(work, |_| {
            if self.guest.violation.borrow().is_none() && self.rng.chance(self.extent.moments, self.steps) {
                self.crash();
            }
        });
        let value = ended.map_err(|stuck| stuck.to_string())?;
        match self.guest.violation.borrow_mut().take() {
            Some(violation) => Err(violation),
            None => Ok(value),
        }
    }

    fn crash(&mut self) {
        self.tally.moments += 1;
        let options = CrashOptions {
            max_states: self.extent.states,
            tear: if self.setup.direct == 4096 { Tear::Block } else { Tear::Sector },
            seed: self.rng.next_u64(),
        };
        for state in self.world.crash_states(&options) {
            self.tally.states += 1;
            if let Err(violation) = self.judge(&state) {
                self.guest.blame(format!("crash at {:?}, {state}: {violation}", self.world.now()));
                return;
            }
        }
    }

    fn judge(&mut self, state: &CrashState) -> std::result::Result<(), String> {
        let files: Files = state.files().to_vec();
        let model = self.guest.model.borrow();
        let disk = judge(self.setup, &files, &model, Leaks::Allowed)?;
        let bitmaps = self.guest.bitmaps.borrow();
        judge_bitmaps(self.setup, &files, &bitmaps, &disk)?;
        if self.extent.by_qemu > 0 && self.tally.states.is_multiple_of(self.extent.by_qemu) {
            self.tally.judged_by_qemu += 1;
            judge_by_qemu(&files, Leaks::Allowed)?;
        }
        if self.survivor.is_none() || self.rng.chance(1, 40) {
            *self.survivor = Some(Survivor { files, model: model.clone(), bitmaps: bitmaps.clone() });
        }
        Ok(())
    }
}
