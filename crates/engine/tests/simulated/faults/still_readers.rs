//! An image that is only read, by two workers, one of which stands still.

use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::begin;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Access, Durability, ErrorKind, Image, NewBitmap, OpenOptions, Result};
use zebu_sim::{OpClass, OpFilter};

const CLUSTER: u64 = 4096;

/// Both workers do the same to an image that `make` has prepared. The first stands still in the midst of it; the other one says
/// so.
fn the_other_is_told(
    make: impl AsyncFnOnce(&Worker, &Image) -> Result<()>,
    read: impl AsyncFn(Worker, Image, usize) -> Result<()> + Clone + 'static,
) {
    let setup = Setup { origin: Origin::Own, size: 64 * CLUSTER, pattern: 48 * CLUSTER, ..Setup::plain() };
    let world = setup.world(&setup.make(1), 1);
    let workers = [world.worker(), world.worker()];
    let image = setup.open(&world, &workers[0]).unwrap();
    let made = async {
        make(&workers[0], &image).await?;
        image.close(&workers[0]).await
    };
    world.block_on(made).unwrap().unwrap();
    let options = OpenOptions::default().access(Access::ReadOnly);
    let image =
        world.block_on(Image::open_files(&workers[0], setup.chain(&world), &options)).unwrap().unwrap();
    let hold = world.hold(OpFilter::of(OpClass::Read).on_file(TOP));
    let start = |number: usize| {
        let (image, on, read) = (image.clone(), workers[number].clone(), read.clone());
        begin(&workers[number], async move { read(on, image, number).await })
    };
    let first = start(0);
    world.run_until(|| !world.held(hold).is_empty()).unwrap();
    world.pause(workers[0].id());
    world.release(hold);
    let second = start(1);
    world.run_until(|| second.borrow().is_some()).unwrap();
    let error = second.take().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    world.resume(workers[0].id());
    world.run_until(|| first.borrow().is_some()).unwrap();
    assert!(first.take().unwrap().is_ok());
}

#[test]
fn bits_of_two_bitmaps() {
    let make = async |worker: &Worker, image: &Image| {
        for name in ["one", "two"] {
            let mut new = NewBitmap::named(name);
            new.granularity = Some(512);
            image.add_bitmap(worker, &new).await?;
        }
        image.write(worker, 0, IoBuf::copy_of(&[1; 4096]).into(), Durability::Durable).await.0
    };
    the_other_is_told(make, async |on, image, number| {
        image.bitmap_bits(&on, ["one", "two"][number]).await.map(drop)
    });
}

#[test]
fn vm_state() {
    let make = async |worker: &Worker, image: &Image| {
        image.write_vm_state(worker, 0, IoBuf::copy_of(&[1; 4096]).into()).await
    };
    the_other_is_told(make, async |on, image, _| {
        image.read_vm_state(&on, 0, IoBuf::zeroed(4096).into()).await.map(drop)
    });
}
