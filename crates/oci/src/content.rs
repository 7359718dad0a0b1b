//! The bytes of a blob that is sent.

use crate::digest::{Digest, Hasher};
use crate::failure::Failure;
use crate::hashes::Making;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// The bytes of a blob: some, then those of a file, then zeroes.
pub(crate) struct Content {
    pub(crate) head: Vec<u8>,
    pub(crate) file: File,
    pub(crate) file_len: u64,
    pub(crate) zeroes: u64,
}

impl Content {
    pub(crate) fn len(&self) -> u64 {
        self.head.len() as u64 + self.file_len + self.zeroes
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let head = self.head.len() as u64;
        if let Some(rest) = self.head.get(offset as usize..).filter(|rest| offset < head && !rest.is_empty())
        {
            let len = rest.len().min(out.len());
            out[..len].copy_from_slice(&rest[..len]);
            return Ok(len);
        }
        let at = offset - head;
        if at < self.file_len {
            let most = out.len().min((self.file_len - at) as usize);
            return match self.file.read_at(&mut out[..most], at)? {
                0 => Err(io::Error::other("the file became shorter meanwhile")),
                read => Ok(read),
            };
        }
        let len = out.len().min((self.len().saturating_sub(offset)) as usize);
        out[..len].fill(0);
        Ok(len)
    }

    pub(crate) fn read_exact_at(&self, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !out.is_empty() {
            let read = self.read_at(out, offset)?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            out = &mut out[read..];
            offset += read as u64;
        }
        Ok(())
    }

    /// The digest. `making` gets all bytes, too.
    pub(crate) fn digest(&self, mut making: Option<&mut Making>) -> Result<Digest, Failure> {
        let mut hasher = Hasher::sha256();
        let mut reader = InOrder { content: self, at: 0 };
        let mut piece = vec![0; PIECE];
        loop {
            match reader.read(&mut piece)? {
                0 => return Ok(hasher.finish()),
                read => {
                    hasher.update(&piece[..read]);
                    if let Some(making) = &mut making {
                        making.update(&piece[..read]);
                    }
                }
            }
        }
    }
}

/// The bytes of a blob in order.
pub(crate) struct InOrder<'a> {
    pub(crate) content: &'a Content,
    pub(crate) at: u64,
}

impl Read for InOrder<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = if self.at < self.content.len() { self.content.read_at(out, self.at)? } else { 0 };
        self.at += read as u64;
        Ok(read)
    }
}
