//! A set of chunks of a disk, small where it is all or nothing.

use std::ops::Range;

/// Words of a page.
const PAGE_WORDS: usize = 64;
/// Chunks of a page.
const PAGE: u64 = PAGE_WORDS as u64 * 64;

#[derive(Debug, Clone)]
enum Page {
    Empty,
    Full,
    Mixed(Box<[u64; PAGE_WORDS]>),
}

/// A set of the chunks `0..count`. It takes 16 bytes for 4,096 chunks, and 512 more where it has some of them and lacks some.
#[derive(Debug)]
pub(super) struct ChunkSet {
    count: u64,
    pages: Vec<Page>,
}

/// The bits of `range` in the word that begins at bit `start`.
fn mask(range: &Range<u64>, start: u64) -> u64 {
    let from = range.start.saturating_sub(start).min(64);
    let to = range.end.saturating_sub(start).min(64);
    let below = |bits: u64| 1_u64.checked_shl(bits as u32).map_or(u64::MAX, |bit| bit - 1);
    below(to) & !below(from)
}

impl ChunkSet {
    pub(super) fn empty(count: u64) -> Self {
        Self { count, pages: vec![Page::Empty; count.div_ceil(PAGE) as usize] }
    }

    pub(super) fn full(count: u64) -> Self {
        Self { count, pages: vec![Page::Full; count.div_ceil(PAGE) as usize] }
    }

    /// The chunks of page `index`.
    fn range_of(&self, index: usize) -> Range<u64> {
        let start = index as u64 * PAGE;
        start..(start + PAGE).min(self.count)
    }

    /// Whether it has `chunk`. Chunks past the end are in every set.
    pub(super) fn contains(&self, chunk: u64) -> bool {
        if chunk >= self.count {
            return true;
        }
        match &self.pages[(chunk / PAGE) as usize] {
            Page::Empty => false,
            Page::Full => true,
            Page::Mixed(words) => words[(chunk % PAGE / 64) as usize] & (1 << (chunk % 64)) != 0,
        }
    }

    pub(super) fn insert(&mut self, chunks: Range<u64>) {
        self.change(chunks, Page::Full);
    }

    pub(super) fn remove(&mut self, chunks: Range<u64>) {
        self.change(chunks, Page::Empty);
    }

    /// Makes `chunks` as a page that is all `to`.
    fn change(&mut self, chunks: Range<u64>, to: Page) {
        let end = chunks.end.min(self.count);
        let mut at = chunks.start;
        while at < end {
            let index = (at / PAGE) as usize;
            let page = self.range_of(index);
            let part = at..end.min(page.end);
            at = part.end;
            if part == page {
                self.pages[index] = to.clone();
                continue;
            }
            let inserts = matches!(to, Page::Full);
            let words = match &mut self.pages[index] {
                Page::Full if inserts => continue,
                Page::Empty if !inserts => continue,
                Page::Mixed(words) => words,
                uniform => {
                    let word = if inserts { 0 } else { u64::MAX };
                    *uniform = Page::Mixed(Box::new([word; PAGE_WORDS]));
                    let Page::Mixed(words) = uniform else { continue };
                    words
                }
            };
            for (word, start) in words.iter_mut().zip((page.start..page.end).step_by(64)) {
                match mask(&part, start) {
                    bits if inserts => *word |= bits,
                    bits => *word &= !bits,
                }
            }
            if inserts && Self::lacks(words, &page) == 0 {
                self.pages[index] = Page::Full;
            }
        }
    }

    /// How many chunks of a page are not in it.
    fn lacks(words: &[u64; PAGE_WORDS], page: &Range<u64>) -> u64 {
        let starts = (page.start..page.end).step_by(64);
        words
            .iter()
            .zip(starts)
            .map(|(word, start)| u64::from((!word & mask(page, start)).count_ones()))
            .sum()
    }

    /// How many chunks are not in it.
    pub(super) fn missing(&self) -> u64 {
        let missing_of = |(index, page): (usize, &Page)| match page {
            Page::Full => 0,
            Page::Empty => self.range_of(index).end - self.range_of(index).start,
            Page::Mixed(words) => Self::lacks(words, &self.range_of(index)),
        };
        self.pages.iter().enumerate().map(missing_of).sum()
    }

    /// The first chunk from `first` on that is not in it.
    pub(super) fn next_missing(&self, first: u64) -> Option<u64> {
        for (index, page) in self.pages.iter().enumerate().skip((first / PAGE) as usize) {
            let left = self.range_of(index).start.max(first)..self.range_of(index).end;
            let found = match page {
                Page::Full => None,
                Page::Empty => Some(left.start).filter(|_| !left.is_empty()),
                Page::Mixed(words) => {
                    words.iter().zip((self.range_of(index)).step_by(64)).find_map(|(word, start)| {
                        let missing = !word & mask(&left, start);
                        (missing != 0).then(|| start + u64::from(missing.trailing_zeros()))
                    })
                }
            };
            if found.is_some() {
                return found;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_what_a_list_of_booleans_says(
            count in prop_oneof![0..10_u64, 4090..4100_u64, 12_000..13_000_u64],
            full in any::<bool>(),
            changes in prop::collection::vec((0..13_000_u64, 0..6_000_u64, any::<bool>()), 0..20),
        ) {
            let mut set = if full { ChunkSet::full(count) } else { ChunkSet::empty(count) };
            let mut model = vec![full; count as usize];
            for (start, len, inserts) in changes {
                let range = start..start + len;
                if inserts { set.insert(range.clone()) } else { set.remove(range.clone()) }
                model.iter_mut().zip(0..).filter(|(_, chunk)| range.contains(chunk)).for_each(|(has, _)| *has = inserts);
                prop_assert_eq!(set.missing(), model.iter().filter(|has| !**has).count() as u64);
            }
            for chunk in 0..count + 5 {
                prop_assert_eq!(set.contains(chunk), model.get(chunk as usize).is_none_or(|has| *has));
            }
            for first in [0, 1, 63, 64, 65, 4095, 4096, 4097, count / 2, count.saturating_sub(1), count, count + 5000] {
                let expected = (first..count).find(|chunk| !model[*chunk as usize]);
                prop_assert_eq!(set.next_missing(first), expected);
            }
        }
    }

    #[test]
    fn what_is_complete_takes_no_words() {
        let mut set = ChunkSet::empty(3 * PAGE + 5);
        (0..set.count).rev().for_each(|chunk| set.insert(chunk..chunk + 1));
        assert!(set.pages.iter().all(|page| matches!(page, Page::Full)));
        assert_eq!((set.missing(), set.next_missing(0)), (0, None));
    }
}
