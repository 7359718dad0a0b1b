//! The interface of the kernel's driver ublk (<linux/ublk_cmd.h>), as numbers and bytes.

/// Bytes of a sector, the unit of offsets and sizes.
pub(super) const SECTOR: u64 = 512;
/// Bytes of a control command.
pub(super) const COMMAND: usize = 80;
/// Bytes of what a device is described by.
pub(super) const INFO: usize = 64;
/// Bytes of the parameters that are read, at most.
pub(super) const PARAMETERS: usize = 128;
/// Bytes of the parameters that are set: those of all disks, and of discards.
const SET: usize = 60;
/// Bytes of a request's description.
pub(super) const DESCRIPTION: usize = 24;
/// The largest queue, by which the descriptions of the queues are apart.
const MAX_DEPTH: u64 = 4096;

/// Sectors of one discard or write-zeroes request.
const MAX_RANGE: u32 = 1 << 22;
/// Bytes of a physical block. Logical ones are as large at most.
const PHYSICAL_BLOCK: u32 = 4096;

/// Numbers of commands, as `ioctl` encodes them: direction, bytes of the command, type, number.
const fn code(direction: u32, bytes: u32, number: u32) -> u32 {
    direction << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// Control commands, to `/dev/ublk-control`.
pub(super) mod control {
    use super::{READ, READ_WRITE, code};

    /// Bytes of the structure that the codes name.
    const BYTES: u32 = 32;

    pub(crate) const GET_DEV_INFO: u32 = code(READ, BYTES, 0x02);
    pub(crate) const ADD_DEV: u32 = code(READ_WRITE, BYTES, 0x04);
    pub(crate) const DEL_DEV: u32 = code(READ_WRITE, BYTES, 0x05);
    pub(crate) const START_DEV: u32 = code(READ_WRITE, BYTES, 0x06);
    pub(crate) const STOP_DEV: u32 = code(READ_WRITE, BYTES, 0x07);
    pub(crate) const SET_PARAMS: u32 = code(READ_WRITE, BYTES, 0x08);
    pub(crate) const GET_PARAMS: u32 = code(READ, BYTES, 0x09);
    pub(crate) const START_USER_RECOVERY: u32 = code(READ_WRITE, BYTES, 0x10);
    pub(crate) const END_USER_RECOVERY: u32 = code(READ_WRITE, BYTES, 0x11);
    pub(crate) const GET_FEATURES: u32 = code(READ, BYTES, 0x13);
    pub(crate) const DEL_DEV_ASYNC: u32 = code(READ, BYTES, 0x14);
    pub(crate) const UPDATE_SIZE: u32 = code(READ_WRITE, BYTES, 0x15);
}

/// Commands about requests, to `/dev/ublkcN`.
pub(super) mod io {
    use super::{READ_WRITE, code};

    const BYTES: u32 = 16;

    /// Takes a request, the first one of its tag.
    pub(crate) const FETCH: u32 = code(READ_WRITE, BYTES, 0x20);
    /// Ends the request of a tag, and takes the next one.
    pub(crate) const COMMIT_AND_FETCH: u32 = code(READ_WRITE, BYTES, 0x21);
}

/// Properties of a device, and of the driver.
pub(super) mod feature {
    pub(crate) const USER_RECOVERY: u64 = 1 << 3;
    pub(crate) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    pub(crate) const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    pub(crate) const UPDATE_SIZE: u64 = 1 << 10;
}

/// A control command. The kernel reads or writes `buffer` until it ends.
pub(super) struct ControlCommand<'a> {
    pub(super) device: u32,
    pub(super) buffer: &'a mut [u8],
    pub(super) data: u64,
}

impl ControlCommand<'_> {
    /// The bytes that the kernel takes.
    pub(super) fn encode(&mut self) -> [u8; COMMAND] {
        let mut bytes = [0; COMMAND];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.device.to_ne_bytes());
        // It is for no queue.
        put(4, &u16::MAX.to_ne_bytes());
        put(6, &(self.buffer.len() as u16).to_ne_bytes());
        let address = if self.buffer.is_empty() { 0 } else { self.buffer.as_mut_ptr() as u64 };
        put(8, &address.to_ne_bytes());
        put(16, &self.data.to_ne_bytes());
        bytes
    }
}

