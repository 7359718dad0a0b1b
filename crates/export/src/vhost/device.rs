//! The description of the device: feature bits and configuration space (virtio 1.2, 5.2).

use crate::export::Export;
use zebu_engine::Access;

/// Bytes of a sector, the unit of virtio-blk.
pub(crate) const SECTOR: u64 = 512;
/// The largest queue, and the most descriptors of a request on any queue: a chain is to have no more than its own queue
/// (virtio 1.2, 2.7.5.3.1), but Linux puts as many segments as it is offered into an indirect table.
pub(crate) const MAX_QUEUE: u16 = 1024;
/// Segments of data in one request: what fits a descriptor table, without header and status.
const SEG_MAX: u32 = 126;
/// Ranges in one discard or write-zeroes request.
pub(crate) const MAX_RANGES: u32 = 16;
/// Sectors that one of these may have.
const MAX_RANGE_SECTORS: u32 = 1 << 22;
/// Bytes of a physical block. Logical ones are as large at most.
const PHYSICAL_BLOCK: u32 = 4096;
/// Bytes of the configuration space that have a meaning.
const CONFIG_LEN: usize = 60;

const _: () = assert!(SEG_MAX + 2 <= MAX_QUEUE as u32, "requests as they are offered must be served");

/// Feature bits of virtio and virtio-blk.
pub(crate) mod feature {
    pub(crate) const BLK_SEG_MAX: u64 = 1 << 2;
    pub(crate) const BLK_RO: u64 = 1 << 5;
    pub(crate) const BLK_BLK_SIZE: u64 = 1 << 6;
    pub(crate) const BLK_FLUSH: u64 = 1 << 9;
    pub(crate) const BLK_TOPOLOGY: u64 = 1 << 10;
    pub(crate) const BLK_MQ: u64 = 1 << 12;
    pub(crate) const BLK_DISCARD: u64 = 1 << 13;
    pub(crate) const BLK_WRITE_ZEROES: u64 = 1 << 14;
    pub(crate) const RING_INDIRECT_DESC: u64 = 1 << 28;
    pub(crate) const RING_EVENT_IDX: u64 = 1 << 29;
    pub(crate) const VHOST_PROTOCOL: u64 = 1 << 30;
    pub(crate) const VERSION_1: u64 = 1 << 32;
}

/// The features of a device for `export`.
pub(crate) fn features(export: &Export) -> u64 {
    let common = feature::BLK_SEG_MAX
        | feature::BLK_BLK_SIZE
        | feature::BLK_FLUSH
        | feature::BLK_TOPOLOGY
        | feature::BLK_MQ
        | feature::RING_INDIRECT_DESC
        | feature::RING_EVENT_IDX
        | feature::VHOST_PROTOCOL
        | feature::VERSION_1;
    match export.access() {
        Access::ReadOnly => common | feature::BLK_RO,
        Access::ReadWrite => common | feature::BLK_DISCARD | feature::BLK_WRITE_ZEROES,
    }
}

/// The properties of a disk that its configuration space tells, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    /// The disk, of which whole sectors are shown.
    pub(crate) size: u64,
    pub(crate) cluster: u64,
    pub(crate) logical_block: u32,
}

/// The configuration space of a disk with so many queues.
pub(crate) fn config_space(disk: Geometry, queues: u16) -> [u8; CONFIG_LEN] {
    let Geometry { size, cluster, logical_block } = disk;
    let blocks = (PHYSICAL_BLOCK / logical_block.max(1)).max(1);
    let mut config = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(size / SECTOR).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &logical_block.to_le_bytes());
    put(24, &[blocks.ilog2() as u8]);
    put(26, &(blocks as u16).to_le_bytes());
    put(34, &queues.to_le_bytes());
    put(36, &MAX_RANGE_SECTORS.to_le_bytes());
    put(40, &MAX_RANGES.to_le_bytes());
    put(44, &u32::try_from(cluster / SECTOR).unwrap_or(1).max(1).to_le_bytes());
    put(48, &MAX_RANGE_SECTORS.to_le_bytes());
    put(52, &MAX_RANGES.to_le_bytes());
    put(56, &[1]);
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    // Offsets as in `struct virtio_blk_config` of the specification.
    #[test]
    fn the_configuration_space_has_its_fields_in_place() {
        let disk = Geometry { size: (1 << 30) + 700, cluster: 65536, logical_block: 512 };
        let config = config_space(disk, 4);
        assert_eq!(config[..8], (1u64 << 21 | 1).to_le_bytes());
        assert_eq!(config[8..12], [0; 4], "no limit of a segment's size");
        assert_eq!(config[20..24], 512u32.to_le_bytes());
        assert_eq!(config[24..28], [3, 0, 8, 0], "physical blocks of 4096 bytes");
        assert_eq!(config[34..36], [4, 0]);
        assert_eq!(config[44..48], 128u32.to_le_bytes());
        assert_eq!(config[56], 1);
        for (logical_block, exponent) in [(1024, 2), (2048, 1), (4096, 0)] {
            let config = config_space(Geometry { logical_block, ..disk }, 4);
            assert_eq!(config[20..24], logical_block.to_le_bytes());
            assert_eq!(config[24..28], [exponent, 0, 1 << exponent, 0]);
            assert_eq!(config[44..48], 128u32.to_le_bytes(), "in sectors of 512 bytes");
        }
    }
}
