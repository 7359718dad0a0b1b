//! Helpers of scenarios: files, workers, signs of life.

use crate::driver;
use crate::random::Random;
use crate::thread_stress::journal::Kind;
use crate::thread_stress::recorder::{Recorder, fail};
use crate::thread_stress::sector::{SECTOR, fill};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use zebu_engine::storage::{Engine, IoBuf, IoBufs, Worker};
use zebu_engine::{Access, CreateOptions, Durability, Error, Format, Image, OpenOptions, RefPolicy};

/// The image of a scenario that is judged at the end.
pub(super) const IMAGE: &str = "disk.qcow2";
/// The expected content of the disk.
pub(super) const EXPECTED: &str = "expected.raw";
/// A file that says that the image was not closed.
pub(super) const MAY_LEAK: &str = "may-leak";

/// The place where a scenario runs.
pub(super) struct Stage {
    pub(super) dir: PathBuf,
    pub(super) random: Random,
    life: Recorder,
}

/// The result of what must not fail.
pub(super) fn must<T>(what: &str, result: Result<T, Error>) -> T {
    result.unwrap_or_else(|e| fail(&format!("{what}: {e}")))
}

/// Options for an image that several threads write.
pub(super) fn shared(cache_size: Option<u64>) -> OpenOptions {
    OpenOptions::default()
        .format(Some(Format::Qcow2))
        .access(Access::ReadWrite)
        .refs(RefPolicy::All)
        .queues(4)
        .cache_size(cache_size)
}

/// A worker of the kind that the machine has.
pub(super) fn worker() -> Worker {
    driver::worker(Engine::Auto)
}

/// Whole sectors with this value from `offset` on.
pub(super) fn content(value: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fill(&mut bytes, value, offset / SECTOR as u64);
    bytes
}

/// Writes `value`.
pub(super) async fn write(worker: &Worker, image: &Image, offset: u64, len: u64, value: u64) {
    let bufs = IoBuf::copy_of(&content(value, offset, len)).into();
    must("write", image.write(worker, offset, bufs, Durability::Volatile).await.0);
}

/// Reads.
pub(super) async fn read(worker: &Worker, image: &Image, offset: u64, len: u64) -> Vec<u8> {
    let (result, bufs): (_, IoBufs) = image.read(worker, offset, IoBuf::zeroed(len as usize).into()).await;
    must("read", result);
    let mut bytes = vec![0; len as usize];
    bufs.copy_to(0, &mut bytes);
    bytes
}

impl Stage {
    pub(super) fn new(seed: u64, dir: &Path) -> Self {
        let clock = Arc::new(AtomicU64::new(1));
        let life = Recorder::new(dir, seed, 0, &clock);
        Self { dir: dir.to_owned(), random: Random::new(seed ^ 0x7363_656e), life }
    }

    /// Says that something goes on.
    pub(super) fn step(&self) {
        self.life.begin(Kind::Other, 0, 0, 0);
    }

    /// Says that all is done.
    pub(super) fn over(&self) {
        self.life.over();
    }

    pub(super) fn image(&self) -> PathBuf {
        self.dir.join(IMAGE)
    }

    /// The image will not be closed: space may be set aside in it for ever.
    pub(super) fn may_leak(&self) {
        std::fs::write(self.dir.join(MAY_LEAK), "").unwrap_or_else(|e| fail(&e.to_string()));
    }

    pub(super) fn create(&self, worker: &Worker, options: &CreateOptions) {
        must("create", worker.block_on(Image::create(worker, &self.image(), options)));
    }

    pub(super) fn open(&self, worker: &Worker, options: &OpenOptions) -> Image {
        must("open", worker.block_on(Image::open(worker, &self.image(), options)))
    }
}

/// The expected content of a disk in the end, as a raw file.
pub(super) struct Expected(File);

impl Expected {
    pub(super) fn new(stage: &Stage, size: u64) -> Self {
        let file = File::create(stage.dir.join(EXPECTED)).and_then(|file| file.set_len(size).map(|()| file));
        Self(file.unwrap_or_else(|e| fail(&e.to_string())))
    }

    pub(super) fn put(&self, offset: u64, bytes: &[u8]) {
        self.0.write_all_at(bytes, offset).unwrap_or_else(|e| fail(&e.to_string()));
    }
}
