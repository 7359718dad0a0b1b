//! Preallocation where something is there already: the cluster that the disk ended in, and a backing image. QEMU judges.

use std::path::Path;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;

const MODES: [&str; 3] = ["metadata", "falloc", "full"];

fn zebu_line(dir: &Path, line: &str) {
    zebu(dir, line.split_whitespace()).ok();
}

/// The disk ends within a cluster: what is in front of the old end stays, whatever holds it, and what is behind is zero.
#[test]
fn growth_with_preallocation_keeps_the_cluster_that_the_disk_ended_in() {
    const OLD: u64 = 100 << 10;
    const NEW: u64 = 300 << 10;
    let Some(qemu) = Qemu::find() else { return };
    for mode in MODES {
        for (options, prepare) in [
            ("cluster_size=64k", "write -q -P 7 0 100k"),
            ("cluster_size=64k", "write -q -c -P 7 0 100k"),
            ("cluster_size=64k", "write -q -z 0 100k"),
            ("cluster_size=64k,extended_l2=on", "write -q -P 7 96k 4k"),
            ("cluster_size=64k,extended_l2=on", "write -q -P 7 0 100k"),
            ("cluster_size=64k,data_file=data.bin", "write -q -P 7 0 100k"),
            ("cluster_size=64k,data_file=data.bin,data_file_raw=on", "write -q -P 7 0 100k"),
        ] {
            for snapshot in [false, true] {
                if snapshot && options.contains("data_file") {
                    continue;
                }
                let scratch = Scratch::new("preallocation");
                let dir = scratch.path();
                let what = format!("{mode}, {options}, {prepare}, snapshot {snapshot}");
                qemu.img_line(dir, &format!("create -q -f qcow2 -o {options} disk.qcow2 {OLD}")).ok();
                qemu.io(dir, "-f qcow2", "disk.qcow2", &[prepare]).ok();
                qemu.img_line(dir, "convert -f qcow2 -O raw disk.qcow2 expected.raw").ok();
                qemu.img_line(dir, &format!("resize -q -f raw expected.raw {NEW}")).ok();
                if snapshot {
                    qemu.img_line(dir, "snapshot -c before disk.qcow2").ok();
                }
                zebu_line(dir, &format!("resize -q -f qcow2 --preallocation={mode} disk.qcow2 {NEW}"));
                let compared = qemu.img_line(dir, "compare -f qcow2 -F raw disk.qcow2 expected.raw");
                assert!(compared.code == Some(0), "{what}: {compared}");
                qemu.check_clean(dir, "disk.qcow2").unwrap_or_else(|e| panic!("{what}: {e}"));
            }
        }
    }
}

/// The same with a base that shows through the part of the cluster in front of the old end, and nothing behind it.
#[test]
fn growth_with_preallocation_leaves_what_shows_through_the_cluster_that_the_disk_ended_in() {
    let Some(qemu) = Qemu::find() else { return };
    for mode in MODES {
        let scratch = Scratch::new("preallocation");
        let dir = scratch.path();
        qemu.img_line(dir, "create -q -f qcow2 base.qcow2 100k").ok();
        qemu.io(dir, "-f qcow2", "base.qcow2", &["write -q -P 7 0 100k"]).ok();
        zebu_line(dir, "create -q -f qcow2 -b base.qcow2 -F qcow2 disk.qcow2 100k");
        zebu_line(dir, &format!("resize -q -f qcow2 --preallocation={mode} disk.qcow2 300k"));
        qemu.io(dir, "-f qcow2", "disk.qcow2", &["read -P 7 0 100k", "read -P 0 100k 200k"]).ok();
        qemu.check_clean(dir, "disk.qcow2").unwrap_or_else(|e| panic!("{mode}: {e}"));
        // Of whole clusters the base's data can't be hidden.
        let line = format!("create -q -f qcow2 -o preallocation={mode} -b base.qcow2 -F qcow2 new.qcow2 1M");
        assert_ne!(zebu(dir, line.split_whitespace()).code, Some(0), "{mode}: created over data");
    }
}

/// The rest of a raw data file that is longer than the disk is no part of the disk.
#[test]
fn growth_over_a_longer_data_file_reads_as_zero() {
    let Some(qemu) = Qemu::find() else { return };
    for mode in MODES {
        let scratch = Scratch::new("preallocation");
        let dir = scratch.path();
        qemu.img_line(dir, "create -q -f qcow2 -o data_file=data.bin disk.qcow2 1M").ok();
        std::fs::write(scratch.file("data.bin"), vec![0x55; 4 << 20]).expect("writable");
        zebu_line(dir, &format!("resize -q -f qcow2 --preallocation={mode} disk.qcow2 3M"));
        qemu.io(dir, "-f qcow2", "disk.qcow2", &["read -P 0 1M 2M"]).ok();
    }
}

