//! Long work on a thread of its own, while the thread of Python that asked for it waits without the GIL.
//!
//! The waiting thread tells the progress, so that no thread of the engine ever needs the GIL.

use crate::error::to_python;
use crate::interpreter::{BETWEEN_SIGNALS, UnderWay};
use pyo3::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use zebu_engine::jobs::{Cancel, JobControl, Phase, Progress};
use zebu_engine::storage::Worker;
use zebu_engine::{Error, ErrorKind};

/// A switch that stops a job, for tasks that are cancelled.
#[pyclass(frozen, name = "CancelSwitch", module = "zebu._zebu")]
#[derive(Default)]
pub(crate) struct CancelSwitch(Cancel);

#[pymethods]
impl CancelSwitch {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Asks the job to stop.
    fn cancel(&self) {
        self.0.cancel();
    }
}

/// How a caller watches and steers a job.
pub(crate) struct Watch<'py> {
    /// Called with the phase, what is done, and how much there is.
    pub(crate) progress: Option<Bound<'py, PyAny>>,
    pub(crate) cancel: Cancel,
}

impl<'py> Watch<'py> {
    pub(crate) fn new(progress: Option<Bound<'py, PyAny>>, cancel: Option<&CancelSwitch>) -> Self {
        Self { progress, cancel: cancel.map_or_else(Cancel::new, |switch| switch.0.clone()) }
    }

    fn tell(&self, report: Progress) -> PyResult<()> {
        let Some(told) = &self.progress else { return Ok(()) };
        told.call1((phase_name(report.phase), report.done, report.total)).map(drop)
    }
}

/// Messages of a job for the thread that waits for it.
struct Mail<T> {
    content: Mutex<Content<T>>,
    came: Condvar,
}

struct Content<T> {
    /// The last report of each phase that was not told yet.
    reports: Vec<Progress>,
    ended: Option<zebu_engine::Result<T>>,
}

impl<T> Mail<T> {
    fn lock(&self) -> MutexGuard<'_, Content<T>> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, report: Progress) {
        let mut content = self.lock();
        match content.reports.last_mut() {
            Some(last) if last.phase == report.phase => *last = report,
            _ => content.reports.push(report),
        }
        drop(content);
        self.came.notify_one();
    }

    fn end(&self, result: zebu_engine::Result<T>) {
        self.lock().ended = Some(result);
        self.came.notify_one();
    }

    /// Takes what has come, after a wait until it is time to look at the signals.
    fn wait(&self) -> (Vec<Progress>, Option<zebu_engine::Result<T>>) {
        let nothing = |content: &mut Content<T>| content.reports.is_empty() && content.ended.is_none();
        let waited = self.came.wait_timeout_while(self.lock(), BETWEEN_SIGNALS, nothing);
        let mut content = waited.unwrap_or_else(PoisonError::into_inner).0;
        (std::mem::take(&mut content.reports), content.ended.take())
    }
}

/// Runs a job and waits for its end. If the function that is told the progress raises, or a signal's handler does, the job is
/// cancelled, and that is raised when it has ended.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    watch: &Watch<'_>,
    work: impl AsyncFnOnce(Worker, JobControl) -> zebu_engine::Result<T> + Send + 'static,
) -> PyResult<T> {
    let under_way = UnderWay::job(&watch.cancel)?;
    let content = Content { reports: Vec::new(), ended: None };
    let mail = Arc::new(Mail { content: Mutex::new(content), came: Condvar::new() });
    let theirs = Arc::clone(&mail);
    let mut control = JobControl::default().cancel(watch.cancel.clone());
    if watch.progress.is_some() {
        let told = Arc::clone(&mail);
        control = control.progress(move |report| told.report(report));
    }
    let job = move || {
        let work = || zebu_engine::block_on(async |worker| work(worker, control).await);
        let panicked = || Err(Error::new(ErrorKind::Panicked, "the job panicked: this is a bug of zebu"));
        theirs.end(catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| panicked()));
    };
    let thread = thread::Builder::new().name("zebu-job".to_owned()).spawn(job)?;
    let mut failure = None;
    let result = loop {
        let (reports, ended) = py.detach(|| mail.wait());
        for report in reports {
            if failure.is_none() {
                failure = watch.tell(report).err();
            }
        }
        if failure.is_none() {
            failure = py.check_signals().err();
        }
        if failure.is_some() {
            watch.cancel.cancel();
        }
        if let Some(result) = ended {
            break result;
        }
    };
    // Its worker and its memory are gone then, too.
    py.detach(|| drop(thread.join()));
    drop(under_way);
    match failure {
        Some(failure) => Err(failure),
        None => result.map_err(|error| to_python(py, &error)),
    }
}

/// The word for a phase, which stays as it is.
fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Copying => "copying",
        Phase::Comparing => "comparing",
        Phase::CountingReferences => "counting-references",
        Phase::ComparingRefcounts => "comparing-refcounts",
        Phase::CheckingFlags => "checking-flags",
        Phase::RebuildingRefcounts => "rebuilding-refcounts",
        Phase::Verifying => "verifying",
        Phase::Measuring => "measuring",
        Phase::Reserving => "reserving",
        Phase::Finishing => "finishing",
        _ => "working",
    }
}
