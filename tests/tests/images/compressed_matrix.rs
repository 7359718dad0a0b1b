//! Compressed, plain and zero writes over each other, several at once, on images of every shape: as a model says while
//! they run, as QEMU says afterwards, and without a leaked cluster.

use std::cell::RefCell;
use std::rc::Rc;
use zebu_engine::storage::{Engine, IoBuf, Worker, WorkerConfig};
use zebu_engine::{
    Access, CacheMode, CodecPool, CompressOptions, Compression, CreateOptions, DeflateWindow, Durability,
    Format, Image, OpenOptions, ZeroMode,
};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

/// A disk as it should be. Clusters that a request is under way for are nobody else's.
struct Disk {
    bytes: Vec<u8>,
    busy: Vec<bool>,
    cluster: usize,
}

impl Disk {
    /// Clusters that nobody uses, at most `most`, from a random place on; they are in use then.
    fn claim(&mut self, random: &mut Random, most: usize) -> Option<(usize, usize)> {
        let first = random.below(self.busy.len() as u64) as usize;
        let free = self.busy[first..].iter().take(most).take_while(|busy| !**busy).count();
        self.busy[first..first + free].fill(true);
        (free > 0).then_some((first, free))
    }

    fn range(&self, first: usize, count: usize) -> std::ops::Range<usize> {
        first * self.cluster..((first + count) * self.cluster).min(self.bytes.len())
    }
}

/// Content between noise and zeroes, so that some clusters become short, some a little shorter, some not at all.
fn content(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for piece in bytes.chunks_mut(512 << random.below(6)) {
        match random.below(5) {
            0 => {}
            1 => piece.fill(random.below(256) as u8),
            2 => piece.iter_mut().for_each(|byte| *byte = (random.bits() & 3) as u8),
            3 => piece.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7) as u8),
            _ => piece.iter_mut().for_each(|byte| *byte = random.bits() as u8),
        }
    }
    bytes
}

struct Case {
    create: CreateOptions,
    compress: CompressOptions,
    cache: CacheMode,
    engine: Engine,
}

async fn stream(image: Image, worker: Worker, disk: Rc<RefCell<Disk>>, mut random: Random, requests: usize) {
    for _ in 0..requests {
        let claimed = disk.borrow_mut().claim(&mut random, 5);
        let Some((first, count)) = claimed else { continue };
        let range = disk.borrow().range(first, count);
        let (offset, len) = (range.start as u64, range.len());
        match random.below(10) {
            0..5 => {
                let bytes = content(&mut random, len);
                let bufs = IoBuf::copy_of(&bytes).into();
                let (result, _) = image.write_compressed(&worker, offset, bufs, Durability::Volatile).await;
                result.unwrap();
                disk.borrow_mut().bytes[range.clone()].copy_from_slice(&bytes);
            }
            5 | 6 => {
                let part = random.below(len as u64) as usize;
                let part = part..part + 1 + random.below((len - part) as u64) as usize;
                let bytes = content(&mut random, part.len());
                let bufs = IoBuf::copy_of(&bytes).into();
                let at = offset + part.start as u64;
                image.write(&worker, at, bufs, Durability::Volatile).await.0.unwrap();
                disk.borrow_mut().bytes[range.clone()][part].copy_from_slice(&bytes);
            }
            7 => {
                image.write_zeroes(&worker, offset, len as u64, ZeroMode::Unmap).await.unwrap();
                disk.borrow_mut().bytes[range.clone()].fill(0);
            }
            8 => image.flush(&worker).await.unwrap(),
            _ => {}
        }
        let (result, bufs) = image.read(&worker, offset, IoBuf::zeroed(len).into()).await;
        result.unwrap();
        let mut seen = vec![0; len];
        bufs.copy_to(0, &mut seen);
        assert!(seen == disk.borrow().bytes[range], "what was written is not what is read at {offset}");
        disk.borrow_mut().busy[first..first + count].fill(false);
    }
}

fn run(qemu: &Qemu, case: &Case, seed: u64) {
    let scratch = Scratch::new("compressed");
    let path = scratch.file("disk.qcow2");
    let worker = Worker::new(&WorkerConfig::default().engine(case.engine)).unwrap();
    let len = case.create.size.unwrap();
    let cluster = case.create.cluster_size as usize;
    // Making content takes most of the time.
    let requests = if cluster > 1 << 16 { 6 } else { 30 };
    let mut random = Random::new(seed);
    let disk = Rc::new(RefCell::new(Disk {
        bytes: vec![0; len as usize],
        busy: vec![false; (len as usize).div_ceil(cluster)],
        cluster,
    }));
    worker.block_on(async {
        Image::create(&worker, &path, &case.create).await.unwrap();
        // Twice, so that the second opening packs into what the first one has left.
        for _ in 0..2 {
            let options = OpenOptions::default()
                .format(Some(Format::Qcow2))
                .access(Access::ReadWrite)
                .cache(case.cache)
                .compress(case.compress.clone());
            let image = Image::open(&worker, &path, &options).await.unwrap();
            let streams: Vec<_> = (0..6)
                .map(|_| {
                    let seed = random.bits();
                    let (image, on, disk) = (image.clone(), worker.clone(), disk.clone());
                    worker.spawn(stream(image, on, disk, Random::new(seed), requests))
                })
                .collect();
            for stream in streams {
                stream.await;
            }
            image.close(&worker).await.unwrap();
        }
    });
    std::fs::write(scratch.file("disk.raw"), &disk.borrow().bytes).unwrap();
    qemu.same_content(scratch.path(), "disk.raw", "disk.qcow2").unwrap();
    qemu.check_clean(scratch.path(), "disk.qcow2").unwrap();
}

