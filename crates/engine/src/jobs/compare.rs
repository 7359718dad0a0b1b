//! Whether two images show a guest the same bytes.

use super::buffers::{join, rejoin};
use super::pipeline;
use super::queue::Queue;
use super::status::{Layer, Status};
use super::two_disks::TwoDisks;
use super::zeros::{first_difference, first_nonzero};
use crate::progress::{JobControl, Phase, Tracker};

use crate::{Error, ErrorKind, Extent, ExtentKind, Image};
use std::cell::RefCell;
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use zebu_storage::{IoBuf, Worker};

/// The properties that have to be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strictness {
    /// The bytes that a guest reads; what only the larger image has must read as zero.
    #[default]
    Content,
    /// Also the sizes, and which ranges are allocated (`-s`).
    Allocation,
}

/// How images are compared.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CompareOptions {
    /// The properties that have to be equal. Default: [`Strictness::Content`].
    pub strictness: Strictness,
    /// Pairs of reads in flight, at least 1; more than 1024 count as 1024. Default: 8.
    pub requests: usize,
    /// Most bytes of read buffers. Default: 32 MiB.
    pub buffer_memory: usize,
    /// Watching and stopping. Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(CompareOptions {
    strictness: Strictness,
    requests: usize,
    buffer_memory: usize,
    control: JobControl,
});

impl Default for CompareOptions {
    fn default() -> Self {
        Self {
            strictness: Strictness::Content,
            requests: 8,
            buffer_memory: 32 << 20,
            control: JobControl::default(),
        }
    }
}

/// The outcome of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// No difference of the kind asked for.
    Identical,
    /// The bytes differ.
    ContentMismatch {
        /// The lowest sector (512 bytes) that differs: its offset in bytes.
        offset: u64,
    },
    /// The sizes differ (only with [`Strictness::Allocation`]).
    SizeMismatch,
    /// Different ranges are allocated (only with [`Strictness::Allocation`]).
    StatusMismatch {
        /// The lowest offset in bytes where it does.
        offset: u64,
    },
}

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompareReport {
    /// The outcome.
    pub result: Comparison,
    /// Virtual sizes in bytes of the first and the second image. Where they differ and the result is
    /// [`Comparison::Identical`], the larger image's tail reads as zero.
    pub sizes: [u64; 2],
}

/// Where a comparison failed. (Opening the images is the caller's part.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareStage {
    /// Looking up what is allocated (exit code 3).
    Status,
    /// Reading (exit code 4).
    Read,
    /// Not a failure of the images: it was cancelled, or an option is out of range.
    Control,
}

/// A comparison that could not be finished.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CompareError {
    /// Doing what.
    pub stage: CompareStage,
    /// On which image.
    pub image: Option<PathBuf>,
    /// Why.
    pub error: Error,
}

impl fmt::Display for CompareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for CompareError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// Compares what a guest would read from two images, which may differ in format, size and chain. Ranges that both
/// images know to be zero, and ranges that are the same bytes of the same file, are not read. The offset reported is
/// the lowest one, however the reads were ordered; a failure counts as found at its offset, so that a difference
/// below it is reported instead.
pub async fn compare(
    worker: &Worker,
    first: &Image,
    second: &Image,
    options: &CompareOptions,
) -> Result<CompareReport, CompareError> {
    let control = |error| CompareError { stage: CompareStage::Control, image: None, error };
    if options.requests == 0 {
        let error = Error::new(ErrorKind::InvalidArgument, "compare needs at least one request in flight");
        return Err(control(error));
    }
    let sizes = [first.virtual_size(), second.virtual_size()];
    if options.strictness == Strictness::Allocation && sizes[0] != sizes[1] {
        return Ok(CompareReport { result: Comparison::SizeMismatch, sizes });
    }
    let chunk =
        (options.buffer_memory / options.requests.saturating_mul(2)).min(MAX_CHUNK) & !(MIN_CHUNK - 1);
    let (chunk, tasks) = if chunk >= MIN_CHUNK {
        (chunk, options.requests)
    } else {
        (MIN_CHUNK, (options.buffer_memory / (2 * MIN_CHUNK)).max(1))
    };

    let chain_of = |image: &Image| {
        Layer::chain(image).map_err(|error| CompareError {
            stage: CompareStage::Status,
            image: Some(image.path().to_owned()),
            error,
        })
    };
    let total = sizes[0].max(sizes[1]);
    let job = Rc::new(Job {
        chains: [chain_of(first)?, chain_of(second)?],
        images: [first.clone(), second.clone()],
        sizes,
        strictness: options.strictness,
        chunk,
        tracker: Tracker::new(&options.control, Phase::Comparing, total),
        finding: RefCell::new(None),
    });
    let reader = |own: Worker, queue| {
        let job = Rc::clone(&job);
        async move { job.read_pieces(&own, &queue).await }
    };
    pipeline::run(worker, tasks, reader, async |queue| job.walk(worker, queue).await).await;

    let result = match job.finding.take() {
        None => Comparison::Identical,
        Some((_, Finding::Result(result))) => result,
        Some((_, Finding::Failure(error))) => return Err(*error),
    };
    job.tracker.finish(None);
    Ok(CompareReport { result, sizes })
}

