//! Windows: host space that is set aside for one stream of allocations. Pure bookkeeping, in host clusters; no I/O.
//!
//! The clusters of a window have their refcounts raised already. So handing one out is a matter of memory alone, and what
//! one stream writes lies together.

use crate::qcow2::space::free::{Allocated, SpaceContent};
use std::ops::Range;
use zebu_storage::sabotage::{self, Fault, Limit};

/// A stream of allocations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Guest data that follows what was written last; the guest cluster that comes next.
    Data {
        /// Guest cluster number.
        next_guest_cluster: u64,
    },
    /// Guest data that follows nothing.
    Scattered,
    /// L2 tables and other tables.
    Metadata,
    /// Streams of compressed clusters, packed one behind the other.
    Compressed,
}

/// Space set aside for one stream; the refcounts of its clusters are raised already.
#[derive(Debug)]
pub(crate) struct Window {
    stream: Stream,
    /// The first host cluster that it had.
    first: u64,
    /// The rest.
    range: Range<u64>,
    content: SpaceContent,
    /// Clusters of the next window of this stream.
    next_size: u64,
    last_used: u64,
}

/// Windows of sequential streams at most: as many stay contiguous at once.
const MAX_DATA_WINDOWS: usize = 8;
/// Ends of scattered allocations that are remembered: what goes on at one of them is a stream.
const RECENT_ENDS: usize = 32;
/// Guest clusters by which a request may be ahead of its stream, or behind: those of a queue don't come in order.
const NEAR_STREAM: u64 = 64;
/// The same for one that may begin a stream.
const NEAR_END: u64 = 4;

/// All windows.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    windows: Vec<Window>,
    clock: u64,
    /// A ring, and the place in it that is written next.
    recent_ends: Vec<u64>,
    next_end: usize,
}

impl Windows {
    /// Hands out up to `count` clusters that follow each other, for guest data from `guest_cluster` on. `None`: the
    /// stream ([`Windows::stream_of`]) needs a new window.
    pub(crate) fn take_data(&mut self, guest_cluster: u64, count: u64) -> Option<Allocated> {
        let stream = self.stream_of(guest_cluster);
        self.clock += 1;
        let clock = self.clock;
        // A stream that catches up with another has two windows.
        let window = self.windows.iter_mut().find(|w| w.stream == stream && !w.range.is_empty())?;
        let allocated = cut(window, count)?;
        window.last_used = clock;
        let end = guest_cluster + (allocated.range.end - allocated.range.start);
        match &mut window.stream {
            Stream::Data { next_guest_cluster } => *next_guest_cluster = end.max(*next_guest_cluster),
            _ => self.remember(end),
        }
        Some(allocated)
    }

    /// The stream that guest data from `guest_cluster` on belongs to: one that has a window, or one that begins because
    /// it goes on where a scattered allocation ended.
    pub(crate) fn stream_of(&self, guest_cluster: u64) -> Stream {
        let known = self.windows.iter().filter_map(|w| match w.stream {
            Stream::Data { next_guest_cluster } => {
                Some((next_guest_cluster.abs_diff(guest_cluster), w.stream))
            }
            _ => None,
        });
        if let Some((_, stream)) = known.filter(|(by, _)| *by < NEAR_STREAM).min_by_key(|(by, _)| *by) {
            return stream;
        }
        if self.recent_ends.iter().any(|end| end.abs_diff(guest_cluster) < NEAR_END) {
            return Stream::Data { next_guest_cluster: guest_cluster };
        }
        Stream::Scattered
    }

    fn remember(&mut self, end: u64) {
        match self.recent_ends.get_mut(self.next_end) {
            Some(oldest) => *oldest = end,
            None => self.recent_ends.push(end),
        }
        let most = sabotage::at_most(Limit::RecentEnds, RECENT_ENDS as u64);
        self.next_end = (self.next_end + 1) % most as usize;
    }

    /// Whether `count` clusters in a row are left for `stream`.
    pub(crate) fn has(&self, stream: Stream, count: u64) -> bool {
        self.windows.iter().any(|w| w.stream == stream && w.range.end - w.range.start >= count)
    }

