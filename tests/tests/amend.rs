//! `amend` by zebu and by qemu-img on a copy: the same exit codes, properties, content and snapshots; clean by QEMU's check.

use serde_json::Value;
use zebu_tests::images::{Feature, IMAGE, Shape};
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

const REFERENCE: &str = "reference.qcow2";

const FEATURES: [Feature; 7] = [
    Feature::Plain,
    Feature::ExtendedL2,
    Feature::Zlib,
    Feature::BackingRaw,
    Feature::BackingChain,
    Feature::LazyRefcounts,
    Feature::Snapshot,
];

fn properties(info: &Value) -> Vec<Value> {
    let data = &info["format-specific"]["data"];
    [
        &info["virtual-size"],
        &info["backing-filename"],
        &data["compat"],
        &data["refcount-bits"],
        &data["lazy-refcounts"],
    ]
    .map(Value::clone)
    .to_vec()
}

fn matrix(version: u32, cluster: u64, refcount_bits: u32) {
    let Some(qemu) = Qemu::find() else { return };
    for feature in FEATURES {
        let shape = Shape { version, cluster, refcount_bits, feature };
        if !shape.is_legal() {
            continue;
        }
        let seed = cluster ^ u64::from(version * 100 + refcount_bits);
        let scratch = Scratch::new("amend");
        let dir = scratch.path();
        shape.make(&qemu, dir, seed);
        std::fs::copy(dir.join(IMAGE), dir.join(REFERENCE)).unwrap();
        let mut random = Random::new(seed);
        let mut before = qemu.read_all(dir, IMAGE, None);
        for step in 0..4 {
            let option = match random.below(5) {
                0 => "compat=0.10".to_owned(),
                1 => "compat=1.1".to_owned(),
                2 => format!("refcount_bits={}", random.pick(&[1, 2, 4, 8, 16, 16, 32, 64])),
                3 => format!("lazy_refcounts={}", random.pick(&["on", "off"])),
                _ => {
                    let size = before.len() as u64 + 65536 * random.below(3);
                    format!("size={size}")
                }
            };
            let what = format!("{shape}, step {step}, {option}");
            let ours = zebu(dir, ["amend", "-o", &option, IMAGE]);
            // zebu does not look for zero clusters in snapshots.
            let is_refused = ours.stderr.contains("internal snapshots (zebu");
            if is_refused {
                assert!(feature == Feature::Snapshot && option == "compat=0.10", "{what}: {ours}");
                continue;
            }
            let theirs = qemu.img(dir, ["amend", "-o", &option, REFERENCE]);
            assert_eq!(ours.code, theirs.code, "{what}: {ours}\n{theirs}");
            qemu.check_clean(dir, IMAGE).unwrap_or_else(|e| panic!("{what}: {e}"));
            let infos = [IMAGE, REFERENCE].map(|image| properties(&qemu.info(dir, image)));
            assert_eq!(infos[0], infos[1], "{what}");
            let after = qemu.read_all(dir, IMAGE, None);
            before.resize(after.len(), 0);
            assert!(before == after, "{what}: the content has changed");
            // And it can still be written.
            let write =
                format!("write -P {} {} 512", step + 1, random.below(before.len() as u64 / 512) * 512);
            zebu(dir, ["io", "-c", &write, IMAGE]).ok();
            qemu.io(dir, "", REFERENCE, &[write]).ok();
            before = qemu.read_all(dir, IMAGE, None);
            assert!(before == qemu.read_all(dir, REFERENCE, None), "{what}: after a write");
        }
    }
}

#[test]
fn version_2() {
    matrix(2, 512, 16);
    matrix(2, 65536, 16);
}

#[test]
fn version_3() {
    matrix(3, 512, 16);
    matrix(3, 65536, 1);
    matrix(3, 65536, 64);
}