/// The part of a command about a request before its buffer's address: queue, tag, and the result of the request before.
pub(super) fn io_head(queue: u16, tag: u16, result: i32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..2].copy_from_slice(&queue.to_ne_bytes());
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..].copy_from_slice(&result.to_ne_bytes());
    bytes
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |field| u16::from_ne_bytes([field[0], field[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// The state of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceState {
    /// Nobody can use it: it was not started, or was stopped.
    Stopped,
    /// It is served.
    Served,
    /// Its server is gone, and its requests wait for the next one.
    Waiting,
    /// Its server is gone, and its requests fail.
    Failing,
}

/// The driver's knowledge of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Info {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: DeviceState,
    /// Bytes of the buffer of a request.
    pub(super) buffer: u32,
    pub(super) id: u32,
    /// The process that serves it, or served it last.
    pub(super) server: i32,
    pub(super) flags: u64,
    /// Kept for servers: which image it is of, 0 where that can't be told.
    pub(super) image: u64,
}

impl Info {
    pub(super) fn encode(&self) -> [u8; INFO] {
        let mut bytes = [0; INFO];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.queues.to_ne_bytes());
        put(2, &self.depth.to_ne_bytes());
        put(8, &self.buffer.to_ne_bytes());
        put(12, &self.id.to_ne_bytes());
        put(16, &self.server.to_ne_bytes());
        put(24, &self.flags.to_ne_bytes());
        put(32, &self.image.to_ne_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; INFO]) -> Self {
        Self {
            queues: u16_at(bytes, 0),
            depth: u16_at(bytes, 2),
            state: match u16_at(bytes, 4) {
                0 => DeviceState::Stopped,
                1 => DeviceState::Served,
                2 => DeviceState::Waiting,
                _ => DeviceState::Failing,
            },
            buffer: u32_at(bytes, 8),
            id: u32_at(bytes, 12),
            server: u32_at(bytes, 16) as i32,
            flags: u64_at(bytes, 24),
            image: u64_at(bytes, 32),
        }
    }
}

/// The properties of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Disk {
    pub(super) sectors: u64,
    pub(super) is_read_only: bool,
    pub(super) logical_block: u32,
    pub(super) cluster: u64,
    /// Bytes of the largest request.
    pub(super) buffer: u32,
}

/// Bits of the attributes of a disk.
const READ_ONLY: u32 = 1 << 0;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA: u32 = 1 << 3;
/// Kinds of parameters.
const BASIC: u32 = 1 << 0;
const DISCARD: u32 = 1 << 1;

impl Disk {
    /// The parameters, as the driver takes them.
    pub(super) fn encode(&self) -> [u8; SET] {
        let mut bytes = [0; SET];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        let (types, attributes) =
            if self.is_read_only { (BASIC, READ_ONLY) } else { (BASIC | DISCARD, VOLATILE_CACHE | FUA) };
        put(0, &(SET as u32).to_ne_bytes());
        put(4, &types.to_ne_bytes());
        put(8, &attributes.to_ne_bytes());
        let (logical, physical) = (self.logical_block.ilog2() as u8, PHYSICAL_BLOCK.ilog2() as u8);
        put(12, &[logical, physical, physical, physical]);
        put(16, &(self.buffer / SECTOR as u32).to_ne_bytes());
        put(24, &self.sectors.to_ne_bytes());
        if !self.is_read_only {
            let granularity = u32::try_from(self.cluster).unwrap_or(PHYSICAL_BLOCK).max(PHYSICAL_BLOCK);
            put(44, &granularity.to_ne_bytes());
            put(48, &MAX_RANGE.to_ne_bytes());
            put(52, &MAX_RANGE.to_ne_bytes());
            put(56, &1u16.to_ne_bytes());
        }
        bytes
    }
}

/// Sectors of a device, and whether it is read-only, by its parameters.
pub(super) fn size_of(parameters: &[u8; PARAMETERS]) -> (u64, bool) {
    (u64_at(parameters, 24), u32_at(parameters, 8) & READ_ONLY != 0)
}

/// Asks for parameters in so many bytes.
pub(super) fn asked() -> [u8; PARAMETERS] {
    let mut bytes = [0; PARAMETERS];
    bytes[..4].copy_from_slice(&(PARAMETERS as u32).to_ne_bytes());
    bytes
}

/// The work of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    Read,
    Write,
    Flush,
    Discard,
    /// The space is given back, or stays allocated.
    WriteZeroes {
        unmap: bool,
    },
    Unknown,
}

