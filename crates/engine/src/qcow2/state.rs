//! The shared state of an open qcow2 image.

use crate::compress::CompressOptions;
use crate::gate::Gate;
use crate::options::{CacheMode, ZeroPolicy};
use crate::qcow2::bitmaps::Bitmaps;
use crate::qcow2::decompress::ClusterCache;
use crate::qcow2::epochs::Epochs;
use crate::qcow2::gather::Gatherer;
use crate::qcow2::grace::Grace;
use crate::qcow2::header_block::HeaderBlock;
use crate::qcow2::index::ChainIndex;
use crate::qcow2::metadata_map::{Clusters, Metadata, MetadataMap};
use crate::qcow2::read_stop::ReadStop;
use crate::qcow2::refcounts::Refcounts;
use crate::qcow2::slices::SliceCache;
use crate::qcow2::snapshots::SnapshotTable;
use crate::qcow2::space::{Content, Space};
use crate::qcow2::top_table::TopTable;
use crate::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use zebu_qcow2::{Compression, Geometry, GuestOffset, Header};
use zebu_storage::File;
use zebu_storage::sabotage::{self, Fault};

/// The active L1 table and where it lies.
#[derive(Debug)]
pub(crate) struct L1 {
    pub(crate) table: TopTable,
    /// Offset in the file, bytes.
    pub(crate) offset: u64,
}

/// An L2 table that no L1 entry on disk points to yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewTable {
    /// Offset in the file, bytes.
    pub(crate) host: u64,
    /// What that space holds now.
    pub(crate) content: Content,
    /// The shared table that it is a copy of; slices that are not cached are still to be read there.
    pub(crate) source: Option<u64>,
}

/// Host clusters whose refcount is to be lowered by one each, once the change that unlinked them is durable and
/// nobody uses them any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Freed {
    pub(crate) clusters: Range<u64>,
    pub(crate) then: AfterFree,
}

/// What becomes of freed space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterFree {
    /// It may be used again.
    Reuse,
    /// It is given back to the file system first.
    Punch,
    /// It was never written since it was handed out.
    Untouched(Content),
}

impl AfterFree {
    /// Of what was handed out, or set aside, and not used.
    pub(crate) fn unused(content: Content) -> Self {
        if content == Content::Reserved { AfterFree::Punch } else { AfterFree::Untouched(content) }
    }
}

/// See the module.
pub(crate) struct Qcow2 {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) data_file: Option<File>,
    pub(crate) geometry: Geometry,
    pub(crate) compression: Compression,
    pub(crate) header: Header,
    pub(crate) header_block: HeaderBlock,
    pub(crate) snapshots: RwLock<Arc<SnapshotTable>>,
    pub(crate) read_stop: ReadStop,
    pub(crate) bitmaps: Bitmaps,
    pub(crate) size: AtomicU64,
    pub(crate) writable: bool,
    pub(crate) cache_mode: CacheMode,
    pub(crate) zero_policy: ZeroPolicy,
    /// See [`Qcow2::has_backing`].
    pub(crate) backed: AtomicBool,

    pub(crate) l1: RwLock<Arc<L1>>,
    pub(crate) l2: SliceCache,
    /// What is known of the chain as a whole, if this is its top.
    pub(crate) index: Option<Arc<ChainIndex>>,
    /// By L1 index. An entry is made before the L1 entry points to the table and removed when the table is on disk.
    pub(crate) new_tables: Mutex<BTreeMap<u64, NewTable>>,
    /// Held while an L2 table is made.
    pub(crate) table_gate: Gate,

    pub(crate) refcounts: Refcounts,
    pub(crate) space: Mutex<Space>,
    /// Held while windows are refilled and while a commit freezes the refcounts, so that it never sees half a window.
    pub(crate) space_gate: Gate,
    pub(crate) metadata: MetadataMap,
    pub(crate) clusters: ClusterCache,
    pub(crate) gatherer: Gatherer,
    pub(crate) compress: CompressOptions,

    pub(crate) grace: Grace,
    /// Unlinked and not committed. Pushed after the change that unlinked, under the same lock.
    pub(crate) freed: Mutex<Vec<Freed>>,
    /// No attempt to set room aside failed for want of it lately.
    pub(crate) is_roomy: AtomicBool,
    /// Releases under way, from the freeze of the commit that frees their clusters on. Raised under the lock of `freed`.
    pub(crate) releases: AtomicUsize,
    /// Something was linked whose bytes must be durable before the link.
    pub(crate) needs_data_barrier: AtomicBool,
    pub(crate) commit: Epochs,
    /// Why nothing can be written any more.
    pub(crate) poison: Mutex<Option<Error>>,
    pub(crate) is_poisoned: AtomicBool,
    /// The rules that hold before the first write (autoclear bits) were kept.
    /// Clusters that tables lie in and that something else lies in, too: they are not changed. Set before the first write.
    pub(crate) claimed_twice: OnceLock<Clusters>,
    pub(crate) first_write_done: AtomicBool,
    /// Those of them that hold for any change of the file.
    pub(crate) metadata_prepared: AtomicBool,
    pub(crate) first_write_gate: Gate,
    pub(crate) clusters_allocated: AtomicU64,
    pub(crate) clusters_freed: AtomicU64,
    /// Those of them that came out of quarantine.
    pub(crate) clusters_released: AtomicU64,
}

impl std::fmt::Debug for Qcow2 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qcow2")
            .field("path", &self.path)
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

impl Qcow2 {
    /// Bytes of the virtual disk.
    pub(crate) fn virtual_size(&self) -> u64 {
        self.size.load(Acquire)
    }

