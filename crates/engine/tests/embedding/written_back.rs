//! Changes that outlive the process without a flush.

use super::{create, for_writing};
use std::path::Path;
use zebu_engine::storage::{IoBuf, Worker, WorkerConfig};
use zebu_engine::{Durability, Image, OpenOptions, ZeroMode};

const CLUSTER: u64 = 65536;

/// The first byte of some clusters, as who opens the image after a kill finds them: in a copy of the file as it is.
fn found(worker: &Worker, path: &Path, clusters: &[u64]) -> Vec<u8> {
    let copy = path.with_extension("copy");
    std::fs::copy(path, &copy).unwrap();
    worker.block_on(async {
        let image = Image::open(worker, &copy, &OpenOptions::default()).await.unwrap();
        let mut bytes = Vec::new();
        for cluster in clusters {
            let (result, bufs) = image.read(worker, cluster * CLUSTER, IoBuf::zeroed(512).into()).await;
            result.unwrap();
            bytes.push(bufs.parts()[0].as_slice()[0]);
        }
        image.close(worker).await.unwrap();
        bytes
    })
}

#[test]
fn what_is_written_back_is_there_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let image = worker.block_on(Image::open(&worker, &path, &for_writing())).unwrap();
    let write = |cluster: u64, byte: u8| {
        let bufs = IoBuf::copy_of(&vec![byte; CLUSTER as usize]).into();
        worker.block_on(image.write(&worker, cluster * CLUSTER, bufs, Durability::Volatile)).0.unwrap();
    };
    let write_back = || worker.block_on(image.write_back(&worker)).unwrap();
    write_back();
    write(3, 1);
    write(700, 2);
    assert_eq!(found(&worker, &path, &[3, 700]), [0, 0], "the mapping is in memory");
    write_back();
    assert_eq!(found(&worker, &path, &[3, 700]), [1, 2]);
    // In its place: the mapping stays, and nothing has to be committed.
    let commits = image.stats().commits;
    write(3, 4);
    write_back();
    assert_eq!(found(&worker, &path, &[3, 700]), [4, 2]);
    assert_eq!(image.stats().commits, commits);
    worker.block_on(image.write_zeroes(&worker, 3 * CLUSTER, CLUSTER, ZeroMode::Unmap)).unwrap();
    worker.block_on(image.discard(&worker, 700 * CLUSTER, CLUSTER)).unwrap();
    write_back();
    assert_eq!(found(&worker, &path, &[3, 700]), [0, 0]);
    worker.block_on(image.close(&worker)).unwrap();
}
