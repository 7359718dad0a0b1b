//! Seeded streams of operations on a disk.

use crate::random::Random;
use std::ops::Range;
use zebu_engine::{Durability, ZeroMode};

/// One operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Reads and compares.
    Read {
        /// Bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Writes bytes made from `seed`.
    Write {
        /// Bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Seed of the data.
        seed: u64,
        /// FUA or not.
        durability: Durability,
    },
    /// Writes zeroes.
    Zero {
        /// Bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Whether space may go.
        mode: ZeroMode,
    },
    /// Discards.
    Discard {
        /// Bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Flushes.
    Flush,
    /// Changes the size.
    Resize {
        /// New size in bytes.
        size: u64,
    },
    /// Closes the image and opens it again.
    Reopen,
}

impl Op {
    /// The range that it reads or changes; `None` if it changes nothing or everything.
    pub fn range(&self) -> Option<Range<u64>> {
        match *self {
            Op::Read { offset, len }
            | Op::Write { offset, len, .. }
            | Op::Zero { offset, len, .. }
            | Op::Discard { offset, len } => Some(offset..offset + len),
            Op::Flush | Op::Resize { .. } | Op::Reopen => None,
        }
    }

    /// Whether it runs alone.
    pub fn is_barrier(&self) -> bool {
        matches!(self, Op::Resize { .. } | Op::Reopen)
    }

    /// Whether the two may run at the same time with one possible outcome.
    pub fn commutes_with(&self, other: &Op) -> bool {
        let reads = |op: &Op| matches!(op, Op::Read { .. });
        match (self.range(), other.range()) {
            (Some(a), Some(b)) => (reads(self) && reads(other)) || a.end <= b.start || b.end <= a.start,
            _ => !self.is_barrier() && !other.is_barrier(),
        }
    }

    /// The bytes that a write with this seed writes.
    pub fn data(seed: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let mut random = Random::new(seed);
        match seed % 16 {
            // All zeroes, given as data: must read back as such whatever is made of it.
            0 => {}
            1 => bytes.fill(random.between(1, 255) as u8),
            _ => random.fill(&mut bytes),
        }
        bytes
    }
}

/// Which operations a stream has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// All of them.
    Everything,
    /// For one of several queues on one image: requests within blocks of [`LANE_BLOCK`] bytes, of which every
    /// `count`-th from the `index`-th on is this queue's. No two queues touch the same byte, and all of them the same
    /// clusters. Nothing that concerns the image as a whole but flushes.
    Lane {
        /// Below `count`.
        index: u64,
        /// At least 1.
        count: u64,
    },
}

/// Bytes of the blocks that belong to one queue or another.
pub const LANE_BLOCK: u64 = 4096;

/// Makes operations for a disk, whose size it follows.
#[derive(Debug)]
pub struct Stream {
    random: Random,
    size: u64,
    cluster: u64,
    largest: u64,
    mix: Mix,
    /// Half of the operations fall into this window, which moves now and then: they meet in the same clusters.
    window: Range<u64>,
}

impl Stream {
    /// For a disk of `size` bytes, which may grow to half as much again.
    pub fn new(seed: u64, size: u64, cluster: u64, mix: Mix) -> Self {
        let mut stream =
            Self { random: Random::new(seed), size, cluster, largest: size + size / 2, mix, window: 0..size };
        stream.move_window();
        stream
    }

    /// The next operation.
    pub fn next_op(&mut self) -> Op {
        if self.random.chance(3) {
            self.move_window();
        }
        match self.random.below(100) {
            0..40 => {
                let (offset, len) = self.place();
                let seed = self.random.bits();
                let durability =
                    if self.random.chance(4) { Durability::Durable } else { Durability::Volatile };
                Op::Write { offset, len, seed, durability }
            }
            40..62 => {
                let (offset, len) = self.place();
                Op::Read { offset, len }
            }
            62..75 => {
                let (offset, len) = self.place();
                let mode = *self.random.pick(&[ZeroMode::Keep, ZeroMode::Unmap]);
                Op::Zero { offset, len, mode }
            }
            75..88 => {
                let (offset, len) = self.place();
                Op::Discard { offset, len }
            }
            88..96 => Op::Flush,
            _ if self.mix != Mix::Everything => Op::Flush,
            96..98 => {
                let sectors = self.random.between(self.largest / 3 / 512, self.largest / 512);
                Op::Resize { size: sectors.max(1) * 512 }
            }
            _ => Op::Reopen,
        }
    }

