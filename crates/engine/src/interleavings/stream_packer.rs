//! The packer: streams that are packed by two, flushed by two others, one of whom reads them.
//!
//! Writes are carried out as in the image (`write_out.rs`), to a file in memory. What is linked is overwritten at once, which
//! is when its references go. Some fail: they stay packed, and the next flush tries again.

use super::{block_on, explore, is_caught, spawn};
use crate::qcow2::compressed::pack_buffer::{PackRules, PackedWrite, Room};
use crate::qcow2::compressed::stream_packer::{Added, StreamPacker, StreamPlace};
use crate::qcow2::compressed::write_out::{PackSink, carry_out};
use crate::qcow2::space::free::{Allocated, SpaceContent};
use crate::qcow2::space::quarantine::FreeMode;
use crate::sync::Mutex;
use crate::{Error, ErrorKind, Result};
use futures_util::future::join_all;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use zebu_storage::sabotage::Fault;
use zebu_storage::{IoBuf, IoBufs};

/// Two blocks to a cluster, so that packing goes on in clusters of which a write is written.
const WIDE: PackRules = PackRules::new(BITS, 65535, 1 << 50, 512);
/// No more streams to a cluster than its refcount can say.
const NARROW: PackRules = PackRules::new(BITS, NARROW_MAX, 1 << 50, 512);
const NARROW_MAX: u64 = 2;
/// Two blocks to a cluster.
const BITS: u32 = 10;
const ROOM: u64 = 2;
const CLUSTERS: u64 = 24;
const WRITERS: u64 = 2;
/// Streams of each writer, and their bytes: more than fit into a buffer, so that writers end some.
const STREAMS: u64 = 5;
const LEN: usize = 300;

/// A cluster of the file.
#[derive(Debug, Clone, Default)]
struct Cluster {
    bytes: Vec<Option<u8>>,
    references: u64,
    was_freed: bool,
}

struct Image {
    rules: PackRules,
    /// Which of the changes of the file fail, counted from 1.
    failing: &'static [u32],
    changes: Mutex<u32>,
    packer: StreamPacker,
    /// Guest clusters whose streams were packed.
    packed: Mutex<Vec<u64>>,
    clusters: Mutex<Vec<Cluster>>,
}

/// The byte that a stream is full of.
fn content(guest: u64) -> u8 {
    guest as u8 + 1
}

impl Image {
    fn new(rules: PackRules, failing: &'static [u32]) -> Self {
        Self {
            rules,
            failing,
            changes: Mutex::default(),
            packer: StreamPacker::default(),
            packed: Mutex::default(),
            clusters: Mutex::default(),
        }
    }

    /// Whether a change of the file may be made.
    fn allow_change(&self) -> Result<()> {
        let mut changes = self.changes.lock();
        *changes += 1;
        let fails = self.failing.contains(&changes);
        if fails { Err(Error::new(ErrorKind::NoSpace, "full")) } else { Ok(()) }
    }

    fn room(&self) -> Option<Room> {
        let mut clusters = self.clusters.lock();
        let start = clusters.len() as u64;
        let one = Cluster { bytes: vec![None; 1 << BITS], references: 1, was_freed: false };
        clusters.resize((start + ROOM) as usize, one);
        assert!(start + ROOM <= CLUSTERS, "more room than the streams need");
        let allocated = Allocated::new(start..start + ROOM, SpaceContent::Fresh);
        Some(Room::new(allocated, IoBuf::zeroed((ROOM << BITS) as usize)))
    }

    async fn write(&self, guest: u64) {
        let added = self.packer.add(guest, &[content(guest); LEN], &self.rules, || self.room());
        self.packed.lock().push(guest);
        match added {
            Added::Done(Some(write)) => self.write_out(*write).await,
            Added::Done(None) => {}
            Added::NeedsRoom | Added::OutOfReach(_) => panic!("there is room"),
        }
    }

    async fn write_out(&self, mut write: PackedWrite) {
        let result = carry_out(&mut write, &self.packer, self).await;
        self.packer.end(write, result);
    }

    fn drop_reference(&self, cluster: u64) {
        let cluster = &mut self.clusters.lock()[cluster as usize];
        cluster.references = cluster.references.checked_sub(1).expect("a reference for each stream");
        cluster.was_freed |= cluster.references == 0;
    }

    /// Whether it succeeded.
    async fn flush(&self) -> bool {
        let packed = self.packed.lock().clone();
        let (writes, last) = self.packer.take_all(&self.rules);
        // Each is a task of its own: one that failed may wait for one that failed after it.
        join_all(writes.into_iter().map(|write| self.write_out(write))).await;
        let ended = poll_fn(|cx| self.packer.poll_ended(last, cx.waker())).await;
        for guest in packed.into_iter().take_while(|_| ended.is_ok()) {
            assert!(self.packer.stream(guest).is_none(), "a flush has linked what was packed before");
        }
        assert!(ended.is_ok() || !self.failing.is_empty(), "{ended:?}");
        ended.is_ok()
    }

    /// Flushes until it succeeds, with nobody beside it: it fails only where the file does.
    fn flush_alone(&self) {
        loop {
            let before = *self.changes.lock();
            if block_on(self.flush()) {
                return;
            }
            let after = *self.changes.lock();
            let has_failed = self.failing.iter().any(|number| (before + 1..=after).contains(number));
            assert!(has_failed, "what has failed before is tried again");
        }
    }

