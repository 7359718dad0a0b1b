//! Dirty bitmaps of damaged images: errors, no panic, no endless loop, and what a guest reads stays what it was.

use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, BitmapRecording, CreateOptions, Durability, ErrorKind, Format, Image, NewBitmap, OpenOptions,
    OpenedFile, Preallocation, Shrink,
};
use zebu_sim::{Content, SimFileConfig, SimRng, SimWorld};

const SIZE: u64 = 4 << 20;
const NAME: &str = "top";

fn options(access: Access) -> OpenOptions {
    OpenOptions::default().format(Some(Format::Qcow2)).access(access)
}

async fn open(world: &SimWorld, worker: &Worker, access: Access) -> zebu_engine::Result<Image> {
    let file = world.open(NAME, SimFileConfig::default()).unwrap();
    let chain = vec![OpenedFile::new(file, Format::Qcow2)];
    Image::open_files(worker, chain, &options(access)).await
}

async fn write(image: &Image, worker: &Worker, offset: u64, len: usize) -> zebu_engine::Result<()> {
    image.write(worker, offset, IoBuf::copy_of(&vec![7; len]).into(), Durability::Volatile).await.0
}

async fn read(image: &Image, worker: &Worker, offset: u64, len: usize) -> Vec<u8> {
    let (result, bufs) = image.read(worker, offset, IoBuf::zeroed(len).into()).await;
    result.unwrap();
    let mut bytes = vec![0; len];
    bufs.copy_to(0, &mut bytes);
    bytes
}

fn run<T>(world: &SimWorld, work: impl Future<Output = T>) -> T {
    world.block_on(work).expect("it ends")
}

/// The bytes of an image with three bitmaps.
fn sound(cluster_size: u64) -> Vec<u8> {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let file = world.file(NAME, Content::new(), SimFileConfig::default());
    run(&world, async {
        let create = CreateOptions::default().size(Some(SIZE)).cluster_size(cluster_size);
        Image::create_in(&worker, &file, &create).await?;
        let image = open(&world, &worker, Access::ReadWrite).await?;
        for (name, granularity, recording) in [
            ("fine", 512, BitmapRecording::On),
            ("b", 65536, BitmapRecording::On),
            ("off", 4096, BitmapRecording::Off),
        ] {
            let new = NewBitmap::named(name.to_owned()).granularity(Some(granularity)).recording(recording);
            image.add_bitmap(&worker, &new).await?;
        }
        write(&image, &worker, 0, 100_000).await?;
        write(&image, &worker, 3 << 20, 700).await?;
        let bits = image.bitmap_bits(&worker, "b").await?;
        image.merge_bitmap(&worker, "off", &bits).await?;
        image.close(&worker).await
    })
    .unwrap();
    let content = world.content(NAME).unwrap();
    let mut bytes = vec![0; content.len() as usize];
    content.read(0, &mut bytes);
    bytes
}

fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// Offsets of the bitmaps extension's data, of the directory, and of the tables.
fn places(bytes: &[u8]) -> (usize, usize, Vec<usize>) {
    let extension =
        (104..4096).step_by(8).find(|at| bytes[*at..at + 4] == [0x23, 0x85, 0x28, 0x75]).unwrap() + 8;
    let directory = u64_at(bytes, extension + 16);
    let mut tables = Vec::new();
    let mut at = directory;
    for _ in 0..3 {
        tables.push(u64_at(bytes, at));
        let name = usize::from(u16::from_be_bytes([bytes[at + 18], bytes[at + 19]]));
        at += (24 + name).next_multiple_of(8);
    }
    (extension, directory, tables)
}

