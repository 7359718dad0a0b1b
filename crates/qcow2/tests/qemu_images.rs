//! Images made by QEMU: headers written back byte for byte, tables understood, sizes computed the same.

mod common;

use common::{Scratch, qemu_img};
use zebu_qcow2::extension::Extension;
use zebu_qcow2::header::NewHeader;
use zebu_qcow2::layout::{FreshLayout, Preallocation, fully_allocated_size};
use zebu_qcow2::snapshot::{self, ParsedTable};
use zebu_qcow2::{
    Compatible, Compression, DataLocation, Geometry, Header, L1Entry, L2Entry, L2Format, Mapping, Purpose,
    RefTableEntry, Version, bitmap, refcount,
};

const OPTIONS: &[&str] = &[
    "",
    "compat=0.10",
    "compat=0.10,cluster_size=512",
    "cluster_size=512",
    "cluster_size=4k",
    "cluster_size=8k",
    "cluster_size=2M",
    "lazy_refcounts=on",
    "refcount_bits=1",
    "refcount_bits=64,cluster_size=512",
    "compression_type=zstd",
    "extended_l2=on",
    "extended_l2=on,cluster_size=16k,compression_type=zstd,refcount_bits=8",
    "backing_file=base.raw,backing_fmt=raw",
    "backing_file=base.qcow2,backing_fmt=qcow2,compat=0.10",
    "backing_file=a/rather/long/name/of/a/backing/file.raw,backing_fmt=raw,cluster_size=512",
];

/// The bytes of the first cluster up to the end of what our encoder writes, and no byte set after them.
fn assert_header_kept(file: &[u8], what: &str) {
    let (header, warnings) =
        Header::parse(file, Purpose::ReadWrite).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(warnings, [], "{what}");
    let encoded = header.encode().unwrap();
    assert_eq!(encoded, file[..encoded.len()], "{what}");
    let cluster = &file[..(header.geometry().cluster_size() as usize).min(file.len())];
    assert!(cluster[encoded.len()..].iter().all(|byte| *byte == 0), "{what}: more in the first cluster");
}

#[test]
fn headers_are_written_back_byte_for_byte() {
    let Some(scratch) = Scratch::new() else { return };
    for options in OPTIONS {
        assert_header_kept(&scratch.create(options, "100M"), options);
    }
    let data_file = scratch.path("data.raw");
    for raw in ["off", "on"] {
        let options = format!("data_file={},data_file_raw={raw}", data_file.display());
        let file = scratch.create(&options, "1M");
        assert_header_kept(&file, &options);
        let (header, _) = Header::parse(&file, Purpose::ReadWrite).unwrap();
        assert_eq!(header.data_file_name(), Some(data_file.as_os_str().as_encoded_bytes()));
    }
}

#[test]
fn a_luks_image_is_described_and_kept() {
    let Some(scratch) = Scratch::new() else { return };
    let path = scratch.path("luks.qcow2");
    qemu_img(
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "--object",
            "secret,id=s,data=secret",
            "-o",
            "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10",
        ],
        &[&path],
        &["1M"],
    );
    let file = std::fs::read(&path).unwrap();
    assert_header_kept(&file, "LUKS");
    let (header, _) = Header::parse(&file, Purpose::ReadOnly).unwrap();
    let luks = header.luks().unwrap();
    // What it points at begins with the magic of a LUKS header.
    assert_eq!(file[luks.offset.0 as usize..][..6], *b"LUKS\xba\xbe");
    assert!(header.check_not_encrypted().is_err());
}

