//! Limits on what an image may ask for.

/// Bytes of a virtual disk: what a signed 64-bit offset can address, in whole sectors.
pub const MAX_DISK: u64 = i64::MAX as u64 / 512 * 512;
/// Bytes of a unit that is compressed as a whole (QEMU allows four times as many).
pub const MAX_PACKED_UNIT: u64 = 16 << 20;
/// Bytes of a text that describes a VMDK (QEMU reads at most so many).
pub const MAX_DESCRIPTOR: u64 = 20 << 20;
/// Files that a VMDK descriptor may name.
pub const MAX_EXTENT_FILES: usize = 4096;
/// Extents of a VMDK descriptor.
pub const MAX_EXTENTS: usize = 1 << 16;
/// Bytes of the name of an extent file: more than Linux takes.
pub const MAX_PATH: usize = 4096;
/// Bytes of the property list of a DMG.
pub const MAX_PROPERTY_LIST: u64 = 16 << 20;
/// Bytes of the log of a VHDX that is replayed in memory.
pub const MAX_LOG: u64 = 64 << 20;
/// Bytes of the name of a parent.
pub const MAX_NAME: u64 = 1023;
/// Table entries that are looked at for the length of one run.
pub(crate) const ENTRIES_AT_ONCE: u64 = 1024;
