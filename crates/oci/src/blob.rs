//! Bytes of a blob: in order, with its digest compared at the end.

use crate::digest::Hasher;
use crate::document::Descriptor;
use crate::failure::Failure;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use zebu_remote::http::HttpDisk;
use zebu_storage::{Completer, IoBuf, Storage, StorageOp};

/// Bytes that are asked for at once.
const PIECE: u64 = 1 << 20;
/// Pieces that are on their way.
const MOST_PIECES: usize = 8;

/// A blob that can be read.
pub(crate) enum Blob {
    /// Of a registry.
    Remote(Box<HttpDisk>),
    /// A part of a file of this machine.
    Local { file: File, offset: u64, len: u64 },
}

impl Blob {
    /// Bytes that there are.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Remote(disk) => disk.len(),
            Self::Local { len, .. } => *len,
        }
    }

    /// The first bytes, so many at most.
    pub(crate) fn first(&self, most: u64) -> Result<Vec<u8>, Failure> {
        self.range(0, most.min(self.len()))
    }

    /// Bytes of a part.
    pub(crate) fn range(&self, from: u64, until: u64) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        Reader::new(self, from, until).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Its bytes, of which those before `from` were read before and are in `hasher`. The digest of all is compared.
    pub(crate) fn checked<'a>(&'a self, of: &'a Descriptor, from: u64, hasher: Hasher) -> Checked<'a> {
        Checked { reader: Reader::new(self, from, self.len()), of, hasher: Some(hasher) }
    }

    /// All of its bytes.
    pub(crate) fn all<'a>(&'a self, of: &'a Descriptor) -> Checked<'a> {
        self.checked(of, 0, of.digest.hasher())
    }
}

/// A piece that was asked for.
type Piece = Receiver<Result<IoBuf, i32>>;

/// Bytes in order.
struct Reader<'a> {
    blob: &'a Blob,
    until: u64,
    /// Bytes that were handed over, and that were asked for.
    position: u64,
    asked: u64,
    pieces: VecDeque<Piece>,
    current: Option<(IoBuf, usize)>,
}

impl<'a> Reader<'a> {
    fn new(blob: &'a Blob, from: u64, until: u64) -> Self {
        Self { blob, until, position: from, asked: from, pieces: VecDeque::new(), current: None }
    }

    fn ask_ahead(&mut self, disk: &HttpDisk) {
        while self.asked < self.until && self.pieces.len() < MOST_PIECES {
            let len = PIECE.min(self.until - self.asked);
            let (sender, receiver) = channel();
            let op = StorageOp::Read { offset: self.asked, len };
            let done = Completer::new(op, IoBuf::zeroed(len as usize).into(), move |mut bufs, result| {
                let piece = bufs.pop_part().ok_or(libc::EIO);
                // Who has given up does not hear it.
                let _ = sender.send(result.and(piece));
            });
            disk.submit(op, done);
            self.asked += len;
            self.pieces.push_back(receiver);
        }
    }

    fn read_remote(&mut self, disk: &HttpDisk, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some((piece, at)) = &mut self.current {
                let rest = &piece.as_slice()[*at..];
                if !rest.is_empty() {
                    let len = rest.len().min(out.len());
                    out[..len].copy_from_slice(&rest[..len]);
                    *at += len;
                    return Ok(len);
                }
            }
            self.ask_ahead(disk);
            let Some(next) = self.pieces.pop_front() else { return Ok(0) };
            let piece = next.recv().unwrap_or(Err(libc::EIO)).map_err(|errno| {
                let reason = disk.given_up().or_else(|| disk.last_failure());
                Failure::new(errno, reason.unwrap_or_else(|| "it can't be read".to_owned()))
            })?;
            self.current = Some((piece, 0));
        }
    }
}

impl Read for Reader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let blob = self.blob;
        let read = match blob {
            Blob::Remote(disk) => self.read_remote(disk, out)?,
            Blob::Local { file, offset, .. } => {
                let most = out.len().min(self.until.saturating_sub(self.position) as usize);
                file.read_at(&mut out[..most], offset + self.position)?
            }
        };
        self.position += read as u64;
        Ok(read)
    }
}

/// All bytes of a blob. Its end is an error if they do not have the digest of its descriptor, or are not as many.
pub(crate) struct Checked<'a> {
    reader: Reader<'a>,
    of: &'a Descriptor,
    /// `None` after the end.
    hasher: Option<Hasher>,
}

impl Checked<'_> {
    /// Reads what is left, and compares.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        let mut waste = vec![0; 128 << 10];
        while self.read(&mut waste)? > 0 {}
        Ok(())
    }
}

impl Read for Checked<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        let read = self.reader.read(out)?;
        if read > 0 {
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&out[..read]);
            }
            return Ok(read);
        }
        let Some(hasher) = self.hasher.take() else { return Ok(0) };
        if self.reader.position != self.of.size {
            let (found, told) = (self.reader.position, self.of.size);
            return Err(Failure::wrong(format!("it has {found} bytes, and the manifest says {told}")).into());
        }
        let found = hasher.finish();
        if found != self.of.digest {
            return Err(Failure::wrong(format!("what was read has another digest, {found}")).into());
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;

    fn local(bytes: &[u8]) -> Blob {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 3).unwrap();
        Blob::Local { file, offset: 3, len: bytes.len() as u64 }
    }

    #[test]
    fn the_end_of_a_wrong_blob_is_an_error() {
        let of = |bytes: &[u8], size| Descriptor::new("x", Digest::of(bytes), size);
        let blob = local(b"0123456789");
        let right = of(b"0123456789", 10);
        assert_eq!(blob.first(4), Ok(b"0123".to_vec()));
        let mut all = Vec::new();
        let mut reader = blob.all(&right);
        reader.read_to_end(&mut all).unwrap();
        assert_eq!((all.as_slice(), reader.reader.position), (&b"0123456789"[..], 10));
        let mut hasher = right.digest.hasher();
        hasher.update(b"0123");
        assert_eq!(blob.checked(&right, 4, hasher).finish(), Ok(()));
        for (wrong, word) in [(of(b"x", 10), "digest"), (of(b"0123456789", 11), "bytes")] {
            let error = blob.all(&wrong).finish().unwrap_err();
            assert!(error.reason.contains(word), "{error}");
        }
    }
}
