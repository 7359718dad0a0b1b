//! The clusters that an interrupted backup has written behind its last checkpoint. The disk may have changed there since, and what is
//! zero or unchanged now is otherwise left out: it has to be written over what is there.

use crate::jobs::manifest::Subject;
use crate::qcow2::bitmaps::Bits;
use crate::{CacheMode, Chain, ExtentKind, Format, Image, OpenOptions, Result};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use zebu_storage::Worker;

/// Clusters that the partial image holds itself behind what is done.
#[derive(Clone, Default)]
pub(super) struct Leftovers(Option<Arc<Bits>>);

impl Leftovers {
    /// Looks for them from `done` on, in the image alone: what it stands on is not looked at.
    pub(super) async fn find(
        worker: &Worker,
        path: &Path,
        cache: CacheMode,
        subject: Subject,
        done: u64,
    ) -> Result<Self> {
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            chain: Chain::TopOnly,
            cache,
            ..OpenOptions::default()
        };
        let image = Image::open(worker, path, &open).await?;
        let found = scan(worker, &image, subject, done).await;
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
