//! A file that can't punch, zero or reserve: tried once, remembered, done in another way.

use crate::crash::guest::Failures;
use crate::crash::setup::{DATA, Origin, Setup, TOP};
use crate::faults::bench::Bench;
use std::rc::Rc;
use zebu_engine::{
    Durability, Format, Image, NewBitmap, OpenedFile, Preallocation, Shrink, ZeroMode, ZeroPolicy,
};
use zebu_sim::{
    Facility, FailedEffect, Fault, FaultRule, GuestRequest, LogEvent, OpClass, OpFilter, Seeds, SimConfig,
    SimFileConfig, SimRng, SimWorld,
};

/// How often operations of a class were tried while a guest wrote, zeroed, discarded and flushed.
fn tried(config: &SimFileConfig, class: OpClass) -> usize {
    let setup = Setup { origin: Origin::Own, pattern: 128 << 10, workers: 1, ..Setup::plain() };
    let files = setup.make(1);
    let world = SimWorld::with_config(&SimConfig::seeded(1));
    let file = world.file(TOP, files[0].1.clone(), config.clone());
    let worker = world.worker();
    let chain = vec![OpenedFile::new(file, Format::Qcow2)];
    let mut options = setup.options();
    options.zero_policy = ZeroPolicy::Fallocate;
    let image = world.block_on(Image::open_files(&worker, chain, &options)).unwrap().unwrap();
    let guest = Rc::new(crate::crash::guest::Guest::new(image, setup.model(), &setup));
    for round in 0..4 {
        let at = round * 32768;
        world
            .block_on(async {
                let discard = |offset, len| {
                    guest.model.borrow_mut().apply(zebu_sim::GuestRequest::Discard { offset, len });
                    guest.image.discard(&worker, offset, len)
                };
                discard(at, 16384).await.unwrap();
                guest.flush(&worker).await;
                for cluster in 0..8 {
                    let offset = at + cluster * 4096 + 1024;
                    guest.write(&worker, offset, 512, Durability::Volatile).await;
                }
                guest.model.borrow_mut().apply(zebu_sim::GuestRequest::Zero { offset: at, len: 4096 });
                guest.image.write_zeroes(&worker, at, 4096, ZeroMode::Keep).await.unwrap();
                guest.write(&worker, at + 512, 512, Durability::Volatile).await;
                guest.flush(&worker).await;
                guest.read(&worker, 0, setup.size).await;
            })
            .unwrap();
    }
    assert_eq!(guest.violation.borrow().as_deref(), None);
    world.block_on(guest.image.close(&worker)).unwrap().unwrap();
    let log = world.log();
    log.events()
        .iter()
        .filter(|event| matches!(event, LogEvent::Submitted { what, .. } if what.class() == class))
        .count()
}

#[test]
fn what_a_file_refuses_is_asked_for_once() {
    let works = SimFileConfig::default();
    let refused = Facility::Refused;
    assert!(tried(&works, OpClass::Punch) > 1);
    assert_eq!(tried(&SimFileConfig { punch: refused, ..works.clone() }, OpClass::Punch), 1);
    assert!(tried(&works, OpClass::ZeroRange) > 1);
    assert_eq!(tried(&SimFileConfig { zero_range: refused, ..works.clone() }, OpClass::ZeroRange), 1);
    assert!(tried(&SimFileConfig { allocate: refused, ..works }, OpClass::Allocate) <= 1);
}

#[test]
fn nothing_is_missed_where_everything_is_refused() {
    Seeds::new(30).run(|seed| {
        let mut rng = SimRng::new(seed ^ 0x7265_6675_7365);
        let setup = Setup::random(&mut rng);
        let bench = Bench::new(&setup, seed);
        let config = SimFileConfig {
            punch: *rng.pick(&[Facility::Supported, Facility::Refused]),
            zero_range: *rng.pick(&[Facility::Supported, Facility::Refused]),
            allocate: *rng.pick(&[Facility::Supported, Facility::Refused]),
            ..setup.config(TOP)
        };
        bench.world.open(TOP, config).unwrap();
        let said = |e: String| panic!("seed {seed}: {e}\n{setup:?}");
        bench.streams(&mut rng, 4, 14, Failures::Forbidden).unwrap_or_else(said);
        bench.read_whole().unwrap_or_else(said);
        bench.close().unwrap_or_else(said);
    });
}

#[test]
fn a_data_file_that_can_not_be_cut_leaves_a_disk_of_the_new_size() {
    let setup = Setup { external_data: true, origin: Origin::Own, pattern: 64 << 10, ..Setup::plain() };
    let bench = Bench::new(&setup, 3);
    let (image, worker) = (bench.guest.image.clone(), bench.workers[0].clone());
    let fault = Fault::Fail { errno: rustix::io::Errno::PERM.raw_os_error(), effect: FailedEffect::Nothing };
    bench.world.inject(FaultRule::new(OpFilter::of(OpClass::SetLen).on_file(DATA), fault));
    let len = image.virtual_size() / 2;
    bench.guest.model.borrow_mut().apply(GuestRequest::Resize { len });
    let (error, bits) = bench
        .world
        .block_on(async {
            image.add_bitmap(&worker, &NewBitmap::named("b")).await.unwrap();
            let resized = image.resize(&worker, len, Shrink::Allow, Preallocation::Off).await;
            (resized.unwrap_err(), image.bitmap_bits(&worker, "b").await.unwrap())
        })
        .unwrap();
    assert_eq!((image.virtual_size(), bits.disk_size()), (len, len));
    assert!(error.to_string().contains(&format!("the disk has {len} bytes now")), "{error}");
    bench.read_whole().unwrap();
    bench.close().unwrap();
}
