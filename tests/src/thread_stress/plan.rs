//! Choices of a seed: the shape of the image, how it is opened, what each thread does.

use super::sector::SECTOR;
use crate::random::Random;
use std::fmt;
use zebu_engine::storage::Engine;
use zebu_engine::{CacheMode, Preallocation};

/// The base of an overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// A raw file.
    Raw,
    /// A qcow2 image with clusters of so many bytes.
    Qcow2(u64),
}

/// Where the guest's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// In the image file.
    Inside,
    /// In an external data file.
    External,
    /// In one that is a raw image by itself.
    ExternalRaw,
}

/// Whether threads write the same sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// They share clusters, but each has sectors of its own.
    Clusters,
    /// They write whatever they want.
    Sectors,
}

/// How a case ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The image is closed.
    Closed,
    /// The process is killed after so many bytes of journals.
    Killed(u64),
}

/// By what a thread makes its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    /// By a worker of its own, several at once.
    Worker(Engine),
    /// By calls of the disk that wait: the small ones are done on the thread that calls.
    Disk,
}

/// A case: the same seed chooses the same one. When threads meet is not chosen by it.
#[derive(Debug, Clone)]
pub struct Case {
    /// The seed.
    pub seed: u64,
    /// Bytes of a cluster.
    pub cluster: u64,
    /// Subclusters.
    pub extended_l2: bool,
    /// Width of a refcount.
    pub refcount_bits: u32,
    /// Sectors of the disk at the start; it never has fewer.
    pub sectors: u64,
    /// The most that it ever has.
    pub most_sectors: u64,
    /// Its base, and the base's sectors.
    pub base: Option<(Base, u64)>,
    /// Where its data is.
    pub data: Data,
    /// Space set aside when it is made.
    pub preallocation: Preallocation,
    /// Page cache or O_DIRECT, and whether each write is flushed.
    pub cache: CacheMode,
    /// Bytes of a slice.
    pub slice_size: Option<u32>,
    /// Bytes of the mapping cache beyond the least; `None` for the default.
    pub cache_above_least: Option<u64>,
    /// By what each thread makes its requests.
    pub threads: Vec<Surface>,
    /// Streams of requests of each thread, which go at once if it has a worker.
    pub lanes: u64,
    /// Requests of each lane in each round.
    pub requests: u64,
    /// How often the image is opened.
    pub rounds: u64,
    /// Whether threads write the same sectors.
    pub sharing: Sharing,
    /// How it ends.
    pub end: End,
    /// The image is encrypted, its base is not.
    pub encrypted: bool,
    /// Reads copy into the image what they find in its base.
    pub copy_on_read: bool,
}

/// The images that random cases may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Images {
    /// All kinds.
    Any,
    /// Encrypted ones alone.
    Encrypted,
    /// Images with a base, from which reads copy.
    CopyOnRead,
}

impl Images {
    /// The name by which such cases are asked for.
    pub fn name(self) -> &'static str {
        match self {
            Self::Any => "random",
            Self::Encrypted => "encrypted",
            Self::CopyOnRead => "copy-on-read",
        }
    }

    /// The images of a name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Any, Self::Encrypted, Self::CopyOnRead].into_iter().find(|images| images.name() == name)
    }
}

impl Case {
    /// The case that a seed chooses, with so many requests in all (about).
    pub fn chosen_by(seed: u64, requests: u64, images: Images) -> Self {
        let case = Self::unencrypted(seed, requests);
        if images == Images::CopyOnRead {
            let data = if case.data == Data::ExternalRaw { Data::External } else { case.data };
            let base = case.base.unwrap_or((Base::Qcow2(4096), case.sectors));
            let preallocation = Preallocation::Off;
            return Self { copy_on_read: true, base: Some(base), data, preallocation, ..case };
        }
        let encrypted = images == Images::Encrypted || Random::new(seed ^ 0x6c75_6b73).chance(15);
        if !encrypted {
            return case;
        }
        // A raw data file would hold plain text.
        let data = if case.data == Data::ExternalRaw { Data::External } else { case.data };
        Self { data, encrypted, ..case }
    }

