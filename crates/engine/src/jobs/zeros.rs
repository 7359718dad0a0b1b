//! Finding zeroes: in data that was read, and by the mapping alone.

use crate::{Image, Result};
use zebu_storage::Worker;

/// Bytes looked at in one step of the scan: the compiler turns the inner loop into a few vector instructions, and
/// data that is not zero is left after one step.
const STEP: usize = 128;

/// Whether all bytes are zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    let (steps, rest) = bytes.as_chunks::<STEP>();
    steps.iter().all(step_is_zero) && rest.iter().all(|&b| b == 0)
}

fn step_is_zero(step: &[u8; STEP]) -> bool {
    let (words, _) = step.as_chunks::<8>();
    words.iter().fold(0, |seen, word| seen | u64::from_ne_bytes(*word)) == 0
}

/// A run of bytes within a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// Offset in bytes in the buffer.
    pub(super) start: usize,
    /// Bytes, at least 1.
    pub(super) len: usize,
    /// Whether every byte is zero; a run that is not may hold zeroes, but no whole block of them.
    pub(super) zero: bool,
}

/// Splits `bytes`, which lie at `offset` of a disk, into runs of zero blocks and runs of other blocks. Blocks are
/// `granularity` bytes (a power of two or any other number above 0) of the disk; at the edges of `bytes` they may be
/// cut short, and a short zero block counts as zero only if the whole of `bytes` is.
pub(super) fn runs(bytes: &[u8], offset: u64, granularity: usize) -> Runs<'_> {
    let all_zero = is_zero(bytes);
    Runs { bytes, offset, granularity, at: 0, all_zero }
}

/// Iterator made by [`runs`].
pub(super) struct Runs<'a> {
    bytes: &'a [u8],
    offset: u64,
    granularity: usize,
    at: usize,
    all_zero: bool,
}

impl Runs<'_> {
    /// The end of the block that starts at `at`, and whether the block is whole and zero.
    fn block(&self, at: usize) -> (usize, bool) {
        let granularity = self.granularity as u64;
        let into = ((self.offset + at as u64) % granularity) as usize;
        let end = at.saturating_add(self.granularity - into).min(self.bytes.len());
        (end, end - at == self.granularity && is_zero(&self.bytes[at..end]))
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let start = self.at;
        if start >= self.bytes.len() {
            return None;
        }
        if self.all_zero {
            self.at = self.bytes.len();
            return Some(Run { start, len: self.bytes.len() - start, zero: true });
        }
        let (mut end, zero) = self.block(start);
        while end < self.bytes.len() {
            let (next_end, next_zero) = self.block(end);
            if next_zero != zero {
                break;
            }
            end = next_end;
        }
        self.at = end;
        Some(Run { start, len: end - start, zero })
    }
}

/// Offset of the first byte that is not zero.
pub(super) fn first_nonzero(bytes: &[u8]) -> Option<usize> {
    let (steps, rest) = bytes.as_chunks::<STEP>();
    let whole = steps.iter().position(|step| !step_is_zero(step)).unwrap_or(steps.len()) * STEP;
    let tail = if whole < bytes.len() - rest.len() { &bytes[whole..] } else { rest };
    tail.iter().position(|&b| b != 0).map(|at| whole + at)
}

/// Offset of the first byte that differs between two slices of one length.
pub(super) fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    debug_assert_eq!(a.len(), b.len());
    if a == b {
        return None;
    }
    // Slices compare at the speed of memcmp; it only doesn't say where. Narrow down in blocks, then byte by byte.
    let block = a.chunks(4096).zip(b.chunks(4096)).position(|(x, y)| x != y)? * 4096;
    a[block..].iter().zip(&b[block..]).position(|(x, y)| x != y).map(|at| block + at)
}

/// Whether a range reads as zero, as far as the mapping knows.
pub(super) async fn is_known_zero(worker: &Worker, image: &Image, offset: u64, len: u64) -> Result<bool> {
    let mut extents = image.source_extents(offset..offset + len);
    while let Some(extent) = extents.next(worker).await? {
        if !extent.is_zero() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Bytes from `at` on, before `end`, that one look at the mapping tells to be zero. What is wrong with the mapping shows to
/// whoever reads there.
pub(super) async fn zero_run(worker: &Worker, image: &Image, at: u64, end: u64) -> u64 {
    match image.source_extent(worker, at, end - at).await {
        Ok(extent) if extent.is_zero() => extent.end().min(end) - at,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Buffers that are mostly zero, with a few bytes set.
    fn sparse() -> impl Strategy<Value = Vec<u8>> {
        (0usize..9000, proptest::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..4)).prop_map(
            |(len, bytes)| {
                let mut buffer = vec![0; len];
                for (at, value) in bytes {
                    if len > 0 {
                        buffer[at.index(len)] = value;
                    }
                }
                buffer
            },
        )
    }

    proptest! {
        #[test]
        fn zero_is_what_a_plain_loop_says(buffer in sparse()) {
            prop_assert_eq!(is_zero(&buffer), buffer.iter().all(|&b| b == 0));
            prop_assert_eq!(first_nonzero(&buffer), buffer.iter().position(|&b| b != 0));
        }

        #[test]
        fn the_difference_is_what_a_plain_loop_says(buffer in sparse(), at in any::<prop::sample::Index>()) {
            let mut other = buffer.clone();
            prop_assert_eq!(first_difference(&buffer, &other), None);
            if !buffer.is_empty() {
                let at = at.index(buffer.len());
                other[at] ^= 0x10;
                prop_assert_eq!(first_difference(&buffer, &other), Some(at));
            }
        }

        #[test]
        fn runs_cover_the_buffer_and_every_whole_zero_block(
            buffer in sparse(),
            blocks in 0u64..9,
            into in 0u64..9,
            granularity in prop_oneof![Just(512usize), Just(1536), Just(4096)],
        ) {
            let offset = blocks * granularity as u64 + into * 256;
            let runs: Vec<Run> = runs(&buffer, offset, granularity).collect();
            let mut at = 0;
            let mut last = None;
            for run in &runs {
                prop_assert_eq!(run.start, at);
                prop_assert!(run.len > 0 && Some(run.zero) != last);
                prop_assert!(!run.zero || buffer[at..at + run.len].iter().all(|&b| b == 0));
                at += run.len;
                last = Some(run.zero);
            }
            prop_assert_eq!(at, buffer.len());
            // Model: a byte is skipped if its whole block lies in the buffer and is zero, or if everything is.
            let everything = buffer.iter().all(|&b| b == 0);
            for run in &runs {
                for i in run.start..run.start + run.len {
                    let block = (offset + i as u64) / granularity as u64 * granularity as u64;
                    let whole = block >= offset
                        && block + granularity as u64 <= offset + buffer.len() as u64
                        && buffer[(block - offset) as usize..][..granularity].iter().all(|&b| b == 0);
                    prop_assert_eq!(run.zero, whole || everything);
                }
            }
        }
    }
}
