//! Images that are read by the parsers of the format after they were written in order.

use super::*;
use crate::features::Compression;
use crate::header::{NewHeader, Purpose};
use crate::l2::Mapping;
use crate::refcount::{self, RefTableEntry};
use proptest::prelude::*;

/// A file that takes each byte once.
#[derive(Default)]
struct File {
    bytes: Vec<u8>,
    written: Vec<bool>,
}

impl File {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        let range = at as usize..at as usize + bytes.len();
        if self.bytes.len() < range.end {
            self.bytes.resize(range.end, 0);
            self.written.resize(range.end, false);
        }
        assert!(self.written[range.clone()].iter().all(|written| !written), "a byte is written twice");
        self.written[range.clone()].fill(true);
        self.bytes[range].copy_from_slice(bytes);
    }
}

pub(crate) fn header(size: u64, cluster_bits: u32, order: u32) -> Header {
    let new = NewHeader::default().size(size).cluster_bits(cluster_bits).refcount_order(order);
    Header::new(&new.compression(Compression::Zlib)).unwrap()
}

/// Makes an image of clusters with these lengths: 0 for a hole, all of a cluster for a plain one. Then reads it with the
/// format's own parsers, counts all references, and compares the bytes.
fn check(cluster_bits: u32, order: u32, lens: &[usize]) {
    let size = 1usize << cluster_bits;
    let mut stream = ImageStream::new(header((lens.len() * size) as u64, cluster_bits, order)).unwrap();
    let mut file = File::default();
    let content = |index: usize, len: usize| vec![(index % 251 + 1) as u8; len];
    for (index, len) in lens.iter().enumerate() {
        match *len {
            0 => continue,
            len if len >= size => stream.plain(index as u64, &content(index, size)).unwrap(),
            len => stream.packed(index as u64, &content(index, len)).unwrap(),
        }
        if index % 3 == 0 {
            let (at, bytes) = stream.take();
            file.write(at, &bytes);
        }
    }
    let (at, bytes, first) = stream.finish().unwrap();
    file.write(at, &bytes);
    file.write(0, &first);
    assert!(file.written.iter().all(|written| *written), "a hole in the file");

    let bytes = file.bytes;
    let (header, warnings) = Header::parse(&bytes, Purpose::ReadWrite).unwrap();
    assert!(warnings.is_empty());
    let geometry = header.geometry();
    let mut counts = vec![0u64; bytes.len().div_ceil(size)];
    assert_eq!(bytes.len() % size, 0);
    counts[0] += 1;
    let l1 = &bytes[header.l1_table_offset.0 as usize..];
    let l1_clusters = (header.l1_size as usize * 8).div_ceil(size).max(1);
    for cluster in 0..l1_clusters {
        counts[header.l1_table_offset.0 as usize / size + cluster] += 1;
    }
    let mut seen = std::collections::HashSet::new();
    for (index, len) in lens.iter().enumerate() {
        let guest = GuestOffset((index * size) as u64);
        let table = L1Entry::read(l1, geometry.l1_index(guest) as usize).unwrap();
        let Some(table) = table.checked_table(&geometry).unwrap() else {
            assert_eq!(*len, 0);
            continue;
        };
        let place = geometry.l2_index(guest) as usize;
        if seen.insert(table.0) {
            counts[table.0 as usize / size] += 1;
        }
        let entry = L2Entry::read(&bytes[table.0 as usize..], place, &geometry).unwrap();
        match entry.decode(&geometry).unwrap() {
            Mapping::Compressed(range) => {
                let at = range.offset.0 as usize;
                assert_eq!(bytes[at..at + len], content(index, *len)[..]);
                for cluster in range.host_clusters(&geometry) {
                    counts[cluster as usize] += 1;
                }
            }
            _ if *len == 0 => assert_eq!(entry.host(&geometry), None),
            _ => {
                let at = entry.host(&geometry).unwrap().0 as usize;
                assert_eq!(bytes[at..at + size], content(index, size)[..]);
                assert!(entry.copied());
                counts[at / size] += 1;
            }
        }
    }
    let table_at = header.refcount_table_offset.0 as usize;
    for cluster in 0..header.refcount_table_clusters as usize {
        counts[table_at / size + cluster] += 1;
    }
    let per_block = geometry.refcount_entries_per_block() as usize;
    let mut stored = Vec::new();
    for block in 0..counts.len().div_ceil(per_block) {
        let entry = RefTableEntry::read(&bytes[table_at..], block).unwrap();
        let at = entry.checked_block(&geometry).unwrap().unwrap().0 as usize;
        counts[at / size] += 1;
        stored
            .extend((0..per_block).map(|index| refcount::get(&bytes[at..at + size], index, order).unwrap()));
    }
    assert_eq!(stored[..counts.len()], counts);
    assert!(stored[counts.len()..].iter().all(|count| *count == 0));
}

