//! Checkpoints of disks in use: whatever guests do, each shows one moment of all of its disks, its bitmaps are of that moment, and no
//! guest fails for it.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use zebu_engine::jobs::{BackupEnd, Checkpoint, CheckpointOptions, CheckpointSource, FrozenDisk};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, CreateOptions, DirtyBits, Durability, ErrorKind, Format, Image, NewBitmap, OpenOptions,
    OpenedFile, Preallocation, Shrink, ZeroMode,
};
use zebu_sim::{Content, FailedEffect, Fault, FaultRule, OpClass, OpFilter, SimFileConfig, SimRng, SimWorld};

const BLOCK: u64 = 4096;
/// Blocks of a disk: the last chunk is cut short.
const BLOCKS: u64 = 100;
/// Of each disk, blocks from here on belong to the guest that counts on all of them.
const COUNTERS: u64 = 98;
const SPILL: &str = "spill";

/// A change of some blocks of a disk; each block is of one byte then.
struct Change {
    disk: usize,
    blocks: Range<u64>,
    byte: u8,
    begun: u64,
    /// `u64::MAX` as long as it is under way.
    ended: Cell<u64>,
}

/// A guest: it makes one change after the other, in areas of its own.
#[derive(Clone)]
struct Guest {
    areas: Rc<Vec<(usize, Range<u64>)>>,
    changes: Rc<RefCell<Vec<Rc<Change>>>>,
}

/// Disks in use, and their guests.
struct Ground {
    world: SimWorld,
    workers: [Worker; 2],
    images: Vec<Image>,
    guests: Vec<Guest>,
    clock: Rc<Cell<u64>>,
    failures: Rc<RefCell<Vec<String>>>,
}

fn tick(clock: &Cell<u64>) -> u64 {
    clock.set(clock.get() + 1);
    clock.get()
}

impl Ground {
    fn new(seed: u64, rng: &mut SimRng) -> Self {
        let world = SimWorld::new(seed);
        let workers = [world.worker(), world.worker()];
        let cluster_size = *rng.pick(&[BLOCK, 4 * BLOCK, 16 * BLOCK]);
        let count = rng.between(1, 3) as usize;
        let images: Vec<Image> = (0..count)
            .map(|disk| {
                let name = format!("disk{disk}");
                let file = world.file(&name, Content::new(), SimFileConfig::default());
                let create = CreateOptions::default().size(Some(BLOCKS * BLOCK)).cluster_size(cluster_size);
                let open = OpenOptions::default().access(Access::ReadWrite);
                world
                    .block_on(async {
                        Image::create_in(&workers[0], &file, &create).await.unwrap();
                        drop(file);
                        let file = world.open(&name, SimFileConfig::default()).unwrap();
                        let files = vec![OpenedFile::new(file, Format::Qcow2)];
                        let image = Image::open_files(&workers[0], files, &open).await.unwrap();
                        image
                            .add_bitmap(&workers[0], &NewBitmap::named("old").granularity(BLOCK))
                            .await
                            .unwrap();
                        image
                    })
                    .unwrap()
            })
            .collect();
        let guest = |areas| Guest { areas: Rc::new(areas), changes: Rc::default() };
        let mut guests: Vec<Guest> = (0..count)
            .flat_map(|disk| [0..33, 33..66, 66..COUNTERS].map(|blocks| guest(vec![(disk, blocks)])))
            .collect();
        guests.push(guest((0..count).map(|disk| (disk, COUNTERS..BLOCKS)).collect()));
        Self { world, workers, images, guests, clock: Rc::default(), failures: Rc::default() }
    }

