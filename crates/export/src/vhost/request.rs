//! Parsing what a guest asks for. Pure functions: any descriptors and bytes give a request or none.

use super::device::SECTOR;
use smallvec::SmallVec;

/// Kinds of requests (virtio 1.2, 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// Bytes of a request's header.
pub(crate) const HEADER: u32 = 16;
/// Bytes of one range of a discard or write-zeroes request.
pub(crate) const RANGE: usize = 16;
/// The only flag of a range.
const RANGE_UNMAP: u32 = 1;

/// Runs of guest memory: address and length.
pub type Parts = SmallVec<[(u64, u32); 4]>;

/// A request. Offsets in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlkRequest {
    /// Fill the writable parts.
    Read {
        /// Where.
        offset: u64,
    },
    /// Write the readable parts.
    Write {
        /// Where.
        offset: u64,
    },
    /// Make durable.
    Flush,
    /// Tell the name of the device.
    GetId,
    /// Give ranges up.
    Discard,
    /// Make ranges read as zero.
    WriteZeroes,
    /// Anything else.
    Unknown,
}

/// Reads the header of a request. `None` if its offset is none.
pub fn parse_header(bytes: &[u8; HEADER as usize]) -> Option<BlkRequest> {
    let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = *bytes;
    let offset = || u64::from_le_bytes(sector).checked_mul(SECTOR);
    Some(match u32::from_le_bytes([k0, k1, k2, k3]) {
        IN => BlkRequest::Read { offset: offset()? },
        OUT => BlkRequest::Write { offset: offset()? },
        FLUSH => BlkRequest::Flush,
        GET_ID => BlkRequest::GetId,
        DISCARD => BlkRequest::Discard,
        WRITE_ZEROES => BlkRequest::WriteZeroes,
        _ => BlkRequest::Unknown,
    })
}

/// Bytes in all parts.
pub(crate) fn len(parts: &Parts) -> u64 {
    parts.iter().map(|(_, len)| u64::from(*len)).sum()
}

/// Cuts off and returns the first `want` bytes; `None` (and all stays as it is) if there are fewer.
pub fn split_front(parts: &mut Parts, want: u32) -> Option<Parts> {
    if len(parts) < u64::from(want) {
        return None;
    }
    let mut head = Parts::new();
    let mut left = want;
    let mut whole = 0;
    for (address, len) in parts.iter_mut() {
        if left == 0 {
            break;
        }
        let taken = left.min(*len);
        head.push((*address, taken));
        left -= taken;
        if taken == *len {
            whole += 1;
        } else {
            *address = address.wrapping_add(u64::from(taken));
            *len -= taken;
        }
    }
    parts.drain(..whole);
    Some(head)
}

/// Cuts off the last byte and returns its address; `None` if there is no byte.
pub fn split_last_byte(parts: &mut Parts) -> Option<u64> {
    while let Some((address, len)) = parts.last_mut() {
        if *len == 0 {
            parts.pop();
            continue;
        }
        *len -= 1;
        let last = address.wrapping_add(u64::from(*len));
        if *len == 0 {
            parts.pop();
        }
        return Some(last);
    }
    None
}

/// One range of a discard or write-zeroes request, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Space may be given back.
    pub(crate) unmap: bool,
}

/// Reads a range; `None` if it has unknown flags or is beyond all disks.
pub(crate) fn parse_range(bytes: &[u8; RANGE]) -> Option<Range> {
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = *bytes;
    let flags = u32::from_le_bytes([f0, f1, f2, f3]);
    if flags & !RANGE_UNMAP != 0 {
        return None;
    }
    Some(Range {
        offset: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]).checked_mul(SECTOR)?,
        len: u64::from(u32::from_le_bytes([n0, n1, n2, n3])) * SECTOR,
        unmap: flags & RANGE_UNMAP != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(list: &[(u64, u32)]) -> Parts {
        list.iter().copied().collect()
    }

    #[test]
    fn headers_may_lie_in_any_number_of_parts() {
        let mut list = parts(&[(100, 10), (200, 0), (300, 6), (400, 50)]);
        assert_eq!(split_front(&mut list, 16), Some(parts(&[(100, 10), (200, 0), (300, 6)])));
        assert_eq!(list, parts(&[(400, 50)]));
        let mut list = parts(&[(100, 4096)]);
        assert_eq!(split_front(&mut list, 16), Some(parts(&[(100, 16)])));
        assert_eq!(list, parts(&[(116, 4080)]));
        let mut list = parts(&[(100, 15)]);
        assert_eq!(split_front(&mut list, 16), None);
        assert_eq!(list, parts(&[(100, 15)]));
        assert_eq!(split_front(&mut Parts::new(), 1), None);
    }

    #[test]
    fn the_status_is_the_last_byte() {
        let mut list = parts(&[(100, 512), (900, 1), (700, 0)]);
        assert_eq!(split_last_byte(&mut list), Some(900));
        assert_eq!(list, parts(&[(100, 512)]));
        assert_eq!(split_last_byte(&mut list), Some(611));
        assert_eq!(list, parts(&[(100, 511)]));
        assert_eq!(split_last_byte(&mut parts(&[(1, 0), (2, 0)])), None);
    }

    #[test]
    fn every_header_is_a_request_or_none() {
        let header = |kind: u32, sector: u64| {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&kind.to_le_bytes());
            bytes[8..].copy_from_slice(&sector.to_le_bytes());
            parse_header(&bytes)
        };
        assert_eq!(header(0, 3), Some(BlkRequest::Read { offset: 1536 }));
        assert_eq!(header(1, 1 << 40), Some(BlkRequest::Write { offset: 1 << 49 }));
        assert_eq!(header(0, u64::MAX), None);
        assert_eq!(header(1, 1 << 55), None);
        assert_eq!(header(4, u64::MAX), Some(BlkRequest::Flush));
        assert_eq!(header(8, 0), Some(BlkRequest::GetId));
        assert_eq!(header(11, 0), Some(BlkRequest::Discard));
        assert_eq!(header(13, 0), Some(BlkRequest::WriteZeroes));
        for kind in [2, 3, 5, 10, 12, 14, 16, u32::MAX] {
            assert_eq!(header(kind, 0), Some(BlkRequest::Unknown));
        }
    }

    #[test]
    fn ranges_have_known_flags() {
        let range = |sector: u64, sectors: u32, flags: u32| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&sector.to_le_bytes());
            bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
            bytes[12..].copy_from_slice(&flags.to_le_bytes());
            parse_range(&bytes)
        };
        assert_eq!(range(2, 4, 0), Some(Range { offset: 1024, len: 2048, unmap: false }));
        assert_eq!(range(2, u32::MAX, 1).map(|range| range.unmap), Some(true));
        assert_eq!(range(2, 4, 2), None);
        assert_eq!(range(u64::MAX, 4, 0), None);
    }
}
