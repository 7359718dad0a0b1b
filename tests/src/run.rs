//! One case of the random-operation comparison: an image made by QEMU, driven by zebu, judged by the model and QEMU.

use crate::driver::{self, ResizeRule, Setup};
use crate::images::{Feature, IMAGE, SNAPSHOTS, Shape};
use crate::model::{DiscardRule, Model, difference};
use crate::qemu::Qemu;
use crate::random::Random;
use crate::scratch::Scratch;
use crate::stream::{Mix, Stream};
use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use zebu_engine::CacheMode;
use zebu_engine::storage::Engine;

/// One case; the same one always does the same.
#[derive(Debug, Clone)]
pub struct Case {
    /// Shape of the image.
    pub shape: Shape,
    /// Which completion queue.
    pub engine: Engine,
    /// Page cache or O_DIRECT.
    pub cache: CacheMode,
    /// Seed of the image's content and of the stream.
    pub seed: u64,
    /// Operations.
    pub ops: usize,
    /// Most operations in flight.
    pub depth: usize,
    /// Threads with a worker of their own, which share the operations.
    pub queues: usize,
    /// Bytes of metadata cache; the default if `None`.
    pub cache_size: Option<u64>,
}

impl fmt::Display for Case {
    /// The options of the runner that repeat the case.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let engine = if self.engine == Engine::Threads { "threads" } else { "io-uring" };
        let cache = if self.cache.is_direct() { "none" } else { "writeback" };
        write!(f, "--shape {} --engine {engine} --cache {cache} --depth {}", self.shape, self.depth)?;
        write!(f, " --queues {}", self.queues)?;
        if let Some(bytes) = self.cache_size {
            write!(f, " --cache-size {bytes}")?;
        }
        write!(f, " --first-seed {} --seeds 1 --ops {}", self.seed, self.ops)
    }
}

impl Case {
    /// Everything but the number of operations chosen by the seed.
    pub fn chosen_by(seed: u64, ops: usize) -> Self {
        let mut random = Random::new(seed);
        Self {
            shape: *random.pick(&Shape::matrix()),
            engine: *random.pick(&[Engine::IoUring, Engine::Threads]),
            cache: *random.pick(&[CacheMode::Writeback, CacheMode::None]),
            seed,
            ops,
            depth: *random.pick(&[1, 4, 16, 48]),
            queues: *random.pick(&[1, 1, 1, 2, 4]),
            // Mostly enough for everything, sometimes so little that slices come and go all the time.
            cache_size: *random.pick(&[None, None, Some(64 << 10)]),
        }
    }

    /// Runs it. An error tells what is wrong, and how to repeat it.
    pub fn run(&self, qemu: &Qemu) -> Result<(), String> {
        let scratch = Scratch::new("case");
        // A case that panics is one that fails; the others still run.
        let run = AssertUnwindSafe(|| self.run_in(qemu, scratch.path()));
        std::panic::catch_unwind(run)
            .unwrap_or_else(|cause| Err(format!("panic: {}", message(cause.as_ref()))))
            .map_err(|what| format!("{what}\n  repeat: cargo xtask differential -- {self}"))
    }

    /// Runs it in a directory of the caller's, which may be on another file system. An error tells what is wrong.
    pub fn run_in(&self, qemu: &Qemu, dir: &Path) -> Result<(), String> {
        self.shape.make(qemu, dir, self.seed);
        let before = qemu.read_all(dir, IMAGE, None);
        let kept = Kept::of(qemu, dir, self.shape.feature);
        let mut model = Model::new(before);
        self.drive(&dir.join(IMAGE), &mut model)?;
        qemu.check_clean(dir, IMAGE)?;
        std::fs::write(dir.join("model.raw"), model.bytes()).map_err(|e| e.to_string())?;
        qemu.same_content(dir, "model.raw", IMAGE)?;
        if self.shape.feature == Feature::RawDataFile {
            let data = std::fs::read(dir.join("data.bin")).map_err(|e| e.to_string())?;
            let len = model.bytes().len().min(data.len());
            if let Some(text) = difference(0, &model.bytes()[..len], &data[..len]) {
                return Err(format!("the raw data file by itself: {text}"));
            }
        }
        kept.verify(&Kept::of(qemu, dir, self.shape.feature))
    }

    fn drive(&self, path: &Path, model: &mut Model) -> Result<(), String> {
        let (size, cluster) = (model.size(), self.shape.cluster);
        if self.queues < 2 {
            let mut stream = Stream::new(self.seed, size, cluster, Mix::Everything);
            return driver::run(path, &self.setup(), &mut stream, self.ops, model);
        }
        let count = self.queues as u64;
        let lane = |index| Stream::new(self.seed ^ (index << 32), size, cluster, Mix::Lane { index, count });
        driver::run_queues(path, &self.setup(), (0..count).map(lane).collect(), self.ops / self.queues, model)
    }

    fn setup(&self) -> Setup {
        let mut setup = Setup::new(self.engine, self.cache);
        setup.depth = self.depth;
        setup.options.cache_size = self.cache_size;
        if self.shape.version == 2 {
            if self.shape.feature.has_backing() {
                setup.discard = DiscardRule::MayKeep;
            }
            if self.shape.feature == Feature::Snapshot {
                setup.resize = ResizeRule::MayRefuse;
            }
        }
        setup
    }
}

fn message(cause: &(dyn Any + Send)) -> &str {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| cause.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// Content that writing an image must not change: its snapshots, and the files below it.
struct Kept(Vec<(String, Vec<u8>)>);

impl Kept {
    fn of(qemu: &Qemu, dir: &Path, feature: Feature) -> Self {
        let file = |name: &str| (name.to_owned(), std::fs::read(dir.join(name)).unwrap_or_default());
        let snapshot = |name: &str| (format!("snapshot {name}"), qemu.read_all(dir, IMAGE, Some(name)));
        Self(match feature {
            Feature::Snapshot => SNAPSHOTS.map(snapshot).to_vec(),
            Feature::BackingRaw => vec![file("base.raw")],
            Feature::BackingChain => ["base.qcow2", "middle.qcow2"].map(file).to_vec(),
            _ => Vec::new(),
        })
    }

    fn verify(&self, after: &Kept) -> Result<(), String> {
        for ((name, old), (_, new)) in self.0.iter().zip(&after.0) {
            // QEMU shows a snapshot with the size that the disk has now.
            let shown = if name.starts_with("snapshot") { old.len().min(new.len()) } else { old.len() };
            let (old, new) = (&old[..shown], &new[..new.len().min(shown)]);
            if let Some(text) = difference(0, old, new) {
                return Err(format!("{name} changed: {text}"));
            }
        }
        Ok(())
    }
}
