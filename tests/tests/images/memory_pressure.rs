//! Commands that have little more memory than they say that they need, page cache included.

use std::path::Path;
use std::process::{Command, Stdio};
use zebu_tests::memory_group::MemoryGroup;
use zebu_tests::program::{finish_with, zebu, zebu_program};
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

const MIB: u64 = 1 << 20;
/// The need of a backup beside its buffers (docs/guide/backup.md).
const BESIDE_BUFFERS: u64 = 32 * MIB;
const BUFFERS: u64 = 16 * MIB;

/// A disk of random bytes, larger than all memory that a command gets.
fn write_disk(path: &Path) {
    let mut bytes = vec![0; 256 * MIB as usize];
    Random::new(48).fill(&mut bytes);
    std::fs::write(path, bytes).expect("scratch is writable");
}

#[test]
fn a_fifth_more_than_the_need_is_enough() {
    let scratch = Scratch::new("pressure");
    let dir = scratch.path();
    write_disk(&scratch.file("disk.raw"));
    let Some(group) = MemoryGroup::new("pressure", (BUFFERS + BESIDE_BUFFERS) * 6 / 5) else { return };
    for line in [
        "backup -f raw --buffer-memory 16M disk.raw 1.qcow2",
        "convert -f raw -O qcow2 --buffer-memory 16M disk.raw 2.qcow2",
        "convert -f raw -O qcow2 -t none -T none --buffer-memory 16M disk.raw 3.qcow2",
        "convert -c -f raw -O qcow2 --buffer-memory 16M disk.raw 4.qcow2",
        "check 2.qcow2",
        "compare -f raw -F qcow2 disk.raw 2.qcow2",
        "convert -f qcow2 -O raw 4.qcow2 5.raw",
    ] {
        let mut command = Command::new(zebu_program());
        command.args(line.split(' ')).current_dir(dir);
        group.hold(&mut command);
        finish_with(command, Stdio::null()).ok();
        assert_eq!(group.kills(), 0, "{line}");
    }
    for image in ["1.qcow2", "2.qcow2", "3.qcow2", "4.qcow2"] {
        zebu(dir, ["compare", "-q", "-f", "raw", "-F", "qcow2", "disk.raw", image]).ok();
    }
    zebu(dir, ["compare", "-q", "-f", "raw", "-F", "raw", "disk.raw", "5.raw"]).ok();
}
