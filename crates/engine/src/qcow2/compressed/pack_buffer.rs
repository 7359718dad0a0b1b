//! A run of host clusters that is being filled with compressed streams, in memory, and the writes that are cut off it.

use crate::qcow2::space::free::{Allocated, SpaceContent};
use crate::qcow2::space::quarantine::FreeMode;
use std::collections::VecDeque;
use std::ops::Range;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBuf, IoBufs};

/// Rules of packing, by the format and the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackRules {
    pub(super) cluster_bits: u32,
    /// Streams that one host cluster may hold.
    pub(super) refcount_max: u64,
    /// Host offset that no stream may reach.
    pub(super) offset_end: u64,
    /// Bytes of a block: what was written up to a block's end is never written again.
    pub(super) block: u64,
}

/// One write of packed bytes, with what has to happen then.
#[derive(Debug)]
pub(crate) struct PackedWrite {
    pub(super) number: u64,
    /// Offset in the file of the bytes.
    pub(super) host: u64,
    /// Whole blocks; empty once they are written.
    pub(super) bytes: IoBufs,
    /// References to add, by host cluster.
    pub(super) references: Vec<(u64, u64)>,
    /// The host cluster in which packing goes on behind it, until the references that the write brings it are added.
    pub(super) keeps_open: Option<u64>,
    /// The host cluster that earlier writes began and in which packing is over with this one.
    pub(super) closes: Option<u64>,
    /// References that nothing needs, to be dropped after the write.
    pub(super) unused: Vec<(Range<u64>, FreeMode)>,
    /// Guest clusters of the streams with bytes in it.
    pub(super) streams: Vec<u64>,
    /// Guest clusters of streams whose bytes are all written.
    pub(super) complete: Vec<u64>,
}

impl PackedWrite {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Offset in the file of the bytes.
    pub(super) fn host(&self) -> u64 {
        self.host
    }

    /// The guest cluster of the first stream with bytes in it.
    pub(super) fn first_guest(&self) -> u64 {
        self.streams.first().copied().unwrap_or_default()
    }

    /// A host cluster, and how many references it is to get.
    pub(super) fn next_reference(&self) -> Option<(u64, u64)> {
        self.references.last().copied()
    }

    /// The bytes that are not written yet.
    pub(super) fn take_bytes(&mut self) -> IoBufs {
        std::mem::take(&mut self.bytes)
    }

    /// Keeps bytes that could not be written.
    pub(super) fn give_bytes_back(&mut self, bytes: IoBufs) {
        self.bytes = bytes;
    }

    /// References to drop after the write.
    pub(super) fn take_unused(&mut self) -> Vec<(Range<u64>, FreeMode)> {
        std::mem::take(&mut self.unused)
    }

    /// A guest cluster whose stream is written and not linked.
    pub(super) fn next_complete(&self) -> Option<u64> {
        self.complete.last().copied()
    }

    /// Notes that the stream of [`PackedWrite::next_complete`] is linked.
    pub(super) fn note_linked(&mut self) {
        self.complete.pop();
    }
}

impl PackRules {
    /// `block`: bytes.
    pub(crate) const fn new(cluster_bits: u32, refcount_max: u64, offset_end: u64, block: u64) -> Self {
        Self { cluster_bits, refcount_max, offset_end, block }
    }

    /// Streams that one host cluster may hold.
    pub(crate) fn refcount_max(&self) -> u64 {
        self.refcount_max
    }
}

/// Host clusters to be filled next.
pub(crate) struct Room {
    pub(super) allocated: Allocated,
    /// As many bytes.
    pub(super) buf: IoBuf,
}

impl Room {
    pub(crate) fn new(allocated: Allocated, buf: IoBuf) -> Self {
        Self { allocated, buf }
    }
}

/// How a write is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Packing goes on behind it.
    Flush,
    /// Nothing more goes into the buffer.
    End,
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    streams: u64,
    /// Of these, without a reference of their own so far.
    unreferenced: u64,
    /// A write with streams of it was cut off, and packing went on in it.
    kept_open: bool,
}

/// A run of host clusters that is being filled.
#[derive(Debug)]
pub(crate) struct PackBuffer {
    /// Host offset of the first byte of `buf`.
    pub(super) base: u64,
    /// Host offset behind the last stream.
    filled: u64,
    /// Host offset of the end.
    pub(super) end: u64,
    pub(super) buf: IoBuf,
    content: SpaceContent,
    /// Host cluster of the first of `counts`.
    first: u64,
    counts: VecDeque<Count>,
    /// Guest clusters with bytes from `base` on.
    streams: Vec<u64>,
    bits: u32,
}

