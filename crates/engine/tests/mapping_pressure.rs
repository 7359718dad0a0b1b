//! The mapping cache under pressure: random operations against a model with room for two slices, over cluster sizes,
//! slice sizes, chains, queues, with the index and without.
//!
//! Replay one seed: `ZEBU_SEED=n cargo test -p zebu-engine --test mapping_pressure`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use zebu_engine::storage::{IoBuf, IoBufs, Worker, WorkerConfig};
use zebu_engine::{
    Access, CreateOptions, Durability, ExtentIndex, Format, Image, OpenOptions, Preallocation, Shrink,
    ZeroMode,
};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
    fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}

fn gather(bufs: &IoBufs) -> Vec<u8> {
    let mut bytes = vec![0; bufs.len()];
    bufs.copy_to(0, &mut bytes);
    bytes
}

async fn read(image: &Image, worker: &Worker, offset: u64, len: usize) -> Vec<u8> {
    let (result, bufs) = image.read(worker, offset, IoBuf::zeroed(len).into()).await;
    result.unwrap();
    gather(&bufs)
}

async fn verify(image: &Image, worker: &Worker, model: &[u8], what: &str) {
    for (i, expected) in model.chunks(300_000).enumerate() {
        let got = read(image, worker, i as u64 * 300_000, expected.len()).await;
        if let Some(wrong) = got.iter().zip(expected).position(|(a, b)| a != b) {
            panic!(
                "{what}: byte {} is {:#x}, should be {:#x}",
                i * 300_000 + wrong,
                got[wrong],
                expected[wrong]
            );
        }
    }
}

/// Writes, zeroes or discards somewhere; what the model says afterwards is what a read returns.
async fn change(image: &Image, worker: &Worker, random: &mut Random, model: &mut [u8], longest: u64) {
    let size = model.len() as u64;
    let offset = random.below(size) & !511;
    let len = (1 + random.below(longest)).min(size - offset);
    let range = offset as usize..(offset + len) as usize;
    match random.below(10) {
        0..6 => {
            let byte = random.next() as u8 | 1;
            model[range].fill(byte);
            let data = IoBuf::copy_of(&vec![byte; len as usize]).into();
            image.write(worker, offset, data, Durability::Volatile).await.0.unwrap();
        }
        6..8 => {
            model[range].fill(0);
            let mode = random.one_of(&[ZeroMode::Keep, ZeroMode::Unmap]);
            image.write_zeroes(worker, offset, len, mode).await.unwrap();
        }
        8 => {
            image.discard(worker, offset, len).await.unwrap();
            // Which part went is the image's choice: zero or as before.
            for (now, old) in
                read(image, worker, offset, len as usize).await.into_iter().zip(&mut model[range])
            {
                assert!(now == 0 || now == *old);
                *old = now;
            }
        }
        _ => image.flush(worker).await.unwrap(),
    }
}

/// The images of a chain, the lowest first.
struct Chain {
    dir: tempfile::TempDir,
    model: Vec<u8>,
    top: PathBuf,
}

/// A chain of `depth` images, each with some data of its own.
fn make_chain(worker: &Worker, random: &mut Random, depth: usize, cluster: u64, extended_l2: bool) -> Chain {
    let dir = tempfile::tempdir().unwrap();
    let size = 3 << 20;
    let mut model = vec![0; size];
    let mut below: Option<(String, Format)> = None;
    let mut top = PathBuf::new();
    for level in 0..depth {
        // A raw image at the bottom now and then; other cluster sizes below the top.
        let raw = level == 0 && depth > 1 && random.below(3) == 0;
        let is_top = level + 1 == depth;
        let cluster_size = if is_top { cluster } else { random.one_of(&[cluster, 512, 4096, 65536]) };
        let format = if raw { Format::Raw } else { Format::Qcow2 };
        let name = format!("{level}.img");
        top = dir.path().join(&name);
        let options = CreateOptions::default()
            .format(format)
            .size(Some(size as u64))
            .cluster_size(if extended_l2 && is_top { cluster_size.max(16384) } else { cluster_size })
            .extended_l2(extended_l2 && is_top)
            .backing(below.take());
        let open = OpenOptions::default().format(Some(format)).access(Access::ReadWrite);
        worker.block_on(async {
            Image::create(worker, &top, &options).await.unwrap();
            let image = Image::open(worker, &top, &open).await.unwrap();
            for _ in 0..(24 / depth).max(2) {
                change(&image, worker, random, &mut model, 200_000).await;
            }
            image.close(worker).await.unwrap();
        });
        below = Some((name, format));
    }
    Chain { dir, model, top }
}

/// Opens with room for two slices.
async fn open_tight(worker: &Worker, path: &Path, slice_size: Option<u32>, index: ExtentIndex) -> Image {
    let options = OpenOptions::default()
        .format(Some(Format::Qcow2))
        .access(Access::ReadWrite)
        .slice_size(slice_size)
        .extent_index(index);
    let image = Image::open(worker, path, &options).await.unwrap();
    image.set_cache_size(image.min_cache_size()).unwrap();
    image
}

