//! Reads of a part of a file.

use super::tar::Range;
use std::borrow::Borrow;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

/// A part of a file, read in order.
pub(crate) struct RangeReader<F> {
    file: F,
    at: u64,
    end: u64,
}

impl<F: Borrow<File>> RangeReader<F> {
    pub(crate) fn new(file: F, range: Range) -> Self {
        Self { file, at: range.start, end: range.start.saturating_add(range.len) }
    }
}

impl<F: Borrow<File>> Read for RangeReader<F> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = out.len().min(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
        let read = self.file.borrow().read_at(&mut out[..len], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}
