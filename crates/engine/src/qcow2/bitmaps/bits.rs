//! The bits of one bitmap in memory: one for each granule of the disk, set without a lock.

use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::ops::Range;

/// Words of a chunk: the bits of the smallest cluster, so that a table that says of each cluster whether all of its bits
/// are set takes no more than a few times its own size.
const CHUNK_WORDS: u64 = 64;
const CHUNK_BITS: u64 = CHUNK_WORDS * 64;

/// Bits of which some were set. No bit is ever cleared.
#[derive(Debug)]
enum Chunk {
    /// All were, at once.
    Set,
    Mixed(Box<[AtomicU64; CHUNK_WORDS as usize]>),
}

impl Chunk {
    fn clear() -> Self {
        Self::Mixed(Box::new([const { AtomicU64::new(0) }; CHUNK_WORDS as usize]))
    }

    fn word(&self, word: u64) -> u64 {
        match self {
            Self::Set => u64::MAX,
            Self::Mixed(words) => words[(word % CHUNK_WORDS) as usize].load(Relaxed),
        }
    }
}

/// The bits of one bitmap, in memory.
#[derive(Debug)]
pub(crate) struct Bits {
    granularity_bits: u8,
    /// Bytes of disk.
    size: u64,
    chunks: Box<[OnceLock<Chunk>]>,
    /// A bit was set since the bits were last stored.
    changed: AtomicBool,
}

impl Bits {
    /// All clear, for a disk of `size` bytes.
    pub(crate) fn new(size: u64, granularity_bits: u8) -> Self {
        let words = size.div_ceil(1 << granularity_bits).div_ceil(64);
        let chunks = (0..words.div_ceil(CHUNK_WORDS)).map(|_| OnceLock::new()).collect();
        Self { granularity_bits, size, chunks, changed: AtomicBool::new(false) }
    }

    /// Bytes of the disk.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// log2 of the bytes that a bit stands for.
    pub(crate) fn granularity_bits(&self) -> u8 {
        self.granularity_bits
    }

    /// Whether a bit was set since [`Bits::set_stored`].
    pub(crate) fn is_changed(&self) -> bool {
        self.changed.load(Relaxed)
    }

    /// Notes that the bits are on disk as they are. Nobody sets any meanwhile.
    pub(crate) fn set_stored(&self) {
        self.changed.store(false, Relaxed);
    }

    /// Bits in all.
    fn count(&self) -> u64 {
        self.size.div_ceil(1 << self.granularity_bits)
    }

    /// Marks all granules that `range` of the disk touches; what lies past the end is left out.
    pub(crate) fn mark(&self, range: Range<u64>) {
        let end = range.end.min(self.size);
        if range.start < end {
            let last = (end - 1) >> self.granularity_bits;
            self.set_bits(range.start >> self.granularity_bits..last + 1);
        }
    }

    /// Sets bits of those that there are.
    pub(crate) fn set_bits(&self, bits: Range<u64>) {
        let end = bits.end.min(self.count());
        let mut at = bits.start;
        while at < end {
            let next = (at / CHUNK_BITS + 1) * CHUNK_BITS;
            let is_whole = at.is_multiple_of(CHUNK_BITS) && next <= end;
            if !is_whole || !self.set_chunk(at / CHUNK_BITS) {
                self.set_words(at..next.min(end));
            }
            at = next;
        }
    }

    /// Sets all bits of a chunk; false if some of them have words of their own.
    fn set_chunk(&self, chunk: u64) -> bool {
        let Some(slot) = self.chunks.get(chunk as usize) else { return true };
        if slot.set(Chunk::Set).is_ok() {
            self.changed.store(true, Relaxed);
        }
        matches!(slot.get(), Some(Chunk::Set))
    }

    fn set_words(&self, bits: Range<u64>) {
        for word in bits.start / 64..bits.end.div_ceil(64) {
            let from = bits.start.saturating_sub(word * 64).min(63);
            let to = (bits.end - word * 64).min(64);
            let mask = (u64::MAX >> (64 - to)) & (u64::MAX << from);
            self.set_word(word, mask);
        }
    }

    /// Sets the bits of `mask` in a word, if they are not set yet.
    pub(crate) fn set_word(&self, word: u64, mask: u64) {
        if mask == 0 {
            return;
        }
        let Some(slot) = self.chunks.get((word / CHUNK_WORDS) as usize) else { return };
        let Chunk::Mixed(words) = slot.get_or_init(Chunk::clear) else { return };
        let word = &words[(word % CHUNK_WORDS) as usize];
        if word.load(Relaxed) & mask != mask {
            word.fetch_or(mask, Relaxed);
            self.changed.store(true, Relaxed);
        }
    }

    /// The 64 bits of a word; those past the end are clear.
    pub(crate) fn word(&self, word: u64) -> u64 {
        self.chunk_of(word).map_or(0, |chunk| chunk.word(word))
    }

    fn chunk_of(&self, word: u64) -> Option<&Chunk> {
        self.chunks.get((word / CHUNK_WORDS) as usize)?.get()
    }

