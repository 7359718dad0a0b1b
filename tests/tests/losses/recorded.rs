//! Random requests on real images made by QEMU, through the kernel, on a file that records every write and sync: what
//! the file holds when the process is killed or the power fails at some moment is made from the record, checked by
//! `qemu-img check`, read by QEMU, and compared with a model of what may be there.
//!
//! `ZEBU_SEEDS=100..200` and the like run others; `ZEBU_SEED=7` one again.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use zebu_engine::storage::{Engine, IoBuf, Worker};
use zebu_engine::{Access, CacheMode, Durability, Format, Image, OpenOptions, ZeroMode};
use zebu_sim::{DiscardLeaves, GuestConfig, GuestModel, GuestRequest, GuestResult, Seeds, SimRng};
use zebu_tests::driver::worker;
use zebu_tests::qemu::Qemu;
use zebu_tests::recorder::{Recorder, can_record};
use zebu_tests::scratch::Scratch;

const IMAGE: &str = "disk.qcow2";
const STATE: &str = "state.qcow2";
const SIZE: u64 = 3 << 20;
const TASKS: u64 = 4;
const REQUESTS: u64 = 10;
const ROUNDS: usize = 3;

/// A moment of the run: how much was recorded, and what may be on disk.
struct Moment {
    position: usize,
    model: GuestModel,
}

struct Guest {
    image: Image,
    model: RefCell<GuestModel>,
    moments: RefCell<Vec<Moment>>,
}

impl Guest {
    fn end(&self, op: zebu_sim::GuestOp, result: zebu_engine::Result<()>, success: GuestResult) {
        result.unwrap();
        self.model.borrow_mut().end(op, success);
    }

    async fn request(&self, worker: &Worker, rng: &mut SimRng) {
        let offset = rng.below(SIZE / 512) * 512;
        let longest = *rng.pick(&[1, 8, 128, 300]);
        let len = (rng.between(1, longest) * 512).min(SIZE - offset);
        let begin = |request| self.model.borrow_mut().begin(request);
        match rng.below(10) {
            0..5 => {
                let op = begin(GuestRequest::Write { offset, len });
                let mut bytes = vec![0; len as usize];
                op.value().fill(offset, &mut bytes);
                let durable = rng.chance(1, 6);
                let durability = if durable { Durability::Durable } else { Durability::Volatile };
                let bufs = IoBuf::copy_of(&bytes).into();
                let (result, _) = self.image.write(worker, offset, bufs, durability).await;
                self.end(op, result, if durable { GuestResult::Durable } else { GuestResult::Done });
            }
            5 => {
                let op = begin(GuestRequest::Zero { offset, len });
                let mode = *rng.pick(&[ZeroMode::Keep, ZeroMode::Unmap]);
                let result = self.image.write_zeroes(worker, offset, len, mode).await;
                self.end(op, result, GuestResult::Done);
            }
            6 => {
                let op = begin(GuestRequest::Discard { offset, len });
                let result = self.image.discard(worker, offset, len).await;
                self.end(op, result, GuestResult::Done);
            }
            7 | 8 => {
                let op = begin(GuestRequest::Flush);
                let result = self.image.flush(worker).await;
                self.end(op, result, GuestResult::Done);
            }
            _ => {
                let op = begin(GuestRequest::Read);
                let (result, bufs) =
                    self.image.read(worker, offset, IoBuf::zeroed(len as usize).into()).await;
                let mut bytes = vec![0; len as usize];
                bufs.copy_to(0, &mut bytes);
                if result.is_ok() {
                    self.model.borrow().check_read(op, offset, &bytes).unwrap();
                }
                self.end(op, result, GuestResult::Done);
            }
        }
    }
}

/// Requests on the image, and moments between them.
fn drive(
    path: &Path,
    recorder: &Recorder,
    options: &OpenOptions,
    engine: Engine,
    rng: &mut SimRng,
) -> Vec<Moment> {
    let worker = worker(engine);
    worker.block_on(async {
        let image = Image::open(&worker, path, options).await.unwrap();
        let config = GuestConfig { len: SIZE, backing_len: 0, discard: DiscardLeaves::ZeroOrOld };
        let model = RefCell::new(GuestModel::new(config));
        let guest = Rc::new(Guest { image, model, moments: RefCell::default() });
        let moment = |guest: &Guest| Moment {
            // Read first: what is recorded meanwhile belongs to requests that the model knows as under way.
            position: recorder.position(),
            model: guest.model.borrow().clone(),
        };
        for _ in 0..ROUNDS {
            let tasks: Vec<_> = (0..TASKS)
                .map(|_| {
                    let (guest, on, mut rng) = (guest.clone(), worker.clone(), rng.fork());
                    worker.spawn(async move {
                        for _ in 0..REQUESTS {
                            guest.request(&on, &mut rng).await;
                        }
                    })
                })
                .collect();
            // A moment after each task's end, with the others under way.
            for task in tasks {
                task.await;
                let now = moment(&guest);
                guest.moments.borrow_mut().push(now);
            }
        }
        guest.image.close(&worker).await.unwrap();
        guest.model.borrow_mut().apply(GuestRequest::Flush);
        let last = moment(&guest);
        let mut moments = guest.moments.take();
        moments.push(last);
        moments
    })
}

fn judge(qemu: &Qemu, dir: &Path, state: &[u8], model: &GuestModel) -> Result<(), String> {
    std::fs::write(dir.join(STATE), state).map_err(|e| e.to_string())?;
    let out = qemu.img(dir, ["check", "-f", "qcow2", STATE]);
    if !matches!(out.code, Some(0 | 3)) {
        return Err(out.to_string());
    }
    model.check(0, &qemu.read_all(dir, STATE, None)).map_err(|violation| violation.to_string())
}

#[test]
fn what_was_flushed_is_on_the_file_at_every_moment() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_record() {
        return;
    }
    let mut states = 0;
    Seeds::new(3).run(|seed| {
        let mut rng = SimRng::new(seed ^ 0x7265_636f_7264);
        let scratch = Scratch::new("recorded");
        let dir = scratch.path();
        let creation = *rng.pick(&[
            "cluster_size=4096",
            "cluster_size=65536",
            "compat=0.10,cluster_size=512",
            "extended_l2=on,cluster_size=16384",
            "refcount_bits=1,cluster_size=4096",
        ]);
        qemu.create(dir, IMAGE, "qcow2", creation, SIZE);
        let recorder = Recorder::over(&dir.join(IMAGE), 512);
        let engine = *rng.pick(&[Engine::IoUring, Engine::Threads]);
        let options = OpenOptions::default()
            .format(Some(Format::Qcow2))
            .access(Access::ReadWrite)
            .cache(*rng.pick(&[CacheMode::Writeback, CacheMode::None]))
            .cache_size(*rng.pick(&[None, Some(16 << 10)]));
        let moments = drive(&dir.join(IMAGE), &recorder, &options, engine, &mut rng);
        let recording = recorder.recording();
        for Moment { position, model } in moments {
            let torn = recording.power_failed(position, |_, _| rng.chance(1, 2));
            for (name, state) in [
                ("killed", recording.killed(position)),
                ("nothing unsynced", recording.power_failed(position, |_, _| false)),
                ("torn", torn),
            ] {
                states += 1;
                judge(&qemu, dir, &state, &model).unwrap_or_else(|e| {
                    panic!("seed {seed}, {creation}, {engine:?}, {options:?}, event {position}, {name}: {e}")
                });
            }
        }
    });
    eprintln!("{states} states");
}
