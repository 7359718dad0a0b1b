//! An overlay that grows over a backing file which is longer than it.

use std::cell::Cell;
use std::rc::Rc;
use zebu_engine::storage::{File, IoBuf, Worker};
use zebu_engine::{
    Access, CreateOptions, Durability, Format, Image, NewSnapshot, OpenOptions, OpenedFile, Preallocation,
    Shrink,
};
use zebu_sim::{Content, SimFileConfig, SimWorld};

const CLUSTER: u64 = 4096;
/// The disk ends within a cluster.
const OLD_END: u64 = 8 * CLUSTER + 512;
const NEW_END: u64 = 12 * CLUSTER;

fn chain(top: &File, base: &File) -> Vec<OpenedFile> {
    let opened = |file: &File| OpenedFile::new(file.clone(), Format::Qcow2);
    vec![opened(top), opened(base)]
}

fn writable() -> OpenOptions {
    OpenOptions::default().access(Access::ReadWrite)
}

async fn read(image: &Image, worker: &Worker, offset: u64, len: u64) -> Vec<u8> {
    let (result, bufs) = image.read(worker, offset, IoBuf::zeroed(len as usize).into()).await;
    result.unwrap();
    let mut bytes = vec![0; len as usize];
    bufs.copy_to(0, &mut bytes);
    bytes
}

/// Added space reads as zero, now and when the image is opened again, although reads go on beside the resize, and what
/// they derive from the tables holds for the old end of the disk.
#[test]
pub(crate) fn growing_beside_reads_shows_nothing_of_the_backing_file() {
    for seed in 0..20 {
        let world = SimWorld::new(seed);
        let workers = [world.worker(), world.worker()];
        let [top, base] =
            ["top", "base"].map(|name| world.file(name, Content::new(), SimFileConfig::default()));
        let run = world.block_on(async {
            let worker = &workers[0];
            // The backing file has clusters of a sector: what it shows of the disk's last cluster is zero, and there is data
            // right behind the disk's end.
            let create = CreateOptions::default().size(Some(16 * CLUSTER)).cluster_size(512);
            Image::create_in(worker, &base, &create).await?;
            let below = vec![chain(&top, &base).remove(1)];
            let image = Image::open_files(worker, below, &writable()).await?;
            let data = IoBuf::copy_of(&vec![0xaa; (16 * CLUSTER - OLD_END) as usize]);
            image.write(worker, OLD_END, data.into(), Durability::Durable).await.0?;
            image.close(worker).await?;
            let create = CreateOptions::default()
                .size(Some(OLD_END))
                .cluster_size(CLUSTER)
                .backing(Some(("base".to_owned(), Format::Qcow2)));
            Image::create_in(worker, &top, &create).await?;
            Image::open_files(worker, chain(&top, &base), &writable()).await
        });
        let image = run.unwrap().unwrap();
        world.block_on(read(&image, &workers[1], 8 * CLUSTER, 512)).unwrap();
        let has_grown = Rc::new(Cell::new(false));
        let (reader, on, stop) = (image.clone(), workers[1].clone(), has_grown.clone());
        let reads = workers[1].spawn(async move {
            while !stop.get() {
                read(&reader, &on, 8 * CLUSTER, 512).await;
                let added = reader.virtual_size() - OLD_END;
                if added > 0 {
                    let shown = read(&reader, &on, OLD_END, added).await;
                    assert!(
                        shown.iter().all(|byte| *byte == 0),
                        "seed {seed}: the backing file shows meanwhile"
                    );
                }
            }
        });
        let resized = async {
            let resized = image.resize(&workers[0], NEW_END, Shrink::Refuse, Preallocation::Off).await;
            has_grown.set(true);
            resized
        };
        world.block_on(resized).unwrap().unwrap();
        world.block_on(reads).unwrap();
        let added = world.block_on(read(&image, &workers[0], OLD_END, NEW_END - OLD_END)).unwrap();
        assert!(added.iter().all(|byte| *byte == 0), "seed {seed}: the backing file shows");
        world.block_on(image.close(&workers[0])).unwrap().unwrap();
        drop(image);
        let options = OpenOptions::default();
        let again = Image::open_files(&workers[0], chain(&top, &base), &options);
        let again = world.block_on(again).unwrap().unwrap();
        let added = world.block_on(read(&again, &workers[0], OLD_END, NEW_END - OLD_END)).unwrap();
        assert!(added.iter().all(|byte| *byte == 0), "seed {seed}: opened again, the backing file shows");
    }
}

/// A cluster in which nothing is allocated has space that a snapshot shares. When the disk grows with preallocation, it gets
/// space of its own, and shows the backing file as before.
#[test]
pub(crate) fn preallocation_beside_a_snapshot_hides_nothing() {
    const LARGE: u64 = 16384;
    const END: u64 = 2 * LARGE + 1536;
    for mode in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
        let world = SimWorld::new(1);
        let worker = world.worker();
        let [top, base] =
            ["top", "base"].map(|name| world.file(name, Content::new(), SimFileConfig::default()));
        let run = world.block_on(async {
            let worker = &worker;
            Image::create_in(worker, &base, &CreateOptions::default().size(Some(4 * LARGE))).await?;
            let image = Image::open_files(worker, vec![chain(&top, &base).remove(1)], &writable()).await?;
            let data = IoBuf::copy_of(&vec![0xaa; 4 * LARGE as usize]);
            image.write(worker, 0, data.into(), Durability::Durable).await.0?;
            image.close(worker).await?;
            let create = CreateOptions::default()
                .size(Some(END))
                .cluster_size(LARGE)
                .extended_l2(true)
                .backing(Some(("base".to_owned(), Format::Qcow2)));
            Image::create_in(worker, &top, &create).await?;
            let image = Image::open_files(worker, chain(&top, &base), &writable()).await?;
            let data = IoBuf::copy_of(&[0xbb; 512]);
            image.write(worker, END - 512, data.into(), Durability::Volatile).await.0?;
            image.create_snapshot(worker, NewSnapshot::named("one")).await?;
            image.discard(worker, END - 512, 512).await?;
            image.resize(worker, 4 * LARGE, Shrink::Refuse, mode).await?;
            let shown = read(&image, worker, 2 * LARGE, 2 * LARGE).await;
            image.close(worker).await?;
            Ok::<_, zebu_engine::Error>(shown)
        });
        let shown = run.unwrap().unwrap();
        let (before, after) = shown.split_at(1024);
        assert!(before.iter().all(|byte| *byte == 0xaa), "{mode:?}: the backing file is hidden");
        assert!(after.iter().all(|byte| *byte == 0), "{mode:?}");
    }
}
