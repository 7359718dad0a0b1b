//! Each check made when an image is opened, by its number in QEMU's order, on headers built by hand.
//!
//! The texts and error numbers are those that QEMU gives for the same damage; `qemu_verdicts.rs` compares them with
//! a real one. Checks that need I/O (1, 7, 26, 28, 46 in part, 47) are the engine's: here their texts only.
//! 27 is tested beside `open_options`, 46 beside `snapshot`.

use zebu_qcow2::error::OptionError;
use zebu_qcow2::extension::Extension;
use zebu_qcow2::header::{DataFileOption, HeaderChange};
use zebu_qcow2::{
    Autoclear, Compression, Encryption, FormatError, Header, HostOffset, Incompatible, Purpose, Version,
    Warning,
};

const EINVAL: i32 = libc::EINVAL;
const ENOTSUP: i32 = libc::ENOTSUP;
const EFBIG: i32 = libc::EFBIG;

/// A header as the format document lays it out, with room to damage every field.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    /// 1 GiB, version 3, 64 KiB clusters, no extensions.
    fn v3() -> Self {
        let mut raw = Self(vec![0; 65536]);
        raw.u32(0, 0x5146_49fb)
            .u32(4, 3)
            .u32(20, 16)
            .u64(24, 1 << 30)
            .u32(36, 2)
            .u64(40, 0x3_0000)
            .u64(48, 0x1_0000)
            .u32(56, 1)
            .u32(96, 4)
            .u32(100, 112);
        raw
    }

    fn v2() -> Self {
        let mut raw = Self::v3();
        raw.u32(4, 2);
        raw.0[72..112].fill(0);
        raw
    }

    fn u8(&mut self, at: usize, value: u8) -> &mut Self {
        self.bytes(at, &[value])
    }

    fn u32(&mut self, at: usize, value: u32) -> &mut Self {
        self.bytes(at, &value.to_be_bytes())
    }

    fn u64(&mut self, at: usize, value: u64) -> &mut Self {
        self.bytes(at, &value.to_be_bytes())
    }

    fn bytes(&mut self, at: usize, value: &[u8]) -> &mut Self {
        self.0[at..at + value.len()].copy_from_slice(value);
        self
    }

    /// Appends an extension behind the header or the extension before it.
    fn extension(&mut self, at: usize, kind: u32, data: &[u8]) -> &mut Self {
        self.u32(at, kind).u32(at + 4, data.len() as u32).bytes(at + 8, data)
    }

    fn parse(&self, purpose: Purpose) -> Result<(Header, Vec<Warning>), FormatError> {
        Header::parse(&self.0, purpose)
    }

    fn header(&self) -> Header {
        self.parse(Purpose::ReadWrite).unwrap().0
    }
}

/// Damages an intact version 3 header and expects this error, whatever the image is opened for.
#[track_caller]
fn refused(damage: impl Fn(&mut Raw) -> &mut Raw, text: &str, errno: i32) {
    refused_for(
        &[Purpose::ReadOnly, Purpose::ReadWrite, Purpose::Check, Purpose::Inspect],
        damage,
        text,
        errno,
    );
}

/// The same, but the error is for these purposes only.
#[track_caller]
fn refused_for(purposes: &[Purpose], damage: impl Fn(&mut Raw) -> &mut Raw, text: &str, errno: i32) {
    let mut raw = Raw::v3();
    damage(&mut raw);
    for purpose in [Purpose::ReadOnly, Purpose::ReadWrite, Purpose::Check, Purpose::Inspect] {
        match (raw.parse(purpose), purposes.contains(&purpose)) {
            (Err(error), true) => {
                assert_eq!(error.to_string(), text, "{purpose:?}");
                assert_eq!(error.errno(), errno, "{purpose:?}");
            }
            (Ok(_), false) => {}
            (Ok(_), true) => panic!("{purpose:?}: accepted, expected: {text}"),
            (Err(error), false) => panic!("{purpose:?}: refused: {error}"),
        }
    }
}

