//! Power failures while disks in use are forked: by the seals, the file that holds the disk is found, with everything that was
//! flushed; and a sealed image is never written.

use crate::crash::guest::Guest;
use crate::crash::judge::read_all;
use crate::crash::setup::{Setup, TOP};
use futures_util::future::join_all;
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;
use zebu_engine::check::{CheckOptions, check_file};
use zebu_engine::jobs::{ForkDisk, fork, reset};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Access, Durability, ErrorKind, Format, Image, OpenOptions, OpenedFile};
use zebu_qcow2::{Header, Purpose, SealState};
use zebu_sim::{
    Content, CrashOptions, FailedEffect, Fault, FaultPlan, FaultRule, OpClass, OpFilter, SimFileConfig,
    SimRng, SimWorld, Tear,
};

/// The images that a disk goes on in, the first one last.
const OVERLAYS: [&str; 2] = ["/later", "/latest"];

/// The disk of the tests: large enough for a seal in its header.
fn setup() -> Setup {
    Setup { workers: 2, ..Setup::plain() }
}

/// The overlay that the seal in a file names.
fn sealed_by(content: &Content) -> Option<String> {
    let (header, _) = Header::parse(&content.bytes(0..4096.min(content.len())), Purpose::Inspect).unwrap();
    match header.seal() {
        SealState::Open => None,
        SealState::Sealed(seal) => {
            Some(Path::new(std::ffi::OsStr::from_bytes(seal.overlay())).display().to_string())
        }
        SealState::Unreadable => panic!("a seal that can't be read"),
    }
}

/// The files of the disk by its seals, the current one first.
fn chain(content: impl Fn(&str) -> Option<Content>) -> Result<Vec<String>, String> {
    let mut names = vec![TOP.to_owned()];
    loop {
        let last = content(&names[0]).ok_or_else(|| format!("'{}' is not there", names[0]))?;
        if last.is_empty() {
            return Err(format!("'{}' is empty, and the seal names it", names[0]));
        }
        match sealed_by(&last) {
            Some(next) => names.insert(0, next),
            None => return Ok(names),
        }
    }
}

fn open_chain(world: &SimWorld, names: &[String]) -> Vec<OpenedFile> {
    let open = |name: &String| world.open(name, SimFileConfig::default()).unwrap();
    names.iter().map(|name| OpenedFile::new(open(name), Format::Qcow2)).collect()
}

/// Judges the disk that the seals of `files` lead to.
fn judge(guest: &Guest, files: &[(String, Content)]) -> Result<(), String> {
    let content =
        |name: &str| files.iter().find(|(known, _)| known == name).map(|(_, content)| content.clone());
    let names = chain(content)?;
    let world = SimWorld::new(0);
    for name in &names {
        world.file(name, content(name).unwrap(), SimFileConfig::default());
    }
    let worker = world.worker();
    world
        .block_on(async {
            for name in &names {
                let file = world.open(name, SimFileConfig::default()).unwrap();
                let report = check_file(&worker, &file, &CheckOptions::default()).await;
                let counts = report.map_err(|e| format!("check of '{name}': {e}"))?.counts;
                if counts.corruptions + counts.check_errors > 0 {
                    return Err(format!("check of '{name}': {counts:?}"));
                }
            }
            let options = OpenOptions::default().access(Access::ReadWrite);
            let image = Image::open_files(&worker, open_chain(&world, &names), &options).await;
            let image = image.map_err(|e| format!("open '{}': {e}", names[0]))?;
            let bytes = read_all(&worker, &image, image.virtual_size()).await?;
            image.close(&worker).await.map_err(|e| format!("close: {e}"))?;
            guest.model.borrow().check(0, &bytes).map_err(|violation| violation.to_string())
        })
        .map_err(|stuck| stuck.to_string())?
}

fn options() -> OpenOptions {
    OpenOptions::default().access(Access::ReadWrite)
}

async fn fork_to(world: &SimWorld, worker: &Worker, image: &Image, overlay: &str) -> Result<(), String> {
    let file = world.file(overlay, Content::new(), SimFileConfig::default());
    let disk = ForkDisk::new(image, file, overlay, &options());
    fork(worker, vec![disk]).await.map(drop).map_err(|e| format!("fork to {overlay}: {e}"))
}