    /// Hands out up to `count` clusters that follow each other, for streams. `None`: a new window is needed.
    pub(crate) fn take_compressed(&mut self, count: u64) -> Option<Allocated> {
        let window = self.windows.iter_mut().find(|w| w.stream == Stream::Compressed)?;
        cut(window, count)
    }

    /// Hands out exactly `count` clusters for tables.
    pub(crate) fn take_metadata(&mut self, count: u64) -> Option<Allocated> {
        let window = self
            .windows
            .iter_mut()
            .find(|w| w.stream == Stream::Metadata && w.range.end - w.range.start >= count)?;
        cut(window, count)
    }

    /// Clusters that the next window of a stream should have.
    pub(crate) fn next_size(&self, stream: Stream, start: u64) -> u64 {
        self.windows.iter().find(|w| w.stream == stream).map_or(start, |w| w.next_size)
    }

    /// The first host cluster of the window that `stream` has, used up or not, and what it held.
    pub(crate) fn first_of(&self, stream: Stream) -> Option<(u64, SpaceContent)> {
        self.windows.iter().find(|w| w.stream == stream).map(|w| (w.first, w.content))
    }

    /// Sets a new window up for `stream`; gives back what is left of the window it replaces, to be freed.
    pub(crate) fn install(&mut self, stream: Stream, space: Allocated, max: u64) -> Option<Allocated> {
        self.clock += 1;
        let len = space.range.end - space.range.start;
        // A short run, the rest of something, is no reason to begin again with small ones.
        let next_size = (len * 2).max(self.next_size(stream, 1)).min(max).max(1);
        let window = Window {
            stream,
            first: space.range.start,
            range: space.range,
            content: space.content,
            next_size,
            last_used: self.clock,
        };
        let same_stream = self.windows.iter().position(|w| w.stream == stream);
        let replaced = match stream {
            Stream::Scattered | Stream::Metadata | Stream::Compressed => same_stream,
            Stream::Data { .. } => same_stream.or_else(|| {
                let is_data = |w: &Window| matches!(w.stream, Stream::Data { .. });
                let data = self.windows.iter().enumerate().filter(|(_, w)| is_data(w));
                let most = sabotage::at_most(Limit::DataWindows, MAX_DATA_WINDOWS as u64);
                if (data.clone().count() as u64) < most {
                    return None;
                }
                data.min_by_key(|(_, w)| w.last_used).map(|(index, _)| index)
            }),
        };
        if let Some(slot) = replaced.and_then(|index| self.windows.get_mut(index)) {
            let old = std::mem::replace(slot, window);
            (!old.range.is_empty()).then_some(Allocated { range: old.range, content: old.content })
        } else {
            self.windows.push(window);
            None
        }
    }

    /// Takes everything back from all windows (before out-of-space is given, and at close).
    pub(crate) fn drain(&mut self) -> Vec<Allocated> {
        self.windows
            .drain(..)
            .filter(|w| !w.range.is_empty())
            .map(|w| Allocated { range: w.range, content: w.content })
            .collect()
    }

    /// Gives `min` to `count` clusters out of any window (out of space otherwise).
    pub(crate) fn take_any(&mut self, count: u64, min: u64) -> Option<Allocated> {
        let window = self.windows.iter_mut().find(|w| w.range.end - w.range.start >= min.max(1))?;
        cut(window, count)
    }
}

