//! The gatherer: compressed streams on their way to the file, packed byte by byte into host clusters in memory.
//!
//! A *segment* is a run of host clusters that is being filled (`segment.rs`); a *part* is what of it is written in one
//! go: all of it when it is full, or what there is at a flush, after which packing goes on at the next block, so that a
//! block that is durable is never written again. A stream is linked when all parts that hold bytes of it are written; it
//! may reach from one segment into the next, if that follows it in the file.
//!
//! No host cluster takes more streams than its refcount can say. Until packing has moved on from a cluster, the
//! reference that its window gave it is kept, so that it can't become free under the hands of the gatherer when the
//! streams in it are overwritten; with the last part it counts for one of the streams. Parts are written side by side:
//! the last one of a cluster waits for the references of those before it, or the overwriting of its streams would
//! free a cluster to which an earlier part is still on its way.
//!
//! Here is the bookkeeping alone, under one lock that is taken last (after a slice's shard, before `space`). What is
//! done with the parts is in `write_out.rs`.

use crate::qcow2::segment::{Cut, Part, Room, Rules, Segment};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Acquire, Ordering::Release};
use crate::sync::{Mutex, MutexGuard};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::PoisonError;
use std::task::{Poll, Waker};
use zebu_storage::sabotage::{self, Fault};

/// A stream that is not linked yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream {
    /// Offset in the file, bytes.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// Parts with bytes of it that are not written yet.
    parts: u8,
}

/// What became of a stream that was to be added.
pub(crate) enum Added {
    /// It is in; the part, if any, is to be written.
    Done(Option<Box<Part>>),
    /// There is no room to pack into.
    NeedsRoom,
    /// No descriptor can say where it would lie.
    OutOfReach,
}

/// Where the bytes of a stream are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// They were copied from memory.
    Memory,
    /// Some are being written.
    BeingWritten,
    /// These (host offsets) are in the file; the others, of a part that comes later or failed, were copied to their
    /// places.
    Split(Range<u64>),
    /// In the file: linked, or written and not linked yet.
    File,
}

#[derive(Debug, Default)]
struct State {
    open: Option<Segment>,
    /// By guest cluster.
    streams: BTreeMap<u64, Stream>,
    /// By their numbers, the parts that are being written and linked: the host offsets of what is written.
    under_way: BTreeMap<u64, Range<u64>>,
    /// Parts that failed, and why; they are tried again by the next flush.
    failed: Vec<(Part, Error)>,
    /// Host clusters in which packing went on behind parts whose references are not added yet, and how many those are.
    awaited: BTreeMap<u64, u32>,
    parts_made: u64,
    /// Of the segment and of the parts.
    bytes: usize,
    waiting: Vec<Waker>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Gatherer {
    state: Mutex<State>,
    /// Streams that are not linked, so that readers need no lock where there are none.
    unlinked: AtomicUsize,
    /// Something was gathered since the image was opened.
    used: AtomicBool,
    /// Held while room is made.
    pub(crate) room_gate: crate::gate::Gate,
}

impl State {
    /// Counts a part as under way. `None`: it has nothing to do.
    fn start(&mut self, mut part: Part) -> Option<Part> {
        let idle = part.bytes.is_empty()
            && part.references.is_empty()
            && part.unused.is_empty()
            && part.streams.is_empty()
            && part.complete.is_empty();
        if idle {
            return None;
        }
        // A part that failed keeps its number: a flush that began before waits for it again, and must not take it for one
        // that came later.
        if part.number == 0 {
            self.parts_made += 1;
            part.number = self.parts_made;
            if let Some(cluster) = part.keeps_open {
                *self.awaited.entry(cluster).or_default() += 1;
            }
        } else if sabotage::is(Fault::RenumberFailedPart) {
            self.parts_made += 1;
            part.number = self.parts_made;
        }
        self.under_way.insert(part.number, part.host..part.host + part.bytes.len() as u64);
        Some(part)
    }

    /// The bytes at host offset `from` that wait to be written, or the first ones behind it: a run of them with its host
    /// offset.
    fn memory_from(&self, from: u64) -> Option<(u64, &[u8])> {
        let open = self.open.iter().map(|segment| (segment.base, std::slice::from_ref(&segment.buf)));
        let failed = self.failed.iter().map(|(part, _)| (part.host, &part.bytes.0[..]));
        let runs = open.chain(failed).flat_map(|(host, bufs)| {
            // A part is one buffer, unless a failed write gave it back in pieces.
            bufs.iter().scan(host, |at, buf| {
                let start = *at;
                *at += buf.len() as u64;
                Some((start, buf.as_slice()))
            })
        });
        runs.filter(|(start, bytes)| start + bytes.len() as u64 > from).min_by_key(|(start, _)| *start)
    }

