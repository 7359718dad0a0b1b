//! An image whose bytes are compared with a manifest before anybody gets them.

use crate::ImageDisk;
use crate::call::{answer, take_bufs};
use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use zebu_engine::jobs::ManifestIndex;
use zebu_storage::sync::Mutex;
use zebu_storage::{Completer, FileId, IoBufs, Storage, StorageAbilities, StorageDone, StorageOp, Worker};

/// Bytes of clusters that were compared and are kept, so that small reads of one cluster compare it once.
const KEPT: usize = 4 << 20;
/// Bytes that are read at once.
const AT_ONCE: u64 = 1 << 20;
/// Bad clusters that are reported one by one.
const MOST_REPORTS: u64 = 16;

/// A disk that is read only as a manifest says. A cluster that is not what the manifest says is read again, past all copies,
/// and is EIO if it is the same then.
///
/// Zero clusters of the manifest are never read. Like `verify` of a backup, but at the time of each read.
pub struct Verified {
    shared: Arc<Shared>,
    below: Arc<ImageDisk>,
}

/// Told of a cluster that is not what the manifest says.
type Report = Box<dyn Fn(&str) + Send + Sync>;

/// While what it returns lives, reads below are not answered from copies.
type Afresh = Box<dyn Fn() -> Box<dyn Any + Send> + Send + Sync>;

/// The work of a [`Verified`] beside reading.
pub struct VerifiedHooks {
    report: Report,
    afresh: Afresh,
}

impl VerifiedHooks {
    /// `report` is told what people should know, by any thread. While the value that `afresh` returns lives, reads below are
    /// not answered from copies that were fetched before.
    pub fn new<G: Send + 'static>(
        report: impl Fn(&str) + Send + Sync + 'static,
        afresh: impl Fn() -> G + Send + Sync + 'static,
    ) -> Self {
        Self { report: Box::new(report), afresh: Box::new(move || Box::new(afresh())) }
    }
}

struct Shared {
    name: String,
    manifest: ManifestIndex,
    hooks: VerifiedHooks,
    kept: Mutex<Kept>,
    mended: AtomicU64,
    refused: AtomicU64,
}

/// Reads of clusters that failed, or were not what the manifest says, since the disk was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifiedCounts {
    /// Read again, the cluster was what the manifest says.
    pub mended: u64,
    /// It was not: the read failed.
    pub refused: u64,
}

/// Clusters that were compared, the latest first.
#[derive(Default)]
struct Kept {
    clusters: VecDeque<(u64, Arc<[u8]>)>,
    bytes: usize,
}

impl Kept {
    fn get(&mut self, offset: u64) -> Option<Arc<[u8]>> {
        let at = self.clusters.iter().position(|(known, _)| *known == offset)?;
        let found = self.clusters.remove(at)?;
        let bytes = Arc::clone(&found.1);
        self.clusters.push_front(found);
        Some(bytes)
    }

    fn has(&self, offset: u64) -> bool {
        self.clusters.iter().any(|(known, _)| *known == offset)
    }

    fn add(&mut self, offset: u64, bytes: Arc<[u8]>) {
        if self.has(offset) {
            return;
        }
        self.bytes += bytes.len();
        self.clusters.push_front((offset, bytes));
        while self.bytes > KEPT && self.clusters.len() > 1 {
            self.bytes -= self.clusters.pop_back().map_or(0, |(_, bytes)| bytes.len());
        }
    }
}