fn matrix(version: u32, compression: Compression) {
    let Some(qemu) = Qemu::find() else { return };
    let mut seed = 0;
    for cluster_bits in [9, 10, 12, 14, 16, 18, 21] {
        let cluster_size = 1u64 << cluster_bits;
        // Widths in turn; narrow ones limit how many streams share a cluster.
        let widths = if version == 2 { [16, 16] } else { [[1, 16], [2, 64]][cluster_bits as usize / 2 % 2] };
        for refcount_bits in widths {
            for extended_l2 in [false, true] {
                if extended_l2 && (version == 2 || cluster_bits < 14 || refcount_bits == 1) {
                    continue;
                }
                seed += 1;
                let create = CreateOptions::default()
                    // The last cluster is cut short.
                    .size(cluster_size * if cluster_bits > 18 { 6 } else { 60 } + 512)
                    .cluster_size(cluster_size)
                    .version(version)
                    .refcount_bits(refcount_bits)
                    .extended_l2(extended_l2)
                    .compression(compression);
                let compress = CompressOptions::default()
                    .level((seed % 2 == 0).then_some(1))
                    .window(if seed % 3 == 0 { DeflateWindow::FourKib } else { DeflateWindow::Full })
                    .gather_memory([0, 64 << 10, 8 << 20][seed as usize % 3])
                    .pool(CodecPool::new(seed as usize % 3));
                let cache = if seed % 2 == 0 { CacheMode::None } else { CacheMode::Writeback };
                let engine = if seed % 4 < 2 { Engine::Threads } else { Engine::Auto };
                eprintln!("seed {seed}: {create:?} {compress:?} {cache:?} {engine:?}");
                run(&qemu, &Case { create, compress, cache, engine }, seed);
            }
        }
    }
}

#[test]
fn version_2_zlib() {
    matrix(2, Compression::Zlib);
}

#[test]
fn version_3_zlib() {
    matrix(3, Compression::Zlib);
}

#[test]
fn version_3_zstd() {
    matrix(3, Compression::Zstd);
}

/// A read and a small write, as QEMU does them once per compressed cluster, do not happen at all: a new image is
/// filled without reading from it, in aligned writes of whole host clusters.
#[test]
fn filling_an_image_takes_no_reads_and_a_write_per_host_cluster_at_most() {
    const CLUSTER: u64 = 65536;
    const CLUSTERS: u64 = 512;
    let scratch = Scratch::new("requests");
    let path = scratch.file("disk.qcow2");
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    worker.block_on(async {
        let create = CreateOptions::default().size(Some(CLUSTER * CLUSTERS));
        Image::create(&worker, &path, &create).await.unwrap();
        let options = OpenOptions::default()
            .format(Some(Format::Qcow2))
            .access(Access::ReadWrite)
            .cache(CacheMode::None);
        let image = Image::open(&worker, &path, &options).await.unwrap();
        let before = worker.stats();
        let mut random = Random::new(7);
        for at in (0..CLUSTERS).step_by(16) {
            let mut bytes = vec![0; 16 * CLUSTER as usize];
            // A third of each cluster is noise, so three streams or so share a host cluster.
            for cluster in bytes.chunks_mut(CLUSTER as usize) {
                cluster[..22_000].iter_mut().for_each(|byte| *byte = random.bits() as u8);
                cluster[22_000..].fill(at as u8 + 1);
            }
            let bufs = IoBuf::copy_of(&bytes).into();
            image.write_compressed(&worker, at * CLUSTER, bufs, Durability::Volatile).await.0.unwrap();
        }
        assert_eq!(worker.stats().misaligned, before.misaligned, "a write was not aligned");
        image.flush(&worker).await.unwrap();
        let after = worker.stats();
        let packed = 22_000 * CLUSTERS / CLUSTER + 1;
        // The tables of one refcount block and one L2 table, and their table and header, are some writes more.
        let writes = after.writes - before.writes;
        assert!(writes <= packed + 12, "{writes} writes for {packed} host clusters");
        // A slice of the L2 table that was read before it was made; of the refcounts; nothing per cluster.
        let reads = after.reads - before.reads;
        assert!(reads <= 16, "{reads} reads of an image that is only written");
        image.close(&worker).await.unwrap();
    });
}
