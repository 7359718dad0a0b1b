//! Where requests put things in the file.

use zebu_engine::storage::{IoBuf, Worker, WorkerConfig};
use zebu_engine::{Access, CreateOptions, Durability, Format, Image, OpenOptions};

const SIZE: u64 = 24 << 20;

/// Two first writes need one L2 table. A window that the second of them sets up for it is a hole in the file for good.
#[test]
fn two_first_writes_at_once_leave_no_hole() {
    let dir = tempfile::tempdir().unwrap();
    let (path, worker) = (dir.path().join("disk.qcow2"), Worker::new(&WorkerConfig::default()).unwrap());
    let options = CreateOptions::default().format(Format::Qcow2).size(Some(SIZE));
    worker.block_on(async {
        Image::create(&worker, &path, &options).await.unwrap();
        let image =
            Image::open(&worker, &path, &OpenOptions::default().access(Access::ReadWrite)).await.unwrap();
        let write = async |at: u64| {
            image
                .write(&worker, at, IoBuf::copy_of(&[7; 4096]).into(), Durability::Volatile)
                .await
                .0
                .unwrap();
        };
        futures_util::future::join(write(0), write(8 << 20)).await;
        image.close(&worker).await.unwrap();
    });
    let file = std::fs::read(&path).unwrap();
    let entry =
        |at: u64| u64::from_be_bytes(file[at as usize..][..8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    let table = entry(u64::from_be_bytes(file[40..48].try_into().unwrap()));
    let mut clusters = [entry(table), entry(table + 8 * 128)];
    clusters.sort_unstable();
    assert_eq!(clusters[0], table + (64 << 10), "{clusters:x?} behind {table:x}");
}
