//! Images at the limits of the format, and at what lies one beyond: as QEMU.

use std::path::Path;
use zebu_tests::mount::Mounted;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patch::{Patch, header};
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const TIB: u64 = 1 << 40;
/// The length of a trim.
const TRIM: u64 = 2 << 30;
/// Snapshots that an image may have (QEMU).
const MOST_SNAPSHOTS: u32 = 65_536;

/// Writes with one program and reads with the other.
fn write_and_read(qemu: &Qemu, dir: &Path, image: &str, at: &[u64]) {
    for (index, offset) in at.iter().enumerate() {
        let byte = index + 1;
        zebu(dir, ["io", "-f", "qcow2", "-c", &format!("write -q -P {byte} {offset} 70k"), image]).ok();
        let read = format!("read -q -P {byte} {offset} 70k");
        let out = qemu.io(dir, "-r -f qcow2", image, &[&read]).ok();
        assert!(!out.stdout.contains("failed"), "{offset}: {out}");
    }
}

/// ext4 has files of up to 16 TiB.
#[test]
fn a_file_of_64_tib() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 2 << 30) else { return };
    let dir = xfs.path();
    let options = "preallocation=metadata,cluster_size=2M";
    zebu(&dir, ["create", "-q", "-f", "qcow2", "-o", options, "big.qcow2", "64T"]).ok();
    let len = std::fs::metadata(dir.join("big.qcow2")).unwrap().len();
    assert!(len >= 64 * TIB, "{len} bytes");
    write_and_read(&qemu, &dir, "big.qcow2", &[0, 33 * TIB - 4096, 64 * TIB - (70 << 10)]);
    qemu.check_clean(&dir, "big.qcow2").unwrap();
    zebu(&dir, ["check", "-q", "big.qcow2"]).ok();
    // What is new lies behind all of it.
    zebu(&dir, ["resize", "-q", "big.qcow2", "+4T"]).ok();
    write_and_read(&qemu, &dir, "big.qcow2", &[65 * TIB, 68 * TIB - (70 << 10), 12345 * 4096]);
    let server = Server::start(&dir, "-f qcow2 big.qcow2");
    let mut client = Client::open(server.socket(), "").unwrap();
    for offset in (30 * TIB..34 * TIB).step_by(TRIM as usize) {
        assert_eq!(client.call(0, command::TRIM, offset, TRIM).unwrap().error, 0, "{offset}");
    }
    server.stop();
    qemu.check_clean(&dir, "big.qcow2").unwrap();
}

/// An L1 table of 32 MiB maps 128 GiB in clusters of 512 bytes.
#[test]
fn the_largest_l1_table_and_one_entry_more() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("large");
    let dir = scratch.path();
    let most: u64 = 128 << 30;
    let create = |program: &str, size: u64| {
        let size = size.to_string();
        let words = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "image.qcow2", &size];
        if program == "zebu" { zebu(dir, words) } else { qemu.img(dir, words) }
    };
    for program in ["zebu", "qemu-img"] {
        let out = create(program, most + 512);
        assert_eq!(out.code, Some(1), "{program}: {out}");
        create(program, most).ok();
        write_and_read(&qemu, dir, "image.qcow2", &[0, most / 3 / 512 * 512, most - (70 << 10)]);
        qemu.check_clean(dir, "image.qcow2").unwrap();
        let out = zebu(dir, ["resize", "-q", "image.qcow2", "+512"]).exits(1);
        assert!(out.stderr.contains("large"), "{out}");
        assert_eq!(qemu.img(dir, ["resize", "-q", "-f", "qcow2", "image.qcow2", "+512"]).code, Some(1));
        qemu.check_clean(dir, "image.qcow2").unwrap();
    }
}

/// Adds as many snapshots of an empty disk as an image may have.
fn fill_with_snapshots(path: &Path, clusters: u64) {
    let image = Patch::open(path);
    let mut table = Vec::new();
    for number in 1..=MOST_SNAPSHOTS {
        let (id, name) = (number.to_string(), format!("s{number}"));
        // No L1 table; 16 bytes of extra data: no state of a machine, and no bytes of the disk.
        table.extend([0; 12]);
        table.extend((id.len() as u16).to_be_bytes());
        table.extend((name.len() as u16).to_be_bytes());
        table.extend([0; 20]);
        table.extend(16u32.to_be_bytes());
        table.extend([0; 16]);
        table.extend(id.as_bytes());
        table.extend(name.as_bytes());
        table.resize(table.len().next_multiple_of(8), 0);
    }
    let at = clusters << 16;
    image.set(at, &table).truncate((at + table.len() as u64).next_multiple_of(1 << 16));
    for cluster in clusters..clusters + (table.len() as u64).div_ceil(1 << 16) {
        image.set(image.refcount_offset(cluster), &1u16.to_be_bytes());
    }
    image.set_u32(header::SNAPSHOT_COUNT, MOST_SNAPSHOTS).set_u64(header::SNAPSHOTS_OFFSET, at);
}

#[test]
fn as_many_snapshots_as_an_image_may_have_and_one_more() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("large");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", "image.qcow2", "1M"]).ok();
    let len = std::fs::metadata(scratch.file("image.qcow2")).unwrap().len();
    fill_with_snapshots(&scratch.file("image.qcow2"), len.div_ceil(1 << 16));
    qemu.check_clean(dir, "image.qcow2").unwrap();
    let lines = zebu(dir, ["snapshot", "-l", "image.qcow2"]).ok().stdout.lines().count();
    assert_eq!(lines, qemu.img(dir, ["snapshot", "-l", "image.qcow2"]).ok().stdout.lines().count());
    assert!(lines as u32 > MOST_SNAPSHOTS);
    let out = zebu(dir, ["snapshot", "-c", "more", "image.qcow2"]).exits(1);
    assert!(out.stderr.contains("Snapshot table too large"), "{out}");
    assert_eq!(qemu.img(dir, ["snapshot", "-c", "more", "image.qcow2"]).code, Some(1));
    qemu.check_clean(dir, "image.qcow2").unwrap();
    zebu(dir, ["snapshot", "-d", "s777", "image.qcow2"]).ok();
    zebu(dir, ["snapshot", "-c", "more", "image.qcow2"]).ok();
    write_and_read(&qemu, dir, "image.qcow2", &[0]);
    qemu.check_clean(dir, "image.qcow2").unwrap();
}
