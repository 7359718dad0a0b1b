//! Bits of two bitmaps of an image that is only read, by two workers, one of which stands still.

use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::begin;
use zebu::storage::IoBuf;
use zebu::{Access, Durability, ErrorKind, Image, NewBitmap, OpenOptions};
use zebu_sim::{OpClass, OpFilter};

const CLUSTER: u64 = 4096;

#[test]
fn bits_wait_for_half_a_minute_for_a_worker_that_stands_still() {
    let setup = Setup { origin: Origin::Own, size: 64 * CLUSTER, pattern: 48 * CLUSTER, ..Setup::plain() };
    let world = setup.world(&setup.make(1), 1);
    let workers = [world.worker(), world.worker()];
    let image = setup.open(&world, &workers[0]).unwrap();
    let made = async {
        for name in ["one", "two"] {
            let mut new = NewBitmap::named(name);
            new.granularity = Some(512);
            image.add_bitmap(&workers[0], &new).await?;
        }
        image.write(&workers[0], 0, IoBuf::copy_of(&[1; 4096]).into(), Durability::Durable).await.0?;
        image.close(&workers[0]).await
    };
    world.block_on(made).unwrap().unwrap();
    let options = OpenOptions::default().access(Access::ReadOnly);
    let image =
        world.block_on(Image::open_files(&workers[0], setup.chain(&world), &options)).unwrap().unwrap();
    let hold = world.hold(OpFilter::of(OpClass::Read).on_file(TOP));
    let (theirs, on) = (image.clone(), workers[0].clone());
    let first = begin(&workers[0], async move { theirs.bitmap_bits(&on, "one").await.map(drop) });
    world.run_until(|| !world.held(hold).is_empty()).unwrap();
    world.pause(workers[0].id());
    world.release(hold);
    let on = workers[1].clone();
    let second = begin(&workers[1], async move { image.bitmap_bits(&on, "two").await.map(drop) });
    world.run_until(|| second.borrow().is_some()).unwrap();
    let error = second.take().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    world.resume(workers[0].id());
    world.run_until(|| first.borrow().is_some()).unwrap();
    assert!(first.take().unwrap().is_ok());
}
