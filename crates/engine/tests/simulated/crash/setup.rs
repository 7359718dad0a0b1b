//! The images that the tests run on, chosen by a seed.

use crate::crash::snapshot;
use std::time::Duration;
use zebu_engine::luks::{BlockCipher, CipherSpec, Mode};
use zebu_engine::storage::{FsKind, IoBuf, Worker};
use zebu_engine::{
    Access, CompressOptions, Compression, CreateOptions, Durability, Format, Image, Keys, NewEncryption,
    OpenOptions, OpenedFile, Passphrase, Preallocation, Shrink, ZeroPolicy,
};
use zebu_sim::{
    Content, DiscardLeaves, GuestConfig, GuestModel, LogKeep, SimConfig, SimFileConfig, SimRng, SimWorld,
    backing_pattern,
};

/// Names of the files of a world.
pub(crate) const TOP: &str = "top";
pub(crate) const BASE: &str = "base";
pub(crate) const DATA: &str = "data";
/// Name of the internal snapshot.
pub(crate) const SNAPSHOT: &str = "before";

/// All names that a file of a world may have.
pub(crate) const NAMES: [&str; 6] = [TOP, DATA, BASE, BETWEEN[0], BETWEEN[1], BETWEEN[2]];

/// Names and contents of the files of an image.
pub(crate) type Files = Vec<(String, Content)>;

/// The origin of the disk's first content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Empty,
    /// Tables and refcounts of every cluster are there.
    Preallocated,
    /// A pattern, in the image itself.
    Own,
    /// A pattern, in clusters and tables that an internal snapshot shares.
    Snapshot,
    RawBase,
    Qcow2Base,
    /// The pattern lies at the bottom of a chain; the images between are empty, and no longer than it.
    DeepChain,
}

/// Images between the top and the bottom of a deep chain.
const BETWEEN: [&str; 3] = ["between1", "between2", "between3"];

/// An image and how it is opened.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) version: u32,
    pub(crate) cluster_size: u64,
    pub(crate) refcount_bits: u32,
    pub(crate) extended_l2: bool,
    pub(crate) external_data: bool,
    /// The external data file is a raw image by itself.
    pub(crate) raw_data: bool,
    pub(crate) origin: Origin,
    /// Bytes of a cluster of the backing file, if that is qcow2 and stands alone.
    pub(crate) base_cluster: u64,
    /// Bytes of the disk at first.
    pub(crate) size: u64,
    /// Bytes of the disk from 0 that hold the pattern at first.
    pub(crate) pattern: u64,
    pub(crate) cache_size: Option<u64>,
    pub(crate) slice_size: Option<u32>,
    pub(crate) zero_policy: ZeroPolicy,
    /// O_DIRECT alignment of the image file in bytes; 0: buffered.
    pub(crate) direct: u32,
    /// The file system that the files claim. On XFS nothing may go past a file's end beside something else that does.
    pub(crate) fs: FsKind,
    pub(crate) workers: usize,
    /// Memory of the gatherer in bytes; `None`: nothing is written compressed.
    pub(crate) gather_memory: Option<usize>,
    pub(crate) compression: Compression,
    /// Dirty bitmaps are made and used.
    pub(crate) bitmaps: bool,
    /// The top image is encrypted.
    pub(crate) encrypted: bool,
    /// Reads copy into the image what they find below it.
    pub(crate) copy_on_read: bool,
}

/// The passphrase of encrypted images.
pub(crate) const PASSPHRASE: &[u8] = b"a phrase";

/// The same, to open them with.
pub(crate) fn passphrase() -> Passphrase {
    Passphrase::new(PASSPHRASE).unwrap()
}

/// A cheap encryption with a small header. Its blocks are chained, so that a wrong one shows in those after it.
pub(crate) fn encryption() -> NewEncryption {
    let cipher = CipherSpec::new(BlockCipher::Aes, Mode::CbcPlain64, 16).unwrap();
    NewEncryption::new(passphrase()).cipher(cipher).iteration_time(Duration::ZERO)
}