/// A request. Offset and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) ask: Ask,
    pub(super) is_durable: bool,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Request {
    /// Reads the description of a request: its kind with flags, sectors, the first sector.
    pub(super) fn decode(kind: u32, sectors: u32, first: u64) -> Self {
        const IS_DURABLE: u32 = 1 << 13;
        const KEEPS_SPACE: u32 = 1 << 15;
        let ask = match kind & 0xff {
            0 => Ask::Read,
            1 => Ask::Write,
            2 => Ask::Flush,
            3 => Ask::Discard,
            5 => Ask::WriteZeroes { unmap: kind & KEEPS_SPACE == 0 },
            _ => Ask::Unknown,
        };
        // A disk has fewer sectors than would overflow.
        let (offset, len) = (first.saturating_mul(SECTOR), u64::from(sectors) * SECTOR);
        Self { ask, is_durable: kind & IS_DURABLE != 0, offset, len }
    }
}

/// Where the descriptions of a queue's requests are in `/dev/ublkcN`, and their bytes, in whole pages.
pub(super) fn descriptions(queue: u16, depth: u16, page: usize) -> (u64, usize) {
    let page_up = |bytes: u64| bytes.next_multiple_of(page as u64);
    let each = DESCRIPTION as u64;
    (u64::from(queue) * page_up(MAX_DEPTH * each), page_up(u64::from(depth) * each) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Offsets, sizes and codes as the compiler has them for the structures of <linux/ublk_cmd.h>.
    #[test]
    fn commands_have_their_numbers_and_fields_in_place() {
        assert_eq!(control::ADD_DEV, 0xc020_7504);
        assert_eq!(control::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(control::GET_FEATURES, 0x8020_7513);
        assert_eq!(io::FETCH, 0xc010_7520);
        assert_eq!(io::COMMIT_AND_FETCH, 0xc010_7521);
        let mut buffer = [0; 7];
        let address = buffer.as_mut_ptr() as u64;
        let mut command = ControlCommand { device: 3, buffer: &mut buffer, data: 0x1122 };
        let bytes = command.encode();
        assert_eq!(bytes[..4], 3u32.to_ne_bytes());
        assert_eq!(bytes[4..8], [0xff, 0xff, 7, 0]);
        assert_eq!(bytes[8..16], address.to_ne_bytes());
        assert_eq!(bytes[16..24], 0x1122u64.to_ne_bytes());
        assert_eq!(bytes[24..], [0; 56]);
        assert_eq!(io_head(1, 2, -5), [1, 0, 2, 0, 0xfb, 0xff, 0xff, 0xff]);
    }

    #[test]
    fn devices_and_disks_have_their_fields_in_place() {
        let info = Info {
            queues: 2,
            depth: 64,
            state: DeviceState::Stopped,
            buffer: 0x40000,
            id: 7,
            server: -1,
            flags: feature::USER_RECOVERY,
            image: 0x1234_5678_9abc_def0,
        };
        assert_eq!(Info::decode(&info.encode()), info);
        assert_eq!(info.encode()[24], 8);
        let disk =
            Disk { sectors: 2048, is_read_only: false, logical_block: 512, cluster: 65536, buffer: 0x40000 };
        let bytes = disk.encode();
        assert_eq!(bytes[..12], [60, 0, 0, 0, 3, 0, 0, 0, 12, 0, 0, 0]);
        assert_eq!(bytes[12..16], [9, 12, 12, 12]);
        assert_eq!(bytes[16..20], 512u32.to_ne_bytes());
        assert_eq!(bytes[44..48], 65536u32.to_ne_bytes());
        let mut read = [0; PARAMETERS];
        read[..60].copy_from_slice(&Disk { is_read_only: true, ..disk }.encode());
        assert_eq!(size_of(&read), (2048, true));
        assert_eq!(read[40..60], [0; 20], "what is only read takes no discards");
    }

    #[test]
    fn every_description_is_a_request() {
        let request = |kind| Request::decode(kind, 8, 16);
        let read = Request { ask: Ask::Read, is_durable: false, offset: 8192, len: 4096 };
        assert_eq!(request(0), read);
        assert_eq!(request(1 | 1 << 13), Request { ask: Ask::Write, is_durable: true, ..read });
        assert_eq!(request(2).ask, Ask::Flush);
        assert_eq!(request(3).ask, Ask::Discard);
        assert_eq!(request(5).ask, Ask::WriteZeroes { unmap: true });
        assert_eq!(request(5 | 1 << 15).ask, Ask::WriteZeroes { unmap: false });
        assert_eq!(request(18).ask, Ask::Unknown);
        assert_eq!(Request::decode(0, u32::MAX, u64::MAX).offset, u64::MAX);
        assert_eq!(descriptions(1, 64, 4096), (98304, 4096));
        assert_eq!(descriptions(2, 256, 4096), (196608, 8192));
    }
}