const ALL_BUT_CHECK: &[Purpose] = &[Purpose::ReadOnly, Purpose::ReadWrite, Purpose::Inspect];

#[test]
fn intact_headers_are_read() {
    let header = Raw::v3().header();
    assert_eq!((header.version(), header.geometry().cluster_size()), (Version::V3, 65536));
    assert_eq!((header.virtual_size(), header.l1_size), (1 << 30, 2));
    assert_eq!(header.l1_table_offset, HostOffset(0x3_0000));
    assert_eq!(header.refcount_table_offset, HostOffset(0x1_0000));
    assert_eq!((header.refcount_table_clusters, header.geometry().refcount_bits()), (1, 16));
    let header = Raw::v2().header();
    assert_eq!((header.version(), header.header_length()), (Version::V2, 72));
    assert_eq!(header.geometry().refcount_bits(), 16);
}

#[test]
fn check_01_header_unreadable() {
    assert_eq!(FormatError::HeaderUnreadable.to_string(), "Could not read qcow2 header");
}

#[test]
fn check_02_magic() {
    refused(|raw| raw.u8(3, 0xfa), "Image is not in qcow2 format", EINVAL);
    for short in [0, 1, 3] {
        assert_eq!(
            Header::parse(&Raw::v3().0[..short], Purpose::ReadOnly).unwrap_err(),
            FormatError::NotQcow2
        );
    }
}

#[test]
fn check_03_version() {
    for version in [0, 1, 4, u32::MAX] {
        let text = format!("Unsupported qcow2 version {version}");
        refused(|raw| raw.u32(4, version), &text, ENOTSUP);
    }
}

#[test]
fn check_04_cluster_size() {
    for bits in [0, 8, 22, 64, u32::MAX] {
        let text = format!("Unsupported cluster size: 2^{bits}");
        refused(|raw| raw.u32(20, bits), &text, EINVAL);
    }
}

#[test]
fn check_05_header_too_short() {
    for length in [0, 72, 103] {
        refused(|raw| raw.u32(100, length), "qcow2 header too short", EINVAL);
    }
}

#[test]
fn check_06_header_exceeds_cluster() {
    for length in [65537, u32::MAX] {
        refused(|raw| raw.u32(100, length), "qcow2 header exceeds cluster size", EINVAL);
    }
    let mut raw = Raw::v3();
    assert!(raw.u32(100, 65536).parse(Purpose::ReadWrite).is_ok());
}

#[test]
fn check_07_unknown_fields_unreadable() {
    assert_eq!(
        FormatError::UnknownFieldsUnreadable.to_string(),
        "Could not read unknown qcow2 header fields"
    );
    // Where the file ends before them, they are zeroes.
    let mut raw = Raw::v3();
    raw.u32(100, 200);
    let (header, _) = Header::parse(&raw.0[..112], Purpose::ReadOnly).unwrap();
    assert_eq!(header.unknown_fields(), [0; 88]);
}

#[test]
fn check_08_backing_offset() {
    for offset in [65537, 1 << 32, u64::MAX] {
        refused(|raw| raw.u64(8, offset), "Invalid backing file offset", EINVAL);
    }
}

#[test]
fn check_09_compression_type() {
    for code in [2, 255] {
        let text = format!("qcow2: unknown compression type: {code}");
        refused(|raw| raw.u8(104, code).u64(72, 8), &text, ENOTSUP);
    }
    // A header of 104 bytes has no such field: the byte belongs to the extensions.
    let mut raw = Raw::v3();
    raw.u32(100, 104).extension(104, 0xff00_0001, &[]);
    assert_eq!(raw.header().compression(), Compression::Zlib);
}

#[test]
fn check_10_compression_bit_set() {
    refused(|raw| raw.u64(72, 8), "qcow2: Compression type incompatible feature bit must not be set", EINVAL);
}

