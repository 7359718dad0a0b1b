//! Streams of xz.

use super::parts::{Empty, cut_off, damaged, take_number};
use liblzma::stream::{Action, MtStreamBuilder, Status, Stream};
use std::io::{self, BufRead, Read};

/// Memory that the decoder may have, and beyond which it uses fewer threads.
const MEMORY: u64 = 1 << 30;
const MEMORY_OF_THREADS: u64 = 256 << 20;
/// Packed bytes from which nothing may come, beside as many bytes as have given something: the index of a stream has an entry for
/// each block.
const MOST_BARREN: u64 = 1 << 20;
/// Packed bytes that are decoded before it is looked at what came of them.
const AT_ONCE: usize = 64 << 10;
/// Bytes of the header of a stream.
const STREAM_HEADER: usize = 12;
/// Flags of a block that tells both of its sizes.
const SIZES: u8 = 0xc0;

/// Streams of xz. The blocks of one are decoded on several threads where they tell their sizes.
pub(super) struct Xz<R> {
    /// None between two streams.
    stream: Option<Stream>,
    /// Of a stream that is decoded on threads.
    blocks: Option<Blocks>,
    input: R,
    empty: Empty,
    /// Bytes that were taken since something came out, and those before.
    barren: u64,
    fertile: u64,
}

impl<R> Xz<R> {
    pub(super) fn new(input: R) -> Self {
        Self { stream: None, blocks: None, input, empty: Empty::default(), barren: 0, fertile: 0 }
    }

    fn note(&mut self, read: u64, written: u64) -> io::Result<()> {
        self.barren += read;
        if written > 0 {
            self.fertile += std::mem::take(&mut self.barren);
        }
        let ahead = self.blocks.as_ref().map_or(0, |blocks| blocks.ahead);
        let most = MOST_BARREN + self.fertile + ahead;
        if self.barren > most {
            return Err(damaged(format!("more than {most} bytes of it hold nothing")));
        }
        Ok(())
    }
}

/// The blocks of a stream, as far as they tell their sizes. Each costs a start of a thread, whatever is in it.
struct Blocks {
    /// Bytes up to the next header.
    skip: u64,
    /// As much of it as was seen. None: what follows is the index, or is not known.
    header: Option<Vec<u8>>,
    /// Bytes of the check behind each block.
    check: u64,
    /// Bytes that threads may take before anything comes out.
    ahead: u64,
    empty: Empty,
}

impl Blocks {
    /// The sizes of a stream with these first bytes, if the first one tells both of its sizes.
    fn of(first: &[u8]) -> Option<Self> {
        first.get(STREAM_HEADER + 1).filter(|flags| **flags & SIZES == SIZES)?;
        let check = match first.get(7)? & 15 {
            0 => 0,
            kind => 4 << ((kind - 1) / 3),
        };
        let (skip, header) = (STREAM_HEADER as u64, Some(Vec::new()));
        Some(Self { skip, header, check, ahead: MEMORY_OF_THREADS, empty: Empty::default() })
    }

    /// Passes over bytes of the stream.
    fn pass(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while let Some(header) = &mut self.header {
            let skipped = self.skip.min(bytes.len() as u64);
            self.skip -= skipped;
            let Some((byte, rest)) = bytes.get(skipped as usize..).and_then(<[u8]>::split_first) else {
                break;
            };
            bytes = rest;
            header.push(*byte);
            let len = header.first().map_or(0, |first| (usize::from(*first) + 1) * 4);
            if len == 4 {
                self.header = None;
            } else if header.len() == len {
                self.end_header()?;
            }
        }
        Ok(())
    }

    fn end_header(&mut self) -> io::Result<()> {
        let header = self.header.take().unwrap_or_default();
        let mut sizes = header.get(2..).unwrap_or_default();
        let has_sizes = header.get(1).is_some_and(|flags| flags & SIZES == SIZES);
        let mut size = || take_number(&mut sizes).filter(|_| has_sizes);
        let (Some(packed), Some(unpacked)) = (size(), size()) else {
            // It is decoded by itself, and where it ends is not known.
            self.ahead = 0;
            return Ok(());
        };
        self.empty.note(unpacked)?;
        self.skip = packed.checked_next_multiple_of(4).unwrap_or(packed).saturating_add(self.check);
        self.header = Some(Vec::new());
        Ok(())
    }
}

/// The decoder of a stream.
fn decoder(blocks: Option<&Blocks>) -> io::Result<Stream> {
    if blocks.is_none() {
        return Ok(Stream::new_stream_decoder(MEMORY, 0)?);
    }
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
    let mut builder = MtStreamBuilder::new();
    builder.threads(threads as u32).memlimit_threading(MEMORY_OF_THREADS).memlimit_stop(MEMORY);
    Ok(builder.decoder()?)
}

impl<R: BufRead> Read for Xz<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while !out.is_empty() {
            let bytes = self.input.fill_buf()?;
            let bytes = bytes.get(..AT_ONCE).unwrap_or(bytes);
            let mut stream = if let Some(stream) = self.stream.take() {
                stream
            } else {
                // Between streams there may be zeroes.
                let zeroes = bytes.iter().take_while(|byte| **byte == 0).count();
                if bytes.is_empty() {
                    return Ok(0);
                }
                if zeroes > 0 {
                    self.input.consume(zeroes);
                    continue;
                }
                self.blocks = Blocks::of(bytes);
                decoder(self.blocks.as_ref())?
            };
            let ended = bytes.is_empty();
            let (before_in, before_out) = (stream.total_in(), stream.total_out());
            let action = if ended { Action::Finish } else { Action::Run };
            let status = stream.process(bytes, out, action)?;
            let (read, written) = (stream.total_in() - before_in, stream.total_out() - before_out);
            if let Some(blocks) = &mut self.blocks {
                blocks.pass(bytes.get(..read as usize).unwrap_or_default())?;
            }
            self.input.consume(read as usize);
            self.note(read, written)?;
            if status == Status::StreamEnd {
                self.empty.note(stream.total_out())?;
            } else {
                self.stream = Some(stream);
                if ended && written == 0 {
                    return Err(cut_off("xz"));
                }
            }
            if written > 0 {
                return Ok(written as usize);
            }
        }
        Ok(0)
    }
}
