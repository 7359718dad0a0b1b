//! Hydrations of exports that are served: what only the backing images have is copied into the image, while clients use it.

use super::control_request::HydrateStart;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use zebu_engine::jobs::{AfterHydration, Cancel, HydrateOptions, JobControl, hydrate};
use zebu_engine::storage::Worker;
use zebu_engine::{Access, ErrorKind};
use zebu_export::Export;

/// How often it is looked whether a cancelled one has ended.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Running,
    Completed,
    Cancelled,
    Failed(String),
}

struct Running {
    cancel: Cancel,
    total: u64,
    done: Arc<AtomicU64>,
    copied: Cell<u64>,
    state: RefCell<State>,
}

/// The last hydration of each export, by its name. All of it belongs to one thread.
#[derive(Default)]
pub(crate) struct Hydrations(RefCell<HashMap<String, Rc<Running>>>);

impl Hydrations {
    /// Begins one.
    pub(crate) fn start(
        &self,
        worker: &Worker,
        export: &Export,
        start: &HydrateStart,
    ) -> Result<Value, String> {
        if export.access() == Access::ReadOnly {
            return Err(format!("the export '{}' is read-only", export.name()));
        }
        if self.is_running(export) {
            return Err(format!("a hydration of the export '{}' is under way", export.name()));
        }
        let done = Arc::new(AtomicU64::new(0));
        let (cancel, shared) = (Cancel::new(), Arc::clone(&done));
        let running = Rc::new(Running {
            cancel: cancel.clone(),
            total: export.image().virtual_size(),
            done,
            copied: Cell::new(0),
            state: RefCell::new(State::Running),
        });
        let control = JobControl::default()
            .cancel(cancel)
            .progress(move |progress| shared.store(progress.done, Relaxed))
            .rate_limit(start.rate_limit);
        let after =
            if start.drop_backing { AfterHydration::DropBacking } else { AfterHydration::KeepBacking };
        let options = HydrateOptions::default().after(after).control(control);
        self.0.borrow_mut().insert(export.name().to_owned(), Rc::clone(&running));
        let (on, image) = (worker.clone(), export.image());
        drop(worker.spawn(async move {
            let ended = hydrate(&on, &image, &options).await;
            *running.state.borrow_mut() = match ended {
                Ok(report) => {
                    running.copied.set(report.copied);
                    State::Completed
                }
                Err(error) if error.kind() == ErrorKind::Cancelled => State::Cancelled,
                Err(error) => State::Failed(error.to_string()),
            };
        }));
        Ok(json!({}))
    }

    /// Whether one of an export is under way.
    pub(crate) fn is_running(&self, export: &Export) -> bool {
        let known = self.0.borrow().get(export.name()).cloned();
        known.is_some_and(|known| *known.state.borrow() == State::Running)
    }

    fn find(&self, export: &Export) -> Result<Rc<Running>, String> {
        let known = self.0.borrow().get(export.name()).cloned();
        known.ok_or_else(|| format!("no hydration of the export '{}' was begun", export.name()))
    }

    /// Forgets that of an export that is gone.
    pub(crate) fn forget(&self, export: &str) {
        self.0.borrow_mut().remove(export);
    }

    /// How far the last one of an export is.
    pub(crate) fn query(&self, export: &Export) -> Result<Value, String> {
        self.find(export).map(|running| describe(&running))
    }

    /// The last ones of all exports, with their names.
    pub(crate) fn list(&self) -> Vec<(String, Value)> {
        let all = self.0.borrow();
        let mut list: Vec<_> = all.iter().map(|(name, one)| (name.clone(), describe(one))).collect();
        list.sort_by(|(one, _), (other, _)| one.cmp(other));
        list
    }

    /// Ends that of an export, and waits until nothing of it goes on.
    pub(crate) async fn cancel(&self, worker: &Worker, export: &Export) -> Result<Value, String> {
        let running = self.find(export)?;
        end(worker, &running).await;
        Ok(describe(&running))
    }

    /// Ends all.
    pub(crate) async fn stop(&self, worker: &Worker) {
        let all: Vec<_> = self.0.borrow().values().cloned().collect();
        for running in all {
            end(worker, &running).await;
        }
    }
}

async fn end(worker: &Worker, running: &Running) {
    running.cancel.cancel();
    while *running.state.borrow() == State::Running {
        worker.sleep(LOOK).await;
    }
}

fn describe(running: &Running) -> Value {
    let mut described = json!({ "total": running.total, "done": running.done.load(Relaxed) });
    let status = match &*running.state.borrow() {
        State::Running => "running",
        State::Completed => {
            described["copied"] = running.copied.get().into();
            "completed"
        }
        State::Cancelled => "cancelled",
        State::Failed(message) => {
            described["error"] = message.clone().into();
            "failed"
        }
    };
    described["status"] = status.into();
    described
}
