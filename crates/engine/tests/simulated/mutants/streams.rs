//! The random streams that mutants run against.

use crate::crash::life::{Extent, Tally, live};
use crate::crash::limits::Limits;
use crate::crash::setup::{Origin, Setup};
use crate::crash::{forks, left_behind, resizes, vm_state};
use crate::faults::nth_operation::{many_failures, one_failure};
use crate::faults::{full_disk, header_writes};
use crate::mutants::{marks, snapshot_lives};
use rustix::io::Errno;
use zebu_sim::{FailedEffect, OpClass, SimRng};
use zebu_storage::sabotage::{self, Limit};

/// Which images the crash replay runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Shape {
    Any,
    /// With an external data file.
    External,
    /// With clusters and tables that a snapshot shares.
    Snapshot,
    /// With a backing image.
    Backed,
    /// A chain of five images, the ones between shorter than the last.
    DeepChain,
    /// Version 3 with subclusters, zeroed by the file system.
    Subclusters,
    /// O_DIRECT in blocks that are larger than a sector.
    Direct,
    /// A cache of two slices.
    TwoSlices,
    /// A refcount table that has to grow.
    GrowingTable,
    /// Refcounts that need many blocks.
    ManyBlocks,
    /// With compressed clusters.
    Compressed,
    /// With compressed clusters, of which few may share a host cluster.
    NarrowCounts,
    /// With dirty bitmaps.
    Bitmaps,
    /// Encrypted.
    Encrypted,
    /// Encrypted, in an external data file.
    EncryptedExternal,
}

impl Shape {
    fn setup(self, rng: &mut SimRng) -> Setup {
        if self == Shape::GrowingTable {
            let mut setup =
                Setup { cluster_size: 512, refcount_bits: 64, origin: Origin::Own, ..Setup::plain() };
            (setup.size, setup.pattern) = (2600 << 10, 1900 << 10);
            return setup;
        }
        if self == Shape::ManyBlocks {
            let mut setup = Setup { cluster_size: 512, refcount_bits: 64, ..Setup::plain() };
            setup.size = rng.between(100, 300) << 9;
            return setup;
        }
        loop {
            let setup = Setup::random(rng);
            let fits = match self {
                Shape::External => setup.external_data,
                Shape::Snapshot => setup.origin == Origin::Snapshot,
                Shape::Backed => matches!(setup.origin, Origin::RawBase | Origin::Qcow2Base),
                Shape::DeepChain => setup.origin == Origin::DeepChain,
                Shape::Subclusters => {
                    setup.extended_l2
                        && !setup.external_data
                        && setup.zero_policy == zebu_engine::ZeroPolicy::Fallocate
                }
                Shape::Direct => setup.direct == 4096,
                Shape::TwoSlices => setup.cache_size == Some(2 * (512 + 96)) && setup.slice_size == Some(512),
                Shape::Compressed => setup.gather_memory.is_some(),
                Shape::NarrowCounts => setup.gather_memory.is_some() && setup.refcount_bits <= 2,
                Shape::Bitmaps => setup.bitmaps,
                Shape::Encrypted => !setup.external_data && setup.size <= 512 << 10,
                Shape::EncryptedExternal => setup.external_data && setup.size <= 512 << 10,
                Shape::Any | Shape::GrowingTable | Shape::ManyBlocks => true,
            };
            if fits && matches!(self, Shape::Encrypted | Shape::EncryptedExternal) {
                return setup.encrypted();
            }
            if fits {
                return setup;
            }
        }
    }
}

/// One kind of stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {
    /// Requests, and crashes at random moments.
    Crash(Shape),
    /// Requests, and one operation of the disk fails.
    Fails(OpClass, Errno),
    /// Requests, and everything fails now and then.
    ManyFail,
    /// Requests while the disk is full.
    Full,
    /// Requests beside resizes.
    Resizes,
    /// A write fails while the disk grows.
    FailedGrowth,
    /// The first requests to an image with a dirty bitmap, and crashes at random moments.
    Marks,
    /// Requests between internal snapshots that come and go, and crashes while they do.
    Snapshots,
    /// Requests beside the state of a machine, snapshots of it and growth over it.
    VmState,
    /// Requests beside forks of the disk, and crashes while they are made.
    Forks,
    /// Servers after each other, killed with requests in flight.
    Killed,
    /// A named scenario, which panics if it is not as it should be.
    Scenario(fn()),
}

const EXTENT: Extent =
    Extent { phases: 3, streams: 4, requests: 12, moments: 8, states: 12, generations: 1, by_qemu: 0 };

impl Stream {
    /// Runs it with one seed. `Err`: what must not be.
    pub(crate) fn run(self, seed: u64) -> Result<(), String> {
        // Windows of one cluster, of some, or as they are.
        sabotage::limit(Limit::WindowBytes, [1, 4096, u64::MAX][(seed % 3) as usize]);
        let is_scenario = matches!(self, Stream::Scenario(_));
        if is_scenario { Limits::ORDINARY } else { Limits::of_seed(seed) }.set();
        match self {
            Stream::Crash(shape) => {
                let mut rng = SimRng::new(seed ^ 0x6d75_7461_6e74);
                let setup = shape.setup(&mut rng);
                let files = setup.make(seed);
                live(&setup, &files, setup.model(), &mut rng, EXTENT, &mut Tally::default())
                    .map_err(|e| format!("{e}\n{setup:?}"))
            }
            Stream::Fails(class, errno) => {
                one_failure(seed, class, errno, &zebu_sim::Tally::default()).map(drop)
            }
            Stream::ManyFail => many_failures(seed, &zebu_sim::Tally::default()),
            Stream::Full => full_disk::fill_up(seed).map(drop),
            Stream::Resizes => resizes::resizes_beside_writes(seed, &zebu_sim::Tally::default()),
            Stream::FailedGrowth => {
                let effect = [FailedEffect::Nothing, FailedEffect::All][(seed % 2) as usize];
                header_writes::resize_with_a_failing(OpClass::Write, seed / 2, effect, 4 << 20).map(drop)
            }
            Stream::Marks => marks::live(seed),
            Stream::Snapshots => snapshot_lives::live(seed),
            Stream::VmState => vm_state::live(seed).map(drop),
            Stream::Forks => forks::live(seed),
            Stream::Killed => left_behind::killed_servers(seed).map(drop),
            Stream::Scenario(scenario) => {
                scenario();
                Ok(())
            }
        }
    }
}