impl Setup {
    /// The workers of the guest's requests. Every other one leads its commits itself, as the threads of a server do; the
    /// others leave them to the image's own worker.
    pub(crate) fn make_workers(&self, world: &SimWorld) -> Vec<Worker> {
        let workers: Vec<_> = (0..self.workers).map(|_| world.worker()).collect();
        workers.iter().skip(1).step_by(2).for_each(Worker::promise_to_drive);
        workers
    }

    /// The simplest image.
    pub(crate) fn plain() -> Self {
        Self {
            version: 3,
            cluster_size: 4096,
            refcount_bits: 16,
            extended_l2: false,
            external_data: false,
            raw_data: false,
            origin: Origin::Empty,
            base_cluster: 64 << 10,
            size: 256 << 10,
            pattern: 0,
            cache_size: None,
            slice_size: None,
            zero_policy: ZeroPolicy::Auto,
            direct: 0,
            fs: FsKind::Xfs,
            workers: 2,
            gather_memory: None,
            compression: Compression::Zlib,
            bitmaps: false,
            encrypted: false,
            copy_on_read: false,
        }
    }

    /// The same, encrypted. Such an image has no compressed clusters, and no raw data file.
    pub(crate) fn encrypted(self) -> Self {
        Self { encrypted: true, gather_memory: None, raw_data: false, ..self }
    }

    /// The same, into which reads copy what they find below it.
    pub(crate) fn copying(self) -> Self {
        Self { copy_on_read: true, ..self }
    }

    /// Whether there is a backing image.
    pub(crate) fn is_backed(&self) -> bool {
        matches!(self.origin, Origin::RawBase | Origin::Qcow2Base | Origin::DeepChain)
    }

    /// Any image.
    pub(crate) fn random(rng: &mut SimRng) -> Self {
        let version = if rng.chance(1, 4) { 2 } else { 3 };
        let extended_l2 = version == 3 && rng.chance(1, 4);
        let cluster_size =
            if extended_l2 { *rng.pick(&[16384, 65536]) } else { *rng.pick(&[512, 512, 4096, 4096, 65536]) };
        let refcount_bits = if version == 2 { 16 } else { *rng.pick(&[1, 2, 16, 16, 64]) };
        let external_data = version == 3 && rng.chance(1, 6);
        let origins: &[Origin] = if external_data {
            &[Origin::Empty, Origin::Own, Origin::RawBase, Origin::Preallocated]
        } else if refcount_bits == 1 {
            &[Origin::Empty, Origin::Own, Origin::RawBase, Origin::Qcow2Base, Origin::Preallocated]
        } else {
            &[
                Origin::Empty,
                Origin::Own,
                Origin::Snapshot,
                Origin::Snapshot,
                Origin::RawBase,
                Origin::Qcow2Base,
                Origin::DeepChain,
            ]
        };
        let origin = *rng.pick(origins);
        let raw_data = external_data && matches!(origin, Origin::Empty | Origin::Own) && rng.chance(1, 2);
        let size =
            rng.between(cluster_size * 3, cluster_size * if cluster_size > 4096 { 14 } else { 100 }) & !511;
        // Some tables are longer than a block or two.
        let size = if cluster_size <= 4096 && size / 512 % 8 == 5 { size * 6 } else { size };
        let pattern = match origin {
            Origin::Empty | Origin::Preallocated => 0,
            _ => rng.between(size / 3, size) & !511,
        };
        let slice_size = *rng.pick(&[None, Some(512), Some(512)]);
        Self {
            version,
            cluster_size,
            refcount_bits,
            extended_l2,
            external_data,
            raw_data,
            origin,
            base_cluster: 64 << 10,
            size,
            pattern,
            cache_size: *rng.pick(&[None, Some(2 * (512 + 96)), Some(8 << 10)]),
            slice_size,
            zero_policy: *rng.pick(&[ZeroPolicy::Auto, ZeroPolicy::Write, ZeroPolicy::Fallocate]),
            direct: *rng.pick(&[0, 0, 0, 512, 4096]),
            fs: match size / 1024 % 3 {
                0 => FsKind::Ext4,
                1 => FsKind::Other,
                _ => FsKind::Xfs,
            },
            workers: rng.between(1, 3) as usize,
            gather_memory: if external_data {
                None
            } else {
                *rng.pick(&[None, Some(0), Some(16 << 10), Some(8 << 20)])
            },
            compression: if version == 3 && rng.chance(1, 2) { Compression::Zstd } else { Compression::Zlib },
            bitmaps: version == 3 && (size / 512).is_multiple_of(2),
            encrypted: false,
            copy_on_read: false,
        }
    }

