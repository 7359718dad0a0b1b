//! Runs streams of operations through zebu's library and compares every answer with the model.

use crate::model::{DiscardRule, Model, difference};
use crate::stream::{Op, Stream};
use std::path::Path;
use zebu::storage::{Engine, IoBuf, IoBufs, Worker, WorkerConfig};
use zebu::{Access, CacheMode, Error, ErrorKind, Image, OpenOptions, Preallocation, Shrink};

/// How an image is driven.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Which completion queue.
    pub engine: Engine,
    /// Most operations in flight.
    pub depth: usize,
    /// How the image is opened.
    pub options: OpenOptions,
    /// What discarding does on this image.
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
        let options = OpenOptions {
            format: Some(zebu::Format::Qcow2),
            access: Access::ReadWrite,
            cache,
            ..OpenOptions::default()
        };
        Self { engine, depth: 8, options, discard: DiscardRule::WholeClustersZero, resize: ResizeRule::Works }
    }
}

/// A worker of the kind asked for. Where a sandbox refuses io_uring, threads take its place, with a note.
///
/// # Panics
/// If there is no worker to be had.
pub fn worker(engine: Engine) -> Worker {
    let config = WorkerConfig { engine, ..WorkerConfig::default() };
    Worker::new(&config).unwrap_or_else(|refused| {
        assert!(engine == Engine::IoUring, "no worker: {refused}");
        eprintln!("note: io_uring refused ({refused}); threads instead");
        Worker::new(&WorkerConfig { engine: Engine::Threads, ..config }).expect("threads always work")
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
        let mut next = stream.next_op();
        let mut done = 0;
        while done < count {
            if next.is_barrier() {
                alone(&worker, path, setup, &mut image, next, stream, model)
                    .await
                    .map_err(|e| format!("operation {done}, {next:?}: {e}"))?;
                done += 1;
                next = stream.next_op();
                continue;
            }
            let mut batch = vec![next];
            loop {
                next = stream.next_op();
                let full = batch.len() == setup.depth || done + batch.len() == count;
                if full || !batch.iter().all(|op| op.commutes_with(&next)) {
                    break;
                }
                batch.push(next);
            }
            together(&worker, &image, setup, &batch, done, model).await?;
            done += batch.len();
        }
        let found = read_all(&worker, &image, 1 << 20).await.map_err(|e| format!("reading all: {e}"))?;
        if let Some(text) = difference(0, model.bytes(), &found) {
            return Err(format!("reading all after {done} operations: {text}"));
        }
        image.close(&worker).await.map_err(|e| format!("close: {e}"))
    })
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
        match image.resize(worker, size, Shrink::Allow, Preallocation::Off).await {
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