    /// Has all guests make so many changes, at the same time.
    fn change(&self, rng: &mut SimRng, count: u64) -> Vec<zebu_engine::storage::JoinHandle<()>> {
        self.guests
            .iter()
            .map(|guest| {
                let (guest, images, clock) = (guest.clone(), self.images.clone(), self.clock.clone());
                let failures = self.failures.clone();
                let (mut rng, worker) = (rng.fork(), self.workers[1].clone());
                self.workers[1].spawn(async move {
                    for _ in 0..count {
                        let number = guest.changes.borrow().len();
                        let (disk, area) = guest.areas[number % guest.areas.len()].clone();
                        let start = area.start + rng.below(area.end - area.start);
                        let blocks = start..area.end.min(start + rng.between(1, 20));
                        let kind = rng.below(5);
                        let byte = if kind > 1 { 1 + (number % 255) as u8 } else { 0 };
                        let change = Rc::new(Change {
                            disk,
                            blocks: blocks.clone(),
                            byte,
                            begun: tick(&clock),
                            ended: Cell::new(u64::MAX),
                        });
                        guest.changes.borrow_mut().push(change.clone());
                        let (offset, len) = (blocks.start * BLOCK, (blocks.end - blocks.start) * BLOCK);
                        let image = &images[disk];
                        let result = match kind {
                            0 => image.write_zeroes(&worker, offset, len, ZeroMode::Unmap).await,
                            1 => image.write_zeroes(&worker, offset, len, ZeroMode::Keep).await,
                            _ => {
                                let bytes = vec![byte; len as usize];
                                let bufs = IoBuf::copy_of(&bytes).into();
                                image.write(&worker, offset, bufs, Durability::Volatile).await.0
                            }
                        };
                        if let Err(error) = result {
                            failures.borrow_mut().push(error.to_string());
                        }
                        change.ended.set(tick(&clock));
                    }
                })
            })
            .collect()
    }

    /// The bytes of the blocks of all disks, by a reader of each.
    async fn read_images(&self) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        for image in &self.images {
            let (read, bufs) =
                image.read(&self.workers[0], 0, IoBuf::zeroed((BLOCKS * BLOCK) as usize).into()).await;
            read.unwrap();
            let mut bytes = vec![0; (BLOCKS * BLOCK) as usize];
            bufs.copy_to(0, &mut bytes);
            all.push(bytes);
        }
        all
    }

    /// Requires that the disks show, of each guest, a number of changes that was reached between two times.
    fn judge(&self, shown: &[Vec<u8>], from: u64, to: u64) {
        for (number, guest) in self.guests.iter().enumerate() {
            let changes = guest.changes.borrow();
            let least = changes.iter().take_while(|change| change.ended.get() <= from).count();
            let most = changes.iter().take_while(|change| change.begun <= to).count();
            let is_shown = |count: usize| {
                let mut expected = vec![vec![0u8; BLOCKS as usize]; self.images.len()];
                for change in &changes[..count] {
                    let blocks = change.blocks.start as usize..change.blocks.end as usize;
                    expected[change.disk][blocks].fill(change.byte);
                }
                guest.areas.iter().all(|(disk, area)| {
                    area.clone().all(|block| {
                        let bytes = &shown[*disk][(block * BLOCK) as usize..((block + 1) * BLOCK) as usize];
                        bytes.iter().all(|byte| *byte == expected[*disk][block as usize])
                    })
                })
            };
            assert!(
                (least..=most).any(is_shown),
                "no moment of guest {number} from {least} to {most} changes is shown"
            );
        }
    }
}

async fn read(worker: &Worker, disk: &FrozenDisk, blocks: Range<u64>) -> zebu_engine::Result<Vec<u8>> {
    let mut bytes = vec![0; ((blocks.end - blocks.start) * BLOCK) as usize];
    let (read, bufs) = disk.read(worker, blocks.start * BLOCK, IoBuf::zeroed(bytes.len()).into()).await;
    read?;
    bufs.copy_to(0, &mut bytes);
    Ok(bytes)
}

/// Holes are zero, and the runs are the whole disk.
async fn check_extents(worker: &Worker, disk: &FrozenDisk, shown: &[u8]) {
    let mut at = 0;
    while at < disk.size() {
        let (len, hole) = disk.extent(worker, at).await.unwrap();
        let bytes = &shown[at as usize..(at + len) as usize];
        assert!(len > 0 && (!hole || bytes.iter().all(|byte| *byte == 0)), "{at}: a hole that is not zero");
        at += len;
    }
    assert_eq!(at, disk.size());
}

