//! Images on block devices, which can't grow, and which hold what somebody left there. QEMU judges.

use serde_json::Value;
use zebu_tests::device::{Device, LoopDevice};
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;

fn io(device: &Device, commands: &[&str]) {
    let name = device.name();
    let mut args = vec!["io", "-f", "qcow2", name];
    args.extend(commands.iter().flat_map(|command| ["-c", command]));
    zebu(device.dir(), args).ok();
}

/// An L1 table of four clusters, and a second one for a snapshot, and a third one for a larger disk.
#[test]
fn tables_longer_than_a_cluster_find_a_place() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(device) = Device::used(32 << 20) else { return };
    let (dir, name) = (device.dir(), device.name());
    zebu(dir, ["create", "-q", "-f", "qcow2", name, "16T"]).ok();
    io(&device, &["write -q -P 1 0 1M", "write -q -P 2 10T 1M"]);
    zebu(dir, ["snapshot", "-c", "before", name]).ok();
    io(&device, &["write -q -P 3 64k 64k"]);
    zebu(dir, ["resize", "-q", "-f", "qcow2", name, "40T"]).ok();
    io(&device, &["write -q -P 4 39T 100k"]);
    qemu.check_clean(dir, name).expect("clean");
    let reads =
        ["read -P 1 0 64k", "read -P 3 64k 64k", "read -P 2 10T 1M", "read -P 4 39T 100k", "read -P 0 2M 1M"];
    qemu.io(dir, "-f qcow2", name, &reads).ok();
    zebu(dir, ["snapshot", "-d", "before", name]).ok();
    qemu.check_clean(dir, name).expect("clean without the snapshot");
    // Used space that nobody refers to any more is found when the image is opened again.
    io(&device, &["write -q -P 5 1T 20M"]);
    qemu.check_clean(dir, name).expect("clean when nearly full");
}

/// A refcount table of one small cluster counts 8 MiB; it moves as the device fills.
#[test]
fn the_refcount_table_moves() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(device) = Device::used(40 << 20) else { return };
    let (dir, name) = (device.dir(), device.name());
    zebu(dir, ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", name, "64M"]).ok();
    for (at, pattern) in [(0, 1), (8, 2), (16, 3), (24, 4)] {
        io(&device, &[&format!("write -q -P {pattern} {at}M 8M")]);
        qemu.check_clean(dir, name).unwrap_or_else(|e| panic!("{at} MiB: {e}"));
    }
    let reads =
        ["read -P 1 0 8M", "read -P 2 8M 8M", "read -P 3 16M 8M", "read -P 4 24M 8M", "read -P 0 32M 32M"];
    qemu.io(dir, "-f qcow2", name, &reads).ok();
}

/// The error of a full device leaves what was written, and room comes back with a discard.
#[test]
fn a_full_device_says_so_and_goes_on() {
    let Some(qemu) = Qemu::find() else { return };
    // Not a whole number of clusters: nothing lies in the rest.
    let Some(device) = Device::used((8 << 20) + 512 * 3) else { return };
    let (dir, name) = (device.dir(), device.name());
    zebu(dir, ["create", "-q", "-f", "qcow2", name, "64M"]).ok();
    io(&device, &["write -q -P 1 0 4M"]);
    let full = zebu(dir, ["io", "-f", "qcow2", name, "-c", "write -q -P 2 4M 8M"]);
    assert_ne!(full.code, Some(0), "{full}");
    assert!(full.stderr.contains("block device") || full.stdout.contains("No space"), "{full}");
    let checked = qemu.img(dir, ["check", "-q", name]);
    assert!([Some(0), Some(3)].contains(&checked.code), "{checked}");
    qemu.io(dir, "-f qcow2", name, &["read -P 1 0 4M"]).ok();
    io(&device, &["discard 0 2M", "write -q -P 3 20M 1M"]);
    qemu.io(dir, "-f qcow2", name, &["read -P 1 2M 2M", "read -P 3 20M 1M"]).ok();
}

