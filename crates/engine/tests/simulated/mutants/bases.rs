//! The backups that bitmaps go on from: whatever a crash or another program leaves, a bitmap that is said to go on from a backup knows
//! of everything that was written since.

use zebu_engine::jobs::{BackupEnd, Copied, LiveBackup, LiveBackupOptions, LiveBitmap};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, BackupId, BitmapRecording, CreateOptions, Durability, Format, Image, OpenOptions, OpenedFile,
};
use zebu_sim::{Content, CrashOptions, SimFileConfig, SimRng, SimWorld, Tear};

const SIZE: u64 = 256 << 10;
const DISK: &str = "disk";

async fn open(world: &SimWorld, worker: &Worker, name: &str, access: Access) -> Image {
    let file = world.open(name, SimFileConfig::default()).unwrap();
    let options = OpenOptions::default().access(access);
    Image::open_files(worker, vec![OpenedFile::new(file, Format::Qcow2)], &options).await.unwrap()
}

async fn write(worker: &Worker, image: &Image, byte: u8, offset: u64) {
    let bufs = IoBuf::copy_of(&[byte; 4096]).into();
    image.write(worker, offset, bufs, Durability::Volatile).await.0.unwrap();
}

/// A backup of `image` into a new file; the id that it got.
async fn back_up(
    world: &SimWorld,
    worker: &Worker,
    image: &Image,
    name: &str,
    previous: Option<BackupId>,
) -> BackupId {
    let file = world.file(name, Content::new(), SimFileConfig::default());
    let create = CreateOptions::default().size(Some(SIZE)).cluster_size(4096);
    Image::create_in(worker, &file, &create).await.unwrap();
    let target = open(world, worker, name, Access::ReadWrite).await;
    let copied = if previous.is_some() { Copied::Marked } else { Copied::All };
    let bitmap = LiveBitmap::new("b", copied).previous(previous);
    let options = LiveBackupOptions::default().bitmap(bitmap);
    let backup = LiveBackup::start(worker, image, &target, options).await.unwrap();
    backup.run(worker).await.unwrap();
    target.close(worker).await.unwrap();
    backup.end(BackupEnd::Complete).await;
    target.backup_id().expect("the target is marked")
}

/// A closed image with a bitmap that goes on from a backup, since which one place was written.
fn tied(world: &SimWorld, worker: &Worker) -> BackupId {
    world
        .block_on(async {
            let file = world.file(DISK, Content::new(), SimFileConfig::default());
            let create = CreateOptions::default().size(Some(SIZE)).cluster_size(4096);
            Image::create_in(worker, &file, &create).await.unwrap();
            let image = open(world, worker, DISK, Access::ReadWrite).await;
            write(worker, &image, 1, 0).await;
            let full = back_up(world, worker, &image, "full", None).await;
            write(worker, &image, 2, 8192).await;
            let next = back_up(world, worker, &image, "next", Some(full)).await;
            write(worker, &image, 3, 65536).await;
            image.close(worker).await.unwrap();
            assert_ne!(full, next);
            next
        })
        .unwrap()
}

/// The base of the bitmap, and whether it knows of what was written since the last backup.
fn found(world: &SimWorld, content: Option<Content>) -> Option<(Option<BackupId>, bool)> {
    let left = SimWorld::new(0);
    left.file(DISK, content.or_else(|| world.content(DISK)).unwrap(), SimFileConfig::default());
    let worker = left.worker();
    left.block_on(async {
        let image = open(&left, &worker, DISK, Access::ReadOnly).await;
        let info = image.bitmaps().into_iter().find(|info| info.name == "b" && !info.in_use)?;
        let bits = image.bitmap_bits(&worker, "b").await.unwrap();
        Some((info.base, bits.run_at(65536).0))
    })
    .unwrap()
}