impl PackBuffer {
    pub(crate) fn new(room: Room, bits: u32) -> Self {
        let Room { allocated, buf } = room;
        let (range, content) = allocated.into_parts();
        let base = range.start << bits;
        debug_assert_eq!(buf.len() as u64, (range.end - range.start) << bits);
        Self {
            base,
            filled: base,
            end: range.end << bits,
            buf,
            content,
            first: range.start,
            counts: range.clone().map(|_| Count::default()).collect(),
            streams: Vec::new(),
            bits,
        }
    }

    /// Where the next stream starts: behind the last one, or in the next cluster if the one there holds as many as it
    /// may.
    pub(crate) fn next_start(&self, rules: &PackRules) -> u64 {
        let cluster = self.filled >> self.bits;
        match self.counts.get((cluster - self.first) as usize) {
            Some(count) if count.streams >= rules.refcount_max() && !sabotage::is(Fault::PackTooMany) => {
                (cluster + 1) << self.bits
            }
            _ => self.filled,
        }
    }

    /// Puts bytes of the stream of guest cluster `guest` at host offset `at`.
    pub(crate) fn put(&mut self, guest: u64, at: u64, bytes: &[u8]) {
        let end = at + bytes.len() as u64;
        // What is skipped because a cluster is full of streams must not show what the buffer held before.
        let (gap, start) = ((self.filled - self.base) as usize, (at - self.base) as usize);
        let into = self.buf.as_mut_slice();
        if let Some(gap) = into.get_mut(gap..start) {
            gap.fill(0);
        }
        if let Some(place) = into.get_mut(start..start + bytes.len()) {
            place.copy_from_slice(bytes);
        }
        for cluster in at >> self.bits..=(end - 1) >> self.bits {
            if let Some(count) = self.counts.get_mut((cluster - self.first) as usize) {
                count.streams += 1;
                count.unreferenced += 1;
            }
        }
        self.filled = end;
        self.streams.push(guest);
    }

    /// Cuts off what was filled, in whole blocks.
    pub(crate) fn cut(&mut self, cut: Cut, rules: &PackRules) -> PackedWrite {
        let mut upto = self.base;
        if self.filled > self.base {
            upto = self.filled.next_multiple_of(rules.block).min(self.end);
        }
        // A cluster that can take no more streams has no reference to spare for being kept open.
        let last = self.counts.get(((upto >> self.bits) - self.first) as usize);
        if last.is_some_and(|count| count.streams >= rules.refcount_max()) {
            upto = ((upto >> self.bits) + 1) << self.bits;
        }
        let mut bytes = self.buf.split_to((upto - self.base) as usize);
        if let Some(gap) = bytes.as_mut_slice().get_mut((self.filled - self.base) as usize..) {
            gap.fill(0);
        }
        let mut write = PackedWrite {
            number: 0,
            host: self.base,
            bytes: IoBufs::new(),
            references: Vec::new(),
            keeps_open: None,
            closes: None,
            unused: Vec::new(),
            streams: std::mem::take(&mut self.streams),
            complete: Vec::new(),
        };
        write.bytes.push(bytes);
        (self.base, self.filled) = (upto, upto);
        for (cluster, count) in (self.first..).zip(&mut self.counts) {
            let passed = cut == Cut::End || (cluster + 1) << self.bits <= upto;
            let add = std::mem::take(&mut count.unreferenced);
            if passed && count.kept_open {
                write.closes = Some(cluster);
            }
            count.kept_open |= add > 0;
            match (passed, count.streams, add) {
                (true, 0, _) => {
                    // Zeroes may have been written there, behind the last stream of a block.
                    let written = cluster << self.bits < upto;
                    let then = if written { FreeMode::Reuse } else { FreeMode::unused(self.content) };
                    write.unused.push((cluster..cluster + 1, then));
                }
                (true, _, 0) => write.unused.push((cluster..cluster + 1, FreeMode::Reuse)),
                (true, _, 1) | (false, _, 0) => {}
                (true, _, add) => write.references.push((cluster, add - 1)),
                (false, _, add) => {
                    write.references.push((cluster, add));
                    write.keeps_open = Some(cluster);
                }
            }
        }
        while self.first < upto >> self.bits && self.counts.pop_front().is_some() {
            self.first += 1;
        }
        write
    }
}
