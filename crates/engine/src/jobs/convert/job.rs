//! A running conversion: what its threads share.

use super::options::{
    ConvertOptions, ConvertReport, CopyMode, PlaceOrder, ReadErrors, SkippedRange, TargetContent,
};
use super::sink::Sink;
use super::sizing::Sizing;
use super::source_end::SourceEnd;
use super::turns::Turns;
use super::unreadable::Unreadable;
use crate::progress::{Phase, Tracker};
use crate::{Error, ErrorKind, Extent, ExtentKind, Image, Result};
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use zebu_storage::sync::Mutex;

/// A source, and where it lies on the target's disk.
pub(super) struct Part {
    pub(super) image: Image,
    /// Offset in bytes on the target's disk.
    pub(super) start: u64,
    /// Bytes.
    pub(super) len: u64,
    /// Offset in bytes on the source's disk of what lies at the start.
    first: u64,
    /// Depth of the lowest image of its chain, and bytes of that image's disk.
    lowest: (u32, u64),
}

impl Part {
    /// Lays the sources out one behind the other.
    pub(super) fn list(sources: &[Image], range: Option<Range<u64>>) -> Result<Vec<Self>> {
        let mut start: u64 = 0;
        let mut parts = Vec::with_capacity(sources.len());
        for image in sources {
            let size = image.virtual_size();
            let range = range.clone().unwrap_or(0..size);
            let (first, end) = (range.start.min(size), range.end.min(size));
            let len = end.saturating_sub(first);
            let mut lowest = (0, size);
            let mut next = image.backing();
            while let Some(below) = next {
                lowest = (lowest.0 + 1, below.virtual_size());
                next = below.backing();
            }
            parts.push(Self { image: image.clone(), start, len, first, lowest });
            start = start.checked_add(len).filter(|&end| i64::try_from(end).is_ok()).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, "the sources together are larger than a disk can be")
            })?;
        }
        if parts.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "convert needs at least one source"));
        }
        Ok(parts)
    }

    pub(super) fn end(&self) -> u64 {
        self.start + self.len
    }

    /// The offset on the source's disk of what lies at `offset` of the target's.
    pub(super) fn in_source(&self, offset: u64) -> u64 {
        offset - self.start + self.first
    }

    /// Whether what lies below the whole chain shows there.
    pub(super) fn shows_what_is_below(&self, extent: &Extent) -> bool {
        let (depth, size) = self.lowest;
        extent.kind == ExtentKind::Unallocated && extent.depth == depth && extent.offset < size
    }

    /// Whether what the image itself does not hold is read from another file.
    pub(super) fn has_backing(&self) -> bool {
        self.image.backing().is_some()
    }
}

/// Bytes of the clusters of a target in which a cluster that has a place hides the backing file.
fn hiding_cluster(target: &Sink, content: TargetContent) -> Option<NonZeroU64> {
    match target {
        Sink::Clusters { writer, .. } if content == TargetContent::SharedBacking => {
            NonZeroU64::new(writer.cluster_size())
        }
        _ => None,
    }
}

/// State of a conversion, shared by its threads.
pub(super) struct Job {
    pub(super) parts: Vec<Part>,
    pub(super) target: Sink,
    content: TargetContent,
    /// Bytes from the disk's start in which the target shows its backing file, which holds what the sources' backing
    /// files hold; 0 without one.
    pub(super) shared_backing: u64,
    pub(super) copy: CopyMode,
    pub(super) read_errors: ReadErrors,
    /// 0: nothing is left out.
    pub(super) sparse_size: usize,
    pub(super) sizing: Sizing,
    /// Bytes of the target's clusters, if they are compressed.
    pub(super) compressed: Option<NonZeroU64>,
    /// Bytes of the target's clusters, if what is moved in part is moved whole.
    pub(super) whole: Option<NonZeroU64>,
    /// Turns, if places are chosen in the order of the disk.
    turns: Option<Turns>,
    pub(super) tracker: Tracker,
    total: u64,
    /// The end of the source, if it is not known before.
    source_end: Option<SourceEnd>,
    /// Bytes that a thread takes at once; a multiple of the chunk.
    region: u64,
    /// Where the part of the disk starts that no thread has taken.
    cursor: AtomicU64,
    stopped: AtomicBool,
    failure: Mutex<Option<Error>>,
    report: Mutex<ConvertReport>,
    unreadable: Mutex<Unreadable>,
}

