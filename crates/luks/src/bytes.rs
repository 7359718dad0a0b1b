//! Big-endian fields of a header.

use crate::error::{LuksError, printable};

/// The bytes `at..at + N`; zeroes where `bytes` is shorter, which parsers rule out first.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// Text that ends at a zero byte or fills its field.
///
/// # Errors
/// Not ASCII.
pub(crate) fn text<const N: usize>(bytes: &[u8], at: usize, field: &str) -> Result<String, LuksError> {
    let raw: [u8; N] = array(bytes, at);
    let len = raw.iter().position(|&byte| byte == 0).unwrap_or(N);
    let text = raw[..len].iter().map(|&byte| char::from(byte)).collect::<String>();
    if text.is_ascii() {
        Ok(text)
    } else {
        Err(LuksError::field(field, format!("\"{}\" is no plain text", printable(&text))))
    }
}