/// Nothing of what was on a device before shows through an image whose clusters are set aside.
#[test]
fn preallocated_clusters_read_as_zero() {
    let Some(qemu) = Qemu::find() else { return };
    for mode in ["metadata", "falloc", "full"] {
        let (Some(device), Some(data)) = (Device::used(8 << 20), Device::used(8 << 20)) else { return };
        let (dir, name) = (device.dir(), device.name());
        let created =
            zebu(dir, ["create", "-q", "-f", "qcow2", "-o", &format!("preallocation={mode}"), name, "4M"]);
        if mode == "falloc" && created.code != Some(0) {
            // A device need not know how to reserve space.
            assert!(created.stderr.contains("Unsupported preallocation mode 'falloc'"), "{created}");
            assert!(created.stderr.contains("preallocation=full"), "{created}");
        } else {
            created.ok();
            qemu.io(dir, "-f qcow2", name, &["read -P 0 0 4M"]).ok();
            qemu.check_clean(dir, name).expect("clean");
        }
        if mode == "falloc" {
            continue;
        }
        let options = format!("preallocation={mode},data_file={}", data.name());
        zebu(dir, ["create", "-q", "-f", "qcow2", "-o", &options, "image.qcow2", "4M"]).ok();
        qemu.io(dir, "-f qcow2", "image.qcow2", &["read -P 0 0 4M"]).ok();
    }
}

/// Space on a device is set aside by writing it, or the mode is refused with QEMU's words, before anything is changed.
#[test]
fn a_device_is_thick_or_refuses_to_be() {
    const SIZE: u64 = 8 << 20;
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("thick");
    let (dir, file) = (scratch.path(), scratch.file("device.bin"));
    std::fs::write(&file, b"").expect("writable");
    let sparse = |len| {
        let opened = std::fs::File::options().write(true).open(&file).expect("there");
        opened.set_len(0).and_then(|()| opened.set_len(len)).expect("writable");
    };
    sparse(2 * SIZE);
    let Some(device) = LoopDevice::over(&file) else { return };
    let name = device.name();
    let used = || {
        use std::os::unix::fs::MetadataExt;
        std::fs::File::open(name).and_then(|device| device.sync_all()).expect("a device");
        std::fs::metadata(&file).expect("there").blocks() * 512
    };
    // Data, and zeroes of both kinds: stored and holes.
    let mut source = vec![7; SIZE as usize];
    source[1 << 20..3 << 20].fill(0);
    std::fs::write(scratch.file("source.raw"), &source).expect("writable");
    let holes = std::fs::File::options().write(true).open(scratch.file("source.raw")).expect("there");
    holes.set_len(5 << 20).and_then(|()| holes.set_len(SIZE)).expect("writable");

    for line in [
        "convert -f raw -O raw -o preallocation=falloc source.raw DEVICE",
        "create -f raw -o preallocation=falloc DEVICE 8M",
    ] {
        let line = line.replace("DEVICE", name);
        let (ours, theirs) = (zebu(dir, line.split_whitespace()), qemu.img_line(dir, &line));
        assert_eq!((ours.code, theirs.code), (Some(1), Some(1)), "{ours} {theirs}");
        for ran in [&ours, &theirs] {
            assert!(ran.stderr.contains("Unsupported preallocation mode 'falloc'"), "{ran}");
        }
    }
    for line in [
        "convert -f raw -O qcow2 -o preallocation=falloc source.raw DEVICE",
        "create -f qcow2 -o preallocation=falloc DEVICE 8M",
    ] {
        let ran = zebu(dir, line.replace("DEVICE", name).split_whitespace());
        assert_eq!(ran.code, Some(1), "{ran}");
        assert!(ran.stderr.contains("Unsupported preallocation mode 'falloc'"), "{ran}");
    }
    assert_eq!(used(), 0, "refused modes wrote something");

    for (format, line) in [
        ("raw", "create -q -f raw -o preallocation=full DEVICE 8M"),
        ("raw", "convert -f raw -O raw -o preallocation=full source.raw DEVICE"),
        ("qcow2", "create -q -f qcow2 -o preallocation=full DEVICE 8M"),
        ("qcow2", "convert -f raw -O qcow2 -o preallocation=full source.raw DEVICE"),
    ] {
        sparse(2 * SIZE);
        zebu(dir, line.replace("DEVICE", name).split_whitespace()).ok();
        assert!(used() >= SIZE, "{line}: {} bytes are set aside", used());
        if format == "qcow2" {
            qemu.check_clean(dir, name).expect("clean");
        }
        let expected = if line.starts_with("create") {
            vec![0; SIZE as usize]
        } else {
            std::fs::read(scratch.file("source.raw")).expect("there")
        };
        qemu.img_line(dir, &format!("convert -f {format} -O raw {name} copy.raw")).ok();
        let copy = std::fs::read(scratch.file("copy.raw")).expect("there");
        assert!(copy[..SIZE as usize] == expected, "{line}");
    }
    // Without it, zeroes are given back.
    sparse(2 * SIZE);
    zebu(dir, ["convert", "-f", "raw", "-O", "raw", "source.raw", name]).ok();
    assert!(used() < SIZE, "{}", used());
}

