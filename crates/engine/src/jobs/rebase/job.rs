//! The state of a running rebase, shared by its tasks.

use super::options::RebaseReport;
use crate::image::Clusters;
use crate::progress::Tracker;
use crate::{Error, Format, Image};
use std::cell::{Cell, RefCell};
use zebu_storage::FileId;

/// An image, whatever its name. One file in two formats is two disks.
pub(super) type Owner = (FileId, Format);

/// The images of a chain, from the top down.
pub(super) fn owners(image: &Image) -> Vec<Owner> {
    let chain = std::iter::successors(Some(image.clone()), Image::backing);
    image.file_ids().into_iter().zip(chain.map(|image| image.format())).collect()
}

/// A running rebase, shared by its tasks.
pub(super) struct Job {
    pub(super) image: Image,
    pub(super) new: Option<Image>,
    /// Bytes of the disk that the new chain reaches; 0 without one.
    pub(super) new_size: u64,
    /// The images of both chains, from the top down.
    pub(super) owners: [Vec<Owner>; 2],
    pub(super) total: u64,
    /// Bytes that the image holds or doesn't hold as a whole: a subcluster, or a cluster.
    pub(super) unit: u64,
    pub(super) chunk: usize,
    pub(super) clusters: Clusters,
    /// Ranges can be made zero without writing bytes.
    pub(super) has_zero_clusters: bool,
    pub(super) tracker: Tracker,
    pub(super) failure: RefCell<Option<Error>>,
    pub(super) report: Cell<RebaseReport>,
}

impl Job {
    pub(super) fn fail(&self, error: Error) {
        self.failure.borrow_mut().get_or_insert(error);
    }

    pub(super) fn is_stopped(&self) -> bool {
        if let Err(cancelled) = self.tracker.check() {
            self.fail(cancelled);
        }
        self.failure.borrow().is_some()
    }

    pub(super) fn count(&self, add: impl FnOnce(&mut RebaseReport)) {
        let mut report = self.report.get();
        add(&mut report);
        self.report.set(report);
    }
}