/// Requires that a bitmap marks all that differs.
fn knows(bits: &DirtyBits, before: &[u8], after: &[u8], what: &str) {
    for block in 0..BLOCKS {
        let bytes = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
        let is_marked = bits.run_at(block * BLOCK).0;
        assert!(
            is_marked || before[bytes.clone()] == after[bytes],
            "block {block} has changed unmarked: {what}"
        );
    }
}

/// Reads of a part of one disk, with what they gave.
type Seen = Rc<RefCell<Vec<(usize, Range<u64>, zebu_engine::Result<Vec<u8>>)>>>;

/// Has a checkpoint read here and there while guests go on.
fn reader(
    ground: &Ground,
    rng: &mut SimRng,
    checkpoint: &Checkpoint,
    seen: &Seen,
) -> zebu_engine::storage::JoinHandle<()> {
    let (disks, seen, worker) = (checkpoint.disks().to_vec(), seen.clone(), ground.workers[0].clone());
    let mut rng = rng.fork();
    ground.workers[0].spawn(async move {
        for _ in 0..60 {
            let disk = rng.index(disks.len());
            let start = rng.below(BLOCKS);
            let blocks = start..BLOCKS.min(start + rng.between(1, 40));
            let result = read(&worker, &disks[disk], blocks.clone()).await;
            seen.borrow_mut().push((disk, blocks, result));
        }
    })
}

fn shows_one_moment(seed: u64) {
    let mut rng = SimRng::new(seed);
    let ground = Ground::new(seed, &mut rng);
    let worker = &ground.workers[0];
    let before = ground.change(&mut rng, 12);
    let is_one_bitmap = rng.chance(1, 2);
    let goes_on = if is_one_bitmap { "old" } else { "new" };
    let sources = ground
        .images
        .iter()
        .map(|image| CheckpointSource::new(image).from("old".to_owned()).bitmap(goes_on.to_owned()));
    let wait = Duration::from_micros(rng.below(3000));
    let spill = ground.world.file(SPILL, Content::new(), SimFileConfig::default());
    let memory = *rng.pick(&[0, 128 << 10, 1 << 30]);
    let options = CheckpointOptions::default().memory(memory).spill(spill);
    let seen = Seen::default();
    let run = async {
        worker.sleep(wait).await;
        let from = tick(&ground.clock);
        let checkpoint = Checkpoint::start(worker, sources.collect(), options).await.unwrap();
        let to = tick(&ground.clock);
        let reading = reader(&ground, &mut rng, &checkpoint, &seen);
        for guest in before {
            guest.await;
        }
        for guest in ground.change(&mut rng, 10) {
            guest.await;
        }
        reading.await;
        (checkpoint, from, to)
    };
    let (checkpoint, from, to) = ground.world.block_on(run).unwrap();
    assert_eq!(checkpoint.failure().map(|error| error.to_string()), None);
    assert_eq!(*ground.failures.borrow(), Vec::<String>::new());
    let judging = async {
        let mut shown = Vec::new();
        for disk in checkpoint.disks() {
            let bytes = read(worker, disk, 0..BLOCKS).await.unwrap();
            check_extents(worker, disk, &bytes).await;
            shown.push(bytes);
        }
        let now = ground.read_images().await;
        ground.judge(&shown, from, to);
        ground.judge(&now, u64::MAX - 1, u64::MAX);
        for (disk, blocks, bytes) in seen.borrow().iter() {
            let range = (blocks.start * BLOCK) as usize..(blocks.end * BLOCK) as usize;
            assert!(
                *bytes.as_ref().unwrap() == shown[*disk][range],
                "disk {disk} has shown another moment at {blocks:?}"
            );
        }
        for (disk, (frozen, (shown, now))) in
            checkpoint.disks().iter().zip(shown.iter().zip(&now)).enumerate()
        {
            let (name, bits) = frozen.bitmap().unwrap();
            assert_eq!(name, "old");
            let empty = vec![0; shown.len()];
            knows(bits, &empty, shown, "before the moment");
            if !is_one_bitmap {
                let bits = ground.images[disk].bitmap_bits(worker, "new").await.unwrap();
                knows(&bits, shown, now, "after the moment");
            }
        }
        let outcome = if rng.chance(1, 2) { BackupEnd::Complete } else { BackupEnd::GivenUp };
        let disks = checkpoint.disks().to_vec();
        checkpoint.end(outcome).await;
        assert_eq!(read(worker, &disks[0], 0..1).await.unwrap_err().kind(), ErrorKind::Cancelled);
        assert_eq!(disks[0].extent(worker, 0).await.unwrap_err().kind(), ErrorKind::Cancelled);
        for (image, (shown, now)) in ground.images.iter().zip(shown.iter().zip(&now)) {
            let bits = image.bitmap_bits(worker, "old").await.unwrap();
            let empty = vec![0; shown.len()];
            let since = if is_one_bitmap && outcome == BackupEnd::Complete { shown } else { &empty };
            knows(&bits, since, now, "since the bitmap began");
            image.close(worker).await.unwrap();
        }
    };
    ground.world.block_on(judging).unwrap();
}

