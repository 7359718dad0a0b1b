//! The library in the hands of other programs: a disk that waits, loops and executors of their own, queues that travel.

mod callbacks;
mod disk;
mod disk_callers;
mod disk_misuse;
mod event_loops;
mod forks_and_signals;
mod handles;
mod in_memory;
mod nonsense;
mod queues;
mod rounds;
mod tokio_tasks;
mod vanished;
mod wakes;
mod written_back;

use std::path::{Path, PathBuf};
use zebu_engine::storage::Engine;
use zebu_engine::{Access, CreateOptions, Disk, OpenOptions};

const ENGINES: [Engine; 2] = [Engine::Threads, Engine::IoUring];

/// A new image of 64 MiB.
fn create(dir: &Path) -> PathBuf {
    let path = dir.join("disk.qcow2");
    Disk::create(&path, &CreateOptions::default().size(Some(64 << 20))).unwrap();
    path
}

fn for_writing() -> OpenOptions {
    OpenOptions::default().access(Access::ReadWrite)
}

fn open(engine: Engine, path: &Path) -> Disk {
    Disk::builder().engine(engine).open(path, &for_writing()).unwrap()
}

/// Fails if the image has leaks or damage.
fn must_be_clean(path: &Path) {
    let report = Disk::check(path, &zebu_engine::check::CheckOptions::default()).unwrap();
    assert!(report.is_clean() && report.counts.leaks == 0, "{report:?}");
}
