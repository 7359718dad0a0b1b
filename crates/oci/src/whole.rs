//! A blob without hashes: its digest is compared once all of it was read by ranges, in whatever order.

use crate::digest::{Digest, Hasher};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use zebu_storage::sync::Mutex;

/// Blocks whose hashes are noted at most.
const MOST_BLOCKS: u64 = 1 << 18;
const LEAST_BLOCK: u64 = 64 << 10;
/// Bytes that are kept because those before them have not come.
const AHEAD: u64 = 32 << 20;
/// Bytes that are asked for at once where nobody else asks for them.
const PIECE: u64 = 1 << 20;

/// How much of a blob its readers will want.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readers {
    /// Some of it, as a guest asks for it.
    #[default]
    Some,
    /// All of it, mostly in order: what they leave out is read beside them, so that its digest is known in the end.
    All,
}

/// Work that the digest of all needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Filling {
    /// A range holds up what comes behind it.
    Range(Range<u64>),
    /// All was read, in such an order that some has to be read again.
    Rest,
}

/// The digest that a blob must have, and notes on what was read of it.
///
/// The bytes that somebody got are those that are compared: each block's own hash is noted when it is read first, and a
/// block that is read again must be the same.
pub(crate) struct Whole {
    digest: Digest,
    len: u64,
    block: u64,
    readers: Readers,
    state: Mutex<State>,
}

struct State {
    /// The hashes of blocks that were read.
    noted: HashMap<u64, [u8; 32]>,
    /// All before `front` together; `None` after the end.
    hasher: Option<Hasher>,
    front: u64,
    /// Blocks behind it.
    ahead: BTreeMap<u64, Box<[u8]>>,
    ahead_bytes: u64,
    is_filling: bool,
    wrong: Option<String>,
}

impl Whole {
    /// For a blob of `len` bytes.
    pub(crate) fn new(digest: Digest, len: u64, readers: Readers) -> Self {
        let block = len.div_ceil(MOST_BLOCKS).next_power_of_two().max(LEAST_BLOCK);
        let state = State {
            noted: HashMap::new(),
            hasher: Some(digest.hasher()),
            front: 0,
            ahead: BTreeMap::new(),
            ahead_bytes: 0,
            is_filling: false,
            wrong: None,
        };
        Self { digest, len, block, readers, state: Mutex::new(state) }
    }

    /// Bytes of a block.
    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    /// Takes blocks that were read, whose bytes begin at `offset`; the reason if they are wrong.
    pub(crate) fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        for (start, bytes) in (offset..).step_by(self.block as usize).zip(bytes.chunks(self.block as usize)) {
            let own: [u8; 32] = Sha256::digest(bytes).into();
            let mut state = self.state.lock();
            if let Some(wrong) = &state.wrong {
                return Err(wrong.clone());
            }
            if *state.noted.entry(start).or_insert(own) != own {
                return Err(format!(
                    "the block at {start} of blob {} is not what it was when it was read first",
                    self.digest
                ));
            }
            state.put(start, bytes);
            if state.front == self.len
                && let Some(hasher) = state.hasher.take()
            {
                let found = hasher.finish();
                if found != self.digest {
                    let wrong = format!(
                        "all of blob {} was read, and it has another digest, {found}: reads of it fail from now on",
                        self.digest
                    );
                    state.wrong = Some(wrong.clone());
                    return Err(wrong);
                }
            }
        }
        Ok(())
    }

    /// Work that nobody asked for and that the digest needs, if it is time for that. [`Whole::end_filling`] says that a range
    /// was read.
    pub(crate) fn begin_filling(&self) -> Option<Filling> {
        let mut state = self.state.lock();
        if state.is_filling || state.hasher.is_none() {
            return None;
        }
        let filling = match self.readers {
            Readers::All if state.ahead_bytes > AHEAD / 2 => Filling::Range(self.missing(&state)?),
            Readers::Some if state.noted.len() as u64 == self.len.div_ceil(self.block) => Filling::Rest,
            _ => return None,
        };
        state.is_filling = true;
        Some(filling)
    }

    pub(crate) fn end_filling(&self) {
        self.state.lock().is_filling = false;
    }

    /// The next range that the digest lacks; `None` if it has all.
    pub(crate) fn next_missing(&self) -> Option<Range<u64>> {
        self.missing(&self.state.lock())
    }

    fn missing(&self, state: &State) -> Option<Range<u64>> {
        let until = state.ahead.keys().next().copied().unwrap_or(self.len);
        let end = until.min(state.front.saturating_add(PIECE.max(self.block)));
        (state.hasher.is_some() && state.front < end).then_some(state.front..end)
    }

    /// Bytes whose digest is known.
    pub(crate) fn front(&self) -> u64 {
        self.state.lock().front
    }

    /// Why reads fail.
    pub(crate) fn wrong(&self) -> Option<String> {
        self.state.lock().wrong.clone()
    }
}

