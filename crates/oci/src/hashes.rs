//! Hashes of a blob's blocks, by which ranges of it are compared.
//!
//! They are a blob of their own: the SHA-256 of each block, one after the other. The annotations of the blob tell the digest of
//! its hashes, so the digest of an image covers that of each block.

use crate::digest::Digest;
use crate::document::Descriptor;
use crate::failure::Failure;
use crate::image::Store;
use sha2::{Digest as _, Sha256};
use std::io::Read;
use std::sync::Arc;
use zebu_remote::http::ServersWithoutRanges;

/// The media type of hashes.
pub(crate) const HASHES: &str = "application/vnd.zebu.hashes.v1";
/// The annotation of a blob that tells the digest of its hashes.
const DIGEST: &str = "vnd.zebu.hashes.digest";
/// The annotation that tells the bytes of a block.
const BLOCK: &str = "vnd.zebu.hashes.block";
/// Bytes of a hash.
const HASH: usize = 32;
/// Blocks that are not yet so many that larger ones are better.
const FEW: u64 = 1 << 14;
const LEAST_BLOCK: u64 = 64 << 10;
const MOST_BLOCK: u64 = 1 << 20;
/// The most bytes of hashes that are fetched: those of a blob of a tebibyte.
const LONGEST: u64 = 32 << 20;

/// The hashes of a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hashes {
    block: u64,
    all: Arc<[u8]>,
}

impl Hashes {
    /// Bytes of a block.
    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    /// The first block that is not what its hash says, of those whose bytes begin at `offset`.
    pub(crate) fn wrong_block(&self, offset: u64, bytes: &[u8]) -> Option<u64> {
        let first = (offset / self.block) as usize;
        let known = self.all.chunks(HASH).skip(first).map(Some).chain(std::iter::repeat(None));
        let wrong = bytes.chunks(self.block as usize).zip(known).position(|(bytes, hash)| {
            let own = Sha256::digest(bytes);
            hash.is_none_or(|hash| hash != &own[..])
        });
        wrong.map(|index| offset + index as u64 * self.block)
    }

    /// The hashes that a blob's annotations lead to. `None`: it tells of none, or they were not copied with the image.
    ///
    /// # Errors
    /// They can't be read, or are not what the annotations say.
    pub(crate) fn fetch(store: &Store, of: &Descriptor) -> Result<Option<Self>, Failure> {
        let told = (of.annotations.get(DIGEST), of.annotations.get(BLOCK));
        let (Some(digest), Some(block)) = told else { return Ok(None) };
        let digest: Digest =
            digest.parse().map_err(|error| Failure::wrong(format!("the digest of its hashes: {error}")))?;
        let block = block.parse().ok().filter(|block| (LEAST_BLOCK..=MOST_BLOCK).contains(block));
        let block = block.ok_or_else(|| Failure::wrong("its hashes are of blocks that can't be used"))?;
        let len = of.size.div_ceil(block) * HASH as u64;
        if len > LONGEST {
            return Err(Failure::unsupported(format!("{len} bytes of hashes are too many")));
        }
        let hashes = Descriptor::new(HASHES, digest, len);
        let blob = match store.blob(&hashes, ServersWithoutRanges::Stream) {
            Err(failure) if failure.errno == libc::ENOENT => return Ok(None),
            blob => blob?,
        };
        let mut all = Vec::new();
        blob.all(&hashes)
            .read_to_end(&mut all)
            .map_err(|error| Failure::from(error).during(format!("blob {}", hashes.digest)))?;
        Ok(Some(Self { block, all: all.into() }))
    }
}

/// Hashes that are made of the bytes of a blob, in order.
pub(crate) struct Making {
    block: u64,
    filled: u64,
    hasher: Sha256,
    all: Vec<u8>,
}

impl Making {
    /// For a blob of so many bytes.
    pub(crate) fn new(len: u64) -> Self {
        let block = (len / FEW).next_power_of_two().clamp(LEAST_BLOCK, MOST_BLOCK);
        Self { block, filled: 0, hasher: Sha256::new(), all: Vec::new() }
    }

    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (own, rest) = bytes.split_at(bytes.len().min((self.block - self.filled) as usize));
            self.hasher.update(own);
            self.filled += own.len() as u64;
            if self.filled == self.block {
                self.end_block();
            }
            bytes = rest;
        }
    }

    fn end_block(&mut self) {
        self.all.extend_from_slice(&self.hasher.finalize_reset());
        self.filled = 0;
    }

    /// The hashes, of which `of` tells from now on.
    pub(crate) fn finish(mut self, of: &mut Descriptor) -> (Descriptor, Vec<u8>) {
        if self.filled > 0 {
            self.end_block();
        }
        let digest = Digest::of(&self.all);
        of.annotations.insert(DIGEST.to_owned(), digest.to_string());
        of.annotations.insert(BLOCK.to_owned(), self.block.to_string());
        (Descriptor::new(HASHES, digest, self.all.len() as u64), self.all)
    }
}

#[cfg(test)]
pub(crate) fn hashes_of(bytes: &[u8]) -> Hashes {
    let mut making = Making::new(bytes.len() as u64);
    bytes.chunks(70_001).for_each(|piece| making.update(piece));
    let block = making.block;
    let (_, all) = making.finish(&mut Descriptor::new("x", Digest::of(bytes), bytes.len() as u64));
    Hashes { block, all: all.into() }
}
