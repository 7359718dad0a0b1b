//! Internal snapshots taken, applied and deleted by zebu and by QEMU, in turn on one image and each on its own: same
//! content of the disk and of every snapshot, clean by QEMU's check, in every shape that can have snapshots.

use serde_json::Value;
use std::path::Path;
use zebu_tests::images::{Feature, IMAGE, Shape};
use zebu_tests::program::{Finished, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::tenth;

/// The image that only QEMU works on.
const REFERENCE: &str = "reference.qcow2";

const FEATURES: [Feature; 6] = [
    Feature::Plain,
    Feature::ExtendedL2,
    Feature::Zlib,
    Feature::Zstd,
    Feature::BackingRaw,
    Feature::LazyRefcounts,
];

/// One random step, done to both images.
fn step(qemu: &Qemu, dir: &Path, shape: &Shape, random: &mut Random, names: &mut Vec<String>, number: usize) {
    let by_zebu = random.below(3) > 0;
    let pick =
        |random: &mut Random, names: &[String]| names[random.below(names.len() as u64) as usize].clone();
    let action: Vec<String> = match random.below(if names.is_empty() { 5 } else { 10 }) {
        0..3 => return write(qemu, dir, shape, random),
        3..6 => {
            let name = format!("snap-{number}");
            names.push(name.clone());
            vec!["snapshot".into(), "-c".into(), name]
        }
        6..8 => vec!["snapshot".into(), "-a".into(), pick(random, names)],
        _ => {
            let name = pick(random, names);
            names.retain(|other| *other != name);
            vec!["snapshot".into(), "-d".into(), name]
        }
    };
    let on = |image: &str| [action.clone(), vec![image.to_owned()]].concat();
    let ours = if by_zebu { run_zebu(dir, &on(IMAGE)) } else { qemu.img(dir, on(IMAGE)) };
    let theirs = qemu.img(dir, on(REFERENCE));
    assert_eq!(ours.code, theirs.code, "{shape}, step {number}, {action:?}: {ours}\n{theirs}");
    if ours.code != Some(0) && !by_zebu {
        // QEMU leaks what it counted before a refcount overflowed.
        qemu.img(dir, ["check", "-q", "-r", "all", IMAGE]);
    }
    if ours.code != Some(0) && action[1] == "-c" {
        names.pop();
    }
    if ours.code != Some(0) && action[1] == "-d" {
        names.push(action[2].clone());
    }
}

fn run_zebu(dir: &Path, args: &[String]) -> Finished {
    zebu(dir, args)
}

/// The same writes to both images, to one of them by zebu.
fn write(qemu: &Qemu, dir: &Path, shape: &Shape, random: &mut Random) {
    let size = shape.size();
    let commands: Vec<String> = (0..random.between(1, 6))
        .map(|_| {
            let offset = random.below(size / 512) * 512;
            let len = (512 * random.between(1, (size / 8 / 512).max(2))).min(size - offset);
            match random.below(5) {
                0 => format!("write -z {offset} {len}"),
                1 => format!("write -z -u {offset} {len}"),
                _ => format!("write -P {} {offset} {len}", random.between(1, 255)),
            }
        })
        .collect();
    let args = commands.iter().flat_map(|c| ["-c".to_owned(), c.clone()]);
    let mut ours: Vec<String> = vec!["io".into(), "-t".into(), "writeback".into()];
    ours.extend(args);
    ours.push(IMAGE.into());
    run_zebu(dir, &ours).ok();
    qemu.io(dir, "-t writeback", REFERENCE, &commands).ok();
}

/// Fails unless both images have the same snapshots, and show the same bytes in the disk and in each.
fn compare(qemu: &Qemu, dir: &Path, what: &str) {
    qemu.check_clean(dir, IMAGE).unwrap_or_else(|e| panic!("{what}: {e}"));
    let (ours, theirs) = (qemu.info(dir, IMAGE), qemu.info(dir, REFERENCE));
    let list = |info: &Value| -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let snapshots = info["snapshots"].as_array().cloned().unwrap_or_default();
        snapshots.iter().map(|s| (text(&s["id"]), text(&s["name"]))).collect()
    };
    assert_eq!(list(&ours), list(&theirs), "{what}");
    assert_eq!(ours["virtual-size"], theirs["virtual-size"], "{what}");
    let same = |snapshot: Option<&str>| {
        qemu.read_all(dir, IMAGE, snapshot) == qemu.read_all(dir, REFERENCE, snapshot)
    };
    assert!(same(None), "{what}: the disk differs");
    for (_, name) in list(&ours) {
        assert!(same(Some(&name)), "{what}: snapshot {name} differs");
    }
}

