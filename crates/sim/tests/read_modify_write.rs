//! Writes of parts of blocks under O_DIRECT, on the simulated disk: what a failing read does, and every order in which
//! neighbours can meet.

use zebu_sim::{Content, FailedEffect, Fault, FaultRule, OpClass, OpFilter, Seeds, SimFileConfig, SimWorld};
use zebu_storage::{IoBuf, IoErrorKind};

const FILE: &str = "f";
const BLOCK: u64 = 512;

fn numbered(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

#[test]
fn nothing_is_written_when_a_read_fails() {
    // (offset, length, blocks that are read)
    let cases: [(u64, usize, &[u64]); 6] = [
        (100, 50, &[0]),
        (100, 412, &[0]),
        (512, 100, &[1]),
        (100, 1000, &[0, 2]),
        (700, 5000, &[1, 11]),
        (4000, 3_000_000, &[7, 5867]),
    ];
    for (offset, len, blocks) in cases {
        for failing in blocks {
            let world = SimWorld::new(1);
            let before = Content::from_bytes(&numbered(3_100_000));
            let file = world.file(FILE, before.clone(), SimFileConfig::direct(512));
            let worker = world.worker();
            let fail = Fault::Fail { errno: libc::EIO, effect: FailedEffect::Nothing };
            let reads = OpFilter::of(OpClass::Read).touching(failing * BLOCK..(failing + 1) * BLOCK);
            world.inject(FaultRule::new(reads, fail).nth(0));
            let data = vec![0xAA; len];
            let write = || worker.write(&file, offset, IoBuf::copy_of(&data).into());
            let (result, bufs) = world.block_on(async { write().await }).unwrap();
            let error = result.unwrap_err();
            assert_eq!(
                (error.kind, error.offset, error.len),
                (IoErrorKind::Os(libc::EIO), offset, len as u64)
            );
            assert_eq!(bufs.len(), len, "the caller has its buffers back");
            assert_eq!(worker.stats().writes, 0, "{offset}+{len}, block {failing}");
            assert!(world.content(FILE).unwrap().same_bytes(&before));
            // The blocks are free again, and the next attempt works.
            world.block_on(async { write().await }).unwrap().0.unwrap();
            let mut expected = before.clone();
            expected.write(offset, &data);
            assert!(world.content(FILE).unwrap().same_bytes(&expected));
        }
    }
}

#[test]
fn a_write_of_whole_blocks_is_never_undone_by_a_neighbour() {
    Seeds::new(400).run(|seed| {
        let world = SimWorld::new(seed);
        let file = world.file(FILE, Content::from_bytes(&[9; 4096]), SimFileConfig::direct(512));
        let workers = [world.worker(), world.worker()];
        let parts: [(usize, u64, usize, u8); 4] =
            [(0, 10, 100, 1), (1, 300, 100, 2), (0, 500, 30, 3), (seed as usize % 2, 0, 1024, 4)];
        let tasks: Vec<_> = parts
            .iter()
            .map(|&(number, offset, len, fill)| {
                let (worker, file) = (workers[number].clone(), file.clone());
                workers[number].spawn(async move {
                    worker.write(&file, offset, IoBuf::copy_of(&vec![fill; len]).into()).await.0.unwrap();
                })
            })
            .collect();
        world
            .block_on(async {
                for task in tasks {
                    task.await;
                }
            })
            .unwrap();
        let found = world.content(FILE).unwrap().bytes(0..4096);
        for (at, &byte) in found.iter().enumerate() {
            let allowed: &[u8] = match at {
                10..110 => &[1, 4],
                300..400 => &[2, 4],
                500..530 => &[3, 4],
                0..1024 => &[4],
                _ => &[9],
            };
            assert!(allowed.contains(&byte), "seed {seed}: byte {at} is {byte}");
        }
    });
}

#[test]
fn a_file_is_cut_back_only_where_nobody_wrote_meanwhile() {
    // One write ends within a block past the end, others lie further out: the cut must not take them.
    Seeds::new(300).run(|seed| {
        let world = SimWorld::new(seed);
        let file = world.file(FILE, Content::from_bytes(&[9; 700]), SimFileConfig::direct(512));
        let workers = [world.worker(), world.worker()];
        let parts: [(u64, usize, u8); 4] = [(690, 200, 1), (3000, 100, 2), (2048, 512, 3), (1500, 10, 4)];
        let tasks: Vec<_> = parts
            .iter()
            .enumerate()
            .map(|(number, &(offset, len, fill))| {
                let (worker, file) = (workers[number % 2].clone(), file.clone());
                workers[number % 2].spawn(async move {
                    // So that they begin at different times.
                    for _ in 0..(seed >> number) % 4 {
                        worker.read(&file, 0, IoBuf::zeroed(512).into()).await.0.unwrap();
                    }
                    worker.write(&file, offset, IoBuf::copy_of(&vec![fill; len]).into()).await.0.unwrap();
                })
            })
            .collect();
        world
            .block_on(async {
                for task in tasks {
                    task.await;
                }
            })
            .unwrap();
        let mut expected = Content::from_bytes(&[9; 700]);
        for (offset, len, fill) in parts {
            expected.write(offset, &vec![fill; len]);
        }
        let found = world.content(FILE).unwrap();
        assert_eq!((found.len(), file.len()), (3100, 3100), "seed {seed}");
        assert!(found.same_bytes(&expected), "seed {seed}");
    });
}
