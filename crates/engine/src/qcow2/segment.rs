//! A *segment*: a run of host clusters that is being filled with compressed streams, in memory; and the *parts* that are
//! cut off it to be written. Who fills and writes them is in `gather.rs`.

use crate::qcow2::space::{Allocated, Content};
use crate::qcow2::state::AfterFree;
use std::collections::VecDeque;
use std::ops::Range;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBuf, IoBufs};

/// What the format and the file say about packing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) cluster_bits: u32,
    /// Streams that one host cluster may hold.
    pub(crate) refcount_max: u64,
    /// Host offset that no stream may reach.
    pub(crate) offset_end: u64,
    /// Bytes of a block: what was written up to a block's end is never written again.
    pub(crate) block: u64,
}

/// What is written in one go, with what has to happen then.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) number: u64,
    /// Offset in the file of the bytes.
    pub(crate) host: u64,
    /// Whole blocks; empty once they are written.
    pub(crate) bytes: IoBufs,
    /// References to add, by host cluster.
    pub(crate) references: Vec<(u64, u64)>,
    /// The host cluster in which packing goes on behind it, until the references that the part brings it are added.
    pub(crate) keeps_open: Option<u64>,
    /// The host cluster that earlier parts began and in which packing is over with this one.
    pub(crate) closes: Option<u64>,
    /// References that nothing needs, to be dropped after the write.
    pub(crate) unused: Vec<(Range<u64>, AfterFree)>,
    /// Guest clusters of the streams with bytes in it.
    pub(crate) streams: Vec<u64>,
    /// Guest clusters of streams whose bytes are all written.
    pub(crate) complete: Vec<u64>,
}

/// Host clusters to be filled next.
pub(crate) struct Room {
    pub(crate) allocated: Allocated,
    /// As many bytes.
    pub(crate) buf: IoBuf,
}

/// How a segment's part is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Packing goes on behind it.
    Flush,
    /// Nothing more goes into the segment.
    End,
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    streams: u64,
    /// Of these, without a reference of their own so far.
    unreferenced: u64,
    /// A part with streams of it was cut off, and packing went on in it.
    kept_open: bool,
}

/// A run of host clusters that is being filled.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Host offset of the first byte of `buf`.
    pub(crate) base: u64,
    /// Host offset behind the last stream.
    filled: u64,
    /// Host offset of the end.
    pub(crate) end: u64,
    pub(crate) buf: IoBuf,
    content: Content,
    /// Host cluster of the first of `counts`.
    first: u64,
    counts: VecDeque<Count>,
    /// Guest clusters with bytes from `base` on.
    streams: Vec<u64>,
    bits: u32,
}

impl Segment {
    pub(crate) fn new(room: Room, bits: u32) -> Self {
        let Room { allocated: Allocated { range, content }, buf } = room;
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
    pub(crate) fn next_start(&self, rules: &Rules) -> u64 {
        let cluster = self.filled >> self.bits;
        match self.counts.get((cluster - self.first) as usize) {
            Some(count) if count.streams >= rules.refcount_max && !sabotage::is(Fault::PackTooMany) => {
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
    pub(crate) fn cut(&mut self, cut: Cut, rules: &Rules) -> Part {
        let mut upto = self.base;
        if self.filled > self.base {
            upto = self.filled.next_multiple_of(rules.block).min(self.end);
        }
        // A cluster that can take no more streams has no reference to spare for being kept open.
        let last = self.counts.get(((upto >> self.bits) - self.first) as usize);
        if last.is_some_and(|count| count.streams >= rules.refcount_max) {
            upto = ((upto >> self.bits) + 1) << self.bits;
        }
        let mut bytes = self.buf.split_to((upto - self.base) as usize);
        if let Some(gap) = bytes.as_mut_slice().get_mut((self.filled - self.base) as usize..) {
            gap.fill(0);
        }
        let mut part = Part {
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
        part.bytes.push(bytes);
        (self.base, self.filled) = (upto, upto);
        for (cluster, count) in (self.first..).zip(&mut self.counts) {
            let passed = cut == Cut::End || (cluster + 1) << self.bits <= upto;
            let add = std::mem::take(&mut count.unreferenced);
            if passed && count.kept_open {
                part.closes = Some(cluster);
            }
            count.kept_open |= add > 0;
            match (passed, count.streams, add) {
                (true, 0, _) => {
                    // Zeroes may have been written there, behind the last stream of a block.
                    let written = cluster << self.bits < upto;
                    let then = if written { AfterFree::Reuse } else { AfterFree::unused(self.content) };
                    part.unused.push((cluster..cluster + 1, then));
                }
                (true, _, 0) => part.unused.push((cluster..cluster + 1, AfterFree::Reuse)),
                (true, _, 1) | (false, _, 0) => {}
                (true, _, add) => part.references.push((cluster, add - 1)),
                (false, _, add) => {
                    part.references.push((cluster, add));
                    part.keeps_open = Some(cluster);
                }
            }
        }
        while self.first < upto >> self.bits && self.counts.pop_front().is_some() {
            self.first += 1;
        }
        part
    }
}
