//! Images made by QEMU in every shape, read by zebu's library and command: equal to what QEMU reads, byte for byte.

use zebu_engine::storage::Engine;
use zebu_engine::{Access, CacheMode, Format, Image, OpenOptions};
use zebu_tests::driver::{read_all, worker};
use zebu_tests::images::{Feature, IMAGE, SNAPSHOTS, Shape};
use zebu_tests::model::difference;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::tenth;

/// A tenth of the shapes of a version with one cluster size.
fn matrix(version: u32, cluster: u64) {
    let Some(qemu) = Qemu::find() else { return };
    let shapes = (1..).zip(Shape::all(version, cluster));
    for (number, shape) in tenth::of(shapes, Shape::first(version, cluster)) {
        let mut random = Random::new(cluster ^ u64::from(version * 1000 + number));
        let scratch = Scratch::new("read");
        shape.make(&qemu, scratch.path(), random.bits());
        let expected = qemu.read_all(scratch.path(), IMAGE, None);
        let options = OpenOptions::default()
            .format(Some(Format::Qcow2))
            .access(Access::ReadOnly)
            .cache(*random.pick(&[CacheMode::Writeback, CacheMode::None]))
            .cache_size(*random.pick(&[None, Some(64 << 10)]));
        for engine in [Engine::IoUring, Engine::Threads] {
            by_library(&scratch, &options, engine, &expected, &mut random)
                .unwrap_or_else(|what| panic!("{shape}, {engine:?}, {options:?}: {what}"));
        }
        by_command(&scratch, &[], &expected).unwrap_or_else(|what| panic!("{shape}: {what}"));
        if shape.feature == Feature::Snapshot {
            for name in SNAPSHOTS {
                let expected = qemu.read_all(scratch.path(), IMAGE, Some(name));
                let options = options.clone().snapshot(Some(name.to_owned()));
                by_library(&scratch, &options, Engine::Auto, &expected, &mut random)
                    .unwrap_or_else(|what| panic!("{shape}, snapshot {name}: {what}"));
                by_command(&scratch, &["-l", name], &expected)
                    .unwrap_or_else(|what| panic!("{shape}, snapshot {name}: {what}"));
            }
        }
    }
}

/// The whole disk in order, then some ranges at any offset.
fn by_library(
    scratch: &Scratch,
    options: &OpenOptions,
    engine: Engine,
    expected: &[u8],
    random: &mut Random,
) -> Result<(), String> {
    let worker = worker(engine);
    worker.block_on(async {
        let image = Image::open(&worker, &scratch.file(IMAGE), options).await.map_err(|e| e.to_string())?;
        let piece = *random.pick(&[65536, (1 << 20) - 512, 4 << 20]);
        let found = read_all(&worker, &image, piece).await.map_err(|e| e.to_string())?;
        if let Some(text) = difference(0, expected, &found) {
            return Err(text);
        }
        for _ in 0..40 {
            let offset = random.below(expected.len() as u64);
            let len = random.between(1, 200_000).min(expected.len() as u64 - offset);
            let (result, buffers) = image.read(&worker, offset, worker.buffer(len as usize).into()).await;
            result.map_err(|e| e.to_string())?;
            let mut found = vec![0; len as usize];
            buffers.copy_to(0, &mut found);
            let wanted = &expected[offset as usize..(offset + len) as usize];
            if let Some(text) = difference(offset, wanted, &found) {
                return Err(format!("read of {len} bytes at {offset}: {text}"));
            }
        }
        image.close(&worker).await.map_err(|e| e.to_string())
    })
}

fn by_command(scratch: &Scratch, more: &[&str], expected: &[u8]) -> Result<(), String> {
    let target = "by-zebu.raw";
    let words = ["convert", "-f", "qcow2", "-O", "raw"].into_iter().chain(more.iter().copied());
    let out = zebu(scratch.path(), words.chain([IMAGE, target]));
    if out.code != Some(0) {
        return Err(out.to_string());
    }
    let found = std::fs::read(scratch.file(target)).map_err(|e| e.to_string())?;
    std::fs::remove_file(scratch.file(target)).map_err(|e| e.to_string())?;
    difference(0, expected, &found).map_or(Ok(()), |text| Err(format!("zebu convert: {text}")))
}

#[test]
fn version_2_clusters_of_512_bytes() {
    matrix(2, 512);
}

#[test]
fn version_2_clusters_of_4_kib() {
    matrix(2, 4096);
}

#[test]
fn version_2_clusters_of_64_kib() {
    matrix(2, 65536);
}

#[test]
fn version_2_clusters_of_2_mib() {
    matrix(2, 2 << 20);
}

#[test]
fn version_3_clusters_of_512_bytes() {
    matrix(3, 512);
}

#[test]
fn version_3_clusters_of_4_kib() {
    matrix(3, 4096);
}

#[test]
fn version_3_clusters_of_64_kib() {
    matrix(3, 65536);
}

#[test]
fn version_3_clusters_of_2_mib() {
    matrix(3, 2 << 20);
}
