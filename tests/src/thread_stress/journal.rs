//! The journal of one thread: what it began and what ended, in a file that outlives the process.
//!
//! A request is in the journal before it is handed to the engine, and its end is after it was acknowledged. What a kill
//! cuts off is therefore a request that was never made, or an acknowledgement that counts as not given.

use super::sector::{SECTOR, Seen};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes a value.
    Write,
    /// Writes a value that is durable when this ends.
    DurableWrite,
    /// Writes zeroes.
    Zero,
    /// Gives sectors up; whole clusters read as zero then.
    Discard,
    /// Makes durable what ended before.
    Flush,
    /// Cuts off what follows the first sector, or adds zeroes there.
    Resize,
    /// Takes the snapshot of this number: looks at all sectors at one moment, and makes them durable.
    TakeSnapshot,
    /// Goes back to the snapshot of this number.
    ApplySnapshot,
    /// Something that no sector shows.
    Other,
}

impl Kind {
    const ALL: [Kind; 10] = [
        Kind::Read,
        Kind::Write,
        Kind::DurableWrite,
        Kind::Zero,
        Kind::Discard,
        Kind::Flush,
        Kind::Resize,
        Kind::TakeSnapshot,
        Kind::ApplySnapshot,
        Kind::Other,
    ];
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// As it should.
    Done,
    /// With an error that is no fault: it reached past an end that moves. It may have been done, in part.
    Refused,
}

/// A request that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begin {
    /// Which one of the thread.
    pub number: u64,
    /// When it began.
    pub clock: u64,
    /// Its kind.
    pub kind: Kind,
    /// The first sector.
    pub first: u64,
    /// Sectors.
    pub count: u64,
    /// The value that is written, or the number of the snapshot.
    pub value: u64,
}

/// An entry of the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A request begins.
    Begin(Begin),
    /// A request has ended.
    End {
        /// Which one of the thread.
        number: u64,
        /// When it had ended.
        clock: u64,
        /// How.
        outcome: Outcome,
        /// The values that it saw, sector by sector.
        seen: Vec<Seen>,
    },
    /// The thread has nothing left to do.
    Over,
}

const MAGIC: u64 = 0x7a65_6275_6a6f;
const WORDS: usize = 8;
const TORN: u64 = u64::MAX;

fn pack(words: [u64; WORDS]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Runs of the same value as two words each; a torn sector as such, and its bytes.
fn pack_seen(seen: &[Seen]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < seen.len() {
        let run = seen[at..].iter().take_while(|next| **next == seen[at]).count();
        match &seen[at] {
            Seen::Value(value) => {
                bytes.extend((run as u64).to_le_bytes());
                bytes.extend(value.to_le_bytes());
                at += run;
            }
            Seen::Torn(content) => {
                bytes.extend(TORN.to_le_bytes());
                bytes.extend(content.as_slice());
                at += 1;
            }
        }
    }
    bytes
}

fn word(bytes: &[u8], index: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(index * 8..index * 8 + 8)?.try_into().ok()?))
}

fn unpack_seen(mut bytes: &[u8]) -> Option<Vec<Seen>> {
    let mut seen = Vec::new();
    while !bytes.is_empty() {
        let count = word(bytes, 0)?;
        if count == TORN {
            seen.push(Seen::Torn(Box::new(bytes.get(8..8 + SECTOR)?.try_into().ok()?)));
            bytes = &bytes[8 + SECTOR..];
        } else {
            let value = word(bytes, 1)?;
            seen.extend((0..count).map(|_| Seen::Value(value)));
            bytes = &bytes[16..];
        }
    }
    Some(seen)
}

impl Entry {
    fn pack(&self) -> Vec<u8> {
        match self {
            Entry::Begin(Begin { number, clock, kind, first, count, value }) => {
                pack([MAGIC, 0, *number, *clock, *kind as u64, *first, *count, *value])
            }
            Entry::End { number, clock, outcome, seen } => {
                let payload = pack_seen(seen);
                let is_done = u64::from(*outcome == Outcome::Done);
                let mut bytes = pack([MAGIC, 1, *number, *clock, is_done, payload.len() as u64, 0, 0]);
                bytes.extend(payload);
                bytes
            }
            Entry::Over => pack([MAGIC, 2, 0, 0, 0, 0, 0, 0]),
        }
    }

    /// The first entry, and how long it is; `None` if it is not there as a whole.
    fn unpack(bytes: &[u8]) -> Option<(Self, usize)> {
        let header = WORDS * 8;
        if word(bytes, 0)? != MAGIC || bytes.len() < header {
            return None;
        }
        let at = |index| word(bytes, index);
        match at(1)? {
            0 => {
                let kind = *Kind::ALL.get(at(4)? as usize)?;
                let (number, clock) = (at(2)?, at(3)?);
                let begin = Begin { number, clock, kind, first: at(5)?, count: at(6)?, value: at(7)? };
                Some((Entry::Begin(begin), header))
            }
            1 => {
                let end = header + at(5)? as usize;
                let seen = unpack_seen(bytes.get(header..end)?)?;
                let outcome = if at(4)? == 1 { Outcome::Done } else { Outcome::Refused };
                Some((Entry::End { number: at(2)?, clock: at(3)?, outcome, seen }, end))
            }
            2 => Some((Entry::Over, header)),
            _ => None,
        }
    }
}

/// The writing end.
#[derive(Debug)]
pub struct Journal {
    file: File,
}

impl Journal {
    /// Opens the journal of a thread, which goes on where it ends.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Self { file })
    }

    /// Adds an entry. It outlives a kill from here on.
    ///
    /// # Panics
    /// If the file can't be written.
    pub fn add(&mut self, entry: &Entry) {
        self.file.write_all(&entry.pack()).expect("the journal can be written");
    }
}

/// Whether a thread has written that it has nothing left to do.
pub fn is_over(path: &Path) -> bool {
    let last = Entry::Over.pack();
    let read = || {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::End(-(last.len() as i64)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        io::Result::Ok(bytes)
    };
    read().is_ok_and(|bytes| bytes == last)
}

/// All whole entries of a journal. None if it was not begun.
pub fn read(path: &Path) -> io::Result<Vec<Entry>> {
    let bytes = match std::fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other?,
    };
    let mut entries = Vec::new();
    let mut at = 0;
    while let Some((entry, len)) = Entry::unpack(&bytes[at..]) {
        entries.push(entry);
        at += len;
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn what_was_cut_off_is_left_out() {
        let scratch = Scratch::new("journal");
        let path = scratch.file("0.journal");
        let begin = Begin { number: 4, clock: 9, kind: Kind::Discard, first: 3, count: 5, value: 7 };
        let torn = Seen::Torn(Box::new([3; SECTOR]));
        let seen = vec![Seen::Value(1), Seen::Value(1), torn.clone(), torn, Seen::Value(0)];
        let entries = [
            Entry::Begin(begin),
            Entry::End { number: 4, clock: 12, outcome: Outcome::Refused, seen },
            Entry::Over,
        ];
        let mut journal = Journal::open(&path).expect("opened");
        assert!(!is_over(&path));
        for entry in &entries {
            journal.add(entry);
        }
        assert_eq!(read(&path).expect("read"), entries);
        assert!(is_over(&path));
        let whole = std::fs::read(&path).expect("read");
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).expect("written");
            let found = read(&path).expect("read");
            assert!(found.len() < 3 && found == entries[..found.len()]);
        }
    }
}
