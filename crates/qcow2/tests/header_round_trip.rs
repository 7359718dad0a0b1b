//! A parsed header is written back as it was, also one that no program of today writes.

use proptest::prelude::*;
use zebu_qcow2::extension::{BitmapsExtension, Extension, FeatureTable};
use zebu_qcow2::header::NewHeader;
use zebu_qcow2::{
    Autoclear, Compatible, Compression, DataLocation, FormatError, Header, HostOffset, Incompatible,
    L2Format, Purpose, Version,
};

fn any_new_header() -> impl Strategy<Value = NewHeader> {
    (any::<bool>(), 9u32..=21, 0u32..=6, any::<u64>(), any::<[bool; 3]>(), any::<[u64; 2]>()).prop_map(
        |(v3, cluster_bits, order, size, [extended, external, zstd], [compatible, autoclear])| {
            if !v3 {
                return NewHeader::default().version(Version::V2).cluster_bits(cluster_bits).size(size);
            }
            let extended = extended && cluster_bits >= 14;
            NewHeader::default()
                .cluster_bits(cluster_bits)
                .refcount_order(order)
                .size(size)
                .l2_format(if extended { L2Format::Extended } else { L2Format::Standard })
                .data(if external { DataLocation::External } else { DataLocation::InImage })
                .compression(if zstd { Compression::Zstd } else { Compression::Zlib })
                .compatible(Compatible::from_bits_retain(compatible))
                .autoclear(Autoclear::from_bits_retain(autoclear).difference(Autoclear::KNOWN))
        },
    )
}

fn name(max: usize) -> impl Strategy<Value = Option<Vec<u8>>> {
    proptest::option::of(proptest::collection::vec(any::<u8>(), 1..max))
}

