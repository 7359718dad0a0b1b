//! Runs streams of operations through zebu's library and compares every answer with the model.

use crate::model::{DiscardRule, Model, difference};
use crate::stream::{Op, Stream};
use std::ops::Range;
use std::path::Path;
use zebu_engine::storage::{Engine, IoBuf, IoBufs, Worker, WorkerConfig};
use zebu_engine::{Access, CacheMode, Error, ErrorKind, Image, OpenOptions, Preallocation, Shrink};

/// How an image is driven.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Which completion queue.
    pub engine: Engine,
    /// Most operations in flight.
    pub depth: usize,
    /// How the image is opened.
    pub options: OpenOptions,
    /// The effect of a discard on this image.
    pub discard: DiscardRule,
    /// Whether the image may refuse to change its size (version 2 with snapshots).
    pub resize: ResizeRule,
}

/// Whether an image may refuse to change its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeRule {
    /// It must do it.
    Works,
    /// It may say that it is not supported; the size stays then.
    MayRefuse,
}

impl Setup {
    /// Page cache, depth 8.
    pub fn new(engine: Engine, cache: CacheMode) -> Self {
        let options = OpenOptions::default()
            .format(Some(zebu_engine::Format::Qcow2))
            .access(Access::ReadWrite)
            .cache(cache);
        Self { engine, depth: 8, options, discard: DiscardRule::WholeClustersZero, resize: ResizeRule::Works }
    }
}

/// A worker of the kind asked for. Where a sandbox refuses io_uring, threads take its place, with a note.
///
/// # Panics
/// If there is no worker to be had.
pub fn worker(engine: Engine) -> Worker {
    let config = WorkerConfig::default().engine(engine);
    Worker::new(&config).unwrap_or_else(|refused| {
        assert!(engine == Engine::IoUring, "no worker: {refused}");
        eprintln!("note: io_uring refused ({refused}); threads instead");
        Worker::new(&config.engine(Engine::Threads)).expect("threads always work")
    })
}

/// Reads a whole disk, in pieces of up to `piece` bytes.
pub async fn read_all(worker: &Worker, image: &Image, piece: u64) -> Result<Vec<u8>, Error> {
    let size = image.virtual_size();
    let mut bytes = Vec::with_capacity(size as usize);
    let mut offset = 0;
    while offset < size {
        let len = piece.min(size - offset);
        bytes.extend(read(worker, image, offset, len).await?);
        offset += len;
    }
    Ok(bytes)
}

async fn read(worker: &Worker, image: &Image, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
    let buffers = IoBufs::from(worker.buffer(len as usize));
    let (result, buffers) = image.read(worker, offset, buffers).await;
    result?;
    let mut bytes = vec![0; len as usize];
    buffers.copy_to(0, &mut bytes);
    Ok(bytes)
}

/// Runs `count` operations of `stream` on the image `path`, which holds what `model` holds, reads everything back, and
/// closes it. The model holds what the image holds afterwards.
///
/// An error says which operation went wrong and how.
pub fn run(
    path: &Path,
    setup: &Setup,
    stream: &mut Stream,
    count: usize,
    model: &mut Model,
) -> Result<(), String> {
    let worker = worker(setup.engine);
    worker.block_on(async {
        let mut image = open(&worker, path, setup).await?;
        let mut done = 0;
        while done < count {
            let (ran, stopped_at) = batches(&worker, &image, setup, stream, done..count, model).await?;
            done += ran;
            if let Some(op) = stopped_at {
                alone(&worker, path, setup, &mut image, op, stream, model)
                    .await
                    .map_err(|e| format!("operation {done}, {op:?}: {e}"))?;
                done += 1;
            }
        }
        finish(&worker, &image, model).await
    })
}

/// As [`run`], with as many queues (threads with a worker of their own) on the one image as there are streams, which
/// must be lanes of each other ([`crate::stream::Mix::Lane`]). Each queue runs `count` operations.
pub fn run_queues(
    path: &Path,
    setup: &Setup,
    streams: Vec<Stream>,
    count: usize,
    model: &mut Model,
) -> Result<(), String> {
    let first = worker(setup.engine);
    let image = first.block_on(open(&first, path, setup))?;
    let lanes = streams.len() as u64;
    let done: Vec<Result<Model, String>> = std::thread::scope(|scope| {
        let queue = |mut stream: Stream| {
            let (image, mut own) = (image.clone(), model.clone());
            scope.spawn(move || {
                let worker = worker(setup.engine);
                let all = batches(&worker, &image, setup, &mut stream, 0..count, &mut own);
                worker.block_on(all).map(|_| own)
            })
        };
        let threads: Vec<_> = streams.into_iter().map(queue).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a queue panicked".into()))).collect()
    });
    for (index, own) in (0..).zip(done) {
        model.adopt_lane(&own.map_err(|e| format!("queue {index}: {e}"))?, index, lanes);
    }
    first.block_on(finish(&first, &image, model))
}

