//! How much of the server's own memory a request takes. Its data stays in the guest's memory, unless the disk needs it
//! aligned.

use super::chain::Chain;
use super::device::MAX_QUEUE;

/// Bytes of a request that has no parts.
const REQUEST: u64 = 1 << 10;
/// Bytes for each part: where it is, and the buffer that stands for it.
const PART: u64 = 64;
/// Bytes that are copied at once where buffers don't suit the disk (`unaligned.rs` of storage).
const COPIED: u64 = 1 << 20;
/// Buffers that suit every disk begin and end at multiples of this.
const SUITS: u64 = 4096;
/// The most that a request takes.
pub(super) const LARGEST: u64 = REQUEST + MAX_QUEUE as u64 * PART + COPIED;
/// Shorter parts are headers.
const DATA: u32 = 512;

/// Bytes for a request: the most that it takes at once.
pub(super) fn own_memory(chain: &Chain) -> u64 {
    let Chain::Whole(readable, writable) = chain else { return REQUEST };
    let (mut parts, mut bytes, mut suits) = (0, 0u64, true);
    for &(address, len) in readable.iter().chain(writable) {
        parts += 1;
        if len >= DATA {
            bytes += u64::from(len);
            suits &= address.is_multiple_of(SUITS) && u64::from(len).is_multiple_of(SUITS);
        }
    }
    REQUEST + parts * PART + if suits { 0 } else { bytes.min(COPIED) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost::request::Parts;

    #[test]
    fn what_is_copied_counts() {
        let memory = |readable: &[(u64, u32)]| {
            let readable: Parts = readable.iter().copied().collect();
            own_memory(&Chain::Whole(readable, std::iter::once((16, 1)).collect()))
        };
        let least = REQUEST + 2 * PART;
        assert_eq!(memory(&[(0, 16)]), least);
        assert_eq!(memory(&[(0, 16), (0x1000, 1 << 20)]), least + PART);
        assert_eq!(memory(&[(0, 16), (0x1200, 0x1000)]), least + PART + 0x1000);
        assert_eq!(memory(&[(0, 16), (0x1200, 32 << 20)]), least + PART + COPIED);
        assert_eq!(memory(&vec![(0x1000, 0x1000); 1000]), REQUEST + 1001 * PART);
        assert_eq!(own_memory(&Chain::TooLong(None)), REQUEST);
    }
}