    /// Whether a crash during a shrink leaves old content or zeroes. In version 2, which has no zero clusters, the
    /// backing image can show where the mapping is gone and the length is still the old one.
    pub(crate) fn can_shrink(&self) -> bool {
        self.version == 3 || !matches!(self.origin, Origin::RawBase | Origin::Qcow2Base | Origin::DeepChain)
    }

    /// The model of what a guest may find at first.
    pub(crate) fn model(&self) -> GuestModel {
        GuestModel::new(GuestConfig {
            len: self.size,
            backing_len: self.pattern,
            discard: DiscardLeaves::ZeroOrOld,
        })
    }

    fn create_options(&self, size: u64) -> CreateOptions {
        let backing = match self.origin {
            Origin::RawBase => Some((BASE.to_owned(), Format::Raw)),
            Origin::Qcow2Base => Some((BASE.to_owned(), Format::Qcow2)),
            Origin::DeepChain => Some((BETWEEN[0].to_owned(), Format::Qcow2)),
            _ => None,
        };
        CreateOptions::default()
            .size(Some(size))
            .cluster_size(self.cluster_size)
            .version(self.version)
            .refcount_bits(self.refcount_bits)
            .extended_l2(self.extended_l2)
            .compression(self.compression)
            .backing(backing)
            .data_file(self.external_data.then(|| DATA.to_owned()))
            .data_file_raw(self.raw_data)
            .encryption(self.encrypted.then(encryption))
    }

    /// Makes the image.
    pub(crate) fn make(&self, seed: u64) -> Files {
        let world = SimWorld::new(seed);
        let worker = world.worker();
        let top = world.file(TOP, Content::new(), SimFileConfig::default());
        let mut names = vec![TOP];
        let pattern = backing_pattern(0, self.pattern as usize);
        if self.external_data {
            world.file(DATA, Content::hole(self.size), SimFileConfig::default());
            names.push(DATA);
        }
        match self.origin {
            Origin::RawBase => {
                world.file(BASE, Content::from_bytes(&pattern), SimFileConfig::default());
                names.push(BASE);
            }
            Origin::DeepChain => {
                // The bottom is longer than what stands on it: what they don't reach must not show.
                let longer = backing_pattern(0, (self.pattern + self.cluster_size * 3) as usize);
                world.file(BASE, Content::from_bytes(&longer), SimFileConfig::default());
                names.push(BASE);
                for (i, name) in BETWEEN.iter().enumerate() {
                    let file = world.file(name, Content::new(), SimFileConfig::default());
                    names.push(name);
                    let below = BETWEEN.get(i + 1).map_or((BASE, Format::Raw), |n| (*n, Format::Qcow2));
                    let options = CreateOptions::default()
                        .size(Some(self.pattern))
                        .cluster_size(if i == 1 { 512 } else { 4096 })
                        .backing(Some((below.0.to_owned(), below.1)));
                    run(&world, Image::create_in(&worker, &file, &options));
                }
            }
            Origin::Qcow2Base => {
                let base = world.file(BASE, Content::new(), SimFileConfig::default());
                names.push(BASE);
                let options =
                    CreateOptions::default().size(Some(self.pattern)).cluster_size(self.base_cluster);
                let chain = || vec![OpenedFile::new(base.clone(), Format::Qcow2)];
                run(&world, async {
                    Image::create_in(&worker, &base, &options).await?;
                    fill(&worker, &Image::open_files(&worker, chain(), &writable()).await?, &pattern).await
                });
            }
            _ => {}
        }
        let first_size = if self.origin == Origin::Preallocated { 512 } else { self.size };
        run(&world, async {
            Image::create_in(&worker, &top, &self.create_options(first_size)).await?;
            let image = Image::open_files(&worker, self.chain(&world), &writable()).await?;
            match self.origin {
                Origin::Preallocated => {
                    image.resize(&worker, self.size, Shrink::Refuse, Preallocation::Metadata).await?;
                    image.close(&worker).await
                }
                Origin::Own | Origin::Snapshot => fill(&worker, &image, &pattern).await,
                _ => image.close(&worker).await,
            }
        });
        let mut files: Files =
            names.iter().map(|name| ((*name).to_owned(), world.content(name).unwrap())).collect();
        if self.origin == Origin::Snapshot {
            snapshot::take(&mut files[0].1, SNAPSHOT, self.size);
        }
        files
    }