#[test]
fn check_11_compression_bit_clear() {
    refused(|raw| raw.u8(104, 1), "qcow2: Compression type incompatible feature bit must be set", EINVAL);
    let mut raw = Raw::v3();
    assert_eq!(raw.u8(104, 1).u64(72, 8).header().compression(), Compression::Zstd);
}

#[test]
fn check_12_unknown_incompatible_features() {
    refused(
        |raw| raw.u64(72, 1 << 63 | 1 << 5),
        "Unsupported qcow2 feature(s): Unknown incompatible feature: 8000000000000020",
        ENOTSUP,
    );
    // Names come from the table; bits of other sets, known bits and bits past 63 do not.
    refused(
        |raw| {
            let mut table = vec![0; 48 * 6];
            let rows: [(u8, u8, &[u8]); 5] =
                [(0, 7, b"seven"), (1, 5, b"no"), (0, 0, b"dirty"), (0, 200, b"far"), (0, 6, b"six")];
            for (row, (set, bit, name)) in rows.iter().enumerate() {
                table[row * 48..row * 48 + 2].copy_from_slice(&[*set, *bit]);
                table[row * 48 + 2..row * 48 + 2 + name.len()].copy_from_slice(name);
            }
            raw.u64(72, 0xe1).extension(112, 0x6803_f857, &table)
        },
        "Unsupported qcow2 feature(s): seven, six, Unknown incompatible feature: 20",
        ENOTSUP,
    );
}

#[test]
fn check_13_corrupt() {
    refused_for(
        &[Purpose::ReadWrite],
        |raw| raw.u64(72, 2),
        "qcow2: Image is corrupt; cannot be opened read/write",
        libc::EACCES,
    );
}

#[test]
fn check_14_subcluster_size() {
    for (bits, size) in [(9, 16), (13, 256)] {
        let text = format!("Unsupported subcluster size: {size}");
        refused(|raw| raw.u32(20, bits).u64(72, 16), &text, EINVAL);
    }
}

#[test]
fn check_15_refcount_width() {
    for order in [7, u32::MAX] {
        refused(
            |raw| raw.u32(96, order),
            "Reference count entry width too large; may not exceed 64 bits",
            EINVAL,
        );
    }
}

/// QEMU's tools open AES images; here they are opened, described, and refused where guest data is needed.
#[test]
fn check_16_aes() {
    let mut raw = Raw::v3();
    let header = raw.u32(32, 1).header();
    assert_eq!(header.encryption, Encryption::Aes);
    let error = header.check_not_encrypted().unwrap_err();
    assert_eq!((error.to_string().contains("AES"), error.errno()), (true, libc::ENOSYS));
}

#[test]
fn check_17_no_reftable() {
    refused_for(
        ALL_BUT_CHECK,
        |raw| raw.u32(56, 0),
        "Image does not contain a reference count table",
        EINVAL,
    );
}

#[test]
fn check_18_reftable_too_large() {
    for clusters in [129, u32::MAX] {
        refused(|raw| raw.u32(56, clusters), "Reference count table too large", EFBIG);
    }
    let mut raw = Raw::v3();
    assert!(raw.u32(56, 128).parse(Purpose::ReadWrite).is_ok());
}

#[test]
fn check_19_reftable_offset() {
    for offset in [1, 0x1_0200, (1 << 63) - 0x1_0000, !0xffff] {
        refused(|raw| raw.u64(48, offset), "Reference count table offset invalid", EINVAL);
    }
}

#[test]
fn check_20_too_many_snapshots() {
    for count in [65537, u32::MAX] {
        refused_for(ALL_BUT_CHECK, |raw| raw.u32(60, count), "Snapshot table too large", EFBIG);
    }
    let mut raw = Raw::v3();
    assert!(raw.u32(60, 65536).parse(Purpose::ReadWrite).is_ok());
}

#[test]
fn check_21_snapshot_table_offset() {
    for offset in [8, 1 << 63] {
        refused_for(ALL_BUT_CHECK, |raw| raw.u64(64, offset), "Snapshot table offset invalid", EINVAL);
    }
}