    /// Tells it that a change of size came to pass.
    pub fn resized(&mut self, size: u64) {
        self.size = size;
        self.move_window();
    }

    fn move_window(&mut self) {
        let len = (self.cluster * self.random.between(1, 6)).min(self.size);
        let start = self.random.below(self.size - len + 1) / 512 * 512;
        self.window = start..start + len;
    }

    fn place(&mut self) -> (u64, u64) {
        if let Mix::Lane { index, count } = self.mix {
            return self.place_in_lane(index, count);
        }
        let area = if self.random.chance(50) { self.window.clone() } else { 0..self.size };
        let unit = match self.random.below(10) {
            0..4 => self.cluster,
            4..6 => 4096,
            6..9 => 512,
            _ => 1,
        };
        let span = area.end - area.start;
        let offset = (area.start + self.random.below(span)) / unit * unit;
        let most = match self.random.below(10) {
            0..5 => 8192,
            5..8 => self.cluster,
            _ => self.cluster * 5,
        };
        let len = self.random.between(1, most.div_ceil(unit).max(1)) * unit;
        (offset, len.min(1 << 22).min(self.size - offset))
    }
}

impl Stream {
    fn place_in_lane(&mut self, index: u64, count: u64) -> (u64, u64) {
        let area = if self.random.chance(70) { self.window.clone() } else { 0..self.size };
        let rounds = self.size / LANE_BLOCK / count;
        let round = self.random.between(area.start, area.end - 1) / LANE_BLOCK / count;
        let block = (round.min(rounds - 1) * count + index) * LANE_BLOCK;
        let unit = *self.random.pick(&[1, 512, 512, LANE_BLOCK]);
        let start = self.random.below(LANE_BLOCK / unit) * unit;
        let len = self.random.between(1, (LANE_BLOCK - start) / unit) * unit;
        (block + start, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_lie_on_the_disk_and_repeat_with_the_seed() {
        for (size, cluster) in [(2 << 20, 512), (512, 65536), (10 << 20 | 512, 2 << 20)] {
            let ops = |seed| {
                let mut stream = Stream::new(seed, size, cluster, Mix::Everything);
                (0..2000).map(|_| stream.next_op()).collect::<Vec<_>>()
            };
            for op in ops(3) {
                if let Some(range) = op.range() {
                    assert!(range.start < range.end && range.end <= size, "{op:?} on {size}");
                }
            }
            assert_eq!(ops(3), ops(3));
            assert_ne!(ops(3), ops(4));
        }
    }

    #[test]
    fn lanes_do_not_touch() {
        let size = (1 << 20) + 512;
        for index in 0..3 {
            let mut stream = Stream::new(index, size, 65536, Mix::Lane { index, count: 3 });
            for op in (0..2000).map(|_| stream.next_op()) {
                let Some(range) = op.range() else { continue };
                assert_eq!(range.start / LANE_BLOCK % 3, index, "{op:?}");
                assert_eq!(range.start / LANE_BLOCK, (range.end - 1) / LANE_BLOCK, "{op:?}");
                assert!(range.end <= size);
            }
        }
    }

    #[test]
    fn only_operations_without_a_common_byte_run_together() {
        let write = |offset, len| Op::Write { offset, len, seed: 0, durability: Durability::Volatile };
        assert!(write(0, 4).commutes_with(&write(4, 4)));
        assert!(!write(0, 5).commutes_with(&Op::Discard { offset: 4, len: 4 }));
        assert!(Op::Read { offset: 0, len: 8 }.commutes_with(&Op::Read { offset: 4, len: 8 }));
        assert!(write(0, 5).commutes_with(&Op::Flush));
        assert!(!Op::Flush.commutes_with(&Op::Reopen));
    }
}