/// Does everything with a damaged image that can be done with one. `others_are_safe`: the damage does not make bitmaps
/// own clusters of others.
fn use_it(bytes: &[u8], seed: u64, others_are_safe: bool) {
    let world = SimWorld::new(seed);
    world.file(NAME, Content::from_bytes(bytes), SimFileConfig::default());
    let worker = world.worker();
    run(&world, async {
        let Ok(image) = open(&world, &worker, Access::ReadOnly).await else { return };
        let before = read(&image, &worker, 0, SIZE as usize).await;
        for info in image.bitmaps() {
            if let Ok(bits) = image.bitmap_bits(&worker, &info.name).await {
                assert!(bits.dirty_bytes() <= SIZE);
            }
        }
        image.close(&worker).await.unwrap();
        let Ok(image) = open(&world, &worker, Access::ReadWrite).await else { return };
        let written = write(&image, &worker, 1 << 20, 5000).await;
        for info in image.bitmaps() {
            if seed.is_multiple_of(3) {
                let _ = image.clear_bitmap(&worker, &info.name).await;
            }
            if seed.is_multiple_of(2) {
                let _ = image.remove_bitmap(&worker, &info.name).await;
            }
        }
        let _ = image.resize(&worker, SIZE, Shrink::Refuse, Preallocation::Off).await;
        let _ = image.add_bitmap(&worker, &NewBitmap::named("new")).await;
        let closed = image.close(&worker).await;
        if written.is_err() || closed.is_err() || !others_are_safe {
            return;
        }
        let image = open(&world, &worker, Access::ReadOnly).await.unwrap();
        let after = read(&image, &worker, 0, SIZE as usize).await;
        assert!(after[..1 << 20] == before[..1 << 20], "the disk has changed");
        assert!(after[(1 << 20) + 5000..] == before[(1 << 20) + 5000..], "the disk has changed");
        let bits = image.bitmap_bits(&worker, "new").await;
        assert!(bits.is_ok_and(|bits| bits.dirty_bytes() == 0));
    });
}

#[test]
fn damaged_directories_and_tables_do_no_harm() {
    for cluster_size in [512, 65536] {
        let bytes = sound(cluster_size);
        let (extension, directory, tables) = places(&bytes);
        let file_clusters = bytes.len() as u64 / cluster_size;
        for seed in 0..150 {
            let mut rng = SimRng::new(seed);
            let mut damaged = bytes.clone();
            // A table that names clusters of the guest as its own can't be told from a sound one.
            let mut others_are_safe = true;
            for _ in 0..rng.between(1, 3) {
                let table = *rng.pick(&tables);
                let (start, len) =
                    *rng.pick(&[(extension, 24), (directory, 112), (directory, 112), (table, 64)]);
                let at = start + rng.below(len) as usize;
                others_are_safe &= start == extension;
                match rng.below(4) {
                    0 => damaged[at] ^= 1 << rng.below(8),
                    1 => damaged[at] = rng.next_u64() as u8,
                    2 => {
                        let value = *rng.pick(&[0, 1, u64::MAX, 1 << 40, cluster_size, tables[0] as u64]);
                        let at = start + (at - start) / 8 * 8;
                        damaged[at..at + 8].copy_from_slice(&value.to_be_bytes());
                    }
                    _ => {
                        let value = rng.below(file_clusters) * cluster_size;
                        let at = start + (at - start) / 8 * 8;
                        damaged[at..at + 8].copy_from_slice(&value.to_be_bytes());
                    }
                }
            }
            use_it(&damaged, seed, others_are_safe);
        }
        // A directory and a table of which the file holds nothing.
        for at in [extension + 16, directory] {
            let mut beyond = bytes.clone();
            beyond[at..at + 8].copy_from_slice(&(file_clusters * cluster_size * 4).to_be_bytes());
            use_it(&beyond, 5, false);
        }
    }
}

/// The bits are asked for before anything is read: the bitmap is refused, and not the disk.
#[test]
fn a_bitmap_that_lies_on_a_table_of_the_disk_does_not_keep_it_from_being_read() {
    let bytes = sound(65536);
    let (_, directory, tables) = places(&bytes);
    let l1 = u64_at(&bytes, 40);
    let l2 = u64_at(&bytes, l1) & !(1 << 63);
    for damaged_at in [directory, tables[0]] {
        let mut damaged = bytes.clone();
        damaged[damaged_at..damaged_at + 8].copy_from_slice(&(l2 as u64).to_be_bytes());
        let world = SimWorld::new(1);
        world.file(NAME, Content::from_bytes(&damaged), SimFileConfig::default());
        let worker = world.worker();
        run(&world, async {
            let image = open(&world, &worker, Access::ReadOnly).await.unwrap();
            assert!(image.bitmap_bits(&worker, "fine").await.is_err());
            assert_eq!(image.bitmap_bits(&worker, "b").await.unwrap().next_dirty(0), Some(0..131_072));
            let disk = read(&image, &worker, 0, SIZE as usize).await;
            let written = |at: usize| at < 100_000 || (3 << 20..(3 << 20) + 700).contains(&at);
            assert!((0..).zip(&disk).all(|(at, byte)| *byte == if written(at) { 7 } else { 0 }));
            image.close(&worker).await.unwrap();
        });
    }
}

