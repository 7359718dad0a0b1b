//! Operations of the threads in one execution, chosen by a seed.

use crate::crash::guest::Request;
use crate::crash::limits::Limits;
use crate::schedules::ground::Ground;
use std::fmt;
use zebu_engine::{Durability, ZeroMode};
use zebu_sim::SimRng;

/// A kind of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Write,
    Flush,
    Discard,
    Zero,
    Read,
    TakeSnapshot,
    DeleteSnapshot,
    Resize,
    Cache,
    Compressed,
    Close,
}

pub(crate) const KINDS: [(Kind, &str); 11] = [
    (Kind::Write, "write"),
    (Kind::Flush, "flush"),
    (Kind::Discard, "discard"),
    (Kind::Zero, "zero"),
    (Kind::Read, "read"),
    (Kind::TakeSnapshot, "snapshot"),
    (Kind::DeleteSnapshot, "deletion of a snapshot"),
    (Kind::Resize, "resize"),
    (Kind::Cache, "change of the cache"),
    (Kind::Compressed, "compressed write"),
    (Kind::Close, "close"),
];

impl Kind {
    /// Whether there is such an operation on the image.
    pub(crate) fn suits(self, ground: &Ground) -> bool {
        match self {
            Self::TakeSnapshot => ground.takes_snapshots(),
            Self::DeleteSnapshot => ground.has_snapshot(),
            Self::Compressed => ground.compresses(),
            _ => true,
        }
    }
}

/// One operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Op {
    Guest(Request),
    TakeSnapshot(String),
    DeleteSnapshot,
    Resize(u64),
    /// Bytes above the least.
    Cache(u64),
    /// Looks at the kind of a range.
    Extent(u64),
    /// After all other requests of the execution have ended.
    Close,
    /// Beside other requests.
    CloseBeside,
    /// Beside other requests; a write of it fails.
    CloseThatFails,
    /// A flush that a close may refuse.
    FlushBeside,
    /// A flush, in the midst of which the worker stands still.
    FlushAndLeave(u64),
    /// A flush, after which the worker stands still.
    FlushThenLeave,
}

impl Op {
    /// Whether its worker stands still from then on.
    pub(crate) fn leaves(&self) -> bool {
        matches!(self, Self::FlushAndLeave(_) | Self::FlushThenLeave)
    }

    /// Its name in tables.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Guest(Request::Write { .. }) => "write",
            Self::Guest(Request::WriteCompressed { .. }) => "compressed write",
            Self::Guest(Request::Discard { .. }) => "discard",
            Self::Guest(Request::Zero { .. }) => "zero",
            Self::Guest(Request::Read { .. }) => "read",
            Self::Guest(Request::Flush)
            | Self::FlushBeside
            | Self::FlushAndLeave(_)
            | Self::FlushThenLeave => "flush",
            Self::TakeSnapshot(_) => "snapshot",
            Self::DeleteSnapshot => "its deletion",
            Self::Resize(_) => "resize",
            Self::Cache(_) => "change of the cache",
            Self::Extent(_) => "extent",
            Self::Close | Self::CloseBeside | Self::CloseThatFails => "close",
        }
    }
}

/// The operations of each thread, one after the other.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) threads: Vec<Vec<Op>>,
    /// Bytes of an allocation window at most.
    pub(crate) window: u64,
    pub(crate) limits: Limits,
    /// Decides about the disk.
    pub(crate) seed: u64,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {:#x}, windows of {:#x} bytes at most, {}", self.seed, self.window, self.limits)?;
        for (number, ops) in self.threads.iter().enumerate() {
            for op in ops {
                write!(f, "\n  thread {number}: {op:x?}")?;
            }
        }
        Ok(())
    }
}

impl Plan {
    /// A plan in which the first two threads do `kinds`, each among a few other things.
    pub(crate) fn random(rng: &mut SimRng, ground: &Ground, kinds: [Kind; 2]) -> Self {
        let mut maker = Maker { rng, ground };
        let mut threads: Vec<Vec<Op>> =
            kinds.iter().enumerate().map(|(thread, kind)| maker.thread(thread, *kind)).collect();
        if maker.rng.chance(1, 4) {
            let kind = maker.other();
            threads.push(maker.thread(2, kind));
        }
        let closes = kinds.contains(&Kind::Close);
        if !closes && maker.rng.chance(1, 6) {
            let leave = match maker.rng.below(3) {
                0 => Op::FlushThenLeave,
                _ => Op::FlushAndLeave(maker.rng.below(4)),
            };
            threads[0].push(leave);
        }
        let window = *maker.rng.pick(&[1, 1, 4096, u64::MAX]);
        let seed = maker.rng.next_u64();
        Self { threads, window, limits: Limits::of_seed(seed), seed }
    }

