//! The bytes of a packed file from the start on, with a look at its end: is it what it was taken for?

use super::decode::Packing;
use super::pieces::Pieces;
use super::range_reader::RangeReader;
use crate::notices::{Notice, Notices};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use zebu_engine::jobs::Cancel;
use zebu_engine::looks_raw;

/// Bytes at the end by which some formats are known.
const TAIL: usize = 512;
/// Packed bytes that are read at once.
const INPUT: usize = 256 << 10;

/// A packed file, or a part of a file.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) file: Arc<File>,
    pub(super) bytes: Arc<Pieces>,
    pub(super) packing: Packing,
    /// Ends every read of it, also where nothing comes out.
    pub(super) cancel: Cancel,
    pub(super) tail: Tail,
}

/// A warning of what lies behind the packed bytes, which is told once.
#[derive(Debug, Clone)]
pub(super) struct Tail {
    /// The file as the user named it.
    file: PathBuf,
    notices: Notices,
    is_told: Arc<AtomicBool>,
}

impl Tail {
    pub(super) fn of(notices: Notices, file: PathBuf) -> Self {
        Self { file, notices, is_told: Arc::default() }
    }

    fn tell(&self) {
        if !self.is_told.swap(true, Ordering::Relaxed) {
            self.notices.say(Notice::Fact(&format!(
                "warning: '{}': other data follows the gzip data; it is ignored, as gunzip does",
                self.file.display()
            )));
        }
    }
}

/// The reason why a packed file can't be read in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// It can't be read, or is damaged, or is too large; in words.
    Told(String),
    /// The content must be read at any place.
    NeedsPlaces,
    /// The command was told to end.
    Cancelled,
}

impl Source {
    /// The first bytes of what is in it, at most `most`.
    pub(super) fn first_bytes(&self, most: u64) -> io::Result<Vec<u8>> {
        let mut first = Vec::new();
        self.decoder(Arc::default())?.take(most).read_to_end(&mut first)?;
        Ok(first)
    }

    /// `read` counts the packed bytes that were read.
    pub(super) fn decoder(&self, read: Arc<AtomicU64>) -> io::Result<Box<dyn Read>> {
        let input = RangeReader::new(Arc::clone(&self.file), Arc::clone(&self.bytes));
        let input = Counted { input, read, cancel: self.cancel.clone() };
        let tail = self.tail.clone();
        self.packing.decoder(BufReader::with_capacity(INPUT, input), move || tail.tell())
    }

    fn damaged(&self, error: &io::Error) -> Fault {
        if self.cancel.is_cancelled() {
            return Fault::Cancelled;
        }
        Fault::Told(format!("can't unpack the {} file: {error}", self.packing.name()))
    }
}

struct Counted<R> {
    input: R,
    read: Arc<AtomicU64>,
    cancel: Cancel,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other("given up"));
        }
        let read = self.input.read(out)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// How long the unpacked bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Length {
    /// As the packed file says.
    Known(u64),
    /// At most so long; and what to say if there is more.
    AtMost(u64, String),
}

impl Length {
    pub(super) fn most(&self) -> u64 {
        match self {
            Self::Known(len) | Self::AtMost(len, _) => *len,
        }
    }
}

/// A pass over the unpacked bytes.
pub(super) struct Decoding {
    source: Source,
    length: Length,
    decoder: Box<dyn Read>,
    read: Arc<AtomicU64>,
    position: u64,
    /// The last bytes that were unpacked.
    tail: Vec<u8>,
    end: Option<u64>,
}

impl Decoding {
    /// A pass from the start on.
    pub(super) fn new(source: &Source, length: Length) -> Result<Self, Fault> {
        let read = Arc::<AtomicU64>::default();
        let decoder = source.decoder(Arc::clone(&read)).map_err(|error| source.damaged(&error))?;
        let source = source.clone();
        Ok(Self { source, length, decoder, read, position: 0, tail: Vec::new(), end: None })
    }

    /// Bytes that were unpacked.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Bytes that there are, once the end was reached and everything at it was right.
    pub(super) fn end(&self) -> Option<u64> {
        self.end
    }

    /// Bytes that there are likely to be, if the rest is packed as what was read.
    pub(super) fn likely_end(&self) -> u64 {
        let read = u128::from(self.read.load(Ordering::Relaxed).max(1));
        let likely = u128::from(self.position) * u128::from(self.source.bytes.len()) / read;
        u64::try_from(likely).unwrap_or(u64::MAX).min(self.length.most())
    }

    /// Fills `out`, unless the end comes before. Returns how many bytes there were. What reaches up to the length, or past the
    /// end, is given only once all of the packed file is known to be right.
    pub(super) fn fill(&mut self, out: &mut [u8]) -> Result<usize, Fault> {
        let left = usize::try_from(self.length.most() - self.position).unwrap_or(usize::MAX);
        let wanted = out.len().min(left);
        let mut filled = 0;
        while filled < wanted && self.end.is_none() {
            filled += match self.read_some(&mut out[filled..wanted])? {
                0 => {
                    self.note(&out[..filled]);
                    return self.finish().map(|()| filled);
                }
                read => read,
            };
        }
        self.note(&out[..filled]);
        if self.position == self.length.most() && self.end.is_none() {
            if self.read_some(&mut [0])? > 0 {
                return Err(self.too_long());
            }
            self.finish()?;
        }
        Ok(filled)
    }

    fn read_some(&mut self, out: &mut [u8]) -> Result<usize, Fault> {
        loop {
            match self.decoder.read(out) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map_err(|error| self.source.damaged(&error)),
            }
        }
    }

    fn note(&mut self, bytes: &[u8]) {
        self.position += bytes.len() as u64;
        self.tail.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL)..]);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL));
    }

    fn too_long(&self) -> Fault {
        match &self.length {
            Length::Known(len) => self.source.damaged(&io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it holds more than the {len} bytes that it says"),
            )),
            Length::AtMost(_, reason) => Fault::Told(reason.clone()),
        }
    }

    fn finish(&mut self) -> Result<(), Fault> {
        if let Length::Known(len) = self.length
            && self.position != len
        {
            let message = format!("it holds {} of the {len} bytes that it says", self.position);
            return Err(self.source.damaged(&io::Error::new(io::ErrorKind::UnexpectedEof, message)));
        }
        if !looks_raw(&[], &self.tail) {
            return Err(Fault::NeedsPlaces);
        }
        self.end = Some(self.position);
        Ok(())
    }
}
