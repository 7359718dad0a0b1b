//! A simulated world: its workers, and the scheduler that decides what happens next.

use crate::backend::add_worker;
use crate::core::{Core, Waiting};
use crate::log::LogKeep;
use crate::op::{OpInfo, OpNumber};
use crate::rng::SimRng;
use crate::sim_disk::SimDisk;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use zebu_storage::sabotage;
use zebu_storage::{CallingThread, Worker};

/// How a world is made.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Decides everything that is random. Equal seeds and equal programs give equal logs.
    pub seed: u64,
    /// The part of the log that is kept.
    pub keep_log: LogKeep,
    /// Of 1000 reads and writes of more than a sector, how many take effect in two parts at different times
    /// although nothing is wrong.
    pub splits: u32,
    /// Steps of one call after which the world counts as running in circles.
    pub max_steps: u64,
    /// Bytes of free buffers that each worker keeps.
    pub pool_bytes: usize,
}

impl SimConfig {
    /// The usual configuration with this seed.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, keep_log: LogKeep::All, splits: 100, max_steps: 10_000_000, pool_bytes: 1 << 20 }
    }
}

/// Times that time passes, with no operation or job and none to come, after which nothing counts as going to happen: tasks
/// that wait for others look at them now and then, without end.
pub(crate) const LOOKS_WHEN_IDLE: u32 = 2000;

/// The kind of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A worker ran its ready tasks.
    Ran,
    /// An operation took effect, in part or whole, or failed.
    Operation(OpNumber),
    /// Work that a task gave away ([`Worker::run_blocking`]) was done.
    Job,
    /// Nothing else could happen, and time passed until a timer or the end of a delay.
    Time,
    /// Nothing can happen, or nothing happens but that tasks look at the time.
    Idle,
}

/// Why a world does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StuckCause {
    /// Nothing can happen, and what was waited for has not come about.
    Deadlock,
    /// [`SimConfig::max_steps`] steps were made.
    StepLimit,
}

