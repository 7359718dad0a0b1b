//! Weeks of use of an image in minutes: rewrites, streams, trims, snapshots and changes of size. A model of four bytes for each
//! block knows what the disk and its snapshots must show.

use crate::random::Random;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use zebu_engine::storage::{IoBuf, IoBufs, Worker, WorkerConfig};
use zebu_engine::{
    Access, CacheMode, Durability, Format, Image, NewSnapshot, OpenOptions, Preallocation, Shrink,
    SnapshotRef, ZeroMode,
};

/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// Requests at a time.
const DEPTH: usize = 16;
/// Snapshots at a time.
const MOST_SNAPSHOTS: usize = 4;
/// Blocks of a request of a stream.
const PIECE: u64 = 64;
/// Blocks of the largest change of size.
const MOST_GROWTH: u64 = 4096;

/// The content of blocks: 0 for zeroes, else the number of the write that made it.
type Blocks = Vec<u32>;

/// A disk that is used, and what it must show.
#[derive(Debug)]
pub struct AgedDisk {
    path: PathBuf,
    random: Random,
    blocks: Blocks,
    snapshots: Vec<(String, Blocks)>,
    /// Writes until now.
    writes: u32,
    /// The block where the stream of the moment goes on, and where it ends.
    stream: Range<u64>,
    /// The first block of what is used most.
    hot: u64,
    made: u32,
}

/// A request on blocks.
#[derive(Debug, Clone)]
enum Request {
    Write(Range<u64>, u32),
    Zero(Range<u64>),
    Discard(Range<u64>),
    Read(Range<u64>),
}

impl Request {
    fn blocks(&self) -> &Range<u64> {
        match self {
            Self::Write(blocks, _) | Self::Zero(blocks) | Self::Discard(blocks) | Self::Read(blocks) => {
                blocks
            }
        }
    }
}

