//! Bitmaps after a crash: one that recorded knows of everything that differs from what the disk held when it began, flushed or not.

use zebu_engine::jobs::{BackupEnd, Copied, LiveBackup, LiveBackupOptions, LiveBitmap};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, CreateOptions, Durability, Format, Image, NewBitmap, OpenOptions, OpenedFile, ZeroMode,
};
use zebu_sim::{Content, CrashOptions, LogEvent, OpClass, SimFileConfig, SimRng, SimWorld, Tear};

const SIZE: u64 = 4 << 20;
const DISK: &str = "disk";
/// Bytes of a granule of the record of a disk of this size.
const GRANULE: u64 = 4096;
/// Bytes that are marked together.
const GROUP: u64 = 16 * GRANULE;
const BLOCK: usize = 4096;

async fn open(world: &SimWorld, worker: &Worker, access: Access) -> Image {
    let file = world.open(DISK, SimFileConfig::default()).unwrap();
    let options = OpenOptions::default().access(access);
    Image::open_files(worker, vec![OpenedFile::new(file, Format::Qcow2)], &options).await.unwrap()
}

async fn write(worker: &Worker, image: &Image, byte: u8, offset: u64) {
    let bufs = IoBuf::copy_of(&[byte; BLOCK]).into();
    image.write(worker, offset, bufs, Durability::Volatile).await.0.unwrap();
}

async fn read_all(worker: &Worker, image: &Image) -> Vec<u8> {
    let (read, bufs) = image.read(worker, 0, IoBuf::zeroed(SIZE as usize).into()).await;
    read.unwrap();
    let mut bytes = vec![0; SIZE as usize];
    bufs.copy_to(0, &mut bytes);
    bytes
}

/// An image that is open, of which every other group is allocated, and the content of its disk. Its bitmap "b" is empty.
async fn begun(world: &SimWorld, worker: &Worker) -> (Image, Vec<u8>) {
    let file = world.file(DISK, Content::new(), SimFileConfig::default());
    let create = CreateOptions::default().size(Some(SIZE)).cluster_size(BLOCK as u64);
    Image::create_in(worker, &file, &create).await.unwrap();
    let image = open(world, worker, Access::ReadWrite).await;
    for at in (0..SIZE).step_by(BLOCK).filter(|at| (at / GROUP).is_multiple_of(2)) {
        write(worker, &image, 1, at).await;
    }
    image.add_bitmap(worker, &NewBitmap::named("b").granularity(BLOCK as u64)).await.unwrap();
    let disk = read_all(worker, &image).await;
    (image, disk)
}

/// The rest that a crash left of the bitmap "b": whether it can be used, the granules that tell what was not stored, and the blocks that differ
/// from `before` without being marked.
struct Left {
    is_sound: bool,
    recovered: Option<u64>,
    unknown: Vec<u64>,
    marked: u64,
}

fn left(content: Content, before: &[u8]) -> Left {
    let world = SimWorld::new(0);
    world.file(DISK, content, SimFileConfig::default());
    let worker = world.worker();
    world
        .block_on(async {
            let image = open(&world, &worker, Access::ReadOnly).await;
            let bitmaps = image.bitmaps();
            assert!(bitmaps.iter().all(|info| ["b", "c"].contains(&info.name.as_str())), "{bitmaps:?}");
            let info = bitmaps.into_iter().find(|info| info.name == "b").expect("the bitmap");
            if info.in_use {
                return Left { is_sound: false, recovered: None, unknown: Vec::new(), marked: 0 };
            }
            let bits = image.bitmap_bits(&worker, "b").await.unwrap();
            let disk = read_all(&worker, &image).await;
            let differs = |at: &usize| disk[*at..at + BLOCK] != before[*at..at + BLOCK];
            let unknown = (0..SIZE as usize).step_by(BLOCK).filter(differs).map(|at| at as u64);
            let unknown = unknown.filter(|at| !bits.run_at(*at).0).collect();
            Left { is_sound: true, recovered: info.recovered, unknown, marked: bits.dirty_bytes() }
        })
        .unwrap()
}

