//! Seeded random writes, zeroes, discards, flushes and reopenings against a model in memory, on real files.
//!
//! Replay one seed: `ZEBU_SEED=n cargo test -p zebu-engine --test random_operations`. `ZEBU_SEEDS` sets how many are run, and
//! `ZEBU_REQUESTS` how many requests each has.

use std::path::Path;
use std::process::Command;
use std::time::Duration;
use zebu_engine::luks::{BlockCipher, CipherSpec, HashName, Mode};
use zebu_engine::storage::{Engine, IoBuf, IoBufs, Worker, WorkerConfig};
use zebu_engine::{
    Access, CacheMode, CodecPool, CompressOptions, CreateOptions, Durability, ExtentIndex, Format, Image,
    Keys, NewEncryption, OpenOptions, Passphrase, Preallocation, Shrink, ZeroMode,
};

const PASSPHRASE: &str = "a phrase";

/// The disks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disks {
    /// qcow2 images as they are.
    Plain,
    /// qcow2 images and files by themselves, encrypted with LUKS.
    Encrypted,
}

/// A cheap encryption.
fn encryption(random: &mut Random) -> NewEncryption {
    let (cipher, mode, key_len) = random.one_of(&[
        (BlockCipher::Aes, Mode::XtsPlain64, 64),
        (BlockCipher::Aes, Mode::XtsPlain64, 64),
        (BlockCipher::Aes, Mode::XtsPlain64, 32),
        (BlockCipher::Aes, Mode::CbcPlain64, 32),
        (BlockCipher::Aes, Mode::CbcEssivSha256, 16),
        (BlockCipher::Serpent, Mode::XtsPlain64, 64),
        (BlockCipher::Twofish, Mode::XtsPlain64, 64),
    ]);
    NewEncryption::new(passphrase())
        .cipher(CipherSpec::new(cipher, mode, key_len).unwrap())
        .hash(random.one_of(&[HashName::Sha1, HashName::Sha256, HashName::Sha512]))
        .iteration_time(Duration::ZERO)
}

fn passphrase() -> Passphrase {
    Passphrase::new(PASSPHRASE.as_bytes()).unwrap()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn qemu_secret() -> String {
    format!("secret,id=key,data={PASSPHRASE}")
}

fn qemu_name(path: &Path, format: Format) -> String {
    let key = if format == Format::Luks { "key-secret=key" } else { "encrypt.key-secret=key" };
    format!("driver={},file.filename={},{key}", format.name(), path.display())
}

/// QEMU reads the model's bytes from an encrypted image.
fn qemu_reads(path: &Path, format: Format, model: &[u8], seed: u64) {
    if std::env::var_os("ZEBU_SKIP_QEMU").is_some() {
        return;
    }
    let plain = path.with_extension("plain");
    let status = Command::new("qemu-img")
        .args(["convert", "-O", "raw", "--object", &qemu_secret(), "--image-opts", &qemu_name(path, format)])
        .arg(&plain)
        .status()
        .expect("qemu-img is needed (apt-get install qemu-utils), or set ZEBU_SKIP_QEMU=1");
    assert!(status.success(), "seed {seed}");
    assert!(std::fs::read(&plain).unwrap() == model, "seed {seed}: QEMU reads something else");
}

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
            panic!(
                "seed {seed}: byte {} is {:#x}, should be {:#x}",
                at + wrong,
                got[wrong],
                model[at + wrong]
            );
        }
        at += len;
    }
}