fn run(seed: u64, depth: usize, cluster: u64, slice: Option<u32>, index: ExtentIndex, extended_l2: bool) {
    let what =
        format!("seed {seed}, {depth} images, {cluster} cluster, slice {slice:?}, {index:?}, {extended_l2}");
    let mut random = Random(seed);
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let mut chain = make_chain(&worker, &mut random, depth, cluster, extended_l2);
    worker.block_on(async {
        for _ in 0..2 {
            let image = open_tight(&worker, &chain.top, slice, index).await;
            verify(&image, &worker, &chain.model, &what).await;
            for _ in 0..40 {
                let longest = random.one_of(&[512, 5000, 150_000]);
                change(&image, &worker, &mut random, &mut chain.model, longest).await;
                let at = random.below(chain.model.len() as u64 - 1);
                let len = (1 + random.below(100_000)).min(chain.model.len() as u64 - at) as usize;
                assert_eq!(
                    read(&image, &worker, at, len).await,
                    chain.model[at as usize..at as usize + len],
                    "{what}: at {at}"
                );
            }
            if random.below(3) == 0 {
                let size = random.below(6 << 20).next_multiple_of(512).max(512);
                image.resize(&worker, size, Shrink::Allow, Preallocation::Off).await.unwrap();
                chain.model.resize(size as usize, 0);
            }
            verify(&image, &worker, &chain.model, &what).await;
            image.close(&worker).await.unwrap();
        }
    });
    drop(chain.dir);
}

fn seeds(default: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|s| s.parse::<u64>().ok());
    match number("ZEBU_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("ZEBU_SEEDS").unwrap_or(default)).collect(),
    }
}

#[test]
fn every_slice_size_with_every_cluster_size() {
    for seed in seeds(1) {
        for cluster_bits in 9..=21 {
            for slice_bits in 9..=cluster_bits {
                let index = if (seed + slice_bits) % 2 == 0 { ExtentIndex::On } else { ExtentIndex::Off };
                run(seed, 1, 1 << cluster_bits, Some(1 << slice_bits), index, false);
            }
        }
    }
}

#[test]
fn chains_of_images_of_different_geometry() {
    for seed in seeds(24) {
        let mut random = Random(seed ^ 0xc4a1);
        let depth = random.one_of(&[2, 3, 5, 12, 50]);
        let cluster = random.one_of(&[512, 4096, 65536, 1 << 20]);
        let slice = random.one_of(&[None, Some(512)]);
        let index = random.one_of(&[ExtentIndex::On, ExtentIndex::On, ExtentIndex::Off]);
        run(seed, depth, cluster, slice, index, random.below(4) == 0);
    }
}

/// Counts a thread that is done, also by a panic.
struct Over<'a>(&'a AtomicUsize);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[test]
fn several_queues_change_and_read_one_chain() {
    for seed in seeds(8) {
        let mut random = Random(seed ^ 0x9e0e);
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        let depth = random.one_of(&[1, 2, 6]);
        let cluster = random.one_of(&[512, 4096, 65536]);
        let extended_l2 = random.below(3) == 0;
        let chain = make_chain(&worker, &mut random, depth, cluster, extended_l2);
        let slice = random.one_of(&[512, 512, cluster.min(4096) as u32]);
        let index = random.one_of(&[ExtentIndex::On, ExtentIndex::Off]);
        let image = worker.block_on(open_tight(&worker, &chain.top, Some(slice), index));
        // Each queue has a part of the disk of its own, next to the others'.
        let queues = 3;
        let part = chain.model.len() / queues / 512 * 512;
        let done = AtomicUsize::new(0);
        let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..queues)
                .map(|queue| {
                    let (image, chain, done) = (image.clone(), &chain, &done);
                    scope.spawn(move || {
                        let worker = Worker::new(&WorkerConfig::default()).unwrap();
                        let over = Over(done);
                        let mut random = Random(seed * 31 + queue as u64);
                        let start = queue * part;
                        let mut model = chain.model[start..start + part].to_vec();
                        worker.block_on(async {
                            for _ in 0..60 {
                                let at = random.below(part as u64) as usize;
                                let len = (1 + random.below(20_000) as usize).min(part - at);
                                let offset = (start + at) as u64;
                                match random.below(8) {
                                    0..3 => {
                                        let byte = random.next() as u8 | 1;
                                        model[at..at + len].fill(byte);
                                        let data = IoBuf::copy_of(&vec![byte; len]).into();
                                        image
                                            .write(&worker, offset, data, Durability::Volatile)
                                            .await
                                            .0
                                            .unwrap();
                                    }
                                    3 => {
                                        model[at..at + len].fill(0);
                                        image
                                            .write_zeroes(&worker, offset, len as u64, ZeroMode::Unmap)
                                            .await
                                            .unwrap();
                                    }
                                    4 => image.flush(&worker).await.unwrap(),
                                    _ => assert_eq!(
                                        read(&image, &worker, offset, len).await,
                                        model[at..at + len],
                                        "seed {seed}, queue {queue}, at {offset}"
                                    ),
                                }
                            }
                        });
                        // Others may wait for what this worker started.
                        drop(over);
                        while done.load(SeqCst) < queues {
                            worker.wait(Some(std::time::Duration::from_millis(1)));
                        }
                        assert!(worker.drain(std::time::Duration::from_secs(600)), "seed {seed}");
                        model
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut model = chain.model.clone();
        for (queue, part_model) in models.into_iter().enumerate() {
            model[queue * part..(queue + 1) * part].copy_from_slice(&part_model);
        }
        worker.block_on(async {
            verify(&image, &worker, &model, &format!("seed {seed}")).await;
            image.close(&worker).await.unwrap();
        });
    }
}
