//! The programs of `examples/` do what they say.

use std::path::Path;
use zebu::check::CheckOptions;
use zebu::{Disk, OpenOptions};

#[allow(dead_code)]
#[path = "../examples/event_loop.rs"]
mod event_loop;
#[cfg(feature = "vm-memory")]
#[allow(dead_code)]
#[path = "../examples/guest_memory.rs"]
mod guest_memory;
#[allow(dead_code)]
#[path = "../examples/live_backup.rs"]
mod live_backup;
#[allow(dead_code)]
#[path = "../examples/plain.rs"]
mod plain;
#[allow(dead_code)]
#[path = "../examples/tokio.rs"]
mod tokio_tasks;
#[allow(dead_code)]
#[path = "../examples/tokio_threads.rs"]
mod tokio_threads;

/// Runs a program on a new disk. Afterwards the disk has these bytes at these places, and no damage.
fn runs<E: std::fmt::Debug>(program: fn(&Path) -> Result<(), E>, found: &[(u64, &[u8])]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    program(&path).unwrap();
    let report = Disk::check(&path, &CheckOptions::default()).unwrap();
    assert!(report.is_clean() && report.counts.leaks == 0, "{report:?}");
    let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
    for (offset, bytes) in found {
        let mut buf = vec![0; bytes.len()];
        disk.read(*offset, &mut buf).unwrap();
        assert_eq!(buf, *bytes, "at {offset}");
    }
}

#[test]
fn plain() {
    runs(plain::run, &[(4096, b"hello"), (4 << 20, &[3; 512])]);
}

#[test]
fn live_backup() {
    runs(live_backup::run, &[(0, b"before the backup"), (63 << 20, b"a guest at work")]);
}

#[test]
fn event_loop() {
    runs(event_loop::run, &[(0, &[0; 4096]), (127 * 65536, &[127; 4096])]);
}

#[cfg(feature = "vm-memory")]
#[test]
fn guest_memory() {
    runs(guest_memory::run, &[(0, b"written by the guest")]);
}

#[test]
fn tokio_on_one_thread() {
    runs(tokio_tasks::run, &[(15 * 65536, &[15; 4096])]);
}

#[test]
fn tokio_on_several_threads() {
    runs(tokio_threads::run, &[((16 << 20) - 512, &[15; 512])]);
}
