//! Headers that are refused: opening and checking say the same of each.

use crate::support::on_worker;
use zebu_engine::check::{CheckOptions, check};
use zebu_engine::{CreateOptions, Error, ErrorKind, Format, Image, OpenOptions};

const EINVAL: i32 = 22;
const ENOTSUP: i32 = 95;

/// The errors of opening and of checking an image with these bytes in its header.
fn refused(patches: &[(usize, Vec<u8>)]) -> [Error; 2] {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    on_worker(async |worker| {
        let new = CreateOptions::default().size(Some(1 << 20)).cluster_size(8192);
        Image::create(worker, &path, &new).await.unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        for (at, patch) in patches {
            bytes[*at..at + patch.len()].copy_from_slice(patch);
        }
        std::fs::write(&path, bytes).unwrap();
        let open = OpenOptions::default().format(Some(Format::Qcow2));
        let opened = Image::open(worker, &path, &open).await.unwrap_err();
        [opened, check(worker, &path, &CheckOptions::default()).await.unwrap_err()]
    })
}

/// The format document forbids the first three ("cluster_bits must not be less than 9", at least 14 with extended L2
/// entries; "refcount_order may not exceed 6"), and allows the others. The errnos are those of QEMU.
#[test]
fn opening_and_checking_agree_on_why_a_header_is_refused() {
    let short = |at, value: u32| (at, value.to_be_bytes().to_vec());
    let features = |bits: u64| (72, bits.to_be_bytes().to_vec());
    let (corrupt, unsupported) = (ErrorKind::Corrupt, ErrorKind::Unsupported);
    let cases = [
        ("clusters of 256 bytes", vec![short(20, 8)], corrupt, EINVAL),
        ("subclusters of 256 bytes", vec![features(1 << 4)], corrupt, EINVAL),
        ("refcounts of 128 bits", vec![short(96, 7)], corrupt, EINVAL),
        ("clusters of 4 MiB", vec![short(20, 22)], unsupported, EINVAL),
        ("another version", vec![short(4, 4)], unsupported, ENOTSUP),
        ("an unknown feature", vec![features(1 << 63)], unsupported, ENOTSUP),
        ("an unknown compression", vec![features(1 << 3), (104, vec![9])], unsupported, ENOTSUP),
        ("an unknown encryption", vec![short(32, 3)], unsupported, EINVAL),
    ];
    for (what, patches, kind, errno) in cases {
        for error in refused(&patches) {
            assert_eq!((error.kind(), error.errno()), (kind, errno), "{what}: {error}");
        }
    }
}
