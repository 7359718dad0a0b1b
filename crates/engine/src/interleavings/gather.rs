//! The gatherer: streams that are packed by two, flushed by a third and read by a fourth.
//!
//! Parts are written here as `write_out.rs` writes them, to a file in memory. What is linked is overwritten at once, which
//! is when its references go.

use super::{block_on, explore, is_caught, spawn};
use crate::qcow2::gather::{Added, Gatherer, Place, Stream};
use crate::qcow2::segment::{Part, Room, Rules};
use crate::qcow2::space::{Allocated, Content};
use crate::sync::Mutex;
use std::future::poll_fn;
use std::sync::Arc;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBuf, IoBufs};

/// Two blocks to a cluster, so that packing goes on in clusters of which a part is written.
const RULES: Rules = Rules { cluster_bits: 10, refcount_max: 65535, offset_end: 1 << 50, block: 512 };
const ROOM: u64 = 2;
const CLUSTERS: u64 = 16;
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

#[derive(Default)]
struct Image {
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
    fn room(&self) -> Option<Room> {
        let mut clusters = self.clusters.lock().unwrap();
        let start = clusters.len() as u64;
        let one = Cluster { bytes: vec![None; 1 << RULES.cluster_bits], references: 1, was_freed: false };
        clusters.resize((start + ROOM) as usize, one);
        assert!(start + ROOM <= CLUSTERS, "more room than the streams need");
        let allocated = Allocated { range: start..start + ROOM, content: Content::Fresh };
        Some(Room { allocated, buf: IoBuf::zeroed((ROOM << RULES.cluster_bits) as usize) })
    }

    async fn write(&self, guest: u64) {
        let added = self.gatherer.add(guest, &[content(guest); LEN], &RULES, || self.room());
        self.packed.lock().unwrap().push(guest);
        match added {
            Added::Done(Some(part)) => self.write_out(*part).await,
            Added::Done(None) => {}
            Added::NeedsRoom | Added::OutOfReach => panic!("there is room"),
        }
    }

    async fn write_out(&self, mut part: Part) {
        while let Some((cluster, count)) = part.references.last().copied() {
            let mut clusters = self.clusters.lock().unwrap();
            let cluster = &mut clusters[cluster as usize];
            assert!(!cluster.was_freed, "a cluster was given away while a part was on its way to it");
            cluster.references += count;
            drop(clusters);
            self.gatherer.referenced(&mut part);
        }
        let mut bytes = vec![0; part.bytes.len()];
        part.bytes.copy_to(0, &mut bytes);
        let mut clusters = self.clusters.lock().unwrap();
        for (at, byte) in (part.host..).zip(bytes) {
            let cluster = &mut clusters[(at >> RULES.cluster_bits) as usize];
            assert!(!cluster.was_freed, "host byte {at} is written after its cluster was given away");
            let place = &mut cluster.bytes[at as usize % (1 << RULES.cluster_bits)];
            assert_eq!(place.replace(byte), None, "host byte {at} is written twice");
        }
        drop(clusters);
        self.gatherer.written(part.bytes.len());
        part.bytes = IoBufs::new();
        if !sabotage::is(Fault::CloseEarly) {
            poll_fn(|cx| self.gatherer.poll_closable(&part, cx.waker())).await.unwrap();
        }
        for (clusters, _) in std::mem::take(&mut part.unused) {
            clusters.for_each(|cluster| self.drop_reference(cluster));
        }
        self.gatherer.complete(&mut part);
        for guest in std::mem::take(&mut part.complete) {
            let stream = self.gatherer.stream(guest).unwrap();
            self.gatherer.linked(guest);
            let last = (stream.offset + stream.len - 1) >> RULES.cluster_bits;
            (stream.offset >> RULES.cluster_bits..=last).for_each(|cluster| self.drop_reference(cluster));
        }
        self.gatherer.end(part, Ok(()));
    }

    fn drop_reference(&self, cluster: u64) {
        let cluster = &mut self.clusters.lock().unwrap()[cluster as usize];
        cluster.references = cluster.references.checked_sub(1).expect("a reference for each stream");
        cluster.was_freed |= cluster.references == 0;
    }

    async fn flush(&self) {
        let packed = self.packed.lock().unwrap().clone();
        let (parts, last) = self.gatherer.take_all(&RULES);
        for part in parts {
            self.write_out(part).await;
        }
        poll_fn(|cx| self.gatherer.poll_ended(last, cx.waker())).await.unwrap();
        for guest in packed {
            assert!(self.gatherer.stream(guest).is_none(), "a flush has linked what was packed before");
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
                let cluster = &clusters[(at >> RULES.cluster_bits) as usize];
                let byte = cluster.bytes[at as usize % (1 << RULES.cluster_bits)];
                bytes[(at - offset) as usize] = byte.expect("it is in the file");
            }
            assert_eq!(bytes, [content(guest); LEN]);
            return;
        }
    }
}

fn streams() {
    let image = Arc::new(Image::default());
    let mut threads: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let image = image.clone();
            spawn(move || {
                for step in 0..STREAMS {
                    block_on(image.write(writer * STREAMS + step));
                }
            })
        })
        .collect();
    let theirs = image.clone();
    threads.push(spawn(move || {
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
    block_on(image.flush());
    if let Some(rest) = image.gatherer.take_rest(&RULES) {
        block_on(image.write_out(rest));
    }
    assert!(image.gatherer.is_empty());
    let kept = image.clusters.lock().unwrap().iter().filter(|cluster| cluster.references > 0).count();
    assert_eq!(kept, 0, "as many references as streams");
}

#[test]
fn streams_are_written_once_and_keep_their_clusters_until_they_are_overwritten() {
    explore(streams);
}

#[test]
fn a_cluster_that_is_closed_early_is_caught() {
    is_caught(Fault::CloseEarly, streams);
}
