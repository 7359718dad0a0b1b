//! A load that once lost data on XFS: many writes in flight that make a file grow, beside requests that zero and give back
//! other parts of it.

use crate::driver;
use crate::qemu::Qemu;
use crate::random::Random;
use std::collections::VecDeque;
use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use zebu_engine::storage::{Engine, IoBuf, JoinHandle, Worker, WorkerConfig};
use zebu_engine::{
    Access, CacheMode, CreateOptions, Durability, Error, Format, Image, OpenOptions, ZeroMode, ZeroPolicy,
};

/// The unit of promises, bytes.
const BLOCK: u64 = 4096;
/// Bytes of the larger writes.
const LARGE: u64 = 64 << 10;
/// Bytes of the disk, and of each of its zones, in which one kind of request works.
const DISK: u64 = 4 << 30;
const ZONE: u64 = DISK / 8;
/// Requests in flight.
const DEPTH: usize = 64;
/// Steps after which a range is touched again. Each has five requests or more, and requests end in order, so the
/// first request is over by then.
const LAG: u64 = 32;

/// One run.
#[derive(Debug, Clone, Copy)]
pub struct Growth {
    /// Bytes of a cluster, 64 KiB or more.
    pub cluster: u64,
    /// The engine of the I/O.
    pub engine: Engine,
    /// How recycled clusters are zeroed.
    pub zero_policy: ZeroPolicy,
    /// [`CreateOptions::extent_size_hint`].
    pub extent_size_hint: Option<u32>,
    /// Steps of each zone; a step is a cluster.
    pub steps: u64,
}

impl fmt::Display for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KiB clusters, {:?}, zeroed by {:?}", self.cluster >> 10, self.engine, self.zero_policy)
    }
}

/// The content that acknowledged requests promise: for each block the seed of its bytes; 0 for zeroes.
#[derive(Debug)]
pub struct Promises(Vec<u32>);

#[derive(Debug, Clone, Copy)]
enum Request {
    Write { offset: u64, len: u64, seed: u32 },
    Zero { offset: u64, len: u64, mode: ZeroMode },
    Discard { offset: u64, len: u64 },
    Flush,
}

/// The bytes of one block.
fn block(number: u64, seed: u32) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    if seed != 0 {
        Random::new(number << 32 | u64::from(seed)).fill(&mut bytes);
    }
    bytes
}

fn blocks(offset: u64, len: u64) -> std::ops::Range<usize> {
    (offset / BLOCK) as usize..((offset + len) / BLOCK) as usize
}

impl Growth {
    /// Makes the image `path` and drives it. What is returned was acknowledged.
    ///
    /// # Errors
    /// A request failed.
    pub fn run(&self, path: &Path) -> Result<Promises, String> {
        assert!(self.steps * self.cluster <= ZONE, "zones overlap");
        let config = WorkerConfig::default().engine(self.engine).depth(128).threads(32);
        let worker = Worker::new(&config).unwrap_or_else(|_| driver::worker(self.engine));
        worker.block_on(self.drive(&worker, path)).map_err(|e| e.to_string())
    }

    async fn drive(&self, worker: &Worker, path: &Path) -> Result<Promises, Error> {
        let create = CreateOptions::default()
            .size(Some(DISK))
            .cluster_size(self.cluster)
            .extent_size_hint(self.extent_size_hint);
        Image::create(worker, path, &create).await?;
        let image = Image::open(worker, path, &self.open(Access::ReadWrite)).await?;
        let mut promises = Promises(vec![0; (DISK / BLOCK) as usize]);
        let mut in_flight: VecDeque<JoinHandle<Result<(), Error>>> = VecDeque::new();
        let mut random = Random::new(self.cluster);
        for step in 0..self.steps {
            for request in self.step(step, &mut random) {
                if in_flight.len() == DEPTH
                    && let Some(first) = in_flight.pop_front()
                {
                    first.await?;
                }
                let (on, image) = (worker.clone(), image.clone());
                in_flight.push_back(worker.spawn(async move { submit(&on, &image, request).await }));
                promises.note(request);
            }
        }
        for request in in_flight {
            request.await?;
        }
        image.close(worker).await?;
        Ok(promises)
    }

    fn open(&self, access: Access) -> OpenOptions {
        OpenOptions::default()
            .format(Some(Format::Qcow2))
            .access(access)
            .cache(CacheMode::None)
            .zero_policy(self.zero_policy)
    }