/// A raw data file holds the disk by itself, where the disk grew over what the file had behind its end, too.
#[test]
fn a_grown_raw_data_file_holds_the_disk_by_itself() {
    let Some(qemu) = Qemu::find() else { return };
    for mode in ["off", "metadata"] {
        let scratch = Scratch::new("preallocation");
        let dir = scratch.path();
        for (image, data) in [("disk.qcow2", "data.bin"), ("qemu.qcow2", "qemu.bin")] {
            let options = format!("data_file={data},data_file_raw=on");
            qemu.img_line(dir, &format!("create -q -f qcow2 -o {options} {image} 1M")).ok();
            qemu.io(dir, "-f qcow2", image, &["write -q -P 7 100k 500k"]).ok();
            let mut bytes = std::fs::read(scratch.file(data)).expect("readable");
            bytes.resize(4 << 20, 0x55);
            std::fs::write(scratch.file(data), bytes).expect("writable");
        }
        zebu_line(dir, &format!("resize -q -f qcow2 --preallocation={mode} disk.qcow2 3M"));
        qemu.img_line(dir, &format!("resize -q -f qcow2 --preallocation={mode} qemu.qcow2 3M")).ok();
        qemu.check_clean(dir, "disk.qcow2").unwrap_or_else(|e| panic!("{mode}: {e}"));
        qemu.io(dir, "-f qcow2", "disk.qcow2", &["read -P 7 100k 500k", "read -P 0 1M 2M"]).ok();
        qemu.io(dir, "-f raw", "data.bin", &["read -P 7 100k 500k", "read -P 0 1M 2M"]).ok();
        let allocated = |image: &str| {
            let checked = qemu.img_line(dir, &format!("check -f qcow2 --output=json {image}")).ok();
            let json: serde_json::Value = serde_json::from_str(&checked.stdout).expect("JSON");
            (json["allocated-clusters"].clone(), json["total-clusters"].clone())
        };
        assert_eq!(allocated("disk.qcow2"), allocated("qemu.qcow2"), "{mode}");
    }
}

/// With subclusters, places can be set aside while the base still shows through; as QEMU does it.
#[test]
fn an_overlay_with_subclusters_can_be_preallocated() {
    let Some(qemu) = Qemu::find() else { return };
    for mode in MODES {
        let scratch = Scratch::new("preallocation");
        let dir = scratch.path();
        qemu.img_line(dir, "create -q -f raw base.raw 5000k").ok();
        qemu.io(dir, "-f raw", "base.raw", &["write -q -P 7 100k 3M"]).ok();
        let options = format!("-o extended_l2=on,cluster_size=64k,preallocation={mode} -b base.raw -F raw");
        zebu_line(dir, &format!("create -q -f qcow2 {options} disk.qcow2 6M"));
        qemu.img_line(dir, &format!("create -q -f qcow2 {options} qemu.qcow2 6M")).ok();
        qemu.check_clean(dir, "disk.qcow2").unwrap_or_else(|e| panic!("{mode}: {e}"));
        for image in ["disk.qcow2", "qemu.qcow2"] {
            let compared = qemu.img_line(dir, &format!("compare -f raw -F qcow2 base.raw {image}"));
            assert!(compared.code == Some(0), "{mode}: {image}: {compared}");
        }
        let allocated = |image: &str| {
            let checked = qemu.img_line(dir, &format!("check -f qcow2 --output=json {image}")).ok();
            let json: serde_json::Value = serde_json::from_str(&checked.stdout).expect("JSON");
            (json["allocated-clusters"].clone(), json["total-clusters"].clone())
        };
        assert_eq!(allocated("disk.qcow2"), allocated("qemu.qcow2"), "{mode}");
        // No cluster is allocated by a write: the places are there.
        let before = std::fs::metadata(scratch.file("disk.qcow2")).expect("there").len();
        let writes = ["write -q -P 9 200k 4k", "write -q -P 9 3300k 1000", "write -q -P 9 5500k 100k"];
        let mut args = vec!["io", "-f", "qcow2", "disk.qcow2"];
        args.extend(writes.iter().flat_map(|write| ["-c", write]));
        zebu(dir, args).ok();
        assert_eq!(std::fs::metadata(scratch.file("disk.qcow2")).expect("there").len(), before, "{mode}");
        let reads = [
            "read -P 0 0 100k",
            "read -P 7 100k 100k",
            "read -P 9 200k 4k",
            "read -P 7 204k 2968k",
            "read -P 0 3172k 128k",
            "read -P 9 3300k 1000",
            "read -P 0 3380200 2251800",
            "read -P 9 5500k 100k",
            "read -P 0 5600k 544k",
        ];
        qemu.io(dir, "-f qcow2", "disk.qcow2", &reads).ok();
        qemu.check_clean(dir, "disk.qcow2").unwrap_or_else(|e| panic!("{mode}, written: {e}"));
    }
}
