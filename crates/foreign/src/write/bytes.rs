//! Integers and text put into byte slices. Bytes past the end of a slice are left out.

pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    for (to, from) in bytes.get_mut(at..).unwrap_or_default().iter_mut().zip(value) {
        *to = *from;
    }
}

pub(super) fn put_le16(bytes: &mut [u8], at: usize, value: u16) {
    put(bytes, at, &value.to_le_bytes());
}
pub(super) fn put_le32(bytes: &mut [u8], at: usize, value: u32) {
    put(bytes, at, &value.to_le_bytes());
}
pub(super) fn put_le64(bytes: &mut [u8], at: usize, value: u64) {
    put(bytes, at, &value.to_le_bytes());
}
pub(super) fn put_be16(bytes: &mut [u8], at: usize, value: u16) {
    put(bytes, at, &value.to_be_bytes());
}
pub(super) fn put_be32(bytes: &mut [u8], at: usize, value: u32) {
    put(bytes, at, &value.to_be_bytes());
}
pub(super) fn put_be64(bytes: &mut [u8], at: usize, value: u64) {
    put(bytes, at, &value.to_be_bytes());
}

/// Appends zeroes up to a multiple of `unit` bytes.
pub(super) fn pad(out: &mut Vec<u8>, unit: usize) {
    let len = out.len().checked_next_multiple_of(unit).unwrap_or(out.len());
    out.resize(len, 0);
}
