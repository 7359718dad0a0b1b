//! Requests under way, and the end of the interpreter.
//!
//! A thread of the interpreter that asks for the GIL after the end has begun is never given it; the interpreter ends such a thread
//! where it stands, which must not be in Rust. So the end waits for all requests, and nobody begins one after it.

use crate::error::to_python;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;
use zebu_engine::jobs::Cancel;

/// How long a thread that waits goes without a look at the signals of the interpreter.
pub(crate) const BETWEEN_SIGNALS: Duration = Duration::from_millis(50);

/// The requests of all threads. The interpreter is the process's, and so are they.
static REQUESTS: Requests = Requests::new();

struct Requests {
    /// Held with the GIL only, but by the thread that waits for the end: no other thread has it at a fork().
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    under_way: usize,
    jobs: Vec<(u64, Cancel)>,
    next_job: u64,
    /// The thread that ends the interpreter.
    ending: Option<ThreadId>,
}

impl State {
    const fn new() -> Self {
        Self { under_way: 0, jobs: Vec::new(), next_job: 0, ending: None }
    }
}

impl Requests {
    const fn new() -> Self {
        Self { state: Mutex::new(State::new()), ended: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request under way. It is begun and dropped with the GIL.
pub(crate) struct UnderWay {
    job: Option<u64>,
}

impl UnderWay {
    fn begin(cancel: Option<&Cancel>) -> PyResult<Self> {
        let mut state = REQUESTS.lock();
        if state.ending.is_some_and(|by| by != thread::current().id()) {
            return Err(PyRuntimeError::new_err("the interpreter is ending: no request is begun any more"));
        }
        state.under_way += 1;
        let job = cancel.map(|cancel| {
            state.next_job += 1;
            let number = state.next_job;
            state.jobs.push((number, cancel.clone()));
            number
        });
        Ok(Self { job })
    }

    /// Begins a job, which the end of the interpreter cancels.
    pub(crate) fn job(cancel: &Cancel) -> PyResult<Self> {
        Self::begin(Some(cancel))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = REQUESTS.lock();
        // A child of fork() begins at nothing.
        state.under_way = state.under_way.saturating_sub(1);
        if let Some(job) = self.job {
            state.jobs.retain(|(number, _)| *number != job);
        }
        if state.under_way == 0 {
            REQUESTS.ended.notify_all();
        }
    }
}

/// Does `work` without the GIL.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> zebu_engine::Result<T> + Send,
) -> PyResult<T> {
    let _under_way = UnderWay::begin(None)?;
    py.detach(work).map_err(|error| to_python(py, &error))
}

/// Cancels all jobs, and waits for the end of all requests. Called when the interpreter begins to end.
#[pyfunction]
pub(crate) fn end(py: Python<'_>) -> PyResult<()> {
    let mut state = REQUESTS.lock();
    state.ending = Some(thread::current().id());
    for (_, cancel) in &state.jobs {
        cancel.cancel();
    }
    drop(state);
    loop {
        let is_over = py.detach(|| {
            let state = REQUESTS.lock();
            let waited =
                REQUESTS.ended.wait_timeout_while(state, BETWEEN_SIGNALS, |state| state.under_way > 0);
            waited.unwrap_or_else(PoisonError::into_inner).0.under_way == 0
        });
        if is_over {
            return Ok(());
        }
        py.check_signals()?;
    }
}

/// Forgets the requests of the parent, in a child of fork().
#[pyfunction]
pub(crate) fn forked() {
    *REQUESTS.lock() = State::new();
}
