//! Images on block devices, which can't grow, and which hold what somebody left there. QEMU judges.

use zebu_tests::device::Device;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;

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