impl Job {
    pub(super) fn new(
        parts: Vec<Part>,
        target: Sink,
        content: TargetContent,
        options: &ConvertOptions,
        sizing: Sizing,
        compressed: Option<NonZeroU64>,
        copy: CopyMode,
    ) -> Result<Arc<Self>> {
        let total = parts.last().map_or(0, Part::end);
        if target.virtual_size() < total {
            return Err(Error::new(ErrorKind::InvalidArgument, "output file is smaller than input file")
                .on(target.path()));
        }
        let whole = compressed.or(hiding_cluster(&target, content));
        let shared_backing = match content {
            TargetContent::SharedBacking => target.backing_size(),
            TargetContent::Unknown | TargetContent::Zero | TargetContent::Base => 0,
        };
        // With several threads, regions are small enough that all have work to the end, and large enough that each
        // thread's writes stay together.
        let placed = target.placed_file().is_some();
        let turns = (placed && options.order == PlaceOrder::OfDisk).then(Turns::default);
        let region = if sizing.threads == 1 {
            u64::MAX
        } else if turns.is_some() {
            // Each thread has read its share when its turn comes.
            (sizing.tasks.div_ceil(sizing.threads) * sizing.chunk) as u64
        } else {
            let share = total / (4 * sizing.threads as u64);
            share.clamp(16 << 20, 1 << 30).next_multiple_of(sizing.chunk as u64)
        };
        Ok(Arc::new(Self {
            parts,
            target,
            content,
            shared_backing,
            copy,
            compressed,
            whole,
            turns,
            read_errors: options.read_errors,
            sparse_size: options.sparse_size as usize,
            sizing,
            tracker: Tracker::new(&options.control, Phase::Copying, total),
            total,
            source_end: options.source_end.clone(),
            region,
            cursor: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            failure: Mutex::new(None),
            report: Mutex::new(ConvertReport { total, ..ConvertReport::default() }),
            unreadable: Mutex::default(),
        }))
    }

    /// Whether the target reads as zero at `offset`, and behind it, where nothing is written. (An overlay does behind
    /// the end of its backing file.)
    pub(super) fn is_zero_unless_written(&self, offset: u64) -> bool {
        match self.content {
            TargetContent::Unknown | TargetContent::Base => false,
            TargetContent::Zero => true,
            TargetContent::SharedBacking => offset >= self.shared_backing,
        }
    }

    /// Whether the target is what the sources stand on.
    pub(super) fn target_is_base(&self) -> bool {
        self.content == TargetContent::Base
    }

    /// The next range of the disk for the calling thread to copy.
    pub(super) fn claim(&self) -> Option<Range<u64>> {
        let take =
            |start: u64| (start < self.total).then(|| start.saturating_add(self.region).min(self.total));
        let start = self.cursor.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        Some(start..start.saturating_add(self.region).min(self.total))
    }

    /// The end of the last source on the target's disk, as far as it is known.
    pub(super) fn end(&self) -> u64 {
        let known = self.source_end.as_ref().and_then(SourceEnd::get);
        known.map_or(self.total, |end| end.min(self.total))
    }

    /// Bytes of a piece that lie before the end.
    pub(super) fn before_end(&self, offset: u64, len: usize) -> usize {
        usize::try_from(self.end().saturating_sub(offset)).map_or(len, |left| left.min(len))
    }

    /// Waits until the places of all that lies before `offset` are chosen, if they are in the order of the disk; false: the job has
    /// stopped.
    pub(super) async fn turn(&self, offset: u64) -> bool {
        match &self.turns {
            Some(turns) => turns.wait(offset).await,
            None => true,
        }
    }

    /// Notes that the places of a part of the disk are chosen, or that it needs none.
    pub(super) fn pass(&self, offset: u64, len: u64) {
        if let Some(turns) = &self.turns {
            turns.pass(offset..offset.saturating_add(len));
        }
    }

    /// Counts bytes of the disk that are dealt with.
    pub(super) fn advance(&self, len: u64) {
        if let Some(end) = &self.source_end {
            self.tracker.set_total(end.likely().min(self.total));
        }
        self.tracker.advance(len);
    }

    /// Stops the job with an error; the first one counts.
    pub(super) fn fail(&self, error: Error) {
        self.failure.lock().get_or_insert(error);
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(turns) = &self.turns {
            turns.give_up();
        }
    }

    /// Stops the job if the calling thread panics: others may wait for what it leaves undone.
    pub(super) fn fail_if_panicking(&self) {
        if std::thread::panicking() {
            self.fail(Error::new(ErrorKind::Panicked, "a thread of the conversion panicked"));
        }
    }

    /// Stops the job because nobody waits for it any more.
    pub(super) fn abandon(&self) {
        self.fail(Error::new(ErrorKind::Cancelled, "the conversion was dropped"));
    }

    /// Whether no further piece is to be started.
    pub(super) fn is_stopped(&self) -> bool {
        if let Err(cancelled) = self.tracker.check() {
            self.fail(cancelled);
        }
        self.stopped.load(Ordering::Relaxed)
    }

    /// The result so far.
    pub(super) fn outcome(&self) -> Result<()> {
        self.failure.lock().clone().map_or(Ok(()), Err)
    }

    /// Counts what was done.
    pub(super) fn count(&self, add: impl FnOnce(&mut ConvertReport)) {
        add(&mut self.report.lock());
    }

    /// Notes a range of the target that is zero because the source could not be read.
    pub(super) fn count_unreadable(&self, range: SkippedRange) {
        self.unreadable.lock().note(range);
    }

    pub(super) fn report(&self) -> ConvertReport {
        let mut report = self.report.lock().clone();
        report.total = self.end();
        self.unreadable.lock().tell(&mut report);
        report
    }
}