    fn unencrypted(seed: u64, requests: u64) -> Self {
        let mut random = Random::new(seed ^ 0x7468_7265_6164);
        let random = &mut random;
        let cluster = *random.pick(&[512, 512, 4096, 4096, 65536, 65536, 16384]);
        let extended_l2 = cluster >= 16384 && random.chance(50);
        let data = *random.pick(&[
            Data::Inside,
            Data::Inside,
            Data::Inside,
            Data::Inside,
            Data::External,
            Data::ExternalRaw,
        ]);
        let clusters = if cluster == 512 { 4096 } else { (24 << 20) / cluster };
        let mut sectors = clusters * cluster / SECTOR as u64;
        if random.chance(60) {
            // The disk ends within a cluster.
            sectors -= random.below((2 * cluster / SECTOR as u64).max(16));
        }
        let most_sectors = sectors + sectors / 4;
        let base = (data != Data::ExternalRaw && random.chance(55)).then(|| {
            let kind = match random.below(4) {
                0 => Base::Raw,
                1 => Base::Qcow2(512),
                2 => Base::Qcow2(4096),
                _ => Base::Qcow2(65536),
            };
            let len = match random.below(3) {
                0 => sectors - random.below(sectors / 2),
                1 => sectors,
                _ => sectors + random.below(sectors / 4) + 1,
            };
            (kind, len)
        });
        let threads = random.between(2, 4);
        let lanes = *random.pick(&[1, 2, 4, 8, 16]);
        let surfaces = [Surface::Worker(Engine::IoUring), Surface::Worker(Engine::Threads), Surface::Disk];
        let surfaces = (0..threads).map(|_| *random.pick(&surfaces)).collect();
        let rounds = random.between(1, 3);
        let preallocation = match random.below(6) {
            0 if base.is_none() => Preallocation::Metadata,
            1 if base.is_none() && data == Data::Inside => Preallocation::Falloc,
            _ => Preallocation::Off,
        };
        let cache = match random.below(10) {
            0..5 => CacheMode::Writeback,
            5..9 => CacheMode::None,
            _ => CacheMode::Writethrough,
        };
        // Where each write is a flush, fewer do the same.
        let requests = if cache.is_writethrough() { requests / 4 } else { requests };
        Self {
            seed,
            cluster,
            extended_l2,
            refcount_bits: *random.pick(&[16, 16, 16, 64, 32, 8, 1]),
            sectors,
            most_sectors,
            base,
            data,
            preallocation,
            cache,
            slice_size: (cluster > 512 && random.chance(50)).then_some(512),
            cache_above_least: random.chance(70).then(|| *random.pick(&[0, 0, 4096, 50_000, 300_000])),
            threads: surfaces,
            lanes,
            requests: (requests / threads / lanes / rounds).max(4),
            rounds,
            sharing: if random.chance(30) { Sharing::Clusters } else { Sharing::Sectors },
            end: if random.chance(35) {
                End::Killed(random.below(requests * 400) + 2000)
            } else {
                End::Closed
            },
            encrypted: false,
            copy_on_read: false,
        }
    }

    /// Whether clusters can be compressed.
    pub fn has_compression(&self) -> bool {
        self.data == Data::Inside && !self.encrypted
    }

    /// Whether snapshots can be taken.
    pub fn has_snapshots(&self) -> bool {
        self.data == Data::Inside && self.refcount_bits > 1
    }

    /// Sectors of a cluster, or of a subcluster: what a discard gives up as a whole.
    pub fn cluster_sectors(&self) -> u64 {
        self.cluster / SECTOR as u64
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: cluster {}", self.seed, self.cluster)?;
        if self.encrypted {
            write!(f, ", encrypted")?;
        }
        if self.copy_on_read {
            write!(f, ", copy-on-read")?;
        }
        if self.extended_l2 {
            write!(f, " with subclusters")?;
        }
        write!(f, ", refcounts of {} bits, {} sectors", self.refcount_bits, self.sectors)?;
        if let Some((base, len)) = self.base {
            write!(f, ", over {len} sectors of {base:?}")?;
        }
        write!(f, ", data {:?}, preallocation {:?}", self.data, self.preallocation)?;
        write!(f, ", cache {:?}, slices {:?}, above the least cache ", self.cache, self.slice_size)?;
        write!(f, "{:?}, threads {:?} of {} lanes", self.cache_above_least, self.threads, self.lanes)?;
        write!(f, ", {} requests each in {} rounds", self.requests, self.rounds)?;
        write!(f, ", shared {:?}, {:?}", self.sharing, self.end)
    }
}

/// A place for a request: the first sector and how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The first sector.
    pub first: u64,
    /// Sectors.
    pub count: u64,
}

/// Chooses places: mostly in a few clusters, which change with the turns of the round, so that threads meet.
#[derive(Debug, Clone)]
pub struct Places {
    most: u64,
    sectors: u64,
    cluster: u64,
    own: Option<(u64, u64)>,
    seed: u64,
}

impl Places {
    /// The requests of a thread of the case.
    pub fn new(case: &Case, thread: u64) -> Self {
        let own = (case.sharing == Sharing::Clusters).then_some((thread, case.threads.len() as u64));
        Self {
            most: case.most_sectors,
            sectors: case.sectors,
            cluster: case.cluster_sectors(),
            own,
            seed: case.seed,
        }
    }

    /// The next place, at this turn of the round. Threads that share clusters only get a sector at a time in half of the
    /// disk, and whole clusters in the other.
    pub fn next(&self, random: &mut Random, turn: u64) -> Place {
        // Sometimes past what the disk surely has.
        let end = if random.chance(6) { self.most } else { self.sectors };
        let hot = Random::new(self.seed ^ (turn / 64) << 20).below(end);
        let width = (self.cluster * 8).max(256);
        let first = if random.chance(75) { (hot + random.below(width)) % end } else { random.below(end) };
        let Some((thread, threads)) = self.own else {
            return self.any(random, first, end);
        };
        let half = self.sectors / 2 / self.cluster * self.cluster;
        if first < half {
            let first = first / threads * threads + thread;
            return Place { first: first.min(half - threads + thread), count: 1 };
        }
        // Whole clusters of its own behind it.
        let unit = self.cluster.max(16);
        let first = half + ((first - half) / unit / threads * threads + thread) * unit;
        let first = if first + unit > end { half + thread * unit } else { first };
        let skip = random.below(unit);
        match random.below(3) {
            0 => Place { first, count: unit },
            _ => Place { first: first + skip, count: random.between(1, unit - skip) },
        }
    }

    fn any(&self, random: &mut Random, first: u64, end: u64) -> Place {
        let (first, count) = match random.below(10) {
            // A few sectors, anywhere.
            0..5 => (first, random.between(1, 9)),
            // Whole clusters.
            5..8 => (first / self.cluster * self.cluster, self.cluster * random.between(1, 3)),
            // From the middle of one into another.
            _ => (first, random.between(1, self.cluster * 3 + 8)),
        };
        Place { first, count: count.min(end - first).min(768) }
    }
}
