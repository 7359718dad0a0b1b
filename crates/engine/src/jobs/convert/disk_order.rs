//! Which new qcow2 images are laid out in the order of the disk, before they are opened as images.

use super::job::Part;
use super::moves::Moves;
use super::options::{ConvertOptions, CopyMode, PlaceOrder, TargetClusters};
use super::sizing::Sizing;
use crate::transfer::{FileRange, Transfer, transfer};
use crate::{CreateOptions, Error, Format, Preallocation, Result};
use std::path::Path;
use zebu_storage::{File, FileId, Worker};

/// Bytes of a source that are moved to the target to see whether that works, and the unit of shorter files.
const TRIED: u64 = 64 << 10;
const LEAST: u64 = 4096;

/// The choices that the making of a target depends on.
pub(super) struct Making<'a> {
    pub(super) parts: &'a [Part],
    pub(super) options: &'a ConvertOptions,
    pub(super) sizing: Sizing,
    pub(super) copy: CopyMode,
}

impl Making<'_> {
    /// Whether the clusters of a new image at `path` can be given places before it is an image. Where the engine has to open it,
    /// the places of tables depend on when these are written: keys, data files, and space that was set aside.
    pub(super) fn can_place(&self, create: &CreateOptions, path: &Path) -> bool {
        let is_plain = create.format == Format::Qcow2
            && create.preallocation == Preallocation::Off
            && create.encryption.is_none()
            && create.data_file.is_none()
            && !create.data_file_raw;
        // What else there is can't be cut to nothing, so it does not read as zero.
        let is_regular = std::fs::metadata(path).map_or(true, |found| found.is_file());
        let packs = self.options.clusters == TargetClusters::Compressed;
        let overlays = create.backing.is_some();
        let cluster = create.cluster_size.max(1);
        let ends_cluster = |part: &Part| part.end().is_multiple_of(cluster);
        let Some((last, others)) = self.parts.split_last() else { return false };
        let ends_disk = create.size.is_some_and(|size| size.next_multiple_of(512) <= last.end());
        // A cluster hides the backing file as a whole. Packed zeroes would be as many in version 2, which has no entries for them.
        let hides_whole_clusters = others.iter().all(ends_cluster)
            && (ends_disk || ends_cluster(last))
            && (self.sizing.chunk as u64).is_multiple_of(cluster)
            && !(packs && create.version < 3);
        self.options.order == PlaceOrder::OfDisk
            && is_plain
            && is_regular
            && (!overlays || hides_whole_clusters)
    }

    /// Tries which files of the sources the kernel moves data from into a target that is empty, and stays so.
    pub(super) async fn try_moves(&self, worker: &Worker, target: &File) -> Result<Moves> {
        let how = match self.copy {
            CopyMode::Range => Transfer::Copy,
            CopyMode::Reflink => Transfer::Share,
            // Who asked for a fully allocated target wants no shared blocks, unless that was asked for, too.
            CopyMode::Auto if self.options.sparse_size > 0 => Transfer::Share,
            CopyMode::Auto | CopyMode::Buffers => return Ok(Moves::default()),
        };
        let images = self.parts.iter().map(|part| &part.image);
        let mut tried: Vec<(FileId, Option<Error>)> = Vec::new();
        for file in images.flat_map(|image| (0..).map_while(move |depth| image.data_file_at(depth))) {
            let len = (file.len() / LEAST * LEAST).min(TRIED);
            if len > 0 && tried.iter().all(|(id, _)| *id != file.id()) {
                let source = FileRange { file: file.clone(), offset: 0, len };
                tried.push((file.id(), transfer(worker, how, &source, target, 0).await.err()));
            }
        }
        if tried.iter().any(|(_, refusal)| refusal.is_none()) {
            worker.set_len(target, 0).await.map_err(|e| Error::from(e).on(target.path()))?;
        }
        Ok(Moves { how: Some(how), tried })
    }
}