#[test]
pub(crate) fn all_disks_are_shown_as_at_one_moment() {
    for seed in 0..60 {
        shows_one_moment(seed);
    }
}

/// A checkpoint whose spill fails, or is full, while guests write and a client reads.
fn spill_fails(seed: u64) {
    let mut rng = SimRng::new(seed);
    let ground = Ground::new(seed, &mut rng);
    let worker = &ground.workers[0];
    ground
        .world
        .block_on(async {
            for guest in ground.change(&mut rng, 6) {
                guest.await;
            }
        })
        .unwrap();
    let is_full = rng.chance(1, 2);
    let options = if is_full {
        CheckpointOptions::default().memory(1 << 20).limit(rng.between(0, 3) << 16)
    } else {
        let fault = Fault::Fail { errno: libc::EIO, effect: FailedEffect::Part };
        ground
            .world
            .inject(FaultRule::new(OpFilter::of(OpClass::Write).on_file(SPILL), fault).span(rng.below(3), 1));
        let spill = ground.world.file(SPILL, Content::new(), SimFileConfig::default());
        CheckpointOptions::default().memory(0).spill(spill)
    };
    let sources = ground.images.iter().map(CheckpointSource::new).collect();
    let seen = Seen::default();
    let run = async {
        let checkpoint = Checkpoint::start(worker, sources, options).await.unwrap();
        let moment = ground.read_images().await;
        let reading = [0; 3].map(|_| reader(&ground, &mut rng, &checkpoint, &seen));
        for guest in ground.change(&mut rng, 12) {
            guest.await;
        }
        for reading in reading {
            reading.await;
        }
        let now = ground.read_images().await;
        (checkpoint, moment, now)
    };
    let (checkpoint, moment, now) = ground.world.block_on(run).unwrap();
    assert_eq!(*ground.failures.borrow(), Vec::<String>::new(), "a guest has failed");
    ground.judge(&now, u64::MAX - 1, u64::MAX);
    for (disk, blocks, result) in seen.borrow().iter() {
        match result {
            Ok(bytes) => {
                let range = (blocks.start * BLOCK) as usize..(blocks.end * BLOCK) as usize;
                assert!(*bytes == moment[*disk][range], "disk {disk} has shown another moment at {blocks:?}");
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}"),
        }
    }
    let failure = checkpoint.failure().expect("the spill had no room");
    assert_eq!(failure.kind(), if is_full { ErrorKind::NoSpace } else { ErrorKind::Io }, "{failure}");
    assert!(failure.to_string().contains("make the checkpoint anew"), "{failure}");
    ground.world.block_on(checkpoint.end(BackupEnd::GivenUp)).unwrap();
}