    /// Ends the segment that is being filled; what of its memory the part does not hold is given up.
    fn end_segment(&mut self, rules: &Rules) -> Option<Part> {
        let mut segment = self.open.take()?;
        let part = segment.cut(Cut::End, rules);
        self.bytes -= segment.buf.len();
        self.start(part)
    }
}

impl Gatherer {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each critical section leaves the state whole, so a panic elsewhere does not matter.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Packs the stream of guest cluster `guest`, which is not in it; `bytes` are fewer than a cluster. `room` gives
    /// the host clusters to go on in.
    pub(crate) fn add(
        &self,
        guest: u64,
        bytes: &[u8],
        rules: &Rules,
        mut room: impl FnMut() -> Option<Room>,
    ) -> Added {
        let len = bytes.len() as u64;
        self.used.store(true, Release);
        let mut state = self.state();
        let state = &mut *state;
        let mut ended = None;
        let stream = loop {
            let start = state.open.as_ref().map(|segment| (segment.next_start(rules), segment.end));
            let fits_from = start.filter(|(at, end)| at + len <= *end).map(|(at, _)| at);
            if let (Some(at), Some(segment)) = (fits_from, &mut state.open) {
                if at + len > rules.offset_end {
                    return Added::OutOfReach;
                }
                segment.put(guest, at, bytes);
                break Stream { offset: at, len, parts: 1 };
            }
            let Some(room) = room() else { return Added::NeedsRoom };
            state.bytes += room.buf.len();
            let mut next = Segment::new(room, rules.cluster_bits);
            let reaches = start.filter(|(at, end)| at < end && *end == next.base);
            if let (Some((at, end)), Some(segment)) = (reaches, &mut state.open)
                && at + len <= rules.offset_end
            {
                let (head, tail) = bytes.split_at((end - at) as usize);
                segment.put(guest, at, head);
                next.put(guest, end, tail);
                ended = state.end_segment(rules);
                state.open = Some(next);
                break Stream { offset: at, len, parts: 2 };
            }
            ended = state.end_segment(rules);
            state.open = Some(next);
        };
        state.streams.insert(guest, stream);
        self.unlinked.store(state.streams.len(), Release);
        Added::Done(ended.map(Box::new))
    }

    /// The first guest cluster in `clusters` that is not linked yet, with its stream.
    #[inline]
    pub(crate) fn first_in(&self, clusters: Range<u64>) -> Option<(u64, Stream)> {
        if self.unlinked.load(Acquire) == 0 {
            return None;
        }
        self.state().streams.range(clusters).next().map(|(cluster, stream)| (*cluster, *stream))
    }

    /// The stream of a guest cluster, if it is not linked yet.
    pub(crate) fn stream(&self, guest: u64) -> Option<Stream> {
        self.first_in(guest..guest + 1).map(|(_, stream)| stream)
    }

    /// Takes the stream of a guest cluster out: its entry was just set, under the slice's lock that is still held.
    pub(crate) fn linked(&self, guest: u64) {
        let mut state = self.state();
        state.streams.remove(&guest);
        self.unlinked.store(state.streams.len(), Release);
    }

    /// Copies what of the stream of guest cluster `guest` that starts at host offset `offset` is in memory.
    pub(crate) fn copy_stream(&self, guest: u64, offset: u64, out: &mut Vec<u8>) -> Place {
        out.clear();
        if self.unlinked.load(Acquire) == 0 {
            return Place::File;
        }
        let state = self.state();
        let Some(stream) = state.streams.get(&guest).filter(|stream| stream.offset == offset) else {
            return Place::File;
        };
        let end = offset + stream.len;
        let mut elsewhere: Option<Range<u64>> = None;
        let mut at = offset;
        while at < end {
            let memory = state.memory_from(at).filter(|(start, _)| *start < end);
            if let Some((start, bytes)) = memory
                && start <= at
            {
                let bytes = bytes.get((at - start) as usize..).unwrap_or_default();
                let take = bytes.len().min((end - at) as usize);
                out.extend_from_slice(bytes.get(..take).unwrap_or_default());
                at += take as u64;
                continue;
            }
            // A stream has two parts at most: what is not in memory is its beginning or its end.
            let next = memory.map_or(end, |(start, _)| start);
            elsewhere = Some(elsewhere.map_or(at, |range| range.start)..next);
            out.resize((next - offset) as usize, 0);
            at = next;
        }
        let Some(range) = elsewhere else { return Place::Memory };
        // Parts under way hold their bytes themselves.
        let is_in = |part: &Range<u64>| part.start < range.end && range.start < part.end;
        if state.under_way.values().any(is_in) {
            Place::BeingWritten
        } else if range == (offset..end) {
            Place::File
        } else {
            Place::Split(range)
        }
    }

