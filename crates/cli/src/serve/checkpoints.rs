//! Checkpoints: exports of disks as they were at one moment, while clients write.

use super::control_request::CheckpointStart;
use super::find_export::find;
use crate::suggestion::meant;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use zebu_engine::jobs::{
    BackupEnd, Checkpoint, CheckpointOptions, CheckpointReport, CheckpointSource, FrozenDisk,
};
use zebu_engine::storage::{Access, File, FileKind, LockMode, OpenFlags, Worker};
use zebu_engine::{Error, ErrorKind};
use zebu_export::{Export, Exports, MemoryBudget, Reserved};

/// How often it is looked whether a checkpoint has to end.
const LOOK: Duration = Duration::from_millis(20);
/// Bytes that a spill has in memory if there is room for them.
const MEMORY: u64 = 64 << 20;
/// Bytes on their way into the spill.
const COPIES: u64 = 4 << 20;
/// Ended checkpoints that are remembered.
const REMEMBERED: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Running,
    /// By whom.
    Ended(&'static str),
    Failed(String),
}

/// One disk of a checkpoint.
struct Served {
    /// The name of the export of the disk itself.
    source: String,
    /// The name for those who read it.
    name: String,
    /// It is there as long as the checkpoint runs, and as a client is connected. An ended one that is remembered holds nothing of it.
    export: Weak<Export>,
    size: u64,
}

impl Served {
    fn of(export: &Arc<Export>, source: &Export, disk: &FrozenDisk) -> Self {
        Self {
            source: source.name().to_owned(),
            name: export.name().to_owned(),
            export: Arc::downgrade(export),
            size: disk.size(),
        }
    }

    fn clients(&self) -> u64 {
        self.export.upgrade().map_or(0, |export| export.metrics().clients())
    }

    /// It was used, and nobody is left.
    fn is_idle(&self) -> bool {
        self.export.upgrade().is_some_and(|export| {
            let metrics = export.metrics();
            metrics.arrivals() > 0 && metrics.clients() == 0
        })
    }
}

struct Job {
    start: CheckpointStart,
    began: Instant,
    served: Vec<Served>,
    /// `None` once it has ended.
    running: RefCell<Option<(Checkpoint, Reserved)>>,
    report: Cell<CheckpointReport>,
    state: RefCell<State>,
}

impl Job {
    fn is_running(&self) -> bool {
        *self.state.borrow() == State::Running
    }

    /// Whether it runs and shows the disk of this export.
    fn shows(&self, export: &Export) -> bool {
        self.is_running() && self.served.iter().any(|served| served.source == export.name())
    }

    fn report(&self) -> CheckpointReport {
        self.running
            .borrow()
            .as_ref()
            .map_or_else(|| self.report.get(), |(checkpoint, _)| checkpoint.report())
    }

    fn failure(&self) -> Option<Error> {
        self.running.borrow().as_ref().and_then(|(checkpoint, _)| checkpoint.failure())
    }

    /// Each export was used, and nobody is left.
    fn is_idle(&self) -> bool {
        self.served.iter().all(Served::is_idle)
    }

    fn is_over_time(&self) -> bool {
        self.start.timeout.is_some_and(|seconds| self.began.elapsed() >= Duration::from_secs(seconds.get()))
    }

    async fn end(&self, exports: &Exports, state: State, outcome: BackupEnd) {
        let Some((checkpoint, memory)) = self.running.borrow_mut().take() else { return };
        self.report.set(checkpoint.report());
        // Nobody comes in any more, and then nobody reads any more.
        let served: Vec<_> = self.served.iter().filter_map(|served| served.export.upgrade()).collect();
        exports.remove_views(&served);
        drop(served);
        *self.state.borrow_mut() = state;
        checkpoint.end(outcome).await;
        drop(memory);
    }
}