/// Most bytes read at once from one image.
const MAX_CHUNK: usize = 1 << 20;
/// Fewest; a bound of memory that allows less is met by fewer requests.
const MIN_CHUNK: usize = 64 << 10;
/// The unit in which a difference is reported, in bytes.
const SECTOR: u64 = 512;

/// Which images have to be read for a range; the other one is known to be zero there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sides {
    Both,
    Only(usize),
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    offset: u64,
    len: usize,
    sides: Sides,
}

enum Finding {
    Result(Comparison),
    Failure(Box<CompareError>),
}

struct Job {
    images: [Image; 2],
    chains: [Vec<Layer>; 2],
    sizes: [u64; 2],
    strictness: Strictness,
    chunk: usize,
    tracker: Tracker,
    /// The finding at the lowest offset so far.
    finding: RefCell<Option<(u64, Finding)>>,
}

impl Job {
    fn record(&self, offset: u64, finding: Finding) {
        let mut lowest = self.finding.borrow_mut();
        if lowest.as_ref().is_none_or(|(at, _)| offset < *at) {
            *lowest = Some((offset, finding));
        }
    }

    fn fail(&self, offset: u64, stage: CompareStage, side: Option<usize>, error: Error) {
        let image = side.map(|side| self.images[side].path().to_owned());
        self.record(offset, Finding::Failure(Box::new(CompareError { stage, image, error })));
    }

    /// Whether something was found below `offset`, so that what lies there does not matter any more.
    fn is_decided_below(&self, offset: u64) -> bool {
        self.finding.borrow().as_ref().is_some_and(|(at, _)| *at <= offset)
    }

    /// Walks both mappings in step, and queues what has to be read in order of offset.
    async fn walk(&self, worker: &Worker, queue: &Queue<Piece>) {
        let walks = [0, 1].map(|side| self.images[side].source_extents(0..self.sizes[side]));
        let mut disks = TwoDisks::new(walks, self.sizes[0].max(self.sizes[1]));
        let mut pending: Option<Piece> = None;
        loop {
            if let Err(error) = self.tracker.check() {
                self.fail(0, CompareStage::Control, None, error);
                return;
            }
            let mut position = disks.position();
            if self.is_decided_below(position) {
                return;
            }
            let (until, extents) = match disks.next(worker).await {
                Ok(Some(step)) => (step.end, step.extents),
                Ok(None) => break,
                Err((side, error)) => {
                    self.fail(position, CompareStage::Status, Some(side), error);
                    // What is still to be read lies below this offset, and decides first.
                    break;
                }
            };
            if self.strictness == Strictness::Allocation && !is_allocated_alike(&extents, &self.chains) {
                self.record(position, Finding::Result(Comparison::StatusMismatch { offset: position }));
                break;
            }
            let must_read = [0, 1].map(|side| extents[side].is_some_and(|extent| !extent.is_zero()));
            let sides = match must_read {
                [false, false] => None,
                [true, true] if self.is_same_storage(&extents, position) => None,
                [true, true] => Some(Sides::Both),
                [true, false] => Some(Sides::Only(0)),
                [false, true] => Some(Sides::Only(1)),
            };
            let Some(sides) = sides else {
                self.tracker.advance(until - position);
                continue;
            };
            // Pieces end at multiples of the chunk, so that reads stay aligned, and grow over extents that are to be
            // treated alike.
            while position < until {
                let boundary = (position / self.chunk as u64 + 1).saturating_mul(self.chunk as u64);
                let len = (until.min(boundary) - position) as usize;
                match &mut pending {
                    Some(piece)
                        if piece.sides == sides
                            && piece.offset + piece.len as u64 == position
                            && piece.len + len <= self.chunk =>
                    {
                        piece.len += len;
                    }
                    pending => {
                        if let Some(complete) = pending.replace(Piece { offset: position, len, sides })
                            && !queue.push(complete).await
                        {
                            return;
                        }
                    }
                }
                position += len as u64;
            }
        }
        if let Some(piece) = pending {
            queue.push(piece).await;
        }
    }