#[test]
fn an_image_of_nothing_and_one_of_everything() {
    check(9, 4, &[]);
    check(9, 4, &[0; 100]);
    check(9, 4, &vec![512; 3000]);
    check(9, 6, &vec![7; 3000]);
    check(9, 0, &[7; 300]);
    check(16, 4, &[100, 65536, 65535, 0, 1]);
}

#[test]
fn what_is_out_of_order_or_does_not_fit_is_refused() {
    let mut stream = ImageStream::new(header(2048, 9, 4)).unwrap();
    stream.plain(1, &[1; 512]).unwrap();
    assert_eq!(stream.plain(1, &[1; 512]), Err(StreamError::OutOfOrder));
    assert_eq!(stream.packed(4, &[1]), Err(StreamError::OutOfOrder));
    assert_eq!(stream.packed(2, &[]), Err(StreamError::Length { len: 0 }));
    assert_eq!(stream.plain(2, &[1; 513]), Err(StreamError::Length { len: 513 }));
    assert!(ImageStream::new(header(1 << 60, 9, 4)).is_err());
}

/// A disk of which the caller writes each cluster that `has` it is read by the format's own parsers; each byte before
/// the first data is a table's.
fn check_placed(cluster_bits: u32, clusters: u64, has: impl Fn(u64) -> bool) {
    let size = 1u64 << cluster_bits;
    let mut file = File::default();
    let mut stream = ImageStream::placed(header(clusters * size, cluster_bits, 4)).unwrap();
    let content = |cluster: u64| vec![(cluster % 251 + 1) as u8; size as usize];
    for cluster in (0..clusters).filter(|cluster| has(*cluster)) {
        let host = stream.place(cluster).unwrap();
        file.write(host, &content(cluster));
        for (at, bytes) in stream.take_tables() {
            file.write(at, &bytes);
        }
    }
    let (at, bytes, first) = stream.finish().unwrap();
    file.write(at, &bytes);
    for (at, bytes) in stream.take_tables() {
        file.write(at, &bytes);
    }
    file.write(0, &first);
    assert!(file.written.iter().all(|written| *written), "a hole in the file");
    verify(&file.bytes, clusters, has, content);
}

/// Reads an image of plain clusters, whose tables lie before what they map, with the format's own parsers, and counts all
/// references.
pub(crate) fn verify(
    bytes: &[u8],
    clusters: u64,
    has: impl Fn(u64) -> bool,
    content: impl Fn(u64) -> Vec<u8>,
) {
    let (header, warnings) = Header::parse(bytes, Purpose::ReadWrite).unwrap();
    assert!(warnings.is_empty());
    let geometry = header.geometry();
    let size = geometry.cluster_size();
    assert_eq!((header.l1_table_offset.0, bytes.len() as u64 % size), (size, 0));
    let mut counts = vec![0u64; bytes.len() / size as usize];
    let mut count = |at: u64| counts[(at / size) as usize] += 1;
    let front = header.refcount_table_offset.0 + u64::from(header.refcount_table_clusters) * size;
    (0..front / size).for_each(|cluster| count(cluster * size));
    let mut last = None;
    for cluster in 0..clusters {
        let guest = GuestOffset(cluster * size);
        let l1 = L1Entry::read(&bytes[size as usize..], geometry.l1_index(guest) as usize).unwrap();
        let Some(table) = l1.checked_table(&geometry).unwrap() else {
            assert!(!has(cluster), "cluster {cluster}");
            continue;
        };
        if last.replace(table) != Some(table) {
            count(table.0);
        }
        let entry = L2Entry::read(&bytes[table.0 as usize..], geometry.l2_index(guest) as usize, &geometry);
        let host = entry.unwrap().host(&geometry);
        assert_eq!(host.is_some(), has(cluster), "cluster {cluster}");
        if let Some(HostOffset(host)) = host {
            assert!(table.0 < host, "an L2 table lies before what it maps");
            assert_eq!(bytes[host as usize..(host + size) as usize], content(cluster)[..]);
            count(host);
        }
    }
    let per_block = geometry.refcount_entries_per_block() as usize;
    let table = &bytes[header.refcount_table_offset.0 as usize..];
    let blocks: Vec<u64> = (0..counts.len().div_ceil(per_block))
        .map(|block| RefTableEntry::read(table, block).unwrap().checked_block(&geometry).unwrap().unwrap().0)
        .collect();
    for block in &blocks {
        counts[(block / size) as usize] += 1;
    }
    let order = geometry.refcount_order;
    for (cluster, expected) in counts.iter().enumerate() {
        let block = &bytes[blocks[cluster / per_block] as usize..][..size as usize];
        let stored = refcount::get(block, cluster % per_block, order);
        assert_eq!(stored, Some(*expected), "cluster {cluster}");
    }
}