/// The size that `measure` predicts is enough, however large the clusters are and whatever is written at the same time.
#[test]
fn an_image_fits_where_measure_says_that_it_does() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("measured");
    let (dir, file) = (scratch.path(), scratch.file("device.bin"));
    // Nothing of it can be left out.
    std::fs::write(scratch.file("source.raw"), vec![7; 41 << 20]).expect("writable");
    for options in
        ["cluster_size=64k", "cluster_size=2M", "cluster_size=2M,extended_l2=on", "cluster_size=1M"]
    {
        let line = format!("measure --output json -f raw -O qcow2 -o {options} source.raw");
        let said: Value =
            serde_json::from_str(&zebu(dir, line.split_whitespace()).ok().stdout).expect("JSON");
        let required = said["required"].as_u64().expect("a number");
        std::fs::write(&file, b"").expect("writable");
        std::fs::File::options().write(true).open(&file).and_then(|f| f.set_len(required)).expect("writable");
        let Some(device) = LoopDevice::over(&file) else { return };
        for copying in ["", "-m 2", "", "-m 16 --workers 4", "", "-S 0", "", "--buffer-memory 2M"] {
            let line = format!("convert {copying} -f raw -O qcow2 -o {options} source.raw {}", device.name());
            zebu(dir, line.split_whitespace()).ok();
        }
        let line = format!("compare -f raw -F qcow2 source.raw {}", device.name());
        qemu.img_line(dir, &line).ok();
    }
}

/// The page cache reads around what is asked for: a bad sector would take what lies beside it along.
#[test]
fn what_a_device_can_read_is_salvaged() {
    const SIZE: usize = 16 << 20;
    const GOOD: usize = (8 << 20) + 131_072 + 1536;
    let scratch = Scratch::new("salvage");
    let dir = scratch.path();
    let bytes: Vec<u8> = (0..SIZE as u32 / 4).flat_map(|n| (n | 1 << 31).to_le_bytes()).collect();
    for job in ["convert --salvage -O raw", "backup --skip-errors"] {
        std::fs::write(scratch.file("device.bin"), &bytes).expect("writable");
        let Some(device) = LoopDevice::over(&scratch.file("device.bin")) else { return };
        let file = std::fs::File::options().write(true).open(scratch.file("device.bin")).expect("there");
        file.set_len(GOOD as u64).expect("writable");
        let mut flush = std::process::Command::new("blockdev");
        assert!(flush.args(["--flushbufs", device.name()]).status().expect("blockdev").success());
        let line = format!("{job} -f raw --output json {} out", device.name());
        let report: Value = serde_json::from_str(&zebu(dir, line.split(' ')).ok().stdout).expect("a report");
        let lost = report["unreadable"].as_u64().expect("a number") as usize;
        // A backup gives up blocks of 4 KiB.
        let block = if job.starts_with("backup") { 4096 } else { 512 };
        let readable = GOOD / block * block;
        assert!(lost > 0 && lost <= SIZE - readable, "{job}: {} bytes too many", lost + readable - SIZE);
        if job.starts_with("convert") {
            let copy = std::fs::read(scratch.file("out")).expect("there");
            assert!(copy[..readable] == bytes[..readable], "{job}");
        }
        std::fs::remove_file(scratch.file("out")).expect("there");
    }
}
