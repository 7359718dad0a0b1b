//! An image on a disk that can be made to fail, and the guest that uses it.

use crate::crash::guest::{Failures, Guest};
use crate::crash::judge::{Leaks, judge, read_all};
use crate::crash::setup::{Files, Setup};
use futures_util::future::{join, join_all};
use std::cell::RefCell;
use std::rc::Rc;
use zebu_engine::storage::Worker;
use zebu_sim::{CrashOptions, GuestRequest, GuestResult, SimRng, SimWorld, Tally, Tear};

/// The result of work on a worker, once there is one.
pub(crate) type Outcome<T> = Rc<RefCell<Option<T>>>;

/// Begins work on a worker.
pub(crate) fn begin<T: 'static>(worker: &Worker, work: impl Future<Output = T> + 'static) -> Outcome<T> {
    let outcome = Outcome::default();
    let theirs = outcome.clone();
    drop(worker.spawn(async move { *theirs.borrow_mut() = Some(work.await) }));
    outcome
}

/// A world with one image, and the requests to it.
pub(crate) struct Bench {
    pub(crate) setup: Setup,
    pub(crate) world: SimWorld,
    pub(crate) workers: Vec<Worker>,
    pub(crate) guest: Rc<Guest>,
}

impl Bench {
    /// The result of work, which must end.
    pub(crate) fn end<T>(&self, outcome: &Outcome<T>, what: &str) -> T {
        let ended = self.world.run_until(|| outcome.borrow().is_some());
        assert!(ended.is_ok(), "{what}: {}", ended.unwrap_err());
        outcome.borrow_mut().take().expect("it has ended")
    }

    pub(crate) fn new(setup: &Setup, seed: u64) -> Self {
        Self::with_files(setup, &setup.make(seed), seed)
    }

    pub(crate) fn with_files(setup: &Setup, files: &Files, seed: u64) -> Self {
        let world = setup.world(files, seed);
        let workers = setup.make_workers(&world);
        let image = setup.open(&world, &workers[0]).unwrap();
        let guest = Rc::new(Guest::new(image, setup.model(), setup));
        Self { setup: setup.clone(), world, workers, guest }
    }

    /// Has what is done from now on be counted there.
    pub(crate) fn count_in(&self, tally: &Tally) {
        self.world.count_in(tally);
        self.guest.model.borrow_mut().count_in(tally);
    }

    /// Several streams of requests at once; some crash states on the way.
    pub(crate) fn streams(
        &self,
        rng: &mut SimRng,
        streams: u64,
        requests: u64,
        failures: Failures,
    ) -> Result<(), String> {
        self.guest.failures.set(failures);
        self.streams_beside(rng, streams, requests, async {})
    }

    /// The same beside `other`, which ends as well.
    pub(crate) fn streams_beside(
        &self,
        rng: &mut SimRng,
        streams: u64,
        requests: u64,
        other: impl Future<Output = ()>,
    ) -> Result<(), String> {
        let running: Vec<_> = (0..streams)
            .map(|i| {
                let worker = &self.workers[i as usize % self.workers.len()];
                worker.spawn(self.guest.clone().stream(worker.clone(), rng.fork(), requests))
            })
            .collect();
        let mut when = rng.fork();
        let all = join(join_all(running), other);
        let ended = self.world.block_on_watched(all, |_| {
            if self.guest.violation.borrow().is_none()
                && when.chance(1, streams * requests * 12)
                && let Err(violation) = self.crash_states(when.next_u64(), 4)
            {
                self.guest.blame(violation);
            }
        });
        ended.map_err(|stuck| stuck.to_string())?;
        self.guest.violation.borrow_mut().take().map_or(Ok(()), Err)
    }

    /// Whatever a power failure may leave now holds what was flushed.
    pub(crate) fn crash_states(&self, seed: u64, states: usize) -> Result<(), String> {
        let tear = if self.setup.direct == 4096 { Tear::Block } else { Tear::Sector };
        for state in self.world.crash_states(&CrashOptions { max_states: states, tear, seed }) {
            let files = state.files().to_vec();
            judge(&self.setup, &files, &self.guest.model.borrow(), Leaks::Allowed)
                .map_err(|violation| format!("crash at {:?}, {state}: {violation}", self.world.now()))?;
        }
        Ok(())
    }

    /// The whole disk reads as it may.
    pub(crate) fn read_whole(&self) -> Result<(), String> {
        let len = self.guest.model.borrow().len().min(self.guest.image.virtual_size());
        let op = self.guest.model.borrow_mut().begin(GuestRequest::Read);
        let read = read_all(&self.workers[0], &self.guest.image, len);
        let disk = self.world.block_on(read).map_err(|stuck| stuck.to_string())??;
        self.guest.model.borrow().check_read(op, 0, &disk).map_err(|v| format!("read of the whole: {v}"))?;
        self.guest.model.borrow_mut().end(op, GuestResult::Done);
        Ok(())
    }

    pub(crate) fn flush(&self) -> zebu_engine::Result<()> {
        let op = self.guest.model.borrow_mut().begin(GuestRequest::Flush);
        let result = self.world.block_on(self.guest.image.flush(&self.workers[0])).unwrap();
        let ended = if result.is_ok() { GuestResult::Done } else { GuestResult::Failed };
        self.guest.model.borrow_mut().end(op, ended);
        result
    }

    /// Closes the image; what is left of it is sound.
    pub(crate) fn close(self) -> Result<(), String> {
        self.world
            .block_on(self.guest.image.close(&self.workers[0]))
            .map_err(|stuck| stuck.to_string())?
            .map_err(|e| format!("close: {e}"))?;
        self.guest.model.borrow_mut().apply(GuestRequest::Flush);
        judge(&self.setup, &self.files(), &self.guest.model.borrow(), Leaks::Allowed)
            .map(drop)
            .map_err(|e| format!("after close: {e}"))
    }

    /// The content of the files now.
    pub(crate) fn files(&self) -> Files {
        crate::crash::setup::NAMES
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), self.world.content(name)?)))
            .collect()
    }
}