#[test]
pub(crate) fn a_spill_that_fails_ends_the_checkpoint_and_no_guest() {
    for seed in 0..60 {
        spill_fails(seed);
    }
}

#[test]
fn a_checkpoint_keeps_its_size_and_the_disk_its_moment() {
    let mut rng = SimRng::new(3);
    let ground = Ground::new(3, &mut rng);
    let (worker, image) = (&ground.workers[0], &ground.images[0]);
    let size = BLOCKS * BLOCK;
    let run = async {
        let source = || vec![CheckpointSource::new(image)];
        let first = Checkpoint::start(worker, source(), CheckpointOptions::default()).await.unwrap();
        let write = async |byte: u8| {
            let bufs = IoBuf::copy_of(&vec![byte; size as usize]).into();
            image.write(worker, 0, bufs, Durability::Volatile).await.0.unwrap();
        };
        write(1).await;
        // Others are there beside it, each with its own moment.
        let second = Checkpoint::start(worker, source(), CheckpointOptions::default()).await.unwrap();
        image.resize(worker, 2 * size, Shrink::Refuse, Preallocation::Off).await.unwrap();
        write(2).await;
        let refused = image.resize(worker, size, Shrink::Allow, Preallocation::Off).await.unwrap_err();
        assert!(refused.to_string().contains("checkpoint"), "{refused}");
        for (checkpoint, byte) in [(&first, 0), (&second, 1)] {
            let disk = &checkpoint.disks()[0];
            assert_eq!(disk.size(), size);
            assert!(read(worker, disk, 0..BLOCKS).await.unwrap().iter().all(|found| *found == byte));
            assert_eq!(read(worker, disk, 0..BLOCKS + 1).await.unwrap_err().kind(), ErrorKind::OutOfRange);
        }
        assert_eq!((first.report().spill_memory, second.report().spill_memory), (0, size));
        first.end(BackupEnd::Complete).await;
        drop(second);
        image.resize(worker, size, Shrink::Allow, Preallocation::Off).await.unwrap();
        image.close(worker).await.unwrap();
    };
    ground.world.block_on(run).unwrap();
}

#[test]
fn of_several_disks_all_are_taken_or_none() {
    let mut rng = SimRng::new(0);
    let ground = loop {
        let ground = Ground::new(rng.next_u64(), &mut rng);
        if ground.images.len() > 1 {
            break ground;
        }
    };
    let (worker, images) = (&ground.workers[0], &ground.images);
    let run = async {
        let sources = |from: &str| {
            let of = |image: &Image, from: &str| {
                CheckpointSource::new(image).from(from.to_owned()).bitmap("new".to_owned())
            };
            vec![of(&images[0], "old"), of(&images[1], from)]
        };
        let start = |sources| Checkpoint::start(worker, sources, CheckpointOptions::default());
        let refused = start(sources("nosuch")).await.unwrap_err();
        assert!(refused.kind() == ErrorKind::NotFound && refused.to_string().contains("nosuch"), "{refused}");
        let has_new = |image: &Image| image.bitmaps().iter().any(|bitmap| bitmap.name == "new");
        assert!(!images.iter().any(has_new));
        let twice = vec![CheckpointSource::new(&images[0]), CheckpointSource::new(&images[0])];
        assert_eq!(start(twice).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(start(Vec::new()).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
        // A bitmap that another shows and begins is in use.
        let both = vec![CheckpointSource::new(&images[1]).from("old".to_owned()).bitmap("old".to_owned())];
        let first = start(both).await.unwrap();
        let refused = start(sources("old")).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
        assert!(!images.iter().any(has_new));
        first.end(BackupEnd::Complete).await;
        start(sources("old")).await.unwrap().end(BackupEnd::Complete).await;
        for image in images {
            image.close(worker).await.unwrap();
        }
    };
    ground.world.block_on(run).unwrap();
}