#[test]
fn check_22_l1_too_large() {
    for entries in [(4 << 20) + 1, u32::MAX] {
        refused(|raw| raw.u32(36, entries), "Active L1 table too large", EFBIG);
    }
    let mut raw = Raw::v3();
    assert!(raw.u32(36, 4 << 20).parse(Purpose::ReadWrite).is_ok());
}

#[test]
fn check_23_l1_offset() {
    for offset in [8, 0x3_8000, 1 << 63, !0xffff] {
        refused(|raw| raw.u64(40, offset), "Active L1 table offset invalid", EINVAL);
    }
}

#[test]
fn check_24_too_big() {
    refused(|raw| raw.u32(20, 9).u64(24, (1 << 31) * 32768), "Image is too big", EFBIG);
}

#[test]
fn check_25_l1_too_small() {
    refused(|raw| raw.u64(24, (1 << 30) + 1), "L1 table is too small", EINVAL);
    refused(|raw| raw.u32(36, 0), "L1 table is too small", EINVAL);
    let mut raw = Raw::v3();
    assert!(raw.u32(36, 0).u64(24, 0).parse(Purpose::ReadWrite).is_ok());
}

#[test]
fn check_26_l1_table() {
    assert_eq!(FormatError::L1Allocation.to_string(), "Could not allocate L1 table");
    assert_eq!(FormatError::L1Unreadable.to_string(), "Could not read L1 table");
}

#[test]
fn check_27_options_keep_their_text() {
    let inner = OptionError::L2CacheExceedsTotal;
    assert_eq!(FormatError::from(inner.clone()).to_string(), inner.to_string());
    assert_eq!(FormatError::from(inner).errno(), EINVAL);
}

#[test]
fn check_28_refcount_table() {
    assert_eq!(FormatError::RefcountInit.to_string(), "Could not initialize refcount handling");
}

#[test]
fn check_29_extension_too_large() {
    for len in [65536 - 112 - 7, 65536, u32::MAX] {
        refused(|raw| raw.u32(112, 0x1234).u32(116, len), "Header extension too large", EINVAL);
        // The end marker is no exception.
        refused(|raw| raw.u32(116, len), "Header extension too large", EINVAL);
    }
    // The backing file name ends the area.
    refused(
        |raw| raw.u64(8, 128).u32(16, 1).u32(112, 0x1234).u32(116, 9),
        "Header extension too large",
        EINVAL,
    );
    let mut raw = Raw::v3();
    raw.u32(112, 0x1234).u32(116, 65536 - 112 - 8);
    assert!(raw.parse(Purpose::ReadWrite).is_ok());
}

#[test]
fn check_30_backing_format() {
    refused(
        |raw| raw.extension(112, 0xe279_2aca, &[b'x'; 16]),
        "ERROR: ext_backing_format: len=16 too large (>=16)",
        EINVAL,
    );
    let mut raw = Raw::v3();
    raw.extension(112, 0xe279_2aca, b"qcow2");
    assert_eq!(raw.header().backing_format(), Some(&b"qcow2"[..]));
}

fn luks_pointer(offset: u64, len: u64) -> Vec<u8> {
    [offset.to_be_bytes(), len.to_be_bytes()].concat()
}

#[test]
fn check_31_luks_pointer_without_luks() {
    for method in [0, 1] {
        refused(
            |raw| raw.u32(32, method).extension(112, 0x0537_be77, &luks_pointer(0x4_0000, 4096)),
            "CRYPTO header extension only expected with LUKS encryption method",
            EINVAL,
        );
    }
}

#[test]
fn check_32_luks_pointer_length() {
    for len in [0, 15, 17] {
        let text = format!("CRYPTO header extension size {len}, but expected size 16");
        refused(|raw| raw.u32(32, 2).extension(112, 0x0537_be77, &vec![0; len]), &text, EINVAL);
    }
}

