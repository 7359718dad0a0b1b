//! Reads of a part of a file, in order.

use super::pieces::Pieces;
use std::borrow::Borrow;
use std::fs::File;
use std::io::{self, Read};

/// Pieces of a file, read in order.
pub(crate) struct RangeReader<F, P> {
    file: F,
    bytes: P,
    at: u64,
}

impl<F: Borrow<File>, P: Borrow<Pieces>> RangeReader<F, P> {
    pub(crate) fn new(file: F, bytes: P) -> Self {
        Self { file, bytes, at: 0 }
    }
}

impl<F: Borrow<File>, P: Borrow<Pieces>> Read for RangeReader<F, P> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let bytes = self.bytes.borrow();
        let len = out.len().min(usize::try_from(bytes.len() - self.at).unwrap_or(usize::MAX));
        bytes.read_exact_at(self.file.borrow(), &mut out[..len], self.at)?;
        self.at += len as u64;
        Ok(len)
    }
}
