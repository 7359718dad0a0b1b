//! The blocks of a stream that were unpacked last.

use std::collections::VecDeque;
use zebu_engine::storage::IoBufs;

/// Bytes that are unpacked at once if nobody waits for others.
pub(super) const BLOCK: usize = 1 << 20;
/// Blocks that are kept: 16 MiB.
const KEPT: usize = 16;

/// The blocks, each behind the one before it or further on.
#[derive(Default)]
pub(super) struct Recent {
    blocks: VecDeque<(u64, Vec<u8>)>,
    /// Memory of a block that was given up.
    spare: Option<Vec<u8>>,
}

impl Recent {
    /// Memory for a block.
    pub(super) fn room(&mut self) -> Vec<u8> {
        self.spare.take().unwrap_or_else(|| Vec::with_capacity(BLOCK))
    }

    /// Adds a block that lies at `offset`, behind all others.
    pub(super) fn push(&mut self, offset: u64, block: Vec<u8>) {
        if block.is_empty() {
            self.spare = Some(block);
            return;
        }
        self.blocks.push_back((offset, block));
        if self.blocks.len() > KEPT {
            self.spare = self.blocks.pop_front().map(|(_, block)| block);
        }
    }

    /// Forgets all blocks.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
    }

    /// Whether all of a range is there.
    pub(super) fn has(&self, offset: u64, len: usize) -> bool {
        let mut left = len;
        self.pieces(offset, len).for_each(|(_, piece)| left -= piece.len());
        left == 0
    }

    /// Copies a range that is there to the start of `bufs`.
    pub(super) fn copy(&self, offset: u64, len: usize, bufs: &mut IoBufs) {
        self.pieces(offset, len).for_each(|(at, piece)| bufs.copy_from(at, piece));
    }

    /// The parts of a range that are there, with their offsets in the range.
    fn pieces(&self, offset: u64, len: usize) -> impl Iterator<Item = (usize, &[u8])> {
        let end = offset.saturating_add(len as u64);
        self.blocks.iter().filter_map(move |(start, block)| {
            let (from, to) = (offset.max(*start), end.min(start + block.len() as u64));
            let piece = block.get((from - start) as usize..to.checked_sub(*start)? as usize)?;
            Some(((from - offset) as usize, piece))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zebu_engine::storage::IoBuf;

    #[test]
    fn ranges_are_found_across_blocks_and_old_blocks_are_given_up() {
        let mut recent = Recent::default();
        recent.push(100, vec![1; 10]);
        recent.push(110, vec![2; 10]);
        recent.push(130, vec![3; 10]);
        assert!(recent.has(100, 20) && recent.has(105, 10) && recent.has(135, 5) && recent.has(0, 0));
        assert!(!recent.has(99, 2) && !recent.has(119, 2) && !recent.has(139, 2) && !recent.has(115, 20));
        let mut bufs = IoBufs::from(IoBuf::zeroed(4));
        recent.copy(108, 4, &mut bufs);
        let mut found = [0; 4];
        bufs.copy_to(0, &mut found);
        assert_eq!(found, [1, 1, 2, 2]);
        for at in 0..KEPT as u64 {
            recent.push(200 + at, vec![4]);
        }
        assert!(!recent.has(130, 1) && recent.has(200, KEPT));
        assert!(recent.room().capacity() > 0);
        recent.clear();
        assert!(!recent.has(200, 1));
    }
}
