//! The packer of compressed streams: they wait in memory, packed byte by byte into host clusters.
//!
//! Streams go into a [`PackBuffer`], a run of host clusters that is being filled. A [`PackedWrite`] takes all of it when
//! it is full, or at a flush what there is. Packing then goes on at the next block, so that a durable block is never
//! written again. A stream is linked when all writes that hold bytes of it have succeeded. It may reach from one buffer
//! into the next, if that follows it in the file.
//!
//! No host cluster takes more streams than its refcount can say. Until packing has moved on from a cluster, it keeps
//! the reference that its window gave it, so it is not freed while still being packed. With the last write, that
//! reference counts for one of the streams. Writes run side by side. The last one of a cluster waits for the references
//! of those before it; otherwise overwriting its streams would free a cluster that an earlier write is on its way to.
//!
//! This file has the bookkeeping, under one lock that is taken after a slice's shard and before `HostSpace::pool`. The
//! writes are carried out in `write_out.rs`.

use crate::qcow2::compressed::pack_buffer::{Cut, PackBuffer, PackRules, PackedWrite, Room};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Acquire, Ordering::Release};
use crate::sync::{AsyncMutex, AsyncMutexGuard, Mutex, MutexGuard, WaitList};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::task::{Poll, Waker};
use zebu_storage::sabotage::{self, Fault};

/// A stream that is not linked yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream {
    /// Offset in the file, bytes.
    offset: u64,
    /// Bytes.
    len: u64,
    /// Writes with bytes of it that are not written yet.
    writes: u8,
}

impl Stream {
    /// Offset in the file, bytes.
    pub(crate) fn offset(self) -> u64 {
        self.offset
    }

    /// Bytes.
    pub(crate) fn len(self) -> u64 {
        self.len
    }
}

/// The outcome of adding a stream.
pub(crate) enum Added {
    /// It is in; the write, if any, is to be written.
    Done(Option<Box<PackedWrite>>),
    /// There is no room to pack into.
    NeedsRoom,
    /// No descriptor can say where it would lie. The write, if any, is to be written all the same.
    OutOfReach(Option<Box<PackedWrite>>),
}

/// Where the bytes of a stream are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StreamPlace {
    /// They were copied from memory.
    Memory,
    /// Some are being written.
    BeingWritten,
    /// These (host offsets) are in the file; the others, of a write that comes later or failed, were copied to their
    /// places.
    Split(Range<u64>),
    /// In the file: linked, or written and not linked yet.
    File,
    /// Nowhere: the write of some of them ended without a result.
    Lost,
}

#[derive(Debug, Default)]
struct State {
    open: Option<PackBuffer>,
    /// By guest cluster.
    streams: BTreeMap<u64, Stream>,
    /// By their numbers, the writes that are being written and linked: the host offsets of what is written.
    under_way: BTreeMap<u64, Range<u64>>,
    /// Writes that failed, and why; they are tried again by the next flush.
    failed: Vec<(PackedWrite, Error)>,
    /// Writes that ended without a result: the host offsets of what they were to write, and why.
    lost: Vec<(Range<u64>, Error)>,
    /// Host clusters in which packing went on behind writes whose references are not added yet, and how many those are.
    awaited: BTreeMap<u64, u32>,
    writes_made: u64,
    /// Of the buffer and of the writes.
    bytes: usize,
    waiting: WaitList,
}

/// The packer of compressed streams.
#[derive(Debug, Default)]
pub(crate) struct StreamPacker {
    state: Mutex<State>,
    /// Streams that are not linked, so that readers need no lock where there are none.
    unlinked: AtomicUsize,
    /// Something was packed since the image was opened.
    used: AtomicBool,
    /// Held while room is made.
    room_mutex: AsyncMutex,
}

impl State {
    /// Counts a write as under way. `None`: it has nothing to do.
    fn start(&mut self, mut write: PackedWrite) -> Option<PackedWrite> {
        let idle = write.bytes.is_empty()
            && write.references.is_empty()
            && write.unused.is_empty()
            && write.streams.is_empty()
            && write.complete.is_empty();
        if idle {
            return None;
        }
        // A write that failed keeps its number: a flush that began before waits for it again, and must not take it for one
        // that came later.
        if write.number == 0 {
            self.writes_made += 1;
            write.number = self.writes_made;
            if let Some(cluster) = write.keeps_open {
                *self.awaited.entry(cluster).or_default() += 1;
            }
        } else if sabotage::is(Fault::RenumberFailedPart) {
            self.writes_made += 1;
            write.number = self.writes_made;
        }
        self.under_way.insert(write.number, write.host..write.host + write.bytes.len() as u64);
        Some(write)
    }