    /// A world with the files in it.
    pub(crate) fn world(&self, files: &Files, seed: u64) -> SimWorld {
        self.world_keeping(LogKeep::Digest, files, seed)
    }

    /// The same, with so much of its log.
    pub(crate) fn world_keeping(&self, keep_log: LogKeep, files: &Files, seed: u64) -> SimWorld {
        let world =
            SimWorld::with_config(&SimConfig { keep_log, max_steps: 2_000_000, ..SimConfig::seeded(seed) });
        for (name, content) in files {
            world.file(name, content.clone(), self.config(name));
        }
        world
    }

    pub(crate) fn config(&self, name: &str) -> SimFileConfig {
        let direct = if name == TOP { self.direct } else { 0 };
        let config = if direct > 0 { SimFileConfig::direct(direct) } else { SimFileConfig::default() };
        SimFileConfig { fs: self.fs, ..config }
    }

    /// The files of a world as a chain to open.
    pub(crate) fn chain(&self, world: &SimWorld) -> Vec<OpenedFile> {
        let open = |name: &str| world.open(name, self.config(name)).unwrap();
        let data_file = self.external_data.then(|| open(DATA));
        let mut chain = vec![OpenedFile::new(open(TOP), Format::Qcow2).data_file(data_file)];
        match self.origin {
            Origin::RawBase => {
                chain.push(OpenedFile::new(open(BASE), Format::Raw));
            }
            Origin::Qcow2Base => {
                chain.push(OpenedFile::new(open(BASE), Format::Qcow2));
            }
            Origin::DeepChain => {
                for name in BETWEEN {
                    chain.push(OpenedFile::new(open(name), Format::Qcow2));
                }
                chain.push(OpenedFile::new(open(BASE), Format::Raw));
            }
            _ => {}
        }
        chain
    }

    /// The image in a world, opened for writing, with no more cache than the setup says.
    pub(crate) fn open(&self, world: &SimWorld, worker: &Worker) -> Result<Image, String> {
        let image = world
            .block_on(Image::open_files(worker, self.chain(world), &self.options()))
            .map_err(|stuck| stuck.to_string())?
            .map_err(|e| format!("open: {e}"))?;
        self.tighten(&image);
        Ok(image)
    }

    /// Gives an opened image no more cache than the setup says, but as much as it needs.
    pub(crate) fn tighten(&self, image: &Image) {
        if let Some(bytes) = self.cache_size {
            image.set_cache_size(bytes.max(image.min_cache_size())).unwrap();
        }
    }

    /// How it is opened for writing.
    pub(crate) fn options(&self) -> OpenOptions {
        writable()
            .slice_size(self.slice_size)
            .zero_policy(self.zero_policy)
            .compress(CompressOptions::default().gather_memory(self.gather_memory.unwrap_or(0)))
    }
}

fn writable() -> OpenOptions {
    OpenOptions::default()
        .format(Some(Format::Qcow2))
        .access(Access::ReadWrite)
        .keys(Keys::of_top(passphrase()))
}

async fn fill(worker: &Worker, image: &Image, pattern: &[u8]) -> zebu_engine::Result<()> {
    let (result, _) = image.write(worker, 0, IoBuf::copy_of(pattern).into(), Durability::Volatile).await;
    result?;
    image.close(worker).await
}

fn run(world: &SimWorld, work: impl Future<Output = zebu_engine::Result<()>>) {
    world.block_on(work).unwrap().unwrap();
}
