//! Seeded random writes, zeroes, discards, flushes and reopenings against a model in memory, on real files.
//!
//! Replay one seed: `ZEBU_SEED=n cargo test -p zebu --test random_operations`.

use std::path::Path;
use std::process::Command;
use zebu::storage::{Engine, IoBuf, IoBufs, Worker, WorkerConfig};
use zebu::{
    Access, CacheMode, CreateOptions, Durability, Format, Image, OpenOptions, Preallocation, Shrink, ZeroMode,
};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
    fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}

fn gather(bufs: &IoBufs) -> Vec<u8> {
    let mut bytes = vec![0; bufs.len()];
    bufs.copy_to(0, &mut bytes);
    bytes
}

async fn verify(image: &Image, worker: &Worker, model: &[u8], seed: u64) {
    assert_eq!(image.virtual_size(), model.len() as u64, "seed {seed}");
    let mut at = 0;
    while at < model.len() {
        let len = (model.len() - at).min(1 << 20);
        let (result, bufs) = image.read(worker, at as u64, IoBuf::zeroed(len).into()).await;
        result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let got = gather(&bufs);
        if got != model[at..at + len] {
            let wrong = got.iter().zip(&model[at..]).position(|(a, b)| a != b).unwrap();
            panic!("seed {seed}: byte {} is {:#x}, should be {:#x}", at + wrong, got[wrong], model[at + wrong]);
        }
        at += len;
    }
}

fn qemu_check(path: &Path, seed: u64) {
    if std::env::var_os("ZEBU_SKIP_QEMU").is_some() {
        return;
    }
    let out = Command::new("qemu-img")
        .args(["check", "-f", "qcow2"])
        .arg(path)
        .output()
        .expect("qemu-img is needed (apt-get install qemu-utils), or set ZEBU_SKIP_QEMU=1");
    assert!(
        out.status.success(),
        "seed {seed}: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}

async fn one_request(image: &Image, worker: &Worker, random: &mut Random, model: &mut Vec<u8>, seed: u64) {
    let size = model.len() as u64;
    let offset = random.below(size) & if random.below(3) == 0 { !0 } else { !511 };
    let longest = random.one_of(&[512, 4096, 70_000, 300_000]);
    let len = (1 + random.below(longest)).min(size - offset);
    let range = offset as usize..(offset + len) as usize;
    match random.below(100) {
        0..50 => {
            let fill: Vec<u8> = (0..len).map(|i| (random.0 >> 7).wrapping_add(i / 512) as u8 | 1).collect();
            model[range].copy_from_slice(&fill);
            let durability = random.one_of(&[Durability::Volatile, Durability::Volatile, Durability::Durable]);
            let (result, bufs) = image.write(worker, offset, IoBuf::copy_of(&fill).into(), durability).await;
            result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            assert_eq!(gather(&bufs), fill, "seed {seed}: the buffer came back changed");
        }
        50..65 => {
            model[range].fill(0);
            let mode = random.one_of(&[ZeroMode::Keep, ZeroMode::Unmap]);
            image.write_zeroes(worker, offset, len, mode).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
        65..75 => {
            image.discard(worker, offset, len).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            // Which part was discarded is the image's choice: read it back, and hold it to zero or old.
            let (result, bufs) = image.read(worker, offset, IoBuf::zeroed(len as usize).into()).await;
            result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            for (now, old) in gather(&bufs).into_iter().zip(&mut model[range]) {
                assert!(now == 0 || now == *old, "seed {seed}: discard left {now:#x} for {old:#x}");
                *old = now;
            }
        }
        75..85 => image.flush(worker).await.unwrap_or_else(|e| panic!("seed {seed}: {e}")),
        _ => {
            let (result, bufs) = image.read(worker, offset, IoBuf::zeroed(len as usize).into()).await;
            result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            assert_eq!(gather(&bufs), model[range], "seed {seed}: read at {offset}+{len}");
        }
    }
}

fn run(seed: u64, engine: Engine, cache: CacheMode, requests: u64) {
    let mut random = Random(seed);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    let worker = Worker::new(&WorkerConfig { engine, ..WorkerConfig::default() }).unwrap();
    let version = random.one_of(&[2, 3, 3]);
    let extended_l2 = version == 3 && random.below(3) == 0;
    let cluster_size = if extended_l2 {
        random.one_of(&[16384, 65536, 2 << 20])
    } else {
        random.one_of(&[512, 4096, 65536, 2 << 20])
    };
    let size = random.one_of(&[100_000u64, 1 << 20, 5 << 20]).next_multiple_of(512);
    let options = CreateOptions {
        size: Some(size),
        cluster_size,
        version,
        refcount_bits: if version == 2 { 16 } else { random.one_of(&[1, 2, 8, 16, 64]) },
        extended_l2,
        preallocation: random.one_of(&[Preallocation::Off, Preallocation::Off, Preallocation::Metadata]),
        cache,
        ..CreateOptions::default()
    };
    worker.block_on(async {
        Image::create(&worker, &path, &options).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let mut model = vec![0u8; size as usize];
        for _ in 0..3 {
            let open = OpenOptions {
                format: Some(Format::Qcow2),
                access: Access::ReadWrite,
                cache,
                cache_size: random.one_of(&[None, Some(16 << 10)]),
                slice_size: random.one_of(&[None, Some(512)]),
                ..OpenOptions::default()
            };
            let image = Image::open(&worker, &path, &open).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            for _ in 0..requests / 3 {
                one_request(&image, &worker, &mut random, &mut model, seed).await;
            }
            verify(&image, &worker, &model, seed).await;
            if random.below(2) == 0 {
                let new = random.below(2 * size).next_multiple_of(512).max(512);
                image
                    .resize(&worker, new, Shrink::Allow, Preallocation::Off)
                    .await
                    .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
                model.resize(new as usize, 0);
                verify(&image, &worker, &model, seed).await;
            }
            image.close(&worker).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            drop(image);
            qemu_check(&path, seed);
        }
        let image = Image::open(&worker, &path, &OpenOptions::default()).await.unwrap();
        verify(&image, &worker, &model, seed).await;
    });
}

#[test]
fn content_is_the_models_and_qemu_finds_no_fault() {
    if let Some(seed) = std::env::var("ZEBU_SEED").ok().and_then(|s| s.parse().ok()) {
        return run(seed, Engine::Auto, CacheMode::Writeback, 300);
    }
    let seeds = std::env::var("ZEBU_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(40);
    for seed in 0..seeds {
        let cache = if seed % 2 == 0 { CacheMode::Writeback } else { CacheMode::None };
        let engine = if seed % 4 < 2 { Engine::Threads } else { Engine::Auto };
        run(seed, engine, cache, 300);
    }
}
