//! A server is killed, its requests are with the disk still, and another opens the image: in whatever order they land, they land
//! before it. The locks see to that (`docs/design/locks.md`).

use crate::crash::guest::Guest;
use crate::crash::judge::{Leaks, judge, read_all};
use crate::crash::setup::{Files, NAMES, Setup};
use std::rc::Rc;
use std::time::Duration;
use zebu_sim::{GuestModel, GuestRequest, Seeds, SimRng, SimWorld};

/// Servers after each other; all but the last are killed.
const LIVES: usize = 3;
/// The disk answers the requests of a killed server within this time: some hundred steps of the next one.
const LATE: Duration = Duration::from_millis(4);

#[test]
fn requests_of_a_killed_server_land_before_the_next_one_opens() {
    let mut left = 0;
    Seeds::new(60).run(|seed| match killed_servers(seed) {
        Ok(requests) => left += requests,
        Err(violation) => panic!("seed {seed}: {violation}"),
    });
    assert!(left > 10, "hardly any request was left: {left}");
}

/// Lets several servers have an image, one after the other. How many requests were left by those that were killed.
pub(crate) fn killed_servers(seed: u64) -> Result<usize, String> {
    let mut rng = SimRng::new(seed ^ 0x6b69_6c6c_6564);
    let setup = Setup { bitmaps: false, ..Setup::random(&mut rng) };
    let files = setup.make(seed);
    let world = setup.world(&files, rng.next_u64());
    // Nothing is dropped before the power is off.
    let mut guests = Vec::new();
    let lived = live(&setup, &world, &mut rng, &mut guests);
    world.power_off();
    lived.map_err(|violation| format!("{violation}\n{setup:?}"))
}

fn live(
    setup: &Setup,
    world: &SimWorld,
    rng: &mut SimRng,
    guests: &mut Vec<Rc<Guest>>,
) -> Result<usize, String> {
    let mut model = setup.model();
    let mut left = 0;
    for life in 0..LIVES {
        world.wait_for_locks().map_err(|stuck| stuck.to_string())?;
        let workers = setup.make_workers(world);
        let image = setup.open(world, &workers[0])?;
        if life > 0 {
            settle(world, &workers[0], &image, &mut model)?;
        }
        let guest = Rc::new(Guest::new(image, model.clone(), setup));
        guests.push(Rc::clone(&guest));
        for i in 0..4 {
            let worker = workers[i % workers.len()].clone();
            drop(worker.spawn(guest.clone().stream(worker.clone(), rng.fork(), 40)));
        }
        let is_last = life + 1 == LIVES;
        let mut steps = if is_last { u64::MAX } else { rng.between(20, 400) };
        let is_over = || {
            steps = steps.saturating_sub(1);
            steps == 0 && !world.pending().is_empty() || guest.violation.borrow().is_some()
        };
        // It is over as well when all requests have ended.
        let _ = world.run_until(is_over);
        if let Some(violation) = guest.violation.borrow_mut().take() {
            return Err(format!("life {life}: {violation}"));
        }
        if is_last {
            let closed = world.block_on(guest.image.close(&workers[0])).map_err(|stuck| stuck.to_string())?;
            closed.map_err(|error| format!("close: {error}"))?;
            guest.model.borrow_mut().apply(GuestRequest::Flush);
        } else {
            left += world.pending().len();
            world.kill(LATE);
        }
        model = guest.model.borrow().clone();
    }
    let files: Files =
        NAMES.iter().filter_map(|name| Some(((*name).to_owned(), world.content(name)?))).collect();
    judge(setup, &files, &model, Leaks::Allowed).map_err(|violation| format!("in the end: {violation}"))?;
    Ok(left)
}

/// Has the model take what the next server finds: what was flushed, and old or new of the rest.
fn settle(
    world: &SimWorld,
    worker: &zebu_engine::storage::Worker,
    image: &zebu_engine::Image,
    model: &mut GuestModel,
) -> Result<(), String> {
    let len = image.virtual_size();
    let disk = world.block_on(read_all(worker, image, len)).map_err(|stuck| stuck.to_string())??;
    model.crash();
    model.adopt_len(len).map_err(|lengths| format!("length {len} of {lengths:?}"))?;
    model.adopt(0, &disk).map_err(|violation| format!("found: {violation}"))
}