impl Verified {
    /// The disk of `below`, whose image is `name`, as `manifest` says.
    ///
    /// # Errors
    /// The manifest is of a disk of another size; a sentence says so.
    pub fn new(
        below: Arc<ImageDisk>,
        name: &str,
        manifest: ManifestIndex,
        hooks: VerifiedHooks,
    ) -> Result<Self, String> {
        let (own, other) = (below.len(), manifest.virtual_size());
        if own != other {
            return Err(format!(
                "the manifest '{}' is of another disk: it has {other} bytes, that of '{name}' has {own}",
                manifest.path().display()
            ));
        }
        let shared = Shared {
            name: name.to_owned(),
            manifest,
            hooks,
            kept: Mutex::default(),
            mended: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        };
        Ok(Self { shared: Arc::new(shared), below })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Path {
        self.shared.manifest.path()
    }

    /// Counters since it was opened.
    pub fn counts(&self) -> VerifiedCounts {
        VerifiedCounts {
            mended: self.shared.mended.load(Relaxed),
            refused: self.shared.refused.load(Relaxed),
        }
    }
}

impl Shared {
    /// Counts what is wrong, and tells of it if it is one of the first.
    fn tell(&self, counter: &AtomicU64, what: &str) {
        let before = counter.fetch_add(1, Relaxed);
        if before < MOST_REPORTS {
            let last = if before + 1 == MOST_REPORTS { "; more are not told of one by one" } else { "" };
            (self.hooks.report)(&format!("'{}': {what}{last}", self.name));
        }
    }

    /// As [`Self::fits`], for a read that may have failed.
    fn is_right(&self, offset: u64, found: &Result<Vec<u8>, i32>) -> Result<bool, i32> {
        found.as_ref().map_or(Ok(false), |bytes| self.fits(offset, bytes))
    }

    fn fits(&self, offset: u64, bytes: &[u8]) -> Result<bool, i32> {
        self.manifest.matches(offset, bytes).map_err(|error| error.errno())
    }

    /// Reads a cluster again that could not be read, or is not what the manifest says.
    async fn again(&self, worker: &Worker, below: &ImageDisk, range: Range<u64>) -> Result<Arc<[u8]>, i32> {
        let (offset, manifest) = (range.start, self.manifest.path().display());
        let _afresh = (self.hooks.afresh)();
        // Tables that came wrong would lead to the same bytes again, and so would a cluster that was inflated of wrong ones.
        below.image().forget_what_was_read();
        let mut found = read(worker, below, range.clone()).await;
        // What the image was opened with may have come wrong, too. If it can't be read, the cluster is told of.
        if !self.is_right(offset, &found)?
            && below.image().read_tops_again(worker).await.is_ok_and(|is_new| is_new)
        {
            found = read(worker, below, range).await;
        }
        let bytes = found?;
        if self.fits(offset, &bytes)? {
            self.tell(
                &self.mended,
                &format!(
                    "the cluster at {offset} could not be read, or was not what '{manifest}' says; read again, it is"
                ),
            );
            return Ok(bytes.into());
        }
        self.tell(
            &self.refused,
            &format!(
                "the cluster at {offset} is not what '{manifest}' says, read twice: reads of it fail. `zebu verify` \
                 compares the whole image"
            ),
        );
        Err(libc::EIO)
    }

    /// The clusters in `range` that follow each other from its start on, are not zero and not kept; at most [`AT_ONCE`].
    fn unread(&self, range: Range<u64>) -> Result<Range<u64>, i32> {
        let cluster = self.manifest.cluster_size();
        let mut end = range.start + cluster;
        while end < range.end && end + cluster <= range.start + AT_ONCE {
            if self.kept.lock().has(end) || self.manifest.run_at(end).map_err(|error| error.errno())?.zero {
                break;
            }
            end += cluster;
        }
        Ok(range.start..end.min(self.manifest.virtual_size()))
    }

    /// Compares the clusters in `range`, which are not zero, and gives those that are right to `take`.
    async fn compare(
        &self,
        worker: &Worker,
        below: &ImageDisk,
        range: Range<u64>,
        mut take: impl FnMut(u64, &[u8]),
    ) -> Result<(), i32> {
        let cluster = self.manifest.cluster_size();
        let bytes = read(worker, below, range.clone()).await.unwrap_or_default();
        let mut parts = bytes.chunks(cluster as usize);
        for start in range.clone().step_by(cluster as usize) {
            let own = match parts.next() {
                Some(part) if self.fits(start, part)? => part.into(),
                _ => self.again(worker, below, start..range.end.min(start + cluster)).await?,
            };
            take(start, &own);
            self.kept.lock().add(start, own);
        }
        Ok(())
    }

