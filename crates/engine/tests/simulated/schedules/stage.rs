//! The workers of one world as threads that shuttle schedules, and the disk as one more.
//!
//! All of them are coroutines of one thread of the system, so what is not `Send` may be shared; but what a coroutine
//! borrows of it while the engine runs would still be borrowed when another one goes on. Each worker is polled by one
//! coroutine only.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::{Rc, Weak};
use std::time::Duration;
use zebu_sim::{SimRng, SimWorld, Step};

/// Scheduling decisions after which an execution counts as running in circles.
const MOST_STEPS: u64 = 200_000;

/// The role of a coroutine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Polls the worker of this number.
    Worker(usize),
    /// Lets operations take effect, and time pass when nothing else can happen.
    Disk,
}

/// A worker that is to be polled no more, as if its thread did something else.
#[derive(Debug, Clone, Copy)]
struct Halt {
    worker: usize,
    /// Polls until then.
    polls: u64,
}

/// Time that passes at once: longer than a request waits for another's load of a slice.
const LEAP: Duration = Duration::from_millis(1001);

/// Moments at which time leaps, as on a machine that stalls.
struct Leaps {
    left: u32,
    rng: SimRng,
}

impl Leaps {
    fn is_due(&mut self) -> bool {
        let is_due = self.left > 0 && self.rng.chance(1, 12);
        self.left -= u32::from(is_due);
        is_due
    }
}

/// A world on which coroutines act.
pub(crate) struct Stage {
    pub(crate) world: SimWorld,
    /// By the number of shuttle's task: what a task that rests waits to do.
    resting: RefCell<Vec<Option<Role>>>,
    /// The workers whose stream of requests has not ended.
    streams: RefCell<BTreeSet<usize>>,
    /// The worker that stands still: nobody may have to wait for it.
    halted: Cell<Option<usize>>,
    halt: Cell<Option<Halt>>,
    is_over: Cell<bool>,
    failure: RefCell<Option<String>>,
    steps: Cell<u64>,
    leaps: RefCell<Option<Leaps>>,
    /// Called after each operation of the disk.
    watch: RefCell<Option<Box<dyn FnMut(&SimWorld)>>>,
}

thread_local! {
    static CURRENT: RefCell<Weak<Stage>> = const { RefCell::new(Weak::new()) };
}

/// The stage on which coroutines act now.
pub(crate) fn current() -> Option<Rc<Stage>> {
    CURRENT.with_borrow(Weak::upgrade)
}

/// Nobody acts on any stage of this thread.
pub(crate) fn close() {
    CURRENT.set(Weak::new());
}

impl Stage {
    pub(crate) fn new(world: SimWorld) -> Rc<Self> {
        Rc::new(Self {
            world,
            resting: RefCell::default(),
            streams: RefCell::default(),
            halted: Cell::new(None),
            halt: Cell::new(None),
            is_over: Cell::new(false),
            failure: RefCell::default(),
            steps: Cell::new(0),
            leaps: RefCell::default(),
            watch: RefCell::default(),
        })
    }

    pub(crate) fn watch(&self, watch: impl FnMut(&SimWorld) + 'static) {
        *self.watch.borrow_mut() = Some(Box::new(watch));
    }

    /// Lets time leap now and then while others are in the middle of something, so often at most.
    pub(crate) fn leap(&self, most: u32, rng: SimRng) {
        *self.leaps.borrow_mut() = Some(Leaps { left: most, rng });
    }

    pub(crate) fn blame(&self, what: String) {
        self.failure.borrow_mut().get_or_insert(what);
        self.is_over.set(true);
    }

    /// A stream of requests begins on a worker, and has to end.
    pub(crate) fn stream_begins(&self, worker: usize) {
        self.streams.borrow_mut().insert(worker);
    }

    pub(crate) fn stream_ends(&self, worker: usize) {
        self.streams.borrow_mut().remove(&worker);
    }

    /// The worker's thread will do something else after so many polls more. Its stream need not end before it comes back.
    pub(crate) fn halt_after(&self, worker: usize, polls: u64) {
        self.halt.set(Some(Halt { worker, polls }));
    }

