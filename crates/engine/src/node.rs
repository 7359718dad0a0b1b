//! An image file in a chain: its driver, and the image that it stands on.

use crate::before_change::BeforeChange;
use crate::options::{CacheMode, Format};
use crate::qcow2::index::ChainIndex;
use crate::qcow2::mapping::Run;
use crate::qcow2::slices::SliceCache;
use crate::qcow2::state::Qcow2;
use crate::qcow2::store::SliceStore;
use crate::turnstile::Turnstile;
use crate::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire};
use std::time::Instant;
use zebu_storage::{File, Worker};

/// A raw image: the bytes of the disk.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) file: File,
    /// Bytes of the virtual disk.
    pub(crate) size: AtomicU64,
    pub(crate) cache_mode: CacheMode,
}

/// What understands the file.
#[derive(Debug)]
pub(crate) enum Driver {
    Qcow2(Arc<Qcow2>),
    Raw(Raw),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) path: PathBuf,
    pub(crate) driver: Driver,
    pub(crate) backing: Option<Arc<Node>>,
    /// Requests that change the image enter; a resize or a snapshot operation is alone.
    pub(crate) changes: Turnstile,
    /// What requests that change the image wait for.
    pub(crate) before_change: BeforeChange,
    /// What is known of the chain as a whole, if this is its top.
    pub(crate) view: Option<ChainView>,
}

/// A chain as seen from its top.
#[derive(Debug)]
pub(crate) struct ChainView {
    pub(crate) index: Arc<ChainIndex>,
    /// Merged slices, where there is a backing chain.
    pub(crate) merged: Option<SliceCache>,
    /// The images below the top, so that each is reached in one step.
    pub(crate) members: Box<[Arc<Node>]>,
}

impl Node {
    pub(crate) fn format(&self) -> Format {
        match &self.driver {
            Driver::Qcow2(_) => Format::Qcow2,
            Driver::Raw(_) => Format::Raw,
        }
    }

    /// Bytes of the virtual disk.
    pub(crate) fn virtual_size(&self) -> u64 {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.virtual_size(),
            Driver::Raw(raw) => raw.size.load(Acquire),
        }
    }

    /// The image at `depth` of the chain of which this is the top.
    pub(crate) fn at_depth(&self, depth: u32) -> Option<&Node> {
        let Some(before) = depth.checked_sub(1) else { return Some(self) };
        if let Some(view) = &self.view {
            return view.members.get(before as usize).map(|node| &**node);
        }
        let mut node = self.backing.as_deref()?;
        for _ in 0..before {
            node = node.backing.as_deref()?;
        }
        Some(node)
    }

    /// Maps this image alone for `guest`, at most `max_len` bytes; past its end everything is unallocated.
    pub(crate) async fn map(&self, worker: &Worker, guest: u64, max_len: u64) -> Result<(Run, u64)> {
        let size = self.virtual_size();
        if guest >= size {
            return Ok((Run::Unallocated, max_len));
        }
        let max_len = max_len.min(size - guest);
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.map(worker, guest, max_len).await,
            Driver::Raw(_) => Ok((Run::Data { host: guest }, max_len)),
        }
    }

    /// The image file itself.
    pub(crate) fn image_file(&self) -> &File {
        match &self.driver {
            Driver::Qcow2(qcow2) => &qcow2.file,
            Driver::Raw(raw) => &raw.file,
        }
    }

    /// The file that guest data lies in.
    pub(crate) fn data_file(&self) -> &File {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.data(),
            Driver::Raw(raw) => &raw.file,
        }
    }
}

impl Node {
    /// The store that the chain's mapping is cached in; none for a raw image that stands alone.
    fn store(&self) -> Option<&Arc<SliceStore>> {
        let mut node = Some(self);
        while let Some(this) = node {
            if let Driver::Qcow2(qcow2) = &this.driver {
                return Some(&qcow2.l2.store);
            }
            node = this.backing.as_deref();
        }
        None
    }

    /// The least budget that the chain can be used with: its tables, and a slice for each queue, two at least.
    pub(crate) fn cache_minimum(&self) -> u64 {
        let (mut tables, mut slice, mut node) = (0, 0, Some(self));
        while let Some(this) = node {
            if let Driver::Qcow2(qcow2) = &this.driver {
                tables += qcow2.tables_for_writing();
                slice = slice.max(qcow2.l2.slice_cost());
            }
            node = this.backing.as_deref();
        }
        self.store().map_or(0, |store| store.budget.tables() + tables + store.least_slices() * slice)
    }

    /// Sets the budget of the chain's mapping, in bytes.
    pub(crate) fn set_cache_size(&self, bytes: u64) -> Result<()> {
        let Some(store) = self.store() else { return Ok(()) };
        let minimum = self.cache_minimum();
        if bytes < minimum {
            let message = format!(
                "a cache of {bytes} bytes is too small for this image: at least {minimum} are needed (its tables \
                 and {} slices; smaller slices need less)",
                store.least_slices()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(&self.path));
        }
        store.budget.set_limit(bytes);
        let extents = self.view.as_ref().is_some_and(|view| view.index.extents().shrink_to_budget());
        let slices = store.shrink_to_budget();
        // Looks through all memory of the process: an image that is just opened has given nothing up.
        if slices || extents {
            zebu_storage::release_free_memory();
        }
        Ok(())
    }

    /// Gives cached mapping up that was not used for the interval set at open, if it is time to look.
    pub(crate) fn tidy(&self, now: Instant) {
        let Some(store) = self.store() else { return };
        let slices = store.tidy(now);
        let extents = self.view.as_ref().is_some_and(|view| view.index.extents().tidy(now));
        if slices || extents {
            zebu_storage::release_free_memory();
        }
    }
}

impl Drop for Node {
    /// A chain may be a thousand images long: it is taken down in a loop, not in a recursion.
    fn drop(&mut self) {
        let mut next = self.backing.take();
        while let Some(node) = next {
            next = Arc::into_inner(node).and_then(|mut node| node.backing.take());
        }
    }
}
