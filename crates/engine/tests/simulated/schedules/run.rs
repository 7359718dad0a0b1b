//! One execution: threads act, and what they see, what crashes would have left, and what is left at the end is judged.

use crate::crash::guest::{Failures, Guest, Request};
use crate::crash::setup::{Files, NAMES, Setup, TOP};
use crate::schedules::beside;
use crate::schedules::ground::{Ground, files};
use crate::schedules::plan::{Op, Plan};
use crate::schedules::snapshots::{self, Snapshots};
use crate::schedules::stage::Stage;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use zebu_engine::check::{CheckOptions, check_file};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Image, OpenOptions};
use zebu_sim::{
    CrashOptions, FailedEffect, Fault, FaultPlan, FaultRule, GuestModel, GuestRequest, GuestResult, OpClass,
    OpFilter, SimFileConfig, SimRng, SimWorld, Tear,
};
use zebu_storage::commit_steps;
use zebu_storage::sabotage::{self, Limit};

/// Crash states judged in one execution at most.
const MOST_CRASHES: usize = 4;

/// Leaps of time in one execution at most: far less than what counts as standing still.
const MOST_LEAPS: u32 = 6;

/// A state that a crash may leave, and what may be in it.
struct Crash {
    name: String,
    files: Files,
    model: GuestModel,
    snapshots: Snapshots,
}

/// State that the threads of one execution share.
struct Company {
    stage: Rc<Stage>,
    guest: Guest,
    snapshots: RefCell<Snapshots>,
    crashes: RefCell<Vec<Crash>>,
    rng: RefCell<SimRng>,
    /// Streams that have requests before them other than a close.
    working: Cell<usize>,
    closing: RefCell<Vec<Waker>>,
    /// Bytes of the image's file when a close returned.
    at_close: RefCell<Option<Vec<u8>>>,
    /// Whether what is left at the end may hold space that nobody uses.
    leaks: Cell<Leaks>,
    old: Option<&'static str>,
    cluster: u64,
    /// Operations that the threads have under way.
    under_way: Rc<RefCell<Vec<&'static str>>>,
}

/// Runs a plan.
///
/// # Panics
/// If anything is not as it must be.
pub(crate) fn run(ground: &Ground, plan: &Plan) {
    let judged = execute(ground, plan);
    if let Err(violation) = judged {
        panic!("{violation}\non the image \"{}\"; {plan}", ground.name);
    }
}

fn execute(ground: &Ground, plan: &Plan) -> Result<(), String> {
    sabotage::limit(Limit::WindowBytes, plan.window);
    plan.limits.set();
    let setup = &ground.setup;
    let mut rng = SimRng::new(plan.seed);
    let world = setup.world(&files(ground), rng.next_u64());
    let workers: Vec<Worker> = plan.threads.iter().map(|_| world.worker()).collect();
    // Some commits run on the worker that asks for them, others on the image's own.
    if let [_, ops, ..] = plan.threads.as_slice()
        && plan.seed.is_multiple_of(2)
        && !ops.iter().any(|op| op.leaves())
    {
        workers[1].promise_to_drive();
    }
    let image = setup.open(&world, &workers[0])?;
    let guest = Guest::new(image, ground.model(), setup);
    if plan.resizes() {
        guest.failures.set(Failures::PastTheEnd);
    }
    let mut old = Snapshots::default();
    if let Some(name) = ground.snapshot() {
        old.add_old(name, setup.pattern, setup.size);
    }
    let stage = Stage::new(world);
    let company = Rc::new(Company {
        stage: stage.clone(),
        guest,
        snapshots: RefCell::new(old),
        crashes: RefCell::default(),
        rng: RefCell::new(rng.fork()),
        working: Cell::new(plan.threads.len()),
        closing: RefCell::default(),
        at_close: RefCell::default(),
        leaks: Cell::new(Leaks::Forbidden),
        old: ground.snapshot(),
        cluster: setup.cluster_size,
        under_way: Rc::default(),
    });
    if plan.seed.is_multiple_of(3) {
        stage.leap(MOST_LEAPS, rng.fork());
    }
    let under_way = company.under_way.clone();
    commit_steps::observe(Some(Box::new(move |step| beside::note(step, &under_way.borrow()))));
    for (ops, worker) in plan.threads.iter().zip(&workers) {
        stage.stream_begins(worker.id());
        drop(worker.spawn(company.clone().stream(worker.clone(), ops.clone())));
    }
    let watching = Rc::downgrade(&company);
    let mut moments = rng.fork();
    stage.watch(move |world| {
        if let Some(company) = watching.upgrade()
            && moments.chance(1, 40)
        {
            company.take_crash(world, 1);
        }
    });
    let acted = stage.act(1);
    commit_steps::observe(None);
    let acted = acted.and_then(|()| company.end(setup, &workers[0]));
    if acted.is_err() {
        // Whatever the engine was in the middle of stays there.
        std::mem::forget((company, stage, workers));
    }
    acted
}