/// The checkpoints that there are, and the last ones that have ended. All of it belongs to one thread.
#[derive(Clone, Default)]
pub(crate) struct Checkpoints(Rc<Inner>);

#[derive(Default)]
struct Inner {
    /// In the order in which they were made.
    all: RefCell<Vec<Rc<Job>>>,
    starting: Cell<usize>,
}

impl Checkpoints {
    /// Makes a checkpoint: its exports are there when this returns.
    pub(crate) async fn start(
        &self,
        worker: &Worker,
        exports: &Exports,
        start: CheckpointStart,
        descriptor: Option<OwnedFd>,
        memory: &MemoryBudget,
    ) -> Result<Value, String> {
        let sources = sources(exports, &start)?;
        self.check_name(&start.serve)?;
        let spill = spill_file(&start, descriptor)?;
        if spill.is_some() && sources.iter().any(|export| export.image().is_chain_encrypted()) {
            return Err("a file of --spill would hold in plain text what an encrypted disk has: leave it out (memory then \
                        takes 64 MiB)"
                .into());
        }
        let wanted = start.limit.map_or(MEMORY, |limit| limit.get().min(MEMORY));
        let memory = memory.reserve(wanted + COPIES, COPIES + wanted.min(1 << 20)).ok_or(
            "a checkpoint needs some memory, and other work and clients have it: wait for one to end, or start the server with \
             a larger --max-memory",
        )?;
        let options = CheckpointOptions::default()
            .memory((memory.bytes() - COPIES).min(wanted))
            .limit(start.limit.map_or(u64::MAX, std::num::NonZeroU64::get))
            .spill(spill);
        let (me, on, exports) = (self.clone(), worker.clone(), exports.clone());
        self.0.starting.set(self.0.starting.get() + 1);
        // It goes on to its end even if the client leaves.
        let starting = worker.spawn(async move {
            let made = me.make(&on, &exports, start, &sources, options, memory).await;
            me.0.starting.set(me.0.starting.get() - 1);
            made
        });
        starting.await
    }

    async fn make(
        &self,
        worker: &Worker,
        exports: &Exports,
        start: CheckpointStart,
        sources: &[Arc<Export>],
        options: CheckpointOptions,
        memory: Reserved,
    ) -> Result<Value, String> {
        let of_engine = sources
            .iter()
            .map(|export| {
                CheckpointSource::new(&export.image()).from(start.from.clone()).bitmap(start.bitmap.clone())
            })
            .collect();
        let checkpoint =
            Checkpoint::start(worker, of_engine, options).await.map_err(|error| error.to_string())?;
        let served = match self.serve(worker, exports, &start, sources, &checkpoint).await {
            Ok(served) => served,
            Err(message) => {
                checkpoint.end(BackupEnd::GivenUp).await;
                return Err(message);
            }
        };
        let job = Rc::new(Job {
            start,
            began: Instant::now(),
            served,
            running: RefCell::new(Some((checkpoint, memory))),
            report: Cell::default(),
            state: RefCell::new(State::Running),
        });
        let told = describe(&job);
        self.remember(Rc::clone(&job));
        let (on, exports) = (worker.clone(), exports.clone());
        drop(worker.spawn(async move { watch(&on, &exports, &job).await }));
        Ok(told)
    }

    async fn serve(
        &self,
        worker: &Worker,
        exports: &Exports,
        start: &CheckpointStart,
        sources: &[Arc<Export>],
        checkpoint: &Checkpoint,
    ) -> Result<Vec<Served>, String> {
        let mut made = Vec::with_capacity(sources.len());
        for (source, disk) in sources.iter().zip(checkpoint.disks()) {
            let name = if sources.len() == 1 {
                start.serve.clone()
            } else {
                format!("{}.{}", start.serve, source.name())
            };
            let image = disk.open(worker).await.map_err(|error| error.to_string())?;
            let description = format!("checkpoint '{}' of the export '{}'", start.serve, source.name());
            let export = Export::new(name, &image, zebu_engine::Access::ReadOnly)
                .without_page_cache()
                .with_description(description);
            made.push(match disk.bitmap() {
                Some((name, bits)) => export.with_given_bits(name, bits.clone()),
                None => export,
            });
        }
        // Another may have got the name meanwhile.
        self.check_name(&start.serve)?;
        let added = exports.add_views(made).map_err(|error| error.to_string())?;
        let served = added.iter().zip(sources).zip(checkpoint.disks());
        Ok(served.map(|((export, source), disk)| Served::of(export, source, disk)).collect())
    }

