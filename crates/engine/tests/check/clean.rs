//! Images that QEMU made and left in order: the same numbers, over versions, cluster sizes, widths and features.

use crate::support::{LUKS_SECRET, Random, TestImage, qemu_img, skipped};
use zebu_engine::check::CheckOptions;
use zebu_engine::{CacheMode, Sharing};

/// A seeded mix of writes, zeroes and discards over the first `clusters` clusters.
fn mix(seed: u64, cluster: u64, clusters: u64, count: u64) -> Vec<String> {
    let mut random = Random(seed);
    (0..count)
        .map(|n| {
            let at = random.below(clusters) * cluster;
            let len = (1 + random.below(4)) * cluster;
            match random.below(6) {
                0 => format!("write -z {at} {len}"),
                1 => format!("discard {at} {len}"),
                2 => format!("write -P {n} {} 512", at + random.below(cluster / 512) * 512),
                _ => format!("write -P {n} {at} {len}"),
            }
        })
        .collect()
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Feature {
    Plain,
    ExtendedL2,
    Zlib,
    Zstd,
    DataFile,
    RawDataFile,
    Backing,
    Snapshots,
    Lazy,
    Bitmaps,
    Metadata,
    Luks,
}

const FEATURES: [Feature; 12] = [
    Feature::Plain,
    Feature::ExtendedL2,
    Feature::Zlib,
    Feature::Zstd,
    Feature::DataFile,
    Feature::RawDataFile,
    Feature::Backing,
    Feature::Snapshots,
    Feature::Lazy,
    Feature::Bitmaps,
    Feature::Metadata,
    Feature::Luks,
];

/// Builds the image, or nothing where the combination does not exist.
fn build(version: u32, cluster: u64, bits: u32, feature: Feature, seed: u64) -> Option<TestImage> {
    let needs_v3 = !matches!(
        feature,
        Feature::Plain
            | Feature::Zlib
            | Feature::Backing
            | Feature::Snapshots
            | Feature::Metadata
            | Feature::Luks
    );
    if version == 2 && (bits != 16 || needs_v3)
        || feature == Feature::ExtendedL2 && cluster < 16384
        // Making one takes a second, and the width makes no difference to it.
        || feature == Feature::Luks && bits != 16
        // A snapshot shares clusters, and one bit cannot count two references.
        || feature == Feature::Snapshots && bits == 1
    {
        return None;
    }
    let mut options = format!("compat={},cluster_size={cluster}", if version == 2 { "0.10" } else { "1.1" });
    if version == 3 {
        options += &format!(",refcount_bits={bits}");
    }
    let place = tempfile::tempdir().unwrap();
    let backing = place.path().join("backing.raw");
    let mut create = Vec::new();
    match feature {
        Feature::ExtendedL2 => options += ",extended_l2=on",
        Feature::Zstd => options += ",compression_type=zstd",
        Feature::DataFile => options += &format!(",data_file={}", place.path().join("data").display()),
        Feature::RawDataFile => {
            options += &format!(",data_file_raw=on,data_file={}", place.path().join("data").display());
        }
        Feature::Backing => {
            qemu_img(&["create", "-q", "-f", "raw", backing.to_str().unwrap(), "3M"]);
            options += &format!(",backing_fmt=raw,backing_file={}", backing.display());
        }
        Feature::Lazy => options += ",lazy_refcounts=on",
        Feature::Metadata => options += ",preallocation=metadata",
        Feature::Luks => {
            options += ",encrypt.format=luks,encrypt.key-secret=s0,encrypt.iter-time=10";
            create.extend(["--object", LUKS_SECRET]);
        }
        _ => {}
    }
    create.extend(["-o", &options]);
    let size = if cluster < 4096 { 1 << 20 } else { cluster * if cluster > 65536 { 24 } else { 60 } };
    let image = TestImage::new(&create, &size.to_string(), &[]);
    let clusters = size / cluster - 4;
    let mixed = mix(seed, cluster, clusters, 40);
    let commands: Vec<&str> = mixed.iter().map(String::as_str).collect();
    match feature {
        Feature::Luks => {}
        Feature::Zlib | Feature::Zstd => {
            let mut random = Random(seed);
            let packed: Vec<String> = (0..clusters)
                .filter(|_| random.below(3) > 0)
                .map(|n| format!("write -c -P {} {} {cluster}", n & 255, n * cluster))
                .collect();
            let packed: Vec<&str> = packed.iter().map(String::as_str).collect();
            image.io(&packed);
            image.io(&commands[..10]);
        }
        Feature::Snapshots => {
            image.io(&commands[..15]);
            image.snapshot(&["-c", "one"]);
            image.io(&commands[15..30]);
            image.snapshot(&["-c", "two"]);
            image.io(&commands[30..]);
            image.snapshot(&["-c", "three"]);
            image.snapshot(&["-d", "two"]);
        }
        Feature::Bitmaps => {
            image.bitmap("first");
            image.bitmap("second");
            image.io(&commands);
        }
        _ => image.io(&commands),
    }
    // The data file and the backing file may go: a check does not open them, but QEMU's does.
    std::mem::forget(place);
    Some(image)
}

#[test]
fn matrix() {
    if skipped() {
        return;
    }
    let mut number = 0;
    for version in [2, 3] {
        for cluster in [512, 4096, 65536, 2 << 20] {
            for bits in [1, 16, 64] {
                for feature in FEATURES {
                    number += 1;
                    let Some(image) = build(version, cluster, bits, feature, number) else { continue };
                    let what = format!("v{version} {cluster} bytes {bits} bits {feature:?} seed {number}");
                    image.assert_clean(&what);
                }
            }
        }
    }
}

#[test]
fn all_refcount_widths() {
    if skipped() {
        return;
    }
    for bits in [1, 2, 4, 8, 16, 32, 64] {
        for cluster in [512, 65536] {
            let image = build(3, cluster, bits, Feature::Zlib, u64::from(bits)).unwrap();
            image.assert_clean(&format!("{bits} bits, {cluster} bytes"));
        }
    }
}

#[test]
fn other_ways_to_open_and_count_say_the_same() {
    if skipped() {
        return;
    }
    let image = build(3, 65536, 16, Feature::Snapshots, 99).unwrap();
    let expected = image.check();
    assert!(expected.is_clean() && expected.counts.allocated_clusters > 0);
    let base = CheckOptions::default();
    for options in [
        base.clone().cache(CacheMode::None),
        base.clone().sharing(Sharing::Unlocked),
        base.clone().parallel(1),
        base.clone().parallel(0),
        base.clone().memory(0),
    ] {
        assert_eq!(image.check_with(&options), expected, "{options:?}");
    }
}

#[test]
fn the_data_file_is_not_opened() {
    if skipped() {
        return;
    }
    let image = TestImage::new(&[], "1M", &[]);
    let (data, path) = (image.sibling("data"), image.sibling("with-data.qcow2"));
    let options = format!("data_file={}", data.display());
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, path.to_str().unwrap(), "1M"]);
    std::fs::remove_file(&data).unwrap();
    let report = crate::support::on_worker(async |worker| {
        zebu_engine::check::check(worker, &path, &CheckOptions::default()).await
    });
    assert!(report.unwrap().is_clean());
}
