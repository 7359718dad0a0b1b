//! Changing bytes of an image file, to make what no tool makes. Offsets are those of the qcow2 specification.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Byte offsets in the header.
pub mod header {
    /// Length of the backing file name, 4 bytes.
    pub const BACKING_FILE_SIZE: u64 = 16;
    /// 4 bytes.
    pub const CLUSTER_BITS: u64 = 20;
    /// Virtual size in bytes, 8 bytes.
    pub const SIZE: u64 = 24;
    /// 0 none, 1 AES, 2 LUKS; 4 bytes.
    pub const CRYPT_METHOD: u64 = 32;
    /// Entries, 4 bytes.
    pub const L1_SIZE: u64 = 36;
    /// 8 bytes.
    pub const L1_TABLE_OFFSET: u64 = 40;
    /// 8 bytes.
    pub const REFCOUNT_TABLE_OFFSET: u64 = 48;
    /// 4 bytes.
    pub const REFCOUNT_TABLE_CLUSTERS: u64 = 56;
    /// 4 bytes.
    pub const SNAPSHOT_COUNT: u64 = 60;
    /// 8 bytes.
    pub const SNAPSHOTS_OFFSET: u64 = 64;
    /// 8 bytes.
    pub const INCOMPATIBLE: u64 = 72;
    /// 8 bytes.
    pub const AUTOCLEAR: u64 = 88;
    /// 4 bytes.
    pub const HEADER_LENGTH: u64 = 100;
    /// 1 byte.
    pub const COMPRESSION_TYPE: u64 = 104;
}

/// Incompatible bit 1.
pub const CORRUPT: u64 = 1 << 1;
/// Mask of the offset in an L1 or L2 entry.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63 of an L1 or L2 entry.
pub const COPIED: u64 = 1 << 63;

/// An image file, byte by byte.
#[derive(Debug)]
pub struct Patch {
    file: File,
}

impl Patch {
    /// Opens it.
    ///
    /// # Panics
    /// If that fails; so do all functions here.
    pub fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path);
        Self { file: file.unwrap_or_else(|e| panic!("{}: {e}", path.display())) }
    }

    /// Bytes at an offset; what lies past the end is zero.
    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            match self.file.read_at(&mut bytes[done..], offset + done as u64).expect("readable") {
                0 => break,
                n => done += n,
            }
        }
        bytes
    }

    /// A big-endian number of 4 bytes.
    pub fn u32(&self, offset: u64) -> u32 {
        u32::from_be_bytes(self.bytes(offset, 4).try_into().expect("4 bytes"))
    }

    /// A big-endian number of 8 bytes.
    pub fn u64(&self, offset: u64) -> u64 {
        u64::from_be_bytes(self.bytes(offset, 8).try_into().expect("8 bytes"))
    }

    /// Writes bytes.
    pub fn set(&self, offset: u64, bytes: &[u8]) -> &Self {
        self.file.write_all_at(bytes, offset).expect("writable");
        self
    }

    /// Writes a big-endian number of 4 bytes.
    pub fn set_u32(&self, offset: u64, value: u32) -> &Self {
        self.set(offset, &value.to_be_bytes())
    }

    /// Writes a big-endian number of 8 bytes.
    pub fn set_u64(&self, offset: u64, value: u64) -> &Self {
        self.set(offset, &value.to_be_bytes())
    }

    /// Cuts the file off, or makes it longer by a hole.
    pub fn truncate(&self, len: u64) -> &Self {
        self.file.set_len(len).expect("writable");
        self
    }

    /// The file offset of the L2 table with this index in the active L1 table; 0 if there is none.
    pub fn l2_table(&self, l1_index: u64) -> u64 {
        self.u64(self.u64(header::L1_TABLE_OFFSET) + l1_index * 8) & OFFSET_MASK
    }

    /// The file offset of the entry of a guest cluster in an image without extended L2 entries, whose table exists.
    pub fn l2_entry(&self, guest_cluster: u64) -> u64 {
        let entries = (1u64 << self.u32(header::CLUSTER_BITS)) / 8;
        self.l2_table(guest_cluster / entries) + guest_cluster % entries * 8
    }

    /// The refcount (16 bits wide) of a host cluster.
    pub fn refcount(&self, host_cluster: u64) -> u16 {
        let at = self.refcount_offset(host_cluster);
        u16::from_be_bytes(self.bytes(at, 2).try_into().expect("2 bytes"))
    }

    /// The file offset of the refcount (16 bits wide) of a host cluster, whose block exists.
    pub fn refcount_offset(&self, host_cluster: u64) -> u64 {
        let per_block = (1u64 << self.u32(header::CLUSTER_BITS)) / 2;
        let table = self.u64(header::REFCOUNT_TABLE_OFFSET);
        self.u64(table + host_cluster / per_block * 8) + host_cluster % per_block * 2
    }
}
