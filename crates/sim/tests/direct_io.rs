//! Unaligned writes under O_DIRECT from several workers: no part of a block may be lost, and none half written.

use std::cell::RefCell;
use std::rc::Rc;
use zebu_sim::{
    Content, DiscardLeaves, FaultPlan, FaultRates, GuestConfig, GuestModel, GuestRequest, GuestResult, Seeds,
    SimFileConfig, SimRng, SimWorld,
};
use zebu_storage::{File, IoBuf, Worker};

const FILE: &str = "direct";
const LEN: u64 = 16 * 4096;

/// Random reads and writes in units of 512 bytes on a file that wants 4096, each told to the model.
async fn client(worker: Worker, file: File, model: Rc<RefCell<GuestModel>>, mut rng: SimRng) {
    for _ in 0..40 {
        let len = (1 + rng.below(20)) * 512;
        let offset = rng.below((LEN - len) / 512 + 1) * 512;
        if rng.chance(1, 3) {
            let op = model.borrow_mut().begin(GuestRequest::Read);
            let (result, bufs) = worker.read(&file, offset, IoBuf::zeroed(len as usize).into()).await;
            if result.is_ok() {
                let mut bytes = vec![0; len as usize];
                bufs.copy_to(0, &mut bytes);
                model.borrow().check_read(op, offset, &bytes).unwrap();
            }
            model.borrow_mut().end(op, GuestResult::Done);
            continue;
        }
        let op = model.borrow_mut().begin(GuestRequest::Write { offset, len });
        let mut bytes = vec![0; len as usize];
        op.value().fill(offset, &mut bytes);
        let (result, _) = worker.write(&file, offset, IoBuf::copy_of(&bytes).into()).await;
        model.borrow_mut().end(op, if result.is_ok() { GuestResult::Done } else { GuestResult::Failed });
    }
}

fn run(seed: u64, rates: FaultRates) {
    let world = SimWorld::new(seed);
    world.set_faults(FaultPlan::random(rates));
    let file = world.file(FILE, Content::hole(LEN), SimFileConfig::direct(4096));
    let config = GuestConfig { len: LEN, backing_len: 0, discard: DiscardLeaves::Zero };
    let model = Rc::new(RefCell::new(GuestModel::new(config)));
    let mut rng = SimRng::new(seed);
    let workers = [world.worker(), world.worker(), world.worker()];
    let clients: Vec<_> = (0..6)
        .map(|n| {
            let worker = &workers[n % 3];
            worker.spawn(client(worker.clone(), file.clone(), Rc::clone(&model), rng.fork()))
        })
        .collect();
    let all = async {
        for client in clients {
            client.await;
        }
    };
    world.block_on(all).unwrap_or_else(|stuck| panic!("{stuck}"));
    let last = model.borrow_mut().begin(GuestRequest::Read);
    model.borrow().check_read(last, 0, &world.content(FILE).unwrap().bytes(0..LEN)).unwrap();
}

#[test]
fn unaligned_writes_of_one_block_do_not_lose_each_other() {
    Seeds::new(40).run(|seed| run(seed, FaultRates { splits: 200, delays: 50, ..FaultRates::default() }));
}

#[test]
fn a_failed_read_or_write_harms_nobody_else() {
    let rates = FaultRates { read_errors: 50, write_errors: 50, delays: 50, ..FaultRates::default() };
    Seeds::new(40).run(|seed| run(seed, rates));
}