/// Runs `changes` of a disk whose bitmap has begun, while the power may fail at any moment.
fn crashed(seed: u64, changes: impl AsyncFnOnce(&SimWorld, &Worker, &Image)) {
    let mut rng = SimRng::new(seed);
    let world = SimWorld::new(seed);
    let worker = world.worker();
    let (image, before) = world.block_on(begun(&world, &worker)).unwrap();
    let mut recovered = 0;
    let judge = |seed, recovered: &mut u64| {
        for state in world.crash_states(&CrashOptions { max_states: 6, tear: Tear::Sector, seed }) {
            let left = left(state.file(DISK).unwrap().clone(), &before);
            assert!(left.is_sound && left.recovered == Some(GRANULE), "{state}: it is of no use");
            assert!(left.unknown.is_empty(), "{state}: changes at {:x?} are not known", left.unknown);
            *recovered += 1;
        }
    };
    world
        .block_on_watched(changes(&world, &worker, &image), |_| {
            if rng.chance(1, 3) {
                judge(rng.next_u64(), &mut recovered);
            }
        })
        .unwrap();
    judge(rng.next_u64(), &mut recovered);
    assert!(recovered > 20, "{recovered} states");
}

#[test]
pub(crate) fn changes_in_place_are_known_after_a_crash() {
    for seed in 0..4 {
        crashed(seed, async |_, worker, image| {
            for group in [0, 6, 2, 14] {
                write(worker, image, 2, group * GROUP + 3 * GRANULE).await;
                write(worker, image, 3, group * GROUP).await;
            }
        });
    }
}

#[test]
pub(crate) fn changes_that_are_linked_are_known_after_a_crash() {
    for seed in 0..4 {
        crashed(seed, async |_, worker, image| {
            for group in [1, 7, 3] {
                write(worker, image, 2, group * GROUP + GRANULE).await;
                image.flush(worker).await.unwrap();
            }
            image.discard(worker, 2 * GROUP, 2 * GRANULE).await.unwrap();
            image.flush(worker).await.unwrap();
            let zeroed = 4 * GROUP + GRANULE;
            image.write_zeroes(worker, zeroed, GRANULE, ZeroMode::Unmap).await.unwrap();
            image.flush(worker).await.unwrap();
        });
    }
}

#[test]
pub(crate) fn a_record_that_begins_anew_loses_nothing() {
    for seed in 0..4 {
        crashed(seed, async |_, worker, image| {
            write(worker, image, 2, 5 * GRANULE).await;
            image.add_bitmap(worker, &NewBitmap::named("c")).await.unwrap();
            write(worker, image, 2, 8 * GROUP).await;
            image.remove_bitmap(worker, "c").await.unwrap();
            write(worker, image, 2, 9 * GROUP).await;
        });
    }
}

#[test]
pub(crate) fn bits_that_a_backup_has_are_not_lost() {
    for seed in 0..4 {
        crashed(seed, async |world, worker, image| {
            write(worker, image, 2, 5 * GRANULE).await;
            let file = world.file("target", Content::new(), SimFileConfig::default());
            let create = CreateOptions::default().size(Some(SIZE)).cluster_size(BLOCK as u64);
            Image::create_in(worker, &file, &create).await.unwrap();
            let target = world.open("target", SimFileConfig::default()).unwrap();
            let options = OpenOptions::default().access(Access::ReadWrite);
            let target = vec![OpenedFile::new(target, Format::Qcow2)];
            let target = Image::open_files(worker, target, &options).await.unwrap();
            let options = LiveBackupOptions::default().bitmap(LiveBitmap::new("b", Copied::All));
            let backup = LiveBackup::start(worker, image, &target, options).await.unwrap();
            // The record begins anew, while the backup has the bits.
            image.add_bitmap(worker, &NewBitmap::named("c")).await.unwrap();
            write(worker, image, 2, 8 * GROUP).await;
            backup.end(BackupEnd::GivenUp).await;
            image.remove_bitmap(worker, "c").await.unwrap();
            write(worker, image, 2, 9 * GROUP).await;
        });
    }
}

