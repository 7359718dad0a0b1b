//! The subjects of control requests.

use super::backups::Backups;
use super::checkpoints::Checkpoints;
use super::come_and_go::Served;
use super::hydrations::Hydrations;
use super::jobs::Jobs;
use futures_util::lock::Mutex;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use zebu_disks::Disks;
use zebu_engine::{Access, Image};
use zebu_export::{Export, Exports, MemoryBudget};

/// The subjects of requests: exports and their images.
pub(crate) struct Controlled<'a> {
    /// Exports that come and go, and their limits.
    pub(crate) served: Served<'a>,
    /// The disks of the server.
    pub(crate) disks: Arc<Disks>,
    pub(crate) exports: Exports,
    pub(crate) backups: Backups,
    pub(crate) checkpoints: Checkpoints,
    /// Where NBD clients can come, as the addresses of `--nbd`.
    pub(crate) listens: Vec<String>,
    pub(crate) hydrations: Hydrations,
    pub(crate) memory: MemoryBudget,
    /// The turns of those who change the size of a disk, by the name of its export.
    pub(crate) resizing: RefCell<HashMap<String, Rc<Mutex<()>>>>,
    /// Held by who forks or resets a disk.
    pub(crate) forking: Mutex<()>,
}

impl Controlled<'_> {
    /// The turn of who changes the size of a disk, to be held meanwhile.
    pub(crate) fn turn_to_resize(&self, export: &str) -> Rc<Mutex<()>> {
        let mut turns = self.resizing.borrow_mut();
        // Exports come and go.
        turns.retain(|_, turn| Rc::strong_count(turn) > 1);
        turns.entry(export.to_owned()).or_default().clone()
    }

    /// The background jobs.
    pub(crate) fn jobs(&self) -> Jobs<'_> {
        Jobs {
            backups: &self.backups,
            hydrations: &self.hydrations,
            checkpoints: &self.checkpoints,
            exports: &self.exports,
        }
    }
}

pub(super) fn writable(export: &Export) -> Result<Image, String> {
    match export.access() {
        Access::ReadWrite => Ok(export.image()),
        Access::ReadOnly => Err(format!("the export '{}' is read-only", export.name())),
    }
}
