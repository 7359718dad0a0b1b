//! Images that were used for long. `cargo xtask aged` has them older and larger.

use zebu_tests::aged_commands::judge;
use zebu_tests::aging::AgedDisk;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;

fn aged(options: &str, operations: u64, seed: u64) {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("aged");
    let size = 96 << 20;
    qemu.create(scratch.path(), "aged", "qcow2", options, size);
    let mut disk = AgedDisk::new(&scratch.file("aged"), size, seed);
    disk.age(operations)
        .and_then(|()| judge(&qemu, scratch.path(), "aged", &disk))
        .unwrap_or_else(|what| panic!("{what}"));
}

#[test]
fn an_aged_image_works_with_every_command() {
    aged("", 10_000, 1);
}

#[test]
fn an_aged_image_of_small_clusters_works_with_every_command() {
    aged("cluster_size=4k", 10_000, 2);
}

#[test]
fn an_aged_image_with_subclusters_works_with_every_command() {
    aged("extended_l2=on,cluster_size=128k", 10_000, 3);
}
