//! The smallest images of each format, put together from the documents of the formats, with the disk that each holds.
#![allow(dead_code, unreachable_pub, reason = "test programs of two crates use a part each")]

use std::sync::LazyLock;

pub mod cases;
mod crc32c;
pub mod hyper_v;
pub mod packed;
pub mod vmware;

pub use hyper_v::{vhd_differencing, vhd_dynamic, vhd_fixed, vhdx, vhdx_differencing, vhdx_with_log};
pub use packed::{cloop, dmg, qcow1_packed};
pub use vmware::{cowd, cowd_alone, flat, se_sparse, sparse, stream_optimized};

/// An image, and the disk that it holds.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The format's name, as QEMU gives it.
    pub format: &'static str,
    /// The name and the bytes of each file; the first is the image file.
    pub files: Vec<(&'static str, Vec<u8>)>,
    /// The disk; what the image leaves to a parent is zero.
    pub disk: Vec<u8>,
}

impl Sample {
    /// An image in one file.
    pub fn one(format: &'static str, bytes: Vec<u8>, disk: Vec<u8>) -> Self {
        Self { format, files: vec![("image", bytes)], disk }
    }

    /// The bytes of the file that has the header: of a disk with an extent of ESX 3, that extent.
    pub fn header(&mut self) -> &mut Vec<u8> {
        let at = self.files.iter().position(|(_, bytes)| bytes.starts_with(b"COWD")).unwrap_or(0);
        &mut self.files[at].1
    }

    /// The bytes of the image file.
    pub fn image(&mut self) -> &mut Vec<u8> {
        &mut self.files[0].1
    }
}

/// Every sample that needs no parent.
pub fn all() -> &'static [(&'static str, Sample)] {
    static ALL: LazyLock<Vec<(&str, Sample)>> = LazyLock::new(make_all);
    &ALL
}

fn make_all() -> Vec<(&'static str, Sample)> {
    vec![
        ("vdi", vdi()),
        ("vhd-fixed", vhd_fixed()),
        ("vhd-dynamic", vhd_dynamic()),
        ("vhdx", vhdx()),
        ("vhdx-with-log", vhdx_with_log()),
        ("vmdk-sparse", sparse()),
        ("vmdk-stream", stream_optimized()),
        ("vmdk-flat", flat()),
        ("vmdk-cowd", cowd()),
        ("vmdk-sesparse", se_sparse()),
        ("qed", qed()),
        ("parallels", parallels()),
        ("qcow", qcow1_packed()),
        ("cloop", cloop()),
        ("dmg", dmg()),
    ]
}

/// Overwrites bytes; the vector grows as needed.
pub fn put(bytes: &mut Vec<u8>, at: usize, value: &[u8]) {
    if bytes.len() < at + value.len() {
        bytes.resize(at + value.len(), 0);
    }
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Bytes that differ from each other and from those of another seed.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| ((i / 512) as u8).wrapping_mul(7) ^ (i as u8) ^ seed | 1).collect()
}

/// A dynamic VDI: blocks of 1 MiB, of which the first two lie in the other order, and the third was discarded.
pub fn vdi() -> Sample {
    let mut image = Vec::new();
    let field = |image: &mut Vec<u8>, at, value: u32| put(image, at, &value.to_le_bytes());
    put(&mut image, 0, b"<<< Oracle VM VirtualBox Disk Image >>>\n");
    for (at, value) in [
        (0x40, 0xbeda_107f),
        (0x44, 0x0001_0001),
        (0x48, 0x190),
        (0x4c, 1),
        (0x154, 512),
        (0x158, 1024),
        (0x168, 512),
        (0x178, 1 << 20),
        (0x180, 4),
        (0x184, 2),
    ] {
        field(&mut image, at, value);
    }
    let size = (3 << 20) + 512;
    put(&mut image, 0x170, &(size as u64).to_le_bytes());
    for (index, entry) in [1, 0, 0xffff_fffe, 0xffff_ffff].into_iter().enumerate() {
        field(&mut image, 512 + 4 * index, entry);
    }
    let (first, second) = (pattern(1 << 20, 1), pattern(1 << 20, 2));
    put(&mut image, 1024, &second);
    put(&mut image, 1024 + (1 << 20), &first);
    let mut disk = [first, second].concat();
    disk.resize(size, 0);
    Sample::one("vdi", image, disk)
}

/// A QED image: clusters of 4 KiB, tables of one; one cluster of data, one of zeroes.
pub fn qed() -> Sample {
    let mut image = b"QED\0".to_vec();
    for (at, value) in [(4, 4096u32), (8, 1), (12, 1)] {
        put(&mut image, at, &value.to_le_bytes());
    }
    for (at, value) in [(40, 4096u64), (48, 65536), (4096, 8192), (8192 + 8, 12288), (8192 + 16, 1)] {
        put(&mut image, at, &value.to_le_bytes());
    }
    let data = pattern(4096, 3);
    put(&mut image, 12288, &data);
    let mut disk = vec![0; 65536];
    disk[4096..8192].copy_from_slice(&data);
    Sample::one("qed", image, disk)
}

/// A Parallels image: blocks of 63 sectors, whose table counts sectors.
pub fn parallels() -> Sample {
    let mut image = b"WithoutFreeSpace".to_vec();
    for (at, value) in [(16, 2u32), (20, 16), (24, 1), (28, 63), (32, 3), (36, 130), (48, 1)] {
        put(&mut image, at, &value.to_le_bytes());
    }
    let block = 63 * 512;
    for (index, entry) in [0u32, 64, 1].into_iter().enumerate() {
        put(&mut image, 64 + 4 * index, &entry.to_le_bytes());
    }
    let (second, third) = (pattern(block, 4), pattern(block, 5));
    put(&mut image, 512, &third);
    put(&mut image, 64 * 512, &second);
    let mut disk = vec![0; 130 * 512];
    disk[block..2 * block].copy_from_slice(&second);
    disk[2 * block..].copy_from_slice(&third[..4 * 512]);
    Sample::one("parallels", image, disk)
}