fn qemu_check(path: &Path, format: Format, disks: Disks, seed: u64) {
    if std::env::var_os("ZEBU_SKIP_QEMU").is_some() || format != Format::Qcow2 {
        return;
    }
    let mut check = Command::new("qemu-img");
    match disks {
        Disks::Plain => check.args(["check", "-f", "qcow2"]).arg(path),
        Disks::Encrypted => {
            check.args(["check", "--object", &qemu_secret(), "--image-opts", &qemu_name(path, format)])
        }
    };
    let out =
        check.output().expect("qemu-img is needed (apt-get install qemu-utils), or set ZEBU_SKIP_QEMU=1");
    assert!(
        out.status.success(),
        "seed {seed}: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}

async fn one_request(image: &Image, worker: &Worker, random: &mut Random, model: &mut [u8], seed: u64) {
    let size = model.len() as u64;
    let offset = random.below(size) & if random.below(3) == 0 { !0 } else { !511 };
    let longest = random.one_of(&[512, 4096, 70_000, 300_000]);
    let len = (1 + random.below(longest)).min(size - offset);
    let range = offset as usize..(offset + len) as usize;
    match random.below(100) {
        0..50 => {
            let fill: Vec<u8> = (0..len).map(|i| (random.0 >> 7).wrapping_add(i / 512) as u8 | 1).collect();
            model[range].copy_from_slice(&fill);
            let durability =
                random.one_of(&[Durability::Volatile, Durability::Volatile, Durability::Durable]);
            let (result, bufs) = image.write(worker, offset, IoBuf::copy_of(&fill).into(), durability).await;
            result.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            assert_eq!(gather(&bufs), fill, "seed {seed}: the buffer came back changed");
        }
        50..65 => {
            model[range].fill(0);
            let mode = random.one_of(&[ZeroMode::Keep, ZeroMode::Unmap]);
            image
                .write_zeroes(worker, offset, len, mode)
                .await
                .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
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

fn run(seed: u64, engine: Engine, cache: CacheMode, requests: u64, disks: Disks) {
    let mut random = Random(seed ^ if disks == Disks::Encrypted { 0x10c5 } else { 0 });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    let worker = Worker::new(&WorkerConfig::default().engine(engine)).unwrap();
    let version = random.one_of(&[2, 3, 3]);
    let extended_l2 = version == 3 && random.below(3) == 0;
    let cluster_size = if extended_l2 {
        random.one_of(&[16384, 65536, 2 << 20])
    } else {
        random.one_of(&[512, 4096, 65536, 2 << 20])
    };
    let size = random.one_of(&[100_000u64, 1 << 20, 5 << 20]).next_multiple_of(512);
    let encryption = (disks == Disks::Encrypted).then(|| encryption(&mut random));
    let format = match disks {
        Disks::Encrypted if random.below(4) == 0 => Format::Luks,
        _ => Format::Qcow2,
    };
    // Whether the middle of a large request goes to other threads.
    let pool = CodecPool::new(if disks == Disks::Encrypted { random.below(3) as usize } else { 1 });
    let preallocates = format == Format::Qcow2;
    let modes = [Preallocation::Off, Preallocation::Off, Preallocation::Metadata];
    let modes = if preallocates { &modes[..] } else { &modes[..1] };
    let options = CreateOptions::default()
        .format(format)
        .encryption(encryption)
        .size(Some(size))
        .cluster_size(cluster_size)
        .version(version)
        .refcount_bits(if version == 2 { 16 } else { random.one_of(&[1, 2, 8, 16, 64]) })
        .extended_l2(extended_l2)
        .preallocation(random.one_of(modes))
        .cache(cache);
    worker.block_on(async {
        Image::create(&worker, &path, &options).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let mut model = vec![0u8; size as usize];
        for _ in 0..3 {
            let open = OpenOptions::default()
                .format(Some(format))
                .access(Access::ReadWrite)
                .cache(cache)
                .keys(Keys::of_top(passphrase()))
                .compress(CompressOptions::default().pool(pool.clone()))
                .slice_size(random.one_of(&[None, Some(512)]))
                .extent_index(random.one_of(&[ExtentIndex::On, ExtentIndex::On, ExtentIndex::Off]));
            let image =
                Image::open(&worker, &path, &open).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            if random.below(2) == 0 {
                // Two slices.
                image.set_cache_size(image.min_cache_size()).unwrap();
            }
            if format == Format::Luks {
                // Nobody has written it: it reads as noise.
                for at in (0..model.len()).step_by(1 << 20) {
                    let len = (model.len() - at).min(1 << 20) as u64;
                    if options.encryption.is_some() && model.iter().all(|byte| *byte == 0) {
                        image.write_zeroes(&worker, at as u64, len, ZeroMode::Keep).await.unwrap();
                    }
                }
            }
            for _ in 0..requests / 3 {
                one_request(&image, &worker, &mut random, &mut model, seed).await;
            }
            verify(&image, &worker, &model, seed).await;
            if random.below(2) == 0 {
                let new = random.below(2 * size).next_multiple_of(512).max(512);
                let mode = match new / 512 % 4 {
                    _ if new <= image.virtual_size() || !preallocates => Preallocation::Off,
                    0 => Preallocation::Metadata,
                    1 => Preallocation::Falloc,
                    2 => Preallocation::Full,
                    _ => Preallocation::Off,
                };
                image
                    .resize(&worker, new, Shrink::Allow, mode)
                    .await
                    .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
                if format == Format::Luks && new > model.len() as u64 {
                    let (old, grown) = (model.len() as u64, new - model.len() as u64);
                    image.write_zeroes(&worker, old, grown, ZeroMode::Keep).await.unwrap();
                }
                model.resize(new as usize, 0);
                verify(&image, &worker, &model, seed).await;
            }
            image.close(&worker).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            drop(image);
            qemu_check(&path, format, disks, seed);
        }
        let open = OpenOptions::default().keys(Keys::of_top(passphrase()));
        let image = Image::open(&worker, &path, &open).await.unwrap();
        assert_eq!(image.format(), format, "seed {seed}: the format is found");
        verify(&image, &worker, &model, seed).await;
        drop(image);
        if disks == Disks::Encrypted {
            qemu_reads(&path, format, &model, seed);
        }
    });
}

#[test]
fn content_is_the_models_and_qemu_finds_no_fault() {
    run_seeds(Disks::Plain, 40);
}

#[test]
fn encrypted_content_is_the_models_and_qemu_reads_it() {
    run_seeds(Disks::Encrypted, 16);
}

fn run_seeds(disks: Disks, seeds: u64) {
    let requests = number("ZEBU_REQUESTS").unwrap_or(300);
    if let Some(seed) = number("ZEBU_SEED") {
        return run(seed, Engine::Auto, CacheMode::Writeback, requests, disks);
    }
    for seed in 0..number("ZEBU_SEEDS").unwrap_or(seeds) {
        let cache = if seed % 2 == 0 { CacheMode::Writeback } else { CacheMode::None };
        let engine = if seed % 4 < 2 { Engine::Threads } else { Engine::Auto };
        run(seed, engine, cache, requests, disks);
    }
}

/// One request of a round whose requests touch no byte in common.
#[derive(Clone)]
enum Step {
    Write { offset: u64, fill: Vec<u8> },
    Zero { offset: u64, len: u64, mode: ZeroMode },
    Flush,
}

fn random_round(random: &mut Random, model: &mut [u8]) -> Vec<Step> {
    let size = model.len() as u64;
    let mut cuts: Vec<u64> = (0..16).map(|_| random.below(size)).collect();
    // Close neighbours, so that requests meet in one cluster.
    let near = random.below(size);
    cuts.extend((0..16).map(|_| (near + random.below(100_000)).min(size)));
    cuts.sort_unstable();
    cuts.dedup();
    let mut round = Vec::new();
    for pair in cuts.windows(2) {
        let (offset, len) = (pair[0], (pair[1] - pair[0]).min(200_000));
        let range = offset as usize..(offset + len) as usize;
        match random.below(10) {
            0..6 => {
                let fill: Vec<u8> =
                    (0..len).map(|i| (random.0 >> 9).wrapping_add(i / 512) as u8 | 1).collect();
                model[range].copy_from_slice(&fill);
                round.push(Step::Write { offset, fill });
            }
            6..8 => {
                model[range].fill(0);
                let mode = random.one_of(&[ZeroMode::Keep, ZeroMode::Unmap]);
                round.push(Step::Zero { offset, len, mode });
            }
            8 => round.push(Step::Flush),
            _ => {}
        }
    }
    for i in (1..round.len()).rev() {
        round.swap(i, random.below(i as u64 + 1) as usize);
    }
    round
}

async fn run_step(image: Image, worker: Worker, step: Step) {
    match step {
        Step::Write { offset, fill } => {
            let bufs = IoBuf::copy_of(&fill).into();
            image.write(&worker, offset, bufs, Durability::Volatile).await.0.unwrap();
        }
        Step::Zero { offset, len, mode } => image.write_zeroes(&worker, offset, len, mode).await.unwrap(),
        Step::Flush => image.flush(&worker).await.unwrap(),
    }
}

fn run_concurrently(seed: u64, cache: CacheMode, disks: Disks) {
    let mut random = Random(seed ^ 0x5eed);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    let extended_l2 = random.below(3) == 0;
    let options = CreateOptions::default()
        .size(Some(4 << 20))
        .cluster_size(if extended_l2 { 65536 } else { random.one_of(&[512, 4096, 65536]) })
        .extended_l2(extended_l2)
        .refcount_bits(random.one_of(&[1, 16, 64]))
        .encryption((disks == Disks::Encrypted).then(|| encryption(&mut random)));
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    worker.block_on(Image::create(&worker, &path, &options)).unwrap();
    let mut model = vec![0u8; 4 << 20];
    for _ in 0..2 {
        let open = OpenOptions::default()
            .access(Access::ReadWrite)
            .cache(cache)
            .keys(Keys::of_top(passphrase()))
            .extent_index(random.one_of(&[ExtentIndex::On, ExtentIndex::On, ExtentIndex::Off]));
        let image = worker.block_on(Image::open(&worker, &path, &open)).unwrap();
        if random.below(2) == 0 {
            image.set_cache_size(image.min_cache_size()).unwrap();
        }
        for _ in 0..6 {
            let round = random_round(&mut random, &mut model);
            let (mine, theirs) = round.split_at(round.len() / 2);
            let (other_image, theirs) = (image.clone(), theirs.to_vec());
            let other = std::thread::spawn(move || {
                let worker = Worker::new(&WorkerConfig::default()).unwrap();
                let tasks: Vec<_> = theirs
                    .into_iter()
                    .map(|step| worker.spawn(run_step(other_image.clone(), worker.clone(), step)))
                    .collect();
                worker.block_on(async {
                    for task in tasks {
                        task.await;
                    }
                });
                // Commits and releases that its requests started end while the other worker is still polled.
                assert!(worker.drain(Duration::from_secs(300)), "seed {seed}: the worker does not get done");
            });
            let tasks: Vec<_> = mine
                .iter()
                .map(|step| worker.spawn(run_step(image.clone(), worker.clone(), step.clone())))
                .collect();
            worker.block_on(async {
                for task in tasks {
                    task.await;
                }
            });
            // This worker goes on being polled until the other is done: what it started may be waited for there.
            while !other.is_finished() {
                worker.wait(Some(Duration::from_millis(1)));
            }
            other.join().unwrap_or_else(|panic| {
                eprintln!("seed {seed}: the other thread");
                std::panic::resume_unwind(panic)
            });
        }
        worker.block_on(async {
            verify(&image, &worker, &model, seed).await;
            image.close(&worker).await.unwrap();
        });
        drop(image);
        qemu_check(&path, Format::Qcow2, disks, seed);
    }
}

#[test]
fn requests_in_flight_on_two_workers_do_not_disturb_each_other() {
    run_seeds_concurrently(Disks::Plain, 30);
}

/// Requests that meet in one sector are of less than a sector: each reads and writes what the others do.
#[test]
fn requests_in_flight_for_parts_of_encrypted_sectors_do_not_disturb_each_other() {
    run_seeds_concurrently(Disks::Encrypted, 12);
}

fn run_seeds_concurrently(disks: Disks, seeds: u64) {
    if let Some(seed) = number("ZEBU_SEED") {
        return run_concurrently(seed, CacheMode::Writeback, disks);
    }
    for seed in 0..number("ZEBU_SEEDS").unwrap_or(seeds) {
        let cache = if seed % 3 == 0 { CacheMode::None } else { CacheMode::Writeback };
        run_concurrently(seed, cache, disks);
    }
}
