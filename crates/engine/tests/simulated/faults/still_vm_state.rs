//! VM state of an image that is only read, by two workers, one of which stands still.

use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::begin;
use zebu::storage::IoBuf;
use zebu::{Access, ErrorKind, Image, OpenOptions};
use zebu_sim::{OpClass, OpFilter};

const CLUSTER: u64 = 4096;

#[test]
fn a_read_waits_for_half_a_minute_for_a_worker_that_stands_still() {
    let setup = Setup { origin: Origin::Own, size: 64 * CLUSTER, pattern: 48 * CLUSTER, ..Setup::plain() };
    let world = setup.world(&setup.make(1), 1);
    let workers = [world.worker(), world.worker()];
    let image = setup.open(&world, &workers[0]).unwrap();
    let made = async {
        image.write_vm_state(&workers[0], 0, IoBuf::copy_of(&[1; 4096]).into()).await?;
        image.close(&workers[0]).await
    };
    world.block_on(made).unwrap().unwrap();
    let options = OpenOptions::default().access(Access::ReadOnly);
    let image =
        world.block_on(Image::open_files(&workers[0], setup.chain(&world), &options)).unwrap().unwrap();
    let hold = world.hold(OpFilter::of(OpClass::Read).on_file(TOP));
    let read = |worker: usize| {
        let (image, on) = (image.clone(), workers[worker].clone());
        begin(&workers[worker], async move {
            image.read_vm_state(&on, 0, IoBuf::zeroed(4096).into()).await.map(drop)
        })
    };
    let first = read(0);
    world.run_until(|| !world.held(hold).is_empty()).unwrap();
    world.pause(workers[0].id());
    world.release(hold);
    let second = read(1);
    world.run_until(|| second.borrow().is_some()).unwrap();
    let error = second.take().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    world.resume(workers[0].id());
    world.run_until(|| first.borrow().is_some()).unwrap();
    assert!(first.take().unwrap().is_ok());
}