/// A header of ours for a new image equals that of QEMU, given the same places for the tables.
#[test]
fn new_headers_equal_those_of_qemu() {
    let Some(scratch) = Scratch::new() else { return };
    let default = NewHeader::default().size(100 << 20);
    let cases: Vec<(&str, NewHeader)> = vec![
        ("", default.clone()),
        ("compat=0.10", default.clone().version(Version::V2)),
        ("cluster_size=512", default.clone().cluster_bits(9)),
        ("cluster_size=4k", default.clone().cluster_bits(12)),
        ("cluster_size=8k", default.clone().cluster_bits(13)),
        ("cluster_size=2M,refcount_bits=1", default.clone().cluster_bits(21).refcount_order(0)),
        ("lazy_refcounts=on", default.clone().compatible(Compatible::LAZY_REFCOUNTS)),
        ("compression_type=zstd", default.clone().compression(Compression::Zstd)),
        ("extended_l2=on", default.clone().l2_format(L2Format::Extended)),
        ("backing_file=base,backing_fmt=raw", default.clone()),
    ];
    for (options, new) in cases {
        let file = scratch.create(options, "100M");
        let (theirs, _) = Header::parse(&file, Purpose::ReadWrite).unwrap();
        let mut ours = Header::new(&new).unwrap();
        if options.starts_with("backing_file") {
            ours.set_backing_file(Some(b"base")).unwrap();
            ours.set_backing_format(Some(b"raw")).unwrap();
        }
        ours.l1_size = theirs.l1_size;
        ours.l1_table_offset = theirs.l1_table_offset;
        ours.refcount_table_offset = theirs.refcount_table_offset;
        ours.refcount_table_clusters = theirs.refcount_table_clusters;
        let encoded = ours.encode().unwrap();
        assert_eq!(encoded, file[..encoded.len()], "{options}");
        let needed = ours.geometry().l1_entries_for(100 << 20).unwrap();
        assert_eq!(u64::from(theirs.l1_size), needed, "{options}");
    }
}

fn geometry(cluster_bits: u32, refcount_order: u32, l2_format: L2Format) -> Geometry {
    Geometry::new(Version::V3, cluster_bits, refcount_order, l2_format, DataLocation::InImage).unwrap()
}

#[test]
fn full_sizes_equal_those_that_qemu_measures() {
    let Some(_scratch) = Scratch::new() else { return };
    for size in [0u64, 512, 1 << 20, (1 << 30) + 512, 3 << 40] {
        for (cluster_bits, order, l2) in [
            (16, 4, L2Format::Standard),
            (16, 4, L2Format::Extended),
            (9, 6, L2Format::Standard),
            (12, 0, L2Format::Standard),
            (21, 4, L2Format::Standard),
        ] {
            let g = geometry(cluster_bits, order, l2);
            let extended = if g.extended_l2 { "on" } else { "off" };
            let options = format!(
                "cluster_size={},refcount_bits={},extended_l2={extended}",
                g.cluster_size(),
                g.refcount_bits()
            );
            let output = common::run(
                "qemu-img",
                &["measure", "-O", "qcow2", "-o", &options, "--size", &size.to_string()],
                &[],
                &[],
            );
            let text = String::from_utf8_lossy(&output.stdout);
            let theirs = text
                .lines()
                .find_map(|line| line.strip_prefix("fully allocated size: "))
                .map(|number| number.parse::<u64>().unwrap());
            let ours = fully_allocated_size(size, 0, &g).ok().map(|full| full.total());
            assert_eq!(ours, theirs, "{size} bytes, {options}");
        }
    }
}

