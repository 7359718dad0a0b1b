//! Numbers of workers.

use crate::sync::Mutex;

/// The number of a worker, the smallest that is free; given back on drop. A simulated world counts its own workers,
/// so that a run does not depend on what else the process does.
pub(crate) struct WorkerId {
    pub(crate) number: usize,
    given_back: bool,
}

static WORKER_IDS: Mutex<Vec<bool>> = Mutex::new(Vec::new());

impl WorkerId {
    pub(crate) fn take() -> Self {
        let mut used = WORKER_IDS.lock();
        let id = used.iter().position(|used| !used).unwrap_or(used.len());
        if id == used.len() {
            used.push(true);
        } else {
            used[id] = true;
        }
        Self { number: id, given_back: true }
    }

    pub(crate) fn of_world(number: usize) -> Self {
        Self { number, given_back: false }
    }
}

impl Drop for WorkerId {
    fn drop(&mut self) {
        if !self.given_back {
            return;
        }
        if let Some(used) = WORKER_IDS.lock().get_mut(self.number) {
            *used = false;
        }
    }
}