    /// Whether both extents show the same bytes of the same file at `position`: a backing file that both share.
    fn is_same_storage(&self, extents: &[Option<Extent>; 2], position: u64) -> bool {
        let place = |side: usize| {
            let extent = extents[side].as_ref()?;
            let ExtentKind::Data { host } = extent.kind else { return None };
            let file = self.images[side].data_file_at(extent.depth)?;
            Some((file.id(), host + (position - extent.offset)))
        };
        place(0).is_some_and(|a| place(1) == Some(a))
    }

    async fn read_pieces(&self, worker: &Worker, queue: &Queue<Piece>) {
        let mut buffers = [worker.buffer(self.chunk), worker.buffer(self.chunk)];
        while let Some(piece) = queue.pop().await {
            if self.is_decided_below(piece.offset) {
                continue;
            }
            if let Err(error) = self.tracker.check() {
                self.fail(0, CompareStage::Control, None, error);
                continue;
            }
            if let Err(error) = self.tracker.keep_to_rate(worker, piece.len as u64).await {
                self.fail(0, CompareStage::Control, None, error);
                continue;
            }
            buffers = self.compare_piece(worker, piece, buffers).await;
            self.tracker.advance(piece.len as u64);
        }
    }

    async fn compare_piece(&self, worker: &Worker, piece: Piece, buffers: [IoBuf; 2]) -> [IoBuf; 2] {
        let [mut a, mut b] = buffers;
        let offset = piece.offset;
        let (difference, buffers) = match piece.sides {
            Sides::Both => {
                let (head_a, head_b) = (a.split_to(piece.len), b.split_to(piece.len));
                let ((read_a, head_a), (read_b, head_b)) = join(
                    self.images[0].read_source(worker, offset, head_a.into()),
                    self.images[1].read_source(worker, offset, head_b.into()),
                )
                .await;
                let failed = match (read_a, read_b) {
                    (Err(error), _) => Some((0, error)),
                    (_, Err(error)) => Some((1, error)),
                    _ => None,
                };
                (a, b) = (rejoin(head_a, a), rejoin(head_b, b));
                if let Some((side, error)) = failed {
                    self.fail(offset, CompareStage::Read, Some(side), error);
                    return [a, b];
                }
                (first_difference(&a.as_slice()[..piece.len], &b.as_slice()[..piece.len]), [a, b])
            }
            Sides::Only(side) => {
                let head = a.split_to(piece.len);
                let (read, head) = self.images[side].read_source(worker, offset, head.into()).await;
                a = rejoin(head, a);
                if let Err(error) = read {
                    self.fail(offset, CompareStage::Read, Some(side), error);
                    return [a, b];
                }
                (first_nonzero(&a.as_slice()[..piece.len]), [a, b])
            }
        };
        if let Some(at) = difference {
            let offset = (offset + at as u64) / SECTOR * SECTOR;
            self.record(offset, Finding::Result(Comparison::ContentMismatch { offset }));
        }
        buffers
    }
}

fn is_allocated_alike(extents: &[Option<Extent>; 2], chains: &[Vec<Layer>; 2]) -> bool {
    let status = |side: usize| {
        let extent = extents[side].as_ref()?;
        Some(Status::of(extent, &chains[side]))
    };
    match (status(0), status(1)) {
        (Some(a), Some(b)) => a.is_allocated_like(&b),
        _ => true,
    }
}
