//! The clusters that an interrupted backup has written behind its last checkpoint. The disk may have changed there since, and what is
//! zero or unchanged now is otherwise left out: it has to be written over what is there.

use super::options::BackupOptions;
use crate::jobs::manifest::Subject;
use crate::node::Driver;
use crate::qcow2::bitmaps::Bits;
use crate::qcow2::map::mapping::Run;
use crate::{Chain, Error, ErrorKind, ExtentKind, Format, Image, OpenOptions, Remedy, Result};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use zebu_storage::Worker;

/// Bytes of a sector.
const SECTOR: u64 = 512;

/// Clusters that the partial image holds itself behind what is done.
#[derive(Clone, Default)]
pub(super) struct Leftovers(Option<Arc<Bits>>);

impl Leftovers {
    /// Looks for them from `done` on, in the image alone: what it stands on is not looked at.
    ///
    /// # Errors
    /// The file ends before what is done; it can't be read.
    pub(super) async fn find(
        worker: &Worker,
        path: &Path,
        options: &BackupOptions,
        subject: Subject,
        done: u64,
    ) -> Result<Self> {
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            chain: Chain::TopOnly,
            cache: options.cache,
            lock_wait: options.lock_wait.clone(),
            ..OpenOptions::default()
        };
        let image = Image::open(worker, path, &open).await?;
        let found = match check_not_cut(worker, &image, done).await {
            Ok(()) => scan(worker, &image, subject, done).await,
            Err(error) => Err(error),
        };
        let closed = image.close(worker).await;
        let found = found?;
        closed.map(|()| found)
    }

    /// The next run of them from `at` on, in whole clusters up to the end of the disk.
    pub(super) fn next(&self, at: u64) -> Option<Range<u64>> {
        self.0.as_ref().and_then(|bits| bits.next_dirty(at))
    }

    /// Whether there is any in the range.
    pub(super) fn touch(&self, range: Range<u64>) -> bool {
        self.next(range.start).is_some_and(|run| run.start < range.end)
    }
}

/// Refuses an image whose file ends before the first `done` bytes of the disk do: what is missing would read as zero.
async fn check_not_cut(worker: &Worker, image: &Image, done: u64) -> Result<()> {
    let Driver::Qcow2(qcow2) = &image.0.driver else { return Ok(()) };
    // Streams are counted in sectors.
    let file_end = qcow2.file().len().next_multiple_of(SECTOR);
    let mut extents = image.extents(0..done.min(image.virtual_size()));
    while let Some(extent) = extents.next(worker).await? {
        let mut at = extent.offset;
        while matches!(extent.kind, ExtentKind::Compressed | ExtentKind::Data { .. }) && at < extent.end() {
            let (run, len) = qcow2.map_tables(worker, at, extent.end() - at).await?;
            let end = match run {
                Run::Compressed { stream } => stream.offset.0.saturating_add(stream.len),
                Run::Data { host } => host.saturating_add(len),
                _ => 0,
            };
            if end > file_end {
                let message = "the partial image was cut short: its file ends before what is done does; begin the \
                               backup anew";
                return Err(Error::new(ErrorKind::Corrupt, message)
                    .on(image.path())
                    .at_guest(at)
                    .with_remedy(Remedy::RestartBackup));
            }
            at += len;
        }
    }
    Ok(())
}

async fn scan(worker: &Worker, image: &Image, subject: Subject, done: u64) -> Result<Leftovers> {
    let mut bits = None;
    let end = image.virtual_size().min(subject.virtual_size);
    let mut extents = image.extents(done..end);
    while let Some(extent) = extents.next(worker).await? {
        if extent.kind != ExtentKind::Unallocated {
            bits.get_or_insert_with(|| {
                Arc::new(Bits::new(subject.virtual_size, subject.cluster_size.trailing_zeros() as u8))
            })
            .mark(extent.offset..extent.end());
        }
    }
    Ok(Leftovers(bits))
}
