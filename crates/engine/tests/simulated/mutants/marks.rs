//! The first requests of an opening whose image has a dirty bitmap, with power failures among them: a bitmap that is not
//! marked in use, or is recovered, knows of every sector that has changed, whatever of the marks, the record and the data a
//! crash leaves. Every other image has no room for a record.

use crate::crash::bitmaps::{Known, judge_bitmaps, operation, tidy};
use crate::crash::guest::Guest;
use crate::crash::judge::{Leaks, judge};
use crate::crash::setup::{Files, NAMES, Origin, Setup};
use futures_util::future::join_all;
use std::rc::Rc;
use zebu_engine::storage::Worker;
use zebu_sim::{CrashOptions, SimRng, SimWorld, Tear};
use zebu_storage::sabotage::{Limit, limit};

/// Runs with one seed. `Err`: what must not be.
pub(crate) fn live(seed: u64) -> Result<(), String> {
    let mut rng = SimRng::new(seed ^ 0x6d61_726b_7300_0000);
    limit(Limit::RecordBytes, if seed.is_multiple_of(2) { 0 } else { u64::MAX });
    let setup = loop {
        let setup = Setup::random(&mut rng);
        // What is there already is written in place, and may be durable before any commit with its barriers.
        if setup.version == 3 && setup.origin == Origin::Own {
            break setup;
        }
    };
    let lived = requests(&setup, seed, &mut rng);
    limit(Limit::RecordBytes, u64::MAX);
    lived.map_err(|e| format!("{e}\n{setup:?}"))
}

fn requests(setup: &Setup, seed: u64, rng: &mut SimRng) -> Result<(), String> {
    let (files, known) = with_bitmap(setup, seed, rng)?;
    let (world, workers, guest) = opened(setup, &files, rng.next_u64())?;
    let streams: Vec<_> = (0..2)
        .map(|i| {
            let worker = workers[i % workers.len()].clone();
            worker.spawn(guest.clone().stream(worker.clone(), rng.fork(), 5))
        })
        .collect();
    let tear = if setup.direct == 4096 { Tear::Block } else { Tear::Sector };
    let ended = world.block_on_watched(join_all(streams), |_| {
        if guest.violation.borrow().is_some() || !rng.chance(1, 6) {
            return;
        }
        for state in world.crash_states(&CrashOptions { max_states: 8, tear, seed: rng.next_u64() }) {
            let left = state.files().to_vec();
            let judged = judge(setup, &left, &guest.model.borrow(), Leaks::Allowed)
                .and_then(|disk| judge_bitmaps(setup, &left, &known, &disk));
            if let Err(violation) = judged {
                guest.blame(format!("crash at {:?}, {state}: {violation}", world.now()));
                return;
            }
        }
    });
    ended.map_err(|stuck| stuck.to_string())?;
    guest.violation.borrow_mut().take().map_or(Ok(()), Err)
}

/// An image with an empty bitmap that records, closed, and what the bitmap has to know.
fn with_bitmap(setup: &Setup, seed: u64, rng: &mut SimRng) -> Result<(Files, Known), String> {
    let (world, workers, guest) = opened(setup, &setup.make(seed), seed)?;
    world
        .block_on(async {
            operation(&workers[0], &guest, rng.fork()).await?;
            tidy(&workers[0], &guest).await?;
            guest.image.close(&workers[0]).await.map_err(|e| format!("close: {e}"))
        })
        .map_err(|stuck| stuck.to_string())??;
    let files = NAMES.iter().filter_map(|name| Some(((*name).to_owned(), world.content(name)?))).collect();
    Ok((files, guest.bitmaps.take()))
}

fn opened(setup: &Setup, files: &Files, seed: u64) -> Result<(SimWorld, Vec<Worker>, Rc<Guest>), String> {
    let world = setup.world(files, seed);
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0])?;
    let guest = Rc::new(Guest::new(image, setup.model(), setup));
    Ok((world, workers, guest))
}