    /// The bytes at host offset `from` that wait to be written, or the first ones behind it: a run of them with its host
    /// offset.
    fn memory_from(&self, from: u64) -> Option<(u64, &[u8])> {
        let open = self.open.iter().map(|buffer| (buffer.base, std::slice::from_ref(&buffer.buf)));
        let failed = self.failed.iter().map(|(write, _)| (write.host, write.bytes.parts()));
        let runs = open.chain(failed).flat_map(|(host, bufs)| {
            // A write is one buffer, unless a failed write gave it back in pieces.
            bufs.iter().scan(host, |at, buf| {
                let start = *at;
                *at += buf.len() as u64;
                Some((start, buf.as_slice()))
            })
        });
        runs.filter(|(start, bytes)| start + bytes.len() as u64 > from).min_by_key(|(start, _)| *start)
    }

    /// Ends the buffer that is being filled; what of its memory the write does not hold is given up.
    fn end_buffer(&mut self, rules: &PackRules) -> Option<PackedWrite> {
        let mut buffer = self.open.take()?;
        let write = buffer.cut(Cut::End, rules);
        self.bytes -= buffer.buf.len();
        self.start(write)
    }
}

impl StreamPacker {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each critical section leaves the state whole, so a panic elsewhere does not matter.
        self.state.lock()
    }

    /// Packs the stream of guest cluster `guest`, which is not in it; `bytes` are fewer than a cluster. `room` gives
    /// the host clusters to go on in.
    pub(crate) fn add(
        &self,
        guest: u64,
        bytes: &[u8],
        rules: &PackRules,
        mut room: impl FnMut() -> Option<Room>,
    ) -> Added {
        let len = bytes.len() as u64;
        self.used.store(true, Release);
        let mut state = self.state();
        let state = &mut *state;
        let mut ended = None;
        let stream = loop {
            let start = state.open.as_ref().map(|buffer| (buffer.next_start(rules), buffer.end));
            let fits_from = start.filter(|(at, end)| at + len <= *end).map(|(at, _)| at);
            if let (Some(at), Some(buffer)) = (fits_from, &mut state.open) {
                if at + len > rules.offset_end {
                    return Added::OutOfReach(ended.map(Box::new));
                }
                buffer.put(guest, at, bytes);
                break Stream { offset: at, len, writes: 1 };
            }
            let Some(room) = room() else { return Added::NeedsRoom };
            state.bytes += room.buf.len();
            let mut next = PackBuffer::new(room, rules.cluster_bits);
            let reaches = start.filter(|(at, end)| at < end && *end == next.base);
            if let (Some((at, end)), Some(buffer)) = (reaches, &mut state.open)
                && at + len <= rules.offset_end
            {
                let (head, tail) = bytes.split_at((end - at) as usize);
                buffer.put(guest, at, head);
                next.put(guest, end, tail);
                ended = state.end_buffer(rules);
                state.open = Some(next);
                break Stream { offset: at, len, writes: 2 };
            }
            ended = state.end_buffer(rules);
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
    pub(crate) fn copy_stream(&self, guest: u64, offset: u64, out: &mut Vec<u8>) -> StreamPlace {
        out.clear();
        if self.unlinked.load(Acquire) == 0 {
            return StreamPlace::File;
        }
        let state = self.state();
        let Some(stream) = state.streams.get(&guest).filter(|stream| stream.offset == offset) else {
            return StreamPlace::File;
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
            // A stream has two writes at most: what is not in memory is its beginning or its end.
            let next = memory.map_or(end, |(start, _)| start);
            elsewhere = Some(elsewhere.map_or(at, |range| range.start)..next);
            out.resize((next - offset) as usize, 0);
            at = next;
        }
        let Some(range) = elsewhere else { return StreamPlace::Memory };
        // Writes under way hold their bytes themselves.
        let is_in = |write: &Range<u64>| write.start < range.end && range.start < write.end;
        if state.lost.iter().any(|(write, _)| is_in(write)) {
            StreamPlace::Lost
        } else if state.under_way.values().any(is_in) {
            StreamPlace::BeingWritten
        } else if range == (offset..end) {
            StreamPlace::File
        } else {
            StreamPlace::Split(range)
        }
    }

    /// Takes everything that waits to be written, in the order in which it was packed, and the number of the last write
    /// that was ever taken.
    pub(crate) fn take_all(&self, rules: &PackRules) -> (Vec<PackedWrite>, u64) {
        let mut state = self.state();
        let mut writes: Vec<PackedWrite> =
            std::mem::take(&mut state.failed).into_iter().map(|(write, _)| write).collect();
        if let Some(buffer) = &mut state.open {
            writes.push(buffer.cut(Cut::Flush, rules));
        }
        let writes = writes.into_iter().filter_map(|write| state.start(write)).collect();
        (writes, state.writes_made)
    }

    /// Ends the buffer that is being filled.
    pub(crate) fn take_rest(&self, rules: &PackRules) -> Option<PackedWrite> {
        self.state().end_buffer(rules)
    }

    /// Gives the memory of a write back whose bytes are written.
    pub(crate) fn written(&self, bytes: usize) {
        self.state().bytes -= bytes;
    }

    /// Notes that the last of a write's references are added.
    pub(crate) fn referenced(&self, write: &mut PackedWrite) {
        let Some((cluster, _)) = write.references.pop() else { return };
        if write.keeps_open != Some(cluster) {
            return;
        }
        write.keeps_open = None;
        let waiting = {
            let mut state = self.state();
            match state.awaited.get_mut(&cluster) {
                Some(writes) if *writes > 1 => *writes -= 1,
                _ => drop(state.awaited.remove(&cluster)),
            }
            state.waiting.take()
        };
        waiting.wake();
    }

    /// Ready when the cluster that a write closes has the references of all writes before; with the error of one that
    /// failed before it had added them. The write's own references are added.
    pub(crate) fn poll_closable(&self, write: &PackedWrite, waker: &Waker) -> Poll<Result<()>> {
        let Some(cluster) = write.closes else { return Poll::Ready(Ok(())) };
        let mut state = self.state();
        if !state.awaited.contains_key(&cluster) {
            return Poll::Ready(Ok(()));
        }
        // What a lost write has added nobody knows, and it adds nothing more.
        if let Some((_, error)) = state.lost.first() {
            return Poll::Ready(Err(error.clone()));
        }
        let of_failed = state.failed.iter().find(|(write, _)| write.keeps_open == Some(cluster));
        if let Some((_, error)) = of_failed.filter(|_| !sabotage::is(Fault::WaitForFailedPart)) {
            return Poll::Ready(Err(error.clone()));
        }
        state.waiting.add(waker);
        Poll::Pending
    }

    /// Notes that the bytes of a write are written, and finds the streams that are complete with that.
    pub(crate) fn complete(&self, write: &mut PackedWrite) {
        let mut state = self.state();
        for guest in write.streams.drain(..) {
            if let Some(stream) = state.streams.get_mut(&guest) {
                stream.writes = stream.writes.saturating_sub(1);
                if stream.writes == 0 {
                    write.complete.push(guest);
                }
            }
        }
    }

    /// Ends a write. One that failed stays, to be tried again.
    pub(crate) fn end(&self, write: PackedWrite, result: Result<()>) {
        let waiting = {
            let mut state = self.state();
            state.under_way.remove(&write.number);
            if let Err(error) = result
                && !sabotage::is(Fault::ForgetFailedPart)
            {
                state.failed.push((write, error));
            }
            state.waiting.take()
        };
        waiting.wake();
    }

    /// Ends a write that is lost. Its streams can't be read any more.
    pub(crate) fn forget(&self, number: u64, why: Error) {
        let waiting = {
            let mut state = self.state();
            if let Some(range) = state.under_way.remove(&number) {
                state.lost.push((range, why));
            }
            state.waiting.take()
        };
        waiting.wake();
    }

    /// Ready when no write up to `number` is under way; with the error of a write that failed.
    pub(crate) fn poll_ended(&self, number: u64, waker: &Waker) -> Poll<Result<()>> {
        let mut state = self.state();
        if state.under_way.first_key_value().is_some_and(|(first, _)| *first <= number) {
            state.waiting.add(waker);
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
        state.waiting.add(waker);
        Poll::Pending
    }

    /// Ready when there is memory for more: at most `limit` bytes in use, or nothing that will give any back. True: a
    /// write has failed and has to be written first.
    pub(crate) fn poll_memory(&self, limit: usize, waker: &Waker) -> Poll<bool> {
        let mut state = self.state();
        if !state.failed.is_empty() {
            return Poll::Ready(true);
        }
        if state.bytes <= limit || state.under_way.is_empty() {
            return Poll::Ready(false);
        }
        state.waiting.add(waker);
        Poll::Pending
    }

    /// Whether something was packed since the image was opened.
    pub(crate) fn is_used(&self) -> bool {
        self.used.load(Acquire)
    }

    /// Keeps others from making room.
    pub(crate) async fn hold_room(&self) -> AsyncMutexGuard<'_> {
        self.room_mutex.lock().await
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
    use crate::qcow2::space::free::{Allocated, SpaceContent};
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
            let allocated = Allocated::new(start..start + self.clusters, SpaceContent::Fresh);
            Room { allocated, buf: IoBuf::zeroed((self.clusters << self.bits) as usize) }
        }
    }

    /// A model of a file and its refcounts, and what is linked when.
    #[derive(Default)]
    struct Model {
        file: BTreeMap<u64, u8>,
        refcounts: BTreeMap<u64, u64>,
        linked: BTreeMap<u64, Stream>,
    }

    impl Model {
        fn write(&mut self, packer: &StreamPacker, mut write: PackedWrite, rules: &PackRules) {
            let mut bytes = vec![0; write.bytes.len()];
            write.bytes.copy_to(0, &mut bytes);
            if !bytes.is_empty() {
                assert!(write.host.is_multiple_of(rules.block.min(1 << rules.cluster_bits)));
            }
            for (at, byte) in (write.host..).zip(bytes) {
                assert_eq!(self.file.insert(at, byte), None, "host byte {at} is written twice");
            }
            packer.written(write.bytes.len());
            write.bytes = IoBufs::new();
            while let Some((cluster, count)) = write.references.last().copied() {
                let refcount = self.refcounts.get_mut(&cluster).unwrap();
                *refcount += count;
                assert!(*refcount <= rules.refcount_max, "refcount {refcount} of cluster {cluster}");
                packer.referenced(&mut write);
            }
            assert!(matches!(packer.poll_closable(&write, Waker::noop()), Poll::Ready(Ok(()))));
            for (clusters, _) in write.unused.drain(..) {
                for cluster in clusters {
                    *self.refcounts.get_mut(&cluster).unwrap() -= 1;
                }
            }
            packer.complete(&mut write);
            for guest in write.complete.drain(..) {
                let stream = packer.stream(guest).unwrap();
                self.linked.insert(guest, stream);
                packer.linked(guest);
            }
            packer.end(write, Ok(()));
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
            let rules = PackRules {
                cluster_bits: bits,
                refcount_max: (1 << refcount_bits) - 1,
                offset_end: 1 << 50,
                block: 4096,
            };
            // Buffers are whole blocks, as `room` of the driver makes them.
            let clusters = clusters.next_multiple_of((4096 >> bits).max(1));
            let mut supply = Supply { next: 64, bits, clusters, given: Vec::new() };
            let (packer, mut model) = (StreamPacker::default(), Model::default());
            let mut contents = Vec::new();
            for (guest, (len, flush)) in lengths.into_iter().enumerate() {
                let guest = guest as u64;
                let bytes = vec![guest as u8 + 1; 1 + len.index((1 << bits) - 1)];
                let given = supply.given.len();
                let added = packer.add(guest, &bytes, &rules, || Some(supply.room()));
                for cluster in &supply.given[given..] {
                    model.refcounts.insert(*cluster, 1);
                }
                let Added::Done(write) = added else { panic!("there is room") };
                let offset = packer.stream(guest).unwrap().offset;
                let mut seen = Vec::new();
                prop_assert!(packer.copy_stream(guest, offset, &mut seen) != StreamPlace::Memory || seen == bytes);
                contents.push(bytes);
                if let Some(write) = write {
                    model.write(&packer, *write, &rules);
                }
                if flush == 0 {
                    for write in packer.take_all(&rules).0 {
                        model.write(&packer, write, &rules);
                    }
                    prop_assert!(packer.is_empty());
                    prop_assert_eq!(model.linked.len(), contents.len());
                }
            }
            for write in packer.take_all(&rules).0 {
                model.write(&packer, write, &rules);
            }
            if let Some(write) = packer.take_rest(&rules) {
                model.write(&packer, write, &rules);
            }
            prop_assert!(packer.is_empty());
            prop_assert_eq!(packer.state().bytes, 0);
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
    fn what_was_packed_is_written_although_the_next_stream_lies_out_of_reach() {
        let rules = PackRules { cluster_bits: 16, refcount_max: 3, offset_end: 12 << 16, block: 4096 };
        let packer = StreamPacker::default();
        let room = |start: u64| {
            let allocated = Allocated::new(start..start + 1, SpaceContent::Fresh);
            Some(Room { allocated, buf: IoBuf::zeroed(1 << 16) })
        };
        let bytes = vec![7; 60_000];
        assert!(matches!(packer.add(3, &bytes, &rules, || room(8)), Added::Done(None)));
        let Added::OutOfReach(write) = packer.add(4, &bytes, &rules, || room(20)) else {
            panic!("no descriptor reaches that far")
        };
        let rest = packer.take_all(&rules).0;
        let writes = write.into_iter().map(|write| *write).chain(rest);
        let streams: Vec<u64> = writes.flat_map(|write| write.streams).collect();
        assert_eq!(streams, [3]);
    }

    #[test]
    fn a_cluster_is_not_closed_before_the_references_of_its_earlier_parts_are_there() {
        let rules = PackRules { cluster_bits: 16, refcount_max: 3, offset_end: 1 << 50, block: 4096 };
        let mut supply = Supply { next: 8, bits: 16, clusters: 2, given: Vec::new() };
        let packer = StreamPacker::default();
        let mut add = |guest| {
            let added = packer.add(guest, &[7; 5000], &rules, || Some(supply.room()));
            assert!(matches!(added, Added::Done(None)));
        };
        add(3);
        let mut early = packer.take_all(&rules).0.remove(0);
        add(4);
        let late = packer.take_rest(&rules).unwrap();
        assert_eq!((&early.references[..], early.closes), (&[(8, 1)][..], None));
        assert_eq!((&late.references[..], late.closes), (&[][..], Some(8)));
        // The window's reference counts for the stream of the late write, which is overwritten as soon as it is linked:
        // without the early write's own, that would free the cluster.
        assert!(packer.poll_closable(&late, Waker::noop()).is_pending());
        let error = Error::new(crate::ErrorKind::Io, "refcounts can't be read");
        packer.end(early, Err(error));
        assert!(matches!(packer.poll_closable(&late, Waker::noop()), Poll::Ready(Err(_))));
        early = packer.take_all(&rules).0.remove(0);
        assert!(packer.poll_closable(&late, Waker::noop()).is_pending());
        packer.referenced(&mut early);
        assert!(matches!(packer.poll_closable(&late, Waker::noop()), Poll::Ready(Ok(()))));
    }

    #[test]
    fn the_streams_of_a_lost_part_are_not_read_from_the_file_and_nobody_waits_for_it() {
        let rules = PackRules { cluster_bits: 16, refcount_max: 3, offset_end: 1 << 50, block: 4096 };
        let mut supply = Supply { next: 8, bits: 16, clusters: 2, given: Vec::new() };
        let packer = StreamPacker::default();
        let mut add = |guest| {
            let added = packer.add(guest, &[7; 5000], &rules, || Some(supply.room()));
            assert!(matches!(added, Added::Done(None)));
        };
        add(3);
        let (mut early, last) = packer.take_all(&rules);
        add(4);
        let late = packer.take_rest(&rules).unwrap();
        assert!(packer.poll_closable(&late, Waker::noop()).is_pending());
        let number = early.remove(0).number;
        packer.forget(number, Error::new(crate::ErrorKind::Poisoned, "a panic"));
        let offset = packer.stream(3).unwrap().offset;
        assert_eq!(packer.copy_stream(3, offset, &mut Vec::new()), StreamPlace::Lost);
        assert!(matches!(packer.poll_closable(&late, Waker::noop()), Poll::Ready(Err(_))));
        assert!(packer.poll_ended(last, Waker::noop()).is_ready());
    }

    #[test]
    fn a_failed_part_is_read_from_memory_and_tried_again() {
        let rules = PackRules { cluster_bits: 16, refcount_max: 65535, offset_end: 1 << 50, block: 4096 };
        let mut supply = Supply { next: 8, bits: 16, clusters: 2, given: Vec::new() };
        let packer = StreamPacker::default();
        let Added::Done(None) = packer.add(3, &[7; 5000], &rules, || Some(supply.room())) else { panic!() };
        let (mut writes, last) = packer.take_all(&rules);
        let offset = packer.stream(3).unwrap().offset;
        let mut bytes = Vec::new();
        assert_eq!(packer.copy_stream(3, offset, &mut bytes), StreamPlace::BeingWritten);
        assert!(packer.poll_ended(last, Waker::noop()).is_pending());
        let error = || Error::new(crate::ErrorKind::NoSpace, "full");
        packer.end(writes.remove(0), Err(error()));
        assert_eq!(packer.copy_stream(3, offset, &mut bytes), StreamPlace::Memory);
        assert_eq!(bytes, [7; 5000]);
        assert!(matches!(packer.poll_ended(last, Waker::noop()), Poll::Ready(Err(_))));
        assert_eq!(packer.poll_memory(1 << 30, Waker::noop()), Poll::Ready(true));
        let (writes, _) = packer.take_all(&rules);
        let mut model = Model::default();
        model.refcounts.extend([(8, 1), (9, 1)]);
        for write in writes {
            model.write(&packer, write, &rules);
        }
        assert_eq!(model.linked.len(), 1);
        assert_eq!(packer.poll_memory(1 << 30, Waker::noop()), Poll::Ready(false));
    }

    const TWO_CLUSTERS: PackRules =
        PackRules { cluster_bits: 16, refcount_max: 65535, offset_end: 1 << 50, block: 4096 };

    /// Packs the streams of guest clusters 3 and 4; the latter reaches from host cluster 8 into 9. The write with its
    /// beginning, and its offset.
    fn pack_across(packer: &StreamPacker, model: &mut Model) -> (PackedWrite, u64) {
        let mut supply = Supply { next: 8, bits: 16, clusters: 1, given: Vec::new() };
        model.refcounts.extend([(8, 1), (9, 1)]);
        let mut add =
            |guest, fill| packer.add(guest, &vec![fill; 40_000], &TWO_CLUSTERS, || Some(supply.room()));
        assert!(matches!(add(3, 1), Added::Done(None)));
        let Added::Done(Some(head)) = add(4, 2) else { panic!("it begins in the first cluster") };
        (*head, packer.stream(4).unwrap().offset)
    }

    #[test]
    fn a_stream_whose_end_could_not_be_written_is_read_from_both_places() {
        let (packer, mut model, rules) = (StreamPacker::default(), Model::default(), TWO_CLUSTERS);
        let (head, offset) = pack_across(&packer, &mut model);
        let mut bytes = Vec::new();
        assert_eq!(packer.copy_stream(4, offset, &mut bytes), StreamPlace::BeingWritten);
        model.write(&packer, head, &rules);
        let in_file = offset..9 << 16;
        for tail in ["is to be written", "could not be written"] {
            assert_eq!(
                packer.copy_stream(4, offset, &mut bytes),
                StreamPlace::Split(in_file.clone()),
                "the end {tail}"
            );
            assert_eq!(bytes.len(), 40_000);
            assert!(bytes[(in_file.end - in_file.start) as usize..].iter().all(|byte| *byte == 2));
            for write in packer.take_all(&rules).0 {
                packer.end(write, Err(Error::new(crate::ErrorKind::NoSpace, "full")));
            }
        }
        for write in packer.take_all(&rules).0 {
            model.write(&packer, write, &rules);
        }
        assert_eq!(packer.copy_stream(4, offset, &mut bytes), StreamPlace::File);
        assert_eq!(model.linked.len(), 2);
    }

    #[test]
    fn a_stream_in_the_file_is_read_while_the_parts_of_others_are_written() {
        let packer = StreamPacker::default();
        let (mut head, _) = pack_across(&packer, &mut Model::default());
        let mut bytes = Vec::new();
        let offset = packer.stream(3).unwrap().offset;
        assert_eq!(packer.copy_stream(3, offset, &mut bytes), StreamPlace::BeingWritten);
        let (tails, _) = packer.take_all(&TWO_CLUSTERS);
        assert_eq!(tails.len(), 1);
        // Written, and not linked yet.
        packer.complete(&mut head);
        packer.end(head, Ok(()));
        assert_eq!(packer.copy_stream(3, offset, &mut bytes), StreamPlace::File);
    }

    #[test]
    fn a_stream_whose_beginning_could_not_be_written_is_read_from_both_places() {
        let (packer, mut model, rules) = (StreamPacker::default(), Model::default(), TWO_CLUSTERS);
        let (head, offset) = pack_across(&packer, &mut model);
        for write in packer.take_all(&rules).0 {
            model.write(&packer, write, &rules);
        }
        packer.end(head, Err(Error::new(crate::ErrorKind::NoSpace, "full")));
        let mut bytes = Vec::new();
        assert_eq!(packer.copy_stream(4, offset, &mut bytes), StreamPlace::Split(9 << 16..offset + 40_000));
        assert!(bytes[..((9 << 16) - offset) as usize].iter().all(|byte| *byte == 2));
    }
}