    /// Fills `bufs` with the bytes at `offset`.
    async fn fill(
        &self,
        worker: &Worker,
        below: &ImageDisk,
        offset: u64,
        bufs: &mut IoBufs,
    ) -> Result<(), i32> {
        let cluster = self.manifest.cluster_size();
        let end = offset + bufs.len() as u64;
        let mut at = offset;
        while at < end {
            let run = self.manifest.run_at(at).map_err(|error| error.errno())?;
            let start = at / cluster * cluster;
            if run.zero {
                let next = end.min(at + run.len);
                bufs.fill((at - offset) as usize, (next - at) as usize, 0);
                at = next;
                continue;
            }
            let mut take = |start: u64, bytes: &[u8]| {
                let (from, to) = (at.max(start), end.min(start + bytes.len() as u64));
                if let Some(part) = bytes.get((from - start) as usize..(to - start) as usize) {
                    bufs.copy_from((from - offset) as usize, part);
                }
            };
            let known = self.kept.lock().get(start);
            at = if let Some(known) = known {
                take(start, &known);
                end.min(start + known.len() as u64)
            } else {
                let unread = self.unread(start..end)?;
                self.compare(worker, below, unread.clone(), take).await?;
                end.min(unread.end)
            };
        }
        Ok(())
    }

    async fn run(&self, worker: &Worker, below: &ImageDisk, op: StorageOp, mut done: Completer) {
        let mut bufs = take_bufs(&mut done);
        let result = match op {
            StorageOp::Read { offset, len } => {
                self.fill(worker, below, offset, &mut bufs).await.map(|()| StorageDone::Moved(len))
            }
            StorageOp::ExtentAt { offset } => match self.manifest.run_at(offset) {
                Ok(run) => Ok(StorageDone::Extent { len: run.len, hole: run.zero }),
                Err(error) => Err(error.errno()),
            },
            StorageOp::Flush => Ok(StorageDone::Done),
            _ => Err(libc::EOPNOTSUPP),
        };
        answer(done, bufs, result);
    }
}

async fn read(worker: &Worker, below: &ImageDisk, range: Range<u64>) -> Result<Vec<u8>, i32> {
    let len = (range.end - range.start) as usize;
    let (result, bufs) = below.image().read(worker, range.start, worker.buffer(len).into()).await;
    let mut bytes = vec![0; len];
    bufs.copy_to(0, &mut bytes);
    result.map(|()| bytes).map_err(|error| error.errno())
}

impl Storage for Verified {
    fn len(&self) -> u64 {
        self.below.len()
    }

    fn files(&self) -> Vec<FileId> {
        self.below.files()
    }