#[test]
fn check_33_luks_offset() {
    refused(
        |raw| raw.u32(32, 2).extension(112, 0x0537_be77, &luks_pointer(0x4_0200, 4096)),
        "Encryption header offset '262656' is not a multiple of cluster size '65536'",
        EINVAL,
    );
    let mut raw = Raw::v3();
    raw.u32(32, 2).extension(112, 0x0537_be77, &luks_pointer(0x4_0000, 4096));
    let header = raw.header();
    assert_eq!(header.luks().map(|luks| (luks.offset, luks.len)), Some((HostOffset(0x4_0000), 4096)));
    let error = header.check_not_encrypted().unwrap_err();
    assert!(error.to_string().contains("LUKS"));
}

fn bitmaps(count: u32, reserved: u32, size: u64, offset: u64) -> Vec<u8> {
    let words = [count.to_be_bytes(), reserved.to_be_bytes()].concat();
    [words, size.to_be_bytes().to_vec(), offset.to_be_bytes().to_vec()].concat()
}

#[track_caller]
fn bitmaps_refused(data: &[u8], text: &str) {
    refused(|raw| raw.u64(88, 1).extension(112, 0x2385_2875, data), text, EINVAL);
}

#[test]
fn check_34_bitmaps_length() {
    for len in [0, 23, 25] {
        bitmaps_refused(&vec![0; len], "bitmaps_ext: Invalid extension length");
    }
    // Also where the bitmaps are not valid anyway.
    refused(|raw| raw.extension(112, 0x2385_2875, &[0; 23]), "bitmaps_ext: Invalid extension length", EINVAL);
}

#[test]
fn check_35_stale_bitmaps_are_a_warning() {
    let stale = bitmaps(0, 1, u64::MAX, 1);
    let mut raw = Raw::v3();
    raw.extension(112, 0x2385_2875, &stale);
    let (mut header, warnings) = raw.parse(Purpose::ReadWrite).unwrap();
    assert_eq!(warnings, [Warning::BitmapsInconsistent { version: Version::V3 }]);
    assert_eq!(
        warnings[0].to_string(),
        "a program lacking bitmap support modified this file, so all bitmaps are now considered inconsistent"
    );
    assert_eq!(header.bitmaps(), None);
    assert_eq!(header.extensions(), [Extension::StaleBitmaps(stale.clone())]);
    // Kept while the image is only read, gone before the first write.
    assert_eq!(header.encode().unwrap(), raw.0[..512]);
    assert_eq!(header.clear_for_writing(), HeaderChange::MustBeWritten);
    assert_eq!(header.extensions(), []);
    assert_eq!(header.clear_for_writing(), HeaderChange::Unchanged);

    let mut raw = Raw::v2();
    raw.extension(72, 0x2385_2875, &stale);
    let (_, warnings) = raw.parse(Purpose::ReadOnly).unwrap();
    assert_eq!(warnings, [Warning::BitmapsInconsistent { version: Version::V2 }]);
    assert_eq!(
        warnings[0].to_string(),
        "This qcow2 v2 image contains bitmaps, but they may have been modified by a program without persistent \
         bitmap support; so now they must all be considered inconsistent"
    );
}

#[test]
fn check_36_bitmaps_reserved() {
    bitmaps_refused(&bitmaps(1, 1, 32, 0x4_0000), "bitmaps_ext: Reserved field is not zero");
}

#[test]
fn check_37_too_many_bitmaps() {
    bitmaps_refused(
        &bitmaps(65536, 0, 32, 0x4_0000),
        "bitmaps_ext: Image has 65536 bitmaps, exceeding the QEMU supported maximum of 65535",
    );
}

#[test]
fn check_38_no_bitmaps() {
    bitmaps_refused(&bitmaps(0, 0, 32, 0x4_0000), "found bitmaps extension with zero bitmaps");
}

#[test]
fn check_39_bitmap_directory_offset() {
    bitmaps_refused(&bitmaps(1, 0, 32, 0x4_0008), "bitmaps_ext: invalid bitmap directory offset");
}