fn matrix(version: u32, cluster: u64, widths: &[u32]) {
    let Some(qemu) = Qemu::find() else { return };
    let of = |feature, refcount_bits| Shape { version, cluster, refcount_bits, feature };
    let shapes = FEATURES.into_iter().flat_map(|feature| widths.iter().map(move |bits| of(feature, *bits)));
    for shape in tenth::of(shapes.filter(Shape::is_legal), Shape::first(version, cluster)) {
        let seed = cluster ^ u64::from(version * 1000 + shape.refcount_bits);
        let scratch = Scratch::new("snapshots");
        let dir = scratch.path();
        shape.make(&qemu, dir, seed);
        std::fs::copy(dir.join(IMAGE), dir.join(REFERENCE)).unwrap();
        let mut random = Random::new(seed);
        let mut names = Vec::new();
        for number in 0..7 {
            step(&qemu, dir, &shape, &mut random, &mut names, number);
            compare(&qemu, dir, &format!("{shape}, after step {number}"));
        }
        for name in names {
            run_zebu(dir, &["snapshot".into(), "-d".into(), name.clone(), IMAGE.into()]).ok();
            qemu.img(dir, ["snapshot", "-d", &name, REFERENCE]).ok();
            compare(&qemu, dir, &format!("{shape}, after {name} was deleted at the end"));
        }
    }
}

#[test]
fn version_2() {
    for cluster in [512, 4096, 65536] {
        matrix(2, cluster, &[16]);
    }
}

#[test]
fn version_3_small_clusters() {
    matrix(3, 512, &[16]);
    matrix(3, 4096, &[2]);
}

#[test]
fn version_3_clusters_of_64_kib() {
    matrix(3, 65536, &[1, 2, 16, 64]);
}

#[test]
fn version_3_clusters_of_2_mib() {
    matrix(3, 2 << 20, &[16]);
}

#[test]
fn a_snapshot_of_another_size_and_with_vm_state() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("snapshots");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", 4 << 20);
    // -b writes where a machine's state is kept: past the end of the disk.
    qemu.io(dir, "", IMAGE, &["write -P 1 0 4M", "write -b -P 7 0 300k"]).ok();
    std::fs::copy(dir.join(IMAGE), dir.join(REFERENCE)).unwrap();
    let both = |args: &[&str]| {
        let line =
            |image: &str| args.iter().map(|a| (*a).to_owned()).chain([image.to_owned()]).collect::<Vec<_>>();
        run_zebu(dir, &line(IMAGE)).ok();
        qemu.img(dir, line(REFERENCE)).ok();
    };
    both(&["snapshot", "-c", "small"]);
    for image in [IMAGE, REFERENCE] {
        qemu.img(dir, ["resize", "-q", image, "9M"]).ok();
        qemu.io(dir, "", image, &["write -P 2 3M 5M"]).ok();
    }
    both(&["snapshot", "-c", "large"]);
    compare(&qemu, dir, "two sizes");
    both(&["snapshot", "-a", "small"]);
    compare(&qemu, dir, "back to the smaller one");
    assert_eq!(qemu.info(dir, IMAGE)["virtual-size"], 4 << 20);
    qemu.io(dir, "", IMAGE, &["read -b -P 7 0 300k"]).ok();
    both(&["snapshot", "-a", "large"]);
    compare(&qemu, dir, "to the larger one");
    both(&["snapshot", "-d", "small"]);
    both(&["snapshot", "-d", "large"]);
    compare(&qemu, dir, "none left");
}

#[test]
fn refusals_name_what_is_in_the_way() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("snapshots");
    let dir = scratch.path();
    let refused = |options: &str, words: &[&str]| {
        let _ = std::fs::remove_file(dir.join(IMAGE));
        qemu.create(dir, IMAGE, "qcow2", options, 1 << 20);
        qemu.io(dir, "", IMAGE, &["write 0 1M"]).ok();
        let out = run_zebu(dir, &["snapshot".into(), "-c".into(), "x".into(), IMAGE.into()]);
        assert_eq!(out.code, Some(1), "{out}");
        for word in words {
            assert!(out.stderr.contains(word), "{word}: {out}");
        }
        assert_eq!(out.stderr.lines().count(), 1, "{out}");
        qemu.check_clean(dir, IMAGE).unwrap();
        assert_eq!(qemu.info(dir, IMAGE)["dirty-flag"], false);
    };
    refused("refcount_bits=1", &["refcounts of 1 bit", "refcount_bits=1"]);
    refused("data_file=data.bin", &["external data file"]);
}
