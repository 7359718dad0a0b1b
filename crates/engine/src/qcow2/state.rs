//! The shared state of an open qcow2 image.

use crate::crypt::EncryptionInfo;
use crate::crypt::protection::Protection;
use crate::image_worker::{ImageWorker, MustEnd};
use crate::options::CacheMode;
use crate::qcow2::bitmaps::Bitmaps;
use crate::qcow2::cache::inflated_clusters::ClusterCache;
use crate::qcow2::commit::queue::CommitQueue;
use crate::qcow2::compressed::clusters::CompressedClusters;
use crate::qcow2::disk::GuestDisk;
use crate::qcow2::encryption::ImageEncryption;
use crate::qcow2::files::ImageFiles;
use crate::qcow2::header::block::{ImageHeader, OnFailure, Patch};

use crate::qcow2::map::active_map::ActiveMap;
use crate::qcow2::read_barrier::Readers;
use crate::qcow2::snapshots::SnapshotTable;
use crate::qcow2::space::HostSpace;
use crate::sync::ArcCell;
use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use zebu_qcow2::{Autoclear, Geometry, Header};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, Worker};

/// An open qcow2 image: the components that own its state.
pub(crate) struct Qcow2 {
    pub(super) files: ImageFiles,
    pub(super) header: ImageHeader,
    pub(super) snapshots: ArcCell<SnapshotTable>,
    pub(super) bitmaps: Bitmaps,
    pub(super) disk: GuestDisk,
    pub(super) map: ActiveMap,
    pub(super) space: HostSpace,
    pub(super) compressed: CompressedClusters,
    pub(super) inflated: ClusterCache,
    pub(super) encryption: ImageEncryption,
    pub(super) commit: CommitQueue,
    /// Runs what is not the business of one request.
    pub(super) own_worker: ImageWorker,
}

impl std::fmt::Debug for Qcow2 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qcow2")
            .field("path", &self.path())
            .field("geometry", self.geometry())
            .finish_non_exhaustive()
    }
}

impl Qcow2 {
    /// Has the image's worker do `work`: what others may come to wait for, whoever asked for it.
    pub(crate) async fn on_own_worker<T, F>(
        self: &Arc<Self>,
        worker: &Worker,
        work: impl FnOnce(Arc<Self>, Worker) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        let me = self.clone();
        let work = move |on| async move {
            let unended = MustEnd::or_poison(&me.files);
            let result = work(me.clone(), on).await;
            unended.end();
            result
        };
        self.own_worker.run(worker, self.path(), work).await
    }

    #[inline]
    pub(crate) fn geometry(&self) -> &Geometry {
        self.header.geometry()
    }

    /// Marks the image if `why` says that its metadata is damaged. The image's own worker does it: others wait for the header.
    pub(crate) async fn mark_if_corrupt(self: &Arc<Self>, worker: &Worker, why: &Error) {
        if !self.header.stop_if_damaged(why) {
            return;
        }
        if sabotage::is(Fault::ChangeHeaderOnLeader) {
            return self.header.mark_corrupt(worker).await;
        }
        let image = self.clone();
        let mark = async move |on: Worker| {
            image.header.mark_corrupt(&on).await;
            Ok(())
        };
        let _ = self.own_worker.run(worker, self.path(), mark).await;
    }

    /// The header as it was when the image was opened.
    pub(crate) fn header(&self) -> &Header {
        self.header.opened()
    }

    /// Changes fields of the header. Not durable until the file is flushed.
    pub(crate) async fn change_header(
        &self,
        worker: &Worker,
        patches: &[Patch],
        on_failure: OnFailure,
    ) -> Result<()> {
        self.header.change(worker, patches, on_failure).await
    }

    pub(crate) fn files(&self) -> &ImageFiles {
        &self.files
    }

    pub(crate) fn active_map(&self) -> &ActiveMap {
        &self.map
    }

    pub(crate) fn bitmaps(&self) -> &Bitmaps {
        &self.bitmaps
    }

    /// The protection of the guest's data.
    #[inline]
    pub(crate) fn protection(&self) -> &Protection {
        self.encryption.protection()
    }

    /// How the image is encrypted, as far as it could be read.
    pub(crate) fn encryption(&self) -> Option<&EncryptionInfo> {
        self.encryption.info()
    }

    #[inline]
    pub(crate) fn readers(&self) -> &Readers {
        self.space.readers()
    }

    pub(crate) fn own_worker(&self) -> &ImageWorker {
        &self.own_worker
    }

    pub(crate) fn cache_mode(&self) -> CacheMode {
        self.disk.cache_mode()
    }

    /// Bytes of the virtual disk.
    pub(crate) fn virtual_size(&self) -> u64 {
        self.disk.size()
    }

    /// Bytes of the virtual disk that requests may use.
    pub(crate) fn visible_size(&self) -> u64 {
        self.disk.visible_size()
    }

    /// Whether something shows, or is to show, where nothing is allocated.
    pub(crate) fn has_backing(&self) -> bool {
        self.disk.has_backing()
    }

    /// Says that the image is to get a backing file: what has to be zero must be allocated as such from now on.
    pub(crate) fn expect_backing(&self) {
        self.disk.expect_backing();
    }

    /// Path of the image file.
    pub(crate) fn path(&self) -> &Path {
        self.files.path()
    }

    /// The image file: it has all metadata.
    pub(crate) fn file(&self) -> &File {
        self.files.file()
    }

    /// The external data file.
    pub(crate) fn data_file(&self) -> Option<&File> {
        self.files.data_file()
    }

    /// The file that guest data lies in.
    pub(crate) fn data(&self) -> &File {
        self.files.data()
    }

    /// Whether the external data file is by itself the truth.
    pub(crate) fn is_raw_external(&self) -> bool {
        self.header.opened().autoclear.contains(Autoclear::RAW_EXTERNAL_DATA)
    }

    /// Whether the image was opened for writing.
    pub(crate) fn is_writable(&self) -> bool {
        self.files.is_writable()
    }

    /// Fails if the image can't be written.
    pub(crate) fn check_writable(&self) -> Result<()> {
        self.files.check_writable()
    }
}
