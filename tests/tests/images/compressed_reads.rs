//! Reading compressed clusters piece by piece.

use std::os::unix::fs::FileExt;
use std::path::Path;
use zebu_engine::storage::{Engine, IoBuf, Worker, WorkerConfig};
use zebu_engine::{
    Access, CacheMode, Compression, CreateOptions, Durability, ErrorKind, Format, Image, OpenOptions,
};
use zebu_tests::hostile::base::{deflated, zstd_run};
use zebu_tests::patch::Patch;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

const CLUSTER: u64 = 65536;
const PIECE: u64 = 4096;
const CLUSTERS: u64 = 24;

/// An image of compressed clusters, and what is in them.
fn make(worker: &Worker, path: &Path, compression: Compression) -> Vec<u8> {
    let mut random = Random::new(3);
    let mut bytes = vec![0; (CLUSTER * CLUSTERS) as usize];
    for cluster in bytes.chunks_mut(CLUSTER as usize) {
        random.fill(&mut cluster[..20_000]);
    }
    worker.block_on(async {
        let create = CreateOptions::default().size(Some(CLUSTER * CLUSTERS)).compression(compression);
        Image::create(worker, path, &create).await.unwrap();
        let options = OpenOptions::default().format(Some(Format::Qcow2)).access(Access::ReadWrite);
        let image = Image::open(worker, path, &options).await.unwrap();
        let bufs = IoBuf::copy_of(&bytes).into();
        image.write_compressed(worker, 0, bufs, Durability::Volatile).await.0.unwrap();
        image.close(worker).await.unwrap();
    });
    bytes
}

/// A stream is read and inflated once for all pieces of its cluster: whatever becomes of it in the file after the first piece
/// was read, the others are there.
#[test]
fn a_cluster_that_is_read_in_pieces_is_inflated_once() {
    for compression in [Compression::Zlib, Compression::Zstd] {
        for engine in [Engine::Auto, Engine::Threads] {
            let scratch = Scratch::new("compressed-reads");
            let path = scratch.file("disk.qcow2");
            let worker = Worker::new(&WorkerConfig::default().engine(engine)).unwrap();
            let bytes = make(&worker, &path, compression);
            let options = OpenOptions::default().format(Some(Format::Qcow2)).cache(CacheMode::Writeback);
            worker.block_on(async {
                let image = Image::open(&worker, &path, &options).await.unwrap();
                let read = async |at: u64| {
                    let (result, bufs) = image.read(&worker, at, IoBuf::zeroed(PIECE as usize).into()).await;
                    result.unwrap_or_else(|error| panic!("{at}: {error}"));
                    let mut piece = vec![0; PIECE as usize];
                    bufs.copy_to(0, &mut piece);
                    assert!(piece == bytes[at as usize..][..PIECE as usize], "{at}");
                };
                read(0).await;
                let before = worker.stats().reads;
                for cluster in 1..CLUSTERS {
                    read(cluster * CLUSTER + cluster % 16 * PIECE).await;
                }
                let streams = worker.stats().reads - before;
                assert!(streams <= CLUSTERS, "{streams} reads for {} streams", CLUSTERS - 1);
                let file = std::fs::File::options().write(true).open(&path).unwrap();
                // The mapping is in memory by now, so what is behind the first clusters may go.
                let len = file.metadata().unwrap().len();
                let (first, end) = (6 * CLUSTER, len);
                file.write_all_at(&vec![0xee; (end - first) as usize], first).unwrap();
                let before = worker.stats().reads;
                for at in (0..CLUSTERS * CLUSTER).step_by(PIECE as usize) {
                    read(at).await;
                }
                assert_eq!(worker.stats().reads - before, 0);
            });
        }
    }
}

/// Whatever a stream holds: an error that names its cluster's place on the disk, and its neighbours are read.
#[test]
fn a_damaged_stream_is_an_error_at_its_offset_and_nowhere_else() {
    const DAMAGED: u64 = 5;
    let garbage = || vec![0x5a; 600];
    let deflate = [
        garbage(),
        deflated(&vec![9; CLUSTER as usize - 1]),
        deflated(&vec![9; CLUSTER as usize + 1]),
        deflated(&vec![0; 16 << 20]),
    ];
    let skipped = [0x50, 0x2a, 0x4d, 0x18, 255, 255, 255, 255].to_vec();
    let zstd = [
        garbage(),
        zstd_run(16, 9, CLUSTER as usize - 1),
        zstd_run(17, 9, CLUSTER as usize + 1),
        zstd_run(27, 0, 256 << 20),
        zstd_run(41, 9, CLUSTER as usize),
        zstd_run(10, 9, 0).repeat(1000),
        skipped,
    ];
    for (compression, streams) in [(Compression::Zlib, &deflate[..]), (Compression::Zstd, &zstd)] {
        for (number, stream) in streams.iter().enumerate() {
            let scratch = Scratch::new("compressed-reads");
            let path = scratch.file("disk.qcow2");
            let worker = Worker::new(&WorkerConfig::default()).unwrap();
            let bytes = make(&worker, &path, compression);
            // What is there is longer, so that no other stream is touched.
            assert!(stream.len() < 20_000, "{compression:?}, stream {number}");
            let image = Patch::open(&path);
            // Bits 0 to 53 of the entry, for clusters of 64 KiB.
            image.set(image.u64(image.l2_entry(DAMAGED)) & ((1 << 54) - 1), stream);
            let options = OpenOptions::default().format(Some(Format::Qcow2));
            worker.block_on(async {
                let image = Image::open(&worker, &path, &options).await.unwrap();
                for cluster in 0..CLUSTERS {
                    let at = cluster * CLUSTER + 3 * PIECE;
                    let (result, bufs) = image.read(&worker, at, IoBuf::zeroed(PIECE as usize).into()).await;
                    let mut piece = vec![0; PIECE as usize];
                    bufs.copy_to(0, &mut piece);
                    let what = format!("{compression:?}, stream {number}, cluster {cluster}");
                    match result {
                        Ok(()) => {
                            assert_ne!(cluster, DAMAGED, "{what}");
                            assert!(piece == bytes[at as usize..][..PIECE as usize], "{what}");
                        }
                        Err(error) => {
                            assert_eq!(cluster, DAMAGED, "{what}: {error}");
                            assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
                            let offset = error.guest_offset().map(|offset| offset / CLUSTER);
                            assert_eq!(offset, Some(DAMAGED), "{what}: {error}");
                            assert!(error.to_string().contains("disk.qcow2"), "{what}: {error}");
                        }
                    }
                }
            });
        }
    }
}
