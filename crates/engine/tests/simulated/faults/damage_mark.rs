//! An image whose metadata a write finds damaged: it is marked as corrupt where that was asked for, and nothing else changes.

use crate::faults::bench::begin;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, CreateOptions, DamageMark, Durability, ErrorKind, Format, Image, OpenOptions, OpenedFile,
};
use zebu_sim::{Content, CrashOptions, OpClass, OpFilter, SimFileConfig, SimWorld, Tear};

const TOP: &str = "top";
const CLUSTER: u64 = 4096;
const INCOMPATIBLE: u64 = 72;
const CORRUPT: u8 = 2;

fn writable() -> OpenOptions {
    OpenOptions::default().access(Access::ReadWrite)
}

async fn write(image: &Image, worker: &Worker, offset: u64, byte: u8) -> zebu_engine::Result<()> {
    let bytes = IoBuf::copy_of(&[byte; 512]);
    image.write(worker, offset, bytes.into(), Durability::Durable).await.0
}

/// An image of two clusters of data, of which the first is not where a cluster can be.
fn damaged() -> Content {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let top = world.file(TOP, Content::new(), SimFileConfig::default());
    let made = world.block_on(async {
        let create = CreateOptions::default().size(Some(16 * CLUSTER)).cluster_size(CLUSTER);
        Image::create_in(&worker, &top, &create).await?;
        let image =
            Image::open_files(&worker, vec![OpenedFile::new(top.clone(), Format::Qcow2)], &writable())
                .await?;
        write(&image, &worker, 0, 1).await?;
        write(&image, &worker, CLUSTER, 2).await?;
        image.close(&worker).await
    });
    made.unwrap().unwrap();
    let mut content = world.content(TOP).unwrap();
    let word = |content: &Content, at: u64| u64::from_be_bytes(content.bytes(at..at + 8).try_into().unwrap());
    let table = word(&content, word(&content, 40)) & 0x00ff_ffff_ffff_fe00;
    let entry = word(&content, table) | 0x200;
    content.write(table, &entry.to_be_bytes());
    content
}

fn is_marked(content: &Content) -> bool {
    content.bytes(INCOMPATIBLE..INCOMPATIBLE + 8)[7] & CORRUPT != 0
}

/// A write that finds the damage, after one that was flushed; the files then.
fn find_damage(damage: DamageMark) -> SimWorld {
    let world = SimWorld::new(2);
    let worker = world.worker();
    let top = world.file(TOP, damaged(), SimFileConfig::default());
    let ran = world.block_on(async {
        let files = vec![OpenedFile::new(top.clone(), Format::Qcow2)];
        let image = Image::open_files(&worker, files, &writable().damage(damage)).await?;
        write(&image, &worker, CLUSTER, 3).await?;
        let error = write(&image, &worker, 0, 4).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let later = write(&image, &worker, CLUSTER, 5).await;
        match damage {
            DamageMark::Leave => later?,
            _ => assert_eq!(later.unwrap_err().kind(), ErrorKind::Poisoned),
        }
        Ok::<_, zebu_engine::Error>(())
    });
    ran.unwrap().unwrap();
    world
}

#[test]
pub(crate) fn a_damaged_image_is_marked_before_its_writer_is_told() {
    let world = find_damage(DamageMark::Set);
    for seed in 0..4 {
        let options = CrashOptions { max_states: 16, tear: Tear::Sector, seed };
        for state in world.crash_states(&options) {
            let content = &state.files().iter().find(|(name, _)| name == TOP).unwrap().1;
            assert!(is_marked(content), "{state}: the mark is gone");
            let world = SimWorld::new(3);
            let worker = world.worker();
            let top = world.file(TOP, content.clone(), SimFileConfig::default());
            let read = world.block_on(async {
                let files = || vec![OpenedFile::new(top.clone(), Format::Qcow2)];
                let refused = Image::open_files(&worker, files(), &writable()).await.err().unwrap();
                assert_eq!(refused.kind(), ErrorKind::ReadOnly, "{refused}");
                let image = Image::open_files(&worker, files(), &OpenOptions::default()).await?;
                let (result, bufs) = image.read(&worker, CLUSTER, IoBuf::zeroed(512).into()).await;
                result?;
                let mut bytes = [0; 512];
                bufs.copy_to(0, &mut bytes);
                Ok::<_, zebu_engine::Error>(bytes)
            });
            assert_eq!(read.unwrap().unwrap(), [3; 512]);
        }
    }
}

#[test]
fn a_damaged_image_is_left_as_it_is_by_default() {
    assert!(!is_marked(&find_damage(DamageMark::Leave).content(TOP).unwrap()));
}

/// Another who finds the damage too is told of it, though the worker that found it first stands still.
#[test]
pub(crate) fn a_mark_waits_for_no_worker_that_stands_still() {
    let world = SimWorld::new(4);
    let workers = [world.worker(), world.worker()];
    let top = world.file(TOP, damaged(), SimFileConfig::default());
    let options = writable().damage(DamageMark::Set);
    let files = vec![OpenedFile::new(top, Format::Qcow2)];
    let image = world.block_on(Image::open_files(&workers[0], files, &options)).unwrap().unwrap();
    // Both have looked whether the image may be written, and wait for one table.
    let reads = world.hold(OpFilter::of(OpClass::Read).on_file(TOP));
    let found = [0, 1].map(|worker: usize| {
        let (image, on) = (image.clone(), workers[worker].clone());
        begin(&workers[worker], async move { write(&image, &on, 0, 4).await })
    });
    let _ = world.run_until(|| found.iter().any(|found| found.borrow().is_some()));
    let writes = world.hold(OpFilter::of(OpClass::Write).on_file(TOP).touching(0..CLUSTER));
    world.release(reads);
    world.run_until(|| !world.held(writes).is_empty()).expect("the mark is written");
    let marker = world.held(writes)[0].worker;
    let (still, other) = if marker == workers[1].id() { (1, 0) } else { (0, 1) };
    world.pause(workers[still].id());
    world.release(writes);
    world.run_until(|| found[other].borrow().is_some()).expect("the other is told");
    let error = found[other].take().unwrap().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Poisoned), "{error}");
    world.resume(workers[still].id());
    world.run_until(|| found[still].borrow().is_some()).unwrap();
    assert!(is_marked(&world.content(TOP).unwrap()));
}