/// Changes the bitmap of a tied image while the power may fail at any moment.
fn changed(seed: u64, change: impl AsyncFnOnce(&Worker, &Image)) {
    let mut rng = SimRng::new(seed);
    let world = SimWorld::new(seed);
    let worker = world.worker();
    let next = tied(&world, &worker);
    assert_eq!(found(&world, None), Some((Some(next), true)));
    let judge = |seed| {
        for state in world.crash_states(&CrashOptions { max_states: 12, tear: Tear::Sector, seed }) {
            if let Some((base, knows)) = found(&world, Some(state.file(DISK).unwrap().clone())) {
                assert!(base.is_none() || base == Some(next) && knows, "{state}: it goes on from {base:?}");
            }
        }
    };
    let changing = async {
        let image = open(&world, &worker, DISK, Access::ReadWrite).await;
        change(&worker, &image).await;
        image.close(&worker).await.unwrap();
    };
    world.block_on_watched(changing, |_| judge(rng.next_u64())).unwrap();
    assert_eq!(found(&world, None).unwrap().0, None, "it still goes on from a backup");
}

#[test]
pub(crate) fn a_bitmap_that_is_cleared_goes_on_from_nothing() {
    for seed in 0..4 {
        changed(seed, async |worker, image| image.clear_bitmap(worker, "b").await.unwrap());
    }
}

#[test]
pub(crate) fn a_bitmap_that_stops_goes_on_from_nothing() {
    for seed in 0..4 {
        changed(seed, async |worker, image| {
            image.set_bitmap_recording(worker, "b", BitmapRecording::Off).await.unwrap();
            write(worker, image, 9, 32768).await;
            image.set_bitmap_recording(worker, "b", BitmapRecording::On).await.unwrap();
        });
    }
}

/// A change of an image's bytes.
type Damage = Box<dyn Fn(&mut Vec<u8>)>;

/// As QEMU leaves it: the header is written anew, with what is not known to it, and the directory may be where it was.
#[test]
pub(crate) fn a_header_that_another_program_has_written_names_no_backup() {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let next = tied(&world, &worker);
    let content = world.content(DISK).unwrap();
    let mut bytes = vec![0; content.len() as usize];
    content.read(0, &mut bytes);
    let bases = (104..4096).step_by(8).find(|at| bytes[*at..at + 4] == *b"ZBBB").unwrap();
    assert!(bytes[bases + 8..].windows(16).any(|id| id == next.0));
    let directory =
        (104..4096).step_by(8).find(|at| bytes[*at..at + 4] == [0x23, 0x85, 0x28, 0x75]).unwrap() + 24;
    let directory = u64::from_be_bytes(bytes[directory..directory + 8].try_into().unwrap()) as usize;
    let changes: [Damage; 3] = [
        // The padding behind the data.
        Box::new(move |bytes| bytes[bases + 8 + 129..bases + 8 + 136].fill(0)),
        // Another backup.
        Box::new(move |bytes| bytes[bases + 8 + 17] ^= 1),
        // Another table of the bitmap: where it says "all ones" is found, too.
        Box::new(move |bytes| bytes[directory + 15] |= 1),
    ];
    for (index, change) in changes.iter().enumerate() {
        let mut changed = bytes.clone();
        change(&mut changed);
        let found = found(&world, Some(Content::from_bytes(&changed)));
        assert!(found.is_none_or(|(base, _)| base.is_none()), "change {index}: {found:?}");
    }
}

#[test]
pub(crate) fn a_backup_that_is_written_is_none() {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let next = tied(&world, &worker);
    let judge = |rng: u64| {
        for state in world.crash_states(&CrashOptions { max_states: 12, tear: Tear::Sector, seed: rng }) {
            let left = SimWorld::new(0);
            left.file("next", state.file("next").unwrap().clone(), SimFileConfig::default());
            let worker = left.worker();
            left.block_on(async {
                let image = open(&left, &worker, "next", Access::ReadOnly).await;
                let (read, bufs) = image.read(&worker, 8192, IoBuf::zeroed(4096).into()).await;
                read.unwrap();
                let mut bytes = [0; 4096];
                bufs.copy_to(0, &mut bytes);
                let is_written = bytes != [2; 4096];
                assert!(
                    !is_written || image.backup_id().is_none(),
                    "{state}: it was written, and is still {next}"
                );
            })
            .unwrap();
        }
    };
    let mut rng = SimRng::new(1);
    let writing = async {
        let image = open(&world, &worker, "next", Access::ReadWrite).await;
        assert_eq!(image.backup_id(), Some(next));
        write(&worker, &image, 9, 8192).await;
        assert_eq!(image.backup_id(), None);
        image.close(&worker).await.unwrap();
    };
    world.block_on_watched(writing, |_| judge(rng.next_u64())).unwrap();
}