/// Notes what a file holds when it becomes sealed.
fn note_sealed(world: &SimWorld, sealed: &mut Vec<(String, Content)>) {
    let next = [TOP, OVERLAYS[0]].get(sealed.len());
    if let Some((name, content)) = next.and_then(|name| Some((*name, world.content(name)?)))
        && content.len() >= 4096
        && Header::prefix(&content.bytes(0..4096)).is_ok()
        && sealed_by(&content).is_some()
    {
        sealed.push((name.to_owned(), content));
    }
}

/// Two forks, one after the other, beside guests, judged at every step.
pub(crate) fn live(seed: u64) -> Result<(), String> {
    let setup = setup();
    let mut rng = SimRng::new(seed ^ 0x666f_726b);
    let world = setup.world(&setup.make(seed), seed);
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0])?;
    let guest = Rc::new(Guest::new(image.clone(), setup.model(), &setup));
    let streams = workers.iter().map(|on| on.spawn(guest.clone().stream(on.clone(), rng.fork(), 40)));
    let streams: Vec<_> = streams.collect();
    let mut sealed: Vec<(String, Content)> = Vec::new();
    let own = world.worker();
    let work = async {
        for overlay in OVERLAYS {
            fork_to(&world, &own, &image, overlay).await?;
        }
        join_all(streams).await;
        guest.flush(&own).await;
        Ok::<(), String>(())
    };
    let mut judged_at = rng.fork();
    let done = world.block_on_watched(work, |_| {
        note_sealed(&world, &mut sealed);
        if guest.violation.borrow().is_some() || !judged_at.chance(1, 4) {
            return;
        }
        let options = CrashOptions { max_states: 6, tear: Tear::Sector, seed: judged_at.next_u64() };
        for state in world.crash_states(&options) {
            if let Err(violation) = judge(&guest, state.files()) {
                guest.blame(format!("crash at {:?}, {state}: {violation}", world.now()));
                return;
            }
        }
    });
    done.map_err(|stuck| stuck.to_string())??;
    if let Some(violation) = guest.violation.borrow_mut().take() {
        return Err(violation);
    }
    if sealed.len() != OVERLAYS.len() {
        return Err(format!("{} images were sealed", sealed.len()));
    }
    for (name, then) in &sealed {
        if !world.content(name).unwrap().same_bytes(then) {
            return Err(format!("'{name}' was written after it was sealed"));
        }
    }
    let closed = world.block_on(image.close(&own)).map_err(|stuck| stuck.to_string())?;
    closed.map_err(|e| format!("close: {e}"))?;
    let names = chain(|name| world.content(name))?;
    if names != [OVERLAYS[1], OVERLAYS[0], TOP] {
        return Err(format!("the seals lead to {names:?}"));
    }
    let files: Vec<_> = names.iter().map(|name| (name.clone(), world.content(name).unwrap())).collect();
    judge(&guest, &files)
}

#[test]
fn a_disk_is_found_whole_whenever_its_fork_is_cut_off() {
    for seed in 0..12 {
        live(seed).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
    }
}

