//! The checksum of VHDX: CRC-32C (Castagnoli), reflected, as in RFC 3720.

/// The polynomial with its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// The remainder for each value of a byte.
const TABLE: [u32; 256] = table();

#[expect(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "computed by the compiler, which checks"
)]
const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

/// The checksum of the pieces one after the other.
pub(crate) fn crc32c(pieces: &[&[u8]]) -> u32 {
    !pieces.iter().flat_map(|piece| piece.iter()).fold(u32::MAX, |crc, byte| {
        let index = crc.to_le_bytes().first().copied().unwrap_or_default() ^ byte;
        crc >> 8 ^ TABLE.get(usize::from(index)).copied().unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720, B.4.
    #[test]
    fn known_sums() {
        assert_eq!(crc32c(&[&[0; 32]]), 0x8a91_36aa);
        assert_eq!(crc32c(&[&[0xff; 16], &[0xff; 16]]), 0x62a8_ab43);
        assert_eq!(crc32c(&[b"123456789"]), 0xe306_9283);
    }
}
