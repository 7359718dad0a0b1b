//! Integers and text in byte slices. Bytes past the end of a slice are zero.

/// The `N` bytes at `at`.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().zip(bytes.get(at..).unwrap_or_default()) {
        *to = *from;
    }
    out
}

pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}
pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}
pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// Text in UTF-16, up to the first zero; what is not valid is replaced.
pub(crate) fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> String {
    let units = bytes.as_chunks::<2>().0.iter().map(|bytes| unit(*bytes)).take_while(|unit| *unit != 0);
    char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}

/// The bit at `first`, and how many from there on are like it. `is_set` looks at a bit of a byte, in the order of the format.
pub(crate) fn equal_bits(bytes: &[u8], first: usize, is_set: fn(u8, usize) -> bool) -> (bool, u64) {
    let mut bits = bytes.iter().flat_map(|byte| (0..8).map(move |bit| is_set(*byte, bit))).skip(first);
    let Some(value) = bits.next() else { return (false, 0) };
    (value, bits.take_while(|bit| *bit == value).fold(1, |count: u64, _| count.saturating_add(1)))
}
