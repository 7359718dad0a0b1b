//! The gatherer: streams that are packed by two, flushed by two others, one of whom reads them.
//!
//! Parts are settled as in the image (`write_out.rs`), to a file in memory. What is linked is overwritten at once, which
//! is when its references go. Some fail: they stay gathered, and the next flush tries again.

use super::{block_on, explore, is_caught, spawn};
use crate::qcow2::gather::{Added, Gatherer, Place, Stream};
use crate::qcow2::segment::{Part, Room, Rules};
use crate::qcow2::space::{Allocated, Content};
use crate::qcow2::state::AfterFree;
use crate::qcow2::write_out::{Destination, settle};
use crate::sync::Mutex;
use crate::{Error, ErrorKind, Result};
use futures_util::future::join_all;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use zebu_storage::sabotage::Fault;
use zebu_storage::{IoBuf, IoBufs};

/// Two blocks to a cluster, so that packing goes on in clusters of which a part is written.
const WIDE: Rules = Rules { cluster_bits: 10, refcount_max: 65535, offset_end: 1 << 50, block: 512 };
/// No more streams to a cluster than its refcount can say.
const NARROW: Rules = Rules { refcount_max: 2, ..WIDE };
const ROOM: u64 = 2;
const CLUSTERS: u64 = 24;
const WRITERS: u64 = 2;
/// Streams of each writer, and their bytes: more than fit into a segment, so that writers end some.
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
    rules: Rules,
    /// Which of the changes of the file fail, counted from 1.
    failing: &'static [u32],
    changes: Mutex<u32>,
    gatherer: Gatherer,
    /// Guest clusters whose streams were packed.
    packed: Mutex<Vec<u64>>,
    clusters: Mutex<Vec<Cluster>>,
}

/// What a stream is full of.
fn content(guest: u64) -> u8 {
    guest as u8 + 1
}

impl Image {
    fn new(rules: Rules, failing: &'static [u32]) -> Self {
        Self {
            rules,
            failing,
            changes: Mutex::default(),
            gatherer: Gatherer::default(),
            packed: Mutex::default(),
            clusters: Mutex::default(),
        }
    }

    /// What every change of the file asks before it is made.
    fn allow_change(&self) -> Result<()> {
        let mut changes = self.changes.lock().unwrap();
        *changes += 1;
        let fails = self.failing.contains(&changes);
        if fails { Err(Error::new(ErrorKind::NoSpace, "full")) } else { Ok(()) }
    }

    fn room(&self) -> Option<Room> {
        let mut clusters = self.clusters.lock().unwrap();
        let start = clusters.len() as u64;
        let one =
            Cluster { bytes: vec![None; 1 << self.rules.cluster_bits], references: 1, was_freed: false };
        clusters.resize((start + ROOM) as usize, one);
        assert!(start + ROOM <= CLUSTERS, "more room than the streams need");
        let allocated = Allocated { range: start..start + ROOM, content: Content::Fresh };
        Some(Room { allocated, buf: IoBuf::zeroed((ROOM << self.rules.cluster_bits) as usize) })
    }

    async fn write(&self, guest: u64) {
        let added = self.gatherer.add(guest, &[content(guest); LEN], &self.rules, || self.room());
        self.packed.lock().unwrap().push(guest);
        match added {
            Added::Done(Some(part)) => self.write_out(*part).await,
            Added::Done(None) => {}
            Added::NeedsRoom | Added::OutOfReach => panic!("there is room"),
        }
    }

    async fn write_out(&self, mut part: Part) {
        let result = settle(&mut part, &self.gatherer, self).await;
        self.gatherer.end(part, result);
    }

    fn drop_reference(&self, cluster: u64) {
        let cluster = &mut self.clusters.lock().unwrap()[cluster as usize];
        cluster.references = cluster.references.checked_sub(1).expect("a reference for each stream");
        cluster.was_freed |= cluster.references == 0;
    }