#[test]
fn refusals_name_the_reason_and_change_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("amend");
    let dir = scratch.path();
    qemu.create(dir, "base.qcow2", "qcow2", "", 1 << 20);
    qemu.create(dir, "v3.qcow2", "qcow2", "backing_file=base.qcow2,backing_fmt=qcow2", 1 << 20);
    qemu.create(dir, "v2.qcow2", "qcow2", "compat=0.10", 1 << 20);
    qemu.create(dir, "data.qcow2", "qcow2", "data_file=data.raw", 1 << 20);
    qemu.create(dir, "zstd.qcow2", "qcow2", "compression_type=zstd", 1 << 20);
    qemu.create(dir, "narrow.qcow2", "qcow2", "", 1 << 20);
    qemu.io(dir, "", "narrow.qcow2", &["write 0 64k"]).ok();
    qemu.img(dir, ["snapshot", "-c", "x", "narrow.qcow2"]).ok();
    std::fs::write(dir.join("disk.raw"), vec![1; 65536]).unwrap();
    let files = ["v3.qcow2", "v2.qcow2", "data.qcow2", "zstd.qcow2", "narrow.qcow2", "disk.raw"];
    let before: Vec<Vec<u8>> = files.iter().map(|name| std::fs::read(dir.join(name)).unwrap()).collect();
    for (line, word) in [
        ("amend v3.qcow2", "-o"),
        ("amend -o backing_file=other.qcow2 v3.qcow2", "zebu rebase"),
        ("amend -o backing_fmt=raw v3.qcow2", "zebu rebase"),
        ("amend -o cluster_size=4k v3.qcow2", "cluster_size"),
        ("amend -o nosuch=1 v3.qcow2", "nosuch"),
        ("amend -o encrypt.state=active v3.qcow2", "new-secret"),
        ("amend -o encrypt.state=inactive,encrypt.keyslot=0 v3.qcow2", "not encrypted with LUKS"),
        ("amend -o encrypt.nosuch=1 v3.qcow2", "encrypt.nosuch"),
        ("amend -o compat=2.0 v3.qcow2", "2.0"),
        ("amend -o size=512k v3.qcow2", "--shrink"),
        ("amend -o refcount_bits=3 v3.qcow2", "power of two"),
        ("amend -o refcount_bits=8,compat=0.10 v3.qcow2", "refcount_bits=16"),
        ("amend -o refcount_bits=8 v2.qcow2", "compat=1.1"),
        ("amend -o lazy_refcounts=on v2.qcow2", "compat=1.1"),
        ("amend -o data_file=x v3.qcow2", "external data file"),
        ("amend -o compat=0.10 data.qcow2", "data file"),
        ("amend -o data_file_raw=on data.qcow2", "data-file-raw"),
        ("amend -o compat=0.10 zstd.qcow2", "compression"),
        ("amend -o refcount_bits=1 narrow.qcow2", "2 references"),
        ("amend -f raw -o size=1M disk.raw", "raw"),
        ("amend -o size=1M gone.qcow2", "gone.qcow2"),
    ] {
        let out = zebu(dir, line.split_whitespace()).exits(1);
        let message = out.stderr.lines().next().unwrap_or_default();
        assert!(message.contains(word), "{word}: {out}");
        for (name, bytes) in files.iter().zip(&before) {
            assert!(std::fs::read(dir.join(name)).unwrap() == *bytes, "{name} changed: {out}");
        }
    }
    assert!(zebu(dir, ["amend", "-o", "help"]).ok().stdout.contains("refcount_bits"));
    // What is given as it is, is no change.
    zebu(dir, ["amend", "-o", "backing_file=base.qcow2,backing_fmt=qcow2", "v3.qcow2"]).ok();
    zebu(dir, ["amend", "-o", "data_file=moved.raw,data_file_raw=off", "data.qcow2"]).ok();
    assert_eq!(qemu.info(dir, "data.qcow2")["format-specific"]["data"]["data-file"], "moved.raw");
}