/// The bytes of blocks that one write made.
pub fn content(blocks: Range<u64>, write: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(((blocks.end - blocks.start) * BLOCK) as usize);
    for block in blocks {
        let word = (block << 32 | u64::from(write)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for _ in 0..BLOCK / 8 {
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes
}

impl AgedDisk {
    /// A disk of `size` bytes, whose empty image is at `path`.
    pub fn new(path: &Path, size: u64, seed: u64) -> Self {
        Self {
            path: path.to_owned(),
            random: Random::new(seed),
            blocks: vec![0; (size / BLOCK) as usize],
            snapshots: Vec::new(),
            writes: 0,
            stream: 0..0,
            hot: 0,
            made: 0,
        }
    }

    /// Names of the snapshots that are there.
    pub fn snapshots(&self) -> impl Iterator<Item = &str> {
        self.snapshots.iter().map(|(name, _)| name.as_str())
    }

    /// Does so many requests. The image is opened and closed several times on the way.
    ///
    /// # Errors
    /// What failed, or what is not as it must be.
    pub fn age(&mut self, operations: u64) -> Result<(), String> {
        let worker = Worker::new(&WorkerConfig::default()).map_err(|e| e.to_string())?;
        // In an average week, some of each.
        let part = (operations / 40).max(1);
        let mut done = 0;
        while done < operations {
            let until = (done + part).min(operations);
            worker
                .block_on(self.week(&worker, until - done))
                .map_err(|e| format!("after {done} requests: {e}"))?;
            done = until;
        }
        Ok(())
    }

    async fn open(&self, worker: &Worker) -> Result<Image, String> {
        let options = OpenOptions::default().format(Some(Format::Qcow2)).access(Access::ReadWrite);
        let opened = Image::open(worker, &self.path, &options.cache(CacheMode::Writeback)).await;
        opened.map_err(|e| format!("open: {e}"))
    }

    /// Opens the image, does requests, and ends with a snapshot, a change of size, or both.
    async fn week(&mut self, worker: &Worker, operations: u64) -> Result<(), String> {
        let image = self.open(worker).await?;
        self.hot = self.random.below(self.blocks.len() as u64);
        let mut done = 0;
        while done < operations {
            let mut batch: Vec<Request> = Vec::with_capacity(DEPTH);
            while batch.len() < DEPTH {
                let next = self.next();
                let a = next.blocks();
                let meets = |b: &Range<u64>| b.start < a.end && a.start < b.end;
                if batch.iter().any(|other| meets(other.blocks())) {
                    break;
                }
                batch.push(next);
            }
            done += batch.len() as u64;
            self.together(worker, &image, batch).await?;
            if self.random.chance(2) {
                image.flush(worker).await.map_err(|e| format!("flush: {e}"))?;
            }
        }
        if self.random.chance(50) {
            self.resize(worker, &image).await?;
        }
        if self.random.chance(70) {
            self.snapshot(worker, &image).await?;
        }
        image.close(worker).await.map_err(|e| format!("close: {e}"))
    }

    fn next(&mut self) -> Request {
        let blocks = self.blocks.len() as u64;
        let random = &mut self.random;
        let anywhere = |random: &mut Random, most: u64| {
            let len = random.between(1, most);
            let start = random.below(blocks - len);
            start..start + len
        };
        match random.below(100) {
            0..45 => {
                self.writes += 1;
                let mut range = anywhere(random, 16);
                if random.chance(70) {
                    let len = range.end - range.start;
                    let start = (self.hot + random.below(blocks / 10 + 1)) % (blocks - len);
                    range = start..start + len;
                }
                Request::Write(range, self.writes)
            }
            45..60 => {
                if self.stream.is_empty() {
                    let start = random.below(blocks - PIECE);
                    self.stream = start..(start + random.between(1, 64) * PIECE).min(blocks);
                }
                self.writes += 1;
                let end = (self.stream.start + PIECE).min(self.stream.end);
                let range = self.stream.start..end;
                self.stream.start = end;
                Request::Write(range, self.writes)
            }
            60..90 => Request::Discard(anywhere(random, 64)),
            90..95 => Request::Zero(anywhere(random, 64)),
            _ => Request::Read(anywhere(random, 64)),
        }
    }

    /// Does requests on different blocks at once, and notes what they did.
    async fn together(&mut self, worker: &Worker, image: &Image, batch: Vec<Request>) -> Result<(), String> {
        let tasks: Vec<_> = batch
            .iter()
            .map(|request| {
                let (own, image, request) = (worker.clone(), image.clone(), request.clone());
                worker.spawn(async move { submit(&own, &image, request).await })
            })
            .collect();
        let mut outcomes = Vec::with_capacity(tasks.len());
        for task in tasks {
            outcomes.push(task.await);
        }
        for (request, outcome) in batch.into_iter().zip(outcomes) {
            let found = outcome.map_err(|e| format!("{request:?}: {e}"))?;
            let range = request.blocks();
            let noted = &mut self.blocks[range.start as usize..range.end as usize];
            match request {
                Request::Write(_, write) => noted.fill(write),
                Request::Zero(_) => noted.fill(0),
                Request::Discard(ref range) => {
                    // A part of a cluster may stay.
                    let found = read(worker, image, range.clone()).await?;
                    let cluster = image.cluster_size() / BLOCK;
                    let whole = range.start.next_multiple_of(cluster)..range.end / cluster * cluster;
                    for ((block, noted), bytes) in range.clone().zip(noted).zip(found.chunks(BLOCK as usize))
                    {
                        if bytes.iter().all(|byte| *byte == 0) {
                            *noted = 0;
                        } else if whole.contains(&block) {
                            return Err(format!(
                                "block {block} of a whole cluster shows data after {range:?} was discarded"
                            ));
                        } else {
                            check(block, *noted, bytes)?;
                        }
                    }
                }
                Request::Read(ref range) => {
                    let pieces = found.chunks(BLOCK as usize);
                    for ((block, noted), bytes) in range.clone().zip(noted).zip(pieces) {
                        check(block, *noted, bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    async fn resize(&mut self, worker: &Worker, image: &Image) -> Result<(), String> {
        let change = self.random.between(1, MOST_GROWTH.min(self.blocks.len() as u64 / 8));
        let blocks = self.blocks.len() as u64;
        let blocks = if self.random.chance(50) { blocks + change } else { blocks - change };
        let resized = image.resize(worker, blocks * BLOCK, Shrink::Allow, Preallocation::Off).await;
        resized.map_err(|e| format!("resize to {} bytes: {e}", blocks * BLOCK))?;
        self.blocks.resize(blocks as usize, 0);
        self.stream = 0..0;
        Ok(())
    }

    async fn snapshot(&mut self, worker: &Worker, image: &Image) -> Result<(), String> {
        if self.snapshots.len() == MOST_SNAPSHOTS {
            let (name, _) = self.snapshots.swap_remove(self.random.below(MOST_SNAPSHOTS as u64) as usize);
            let deleted = image.delete_snapshot(worker, &SnapshotRef::Name(name.clone())).await;
            deleted.map_err(|e| format!("snapshot {name}, deleted: {e}"))?;
        }
        self.made += 1;
        let name = format!("week{}", self.made);
        let made = image.create_snapshot(worker, NewSnapshot::named(name.clone())).await;
        made.map_err(|e| format!("snapshot {name}: {e}"))?;
        self.snapshots.push((name, self.blocks.clone()));
        Ok(())
    }

    /// Writes what the disk must show into a raw file.
    ///
    /// # Errors
    /// The file's.
    pub fn write_expected(&self, path: &Path) -> std::io::Result<()> {
        write_blocks(path, &self.blocks)
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK
    }

    /// Writes what a snapshot must show into a raw file.
    ///
    /// # Errors
    /// The file's, or there is no such snapshot.
    pub fn write_expected_of(&self, snapshot: &str, path: &Path) -> std::io::Result<()> {
        let found = self.snapshots.iter().find(|(name, _)| name == snapshot);
        let (_, blocks) = found.ok_or(std::io::ErrorKind::NotFound)?;
        write_blocks(path, blocks)
    }
}

/// Writes blocks, each of which one write made, into a raw file.
///
/// # Errors
/// The file's.
pub fn write_blocks(path: &Path, blocks: &[u32]) -> std::io::Result<()> {
    let file = File::create(path)?;
    file.set_len(blocks.len() as u64 * BLOCK)?;
    for (block, write) in (0..).zip(blocks).filter(|(_, write)| **write != 0) {
        file.write_all_at(&content(block..block + 1, *write), block * BLOCK)?;
    }
    Ok(())
}

/// Fails unless a block shows what was noted.
fn check(block: u64, noted: u32, bytes: &[u8]) -> Result<(), String> {
    let is_right = match noted {
        0 => bytes.iter().all(|byte| *byte == 0),
        write => bytes == content(block..block + 1, write),
    };
    if is_right { Ok(()) } else { Err(format!("block {block} is not what write {noted} made")) }
}

async fn read(worker: &Worker, image: &Image, blocks: Range<u64>) -> Result<Vec<u8>, String> {
    let len = ((blocks.end - blocks.start) * BLOCK) as usize;
    let (result, buffers) = image.read(worker, blocks.start * BLOCK, IoBufs::from(worker.buffer(len))).await;
    result.map_err(|e| format!("read of {blocks:?}: {e}"))?;
    let mut bytes = vec![0; len];
    buffers.copy_to(0, &mut bytes);
    Ok(bytes)
}

/// One request; what it read, if it reads.
async fn submit(worker: &Worker, image: &Image, request: Request) -> Result<Vec<u8>, String> {
    let blocks = request.blocks().clone();
    let (offset, len) = (blocks.start * BLOCK, (blocks.end - blocks.start) * BLOCK);
    let done = match request {
        Request::Read(_) => return read(worker, image, blocks).await,
        Request::Write(_, write) => {
            let data = IoBufs::from(IoBuf::copy_of(&content(blocks, write)));
            image.write(worker, offset, data, Durability::Volatile).await.0
        }
        Request::Zero(_) => image.write_zeroes(worker, offset, len, ZeroMode::Unmap).await,
        Request::Discard(_) => image.discard(worker, offset, len).await,
    };
    done.map(|()| Vec::new()).map_err(|e| e.to_string())
}