/// A world that does not go on: who waits for what.
#[derive(Debug, Clone)]
pub struct Stuck {
    /// Why.
    pub cause: StuckCause,
    /// Simulated time.
    pub now: Duration,
    /// Operations in flight.
    pub operations: Vec<(OpInfo, Waiting)>,
    /// For each worker, counted from 0: tasks that are not over.
    pub tasks: Vec<usize>,
    /// Workers that are paused.
    pub paused: Vec<usize>,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cause {
            StuckCause::Deadlock => write!(f, "deadlock at {:?}: nothing can happen any more", self.now)?,
            StuckCause::StepLimit => write!(f, "no end in sight at {:?}: too many steps", self.now)?,
        }
        for (worker, tasks) in self.tasks.iter().enumerate() {
            let paused = if self.paused.contains(&worker) { ", paused" } else { "" };
            write!(f, "\n  worker {worker}: {tasks} unfinished tasks{paused}")?;
        }
        for (info, waiting) in &self.operations {
            write!(f, "\n  {info}: ")?;
            match waiting {
                Waiting::Ready => f.write_str("ready")?,
                Waiting::Held(hold) => write!(f, "held by {hold:?}")?,
                Waiting::Until(time) => write!(f, "delayed until {time:?}")?,
            }
        }
        if self.operations.is_empty() {
            f.write_str(
                "\n  no operation in flight: the tasks wait for each other, or for a wake-up that got lost",
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for Stuck {}

/// Which of the ready operations goes first.
#[derive(Debug, Clone, Copy)]
enum Pick {
    Any,
    Oldest,
    Newest,
}

/// The temper of the scheduler, changed from time to time: a purely uniform choice would rarely starve anybody.
#[derive(Debug, Clone)]
struct Pace {
    steps_left: u64,
    worker_weight: u64,
    operation_weight: u64,
    pick: Pick,
    /// A worker that is not run while another can, if any.
    slow_worker: Option<usize>,
}

/// A future run by [`SimWorld::block_on`].
#[derive(Default)]
struct Root {
    woken: AtomicBool,
}

impl Wake for Root {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
    }
}

/// A thread that calls and waits, with a worker of the kind of [`CallingThread`]: it does operations where it begins them,
/// and goes on within its calls only. Meanwhile the rest of the world goes on. There is one in a world at most: a call within
/// a call could not wait for the outer one.
#[derive(Clone)]
pub struct SimCaller(Worker);

impl SimCaller {
    /// Does `work` to its end. To be called outside of the world's steps, or by a task of a worker that nothing else needs.
    ///
    /// # Panics
    /// It panicked, or waits for something that nobody brings.
    pub fn call<T>(&self, work: impl AsyncFnOnce(Worker) -> T) -> T {
        CallingThread::run_simulated(&self.0, work).expect("work that does not panic")
    }
}

/// A world of simulated files and workers, all on this thread, whose every step is chosen by a seed.
///
/// It dereferences to its [`SimDisk`]. Dropping it is a power failure: no task runs on, no operation takes effect.
/// Tasks must not hold it; they can hold a [`SimDisk`].
pub struct SimWorld {
    disk: SimDisk,
    workers: Rc<RefCell<Vec<Worker>>>,
    paused: RefCell<BTreeSet<usize>>,
    rng: RefCell<SimRng>,
    pace: RefCell<Pace>,
    max_steps: u64,
    steps: Cell<u64>,
    /// Times that time has passed since an operation or a job.
    looks: Cell<u32>,
}

impl Deref for SimWorld {
    type Target = SimDisk;
    fn deref(&self) -> &SimDisk {
        &self.disk
    }
}

impl SimWorld {
    /// A world of the usual configuration.
    pub fn new(seed: u64) -> Self {
        Self::with_config(&SimConfig::seeded(seed))
    }

    /// A world.
    pub fn with_config(config: &SimConfig) -> Self {
        let mut rng = SimRng::new(config.seed);
        let mut core = Core::new(rng.fork(), config.keep_log, config.splits);
        let workers = Rc::default();
        core.workers = Rc::downgrade(&workers);
        core.pool_bytes = config.pool_bytes;
        let pace =
            Pace { steps_left: 0, worker_weight: 1, operation_weight: 1, pick: Pick::Any, slow_worker: None };
        Self {
            disk: SimDisk { core: Rc::new(RefCell::new(core)) },
            workers,
            paused: RefCell::default(),
            rng: RefCell::new(rng),
            pace: RefCell::new(pace),
            max_steps: config.max_steps,
            steps: Cell::new(0),
            looks: Cell::new(0),
        }
    }

    /// The handle to the disk that tasks may keep.
    pub fn disk(&self) -> SimDisk {
        self.disk.clone()
    }

    /// Another worker. Reports count the workers from 0 in the order of their making.
    ///
    /// # Panics
    /// If the process has no file descriptor left.
    pub fn worker(&self) -> Worker {
        let rng = self.rng.borrow_mut().fork();
        add_worker(&self.disk.core, rng)
    }

    /// A thread that calls and waits.
    ///
    /// # Panics
    /// If the process has no file descriptor left.
    pub fn caller(&self) -> SimCaller {
        let worker = self.worker();
        self.disk.core.borrow_mut().callers.insert(worker.id());
        self.pause(worker.id());
        SimCaller(worker)
    }

    /// The worker of this number is not polled any more, whatever becomes ready, as if its thread were stopped.
    pub fn pause(&self, worker: usize) {
        self.looks.set(0);
        self.paused.borrow_mut().insert(worker);
    }

    /// Ends [`SimWorld::pause`].
    pub fn resume(&self, worker: usize) {
        self.looks.set(0);
        self.paused.borrow_mut().remove(&worker);
    }

    /// Steps made so far.
    pub fn steps(&self) -> u64 {
        self.steps.get()
    }

    /// Lets one thing happen, chosen by the seed.
    pub fn step(&self) -> Step {
        self.step_with(None).unwrap_or(Step::Ran)
    }

    /// Like `step`; `None` if the root is to be polled.
    fn step_with(&self, root: Option<&Root>) -> Option<Step> {
        self.steps.set(self.steps.get() + 1);
        let mut rng = self.rng.borrow_mut();
        let pace = self.current_pace(&mut rng);
        {
            let mut core = self.disk.core.borrow_mut();
            core.now += Duration::from_nanos(rng.between(100, 20_000));
        }
        let root_woken = root.is_some_and(|root| root.woken.load(Ordering::Acquire));
        let mut runnable = self.runnable();
        if (runnable.len() > 1 || root_woken)
            && let Some(slow) = pace.slow_worker
        {
            runnable.retain(|worker| *worker != slow);
        }
        let (operations, jobs) = {
            let core = self.disk.core.borrow();
            (core.ready(), core.jobs())
        };
        let runners = runnable.len() + usize::from(root_woken);
        let worker_weight = if runners > 0 { pace.worker_weight } else { 0 };
        let operation_weight = if operations.is_empty() { 0 } else { pace.operation_weight };
        let job_weight = u64::from(!jobs.is_empty());
        let total = worker_weight + operation_weight + job_weight;
        if total == 0 {
            drop(rng);
            return Some(self.pass_time());
        }
        let mut choice = rng.below(total);
        if choice < worker_weight {
            let chosen = rng.index(runners);
            drop(rng);
            let worker = runnable.get(chosen).map(|&index| self.workers.borrow()[index].clone())?;
            worker.poll();
            return Some(Step::Ran);
        }
        choice -= worker_weight;
        if choice < operation_weight {
            let op = match pace.pick {
                Pick::Any => *rng.pick(&operations),
                Pick::Oldest => operations[0],
                Pick::Newest => operations[operations.len() - 1],
            };
            self.looks.set(0);
            self.disk.core.borrow_mut().advance(op);
            return Some(Step::Operation(op));
        }
        let worker = *rng.pick(&jobs);
        drop(rng);
        let job = self.disk.core.borrow_mut().take_job(worker);
        if let Some(job) = job {
            job();
        }
        Some(Step::Job)
    }

    fn current_pace(&self, rng: &mut SimRng) -> Pace {
        let mut pace = self.pace.borrow_mut();
        if pace.steps_left == 0 {
            let weights = [(1, 1), (1, 1), (8, 1), (1, 8), (64, 1), (1, 64)];
            let (worker_weight, operation_weight) = *rng.pick(&weights);
            let workers = self.workers.borrow().len();
            *pace = Pace {
                steps_left: rng.between(8, 200),
                worker_weight,
                operation_weight,
                pick: *rng.pick(&[Pick::Any, Pick::Any, Pick::Any, Pick::Oldest, Pick::Newest]),
                slow_worker: (workers > 1 && rng.chance(1, 3)).then(|| rng.index(workers)),
            };
        }
        pace.steps_left -= 1;
        pace.clone()
    }

    /// Workers that have something to do.
    fn runnable(&self) -> Vec<usize> {
        let core = self.disk.core.borrow();
        let done: Vec<bool> = (0..self.workers.borrow().len()).map(|w| core.has_done(w)).collect();
        drop(core);
        let paused = self.paused.borrow();
        let workers = self.workers.borrow();
        workers
            .iter()
            .enumerate()
            .filter(|(index, worker)| {
                !paused.contains(index)
                    && (done[*index] || worker.has_ready() || worker.next_timer() == Some(Duration::ZERO))
            })
            .map(|(index, _)| index)
            .collect()
    }

    /// Nothing can happen now: lets time pass until something can.
    fn pass_time(&self) -> Step {
        let paused = self.paused.borrow();
        let timers = self.workers.borrow();
        let timer = timers
            .iter()
            .enumerate()
            .filter(|(index, _)| !paused.contains(index))
            .filter_map(|(_, worker)| worker.next_timer())
            .min();
        let mut core = self.disk.core.borrow_mut();
        let timer = timer.map(|left| core.now.saturating_add(left));
        let delay = core.next_delay();
        self.looks.set(if delay.is_some() { 0 } else { self.looks.get() + 1 });
        if self.looks.get() > LOOKS_WHEN_IDLE {
            self.looks.set(0);
            return Step::Idle;
        }
        match timer.into_iter().chain(delay).min() {
            Some(time) => {
                core.now = core.now.max(time);
                Step::Time
            }
            None => Step::Idle,
        }
    }

    /// Steps until `done` says so, asking before each step.
    ///
    /// # Errors
    /// If nothing can happen any more before that.
    pub fn run_until(&self, mut done: impl FnMut() -> bool) -> Result<(), Stuck> {
        for _ in 0..self.max_steps {
            if done() {
                return Ok(());
            }
            if self.step() == Step::Idle {
                return if done() { Ok(()) } else { Err(self.stuck(StuckCause::Deadlock)) };
            }
        }
        Err(self.stuck(StuckCause::StepLimit))
    }

    /// Steps until nothing can happen any more. Operations that are held and tasks that wait for them stay.
    ///
    /// # Errors
    /// If that does not come about.
    pub fn run_until_idle(&self) -> Result<(), Stuck> {
        for _ in 0..self.max_steps {
            if self.step() == Step::Idle {
                return Ok(());
            }
        }
        Err(self.stuck(StuckCause::StepLimit))
    }

    /// Runs everything until `future` is done.
    ///
    /// # Errors
    /// If nothing can happen any more before that.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> Result<T, Stuck> {
        self.block_on_watched(future, |_| {})
    }

    /// Like [`SimWorld::block_on`], and calls `watch` after every step: there a test looks at crash states, checks
    /// invariants, holds and releases.
    ///
    /// # Errors
    /// If nothing can happen any more before the future is done.
    pub fn block_on_watched<T>(
        &self,
        future: impl Future<Output = T>,
        mut watch: impl FnMut(Step),
    ) -> Result<T, Stuck> {
        let mut future = std::pin::pin!(future);
        let root = Arc::new(Root { woken: AtomicBool::new(true) });
        let waker = Waker::from(Arc::clone(&root));
        for _ in 0..self.max_steps {
            match self.step_with(Some(&root)) {
                None => {
                    root.woken.store(false, Ordering::Release);
                    if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                        return Ok(value);
                    }
                    // What the root submitted lies in its worker's queue until the worker's next turn ends.
                    self.submit_all();
                    watch(Step::Ran);
                }
                Some(Step::Idle) => return Err(self.stuck(StuckCause::Deadlock)),
                Some(step) => watch(step),
            }
        }
        Err(self.stuck(StuckCause::StepLimit))
    }