/// Forks two disks at one moment, with a seal that fails: both go on as they were.
#[test]
pub(crate) fn a_seal_that_fails_leaves_no_disk_forked() {
    let setup = setup();
    for at in 0..40 {
        let world = SimWorld::new(at);
        let worker = world.worker();
        let (_, content) = setup.make(1).remove(0);
        let names = ["one", "two"];
        let files = names.map(|name| world.file(name, content.clone(), SimFileConfig::default()));
        let failed = world
            .block_on(async {
                let mut images = Vec::new();
                for file in files {
                    let opened = vec![OpenedFile::new(file, Format::Qcow2)];
                    images.push(Image::open_files(&worker, opened, &options()).await.unwrap());
                }
                for image in &images {
                    let bufs = IoBuf::copy_of(&[7; 4096]).into();
                    image.write(&worker, 0, bufs, Durability::Volatile).await.0.unwrap();
                }
                let disks = images.iter().zip(OVERLAYS).map(|(image, overlay)| {
                    let file = world.file(overlay, Content::new(), SimFileConfig::default());
                    ForkDisk::new(image, file, overlay, &options())
                });
                let disks = disks.collect();
                let fault = Fault::Fail { errno: Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
                let writes = OpFilter::of(OpClass::Write).on_file(names[1]);
                world.disk().set_faults(FaultPlan::none().with(FaultRule::new(writes, fault).nth(at)));
                let failed = fork(&worker, disks).await.err();
                world.disk().set_faults(FaultPlan::none());
                if failed.is_some() {
                    for image in &images {
                        let bufs = IoBuf::copy_of(&[8; 4096]).into();
                        image.write(&worker, 8192, bufs, Durability::Volatile).await.0.unwrap();
                        image.flush(&worker).await.unwrap();
                    }
                }
                for image in &images {
                    image.close(&worker).await.unwrap();
                }
                failed
            })
            .unwrap();
        let seals = names.map(|name| sealed_by(&world.content(name).unwrap()));
        let Some(failed) = failed else {
            assert!(seals.iter().all(Option::is_some));
            assert!(at > 0, "no write failed");
            return;
        };
        assert_eq!(seals, [None, None], "{failed}");
    }
    panic!("every fork failed");
}

/// An overlay is emptied: the disk is that of the image below again, whatever a crash leaves.
#[test]
fn a_reset_shows_the_overlay_or_the_image_below() {
    let setup = setup();
    let world = setup.world(&setup.make(3), 3);
    let worker = world.worker();
    let image = setup.open(&world, &worker).unwrap();
    let write = async |at: u64, byte: u8| {
        let bufs = IoBuf::copy_of(&[byte; 8192]).into();
        image.write(&worker, at, bufs, Durability::Durable).await.0.unwrap();
    };
    let whole = async || read_all(&worker, &image, image.virtual_size()).await.unwrap();
    let (before, after) = world
        .block_on(async {
            write(0, 1).await;
            write(100 << 10, 2).await;
            assert_eq!(reset(&worker, &image).await.unwrap_err().kind(), ErrorKind::Unsupported);
            fork_to(&world, &worker, &image, OVERLAYS[0]).await.unwrap();
            let after = whole().await;
            write(4096, 3).await;
            write(200 << 10, 4).await;
            (whole().await, after)
        })
        .unwrap();
    let mut seen = [0, 0];
    let done = world.block_on_watched(reset(&worker, &image), |_| {
        for state in world.crash_states(&CrashOptions { max_states: 6, tear: Tear::Sector, seed: 1 }) {
            let bytes = content_by_seals(state.files());
            assert!(bytes == before || bytes == after, "{state}");
            seen[usize::from(bytes == after)] += 1;
        }
    });
    done.unwrap().unwrap();
    assert!(seen[0] > 0, "no state before the reset was judged");
    let now = world.block_on(async {
        let now = whole().await;
        write(0, 9).await;
        image.close(&worker).await.unwrap();
        now
    });
    assert_eq!(now.unwrap(), after);
}

fn content_by_seals(files: &[(String, Content)]) -> Vec<u8> {
    let content =
        |name: &str| files.iter().find(|(known, _)| known == name).map(|(_, content)| content.clone());
    let names = chain(content).unwrap();
    let world = SimWorld::new(0);
    for name in &names {
        world.file(name, content(name).unwrap(), SimFileConfig::default());
    }
    let worker = world.worker();
    world
        .block_on(async {
            let image = Image::open_files(&worker, open_chain(&world, &names), &OpenOptions::default())
                .await
                .unwrap();
            read_all(&worker, &image, image.virtual_size()).await.unwrap()
        })
        .unwrap()
}

/// A sealed image can't be opened for writing.
#[test]
pub(crate) fn a_sealed_image_is_not_opened_for_writing() {
    let setup = setup();
    let world = setup.world(&setup.make(5), 5);
    let worker = world.worker();
    let image = setup.open(&world, &worker).unwrap();
    world
        .block_on(async {
            fork_to(&world, &worker, &image, OVERLAYS[0]).await.unwrap();
            image.close(&worker).await.unwrap();
            let again = Image::open_files(&worker, setup.chain(&world), &options()).await;
            let error = again.expect_err("it is sealed");
            assert_eq!(error.kind(), ErrorKind::ReadOnly);
            assert!(error.message().contains(OVERLAYS[0]), "{error}");
            let read =
                Image::open_files(&worker, setup.chain(&world), &OpenOptions::default()).await.unwrap();
            assert_eq!(read.sealed_by().as_deref(), Some(Path::new(OVERLAYS[0])));
        })
        .unwrap();
}

/// Closes an image that is being forked: the overlay is closed, in which the disk goes on.
#[test]
fn a_close_beside_a_fork_closes_the_overlay() {
    let setup = setup();
    let world = setup.world(&setup.make(9), 9);
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0]).unwrap();
    let hold = world.hold(OpFilter::of(OpClass::Write).on_file(TOP).by_worker(workers[1].id()));
    let write = workers[1].spawn({
        let (image, on) = (image.clone(), workers[1].clone());
        async move { image.write(&on, 0, IoBuf::copy_of(&[5; 4096]).into(), Durability::Volatile).await.0 }
    });
    world.run_until_idle().unwrap();
    assert!(!world.held(hold).is_empty(), "nothing was held: the test shows nothing");
    let file = world.file(OVERLAYS[0], Content::new(), SimFileConfig::default());
    let disk = ForkDisk::new(&image, file, OVERLAYS[0], &options());
    let on = workers[0].clone();
    let forked = workers[0].spawn(async move { fork(&on, vec![disk]).await });
    world.run_until_idle().unwrap();
    let closed = workers[0].spawn({
        let (image, on) = (image.clone(), workers[0].clone());
        async move { image.close(&on).await }
    });
    world.run_until_idle().unwrap();
    world.release(hold);
    world
        .block_on(async {
            write.await.unwrap();
            forked.await.unwrap();
            closed.await.unwrap();
        })
        .unwrap();
    assert!(image.current().is_closed(), "the disk goes on, and nobody has closed it");
    assert_eq!(sealed_by(&world.content(TOP).unwrap()).as_deref(), Some(OVERLAYS[0]));
}