impl State {
    /// Hashes a block if all before it were, and what waited for it; else it waits, where there is room.
    fn put(&mut self, start: u64, bytes: &[u8]) {
        let Some(hasher) = &mut self.hasher else { return };
        if start > self.front {
            if self.ahead_bytes + bytes.len() as u64 <= AHEAD && !self.ahead.contains_key(&start) {
                self.ahead_bytes += bytes.len() as u64;
                self.ahead.insert(start, bytes.into());
            }
            return;
        }
        if start == self.front {
            hasher.update(bytes);
            self.front += bytes.len() as u64;
        }
        while let Some(next) = self.ahead.first_entry().filter(|next| *next.key() <= self.front) {
            let (at, bytes) = next.remove_entry();
            self.ahead_bytes -= bytes.len() as u64;
            if at == self.front {
                hasher.update(&bytes);
                self.front += bytes.len() as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = LEAST_BLOCK as usize;

    fn bytes() -> Vec<u8> {
        (0..100_001u32).flat_map(|n| (n / 3).to_le_bytes()).collect()
    }

    #[test]
    fn the_digest_of_all_is_compared_in_whatever_order_it_comes() {
        let bytes = bytes();
        let len = bytes.len() as u64;
        let mut wrong = bytes.clone();
        wrong[70_000] ^= 1;
        for order in [[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [3, 0, 1, 6, 2, 2, 5]] {
            let whole = Whole::new(Digest::of(&bytes), len, Readers::Some);
            let liar = Whole::new(Digest::of(&bytes), len, Readers::Some);
            let mut told = Ok(());
            for index in order.into_iter().chain([4]) {
                let piece = index * BLOCK..bytes.len().min((index + 1) * BLOCK);
                whole.take(piece.start as u64, &bytes[piece.clone()]).unwrap();
                told = told.and(liar.take(piece.start as u64, &wrong[piece]));
            }
            assert_eq!((whole.front(), whole.next_missing()), (len, None));
            assert!(told.unwrap_err().contains("another digest"));
            assert!(liar.take(0, &bytes[..BLOCK]).is_err() && liar.wrong().is_some());
        }
    }

    #[test]
    fn a_block_that_changes_is_told_and_gaps_are_named() {
        let bytes = bytes();
        let whole = Whole::new(Digest::of(&bytes), bytes.len() as u64, Readers::Some);
        whole.take(BLOCK as u64, &bytes[BLOCK..2 * BLOCK]).unwrap();
        assert_eq!(whole.next_missing(), Some(0..LEAST_BLOCK));
        assert_eq!(whole.begin_filling(), None);
        assert!(whole.take(BLOCK as u64, &bytes[..BLOCK]).unwrap_err().contains("65536"));
        let large = Whole::new(Digest::of(b""), 300 << 20, Readers::All);
        for start in (LEAST_BLOCK..18 << 20).step_by(BLOCK) {
            large.take(start, &bytes[..BLOCK]).unwrap();
        }
        assert_eq!(large.begin_filling(), Some(Filling::Range(0..LEAST_BLOCK)));
        assert_eq!(large.begin_filling(), None);
        // What waits is bounded.
        for start in (LEAST_BLOCK..300 << 20).step_by(BLOCK) {
            large.take(start, &bytes[..BLOCK]).unwrap();
        }
        assert!(large.state.lock().ahead_bytes <= AHEAD);
    }
}