#[test]
fn check_40_bitmap_directory_size() {
    bitmaps_refused(
        &bitmaps(1, 0, 67_107_841, 0x4_0000),
        "bitmaps_ext: bitmap directory size (67107841) exceeds the maximum supported size (67107840)",
    );
    let mut raw = Raw::v3();
    raw.u64(88, 1).extension(112, 0x2385_2875, &bitmaps(65535, 0, 67_107_840, 0x4_0000));
    let found = raw.header().bitmaps().unwrap();
    assert_eq!((found.bitmap_count, found.directory_size), (65535, 67_107_840));
}

#[test]
fn check_41_data_file() {
    let mut raw = Raw::v3();
    let header = raw.u64(72, 4).header();
    let error = header.check_data_file(DataFileOption::NotGiven).unwrap_err();
    assert_eq!(
        (error.to_string().as_str(), error.errno()),
        ("'data-file' is required for this image", EINVAL)
    );
    assert_eq!(header.check_data_file(DataFileOption::Given), Ok(()));

    raw.extension(112, 0x4441_5441, b"disk.raw");
    let header = raw.header();
    assert_eq!(header.data_file_name(), Some(&b"disk.raw"[..]));
    assert_eq!(header.check_data_file(DataFileOption::NotGiven), Ok(()));

    let error = Raw::v3().header().check_data_file(DataFileOption::Given).unwrap_err();
    assert_eq!(error.to_string(), "'data-file' can only be set for images with an external data file");
}

#[test]
fn check_42_raw_without_data_file() {
    refused_for(
        &[Purpose::ReadOnly, Purpose::ReadWrite, Purpose::Check],
        |raw| raw.u64(88, 2),
        "data-file-raw requires a data file",
        EINVAL,
    );
}

#[test]
fn check_43_luks_pointer_missing() {
    refused(|raw| raw.u32(32, 2), "Missing CRYPTO header for crypt method 2", EINVAL);
}

#[test]
fn check_44_encryption_method() {
    refused(|raw| raw.u32(32, 3), "Unsupported encryption method 3", EINVAL);
}

#[test]
fn check_45_backing_name() {
    refused(|raw| raw.u64(8, 1024).u32(16, 1024), "Backing file name too long", EINVAL);
    refused(|raw| raw.u64(8, 65000).u32(16, 537), "Backing file name too long", EINVAL);
    let mut raw = Raw::v3();
    raw.u64(8, 65000).u32(16, 536).bytes(65000, &[b'n'; 536]);
    assert_eq!(raw.header().backing_file(), Some(&[b'n'; 536][..]));
    assert_eq!(FormatError::BackingNameUnreadable.to_string(), "Could not read backing file name");
}

#[test]
fn check_46_snapshot_table() {
    assert_eq!(FormatError::SnapshotTableUnreadable.to_string(), "Failed to read snapshot table");
    assert_eq!(FormatError::SnapshotTableTooBig.errno(), EFBIG);
}

#[test]
fn check_47_dirty() {
    let mut raw = Raw::v3();
    let header = raw.u64(72, 1).header();
    assert_eq!(header.incompatible(), Incompatible::DIRTY);
    assert_eq!(FormatError::DirtyImage.to_string(), "Could not repair dirty image");
    assert_eq!(FormatError::DirtyImage.errno(), libc::EIO);
}

/// Conditions that look like damage, and that QEMU lets pass.
#[test]
fn what_is_not_an_error() {
    let mut raw = Raw::v3();
    let mut header = raw.u64(88, 1 | 1 << 40).u64(80, 1 << 40).u32(100, 106).header();
    assert_eq!(header.autoclear.bits(), 1 | 1 << 40);
    assert_eq!(header.header_length(), 106);
    // Unknown autoclear bits go before the first write; the others stay.
    assert_eq!(header.clear_for_writing(), HeaderChange::MustBeWritten);
    assert_eq!((header.autoclear, header.compatible.bits()), (Autoclear::BITMAPS, 1 << 40));
}
