//! Resizes beside other requests: each is alone, whatever the order, and what a shrink cut off comes back as zeroes.

use crate::crash::guest::{Failures, Guest, how_to_grow};
use crate::crash::judge::{Leaks, judge, read_all};
use crate::crash::setup::{Files, Setup};
use futures_util::future::join_all;
use std::rc::Rc;
use zebu_engine::Shrink;
use zebu_sim::{GuestRequest, GuestResult, Seeds, SimRng, Tally};

/// Writes that may find the disk shorter than it was when they were sent, while resizes go on.
#[test]
fn a_resize_is_alone() {
    let seeds = Seeds::new(60);
    seeds.run(|seed| {
        if let Err(violation) = resizes_beside_writes(seed, seeds.tally()) {
            panic!("seed {seed}: {violation}");
        }
    });
}

/// A read came before the shrink and is longer than what it leaves: what was zeroed does not show the backing image.
#[test]
fn a_read_beside_a_shrink_does_not_see_the_backing_image() {
    resizes_beside_writes(1_795_298_677_040_001_533, &Tally::default()).unwrap();
}

/// Growth with preallocation from within a cluster through which the backing image shows.
#[test]
fn a_cluster_that_the_disk_ended_in_may_show_the_backing_image() {
    resizes_beside_writes(1_795_330_827_010_000_441, &Tally::default()).unwrap();
}

pub(crate) fn resizes_beside_writes(seed: u64, tally: &Tally) -> Result<(), String> {
    let mut rng = SimRng::new(seed ^ 0x7265_7369_7a65);
    let setup = loop {
        let setup = Setup::random(&mut rng);
        if setup.can_shrink() && (setup.version == 3 || setup.origin != crate::crash::setup::Origin::Snapshot)
        {
            break setup;
        }
    };
    let files = setup.make(seed);
    let world = setup.world(&files, rng.next_u64());
    world.count_in(tally);
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0]).unwrap();
    let mut model = setup.model();
    model.count_in(tally);
    let guest = Rc::new(Guest::new(image, model, &setup));
    // Writes past a new end are refused; that is no failure of the disk.
    guest.failures.set(Failures::PastTheEnd);
    for round in 0..4 {
        let sectors = guest.model.borrow().len() / 512;
        let len = rng.between(1, sectors * 3 / 2) * 512;
        let streams = (0..3).map(|i| {
            let worker = &workers[i % workers.len()];
            worker.spawn(guest.clone().stream(worker.clone(), rng.fork(), 8))
        });
        let mut all: Vec<_> = streams.collect();
        let (me, on) = (guest.clone(), workers[round % workers.len()].clone());
        all.push(workers[0].spawn(async move {
            let op = me.model.borrow_mut().begin(GuestRequest::Resize { len });
            let mode = how_to_grow(me.image.virtual_size(), len);
            let result = me.image.resize(&on, len, Shrink::Allow, mode).await;
            if let Err(error) = &result {
                me.blame(format!("resize: {error}"));
            }
            me.model.borrow_mut().end(op, GuestResult::Durable);
        }));
        world.block_on(join_all(all)).map_err(|stuck| stuck.to_string())?;
        if let Some(violation) = guest.violation.borrow_mut().take() {
            return Err(format!("{violation}\n{setup:?}"));
        }
        // Grown to the longest it ever was: nothing of what was cut off shows.
        let op = guest.model.borrow_mut().begin(GuestRequest::Read);
        let disk =
            world.block_on(read_all(&workers[0], &guest.image, guest.image.virtual_size())).unwrap()?;
        guest.model.borrow().check_read(op, 0, &disk).map_err(|v| format!("{v}\n{setup:?}"))?;
        guest.model.borrow_mut().end(op, GuestResult::Done);
    }
    world.block_on(guest.image.close(&workers[0])).unwrap().map_err(|e| e.to_string())?;
    guest.model.borrow_mut().apply(GuestRequest::Flush);
    let left: Files = crate::crash::setup::NAMES
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), world.content(name)?)))
        .collect();
    judge(&setup, &left, &guest.model.borrow(), Leaks::Allowed)
        .map(drop)
        .map_err(|e| format!("after close: {e}\n{setup:?}"))
}