    /// Workers made so far, those that work for others included.
    pub fn workers(&self) -> usize {
        self.workers.borrow().len()
    }

    /// Whether a worker has something to do: for a scheduler of the caller's own.
    pub fn can_run(&self, worker: usize) -> bool {
        let Some(found) = self.workers.borrow().get(worker).cloned() else { return false };
        let is_awake = self.disk.core.borrow().has_done(worker)
            || found.has_ready()
            || found.next_timer() == Some(Duration::ZERO);
        is_awake && !self.paused.borrow().contains(&worker)
    }

    /// Polls a worker once. Nothing of the world is held meanwhile: others may do what they like in between, but not
    /// poll the same worker.
    pub fn run_worker(&self, worker: usize) {
        let found = self.workers.borrow().get(worker).cloned();
        if let Some(worker) = found {
            worker.poll();
        }
    }

    /// Whether an operation can take effect, or work that a task gave away can be done.
    pub fn can_operate(&self) -> bool {
        self.disk.core.borrow().can_operate()
    }

    /// Lets one operation take effect, or does work that a task gave away, chosen by the seed; where there is neither, and
    /// no worker can run, lets time pass.
    pub fn operate(&self) -> Step {
        let (operations, jobs) = {
            let mut core = self.disk.core.borrow_mut();
            core.now += Duration::from_nanos(self.rng.borrow_mut().between(100, 20_000));
            (core.ready(), core.jobs())
        };
        let total = operations.len() + jobs.len();
        if total == 0 {
            return if self.runnable().is_empty() { self.pass_time() } else { Step::Ran };
        }
        let chosen = self.rng.borrow_mut().index(total);
        if let Some(op) = operations.get(chosen) {
            self.looks.set(0);
            self.disk.core.borrow_mut().advance(*op);
            return Step::Operation(*op);
        }
        let job = self.disk.core.borrow_mut().take_job(jobs[chosen - operations.len()]);
        if let Some(job) = job {
            job();
        }
        Step::Job
    }

