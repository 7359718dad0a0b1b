//! The requests of a benchmark: how many, where, in which order.

use std::time::Duration;

/// Reading or writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Reads.
    Read,
    /// Writes of buffers filled with this byte.
    Write {
        /// The byte.
        pattern: u8,
    },
}

/// The treatment of requests in flight when a flush is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Drain {
    /// They complete first.
    Wait,
    /// They go on.
    Overlap,
}

/// Flushes among the writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FlushEvery {
    /// Requests of a queue between two flushes, at least 1.
    pub(crate) requests: u64,
    /// The treatment of requests in flight.
    pub(crate) drain: Drain,
}

/// The order of offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Each request a step after the one before it, from the beginning again at the end of the disk.
    Sequential,
    /// Any multiple of the step, the same ones for the same seed.
    Random {
        /// Seed.
        seed: u64,
    },
}

/// A benchmark.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// Requests in all; as many as fit into the runtime if `None`.
    pub(crate) count: Option<u64>,
    /// How long requests are sent.
    pub(crate) runtime: Option<Duration>,
    /// Requests in flight, per queue.
    pub(crate) depth: u32,
    /// Bytes of a request.
    pub(crate) buffer_size: usize,
    /// Bytes from a page to where a buffer begins, less than a page.
    pub(crate) buffer_offset: usize,
    /// Bytes between the beginnings of two requests.
    pub(crate) step: u64,
    /// Offset of the first request in bytes.
    pub(crate) offset: u64,
    /// Order of the offsets.
    pub(crate) order: Order,
    /// Reading or writing.
    pub(crate) direction: Direction,
    /// Flushes among the writes.
    pub(crate) flush: Option<FlushEvery>,
    /// Threads, each with a worker and its own requests.
    pub(crate) queues: u32,
}

/// The offsets of one queue's requests, one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Offsets {
    kind: OffsetKind,
    /// Requests that are left; endless if `None`.
    left: Option<u64>,
}

#[derive(Debug, Clone)]
enum OffsetKind {
    /// `next`, then `stride` further, modulo `wrap`; 0 where a request would reach over the end, behind `last`.
    Sequential { next: u64, stride: u64, wrap: u64, last: u64 },
    /// `base` and a multiple of `step` below `units`.
    Random { state: u64, base: u64, step: u64, units: u64 },
}

impl Plan {
    /// The offsets of queue `queue` (below [`Plan::queues`]) on a disk of `disk_size` bytes. `None` if no request
    /// fits on the disk.
    ///
    /// Sequential queues interleave: together they send what one queue would. Offsets wrap at the disk's size, as in
    /// qemu-img 10.0; a request that would fail there, because it reaches over the end, is sent to the beginning.
    pub(crate) fn offsets(&self, queue: u32, disk_size: u64) -> Option<Offsets> {
        let last = disk_size.checked_sub(self.buffer_size as u64)?;
        let queues = u64::from(self.queues);
        let queue = u64::from(queue);
        let left = self.count.map(|count| count / queues + u64::from(queue < count % queues));
        let kind = match self.order {
            Order::Sequential => {
                if self.offset > last {
                    return None;
                }
                let wrap = disk_size.max(1);
                let modulo = |value: u128| (value % u128::from(wrap)) as u64;
                OffsetKind::Sequential {
                    next: modulo(u128::from(self.offset) + u128::from(queue) * u128::from(self.step)),
                    stride: modulo(u128::from(queues) * u128::from(self.step)),
                    wrap,
                    last,
                }
            }
            Order::Random { seed } => OffsetKind::Random {
                state: seed.wrapping_add(queue.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
                base: self.offset,
                step: self.step,
                units: last.checked_sub(self.offset)? / self.step.max(1) + 1,
            },
        };
        Some(Offsets { kind, left })
    }
}

impl Offsets {
    /// The next offset; `None` when all requests were sent.
    #[inline]
    pub(crate) fn next_offset(&mut self) -> Option<u64> {
        if let Some(left) = &mut self.left {
            *left = left.checked_sub(1)?;
        }
        Some(match &mut self.kind {
            OffsetKind::Sequential { next, stride, wrap, last } => {
                let offset = *next;
                let ahead = *wrap - *stride;
                *next = if offset >= ahead { offset - ahead } else { offset + *stride };
                if offset > *last { 0 } else { offset }
            }
            OffsetKind::Random { state, base, step, units } => {
                // splitmix64; the high half of a product maps it to a unit without a division.
                *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut mixed = *state;
                mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                mixed ^= mixed >> 31;
                let unit = ((u128::from(mixed) * u128::from(*units)) >> 64) as u64;
                *base + unit * *step
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            count: Some(10),
            runtime: None,
            depth: 4,
            buffer_size: 4096,
            buffer_offset: 0,
            step: 4096,
            offset: 0,
            order: Order::Sequential,
            direction: Direction::Read,
            flush: None,
            queues: 1,
        }
    }

    fn all(plan: &Plan, queue: u32, size: u64) -> Vec<u64> {
        let mut offsets = plan.offsets(queue, size).unwrap();
        std::iter::from_fn(|| offsets.next_offset()).take(1000).collect()
    }

    #[test]
    fn sequential_offsets_wrap_at_the_end() {
        let plan = plan();
        assert_eq!(all(&plan, 0, 12288), [0, 4096, 8192, 0, 4096, 8192, 0, 4096, 8192, 0]);
        assert_eq!(all(&plan, 0, 4096), [0; 10]);
        // The third one would reach over the end.
        let plan = Plan { step: 3584, count: Some(4), ..plan };
        assert_eq!(all(&plan, 0, 10240), [0, 3584, 0, 512]);
    }

    #[test]
    fn large_steps_wrap_like_small_ones() {
        let plan = Plan { step: 3 << 20, count: Some(50), offset: 512, ..plan() };
        let disk = 1_000_448;
        let wrapped = (0..50u64).map(|i| (512 + i * (3 << 20)) % disk);
        let expected: Vec<u64> = wrapped.map(|at| if at + 4096 > disk { 0 } else { at }).collect();
        assert_eq!(all(&plan, 0, disk), expected);
    }

    #[test]
    fn queues_together_send_what_one_would() {
        let one = Plan { count: Some(11), ..plan() };
        let three = Plan { queues: 3, ..one };
        let mut together: Vec<u64> = (0..3).flat_map(|queue| all(&three, queue, 1 << 20)).collect();
        together.sort_unstable();
        assert_eq!(together, all(&one, 0, 1 << 20));
    }

    #[test]
    fn random_offsets_lie_on_the_disk_and_are_reproducible() {
        let plan = Plan { order: Order::Random { seed: 1 }, count: Some(1000), offset: 8192, ..plan() };
        let offsets = all(&plan, 0, 1 << 16);
        assert!(
            offsets.iter().all(|offset| (8192..=(1 << 16) - 4096).contains(offset) && offset % 4096 == 0)
        );
        assert!(offsets.contains(&8192) && offsets.contains(&((1 << 16) - 4096)));
        assert_eq!(offsets, all(&plan, 0, 1 << 16));
        assert_ne!(offsets, all(&Plan { queues: 2, count: Some(2000), ..plan }, 1, 1 << 16));
    }

    #[test]
    fn a_disk_that_no_request_fits_on_is_refused() {
        assert!(plan().offsets(0, 4095).is_none());
        assert!(Plan { offset: 1 << 20, ..plan() }.offsets(0, 1 << 16).is_none());
        assert!(
            Plan { offset: 1 << 20, order: Order::Random { seed: 0 }, ..plan() }
                .offsets(0, 1 << 16)
                .is_none()
        );
    }
}