/// Together they would be more than is loaded; the damaged one is not.
#[test]
fn a_damaged_bitmap_does_not_count_for_memory() {
    const SIZE: u64 = 1 << 39;
    let world = SimWorld::new(1);
    let worker = world.worker();
    let file = world.file(NAME, Content::new(), SimFileConfig::default());
    let create = CreateOptions::default().size(Some(SIZE)).cluster_size(2 << 20);
    run(&world, Image::create_in(&worker, &file, &create)).unwrap();
    for name in ["a", "b", "c", "d", "e"] {
        run(&world, async {
            let image = open(&world, &worker, Access::ReadWrite).await?;
            let (granularity, recording) = (Some(512), BitmapRecording::Off);
            image
                .add_bitmap(
                    &worker,
                    &NewBitmap::named(name.to_owned()).granularity(granularity).recording(recording),
                )
                .await?;
            image.close(&worker).await
        })
        .unwrap();
    }
    let content = world.content(NAME).unwrap();
    let mut bytes = vec![0; content.len() as usize];
    content.read(0, &mut bytes);
    let extension = (104..4096).step_by(8).find(|at| bytes[*at..at + 4] == [0x23, 0x85, 0x28, 0x75]).unwrap();
    let directory = u64_at(&bytes, extension + 24);
    // Each records: 640 MiB of bits.
    for entry in 0..5 {
        bytes[directory + entry * 32 + 15] |= 2;
    }
    let first_write = |bytes: &[u8]| {
        let world = SimWorld::new(1);
        world.file(NAME, Content::from_bytes(bytes), SimFileConfig::default());
        let worker = world.worker();
        run(&world, async {
            let image = open(&world, &worker, Access::ReadWrite).await.unwrap();
            let written = write(&image, &worker, 0, 512).await;
            image.close(&worker).await.unwrap();
            written
        })
    };
    assert_eq!(first_write(&bytes).unwrap_err().kind(), ErrorKind::Unsupported);
    let table = u64_at(&bytes, directory);
    bytes[table + 7] = 2;
    first_write(&bytes).unwrap();
}

#[test]
fn more_bits_than_memory_may_take_are_refused() {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let file = world.file(NAME, Content::new(), SimFileConfig::default());
    run(&world, async {
        let create = CreateOptions::default().size(Some(1 << 39)).cluster_size(2 << 20);
        Image::create_in(&worker, &file, &create).await.unwrap();
        let image = open(&world, &worker, Access::ReadWrite).await.unwrap();
        let add = async |name: &str, granularity| {
            let new = NewBitmap::named(name).granularity(Some(granularity));
            image.add_bitmap(&worker, &new).await
        };
        add("a", 512).await.unwrap();
        add("b", 512).await.unwrap();
        add("c", 512).await.unwrap();
        add("d", 512).await.unwrap();
        let refused = add("e", 512).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        add("e", 65536).await.unwrap_err();
        image.remove_bitmap(&worker, "a").await.unwrap();
        add("e", 65536).await.unwrap();
        image.close(&worker).await.unwrap();
    });
}

#[test]
fn a_read_only_image_is_never_changed() {
    let bytes = sound(65536);
    let world = SimWorld::new(1);
    world.file(NAME, Content::from_bytes(&bytes), SimFileConfig::default());
    let worker = world.worker();
    run(&world, async {
        let image = open(&world, &worker, Access::ReadOnly).await.unwrap();
        assert_eq!(image.bitmap_bits(&worker, "b").await.unwrap().next_dirty(0), Some(0..131_072));
        assert_eq!(image.bitmap_bits(&worker, "fine").await.unwrap().next_dirty(0), Some(0..100_352));
        let refused = image.remove_bitmap(&worker, "b").await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ReadOnly);
        image.close(&worker).await.unwrap();
    });
    let content = world.content(NAME).unwrap();
    let mut after = vec![0; content.len() as usize];
    content.read(0, &mut after);
    assert!(bytes == after);
}