/// Reads everything back and closes the image.
async fn finish(worker: &Worker, image: &Image, model: &Model) -> Result<(), String> {
    let found = read_all(worker, image, 1 << 20).await.map_err(|e| format!("reading all: {e}"))?;
    if let Some(text) = difference(0, model.bytes(), &found) {
        return Err(format!("reading all at the end: {text}"));
    }
    image.close(worker).await.map_err(|e| format!("close: {e}"))
}

/// Runs operations in batches of those that commute, at most to the end of `numbers`. Returns how many it ran, and the
/// operation that must run alone, if it stopped before one.
async fn batches(
    worker: &Worker,
    image: &Image,
    setup: &Setup,
    stream: &mut Stream,
    numbers: Range<usize>,
    model: &mut Model,
) -> Result<(usize, Option<Op>), String> {
    let mut first = numbers.start;
    let mut batch: Vec<Op> = Vec::with_capacity(setup.depth);
    let mut stopped_at = None;
    while stopped_at.is_none() && first + batch.len() < numbers.end {
        let next = stream.next_op();
        let joins = batch.len() < setup.depth && batch.iter().all(|op| op.commutes_with(&next));
        if !joins || next.is_barrier() {
            together(worker, image, setup, &batch, first, model).await?;
            first += batch.len();
            batch.clear();
        }
        if next.is_barrier() {
            stopped_at = Some(next);
        } else {
            batch.push(next);
        }
    }
    together(worker, image, setup, &batch, first, model).await?;
    Ok((first + batch.len() - numbers.start, stopped_at))
}

async fn open(worker: &Worker, path: &Path, setup: &Setup) -> Result<Image, String> {
    Image::open(worker, path, &setup.options).await.map_err(|e| format!("open: {e}"))
}

/// An operation that nothing runs beside.
async fn alone(
    worker: &Worker,
    path: &Path,
    setup: &Setup,
    image: &mut Image,
    op: Op,
    stream: &mut Stream,
    model: &mut Model,
) -> Result<(), String> {
    if let Op::Resize { size } = op {
        let mode = match size / 512 % 4 {
            _ if size <= image.virtual_size() => Preallocation::Off,
            0 => Preallocation::Metadata,
            1 => Preallocation::Full,
            _ => Preallocation::Off,
        };
        match image.resize(worker, size, Shrink::Allow, mode).await {
            Ok(()) => {
                model.resize(size);
                stream.resized(size);
            }
            Err(e) if setup.resize == ResizeRule::MayRefuse && e.kind() == ErrorKind::Unsupported => {}
            Err(e) => return Err(e.to_string()),
        }
        return match image.virtual_size() {
            found if found == model.size() => Ok(()),
            found => Err(format!("size {} expected, {found} found", model.size())),
        };
    }
    image.close(worker).await.map_err(|e| format!("close: {e}"))?;
    *image = open(worker, path, setup).await?;
    Ok(())
}

/// Operations that commute, all in flight at once.
async fn together(
    worker: &Worker,
    image: &Image,
    setup: &Setup,
    batch: &[Op],
    first: usize,
    model: &mut Model,
) -> Result<(), String> {
    let tasks: Vec<_> = batch
        .iter()
        .map(|op| {
            let (task_worker, image, op) = (worker.clone(), image.clone(), *op);
            worker.spawn(async move { submit(&task_worker, &image, op).await })
        })
        .collect();
    let mut outcomes = Vec::with_capacity(batch.len());
    for task in tasks {
        outcomes.push(task.await);
    }
    for (number, (op, outcome)) in (first..).zip(batch.iter().zip(outcomes)) {
        let failed = |text: String| format!("operation {number}, {op:?}: {text}");
        let read_back = outcome.map_err(|e| failed(e.to_string()))?;
        match *op {
            Op::Read { offset, len } => {
                if let Some(text) = difference(offset, model.range(offset, len), &read_back) {
                    return Err(failed(text));
                }
            }
            Op::Write { offset, len, seed, .. } => model.write(offset, &Op::data(seed, len)),
            Op::Zero { offset, len, .. } => model.zero(offset, len),
            Op::Discard { offset, len } => {
                let found = read(worker, image, offset, len).await.map_err(|e| failed(e.to_string()))?;
                model.adopt_discard(offset, &found, image.cluster_size(), setup.discard).map_err(failed)?;
            }
            Op::Flush | Op::Resize { .. } | Op::Reopen => {}
        }
    }
    Ok(())
}

/// One request; what it read, if it reads.
async fn submit(worker: &Worker, image: &Image, op: Op) -> Result<Vec<u8>, Error> {
    match op {
        Op::Read { offset, len } => return read(worker, image, offset, len).await,
        Op::Write { offset, len, seed, durability } => {
            let data = IoBufs::from(IoBuf::copy_of(&Op::data(seed, len)));
            image.write(worker, offset, data, durability).await.0?;
        }
        Op::Zero { offset, len, mode } => image.write_zeroes(worker, offset, len, mode).await?,
        Op::Discard { offset, len } => image.discard(worker, offset, len).await?,
        Op::Flush => image.flush(worker).await?,
        Op::Resize { .. } | Op::Reopen => {}
    }
    Ok(Vec::new())
}