    /// How the checkpoint of a name is.
    pub(crate) fn query(&self, name: &str) -> Result<Value, String> {
        self.find(name).map(|job| describe(&job))
    }

    /// How all are that are known.
    pub(crate) fn list(&self) -> Value {
        let all = self.0.all.borrow();
        json!({ "checkpoints": all.iter().map(|job| describe(job)).collect::<Vec<_>>() })
    }

    /// The names and figures of those that run.
    pub(crate) fn running(&self) -> Vec<(String, CheckpointReport)> {
        let all = self.0.all.borrow();
        let running = all.iter().filter(|job| job.is_running());
        running.map(|job| (job.start.serve.clone(), job.report())).collect()
    }

    /// The names of those that run and show the disk of this export.
    pub(crate) fn of(&self, export: &Export) -> Vec<String> {
        self.0
            .all
            .borrow()
            .iter()
            .filter(|job| job.shows(export))
            .map(|job| job.start.serve.clone())
            .collect()
    }

    /// Ends those that show the disk of this export.
    pub(crate) async fn end_of(&self, exports: &Exports, export: &Export) -> Result<Value, String> {
        let jobs: Vec<_> = self.0.all.borrow().iter().filter(|job| job.shows(export)).cloned().collect();
        for job in jobs {
            job.end(exports, State::Ended("command"), BackupEnd::GivenUp).await;
        }
        Ok(json!({}))
    }

    /// Ends one, because the client has all that it wants of it, or does not want it any more (`outcome`).
    pub(crate) async fn end(
        &self,
        exports: &Exports,
        name: &str,
        outcome: BackupEnd,
    ) -> Result<Value, String> {
        let job = self.find(name)?;
        if !job.is_running() {
            return Err(match &*job.state.borrow() {
                State::Failed(error) => format!("the checkpoint '{name}' has failed: {error}"),
                _ => format!("the checkpoint '{name}' has ended already"),
            });
        }
        job.end(exports, State::Ended("command"), outcome).await;
        Ok(describe(&job))
    }

    /// Ends all.
    pub(crate) async fn stop(&self, worker: &Worker, exports: &Exports) {
        while self.0.starting.get() > 0 {
            worker.sleep(LOOK).await;
        }
        let all = self.0.all.borrow().clone();
        for job in all {
            job.end(exports, State::Ended("server"), BackupEnd::GivenUp).await;
        }
    }

    fn check_name(&self, name: &str) -> Result<(), String> {
        if name.is_empty() {
            return Err("a checkpoint needs a name that is not empty (--serve)".into());
        }
        match self.find(name) {
            Ok(job) if job.is_running() => {
                Err(format!("there is a checkpoint '{name}': end it (checkpoint-end), or give another name"))
            }
            _ => Ok(()),
        }
    }

    fn remember(&self, job: Rc<Job>) {
        let mut all = self.0.all.borrow_mut();
        if all.len() >= REMEMBERED
            && let Some(oldest) = all.iter().position(|job| !job.is_running())
        {
            all.remove(oldest);
        }
        all.push(job);
    }

    /// The last one of a name.
    fn find(&self, name: &str) -> Result<Rc<Job>, String> {
        let all = self.0.all.borrow();
        let found = all.iter().rev().find(|job| job.start.serve == name).cloned();
        found.ok_or_else(|| {
            let known = all.iter().map(|job| job.start.serve.as_str());
            format!("there is no checkpoint '{name}'{}", meant(name, "checkpoints", known))
        })
    }
}