    /// Lets time pass although something else could happen: whoever waits with patience may find it over.
    pub fn leap(&self, time: Duration) {
        self.disk.core.borrow_mut().now += time;
    }

    /// The waiting tasks and operations, if nothing can happen any more.
    pub fn deadlock(&self) -> Stuck {
        self.stuck(StuckCause::Deadlock)
    }

    fn submit_all(&self) {
        let workers: Vec<Worker> = self.workers.borrow().clone();
        for worker in workers {
            worker.submit_queued();
        }
    }

    fn stuck(&self, cause: StuckCause) -> Stuck {
        Stuck {
            cause,
            now: self.disk.now(),
            operations: self.disk.pending(),
            tasks: self.workers.borrow().iter().map(Worker::live_tasks).collect(),
            paused: self.paused.borrow().iter().copied().collect(),
        }
    }

    /// The process of all workers made so far is killed: its tasks are dropped where they stand. Its operations in flight are with
    /// the disk, and each takes effect some time within `longest`, whoever has the files by then. New workers are another
    /// process. What the tasks shared must live until the power is off: the drop of an image waits for its work.
    pub fn kill(&self, longest: Duration) {
        let workers: Vec<Worker> = self.workers.borrow().clone();
        self.disk.core.borrow_mut().kill(longest);
        for worker in &workers {
            worker.cancel_tasks();
            self.pause(worker.id());
        }
    }

    /// Waits for the locks of the files as an opener does: they stay until the last request of a killed process has ended.
    ///
    /// # Errors
    /// If that does not come about.
    pub fn wait_for_locks(&self) -> Result<(), Stuck> {
        if sabotage::is(sabotage::Fault::LockWithProcess) {
            return Ok(());
        }
        self.run_until(|| !self.disk.core.borrow().has_left())
    }

    /// The power fails: tasks are dropped where they stand, operations in flight take no effect, later ones fail
    /// with `EBADF`. Take the crash states before.
    pub fn power_off(&self) {
        let workers: Vec<Worker> = self.workers.borrow().clone();
        self.disk.core.borrow_mut().power_off();
        for worker in &workers {
            worker.cancel_tasks();
        }
        // Destructors of tasks may have submitted more.
        self.disk.core.borrow_mut().power_off();
        for worker in &workers {
            worker.poll();
        }
    }
}

impl Drop for SimWorld {
    fn drop(&mut self) {
        self.power_off();
    }
}