    fn identity(&self) -> u64 {
        self.below.identity()
    }

    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::EXTENTS
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let (shared, below) = (Arc::clone(&self.shared), Arc::clone(&self.below));
        drop(
            self.below.worker().run(move |worker| async move { shared.run(&worker, &below, op, done).await }),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::call;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use zebu_engine::jobs::{BackupOptions, Cancel, backup};
    use zebu_engine::{Access, Format, Image, OpenOptions};
    use zebu_storage::{Engine, IoBuf, WorkerConfig};

    const CLUSTER: u64 = 64 << 10;
    const LEN: u64 = 40 * CLUSTER + 4096;

    fn content() -> Vec<u8> {
        let mut state = 7u64;
        let mut bytes = vec![0; LEN as usize];
        for (i, cluster) in bytes.chunks_mut(CLUSTER as usize).enumerate().filter(|(i, _)| i % 5 != 3) {
            for byte in cluster {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(i as u64 | 1);
                *byte = (state >> 33) as u8;
            }
        }
        bytes
    }

    /// A raw disk, the manifest of its backup, and the disk as the manifest says, with what is told.
    struct Scene {
        dir: tempfile::TempDir,
        told: Arc<Mutex<Vec<String>>>,
        content: Vec<u8>,
    }

    impl Scene {
        fn new() -> Self {
            let scene = Self { dir: tempfile::tempdir().unwrap(), told: Arc::default(), content: content() };
            std::fs::write(scene.dir.path().join("disk"), &scene.content).unwrap();
            let worker = Worker::new(&WorkerConfig::default()).unwrap();
            worker.block_on(async {
                let image = scene.open(&worker, &scene.dir.path().join("disk")).await;
                let options =
                    BackupOptions::new(scene.dir.path().join("copy")).manifest(scene.dir.path().join("m"));
                Box::pin(backup(&worker, &image, &options)).await.unwrap();
                image.close(&worker).await.unwrap();
            });
            scene
        }

        async fn open(&self, worker: &Worker, path: &Path) -> Image {
            let options = OpenOptions::default().format(Format::Raw).access(Access::ReadOnly);
            Image::open(worker, path, &options).await.unwrap()
        }

        fn verified(&self, worker: &Worker, afresh: impl Fn() + Send + Sync + 'static) -> Verified {
            let image = worker.block_on(self.open(worker, &self.dir.path().join("disk")));
            let below = Arc::new(
                ImageDisk::new(image, Access::ReadOnly, Engine::Auto)
                    .unwrap()
                    .closing(|error| panic!("{error}")),
            );
            let manifest = ManifestIndex::open(&self.dir.path().join("m"), &Cancel::new()).unwrap();
            let told = Arc::clone(&self.told);
            let hooks = VerifiedHooks::new(move |line| told.lock().push(line.to_owned()), afresh);
            Verified::new(below, "disk", manifest, hooks).unwrap()
        }

        fn flip(&self, offset: u64, bit: u32) {
            let file = File::options().read(true).write(true).open(self.dir.path().join("disk")).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << bit], offset).unwrap();
        }
    }

    fn read_at(worker: &Worker, disk: &Verified, offset: u64, len: u64) -> Result<Vec<u8>, i32> {
        let op = StorageOp::Read { offset, len };
        let (bufs, result) = worker.block_on(call(disk, op, IoBuf::zeroed(len as usize).into()));
        let mut bytes = vec![0; len as usize];
        bufs.copy_to(0, &mut bytes);
        result.map(|_| bytes)
    }

    #[test]
    fn an_intact_disk_is_read_as_it_is() {
        let scene = Scene::new();
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        let disk = scene.verified(&worker, || panic!("nothing is wrong"));
        for (offset, len) in
            [(0, LEN), (1, 2), (CLUSTER - 1, 2), (3 * CLUSTER - 5, CLUSTER + 10), (LEN - 7, 7)]
        {
            let right = &scene.content[offset as usize..][..len as usize];
            assert!(read_at(&worker, &disk, offset, len).unwrap() == right, "{offset} {len}");
        }
        let at = 3 * CLUSTER;
        let extent = worker.block_on(call(&disk, StorageOp::ExtentAt { offset: at }, IoBufs::new())).1;
        assert_eq!(extent, Ok(StorageDone::Extent { len: CLUSTER, hole: true }));
        assert_eq!(*scene.told.lock(), Vec::<String>::new());
    }