    pub(crate) fn l1(&self) -> Arc<L1> {
        self.l1.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn new_tables(&self) -> MutexGuard<'_, BTreeMap<u64, NewTable>> {
        self.new_tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn freed(&self) -> MutexGuard<'_, Vec<Freed>> {
        self.freed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something shows, or is to show, where nothing is allocated.
    pub(crate) fn has_backing(&self) -> bool {
        self.backed.load(Relaxed)
    }

    /// Says that the image is to get a backing file: what has to be zero must be allocated as such from now on.
    pub(crate) fn expect_backing(&self) {
        self.backed.store(true, Relaxed);
    }

    /// The file that guest data lies in.
    pub(crate) fn data(&self) -> &File {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    /// Entries of an L2 table in one slice.
    pub(crate) fn entries_per_slice(&self) -> u64 {
        self.l2.slice_bytes() as u64 / u64::from(self.geometry.l2_entry_size)
    }

    /// Slices of one L2 table.
    pub(crate) fn slices_per_table(&self) -> u64 {
        self.geometry.cluster_size() / self.l2.slice_bytes() as u64
    }

    /// Key of the slice that maps `guest`, and the index of the entry in it.
    pub(crate) fn slice_of(&self, guest: u64) -> (u64, usize) {
        let cluster = guest >> self.geometry.cluster_bits;
        let entries = self.entries_per_slice();
        (cluster / entries, (cluster % entries) as usize)
    }

    /// Offset on the virtual disk just past what slice `key` maps.
    pub(crate) fn slice_end(&self, key: u64) -> u64 {
        ((key + 1) * self.entries_per_slice()) << self.geometry.cluster_bits
    }

    /// The L1 index of `guest`.
    pub(crate) fn l1_index(&self, guest: u64) -> u64 {
        self.geometry.l1_index(GuestOffset(guest))
    }

    /// Says that nothing can be written any more, and why.
    pub(crate) fn poison(&self, why: &Error) {
        let mut poison = self.poison.lock().unwrap_or_else(PoisonError::into_inner);
        if poison.is_none() {
            *poison = Some(
                Error::new(
                    ErrorKind::Poisoned,
                    format!(
                        "writing has stopped after an earlier failure: {}; open the image again",
                        why.message()
                    ),
                )
                .on(&self.path),
            );
        }
        self.is_poisoned.store(!sabotage::is(Fault::ForgetPoison), Release);
    }

    /// Fails if the image can't be written.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if !self.writable {
            return Err(
                Error::new(ErrorKind::ReadOnly, "the image was opened for reading only").on(&self.path)
            );
        }
        if self.is_poisoned.load(Acquire) {
            let poison = self.poison.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(error) = &*poison {
                return Err(error.clone());
            }
        }
        Ok(())
    }

    /// Refuses a write of host bytes that would hit metadata: the image is corrupt.
    pub(crate) fn check_overlap(&self, host: u64, len: u64, guest: u64) -> Result<()> {
        if self.data_file.is_some() || len == 0 || sabotage::is(Fault::SkipOverlapCheck) {
            return Ok(());
        }
        let bits = self.geometry.cluster_bits;
        match self.metadata.overlap(host >> bits..((host + len - 1) >> bits) + 1) {
            Some((cluster, what)) => Err(self.overlap_found(cluster, what, Some(guest))),
            None => Ok(()),
        }
    }

    /// Refuses host clusters that were found free if they hold metadata: the image is corrupt.
    pub(crate) fn check_free(&self, clusters: &Range<u64>) -> Result<()> {
        match self.metadata.overlap(clusters.clone()) {
            Some((cluster, what)) if !sabotage::is(Fault::SkipOverlapCheck) => {
                Err(self.overlap_found(cluster, what, None))
            }
            _ => Ok(()),
        }
    }

    fn overlap_found(&self, cluster: u64, what: Metadata, guest: Option<u64>) -> Error {
        let message =
            format!("preventing invalid write on metadata (overlaps with {}); run zebu check", what.name());
        let error = Error::new(ErrorKind::Corrupt, message)
            .on(&self.path)
            .at_host(cluster << self.geometry.cluster_bits);
        // Nothing was written. That an entry of a guest leads here concerns whoever uses it; that the refcounts call it
        // free, everybody.
        if let Some(guest) = guest {
            return error.at_guest(guest);
        }
        self.poison(&error);
        error
    }

    /// Refuses a table whose cluster something else lies in, too: changing it would change that.
    pub(crate) fn check_own(&self, host: u64, what: Metadata) -> Result<()> {
        let Some(claimed_twice) = self.claimed_twice.get().filter(|clusters| !clusters.is_empty()) else {
            return Ok(());
        };
        if !claimed_twice.contains(&(host >> self.geometry.cluster_bits)) {
            return Ok(());
        }
        let message = format!("the {} lies where something else is, too; run zebu check", what.name());
        Err(Error::new(ErrorKind::Corrupt, message).on(&self.path).at_host(host))
    }

    /// Puts host clusters into quarantine; called after they were unlinked, under the lock that unlinked them.
    pub(crate) fn push_freed(&self, clusters: Range<u64>, then: AfterFree) {
        if clusters.is_empty() {
            return;
        }
        self.clusters_freed.fetch_add(clusters.end - clusters.start, Relaxed);
        let mut freed = self.freed();
        if let Some(last) = freed.last_mut()
            && last.then == then
            && last.clusters.end == clusters.start
        {
            last.clusters.end = clusters.end;
            return;
        }
        freed.push(Freed { clusters, then });
    }

    /// Notes the clusters of a table in the overlap set.
    pub(crate) fn note_metadata(&self, host: u64, len: u64, what: Metadata) {
        if len > 0 {
            let bits = self.geometry.cluster_bits;
            self.metadata.insert(host >> bits..(host.saturating_add(len - 1) >> bits) + 1, what);
        }
    }
}