/// An image put together from a plan opens, checks and reads in QEMU without a complaint.
#[test]
fn planned_images_check_clean_in_qemu() {
    let Some(scratch) = Scratch::new() else { return };
    for (cluster_bits, order, l2) in [
        (9, 0, L2Format::Standard),
        (9, 6, L2Format::Standard),
        (12, 4, L2Format::Standard),
        (14, 1, L2Format::Extended),
        (16, 4, L2Format::Standard),
    ] {
        for preallocation in [Preallocation::Off, Preallocation::All] {
            let g = geometry(cluster_bits, order, l2);
            let size = (3 << 20) + 1024;
            let layout = FreshLayout::plan(size, &g, preallocation).unwrap();
            let mut header = Header::new(
                &NewHeader::default()
                    .cluster_bits(cluster_bits)
                    .refcount_order(order)
                    .l2_format(l2)
                    .size(size),
            )
            .unwrap();
            layout.apply_to(&mut header);
            let mut file = vec![0; (layout.total_clusters * g.cluster_size()) as usize];
            let mut place = |offset: u64, bytes: &[u8]| {
                file[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
            };
            place(0, &header.encode().unwrap());
            place(layout.reftable_offset.0, &layout.reftable());
            for index in 0..layout.refcounts.blocks {
                place(layout.refblocks_offset.0 + index * g.cluster_size(), &layout.refblock(index).unwrap());
            }
            for table in 0..u64::from(layout.l2_tables) {
                let offset = layout.l2_offset.checked_add(table * g.cluster_size()).unwrap();
                let mut l1 = [0; 8];
                L1Entry::new(offset, true).write(&mut l1, 0).unwrap();
                place(layout.l1_offset.0 + table * 8, &l1);
                let mut l2_table = vec![0; g.cluster_size() as usize];
                for index in 0..g.l2_entries() {
                    let cluster = table * g.l2_entries() + index;
                    if cluster < layout.data_clusters {
                        let host = layout.data_offset.checked_add(cluster * g.cluster_size()).unwrap();
                        L2Entry::data(host, &g).write(&mut l2_table, index as usize, &g).unwrap();
                    }
                }
                place(offset.0, &l2_table);
            }
            let path = scratch.write("planned.qcow2", &file);
            let report = qemu_img(&["check", "-f", "qcow2"], &[&path], &[]);
            assert!(report.contains("No errors were found"), "{g:?} {preallocation:?}: {report}");
            let map = qemu_img(&["map", "-f", "qcow2", "--output", "json"], &[&path], &[]);
            assert_eq!(map.contains("\"present\": true"), preallocation == Preallocation::All, "{map}");
        }
    }
}

/// Refcounts, tables and mappings of an image with data, zeroes, compressed clusters and a snapshot.
#[test]
fn a_used_image_is_understood() {
    let Some(scratch) = Scratch::new() else { return };
    for (options, order) in [("", 4), ("extended_l2=on,refcount_bits=2", 1), ("refcount_bits=64", 6)] {
        scratch.create(options, "1M");
        let path = scratch.path("created.qcow2");
        let writes =
            ["-f", "qcow2", "-c", "write -P 7 0 64k", "-c", "write -z 64k 64k", "-c", "write -c 128k 64k"];
        let done = common::run("qemu-io", &writes, &[&path], &["-c", "write 192k 64k"]);
        assert!(done.status.success());
        qemu_img(&["snapshot", "-c", "before"], &[&path], &[]);
        let done = common::run("qemu-io", &["-f", "qcow2", "-c", "write -P 9 0 64k"], &[&path], &[]);
        assert!(done.status.success());

        let file = std::fs::read(&path).unwrap();
        assert_header_kept(&file, options);
        let (header, _) = Header::parse(&file, Purpose::ReadWrite).unwrap();
        let g = header.geometry();
        let l1 = L1Entry::read(&file[header.l1_table_offset.0 as usize..], 0).unwrap();
        l1.validate(&g).unwrap();
        assert!(l1.copied());
        let table = &file[l1.table().unwrap().0 as usize..];
        let count = |host: u64| {
            let entry = RefTableEntry::read(&file[header.refcount_table_offset.0 as usize..], 0).unwrap();
            entry.validate(&g).unwrap();
            let block = &file[entry.block().unwrap().0 as usize..][..g.cluster_size() as usize];
            refcount::get(block, g.cluster_index(zebu_qcow2::HostOffset(host)) as usize, order).unwrap()
        };
        let mapping = |index| {
            let entry = L2Entry::read(table, index, &g).unwrap();
            assert_eq!(entry.reserved_bits(&g), 0);
            entry.decode(&g).unwrap()
        };

        // Written after the snapshot: its own cluster, refcount 1, with the bytes of the second write.
        let (Mapping::Data { host, copied } | Mapping::Subclusters { host: Some(host), copied, .. }) =
            mapping(0)
        else {
            panic!("{options}: {:?}", mapping(0))
        };
        assert_eq!((copied, count(host.0)), (true, 1));
        assert!(file[host.0 as usize..][..65536].iter().all(|byte| *byte == 9));
        match mapping(1) {
            Mapping::Zero { .. } => assert!(!g.extended_l2),
            Mapping::Subclusters { zero, alloc, .. } => assert_eq!((zero, alloc), (u32::MAX, 0)),
            other => panic!("{options}: {other:?}"),
        }
        // A compressed cluster and a plain one that the snapshot shares.
        let Mapping::Compressed(range) = mapping(2) else { panic!("{options}: {:?}", mapping(2)) };
        assert!(range.host_clusters(&g).all(|cluster| count(cluster * g.cluster_size()) == 2));
        let (Mapping::Data { host, copied } | Mapping::Subclusters { host: Some(host), copied, .. }) =
            mapping(3)
        else {
            panic!("{options}: {:?}", mapping(3))
        };
        assert_eq!((copied, count(host.0)), (false, 2));

        // The snapshot table: parsed with only as many bytes as asked for, and encoded to the same.
        assert_eq!(header.nb_snapshots, 1);
        let start = header.snapshots_offset.0 as usize;
        let mut have = 0;
        let (entries, len) = loop {
            match snapshot::parse_table(&file[start..start + have], 1, Purpose::ReadWrite).unwrap() {
                ParsedTable::NeedsBytes { at_least } => have = at_least as usize,
                ParsedTable::Complete { entries, len, .. } => break (entries, len as usize),
            }
        };
        assert_eq!((entries[0].id.as_slice(), entries[0].name.as_slice()), (&b"1"[..], &b"before"[..]));
        assert_eq!(entries[0].disk_size(), Some(1 << 20));
        entries[0].check_l1(&g).unwrap();
        assert_eq!(snapshot::encode_table(&entries).unwrap(), file[start..start + len]);
    }
}

#[test]
fn bitmap_directories_are_written_back_byte_for_byte() {
    let Some(scratch) = Scratch::new() else { return };
    scratch.create("", "1G");
    let path = scratch.path("created.qcow2");
    qemu_img(&["bitmap", "--add", "-f", "qcow2"], &[&path], &["first"]);
    qemu_img(&["bitmap", "--add", "-g", "4096", "--disable", "-f", "qcow2"], &[&path], &["the second"]);
    let file = std::fs::read(&path).unwrap();
    assert_header_kept(&file, "bitmaps");
    let (header, _) = Header::parse(&file, Purpose::ReadWrite).unwrap();
    let g = header.geometry();
    let extension = header.bitmaps().unwrap();
    let start = extension.directory_offset.0 as usize;
    let directory = &file[start..start + extension.directory_size as usize];
    let entries = bitmap::parse_directory(directory, extension.bitmap_count).unwrap();
    assert_eq!(bitmap::encode_directory(&entries).unwrap(), directory);
    let found: Vec<_> =
        entries.iter().map(|entry| (entry.name.as_slice(), entry.granularity_bits, entry.flags)).collect();
    assert_eq!(
        found,
        [
            (&b"first"[..], bitmap::default_granularity_bits(&g), bitmap::BitmapFlags::AUTO),
            (&b"the second"[..], 12, bitmap::BitmapFlags::empty()),
        ]
    );
    for entry in &entries {
        entry.validate(&g, header.virtual_size()).unwrap();
        let expected = bitmap::table_entries(header.virtual_size(), entry.granularity_bits, &g);
        assert_eq!(u64::from(entry.table_entries), expected);
        for index in 0..entry.table_entries as usize {
            let table = &file[entry.table_offset.0 as usize..];
            bitmap::BitmapTableEntry::read(table, index).unwrap().decode(&g).unwrap();
        }
    }
    // A header of ours with these bitmaps is the one that QEMU wrote.
    assert!(matches!(header.extensions(), [Extension::FeatureTable(_), Extension::Bitmaps(_)]));
}
