//! Every write to the files of an encrypted image, in the disk's log: none holds what the guest or the backing file has.

use crate::crash::setup::{BASE, Setup};
use futures_util::future::join_all;
use std::collections::HashSet;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Durability, Image, NewSnapshot, Preallocation, Shrink, ZeroMode};
use zebu_sim::{LogEvent, LogKeep, SimOp, SimRng, SimWorld, backing_pattern};

/// Bytes of a block of the ciphers: whoever finds so many of a text knows it.
const BLOCK: usize = 16;
/// Bytes of the text that the guest writes pieces of.
const TEXT: usize = 40 << 10;

/// Every block that may not be written, at whatever byte it begins in the text.
struct Known(HashSet<[u8; BLOCK]>);

fn blocks(bytes: &[u8]) -> impl Iterator<Item = [u8; BLOCK]> {
    bytes.windows(BLOCK).filter_map(|window| window.try_into().ok())
}

impl Known {
    fn of(texts: &[&[u8]]) -> Self {
        let mut known: HashSet<_> = texts.iter().flat_map(|text| blocks(text)).collect();
        known.remove(&[0; BLOCK]);
        Self(known)
    }

    /// Looks at everything that was written to any file of the world. Returns how many bytes that is.
    fn is_in_no_write(&self, world: &SimWorld, case: &str) -> usize {
        let log = world.log();
        let mut base = None;
        let mut looked_at = 0;
        for event in log.events() {
            match event {
                LogEvent::File { file, name, .. } if name == BASE => base = Some(*file),
                LogEvent::Submitted { file, what: SimOp::Write { offset, data }, .. } => {
                    let found = blocks(data).position(|block| self.0.contains(&block));
                    let found = found.map(|at| offset + at as u64);
                    assert_eq!(found, None, "{case}: plain text is written to file {} there", file.0);
                    looked_at += data.len();
                }
                LogEvent::Submitted {
                    what: SimOp::Copy { source, .. } | SimOp::Clone { source, .. },
                    ..
                } => {
                    assert_ne!(Some(*source), base, "{case}: the kernel copies plain text");
                }
                _ => {}
            }
        }
        looked_at
    }
}

async fn request(image: &Image, worker: &Worker, mut rng: SimRng, text: &[u8]) {
    let size = image.virtual_size();
    let unit = *rng.pick(&[1, 16, 512, 4096]);
    let offset = rng.below(size) / unit * unit;
    let longest = *rng.pick(&[64, 512, 5000, TEXT as u64]);
    let len = rng.between(1, longest).min(size - offset);
    match rng.below(10) {
        0..6 => {
            let from = rng.below(TEXT as u64 - len + 1) as usize;
            let piece = &text[from..from + len as usize];
            let durability = *rng.pick(&[Durability::Volatile, Durability::Volatile, Durability::Durable]);
            let (result, bufs) = image.write(worker, offset, IoBuf::copy_of(piece).into(), durability).await;
            result.unwrap();
            let mut back = vec![0; piece.len()];
            bufs.copy_to(0, &mut back);
            assert!(back == piece, "the guest's memory was changed");
        }
        6 => image.write_zeroes(worker, offset, len, ZeroMode::Keep).await.unwrap(),
        7 => image.write_zeroes(worker, offset, len, ZeroMode::Unmap).await.unwrap(),
        8 => image.discard(worker, offset, len).await.unwrap(),
        _ => image.flush(worker).await.unwrap(),
    }
}

/// One run of an image, which ends by closing or in the middle, as a process that is killed.
fn run(seed: u64) -> usize {
    let mut rng = SimRng::new(seed ^ 0x706c_6169_6e00);
    let setup = loop {
        let setup = Setup::random(&mut rng);
        if setup.size <= 512 << 10 && setup.direct != 4096 {
            break setup.encrypted();
        }
    };
    let mut text = vec![0; TEXT];
    for byte in &mut text {
        *byte = rng.below(256) as u8;
    }
    let backing = backing_pattern(0, (setup.pattern + setup.cluster_size * 3) as usize);
    let known = Known::of(&[&text, &backing]);
    let world = setup.world_keeping(LogKeep::All, &setup.make(seed), rng.next_u64());
    let workers = setup.make_workers(&world);
    let image = setup.open(&world, &workers[0]).unwrap();
    let is_killed = rng.chance(1, 2);
    for phase in 0..3 {
        let requests = (0..12).map(|number| {
            let (image, worker, rng, text) =
                (image.clone(), workers[number % workers.len()].clone(), rng.fork(), text.clone());
            workers[number % workers.len()].spawn(async move { request(&image, &worker, rng, &text).await })
        });
        let all = join_all(requests.collect::<Vec<_>>());
        world.block_on(all).unwrap();
        if is_killed && phase == 2 {
            break;
        }
        world
            .block_on(async {
                let worker = &workers[0];
                if phase == 0 && setup.refcount_bits > 1 && !setup.external_data {
                    image.create_snapshot(worker, NewSnapshot::named("s")).await.unwrap();
                } else if setup.version == 3 {
                    let size = setup.size + rng.below(8) * 4096;
                    let mode = *rng.pick(&[Preallocation::Off, Preallocation::Metadata, Preallocation::Full]);
                    let mode = if size > image.virtual_size() { mode } else { Preallocation::Off };
                    image.resize(worker, size, Shrink::Allow, mode).await.unwrap();
                }
            })
            .unwrap();
    }
    if !is_killed {
        world.block_on(image.close(&workers[0])).unwrap().unwrap();
    }
    known.is_in_no_write(&world, &format!("seed {seed}, {setup:?}"))
}

/// Whole requests and parts of sectors, copies of what lies below, snapshots, growth.
#[test]
pub(crate) fn no_write_holds_plain_text() {
    let looked_at: usize = (0..40).map(run).sum();
    assert!(looked_at > 4 << 20, "{looked_at} bytes");
}
