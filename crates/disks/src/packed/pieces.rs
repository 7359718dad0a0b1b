//! Bytes that lie in pieces of a file: a member of a tar file, of which some have holes and others lie in several members.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Pieces of one member at most.
const MOST: usize = 1 << 20;

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// A run of the bytes, and its place in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    at: u64,
    place: Range,
}

/// Bytes in pieces of a file, in order. Between the pieces are holes, which read as zeroes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Pieces {
    len: u64,
    pieces: Vec<Piece>,
}

impl Pieces {
    /// The bytes of a range of the file.
    pub(crate) fn of(place: Range) -> Self {
        Self { len: place.len, pieces: vec![Piece { at: 0, place }] }
    }

    /// How many bytes there are.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Whether some of them lie nowhere.
    pub(crate) fn has_holes(&self) -> bool {
        self.pieces.iter().map(|piece| piece.place.len).sum::<u64>() < self.len
    }

    /// How many pieces they lie in.
    pub(crate) fn count(&self) -> usize {
        self.pieces.len()
    }

    /// Adds a hole up to `len` bytes in all.
    pub(crate) fn grow_to(&mut self, len: u64) {
        self.len = self.len.max(len);
    }

    /// Adds others behind them. Fails if these are too many.
    pub(crate) fn append(&mut self, others: &Self) -> io::Result<()> {
        let end = self.len.checked_add(others.len);
        let count = self.pieces.len().saturating_add(others.pieces.len());
        let end = end.filter(|_| count <= MOST).ok_or_else(|| {
            let message = format!("it lies in more than {MOST} pieces: unpack it first");
            io::Error::new(io::ErrorKind::InvalidData, message)
        })?;
        let moved = others.pieces.iter().map(|piece| Piece { at: self.len + piece.at, ..*piece });
        self.pieces.extend(moved.filter(|piece| piece.place.len > 0));
        self.len = end;
        Ok(())
    }

    /// A range of them, which must lie within.
    pub(crate) fn part(&self, range: Range) -> Self {
        let end = range.start + range.len;
        let pieces = self.from(range.start).take_while(|piece| piece.at < end).map(|piece| {
            let (from, to) = (piece.at.max(range.start), (piece.at + piece.place.len).min(end));
            let place = Range { start: piece.place.start + (from - piece.at), len: to - from };
            Piece { at: from - range.start, place }
        });
        Self { len: range.len, pieces: pieces.collect() }
    }

    /// The pieces that end behind `at`.
    fn from(&self, at: u64) -> impl Iterator<Item = &Piece> {
        let first = self.pieces.partition_point(|piece| piece.at + piece.place.len <= at);
        self.pieces[first..].iter()
    }

    /// Bytes from `at` on that lie in one piece or in one hole, and whether it is a hole.
    pub(crate) fn run_at(&self, at: u64) -> (u64, bool) {
        match self.from(at).next() {
            Some(piece) if piece.at <= at => (piece.at + piece.place.len - at, false),
            Some(piece) => (piece.at - at, true),
            None => (self.len.saturating_sub(at), true),
        }
    }

    /// Fills `out` with those from `at` on.
    pub(crate) fn read_exact_at(&self, file: &File, mut out: &mut [u8], mut at: u64) -> io::Result<()> {
        if at.checked_add(out.len() as u64).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut pieces = self.from(at).peekable();
        while !out.is_empty() {
            let (len, place) = match pieces.peek() {
                Some(piece) if piece.at <= at => {
                    let within = at - piece.at;
                    (piece.place.len - within, Some(piece.place.start + within))
                }
                Some(piece) => (piece.at - at, None),
                None => (out.len() as u64, None),
            };
            let now = usize::try_from(len).unwrap_or(usize::MAX).min(out.len());
            let (now, rest) = std::mem::take(&mut out).split_at_mut(now);
            if let Some(place) = place {
                file.read_exact_at(now, place)?;
                pieces.next();
            } else {
                now.fill(0);
            }
            at += now.len() as u64;
            out = rest;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn pieces_and_holes_are_read_at_any_place() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let range = |start, len| Range { start, len };
        let mut pieces = Pieces::of(range(8, 2));
        pieces.grow_to(4);
        pieces.append(&Pieces::of(range(0, 0))).unwrap();
        pieces.append(&Pieces::of(range(2, 3))).unwrap();
        pieces.append(&Pieces::of(range(5, 1))).unwrap();
        pieces.grow_to(10);
        let all = b"89\0\x00234\x35\0\0";
        assert!(pieces.has_holes() && pieces.len() == 10);
        for start in 0..=10 {
            for end in start..=10 {
                let mut out = vec![9; end - start];
                pieces.read_exact_at(&file, &mut out, start as u64).unwrap();
                assert_eq!(out, all[start..end], "{start}..{end}");
                let part = pieces.part(range(start as u64, (end - start) as u64));
                out.fill(9);
                part.read_exact_at(&file, &mut out, 0).unwrap();
                assert_eq!(out, all[start..end], "part {start}..{end}");
            }
        }
        assert!(pieces.read_exact_at(&file, &mut [0; 2], 9).is_err());
        let runs = [(0, (2, false)), (1, (1, false)), (2, (2, true)), (4, (3, false)), (8, (2, true))];
        for (at, run) in runs {
            assert_eq!(pieces.run_at(at), run, "{at}");
        }
    }
}