    async fn read(&self, guest: u64) {
        let mut bytes = Vec::new();
        while let Some(stream) = self.packer.stream(guest) {
            let (offset, len) = (stream.offset(), stream.len());
            let in_file = match self.packer.copy_stream(guest, offset, &mut bytes) {
                StreamPlace::Memory => 0..0,
                StreamPlace::Split(range) => range,
                StreamPlace::Lost => panic!("every write has a result"),
                StreamPlace::File => {
                    bytes = vec![0; len as usize];
                    offset..offset + len
                }
                StreamPlace::BeingWritten => {
                    let mut seen = false;
                    poll_fn(|cx| self.packer.poll_change(&mut seen, cx.waker())).await;
                    continue;
                }
            };
            let clusters = self.clusters.lock();
            for at in in_file {
                let cluster = &clusters[(at >> BITS) as usize];
                let byte = cluster.bytes[at as usize % (1 << BITS)];
                bytes[(at - offset) as usize] = byte.expect("it is in the file");
            }
            assert_eq!(bytes, [content(guest); LEN]);
            return;
        }
    }
}

impl PackSink for Image {
    async fn add_references(&self, cluster: u64, count: u64) -> Result<()> {
        self.allow_change()?;
        let cluster = &mut self.clusters.lock()[cluster as usize];
        assert!(!cluster.was_freed, "a cluster was given away while a write was on its way to it");
        cluster.references += count;
        assert!(cluster.references <= self.rules.refcount_max(), "more than a refcount can say");
        Ok(())
    }

    async fn write_bytes(&self, host: u64, _: u64, bufs: IoBufs) -> Result<(), (Error, IoBufs)> {
        if let Err(error) = self.allow_change() {
            return Err((error, bufs));
        }
        let mut bytes = vec![0; bufs.len()];
        bufs.copy_to(0, &mut bytes);
        let mut clusters = self.clusters.lock();
        for (at, byte) in (host..).zip(bytes) {
            let cluster = &mut clusters[(at >> BITS) as usize];
            assert!(!cluster.was_freed, "host byte {at} is written after its cluster was given away");
            let place = &mut cluster.bytes[at as usize % (1 << BITS)];
            assert_eq!(place.replace(byte), None, "host byte {at} is written twice");
        }
        Ok(())
    }

    fn give_back(&self, clusters: Range<u64>, _: FreeMode) {
        clusters.for_each(|cluster| self.drop_reference(cluster));
    }

    async fn link(&self, guest: u64) -> Result<()> {
        self.allow_change()?;
        let stream = self.packer.stream(guest).unwrap();
        self.packer.linked(guest);
        let last = (stream.offset() + stream.len() - 1) >> BITS;
        (stream.offset() >> BITS..=last).for_each(|cluster| self.drop_reference(cluster));
        Ok(())
    }
}

fn pack_flush_and_read(rules: PackRules, failing: &'static [u32]) {
    let image = Arc::new(Image::new(rules, failing));
    let mut threads: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let image = image.clone();
            spawn(move || {
                for guest in writer * STREAMS..(writer + 1) * STREAMS {
                    block_on(image.write(guest));
                    block_on(image.read(guest));
                }
            })
        })
        .collect();
    let theirs = image.clone();
    threads.push(spawn(move || {
        // Beside the other flushes: what failed in one may be taken by another.
        block_on(theirs.flush());
        for guest in 0..WRITERS * STREAMS {
            block_on(theirs.read(guest));
        }
    }));
    for _ in 0..2 {
        block_on(image.flush());
    }
    for thread in threads {
        thread.join().unwrap();
    }
    image.flush_alone();
    if let Some(rest) = image.packer.take_rest(&rules) {
        block_on(image.write_out(rest));
    }
    image.flush_alone();
    assert!(image.packer.is_empty());
    let kept = image.clusters.lock().iter().filter(|cluster| cluster.references > 0).count();
    assert_eq!(kept, 0, "as many references as streams");
}

fn streams() {
    pack_flush_and_read(WIDE, &[]);
}

#[test]
fn streams_are_written_once_and_keep_their_clusters_until_they_are_overwritten() {
    explore(streams);
}

fn streams_of_failing_parts() {
    pack_flush_and_read(WIDE, &[1, 4, 5, 9]);
}

#[test]
fn streams_of_parts_that_fail_are_written_by_the_next_flush() {
    explore(streams_of_failing_parts);
}

fn narrow_streams() {
    pack_flush_and_read(NARROW, &[]);
}

#[test]
fn streams_in_clusters_with_narrow_refcounts_keep_them() {
    explore(narrow_streams);
    explore(|| pack_flush_and_read(NARROW, &[2, 3, 8]));
}

#[test]
fn a_cluster_that_is_closed_early_is_caught() {
    is_caught(Fault::CloseEarly, streams);
}

#[test]
fn more_streams_than_a_refcount_can_say_are_caught() {
    is_caught(Fault::PackTooMany, narrow_streams);
}

#[test]
fn what_becomes_of_a_part_that_failed_is_noticed() {
    is_caught(Fault::ForgetFailedPart, streams_of_failing_parts);
    is_caught(Fault::WaitForFailedPart, streams_of_failing_parts);
    is_caught(Fault::RenumberFailedPart, streams_of_failing_parts);
}