    /// Words in all.
    pub(crate) fn words(&self) -> u64 {
        self.count().div_ceil(64)
    }

    /// The mask of those bits of a word that stand for a part of the disk.
    pub(crate) fn valid(&self, word: u64) -> u64 {
        match self.count().saturating_sub(word * 64) {
            0 => 0,
            bits => u64::MAX >> (64 - bits.min(64)),
        }
    }

    /// The next granules from `at` (bytes) on that are all dirty, or all clean, as `dirty` says, in bytes of the disk.
    fn run(&self, at: u64, dirty: bool) -> Option<Range<u64>> {
        let first = self.seek(at >> self.granularity_bits, dirty)?;
        let end = self.seek(first, !dirty).unwrap_or(self.count());
        let start = (first << self.granularity_bits).max(at);
        let end = end.checked_shl(u32::from(self.granularity_bits)).map_or(self.size, |e| e.min(self.size));
        (start < end).then_some(start..end)
    }

    /// Whether a bit is set.
    pub(crate) fn has(&self, bit: u64) -> bool {
        self.word(bit / 64) & (1 << (bit % 64)) != 0
    }

    /// Whether all granules that `range` of the disk touches are marked; what lies past the end is left out.
    #[inline]
    pub(crate) fn are_marked(&self, range: &Range<u64>) -> bool {
        let end = range.end.min(self.size);
        if range.start >= end {
            return true;
        }
        let (first, last) = (range.start >> self.granularity_bits, (end - 1) >> self.granularity_bits);
        (first / 64..=last / 64).all(|word| {
            let from = first.saturating_sub(word * 64).min(63);
            let to = (last + 1 - word * 64).min(64);
            let mask = (u64::MAX >> (64 - to)) & (u64::MAX << from);
            self.word(word) & mask == mask
        })
    }

    /// The first bit from `from` on that is clear.
    pub(crate) fn next_clear(&self, from: u64) -> Option<u64> {
        self.seek(from, false)
    }

    /// The end of the bits from `from` on that are as that one is, `end` at most. Looks at no more of them.
    pub(crate) fn alike_until(&self, from: u64, end: u64) -> u64 {
        self.seek_before(from, end.min(self.count()), !self.has(from)).unwrap_or(end)
    }

    /// The first bit from `from` on that is set, or clear.
    fn seek(&self, from: u64, set: bool) -> Option<u64> {
        self.seek_before(from, self.count(), set)
    }

    /// The first bit from `from` on, and before `end`, that is set, or clear.
    fn seek_before(&self, from: u64, end: u64, set: bool) -> Option<u64> {
        let mut word = from / 64;
        let mut mask = u64::MAX << (from % 64);
        while word * 64 < end {
            if mask == u64::MAX && word.is_multiple_of(CHUNK_WORDS) {
                let has_none = match self.chunk_of(word) {
                    None => set,
                    Some(Chunk::Set) => !set,
                    Some(Chunk::Mixed(_)) => false,
                };
                if has_none {
                    word += CHUNK_WORDS;
                    continue;
                }
            }
            let bits = if set { self.word(word) } else { !self.word(word) } & mask;
            if bits != 0 {
                let bit = word * 64 + u64::from(bits.trailing_zeros());
                return (bit < end).then_some(bit);
            }
            mask = u64::MAX;
            word += 1;
        }
        None
    }

    /// The first run of dirty bytes that begins at `at` or later (or contains it), from `at` on.
    pub(crate) fn next_dirty(&self, at: u64) -> Option<Range<u64>> {
        self.run(at, true)
    }

    /// Whether the byte at `at` is dirty, and where the run of bytes like it ends.
    pub(crate) fn run_at(&self, at: u64) -> (bool, u64) {
        match self.run(at, true) {
            Some(run) if run.start == at => (true, run.end),
            Some(run) => (false, run.start),
            None => (false, self.size),
        }
    }