    /// Takes everything that waits to be written, in the order in which it was packed, and the number of the last part
    /// that was ever taken.
    pub(crate) fn take_all(&self, rules: &Rules) -> (Vec<Part>, u64) {
        let mut state = self.state();
        let mut parts: Vec<Part> =
            std::mem::take(&mut state.failed).into_iter().map(|(part, _)| part).collect();
        if let Some(segment) = &mut state.open {
            parts.push(segment.cut(Cut::Flush, rules));
        }
        let parts = parts.into_iter().filter_map(|part| state.start(part)).collect();
        (parts, state.parts_made)
    }

    /// Ends the segment that is being filled.
    pub(crate) fn take_rest(&self, rules: &Rules) -> Option<Part> {
        self.state().end_segment(rules)
    }

    /// Gives the memory of a part back whose bytes are written.
    pub(crate) fn written(&self, bytes: usize) {
        self.state().bytes -= bytes;
    }

    /// Notes that the last of a part's references are added.
    pub(crate) fn referenced(&self, part: &mut Part) {
        let Some((cluster, _)) = part.references.pop() else { return };
        if part.keeps_open != Some(cluster) {
            return;
        }
        part.keeps_open = None;
        let waiting = {
            let mut state = self.state();
            match state.awaited.get_mut(&cluster) {
                Some(parts) if *parts > 1 => *parts -= 1,
                _ => drop(state.awaited.remove(&cluster)),
            }
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Ready when the cluster that a part closes has the references of all parts before; with the error of one that
    /// failed before it had added them. The part's own references are added.
    pub(crate) fn poll_closable(&self, part: &Part, waker: &Waker) -> Poll<Result<()>> {
        let Some(cluster) = part.closes else { return Poll::Ready(Ok(())) };
        let mut state = self.state();
        if !state.awaited.contains_key(&cluster) {
            return Poll::Ready(Ok(()));
        }
        let of_failed = state.failed.iter().find(|(part, _)| part.keeps_open == Some(cluster));
        if let Some((_, error)) = of_failed.filter(|_| !sabotage::is(Fault::WaitForFailedPart)) {
            return Poll::Ready(Err(error.clone()));
        }
        state.waiting.push(waker.clone());
        Poll::Pending
    }

    /// Notes that the bytes of a part are written, and finds the streams that are complete with that.
    pub(crate) fn complete(&self, part: &mut Part) {
        let mut state = self.state();
        for guest in part.streams.drain(..) {
            if let Some(stream) = state.streams.get_mut(&guest) {
                stream.parts = stream.parts.saturating_sub(1);
                if stream.parts == 0 {
                    part.complete.push(guest);
                }
            }
        }
    }

    /// Ends a part. One that failed stays, to be tried again.
    pub(crate) fn end(&self, part: Part, result: Result<()>) {
        let waiting = {
            let mut state = self.state();
            state.under_way.remove(&part.number);
            if let Err(error) = result
                && !sabotage::is(Fault::ForgetFailedPart)
            {
                state.failed.push((part, error));
            }
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Ready when no part up to `number` is under way; with the error of a part that failed.
    pub(crate) fn poll_ended(&self, number: u64, waker: &Waker) -> Poll<Result<()>> {
        let mut state = self.state();
        if state.under_way.first_key_value().is_some_and(|(first, _)| *first <= number) {
            state.waiting.push(waker.clone());
            return Poll::Pending;
        }
        Poll::Ready(state.failed.first().map_or(Ok(()), |(_, error)| Err(error.clone())))
    }

    /// Ready when something ended, or nothing is under way.
    pub(crate) fn poll_change(&self, seen: &mut bool, waker: &Waker) -> Poll<()> {
        let mut state = self.state();
        if *seen || state.under_way.is_empty() {
            return Poll::Ready(());
        }
        *seen = true;
        state.waiting.push(waker.clone());
        Poll::Pending
    }

    /// Ready when there is memory for more: at most `limit` bytes in use, or nothing that will give any back. True: a
    /// part has failed and has to be written first.
    pub(crate) fn poll_memory(&self, limit: usize, waker: &Waker) -> Poll<bool> {
        let mut state = self.state();
        if !state.failed.is_empty() {
            return Poll::Ready(true);
        }
        if state.bytes <= limit || state.under_way.is_empty() {
            return Poll::Ready(false);
        }
        state.waiting.push(waker.clone());
        Poll::Pending
    }

    /// Whether something was gathered since the image was opened.
    pub(crate) fn is_used(&self) -> bool {
        self.used.load(Acquire)
    }

    /// Whether nothing waits to be written or linked.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state();
        state.streams.is_empty() && state.under_way.is_empty() && state.failed.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::space::{Allocated, Content};
    use proptest::prelude::*;
    use zebu_storage::{IoBuf, IoBufs};

    /// Host clusters in the order in which a window gives them out; a gap now and then.
    struct Supply {
        next: u64,
        bits: u32,
        clusters: u64,
        given: Vec<u64>,
    }

    impl Supply {
        fn room(&mut self) -> Room {
            let start = self.next;
            self.next += self.clusters + u64::from(self.given.len() % 3 == 2) * 7;
            self.given.extend(start..start + self.clusters);
            let allocated = Allocated { range: start..start + self.clusters, content: Content::Fresh };
            Room { allocated, buf: IoBuf::zeroed((self.clusters << self.bits) as usize) }
        }
    }

    /// What a file and its refcounts become, and what is linked when.
    #[derive(Default)]
    struct Model {
        file: BTreeMap<u64, u8>,
        refcounts: BTreeMap<u64, u64>,
        linked: BTreeMap<u64, Stream>,
    }

    impl Model {
        fn write(&mut self, gatherer: &Gatherer, mut part: Part, rules: &Rules) {
            let mut bytes = vec![0; part.bytes.len()];
            part.bytes.copy_to(0, &mut bytes);
            if !bytes.is_empty() {
                assert!(part.host.is_multiple_of(rules.block.min(1 << rules.cluster_bits)));
            }
            for (at, byte) in (part.host..).zip(bytes) {
                assert_eq!(self.file.insert(at, byte), None, "host byte {at} is written twice");
            }
            gatherer.written(part.bytes.len());
            part.bytes = IoBufs::new();
            while let Some((cluster, count)) = part.references.last().copied() {
                let refcount = self.refcounts.get_mut(&cluster).unwrap();
                *refcount += count;
                assert!(*refcount <= rules.refcount_max, "refcount {refcount} of cluster {cluster}");
                gatherer.referenced(&mut part);
            }
            assert!(matches!(gatherer.poll_closable(&part, Waker::noop()), Poll::Ready(Ok(()))));
            for (clusters, _) in part.unused.drain(..) {
                for cluster in clusters {
                    *self.refcounts.get_mut(&cluster).unwrap() -= 1;
                }
            }
            gatherer.complete(&mut part);
            for guest in part.complete.drain(..) {
                let stream = gatherer.stream(guest).unwrap();
                self.linked.insert(guest, stream);
                gatherer.linked(guest);
            }
            gatherer.end(part, Ok(()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

        #[test]
        fn streams_are_packed_counted_and_linked_when_they_are_written(
            bits in 9u32..=13,
            refcount_bits in prop_oneof![Just(1u32), Just(2), Just(16)],
            clusters in 1u64..20,
            lengths in proptest::collection::vec((any::<prop::sample::Index>(), 0u8..10), 1..50),
        ) {
            let rules = Rules {
                cluster_bits: bits,
                refcount_max: (1 << refcount_bits) - 1,
                offset_end: 1 << 50,
                block: 4096,
            };
            // Segments are whole blocks, as `room` of the driver makes them.
            let clusters = clusters.next_multiple_of((4096 >> bits).max(1));
            let mut supply = Supply { next: 64, bits, clusters, given: Vec::new() };
            let (gatherer, mut model) = (Gatherer::default(), Model::default());
            let mut contents = Vec::new();
            for (guest, (len, flush)) in lengths.into_iter().enumerate() {
                let guest = guest as u64;
                let bytes = vec![guest as u8 + 1; 1 + len.index((1 << bits) - 1)];
                let given = supply.given.len();
                let added = gatherer.add(guest, &bytes, &rules, || Some(supply.room()));
                for cluster in &supply.given[given..] {
                    model.refcounts.insert(*cluster, 1);
                }
                let Added::Done(part) = added else { panic!("there is room") };
                let offset = gatherer.stream(guest).unwrap().offset;
                let mut seen = Vec::new();
                prop_assert!(gatherer.copy_stream(guest, offset, &mut seen) != Place::Memory || seen == bytes);
                contents.push(bytes);
                if let Some(part) = part {
                    model.write(&gatherer, *part, &rules);
                }
                if flush == 0 {
                    for part in gatherer.take_all(&rules).0 {
                        model.write(&gatherer, part, &rules);
                    }
                    prop_assert!(gatherer.is_empty());
                    prop_assert_eq!(model.linked.len(), contents.len());
                }
            }
            for part in gatherer.take_all(&rules).0 {
                model.write(&gatherer, part, &rules);
            }
            if let Some(part) = gatherer.take_rest(&rules) {
                model.write(&gatherer, part, &rules);
            }
            prop_assert!(gatherer.is_empty());
            prop_assert_eq!(gatherer.state().bytes, 0);
            let mut counts: BTreeMap<u64, u64> = supply.given.iter().map(|cluster| (*cluster, 0)).collect();
            for (guest, bytes) in contents.iter().enumerate() {
                let stream = model.linked[&(guest as u64)];
                prop_assert_eq!(stream.len as usize, bytes.len());
                for (at, byte) in (stream.offset..).zip(bytes) {
                    prop_assert_eq!(model.file.get(&at), Some(byte));
                }
                for cluster in stream.offset >> bits..=(stream.offset + stream.len - 1) >> bits {
                    *counts.get_mut(&cluster).unwrap() += 1;
                }
            }
            // As many references as streams, no more and no fewer.
            prop_assert_eq!(counts, model.refcounts);
        }
    }

    #[test]
    fn a_cluster_is_not_closed_before_the_references_of_its_earlier_parts_are_there() {
        let rules = Rules { cluster_bits: 16, refcount_max: 3, offset_end: 1 << 50, block: 4096 };
        let mut supply = Supply { next: 8, bits: 16, clusters: 2, given: Vec::new() };
        let gatherer = Gatherer::default();
        let mut add = |guest| {
            let added = gatherer.add(guest, &[7; 5000], &rules, || Some(supply.room()));
            assert!(matches!(added, Added::Done(None)));
        };
        add(3);
        let mut early = gatherer.take_all(&rules).0.remove(0);
        add(4);
        let late = gatherer.take_rest(&rules).unwrap();
        assert_eq!((&early.references[..], early.closes), (&[(8, 1)][..], None));
        assert_eq!((&late.references[..], late.closes), (&[][..], Some(8)));
        // The window's reference counts for the stream of the late part, which is overwritten as soon as it is linked:
        // without the early part's own, that would free the cluster.
        assert!(gatherer.poll_closable(&late, Waker::noop()).is_pending());
        let error = Error::new(crate::ErrorKind::Io, "refcounts can't be read");
        gatherer.end(early, Err(error));
        assert!(matches!(gatherer.poll_closable(&late, Waker::noop()), Poll::Ready(Err(_))));
        early = gatherer.take_all(&rules).0.remove(0);
        assert!(gatherer.poll_closable(&late, Waker::noop()).is_pending());
        gatherer.referenced(&mut early);
        assert!(matches!(gatherer.poll_closable(&late, Waker::noop()), Poll::Ready(Ok(()))));
    }

    #[test]
    fn a_failed_part_is_read_from_memory_and_tried_again() {
        let rules = Rules { cluster_bits: 16, refcount_max: 65535, offset_end: 1 << 50, block: 4096 };
        let mut supply = Supply { next: 8, bits: 16, clusters: 2, given: Vec::new() };
        let gatherer = Gatherer::default();
        let Added::Done(None) = gatherer.add(3, &[7; 5000], &rules, || Some(supply.room())) else { panic!() };
        let (mut parts, last) = gatherer.take_all(&rules);
        let offset = gatherer.stream(3).unwrap().offset;
        let mut bytes = Vec::new();
        assert_eq!(gatherer.copy_stream(3, offset, &mut bytes), Place::BeingWritten);
        assert!(gatherer.poll_ended(last, Waker::noop()).is_pending());
        let error = || Error::new(crate::ErrorKind::NoSpace, "full");
        gatherer.end(parts.remove(0), Err(error()));
        assert_eq!(gatherer.copy_stream(3, offset, &mut bytes), Place::Memory);
        assert_eq!(bytes, [7; 5000]);
        assert!(matches!(gatherer.poll_ended(last, Waker::noop()), Poll::Ready(Err(_))));
        assert_eq!(gatherer.poll_memory(1 << 30, Waker::noop()), Poll::Ready(true));
        let (parts, _) = gatherer.take_all(&rules);
        let mut model = Model::default();
        model.refcounts.extend([(8, 1), (9, 1)]);
        for part in parts {
            model.write(&gatherer, part, &rules);
        }
        assert_eq!(model.linked.len(), 1);
        assert_eq!(gatherer.poll_memory(1 << 30, Waker::noop()), Poll::Ready(false));
    }

    const TWO_CLUSTERS: Rules =
        Rules { cluster_bits: 16, refcount_max: 65535, offset_end: 1 << 50, block: 4096 };

    /// Packs the streams of guest clusters 3 and 4; the latter reaches from host cluster 8 into 9. The part with its
    /// beginning, and its offset.
    fn pack_across(gatherer: &Gatherer, model: &mut Model) -> (Part, u64) {
        let mut supply = Supply { next: 8, bits: 16, clusters: 1, given: Vec::new() };
        model.refcounts.extend([(8, 1), (9, 1)]);
        let mut add =
            |guest, fill| gatherer.add(guest, &vec![fill; 40_000], &TWO_CLUSTERS, || Some(supply.room()));
        assert!(matches!(add(3, 1), Added::Done(None)));
        let Added::Done(Some(head)) = add(4, 2) else { panic!("it begins in the first cluster") };
        (*head, gatherer.stream(4).unwrap().offset)
    }

    #[test]
    fn a_stream_whose_end_could_not_be_written_is_read_from_both_places() {
        let (gatherer, mut model, rules) = (Gatherer::default(), Model::default(), TWO_CLUSTERS);
        let (head, offset) = pack_across(&gatherer, &mut model);
        let mut bytes = Vec::new();
        assert_eq!(gatherer.copy_stream(4, offset, &mut bytes), Place::BeingWritten);
        model.write(&gatherer, head, &rules);
        let in_file = offset..9 << 16;
        for tail in ["is to be written", "could not be written"] {
            assert_eq!(
                gatherer.copy_stream(4, offset, &mut bytes),
                Place::Split(in_file.clone()),
                "the end {tail}"
            );
            assert_eq!(bytes.len(), 40_000);
            assert!(bytes[(in_file.end - in_file.start) as usize..].iter().all(|byte| *byte == 2));
            for part in gatherer.take_all(&rules).0 {
                gatherer.end(part, Err(Error::new(crate::ErrorKind::NoSpace, "full")));
            }
        }
        for part in gatherer.take_all(&rules).0 {
            model.write(&gatherer, part, &rules);
        }
        assert_eq!(gatherer.copy_stream(4, offset, &mut bytes), Place::File);
        assert_eq!(model.linked.len(), 2);
    }

    #[test]
    fn a_stream_in_the_file_is_read_while_the_parts_of_others_are_written() {
        let gatherer = Gatherer::default();
        let (mut head, _) = pack_across(&gatherer, &mut Model::default());
        let mut bytes = Vec::new();
        let offset = gatherer.stream(3).unwrap().offset;
        assert_eq!(gatherer.copy_stream(3, offset, &mut bytes), Place::BeingWritten);
        let (tails, _) = gatherer.take_all(&TWO_CLUSTERS);
        assert_eq!(tails.len(), 1);
        // Written, and not linked yet.
        gatherer.complete(&mut head);
        gatherer.end(head, Ok(()));
        assert_eq!(gatherer.copy_stream(3, offset, &mut bytes), Place::File);
    }

    #[test]
    fn a_stream_whose_beginning_could_not_be_written_is_read_from_both_places() {
        let (gatherer, mut model, rules) = (Gatherer::default(), Model::default(), TWO_CLUSTERS);
        let (head, offset) = pack_across(&gatherer, &mut model);
        for part in gatherer.take_all(&rules).0 {
            model.write(&gatherer, part, &rules);
        }
        gatherer.end(head, Err(Error::new(crate::ErrorKind::NoSpace, "full")));
        let mut bytes = Vec::new();
        assert_eq!(gatherer.copy_stream(4, offset, &mut bytes), Place::Split(9 << 16..offset + 40_000));
        assert!(bytes[..((9 << 16) - offset) as usize].iter().all(|byte| *byte == 2));
    }
}