#[test]
fn placed_clusters_lie_behind_their_tables() {
    for (bits, clusters) in [(9, 1), (9, 2000), (9, 20_000), (12, 3000), (16, 100)] {
        check_placed(bits, clusters, |cluster| cluster % 7 != 3);
        check_placed(bits, clusters, |cluster| cluster % 700 == 0);
        check_placed(bits, clusters, |_| true);
        check_placed(bits, clusters, |_| false);
    }
}

#[test]
fn subclusters_that_are_not_filled_read_as_zero() {
    let new = NewHeader::default().size(1 << 20).cluster_bits(16).l2_format(crate::L2Format::Extended);
    let mut overlay = Header::new(&new).unwrap();
    overlay.set_backing_file(Some(b"base")).unwrap();
    for (header, rest) in [(Header::new(&new).unwrap(), 0), (overlay, !0b1110u32)] {
        let geometry = header.geometry();
        let mut stream = ImageStream::placed(header).unwrap();
        let host = stream.place(3).unwrap();
        stream.fill(3, 2048..4096).unwrap();
        stream.fill(3, 4096..6145).unwrap();
        assert_eq!(stream.fill(2, 0..1), Err(StreamError::OutOfOrder));
        let table = &stream.l2.as_ref().unwrap().bytes;
        let found = L2Entry::read(table, 3, &geometry).unwrap().decode(&geometry).unwrap();
        let expected =
            Mapping::Subclusters { host: Some(HostOffset(host)), copied: true, alloc: 0b1110, zero: rest };
        assert_eq!(found, expected);
    }
}

#[test]
fn a_disk_is_cut_behind_its_last_cluster() {
    let mut stream = ImageStream::new(header(1 << 40, 16, 4)).unwrap();
    stream.plain(5, &vec![1; 65536]).unwrap();
    assert_eq!(stream.cut(5 << 16), Err(StreamError::OutOfOrder));
    assert_eq!(stream.cut(1 << 41), Err(StreamError::OutOfOrder));
    stream.cut((5 << 16) + 512).unwrap();
    let (_, _, first) = stream.finish().unwrap();
    let (header, _) = Header::parse(&first, Purpose::ReadWrite).unwrap();
    assert_eq!((header.virtual_size(), header.l1_size), ((5 << 16) + 512, 1));
}

#[test]
fn zeroes_hide_a_backing_file_in_every_version() {
    for version in [Version::V2, Version::V3] {
        let new = NewHeader::default().size(1 << 20).cluster_bits(16).version(version);
        let header = Header::new(&new).unwrap();
        let geometry = header.geometry();
        let mut stream = ImageStream::new(header).unwrap();
        stream.zero(2).unwrap();
        let table = &stream.l2.as_ref().unwrap().bytes;
        let found = L2Entry::read(table, 2, &geometry).unwrap().decode(&geometry).unwrap();
        match version {
            Version::V2 => assert!(matches!(found, Mapping::Data { .. }), "{found:?}"),
            Version::V3 => assert_eq!(found, Mapping::Zero { host: None, copied: false }),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_mixture_has_right_tables_and_counts(
        lens in prop::collection::vec(prop_oneof![Just(0usize), Just(512), 1usize..512], 0..1500),
        order in 2u32..7,
    ) {
        check(9, order, &lens);
    }
}