    /// Lets shuttle's threads act until all streams have ended and nothing can happen any more. `background`: workers that
    /// may be made meanwhile.
    pub(crate) fn act(self: &Rc<Self>, background: usize) -> Result<(), String> {
        let workers = self.world.workers() + background;
        let roles = (0..workers).map(Role::Worker).chain([Role::Disk]);
        CURRENT.set(Rc::downgrade(self));
        let threads: Vec<_> =
            roles.map(|role| shuttle::future::spawn_local(self.clone().take_part(role))).collect();
        for thread in threads {
            drop(shuttle::future::block_on(thread));
        }
        close();
        if self.world.workers() > workers && self.failure.borrow().is_none() {
            self.blame("more workers were made than anybody drives".to_owned());
        }
        self.failure.borrow_mut().take().map_or(Ok(()), Err)
    }

    async fn take_part(self: Rc<Self>, role: Role) {
        let me = usize::from(shuttle::current::me());
        loop {
            self.rest(me, role);
            if self.is_over.get() {
                return;
            }
            let acted = catch_unwind(AssertUnwindSafe(|| match role {
                Role::Worker(worker) => self.run_worker(worker),
                Role::Disk => self.operate(),
            }));
            if let Err(panic) = acted {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("of another type");
                self.blame(format!("{role:?} panicked: {text}"));
            }
        }
    }

    /// Leaves it to the scheduler when there is something to do.
    fn rest(&self, me: usize, role: Role) {
        {
            let mut resting = self.resting.borrow_mut();
            if resting.len() <= me {
                resting.resize(me + 1, None);
            }
            resting[me] = Some(role);
        }
        shuttle::thread::yield_now();
        self.resting.borrow_mut()[me] = None;
    }

    fn run_worker(&self, worker: usize) {
        self.world.run_worker(worker);
        match self.halt.get() {
            Some(halt) if halt.worker == worker && halt.polls == 0 => {
                self.halt.set(None);
                self.halted.set(Some(worker));
                self.world.pause(worker);
            }
            Some(halt) if halt.worker == worker => {
                self.halt.set(Some(Halt { polls: halt.polls - 1, ..halt }));
            }
            _ => {}
        }
    }

    fn operate(&self) {
        if !self.world.can_operate() && self.has_ended() {
            return;
        }
        if self.leaps.borrow_mut().as_mut().is_some_and(Leaps::is_due) {
            self.world.leap(LEAP);
            return;
        }
        match self.world.operate() {
            Step::Idle => {
                let deadlock = self.world.deadlock();
                self.blame(format!("{:?} have not ended: {deadlock}", self.streams.borrow()));
            }
            Step::Operation(_) => {
                if let Some(watch) = &mut *self.watch.borrow_mut() {
                    watch(&self.world);
                }
            }
            Step::Job | Step::Time | Step::Ran => {}
        }
    }

    /// Nothing but time could go on: whether all is done that has to be.
    fn has_ended(&self) -> bool {
        let halted = self.halted.get();
        if self.streams.borrow().iter().any(|worker| Some(*worker) != halted) {
            return false;
        }
        if let Some(worker) = halted {
            self.halted.set(None);
            self.world.resume(worker);
            return true;
        }
        self.is_over.set(true);
        true
    }

    /// Whether a task may be scheduled: it is in the middle of something, or has something to do.
    fn is_able(&self, task: usize) -> bool {
        match self.resting.borrow().get(task).copied().flatten() {
            None => true,
            Some(_) if self.is_over.get() => true,
            Some(Role::Worker(worker)) => self.world.can_run(worker),
            Some(Role::Disk) => self.world.can_operate(),
        }
    }

    /// The tasks among which the schedule chooses.
    pub(crate) fn able(&self, tasks: impl Iterator<Item = usize> + Clone) -> Vec<usize> {
        let steps = self.steps.get() + 1;
        self.steps.set(steps);
        assert!(steps < MOST_STEPS, "no end in sight: somebody goes round in circles");
        let able: Vec<usize> = tasks.clone().filter(|task| self.is_able(*task)).collect();
        if !able.is_empty() {
            return able;
        }
        // Time passes, or it is the end.
        let resting = self.resting.borrow();
        tasks.filter(|task| resting.get(*task).copied().flatten() == Some(Role::Disk)).collect()
    }
}
