//! The memory that a check takes. One test in a process of its own, so that nothing else is measured.

use std::path::Path;
use std::process::Command;
use zebu_engine::check::{CheckOptions, CheckReport, check};
use zebu_engine::storage::{Worker, WorkerConfig};

const MIB: u64 = 1 << 20;

/// The most memory that this process has had so far, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// Lets the peak start again from what is in use.
fn reset_peak() {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
}

/// Checks, and says by how many bytes that raised the memory in use at most.
fn measured(path: &Path, options: &CheckOptions) -> (CheckReport, u64) {
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    reset_peak();
    let before = peak();
    let report = worker.block_on(check(&worker, path, options)).unwrap();
    (report, peak().saturating_sub(before))
}

fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().unwrap_or_else(|error| {
        panic!(
            "this test needs QEMU: qemu-img (Debian: apt-get install qemu-utils) does not run: {error}; \
             ZEBU_SKIP_QEMU=1 leaves it out"
        )
    });
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A header of version 3 with clusters of `1 << bits` bytes.
fn header(bits: u32) -> Vec<u8> {
    let mut header = vec![0; 112];
    header[..8].copy_from_slice(&[b'Q', b'F', b'I', 0xfb, 0, 0, 0, 3]);
    header[20..24].copy_from_slice(&bits.to_be_bytes());
    header[96..100].copy_from_slice(&4u32.to_be_bytes());
    header[100..104].copy_from_slice(&112u32.to_be_bytes());
    header
}

#[test]
fn memory_follows_what_is_in_use() {
    if std::env::var_os("ZEBU_SKIP_QEMU").is_some_and(|value| value == "1") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let options = CheckOptions::default();

    // 4 Mi clusters with one reference each: 1 MiB, and 1 MiB of buffers.
    let path = place.path().join("full");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "preallocation=metadata",
        path.to_str().unwrap(),
        "256G",
    ]);
    let (report, grown) = measured(&path, &options);
    assert!(report.is_clean());
    assert_eq!(report.counts.allocated_clusters, 4 << 20);
    assert!(grown < 12 * MIB, "{grown} bytes for a full disk of 256 GiB");

    // The same disk, empty: next to nothing.
    let path = place.path().join("empty");
    qemu_img(&["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "256G"]);
    let (report, grown) = measured(&path, &options);
    assert!(report.is_clean());
    assert!(grown < 8 * MIB, "{grown} bytes for an empty disk of 256 GiB");

    // A file of 1 TiB with a 1 MiB L2 area, each of whose entries is the only one in its part of the map, and each
    // counted a million times: the widest counts, as sparse as can be. The budget holds.
    let path = place.path().join("sparse");
    let mut image = header(16);
    let (l1, l2, tables) = (1u64 << 16, 40u64 << 20, 16u64);
    image[36..40].copy_from_slice(&(1u32 << 20).to_be_bytes());
    image[40..48].copy_from_slice(&l1.to_be_bytes());
    image.resize(l2 as usize, 0);
    for n in 0..1u64 << 20 {
        let at = (l1 + n * 8) as usize;
        image[at..at + 8].copy_from_slice(&(l2 + n % tables * 65536).to_be_bytes());
    }
    for n in 0..tables * 8192 {
        image.extend((((n * 8) << 20) % (1 << 40)).to_be_bytes());
    }
    std::fs::write(&path, image).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    let small = CheckOptions::default().memory(4 << 20);
    let (report, grown) = measured(&path, &small);
    assert_eq!(report.exit_code(), 2);
    assert!(grown < 24 * MIB, "{grown} bytes with a budget of 4 MiB");
    let (whole, _) = measured(&path, &options);
    assert_eq!(whole.counts, report.counts);
}