/// Ends a checkpoint when its time is over, its clients have left or it has failed.
async fn watch(worker: &Worker, exports: &Exports, job: &Job) {
    while job.is_running() {
        worker.sleep(LOOK).await;
        let end = match job.failure() {
            Some(error) => State::Failed(told(&error)),
            None if job.is_over_time() => State::Ended("timeout"),
            None if job.start.until_idle && job.is_idle() => State::Ended("idle"),
            None => continue,
        };
        job.end(exports, end, BackupEnd::GivenUp).await;
    }
}

/// A failure, with the options that help.
fn told(error: &Error) -> String {
    match error.kind() {
        ErrorKind::NoSpace => format!("{error} (--limit, --spill)"),
        _ => error.to_string(),
    }
}

/// The exports that are meant.
fn sources(exports: &Exports, start: &CheckpointStart) -> Result<Vec<Arc<Export>>, String> {
    if start.exports.is_empty() {
        let all: Vec<_> = exports.iter().collect();
        if all.len() > 1 {
            return Err("there are several exports: name those that the checkpoint is to have".into());
        }
        return all.into_iter().map(writable).collect();
    }
    let mut sources: Vec<Arc<Export>> = Vec::new();
    for name in &start.exports {
        let export = writable(find(exports, name)?)?;
        if sources.iter().any(|other| Arc::ptr_eq(other, &export)) {
            return Err(format!("the export '{}' is named twice", export.name()));
        }
        sources.push(export);
    }
    Ok(sources)
}

fn writable(export: Arc<Export>) -> Result<Arc<Export>, String> {
    if export.access() == zebu_engine::Access::ReadWrite {
        return Ok(export);
    }
    Err(format!(
        "the export '{}' is read-only: its disk does not change, so clients can read it without a checkpoint",
        export.name()
    ))
}

/// The file that the client has opened.
fn spill_file(start: &CheckpointStart, descriptor: Option<OwnedFd>) -> Result<Option<File>, String> {
    let Some(path) = &start.spill else { return Ok(None) };
    let descriptor = descriptor
        .ok_or("a spill needs the descriptor of a new file with the request, as `zebu ctl` sends it")?;
    let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::Write);
    let file = File::from_descriptor(descriptor, path, &flags).map_err(|error| error.to_string())?;
    if file.kind() != FileKind::Regular || !file.is_empty() {
        return Err(format!("'{}' is no empty file: a spill needs a new one", path.display()));
    }
    Ok(Some(file))
}

fn describe(job: &Job) -> Value {
    let report = job.report();
    let served = job.served.iter().map(|served| {
        json!({
            "export": served.source,
            "serve": served.name,
            "virtual-size": served.size,
            "clients": served.clients(),
        })
    });
    let mut described = json!({
        "name": job.start.serve,
        "status": "running",
        "exports": served.collect::<Vec<_>>(),
        "copied-for-clients": report.copied_for_guests,
        "spill": spill(&report),
    });
    match &*job.state.borrow() {
        State::Running => described["seconds"] = job.began.elapsed().as_secs().into(),
        State::Ended(by) => {
            described["status"] = "ended".into();
            described["ended-by"] = (*by).into();
        }
        State::Failed(error) => {
            described["status"] = "failed".into();
            described["error"] = error.as_str().into();
        }
    }
    for (key, name) in [("bitmap", &job.start.bitmap), ("from", &job.start.from)] {
        if let Some(name) = name {
            described[key] = name.as_str().into();
        }
    }
    described
}

/// The content of a spill, in bytes.
pub(crate) fn spill(report: &CheckpointReport) -> Value {
    json!({ "memory": report.spill_memory, "file": report.spill_file, "limit": report.spill_limit })
}