prop_compose! {
    /// A header that can be opened, with any of the extensions that this crate can add.
    fn any_header()(
        new in any_new_header(),
        backing in name(1023),
        format in name(15),
        data_file in name(100),
        bitmaps in proptest::option::of((1u32..=65535, 0u64..=67_107_840, 0u64..1 << 30)),
        tables in any::<[u32; 3]>(),
    ) -> Header {
        let mut header = Header::new(&new).unwrap();
        let geometry = header.geometry();
        let l1_size = tables[0] % ((4 << 20) + 1);
        header.l1_size = l1_size;
        header.size = new.size % (u64::from(l1_size).saturating_mul(geometry.guest_bytes_per_l2()) + 1);
        header.l1_table_offset = geometry.cluster_offset(u64::from(tables[1])).unwrap();
        header.refcount_table_offset = geometry.cluster_offset(u64::from(tables[2])).unwrap();
        header.refcount_table_clusters = 1;
        header.nb_snapshots = tables[1] % 65537;
        header.set_backing_file(backing.as_deref()).unwrap();
        header.set_backing_format(format.as_deref()).unwrap();
        header.set_data_file_name(data_file.as_deref());
        if new.version == Version::V3 {
            header.set_bitmaps(bitmaps.map(|(bitmap_count, directory_size, cluster)| BitmapsExtension {
                bitmap_count,
                directory_size,
                directory_offset: geometry.cluster_offset(cluster).unwrap(),
            }));
        }
        header
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parse_of_encode_is_the_header(header in any_header()) {
        let bytes = match header.encode() {
            Ok(bytes) => bytes,
            Err(FormatError::HeaderDoesNotFit { needed, cluster_size }) => {
                prop_assert!(needed > cluster_size);
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        prop_assert_eq!(bytes.len() % 512, 0);
        prop_assert!(bytes.len() as u64 <= header.geometry().cluster_size());
        let (parsed, warnings) = Header::parse(&bytes, Purpose::ReadWrite).unwrap();
        prop_assert_eq!(warnings, []);
        // Where the name lies is not a property of a header that was never on disk.
        prop_assert_eq!(parsed.backing_file(), header.backing_file());
        prop_assert_eq!(parsed.extensions(), header.extensions());
        prop_assert_eq!(parsed.geometry(), header.geometry());
        prop_assert_eq!(parsed.encode().unwrap(), bytes);
        let mut bare = (parsed, header);
        bare.0.set_backing_file(None).unwrap();
        bare.1.set_backing_file(None).unwrap();
        prop_assert_eq!(bare.0, bare.1);
    }

    /// Whatever the bytes are: a verdict, and a header that is written back as it was read.
    #[test]
    fn any_bytes(
        header in any_header(),
        damage in proptest::collection::vec((0usize..600, any::<u8>()), 0..12),
        cut in 0usize..700,
    ) {
        let Ok(mut bytes) = header.encode() else { return Ok(()) };
        for (at, value) in damage {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        let cut = &bytes[..cut.min(bytes.len())];
        for input in [cut, &bytes] {
            for purpose in [Purpose::ReadOnly, Purpose::ReadWrite, Purpose::Check, Purpose::Inspect] {
                let Ok((parsed, _)) = Header::parse(input, purpose) else { continue };
                let Ok(encoded) = parsed.encode() else { continue };
                let (again, _) = Header::parse(&encoded, purpose).unwrap();
                prop_assert_eq!(again.extensions(), parsed.extensions());
                prop_assert_eq!(again.backing_file(), parsed.backing_file());
                prop_assert_eq!(again.encode().unwrap(), encoded);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..700), version in 2u8..=3) {
        let _ = Header::prefix(&bytes);
        let mut bytes = bytes;
        if bytes.len() >= 24 {
            bytes[..8].copy_from_slice(&[b'Q', b'F', b'I', 0xfb, 0, 0, 0, version]);
            bytes[20..24].copy_from_slice(&[0, 0, 0, 9]);
        }
        let _ = Header::parse(&bytes, Purpose::Check);
    }
}

/// A header from the future: longer, with unknown bits, unknown extensions between known ones in an odd order, a
/// feature name table of its own, and the backing file name far behind.
#[test]
fn unknown_parts_are_kept_byte_for_byte() {
    let mut bytes = vec![0; 4096];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &0x5146_49fbu32.to_be_bytes());
    put(4, &3u32.to_be_bytes());
    put(8, &2000u64.to_be_bytes());
    put(16, &4u32.to_be_bytes());
    put(20, &16u32.to_be_bytes());
    put(24, &(1u64 << 20).to_be_bytes());
    put(36, &1u32.to_be_bytes());
    put(40, &0x3_0000u64.to_be_bytes());
    put(48, &0x1_0000u64.to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(80, &0xdead_0000u64.to_be_bytes());
    put(88, &0xbeef_0000u64.to_be_bytes());
    put(96, &4u32.to_be_bytes());
    put(100, &136u32.to_be_bytes());
    // Padding after the compression type, and fields that nobody knows yet.
    put(105, b"padding");
    put(112, b"fields of the future....");
    let mut at = 136;
    let extensions: [(u32, &[u8]); 5] = [
        (0x1111_1111, b"one"),
        (0x6803_f857, &[7; 100]),
        (0x2222_2222, b""),
        (0xe279_2aca, b"raw"),
        (0x1111_1111, b"one again"),
    ];
    for (kind, data) in extensions {
        put(at, &kind.to_be_bytes());
        put(at + 4, &(data.len() as u32).to_be_bytes());
        put(at + 8, data);
        at += 8 + data.len().next_multiple_of(8);
    }
    put(2000, b"base");

    let (mut header, _) = Header::parse(&bytes, Purpose::ReadWrite).unwrap();
    assert_eq!(header.unknown_fields(), b"fields of the future....");
    assert_eq!(header.extensions().len(), 5);
    assert_eq!(header.encode().unwrap(), bytes[..2048]);

    // A change elsewhere leaves all of it alone.
    header.set_backing_format(Some(b"qcow2")).unwrap();
    header.set_incompatible(Incompatible::DIRTY).unwrap();
    let changed = header.encode().unwrap();
    let (again, _) = Header::parse(&changed, Purpose::ReadWrite).unwrap();
    assert_eq!(again.backing_format(), Some(&b"qcow2"[..]));
    let differing: Vec<usize> = (0..2048).filter(|at| changed[*at] != bytes[*at]).collect();
    assert!(differing.iter().all(|at| (72..80).contains(at) || (256..300).contains(at)), "{differing:?}");
}

/// The oldest images have the name right behind the header, and no end marker.
#[test]
fn a_name_without_an_end_marker() {
    let mut header = Header::new(&NewHeader::default().version(Version::V2).cluster_bits(9)).unwrap();
    header.refcount_table_clusters = 1;
    let mut bytes = header.encode().unwrap();
    bytes[8..16].copy_from_slice(&72u64.to_be_bytes());
    bytes[16..20].copy_from_slice(&3u32.to_be_bytes());
    bytes[72..75].copy_from_slice(b"old");
    let (mut parsed, _) = Header::parse(&bytes, Purpose::ReadWrite).unwrap();
    assert_eq!((parsed.backing_file(), parsed.extensions()), (Some(&b"old"[..]), &[][..]));
    assert_eq!(parsed.encode().unwrap(), bytes);
    // With an extension in front of it, the name has to move.
    parsed.set_backing_format(Some(b"raw")).unwrap();
    let (moved, _) = Header::parse(&parsed.encode().unwrap(), Purpose::ReadWrite).unwrap();
    assert_eq!(moved.backing_file(), Some(&b"old"[..]));
    assert_eq!(moved.backing_format(), Some(&b"raw"[..]));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let mut header = Header::new(&NewHeader::default().cluster_bits(9)).unwrap();
    header.set_backing_file(Some(&[b'n'; 512 - 112 - 8])).unwrap();
    assert_eq!(header.encode().unwrap().len(), 512);
    header.set_backing_file(Some(&[b'n'; 512 - 112 - 8 + 1])).unwrap();
    let error = header.encode().unwrap_err();
    assert_eq!(error, FormatError::HeaderDoesNotFit { needed: 513, cluster_size: 512 });
    assert_eq!(error.errno(), libc::ENOSPC);
    assert_eq!(
        header.set_backing_file(Some(&[b'n'; 1024])),
        Err(FormatError::BackingNameTooLong { len: 1024 })
    );
    assert_eq!(
        header.set_backing_format(Some(&[b'n'; 16])),
        Err(FormatError::BackingFormatTooLong { len: 16 })
    );
}

#[test]
fn fields_follow_the_version() {
    let mut header = Header::new(&NewHeader::default()).unwrap();
    header.compatible = Compatible::LAZY_REFCOUNTS;
    assert!(header.feature_table().is_some());
    header.set_version(Version::V2).unwrap();
    assert_eq!(
        (header.header_length(), header.compatible, header.feature_table()),
        (72, Compatible::empty(), None)
    );
    header.refcount_table_clusters = 1;
    let (parsed, _) = Header::parse(&header.encode().unwrap(), Purpose::ReadWrite).unwrap();
    assert_eq!(parsed.version(), Version::V2);
    header.set_version(Version::V3).unwrap();
    assert_eq!(header.header_length(), 112);
    assert_eq!(header.extensions(), [Extension::FeatureTable(FeatureTable::standard())]);

    for (new, words) in [
        (NewHeader::default().compression(Compression::Zstd), "compression"),
        (NewHeader::default().refcount_order(3), "refcount width"),
        (NewHeader::default().data(DataLocation::External), "feature bit"),
    ] {
        let mut header = Header::new(&new).unwrap();
        let before = header.clone();
        let error = header.set_version(Version::V2).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(header, before);
        assert!(Header::new(&new.version(Version::V2)).is_err());
    }
}

#[test]
fn compression_type_and_its_bit_change_together() {
    let mut header = Header::new(&NewHeader::default()).unwrap();
    header.refcount_table_clusters = 1;
    header.set_compression(Compression::Zstd).unwrap();
    assert!(header.incompatible().contains(Incompatible::COMPRESSION_TYPE));
    let bytes = header.encode().unwrap();
    assert_eq!((bytes[79], bytes[104]), (8, 1));
    header.set_incompatible(Incompatible::empty()).unwrap();
    assert_eq!(header.encode(), Err(FormatError::CompressionBitClear));
    header.set_compression(Compression::Zlib).unwrap();
    header.set_incompatible(Incompatible::COMPRESSION_TYPE).unwrap();
    assert_eq!(header.encode(), Err(FormatError::CompressionBitSet));
}

#[test]
fn geometry_follows_the_feature_bits() {
    let mut header = Header::new(&NewHeader::default().cluster_bits(13)).unwrap();
    assert_eq!(
        header.set_incompatible(Incompatible::EXTENDED_L2),
        Err(FormatError::UnsupportedSubclusterSize { subcluster_size: 256 })
    );
    header.set_incompatible(Incompatible::EXTERNAL_DATA).unwrap();
    assert!(header.geometry().external_data && !header.geometry().extended_l2);
    header.set_refcount_order(0).unwrap();
    assert_eq!(header.geometry().refcount_max(), 1);
    assert_eq!(header.set_refcount_order(7), Err(FormatError::RefcountWidthTooLarge));
}

#[test]
fn bitmaps_and_their_bit_change_together() {
    let mut header = Header::new(&NewHeader::default()).unwrap();
    let bitmaps =
        BitmapsExtension { bitmap_count: 1, directory_size: 32, directory_offset: HostOffset(0x5_0000) };
    header.set_bitmaps(Some(bitmaps));
    assert_eq!((header.bitmaps(), header.autoclear), (Some(bitmaps), Autoclear::BITMAPS));
    header.set_bitmaps(None);
    assert_eq!((header.bitmaps(), header.autoclear), (None, Autoclear::empty()));
}

/// A cluster full of the smallest extensions: bounded results, and no flood of warnings.
#[test]
#[cfg_attr(miri, ignore = "160,000 extensions take many minutes")]
fn a_cluster_full_of_extensions() {
    let mut header = Header::new(&NewHeader::default().cluster_bits(21)).unwrap();
    header.refcount_table_clusters = 1;
    let mut bytes = header.encode().unwrap();
    bytes.truncate(112);
    while bytes.len() + 32 <= 1 << 20 {
        bytes.extend([0x23, 0x85, 0x28, 0x75, 0, 0, 0, 24]);
        bytes.extend([0; 24]);
    }
    while bytes.len() + 8 <= 1 << 21 {
        bytes.extend([0x11, 0x11, 0x11, 0x11, 0, 0, 0, 0]);
    }
    let (parsed, warnings) = Header::parse(&bytes, Purpose::ReadWrite).unwrap();
    assert_eq!((parsed.extensions().len(), warnings.len()), (32764 + 131_074, 1));
    // Extensions up to the last byte need no end marker.
    assert_eq!(parsed.encode().unwrap(), bytes);
}