    /// Whether it succeeded.
    async fn flush(&self) -> bool {
        let packed = self.packed.lock().unwrap().clone();
        let (parts, last) = self.gatherer.take_all(&self.rules);
        // Each is a task of its own: one that failed may wait for one that failed after it.
        join_all(parts.into_iter().map(|part| self.write_out(part))).await;
        let ended = poll_fn(|cx| self.gatherer.poll_ended(last, cx.waker())).await;
        for guest in packed.into_iter().take_while(|_| ended.is_ok()) {
            assert!(self.gatherer.stream(guest).is_none(), "a flush has linked what was packed before");
        }
        assert!(ended.is_ok() || !self.failing.is_empty(), "{ended:?}");
        ended.is_ok()
    }

    /// Flushes until it succeeds, with nobody beside it: it fails only where the file does.
    fn flush_alone(&self) {
        loop {
            let before = *self.changes.lock().unwrap();
            if block_on(self.flush()) {
                return;
            }
            let after = *self.changes.lock().unwrap();
            let has_failed = self.failing.iter().any(|number| (before + 1..=after).contains(number));
            assert!(has_failed, "what has failed before is tried again");
        }
    }

    async fn read(&self, guest: u64) {
        let mut bytes = Vec::new();
        while let Some(Stream { offset, len, .. }) = self.gatherer.stream(guest) {
            let in_file = match self.gatherer.copy_stream(guest, offset, &mut bytes) {
                Place::Memory => 0..0,
                Place::Split(range) => range,
                Place::File => {
                    bytes = vec![0; len as usize];
                    offset..offset + len
                }
                Place::BeingWritten => {
                    let mut seen = false;
                    poll_fn(|cx| self.gatherer.poll_change(&mut seen, cx.waker())).await;
                    continue;
                }
            };
            let clusters = self.clusters.lock().unwrap();
            for at in in_file {
                let cluster = &clusters[(at >> self.rules.cluster_bits) as usize];
                let byte = cluster.bytes[at as usize % (1 << self.rules.cluster_bits)];
                bytes[(at - offset) as usize] = byte.expect("it is in the file");
            }
            assert_eq!(bytes, [content(guest); LEN]);
            return;
        }
    }
}

impl Destination for Image {
    async fn add_references(&self, cluster: u64, count: u64) -> Result<()> {
        self.allow_change()?;
        let cluster = &mut self.clusters.lock().unwrap()[cluster as usize];
        assert!(!cluster.was_freed, "a cluster was given away while a part was on its way to it");
        cluster.references += count;
        assert!(cluster.references <= self.rules.refcount_max, "more than a refcount can say");
        Ok(())
    }

    async fn write_bytes(&self, part: &mut Part) -> Result<()> {
        self.allow_change()?;
        let mut bytes = vec![0; part.bytes.len()];
        part.bytes.copy_to(0, &mut bytes);
        let mut clusters = self.clusters.lock().unwrap();
        for (at, byte) in (part.host..).zip(bytes) {
            let cluster = &mut clusters[(at >> self.rules.cluster_bits) as usize];
            assert!(!cluster.was_freed, "host byte {at} is written after its cluster was given away");
            let place = &mut cluster.bytes[at as usize % (1 << self.rules.cluster_bits)];
            assert_eq!(place.replace(byte), None, "host byte {at} is written twice");
        }
        part.bytes = IoBufs::new();
        Ok(())
    }

    fn give_back(&self, clusters: Range<u64>, _: AfterFree) {
        clusters.for_each(|cluster| self.drop_reference(cluster));
    }

    async fn link(&self, guest: u64) -> Result<()> {
        self.allow_change()?;
        let stream = self.gatherer.stream(guest).unwrap();
        self.gatherer.linked(guest);
        let last = (stream.offset + stream.len - 1) >> self.rules.cluster_bits;
        (stream.offset >> self.rules.cluster_bits..=last).for_each(|cluster| self.drop_reference(cluster));
        Ok(())
    }
}

fn pack_flush_and_read(rules: Rules, failing: &'static [u32]) {
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
    if let Some(rest) = image.gatherer.take_rest(&rules) {
        block_on(image.write_out(rest));
    }
    image.flush_alone();
    assert!(image.gatherer.is_empty());
    let kept = image.clusters.lock().unwrap().iter().filter(|cluster| cluster.references > 0).count();
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
