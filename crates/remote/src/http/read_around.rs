//! How much is fetched around a small read, by what turns out to be useful.
//!
//! Where neighbours of a read are read soon, one long fetch is faster than several short ones. Where reads come from all
//! over an object that the cache can't hold, what was fetched around them goes unused, and takes the line from others.

/// Bytes at first.
const FIRST: u64 = 64 << 10;
/// The most bytes.
const MOST: u64 = 256 << 10;
/// Blocks between two decisions.
const ROUND: u32 = 64;
/// One read of so many gets twice as much, so that a change is noticed.
const PROBE: u32 = 16;

/// The bytes that are fetched around small reads.
pub(super) struct ReadAround {
    /// The choice of the caller.
    fixed: Option<u64>,
    /// A block of the cache.
    least: u64,
    bytes: u64,
    reads: u32,
    /// Blocks of this round that nobody had asked for: that were read later, and that had to go unread.
    used: u32,
    wasted: u32,
}

impl ReadAround {
    /// `fixed` bytes, or as many as are useful, but `least`.
    pub(super) fn new(fixed: Option<u64>, least: u64) -> Self {
        Self { fixed, least, bytes: FIRST, reads: 0, used: 0, wasted: 0 }
    }

    /// Bytes for one more read.
    pub(super) fn next(&mut self) -> u64 {
        if let Some(fixed) = self.fixed {
            return fixed.max(1);
        }
        self.reads = self.reads.wrapping_add(1);
        if self.reads.is_multiple_of(PROBE) { (self.bytes * 2).min(MOST) } else { self.bytes }
    }

    /// A block that nobody had asked for is read.
    pub(super) fn note_used(&mut self) {
        self.used += 1;
        self.decide();
    }

    /// A block that nobody has asked for has to go.
    pub(super) fn note_wasted(&mut self) {
        self.wasted += 1;
        self.decide();
    }

    fn decide(&mut self) {
        if self.used + self.wasted < ROUND {
            return;
        }
        // A block costs less than a turn to the server. It may be read once in four times to be worth it.
        if self.wasted > self.used * 3 {
            self.bytes = (self.bytes / 2).max(self.least);
        } else if self.used > self.wasted {
            self.bytes = (self.bytes * 2).min(MOST);
        }
        (self.used, self.wasted) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 16 << 10;

    #[test]
    fn the_bytes_follow_what_is_useful() {
        let mut around = ReadAround::new(None, BLOCK);
        let usual = |around: &mut ReadAround| around.next().min(around.next());
        assert_eq!(usual(&mut around), FIRST);
        for _ in 0..10 * ROUND {
            around.note_wasted();
        }
        assert_eq!(usual(&mut around), BLOCK);
        let most = (0..PROBE).map(|_| around.next()).max();
        assert_eq!(most, Some(2 * BLOCK), "some reads try more");
        for _ in 0..10 * ROUND {
            around.note_used();
        }
        assert_eq!(usual(&mut around), MOST);
        for turn in 0..10 * ROUND {
            if turn % 3 == 0 { around.note_used() } else { around.note_wasted() }
        }
        assert_eq!(usual(&mut around), MOST, "one in three is worth it");
    }

    #[test]
    fn the_callers_choice_stays() {
        let mut around = ReadAround::new(Some(4096), BLOCK);
        for _ in 0..10 * ROUND {
            around.note_used();
        }
        assert!((0..100).all(|_| around.next() == 4096));
    }
}
