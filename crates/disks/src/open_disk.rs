//! A disk over the network that is open, whatever serves it.

use std::sync::Arc;
use zebu_drivers::{FileDisk, ImageDisk, Verified};
use zebu_engine::storage::{Access, Storage};
use zebu_oci::{FramesDisk, HashedDisk, OciName};
use zebu_rbd::RbdDisk;
use zebu_remote::http::HttpDisk;
use zebu_remote::nbd::NbdDisk;
use zebu_remote::range_cache::CachedDisk;
use zebu_remote::{Afresh, StatsSnapshot};
use zebu_store::points::PointName;

/// An open disk over the network.
#[derive(Clone)]
pub(crate) enum OpenDisk {
    Nbd(Arc<NbdDisk>),
    Http {
        disk: Arc<HttpDisk>,
        /// With a cache before it.
        cached: Option<Arc<CachedDisk>>,
        /// Why it has none, though one was asked for.
        uncached: Option<&'static str>,
        /// For a blob: compared with the hashes of its blocks, or with the digest of all.
        hashed: Option<Arc<HashedDisk>>,
        /// Its content, if it is packed in frames.
        frames: Option<Arc<FramesDisk>>,
    },
    Rbd(Arc<RbdDisk>),
    /// An image of a registry or layout that is here as a whole.
    Whole(OciName, Arc<FileDisk>),
    /// A point of a store: its layers, compared with the hashes of their disk.
    Point(PointName, Arc<Verified>),
    /// An image of a registry or layout: the disk that a chain of blobs shows, and the blobs.
    Stack(OciName, Arc<ImageDisk>, Vec<OpenDisk>),
}

impl OpenDisk {
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Nbd(disk) => disk.name(),
            Self::Http { disk, .. } => disk.name(),
            Self::Rbd(disk) => disk.name().to_string(),
            Self::Whole(name, _) | Self::Stack(name, ..) => name.to_string(),
            Self::Point(name, _) => name.to_string(),
        }
    }

    pub(crate) fn stats(&self) -> StatsSnapshot {
        match self {
            Self::Nbd(disk) => disk.stats(),
            Self::Http { disk, .. } => disk.stats(),
            Self::Rbd(disk) => {
                let (counted, mut stats) = (disk.stats(), StatsSnapshot::default());
                stats.requests = counted.requests;
                stats.read_bytes = counted.read_bytes;
                stats.written_bytes = counted.written_bytes;
                stats
            }
            Self::Whole(..) | Self::Point(..) => StatsSnapshot::default(),
            Self::Stack(_, _, blobs) => blobs.iter().map(Self::stats).fold(StatsSnapshot::default(), added),
        }
    }

    pub(crate) fn last_failure(&self) -> Option<String> {
        match self {
            Self::Nbd(disk) => disk.last_failure(),
            Self::Http { disk, .. } => disk.last_failure(),
            // Its connections are librados's, which makes them again.
            Self::Rbd(_) | Self::Whole(..) | Self::Point(..) => None,
            Self::Stack(_, _, blobs) => blobs.iter().find_map(Self::last_failure),
        }
    }

    /// Why a request was given up, or what it got was not taken.
    pub(crate) fn given_up(&self) -> Option<String> {
        match self {
            Self::Nbd(disk) => disk.given_up(),
            Self::Http { disk, hashed, frames, .. } => {
                let of_frames = || frames.as_ref().and_then(|frames| frames.failure());
                let of_hashes = || hashed.as_ref().and_then(|hashed| hashed.failure());
                of_hashes().or_else(of_frames).or_else(|| disk.given_up())
            }
            Self::Rbd(disk) => disk.given_up(),
            Self::Whole(..) | Self::Point(..) => None,
            Self::Stack(_, _, blobs) => blobs.iter().find_map(Self::given_up),
        }
    }

    /// Has it end what is under way soon.
    pub(crate) fn hurry(&self) {
        match self {
            Self::Nbd(disk) => disk.hurry(),
            Self::Http { disk, .. } => disk.hurry(),
            Self::Rbd(disk) => disk.hurry(),
            Self::Whole(..) | Self::Point(..) => {}
            Self::Stack(_, _, blobs) => blobs.iter().for_each(Self::hurry),
        }
    }

    /// The blobs of registries that it is read from.
    pub(crate) fn hashed(&self) -> Vec<(String, Arc<HashedDisk>)> {
        match self {
            Self::Http { disk, hashed: Some(hashed), .. } => vec![(disk.name(), Arc::clone(hashed))],
            Self::Stack(_, _, blobs) => blobs.iter().flat_map(Self::hashed).collect(),
            _ => Vec::new(),
        }
    }

    /// Has reads go past all copies, while what is returned lives.
    pub(crate) fn reads_afresh(&self) -> Vec<Afresh> {
        if let Self::Stack(_, _, blobs) = self {
            return blobs.iter().flat_map(Self::reads_afresh).collect();
        }
        let Self::Http { disk, cached, .. } = self else { return Vec::new() };
        disk.reads_afresh().into_iter().chain(cached.as_ref().map(|cached| cached.reads_afresh())).collect()
    }

    pub(crate) fn storage(self) -> Arc<dyn Storage> {
        match self {
            Self::Nbd(disk) => disk,
            Self::Http { frames: Some(frames), .. } => frames,
            Self::Http { hashed: Some(hashed), .. } => hashed,
            Self::Http { cached: Some(cached), .. } => cached,
            Self::Http { disk, .. } => disk,
            Self::Rbd(disk) => disk,
            Self::Whole(_, disk) => disk,
            Self::Point(_, disk) => disk,
            Self::Stack(_, disk, _) => disk,
        }
    }

    /// Whether it is open for as much as `access`. Only of images of RBD that is decided when they are opened.
    pub(crate) fn is_open_for(&self, access: Access) -> bool {
        !matches!(self, Self::Rbd(disk) if access == Access::ReadWrite && disk.access() == Access::ReadOnly)
    }
}

/// Figures of two disks.
pub(crate) fn added(mut all: StatsSnapshot, one: StatsSnapshot) -> StatsSnapshot {
    all.requests += one.requests;
    all.read_bytes += one.read_bytes;
    all.written_bytes += one.written_bytes;
    all.retries += one.retries;
    all.reconnects += one.reconnects;
    all
}