    /// The requests of one step. No two that are in flight at once touch the same block.
    fn step(&self, step: u64, random: &mut Random) -> Vec<Request> {
        let seed = step as u32 + 1;
        let cluster = |zone: u64, step: u64| zone * ZONE + step * self.cluster;
        let within = random.below(self.cluster / BLOCK) * BLOCK;
        let mode = if step.is_multiple_of(2) { ZeroMode::Keep } else { ZeroMode::Unmap };
        let mut requests = vec![
            // A cluster each, a small part of it.
            Request::Write { offset: cluster(0, step) + within, len: BLOCK, seed },
            Request::Write { offset: cluster(1, step), len: LARGE, seed },
            // Many in one cluster, while it is new.
            Request::Write { offset: 2 * ZONE + step * BLOCK, len: BLOCK, seed },
            // Parts of clusters that hold nothing, and whole ones.
            match step % 4 {
                0 => Request::Zero { offset: cluster(3, step) + BLOCK, len: LARGE - 2 * BLOCK, mode },
                1 => Request::Write { offset: cluster(3, step), len: LARGE, seed },
                _ => Request::Zero { offset: cluster(3, step), len: self.cluster, mode },
            },
            Request::Write { offset: cluster(4, step), len: LARGE, seed },
        ];
        // Behind the writes: most of what they wrote is zeroed or given back, and then used again.
        if let Some(earlier) = step.checked_sub(LAG) {
            let (offset, len) = (cluster(4, earlier), self.cluster);
            requests.push(match earlier % 4 {
                0 => Request::Discard { offset, len },
                1 => Request::Zero { offset: offset + BLOCK, len: 7 * BLOCK, mode },
                2 => Request::Zero { offset, len, mode },
                _ => Request::Flush,
            });
        }
        if let Some(earlier) = step.checked_sub(2 * LAG) {
            requests.push(Request::Write { offset: cluster(4, earlier) + within, len: BLOCK, seed });
            if earlier % 4 == 1 {
                requests.push(Request::Zero { offset: cluster(3, earlier) + BLOCK, len: 3 * BLOCK, mode });
            }
        }
        requests
    }

    /// Compares the image with the promises: what zebu reads, and what QEMU reads.
    ///
    /// # Errors
    /// The first difference, or what QEMU finds wrong.
    pub fn verify(&self, qemu: &Qemu, dir: &Path, image: &str, promises: &Promises) -> Result<(), String> {
        qemu.check_clean(dir, image)?;
        let model = dir.join("promised.raw");
        promises.write_to(&model).map_err(|e| e.to_string())?;
        let same = qemu.same_content(dir, "promised.raw", image);
        std::fs::remove_file(model).map_err(|e| e.to_string())?;
        same?;
        self.verify_by_zebu(&dir.join(image), promises)
    }

    /// The same by what zebu alone reads.
    ///
    /// # Errors
    /// The first difference.
    pub fn verify_by_zebu(&self, path: &Path, promises: &Promises) -> Result<(), String> {
        let worker = driver::worker(self.engine);
        worker.block_on(async {
            let options = self.open(Access::ReadOnly);
            let image = Image::open(&worker, path, &options).await.map_err(|e| e.to_string())?;
            let mut at = 0;
            while at < DISK {
                let extent = image.extent(&worker, at, DISK - at).await.map_err(|e| e.to_string())?;
                let len = extent.len.min(1 << 20);
                if extent.is_zero() {
                    promises.compare_zeroes(at, extent.len)?;
                    at += extent.len;
                    continue;
                }
                let (done, bytes) = image.read(&worker, at, worker.buffer(len as usize).into()).await;
                done.map_err(|e| e.to_string())?;
                let mut found = vec![0; len as usize];
                bytes.copy_to(0, &mut found);
                promises.compare(at, &found)?;
                at += len;
            }
            image.close(&worker).await.map_err(|e| e.to_string())
        })
    }
}

async fn submit(worker: &Worker, image: &Image, request: Request) -> Result<(), Error> {
    match request {
        Request::Write { offset, len, seed } => {
            let first = offset / BLOCK;
            let bytes: Vec<u8> =
                (first..first + len / BLOCK).flat_map(|number| block(number, seed)).collect();
            let data = IoBuf::copy_of(&bytes).into();
            image.write(worker, offset, data, Durability::Volatile).await.0
        }
        Request::Zero { offset, len, mode } => image.write_zeroes(worker, offset, len, mode).await,
        Request::Discard { offset, len } => image.discard(worker, offset, len).await,
        Request::Flush => image.flush(worker).await,
    }
}

impl Promises {
    fn note(&mut self, request: Request) {
        match request {
            Request::Write { offset, len, seed } => self.0[blocks(offset, len)].fill(seed),
            Request::Zero { offset, len, .. } | Request::Discard { offset, len } => {
                self.0[blocks(offset, len)].fill(0);
            }
            Request::Flush => {}
        }
    }

    /// The blocks that hold data: number and seed.
    fn data(&self) -> impl Iterator<Item = (u64, u32)> {
        (0..).zip(self.0.iter().copied()).filter(|(_, seed)| *seed != 0)
    }

    fn write_to(&self, path: &Path) -> std::io::Result<()> {
        let file = std::fs::File::create(path)?;
        file.set_len(DISK)?;
        for (number, seed) in self.data() {
            file.write_all_at(&block(number, seed), number * BLOCK)?;
        }
        Ok(())
    }

    fn compare(&self, offset: u64, found: &[u8]) -> Result<(), String> {
        for (number, bytes) in (offset / BLOCK..).zip(found.chunks(BLOCK as usize)) {
            let seed = self.0[number as usize];
            if bytes != &block(number, seed)[..bytes.len()] {
                let what = if seed == 0 { "zeroes" } else { "a write" };
                return Err(format!("{what} at {} acknowledged, something else is there", number * BLOCK));
            }
        }
        Ok(())
    }

    fn compare_zeroes(&self, offset: u64, len: u64) -> Result<(), String> {
        match self.0[blocks(offset, len)].iter().position(|seed| *seed != 0) {
            None => Ok(()),
            Some(at) => {
                Err(format!("a write at {} was acknowledged and is gone", offset + at as u64 * BLOCK))
            }
        }
    }

    /// Bytes of data promised, for the reader of a test's output.
    pub fn data_bytes(&self) -> u64 {
        self.data().count() as u64 * BLOCK
    }
}
