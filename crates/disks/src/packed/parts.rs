//! Parts that the decoders have in common.

use std::io;

/// Streams or frames in a row that may be empty: whoever packs disks makes none.
const MOST_EMPTY: u32 = 1000;

pub(super) fn damaged(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

pub(super) fn cut_off(packing: &str) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("the {packing} stream is cut off"))
}

/// Streams in a row that were empty.
#[derive(Default)]
pub(super) struct Empty(u32);

impl Empty {
    /// A stream has ended after so many bytes.
    pub(super) fn note(&mut self, bytes: u64) -> io::Result<()> {
        self.0 = if bytes == 0 { self.0 + 1 } else { 0 };
        if self.0 > MOST_EMPTY {
            return Err(damaged(format!("more than {MOST_EMPTY} streams or blocks in a row are empty")));
        }
        Ok(())
    }
}

/// A number in groups of seven bits, the lowest first.
pub(super) fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..63).step_by(7) {
        let byte;
        (byte, *bytes) = bytes.split_first()?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}