    /// Dirty bytes.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        let (mut at, mut sum) = (0, 0);
        while let Some(run) = self.next_dirty(at) {
            sum += run.end - run.start;
            at = run.end;
        }
        sum
    }

    /// Marks all that is dirty in `other`, as far as this disk goes.
    pub(crate) fn merge(&self, other: &Self) {
        if other.granularity_bits == self.granularity_bits {
            let words = other.words().min(self.words());
            for (index, slot) in (0u64..).zip(&other.chunks) {
                let word = index * CHUNK_WORDS;
                match slot.get() {
                    None => {}
                    Some(Chunk::Set) => self.set_bits(index * CHUNK_BITS..(index + 1) * CHUNK_BITS),
                    Some(chunk) => (word..words.min(word + CHUNK_WORDS))
                        .for_each(|word| self.set_word(word, chunk.word(word) & self.valid(word))),
                }
            }
            return;
        }
        let mut at = 0;
        while let Some(run) = other.next_dirty(at) {
            at = run.end;
            self.mark(run);
        }
    }

    /// The same bits for a disk of another size: what is cut off is gone, what is new is clean.
    pub(crate) fn resized(&self, size: u64) -> Self {
        let resized = Self::new(size, self.granularity_bits);
        resized.merge(self);
        resized
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same, a byte at a time.
    fn model(size: u64, bits: u8, ranges: &[(u64, u64)]) -> Vec<bool> {
        let granule = 1u64 << bits;
        let mut dirty = vec![false; size as usize];
        for (start, len) in ranges {
            let end = (start + len).min(size);
            if *start >= end {
                continue;
            }
            let end = end.next_multiple_of(granule).min(size);
            dirty[(start / granule * granule) as usize..end as usize].fill(true);
        }
        dirty
    }

    /// Where a run of dirty bytes begins, and how long it is.
    fn runs(dirty: &[bool]) -> Vec<(u64, u64)> {
        let mut at = 0;
        let mut runs = Vec::new();
        for part in dirty.chunk_by(|a, b| a == b) {
            if part[0] {
                runs.push((at, part.len() as u64));
            }
            at += part.len() as u64;
        }
        runs
    }

    fn bytes(bits: &Bits) -> Vec<bool> {
        let mut dirty = vec![false; bits.size() as usize];
        let mut at = 0;
        while let Some(run) = bits.next_dirty(at) {
            dirty[run.start as usize..run.end as usize].fill(true);
            at = run.end;
        }
        dirty
    }

    proptest! {
        #[test]
        fn marks_are_those_of_the_model(
            sectors in 0u64..160,
            fine in 9u8..13,
            coarse in 9u8..14,
            ranges in proptest::collection::vec((0u64..90_000, 0u64..20_000), 0..12),
            new_sectors in 0u64..160,
        ) {
            let size = sectors * 512;
            let bits = Bits::new(size, fine);
            for (start, len) in &ranges {
                bits.mark(*start..start + len);
            }
            let expected = model(size, fine, &ranges);
            prop_assert_eq!(&bytes(&bits), &expected);
            prop_assert_eq!(bits.dirty_bytes(), expected.iter().filter(|d| **d).count() as u64);
            for at in (0..size).step_by(700) {
                let (dirty, end) = bits.run_at(at);
                let same = expected[at as usize..].iter().take_while(|d| **d == dirty).count() as u64;
                prop_assert_eq!((dirty, end), (expected[at as usize], at + same));
                let (bit, bound) = (at >> fine, (at >> fine) + 1 + at % 7);
                let alike = (bit..bound).take_while(|other| bits.has(*other) == dirty).count() as u64;
                prop_assert_eq!(bits.alike_until(bit, bound.min(bits.count())), (bit + alike).min(bits.count()));
            }
            let other = Bits::new(size, coarse);
            other.merge(&bits);
            prop_assert_eq!(bytes(&other), model(size, coarse, &runs(&expected)));
            let new_size = new_sectors * 512;
            let mut kept = expected.clone();
            kept.resize(new_size as usize, false);
            // The granule at the old end counts whole.
            prop_assert_eq!(bytes(&bits.resized(new_size)), model(new_size, fine, &runs(&kept)));
            for word in 0..bits.words() {
                prop_assert_eq!(bits.word(word) & !bits.valid(word), 0);
            }
        }
    }

    #[test]
    fn the_largest_disk_costs_what_is_marked_in_it() {
        let bits = Bits::new(1 << 46, 16);
        bits.mark((1 << 46) - 1..u64::MAX);
        assert_eq!(bits.next_dirty(0), Some((1 << 46) - (1 << 16)..1 << 46));
        assert_eq!(bits.run_at(5), (false, (1 << 46) - (1 << 16)));
        assert_eq!(bits.chunks.iter().filter(|c| c.get().is_some()).count(), 1);
    }

    #[test]
    fn a_disk_of_which_all_was_written_costs_no_words() {
        let mixed =
            |bits: &Bits| bits.chunks.iter().filter(|c| matches!(c.get(), Some(Chunk::Mixed(_)))).count();
        let size = (1 << 40) + 512;
        let bits = Bits::new(size, 16);
        bits.mark(0..size);
        assert!(bits.is_changed());
        assert_eq!((mixed(&bits), bits.dirty_bytes()), (1, size), "the last one is not whole");
        bits.set_stored();
        bits.mark(5 << 30..9 << 30);
        assert!(!bits.is_changed(), "nothing was new");
        let (longer, shorter) = (bits.resized(2 << 40), bits.resized(1 << 39));
        assert_eq!((mixed(&longer), longer.dirty_bytes()), (1, size.next_multiple_of(1 << 16)));
        assert_eq!((mixed(&shorter), shorter.dirty_bytes()), (0, 1 << 39));
    }

    #[test]
    fn a_chunk_that_has_words_is_filled_by_them() {
        let granule = 1 << 16;
        let bits = Bits::new(3 * CHUNK_BITS * granule, 16);
        bits.mark((CHUNK_BITS + 3) * granule..(CHUNK_BITS + 4) * granule);
        bits.set_stored();
        bits.mark(granule..(3 * CHUNK_BITS - 1) * granule);
        assert!(bits.is_changed());
        assert_eq!(bits.next_dirty(0), Some(granule..(3 * CHUNK_BITS - 1) * granule));
        assert_eq!(bits.run_at(0), (false, granule));
    }
}