fn cut(window: &mut Window, count: u64) -> Option<Allocated> {
    let start = window.range.start;
    let end = window.range.end.min(start + count);
    if start == end {
        return None;
    }
    window.range.start = end - u64::from(sabotage::is(Fault::WindowOffByOne));
    Some(Allocated { range: start..end, content: window.content })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocates for `guest` as the engine does. Host clusters are taken in the order in which windows ask for them.
    fn allocate(windows: &mut Windows, end: &mut u64, guest: u64) -> u64 {
        allocate_many(windows, end, guest, 1).start
    }

    fn allocate_many(windows: &mut Windows, end: &mut u64, guest: u64, count: u64) -> Range<u64> {
        loop {
            if let Some(allocated) = windows.take_data(guest, count) {
                return allocated.range;
            }
            let stream = windows.stream_of(guest);
            assert!(!windows.has(stream, 1), "nobody would make a window");
            let size = windows.next_size(stream, 1);
            let range = *end..*end + size;
            *end += size;
            windows.install(stream, Allocated { range, content: SpaceContent::Fresh }, 64);
            assert!(windows.has(stream, 1));
        }
    }

    #[test]
    fn sequential_streams_in_turn_stay_contiguous_each() {
        for streams in [1u64, 2, 4, 8] {
            let (mut windows, mut end) = (Windows::default(), 100);
            let mut last = vec![None; streams as usize];
            let mut breaks = 0;
            for step in 0..500 {
                for (stream, last) in (0..).zip(&mut last) {
                    let host = allocate(&mut windows, &mut end, stream * 10_000 + step);
                    if *last != Some(host - 1) {
                        breaks += 1;
                    }
                    *last = Some(host);
                }
            }
            // Windows of 1, 2, 4 .. 64 clusters, then seven more of 64: fourteen, and what came before it was a stream.
            assert!(breaks <= 16 * streams, "{streams} streams: {breaks} breaks");
        }
    }

    #[test]
    fn a_stream_whose_requests_overtake_each_other_stays_in_its_windows() {
        let (mut windows, mut end) = (Windows::default(), 0);
        let order = (0..1000u64).map(|step| if step % 2 == 0 { step + 1 } else { step - 1 });
        for guest in order {
            allocate(&mut windows, &mut end, guest);
            // Scattered requests beside it.
            allocate(&mut windows, &mut end, 1_000_000 + (guest * 7919) % 100_000 * 64);
        }
        let data = windows.windows.iter().filter(|w| matches!(w.stream, Stream::Data { .. })).count();
        assert!(data <= 2, "{data} windows");
    }

    /// Both expect the same guest cluster next. What one of them has left is found when the other has nothing.
    #[test]
    fn a_stream_that_catches_up_with_another_uses_the_windows_of_both() {
        let mut windows = Windows::default();
        let window =
            |start: u64, count: u64| Allocated { range: start..start + count, content: SpaceContent::Fresh };
        windows.install(Stream::Data { next_guest_cluster: 1000 }, window(0, 10), 64);
        windows.install(Stream::Data { next_guest_cluster: 1100 }, window(500, 10), 64);
        for guest in (1000..1010).chain(1100..1101) {
            windows.take_data(guest, 1).expect("there is some");
        }
        // The first one is used up; its stream gets another window of exactly what brings it to 1101.
        windows.install(Stream::Data { next_guest_cluster: 1010 }, window(100, 91), 64);
        assert!(windows.take_data(1010, 91).is_some());
        let mut found = Vec::new();
        while let Some(allocated) = windows.take_data(1101 + found.len() as u64, 1) {
            found.push(allocated.range.start);
        }
        assert!(!windows.has(windows.stream_of(1101 + found.len() as u64), 1), "else nobody makes a new one");
        assert_eq!(found, (501..510).collect::<Vec<u64>>());
    }

    #[test]
    fn streams_that_cross_each_other_always_find_room() {
        let (mut windows, mut end) = (Windows::default(), 0);
        let mut next = [0u64, 3, 70, 130, 200, 1000, 1010, 5000, 5070, 9000];
        for step in 0..100_000u64 {
            let random = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            let at = &mut next[random as usize % 10];
            if random / 10 % 64 == 0 {
                *at = at.saturating_sub(60);
            }
            *at += allocate_many(&mut windows, &mut end, *at, random / 640 % 8 + 1).count() as u64;
        }
    }

    #[test]
    fn the_last_ends_of_scattered_requests_are_known_and_no_more() {
        let mut windows = Windows::default();
        let end = |number: u64| number * 1000;
        for number in 0..100 {
            windows.remember(end(number));
        }
        assert_eq!(windows.recent_ends.len(), RECENT_ENDS);
        let known = |number| matches!(windows.stream_of(end(number)), Stream::Data { .. });
        let known: Vec<u64> = (0..100).filter(|number| known(*number)).collect();
        assert!(known.into_iter().eq(100 - RECENT_ENDS as u64..100));
    }

    #[test]
    fn scattered_requests_share_a_window() {
        let (mut windows, mut end) = (Windows::default(), 0);
        for step in 0..1000u64 {
            let host = allocate(&mut windows, &mut end, (step * 7919) % 100_000 * 64);
            assert_eq!(host, step, "one behind the other");
        }
    }
}