/// Offsets in an image: the directory entry of the record, and the end of its bits.
fn record_in(bytes: &[u8]) -> (usize, usize) {
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let extension =
        (104..4096).step_by(8).find(|at| bytes[*at..at + 4] == [0x23, 0x85, 0x28, 0x75]).unwrap() + 8;
    let mut entry = word(extension + 16);
    while !bytes[entry + 24..].starts_with(b"zebu:record") {
        let name = usize::from(u16::from_be_bytes([bytes[entry + 18], bytes[entry + 19]]));
        entry += (24 + name).next_multiple_of(8);
    }
    let data = word(word(entry));
    (entry, data + BLOCK)
}

#[test]
pub(crate) fn a_record_that_another_program_has_written_is_not_believed() {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let (image, before) = world.block_on(begun(&world, &worker)).unwrap();
    world.block_on(write(&worker, &image, 2, 0)).unwrap();
    let content = world.content(DISK).unwrap();
    let bytes = content.bytes(0..content.len());
    let (entry, end) = record_in(&bytes);
    let found = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut changed = bytes.clone();
        change(&mut changed);
        left(Content::from_bytes(&changed), &before).is_sound
    };
    assert!(found(&|_| ()));
    // It was killed while it had the record in use.
    assert!(!found(&|bytes| bytes[entry + 15] |= 1));
    // The record has missed something.
    assert!(!found(&|bytes| bytes[entry + 15] &= !2));
    // It has closed the image: what lies behind the bits is written as zeroes.
    assert!(!found(&|bytes| bytes[end - 32..end].fill(0)));
    drop(image);
}

#[test]
fn a_recovered_bitmap_is_as_any_other_once_the_image_was_closed() {
    for writes in [false, true] {
        let world = SimWorld::new(1);
        let worker = world.worker();
        let (image, before) = world.block_on(begun(&world, &worker)).unwrap();
        let content = world
            .block_on(async {
                write(&worker, &image, 2, 5 * GRANULE).await;
                image.flush(&worker).await.unwrap();
                let content = world.content(DISK).unwrap();
                drop(image);
                content
            })
            .unwrap();
        let world = SimWorld::new(2);
        world.file(DISK, content, SimFileConfig::default());
        let worker = world.worker();
        world
            .block_on(async {
                let image = open(&world, &worker, Access::ReadWrite).await;
                assert_eq!(image.bitmaps()[0].recovered, Some(GRANULE));
                if writes {
                    write(&worker, &image, 2, 9 * GROUP).await;
                }
                image.close(&worker).await.unwrap();
            })
            .unwrap();
        let left = left(world.content(DISK).unwrap(), &before);
        assert!(left.is_sound && left.unknown.is_empty());
        assert_eq!(left.recovered, None);
        assert_eq!(left.marked, GROUP + if writes { GRANULE } else { 0 });
    }
}

/// Syncs of the disk that `work` takes.
fn syncs(world: &SimWorld, work: impl Future<Output = ()>) -> usize {
    let count = || {
        let log = world.log();
        let flushes = log.events().iter().filter(
            |event| matches!(event, LogEvent::Submitted { what, .. } if what.class() == OpClass::Flush),
        );
        flushes.count()
    };
    let before = count();
    world.block_on(work).unwrap();
    count() - before
}

#[test]
fn one_write_of_a_group_waits_for_a_sync() {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let (image, _) = world.block_on(begun(&world, &worker)).unwrap();
    let first = syncs(&world, write(&worker, &image, 2, 0));
    assert_eq!(first, 1);
    let touched = syncs(&world, async {
        for granule in 0..4 * 16 {
            let group = [0, 2, 4, 6][granule as usize % 4];
            write(&worker, &image, 3, group * GROUP + granule / 4 * GRANULE).await;
        }
    });
    assert_eq!(touched, 3, "the first group was marked");
    let again = syncs(&world, async {
        for granule in 0..4 * 16 {
            write(&worker, &image, 4, granule / 16 * 2 * GROUP + granule % 16 * GRANULE).await;
        }
    });
    assert_eq!(again, 0);
    // Writes that come together wait for the same one.
    let together = syncs(&world, async {
        let writes = [8, 10, 12, 14, 16, 18].map(|group| write(&worker, &image, 5, group * GROUP));
        futures_util::future::join_all(writes).await;
    });
    assert!(together <= 3, "{together}");
}