impl Company {
    async fn stream(self: Rc<Self>, worker: Worker, ops: Vec<Op>) {
        let mut has_worked = false;
        for op in ops {
            if self.guest.violation.borrow().is_some() {
                break;
            }
            if op == Op::Close {
                has_worked = true;
                self.work_is_over();
                self.all_work_is_over().await;
            }
            let name = op.name();
            self.under_way.borrow_mut().push(name);
            self.perform(&worker, op).await;
            let mut under_way = self.under_way.borrow_mut();
            if let Some(at) = under_way.iter().position(|other| *other == name) {
                under_way.swap_remove(at);
            }
            drop(under_way);
            if let Some(violation) = self.guest.violation.borrow().clone() {
                self.stage.blame(violation);
            }
        }
        if !has_worked {
            self.work_is_over();
        }
        self.stage.stream_ends(worker.id());
    }

    fn work_is_over(&self) {
        self.working.set(self.working.get() - 1);
        if self.working.get() == 0 {
            self.closing.take().into_iter().for_each(Waker::wake);
        }
    }

    async fn all_work_is_over(&self) {
        poll_fn(|cx| {
            if self.working.get() == 0 {
                return Poll::Ready(());
            }
            self.closing.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    async fn perform(&self, worker: &Worker, op: Op) {
        let guest = &self.guest;
        match op {
            Op::Guest(Request::Flush) => self.flush(worker).await,
            Op::Guest(request) => guest.perform(worker, request).await,
            Op::TakeSnapshot(name) => {
                snapshots::take(guest, &self.snapshots, worker, &name).await;
                self.take_crash(&self.stage.world, 1);
            }
            Op::DeleteSnapshot => {
                snapshots::delete(guest, &self.snapshots, worker, self.old.unwrap_or_default()).await;
            }
            Op::Resize(len) => guest.resize(worker, len).await,
            Op::Cache(above) => {
                let bytes = guest.image.min_cache_size() + above;
                // What has to be held may have grown since.
                let _ = guest.image.set_cache_size(bytes);
            }
            Op::Extent(offset) => {
                let len = self.cluster.min(guest.model.borrow().len().saturating_sub(offset));
                if len > 0
                    && let Err(error) = guest.image.extent(worker, offset, len).await
                {
                    guest.note_failure(&error);
                }
            }
            Op::Close | Op::CloseBeside => {
                let flush = guest.model.borrow_mut().begin(GuestRequest::Flush);
                match guest.image.close(worker).await {
                    Ok(()) => guest.model.borrow_mut().end(flush, GuestResult::Done),
                    Err(error) => guest.blame(format!("close: {error}")),
                }
                *self.at_close.borrow_mut() = Some(bytes_of(&self.stage.world));
                self.take_crash(&self.stage.world, 1);
            }
            Op::CloseThatFails => {
                guest.failures.set(Failures::OfTheDisk);
                // The image's own worker is the last that started.
                let own = self.stage.world.workers() - 1;
                let write = OpFilter::of(OpClass::Write).on_file(TOP).by_worker(own);
                let failure = Fault::Fail { errno: Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
                self.stage.world.set_faults(FaultPlan::none().with(FaultRule::new(write, failure).nth(0)));
                let flush = guest.model.borrow_mut().begin(GuestRequest::Flush);
                let closed = guest.image.close(worker).await;
                let ended = if closed.is_ok() { GuestResult::Done } else { GuestResult::Failed };
                guest.model.borrow_mut().end(flush, ended);
                self.leaks.set(Leaks::Allowed);
                *self.at_close.borrow_mut() = Some(bytes_of(&self.stage.world));
            }
            Op::FlushBeside => {
                let _ = guest.image.flush(worker).await;
            }
            Op::FlushAndLeave(polls) => {
                self.stage.halt_after(worker.id(), polls);
                self.flush(worker).await;
            }
            Op::FlushThenLeave => {
                self.flush(worker).await;
                self.stage.halt_after(worker.id(), 0);
            }
        }
    }

    async fn flush(&self, worker: &Worker) {
        if self.guest.try_flush(worker).await && self.rng.borrow_mut().chance(2, 3) {
            self.take_crash(&self.stage.world, 1);
        }
    }

    /// Notes states that a crash at this moment may leave.
    fn take_crash(&self, world: &SimWorld, states: usize) {
        let mut crashes = self.crashes.borrow_mut();
        if crashes.len() >= MOST_CRASHES {
            return;
        }
        let seed = self.rng.borrow_mut().next_u64();
        // The first ones are the same each time: nothing, everything. One is chosen.
        let skipped = (seed % 5) as usize;
        let options = CrashOptions { max_states: skipped + states, tear: Tear::Sector, seed };
        for state in world.crash_states(&options).skip(skipped) {
            crashes.push(Crash {
                name: format!("crash at {:?}, {state}", world.now()),
                files: state.files().to_vec(),
                model: self.guest.model.borrow().clone(),
                snapshots: self.snapshots.borrow().clone(),
            });
        }
    }

    /// Nobody acts any more.
    fn end(&self, setup: &Setup, worker: &Worker) -> Result<(), String> {
        let world = &self.stage.world;
        let (guest, image) = (&self.guest, &self.guest.image);
        if let Some(violation) = guest.violation.borrow_mut().take() {
            return Err(violation);
        }
        let run = |stuck: zebu_sim::Stuck| stuck.to_string();
        let at_close = self.at_close.take();
        if at_close.as_ref().is_some_and(|bytes| *bytes != bytes_of(world)) {
            return Err("the file changed after the close".to_owned());
        }
        let has_closed = at_close.is_some();
        if !has_closed {
            let op = guest.model.borrow_mut().begin(GuestRequest::Read);
            let disk = world.block_on(read_all(worker, image, image.virtual_size())).map_err(run)??;
            guest.model.borrow().check_read(op, 0, &disk).map_err(|v| format!("read of the whole: {v}"))?;
            guest.model.borrow_mut().end(op, GuestResult::Done);
            world.block_on(image.close(worker)).map_err(run)?.map_err(|e| format!("close: {e}"))?;
            guest.model.borrow_mut().apply(GuestRequest::Flush);
        }
        for Crash { name, files, model, snapshots } in self.crashes.take() {
            judge(setup, &files, &model, &snapshots, Leaks::Allowed).map_err(|e| format!("{name}: {e}"))?;
        }
        let files: Files =
            NAMES.iter().filter_map(|name| Some(((*name).to_owned(), world.content(name)?))).collect();
        judge(setup, &files, &guest.model.borrow(), &self.snapshots.borrow(), self.leaks.get())
            .map_err(|e| format!("after close: {e}"))
    }
}

fn bytes_of(world: &SimWorld) -> Vec<u8> {
    let file = world.content(TOP).expect("the image is there");
    file.bytes(0..file.len())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaks {
    Allowed,
    Forbidden,
}

/// Judges the files that are left, in a world of their own.
fn judge(
    setup: &Setup,
    files: &Files,
    model: &GuestModel,
    snapshots: &Snapshots,
    leaks: Leaks,
) -> Result<(), String> {
    let world = setup.world(files, 0);
    let worker = world.worker();
    let judged = judge_in(setup, &world, &worker, model, snapshots, leaks);
    world.block_on(judged).map_err(|stuck| stuck.to_string())?
}

async fn judge_in(
    setup: &Setup,
    world: &SimWorld,
    worker: &Worker,
    model: &GuestModel,
    snapshots: &Snapshots,
    leaks: Leaks,
) -> Result<(), String> {
    // A crash while a snapshot is taken or deleted leaves the bit that announces what the next writer repairs.
    let is_dirty = world.content(TOP).unwrap().bytes(72..80)[7] & 1 == 1;
    if leaks == Leaks::Forbidden || !is_dirty {
        check(world, worker, leaks).await?;
    }
    let image = Image::open_files(worker, setup.chain(world), &setup.options())
        .await
        .map_err(|e| format!("open: {e}"))?;
    let len = image.virtual_size();
    if !model.may_have_len(len) {
        return Err(format!("the disk has {len} bytes"));
    }
    let bytes = read_all(worker, &image, len).await?;
    model.check(0, &bytes).map_err(|v| v.to_string())?;
    let mut found = BTreeMap::new();
    for snapshot in image.snapshots() {
        let options = OpenOptions::default().snapshot(Some(snapshot.name.clone()));
        let image = Image::open_files(worker, setup.chain(world), &options)
            .await
            .map_err(|e| format!("open the snapshot {}: {e}", snapshot.name))?;
        let bytes = read_all(worker, &image, image.virtual_size()).await?;
        found.insert(snapshot.name, bytes);
    }
    snapshots.judge(model, &found)?;
    if is_dirty {
        image.close(worker).await.map_err(|e| format!("close of what a crash left: {e}"))?;
        check(world, worker, leaks).await.map_err(|e| format!("after a repair: {e}"))?;
    }
    Ok(())
}

async fn check(world: &SimWorld, worker: &Worker, leaks: Leaks) -> Result<(), String> {
    let top = world.open(TOP, SimFileConfig::default()).unwrap();
    let report =
        check_file(worker, &top, &CheckOptions::default()).await.map_err(|e| format!("check: {e}"))?;
    let bad = report.counts.corruptions + report.counts.check_errors;
    if bad > 0 || (leaks == Leaks::Forbidden && report.counts.leaks > 0) {
        let lines: Vec<String> = report.findings.iter().take(6).map(ToString::to_string).collect();
        return Err(format!("check: {:?}\n{}", report.counts, lines.join("\n")));
    }
    Ok(())
}

async fn read_all(worker: &Worker, image: &Image, len: u64) -> Result<Vec<u8>, String> {
    let (result, bufs) = image.read(worker, 0, IoBuf::zeroed(len as usize).into()).await;
    result.map_err(|e| format!("read: {e}"))?;
    let mut bytes = vec![0; len as usize];
    bufs.copy_to(0, &mut bytes);
    Ok(bytes)
}
