//! Readers that go forward: who they are, and how far ahead of them is read.

use std::ops::Range;

/// Readers that are remembered.
const READERS: usize = 8;

/// The place of a read's bytes before the read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// All of them are on this machine.
    Here,
    /// Some have to be fetched, or are on their way.
    Away,
}

/// Readers that go forward.
pub(crate) struct Streaks {
    readers: [Streak; READERS],
    time: u64,
    /// The most bytes ahead of a reader.
    most: u64,
}

/// One reader.
#[derive(Debug, Clone, Copy, Default)]
struct Streak {
    /// Where its next read begins if it goes forward.
    next: u64,
    /// A read of it had to wait for the network. Until then, nothing is fetched ahead: it may want only what is here.
    has_waited: bool,
    /// Bytes ahead of it that are to be there; 0 before its second read.
    window: u64,
    /// The end of the range that was fetched for it.
    ahead: u64,
    used: u64,
}

impl Streaks {
    pub(crate) fn new(most: u64) -> Self {
        Self { readers: [Streak::default(); READERS], time: 0, most }
    }

    /// Notes a read; what to fetch ahead of its reader.
    pub(crate) fn note(&mut self, read: &Range<u64>, found: Found) -> Option<Range<u64>> {
        self.time += 1;
        let len = read.end - read.start;
        let known = self.readers.iter_mut().find(|reader| reader.used > 0 && reader.next == read.start);
        let Some(reader) = known else {
            let oldest = self.readers.iter_mut().min_by_key(|reader| reader.used)?;
            let has_waited = found == Found::Away;
            *oldest = Streak { next: read.end, has_waited, window: 0, ahead: read.end, used: self.time };
            return None;
        };
        reader.used = self.time;
        reader.next = read.end;
        reader.has_waited |= found == Found::Away;
        if !reader.has_waited {
            return None;
        }
        reader.window = (reader.window * 2).max(len * 4).min(self.most);
        let wanted = read.end + reader.window;
        // Half of it at a time, in long fetches.
        if reader.ahead >= read.end + reader.window / 2 {
            return None;
        }
        let from = reader.ahead.max(read.end);
        reader.ahead = wanted;
        Some(from..wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_goes_forward_gets_more_and_more() {
        let mut streaks = Streaks::new(1 << 20);
        let mut fetched = 0..0;
        for read in 0..1000u64 {
            let range = read * 4096..(read + 1) * 4096;
            match streaks.note(&range, Found::Away) {
                None => assert!(read == 0 || fetched.end > range.end, "{read}"),
                Some(ahead) => {
                    assert!(ahead.start == fetched.end.max(range.end) && ahead.end <= range.end + (1 << 20));
                    fetched = ahead;
                }
            }
        }
        assert!(fetched.end > (4 << 20));
        // Others in between, here and there, get nothing.
        for other in 0..100u64 {
            let offset = 1 << 30 | (other * 7919 % 1000 * 65536);
            assert_eq!(streaks.note(&(offset..offset + 4096), Found::Away), None);
        }
    }

    #[test]
    fn who_has_all_here_gets_nothing_until_it_waits() {
        let mut streaks = Streaks::new(1 << 20);
        let range = |read: u64| read * 4096..(read + 1) * 4096;
        for read in 0..100 {
            assert_eq!(streaks.note(&range(read), Found::Here), None);
        }
        assert_eq!(streaks.note(&range(100), Found::Away), Some(101 * 4096..105 * 4096));
        // What was fetched ahead is here when it is read, and the reader still gets more.
        assert!((101..105).any(|read| streaks.note(&range(read), Found::Here).is_some()));
    }
}
