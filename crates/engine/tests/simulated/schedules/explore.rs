//! Which schedules are tried, and what is told of one that fails.

use crate::schedules::stage;
use shuttle::scheduler::{
    DataSource, PctScheduler, RandomDataSource, RandomScheduler, ReplayScheduler, Schedule, Scheduler, Task,
    TaskId,
};
use shuttle::{Config, Runner};
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use zebu_sim::SimRng;

/// How many switches at the wrong places PCT looks for.
const DEPTHS: [usize; 2] = [3, 5];
/// Bytes of a coroutine's stack.
const STACK: usize = 256 << 10;

/// Leaves out threads that have nothing to do, and chooses nothing while nobody acts on a stage: what is made before and
/// judged afterwards costs the scheduler none of its decisions.
struct Attentive<S>(S);

impl<S: Scheduler> Scheduler for Attentive<S> {
    fn new_execution(&mut self) -> Option<Schedule> {
        stage::close();
        self.0.new_execution()
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        _is_yielding: bool,
    ) -> Option<TaskId> {
        let Some(stage) = stage::current() else {
            let same = runnable.iter().find(|task| Some(task.id()) == current);
            return same.or(runnable.first()).map(|task| task.id());
        };
        let able = stage.able(runnable.iter().map(|task| usize::from(task.id())));
        let chosen: Vec<&Task> =
            runnable.iter().copied().filter(|task| able.contains(&usize::from(task.id()))).collect();
        if chosen.is_empty() {
            return runnable.first().map(|task| task.id());
        }
        // A thread that rests is left out by itself, so no yield has to be heeded.
        self.0.next_task(&chosen, current, false)
    }

    fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }
}

/// Chooses at random, but puts a thread to sleep now and then, wherever it is, while the others do a great deal: what is
/// right only if nothing runs in between is wrong then.
struct Drowsy {
    left: usize,
    data: RandomDataSource,
    rng: SimRng,
    step: u64,
    /// The sleeping task, and until which step.
    asleep: Option<(TaskId, u64)>,
    /// Of so many steps, at one somebody falls asleep.
    rarity: u64,
    /// Of 16 choices, those that let the same thread go on if it can.
    steadiness: u64,
}

impl Drowsy {
    fn new(seed: u64, executions: usize) -> Self {
        Self {
            left: executions,
            data: RandomDataSource::initialize(seed),
            rng: SimRng::new(seed),
            step: 0,
            asleep: None,
            rarity: 1,
            steadiness: 0,
        }
    }
}

impl Scheduler for Drowsy {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.left = self.left.checked_sub(1)?;
        let seed = self.data.reinitialize();
        self.rng = SimRng::new(seed);
        (self.step, self.asleep) = (0, None);
        self.rarity = *self.rng.pick(&[30, 100, 300]);
        self.steadiness = *self.rng.pick(&[0, 8, 14]);
        Some(Schedule::new(seed))
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, _: bool) -> Option<TaskId> {
        self.step += 1;
        let current = current.filter(|id| runnable.iter().any(|task| task.id() == *id));
        self.asleep = self.asleep.filter(|(_, until)| *until > self.step);
        if self.asleep.is_none()
            && let Some(current) = current
            && self.rng.chance(1, self.rarity)
        {
            self.asleep = Some((current, self.step + self.rng.between(20, 2000)));
        }
        let sleeper = self.asleep.map(|(id, _)| id);
        if let Some(current) = current.filter(|id| Some(*id) != sleeper)
            && self.rng.chance(self.steadiness, 16)
        {
            return Some(current);
        }
        let awake: Vec<TaskId> =
            runnable.iter().map(|task| task.id()).filter(|id| Some(*id) != sleeper).collect();
        if awake.is_empty() {
            // Nobody else can do anything: it is woken.
            self.asleep = None;
            return sleeper;
        }
        Some(*self.rng.pick(&awake))
    }

    fn next_u64(&mut self) -> u64 {
        self.data.next_u64()
    }
}

/// The number that all choices follow from: `ZEBU_SCHEDULE_SEED`, or another in each run.
fn first_seed() -> u64 {
    let seed = std::env::var("ZEBU_SCHEDULE_SEED").ok().and_then(|text| text.parse().ok());
    seed.unwrap_or_else(|| RandomState::new().hash_one(std::process::id()))
}

/// Executions of a pair, or of a scenario: `ZEBU_SCHEDULES`.
pub(crate) fn executions() -> usize {
    std::env::var("ZEBU_SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = STACK;
    config.silence_warnings = true;
    config.max_steps = shuttle::MaxSteps::None;
    config
}

fn run(scheduler: impl Scheduler + 'static, work: impl Fn() + Send + Sync + 'static) {
    Runner::new(Attentive(scheduler), config()).run(work);
}

/// Runs `work` once, where it may use the engine; nothing is chosen.
pub(crate) fn once(work: impl Fn() + Send + Sync + 'static) {
    run(RandomScheduler::new_from_seed(0, 1), work);
}

/// Says how the schedule that was just printed is repeated: variables that choose what ran, and the test.
pub(crate) fn tell_how_to_repeat(chosen: &str, test: &str) {
    eprintln!(
        "to repeat it: {chosen} ZEBU_REPLAY=SCHEDULE RUSTFLAGS='--cfg shuttle' cargo test \
         --target-dir target/interleave -p zebu-engine --test simulated schedules::{test}"
    );
}

/// Runs `scenario` under so many schedules: a quarter of them random, a quarter with threads that fall asleep, the others
/// PCT's.
pub(crate) fn explore(schedules: usize, scenario: impl Fn() + Send + Sync + Clone + 'static) {
    explore_from(first_seed(), schedules, scenario);
}

/// As [`explore`], with choices that follow from `seed`.
fn explore_from(seed: u64, schedules: usize, scenario: impl Fn() + Send + Sync + Clone + 'static) {
    if let Some(schedule) = std::env::var_os("ZEBU_REPLAY") {
        // No schedule has a slash in it.
        let is_file = schedule.as_encoded_bytes().contains(&b'/');
        let text = if is_file {
            std::fs::read_to_string(&schedule).expect("ZEBU_REPLAY names a file that can't be read")
        } else {
            schedule.into_string().unwrap()
        };
        let mut replay = ReplayScheduler::new_from_encoded(text.trim());
        replay.set_allow_incomplete();
        Runner::new(replay, config()).run(scenario);
        return;
    }
    let quarter = schedules / 4;
    run(RandomScheduler::new_from_seed(seed, schedules - quarter * 3), scenario.clone());
    if quarter > 0 {
        run(Drowsy::new(seed, quarter), scenario.clone());
        for depth in DEPTHS {
            run(PctScheduler::new_from_seed(seed, depth, quarter), scenario.clone());
        }
    }
}

/// How many schedules of `scenario` were tried, at most so many, until one failed; a part of each kind in turns.
pub(crate) fn first_failure(
    most: usize,
    scenario: impl Fn() + Send + Sync + Clone + 'static,
) -> Option<(usize, String)> {
    const AT_ONCE: usize = 800;
    let mut tried = 0;
    let mut seed = first_seed();
    while tried < most {
        let count = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let (counted, scenario) = (count.clone(), scenario.clone());
        let failed = catch_unwind(AssertUnwindSafe(|| {
            explore_from(seed, AT_ONCE, move || {
                counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                scenario();
            });
        }));
        seed = seed.wrapping_add(1);
        tried += count.load(std::sync::atomic::Ordering::Relaxed);
        if let Err(panic) = failed {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or(panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            return Some((tried, text.unwrap_or_default()));
        }
    }
    None
}