/// A fork, or the close, of an image whose flush stands in the disk and then fails: both fail, whoever comes first.
fn beside_a_flush_that_fails(end: impl AsyncFn(&SimWorld, &Worker, &Image) -> Result<(), String>) {
    let setup = setup();
    let world = setup.world(&setup.make(7), 7);
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0]).unwrap();
    let write = async |byte: u8, durability| {
        let bufs = IoBuf::copy_of(&[byte; 4096]).into();
        image.write(&workers[0], 0, bufs, durability).await.0.unwrap();
    };
    world
        .block_on(async {
            write(1, Durability::Durable).await;
            write(2, Durability::Volatile).await;
        })
        .unwrap();
    let flushes = OpFilter::of(OpClass::Flush).on_file(TOP).by_worker(workers[1].id());
    let fault = Fault::Fail { errno: Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
    world.disk().set_faults(FaultPlan::none().with(FaultRule::new(flushes.clone(), fault).nth(0)));
    let hold = world.hold(flushes);
    let flush = workers[1].spawn({
        let (image, on) = (image.clone(), workers[1].clone());
        async move { image.flush(&on).await }
    });
    world.run_until_idle().unwrap();
    assert!(!world.held(hold).is_empty(), "nothing was held: the test shows nothing");
    let mut steps = 0;
    let ended = world.block_on_watched(end(&world, &workers[0], &image), |_| {
        steps += 1;
        if steps == 2 {
            world.release(hold);
        }
    });
    assert!(steps > 2, "it did not wait for the flush: {ended:?}");
    ended.unwrap().expect_err("the sync failed");
    let error = world.block_on(flush).unwrap().expect_err("the sync failed");
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
}

#[test]
fn a_flush_that_fails_beside_a_fork_has_failed() {
    beside_a_flush_that_fails(async |world, worker, image| fork_to(world, worker, image, OVERLAYS[0]).await);
}

#[test]
fn a_flush_that_fails_beside_a_close_has_failed() {
    beside_a_flush_that_fails(async |_, worker, image| image.close(worker).await.map_err(|e| e.to_string()));
}