    #[test]
    fn no_flipped_bit_gets_through() {
        let scene = Scene::new();
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        let mut state = 99u64;
        for turn in 0..1000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (offset, bit) = ((state >> 20) % LEN, (state >> 8) as u32 % 8);
            scene.flip(offset, bit);
            let disk = scene.verified(&worker, || ());
            let (start, end) = (offset / CLUSTER * CLUSTER, LEN.min((offset / CLUSTER + 1) * CLUSTER));
            let read = read_at(&worker, &disk, start, end - start);
            // Zeroes come from the manifest.
            let is_zero = start / CLUSTER % 5 == 3;
            let right = is_zero.then(|| vec![0; (end - start) as usize]).ok_or(libc::EIO);
            assert!(read == right, "{turn} {offset} {bit}");
            assert_eq!(scene.told.lock().drain(..).len(), usize::from(!is_zero), "{turn}");
            scene.flip(offset, bit);
        }
    }

    #[test]
    fn a_cluster_that_is_right_the_second_time_is_read_and_told() {
        let scene = Arc::new(Scene::new());
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        scene.flip(5 * CLUSTER + 9, 3);
        let other = Arc::clone(&scene);
        let disk = scene.verified(&worker, move || other.flip(5 * CLUSTER + 9, 3));
        let right = &scene.content[4 * CLUSTER as usize..][..3 * CLUSTER as usize];
        assert!(read_at(&worker, &disk, 4 * CLUSTER, 3 * CLUSTER).unwrap() == right);
        let told = scene.told.lock().clone();
        assert!(told.len() == 1 && told[0].contains("read again, it is"), "{told:?}");
    }

    /// A qcow2 image has copies of its own: tables, and clusters that were inflated.
    #[test]
    fn what_came_wrong_once_of_a_compressed_image_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, copy, manifest) = (dir.path().join("disk"), dir.path().join("copy"), dir.path().join("m"));
        let words: Vec<u8> =
            (0..600_000u32).flat_map(|i| (i % 7001 * i % 5003).to_string().into_bytes()).collect();
        let content = &words[..12 * CLUSTER as usize];
        std::fs::write(&disk, content).unwrap();
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        let open = |path: &Path, format| {
            let options = OpenOptions::default().format(format).access(Access::ReadOnly);
            worker.block_on(Image::open(&worker, path, &options)).unwrap()
        };
        let image = open(&disk, Format::Raw);
        let options = BackupOptions::new(copy.clone()).manifest(manifest.clone());
        worker.block_on(Box::pin(backup(&worker, &image, &options))).unwrap();
        let intact = std::fs::read(&copy).unwrap();
        assert!(intact.len() < content.len(), "it is compressed");
        let (mut state, mut mended) = (5u64, 0);
        for turn in 0..150 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let offset = (state >> 20) % intact.len() as u64;
            let below = Arc::new(
                ImageDisk::new(open(&copy, Format::Qcow2), Access::ReadOnly, Engine::Auto)
                    .unwrap()
                    .closing(|error| panic!("{error}")),
            );
            let file = File::options().write(true).open(&copy).unwrap();
            let right = intact[offset as usize];
            // Once: whoever reads again gets what is there.
            file.write_all_at(&[right ^ 1 << (state % 8)], offset).unwrap();
            let hooks = VerifiedHooks::new(|_| (), move || file.write_all_at(&[right], offset).unwrap());
            let index = ManifestIndex::open(&manifest, &Cancel::new()).unwrap();
            let verified = Verified::new(below, "copy", index, hooks).unwrap();
            for at in (0..content.len()).step_by(CLUSTER as usize) {
                let read = read_at(&worker, &verified, at as u64, CLUSTER);
                assert!(
                    read.as_deref() == Ok(&content[at..][..CLUSTER as usize]),
                    "{turn} {offset} {at} {:?}",
                    read.err()
                );
            }
            mended += verified.counts().mended;
            std::fs::write(&copy, &intact).unwrap();
        }
        assert!(mended > 50, "{mended}");
    }

    #[test]
    fn a_manifest_of_a_disk_of_another_size_is_refused() {
        let scene = Scene::new();
        std::fs::write(scene.dir.path().join("disk"), vec![1; 3 * CLUSTER as usize]).unwrap();
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        let image = worker.block_on(scene.open(&worker, &scene.dir.path().join("disk")));
        let below = Arc::new(
            ImageDisk::new(image, Access::ReadOnly, Engine::Auto).unwrap().closing(|error| panic!("{error}")),
        );
        let manifest = ManifestIndex::open(&scene.dir.path().join("m"), &Cancel::new()).unwrap();
        let refused = Verified::new(below, "disk", manifest, VerifiedHooks::new(|_| (), || ()));
        assert!(refused.err().unwrap().contains("another disk"));
    }
}