    pub(crate) fn resizes(&self) -> bool {
        self.threads.iter().flatten().any(|op| matches!(op, Op::Resize(_)))
    }
}

struct Maker<'a> {
    rng: &'a mut SimRng,
    ground: &'a Ground,
}

impl Maker<'_> {
    fn thread(&mut self, thread: usize, kind: Kind) -> Vec<Op> {
        let own = self.op(thread, kind);
        let mut ops: Vec<Op> = (0..self.rng.below(3))
            .map(|_| {
                let other = self.other();
                self.op(thread, other)
            })
            .collect();
        let at = if kind == Kind::Close { ops.len() } else { self.rng.index(ops.len() + 1) };
        ops.insert(at, own);
        ops
    }

    /// The kinds of operations that threads do most.
    fn other(&mut self) -> Kind {
        let kind = match self.rng.below(12) {
            0..5 => Kind::Write,
            5..8 => Kind::Flush,
            8 => Kind::Discard,
            9 => Kind::Zero,
            10 => Kind::Compressed,
            _ => Kind::Read,
        };
        if kind.suits(self.ground) { kind } else { Kind::Write }
    }

    /// A range of a few sectors or clusters at one of a few places: threads shall meet.
    fn range(&mut self) -> (u64, u64) {
        let setup = &self.ground.setup;
        let cluster = setup.cluster_size;
        let last = (setup.size - 1) / cluster;
        let first = (*self.rng.pick(&[0, 0, 1, 2, 3, 63, 64, 65, 140, 210, last])).min(last);
        let mut start = first * cluster;
        let sectors = cluster / 512;
        if sectors > 1 && self.rng.chance(1, 3) {
            start += self.rng.below(sectors) * 512;
        }
        let len = match self.rng.below(4) {
            0 => 512,
            1 | 2 => cluster,
            _ => 2 * cluster,
        };
        let end = (start + len).min(setup.size);
        let start = start.min(end - 512);
        (start, end - start)
    }

    fn op(&mut self, thread: usize, kind: Kind) -> Op {
        let (offset, len) = self.range();
        let cluster = self.ground.setup.cluster_size;
        let size = self.ground.setup.size;
        let durability = if self.rng.chance(1, 8) { Durability::Durable } else { Durability::Volatile };
        match kind {
            Kind::Write => Op::Guest(Request::Write { offset, len, durability }),
            Kind::Flush => Op::Guest(Request::Flush),
            Kind::Discard => Op::Guest(Request::Discard { offset, len }),
            Kind::Zero => {
                let mode = *self.rng.pick(&[ZeroMode::Keep, ZeroMode::Unmap]);
                Op::Guest(Request::Zero { offset, len, mode })
            }
            Kind::Read if self.rng.chance(1, 6) => Op::Extent(offset),
            Kind::Read => Op::Guest(Request::Read { offset, len }),
            Kind::TakeSnapshot => Op::TakeSnapshot(format!("of {thread}, {}", self.rng.below(1 << 20))),
            Kind::DeleteSnapshot => Op::DeleteSnapshot,
            Kind::Resize => {
                let by = self.rng.between(1, 12) * 512;
                let far = *self.rng.pick(&[0, 0, 0, cluster * 64]);
                let larger = size + by + far;
                Op::Resize(if self.rng.chance(3, 5) { larger } else { size.saturating_sub(by).max(512) })
            }
            Kind::Cache => Op::Cache(*self.rng.pick(&[0, 0, 700, 4 << 10, 64 << 10])),
            Kind::Compressed => {
                let start = offset / cluster * cluster;
                let end = (offset + len).next_multiple_of(cluster).min(size);
                Op::Guest(Request::WriteCompressed { offset: start, len: end - start, durability })
            }
            Kind::Close => Op::Close,
        }
    }
}
