//! `amend` by zebu and by qemu-img on a copy: the same exit codes, properties, content and snapshots; clean by QEMU's check. Key slots of
//! encrypted images, which each opens after the other.

use serde_json::Value;
use std::os::unix::process::CommandExt;
use zebu_tests::encrypted::{encrypt_options, of, run_qemu, run_zebu, with_objects};
use zebu_tests::images::{Feature, IMAGE, Shape};
use zebu_tests::program::{finish, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::tenth;

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
    let shapes = FEATURES.map(|feature| Shape { version, cluster, refcount_bits, feature });
    for shape in tenth::of(shapes.into_iter().filter(Shape::is_legal), Shape::first(version, cluster)) {
        let (seed, feature) = (cluster ^ u64::from(version * 100 + refcount_bits), shape.feature);
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

/// Keys that one program adds or removes are there or gone for the other.
#[test]
fn key_slots_are_changed_by_each() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    for (file, prefix) in [("a.luks", ""), ("a.qcow2", "encrypt.")] {
        let format = file.rsplit('.').next().unwrap();
        let more = if format == "qcow2" { ",encrypt.format=luks" } else { "" };
        run_zebu(dir, &format!("create -q -f {format} -o {}{more} {file} 1M", encrypt_options("", prefix)))
            .ok();
        let opens = |key: &str| {
            let ours = run_zebu(dir, &format!("map --image-opts {} --output=json", of(file, key))).code;
            let theirs =
                run_qemu(&qemu, dir, &format!("map --image-opts {} --output=json", of(file, key))).code;
            assert_eq!(ours, theirs, "{file} {key}");
            ours == Some(0)
        };
        let amend = |key: &str, options: &str| {
            let options: Vec<String> = options.split(',').map(|option| format!("{prefix}{option}")).collect();
            format!("amend --image-opts {} -o {}", of(file, key), options.join(","))
        };
        assert!(opens("one") && !opens("two"));
        run_zebu(dir, &amend("one", "state=active,new-secret=two,iter-time=10,keyslot=3")).ok();
        assert!(opens("one") && opens("two"));
        run_qemu(&qemu, dir, &amend("two", "state=inactive,keyslot=0")).ok();
        assert!(!opens("one") && opens("two"));
        run_qemu(&qemu, dir, &amend("two", "state=active,new-secret=one,iter-time=10")).ok();
        run_zebu(dir, &amend("one", "state=inactive,old-secret=two")).ok();
        assert!(opens("one") && !opens("two"));
        // The last key stays.
        for options in [
            "state=inactive,keyslot=0",
            "state=inactive,old-secret=one",
            "state=inactive,keyslot=5",
            "state=inactive,keyslot=8",
            "state=inactive",
            "state=active",
            "state=active,new-secret=two,keyslot=0",
            "state=active,new-secret=two,old-secret=one",
        ] {
            let ours = run_zebu(dir, &amend("one", options)).exits(1).stderr;
            let theirs = run_qemu(&qemu, dir, &amend("one", options)).exits(1).stderr;
            assert!(ours.lines().count() == 1, "{options}: {ours}{theirs}");
        }
        assert!(opens("one") && !opens("two"));
        run_zebu(dir, &format!("{} --force", amend("one", "state=inactive,keyslot=0"))).ok();
        assert!(!opens("one"));
    }
}

/// Nobody erases a key without one that the image has. Under zebu's own name, that key opens a slot that stays.
#[test]
fn a_key_is_erased_with_a_key() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let other = ["--object", "secret,id=none,data=neither"].map(str::to_owned);
    for (file, prefix) in [("a.luks", ""), ("a.qcow2", "encrypt.")] {
        let format = file.rsplit('.').next().unwrap();
        let more = if format == "qcow2" { ",encrypt.format=luks" } else { "" };
        run_zebu(dir, &format!("create -q -f {format} -o {}{more} {file} 1M", encrypt_options("", prefix)))
            .ok();
        let amend = |name: &str, options: &str| {
            let options: Vec<String> = options.split(',').map(|option| format!("{prefix}{option}")).collect();
            let mut words = with_objects(&format!("amend --image-opts {name} -o {}", options.join(",")));
            words.splice(1..1, other.clone());
            words
        };
        zebu(dir, amend(&of(file, "one"), "state=active,new-secret=two,iter-time=10")).ok();
        let before = std::fs::read(dir.join(file)).unwrap();
        let nameless = of(file, "").replace(&format!("{prefix}key-secret=,"), "");
        for (name, part) in [(of(file, "none"), "Invalid password"), (nameless, "key-secret")] {
            for options in ["state=inactive,keyslot=1", "state=inactive,old-secret=two"] {
                for force in [&[][..], &["--force".to_owned()]] {
                    let words = [&amend(&name, options), force].concat();
                    let (ours, theirs) = (zebu(dir, &words).exits(1), qemu.img(dir, &words).exits(1));
                    assert!(ours.stderr.contains(part) && theirs.stderr.contains(part), "{ours}{theirs}");
                    assert!(std::fs::read(dir.join(file)).unwrap() == before, "{ours}");
                }
            }
        }
        for options in ["state=inactive,keyslot=1", "state=inactive,old-secret=two"] {
            let finished = zebu(dir, amend(&of(file, "two"), options)).exits(1);
            assert!(finished.stderr.contains("no key slot that stays"), "{finished}");
            assert!(std::fs::read(dir.join(file)).unwrap() == before, "{finished}");
        }
        zebu(dir, amend(&of(file, "one"), "state=inactive,keyslot=1")).ok();
        zebu(dir, amend(&of(file, "one"), "state=active,new-secret=two,iter-time=10")).ok();
        // Under QEMU's name its rule holds: any key will do.
        let mut command = std::process::Command::new(zebu_program());
        command.arg0("qemu-img").current_dir(dir);
        command.args(amend(&of(file, "two"), "state=inactive,keyslot=1"));
        finish(command).ok();
    }
}
