//! Streams of packed files: what they are, and their bytes.

use super::parts::{Empty, cut_off, damaged};
use super::xz::Xz;
use bzip2::bufread::BzDecoder;
use flate2::bufread::GzDecoder;
use lz4_flex::frame::FrameDecoder;
use std::io::{self, BufRead, Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zebu_engine::{PackedFormat, skippable_frame};
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer};

/// A way in which files are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Gzip,
    Xz,
    Zstd,
    Bzip2,
    Lz4,
}

/// Packed bytes from which nothing may come. In gzip that is a header, in lz4 a block and its header, in zstd a frame that is passed
/// over, as a table of all frames.
const MOST_BARREN_GZIP: u64 = 1 << 20;
const MOST_BARREN_LZ4: u64 = 16 << 20;
const MOST_BARREN_ZSTD: u64 = 256 << 20;
/// The first bytes of a member of gzip.
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b, 8];
/// Bytes behind the last member that are looked at: are they zeroes? Fewer than may be barren.
const SEEN_TAIL: u64 = 512 << 10;
/// Largest window of zstd, as a power of two: 128 MiB, as much as `zstd -d` allows unasked.
const ZSTD_WINDOW: u32 = 27;

impl Packing {
    /// The packing of a file with these first bytes.
    pub(crate) fn of(first: &[u8]) -> Option<Self> {
        Some(match PackedFormat::of(first)? {
            PackedFormat::Gzip => Self::Gzip,
            PackedFormat::Xz => Self::Xz,
            PackedFormat::Zstd => Self::Zstd,
            PackedFormat::Bzip2 => Self::Bzip2,
            PackedFormat::Lz4 => Self::Lz4,
            _ => return None,
        })
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Bzip2 => "bzip2",
            Self::Lz4 => "lz4",
        }
    }

    /// The unpacked bytes of `input`: of all streams in it, one behind the other. A stream that is cut off is an error.
    /// Behind members of gzip, something else may lie: `on_tail` hears of it.
    pub(crate) fn decoder<'a>(
        self,
        input: impl BufRead + Send + 'a,
        on_tail: impl FnMut() + 'a,
    ) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::Gzip => Yielding::decoder(input, MOST_BARREN_GZIP, |input| Gzip::new(input, on_tail)),
            Self::Xz => Box::new(Xz::new(input)),
            Self::Zstd => {
                let context = zstd_context()?;
                Yielding::decoder(input, MOST_BARREN_ZSTD, |input| Zstd::new(context, input))
            }
            Self::Bzip2 => Box::new(Bzip2::new(input)),
            Self::Lz4 => Yielding::decoder(input, MOST_BARREN_LZ4, Lz4::new),
        })
    }
}

/// A decoder, and the bytes that it has taken since something came out.
struct Yielding<D> {
    decoder: D,
    taken: Arc<AtomicU64>,
}

impl<D: Read> Yielding<D> {
    /// A decoder that may take at most so many.
    fn decoder<'a, R: BufRead + 'a>(
        input: R,
        most: u64,
        make: impl FnOnce(Taken<R>) -> D,
    ) -> Box<dyn Read + 'a>
    where
        D: 'a,
    {
        let taken = Arc::<AtomicU64>::default();
        let decoder = make(Taken { input, taken: Arc::clone(&taken), most });
        Box::new(Self { decoder, taken })
    }
}

impl<D: Read> Read for Yielding<D> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.decoder.read(out)?;
        if read > 0 {
            self.taken.store(0, Ordering::Relaxed);
        }
        Ok(read)
    }
}

/// Its input.
struct Taken<R> {
    input: R,
    taken: Arc<AtomicU64>,
    most: u64,
}

impl<R: BufRead> Read for Taken<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(out)?;
        self.consume(read);
        Ok(read)
    }
}

impl<R: BufRead> BufRead for Taken<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.taken.load(Ordering::Relaxed) > self.most {
            return Err(damaged(format!("more than {} bytes of it hold nothing", self.most)));
        }
        self.input.fill_buf()
    }

    fn consume(&mut self, bytes: usize) {
        self.taken.fetch_add(bytes as u64, Ordering::Relaxed);
        self.input.consume(bytes);
    }
}

/// Frames of zstd.
struct Zstd<R> {
    context: DCtx<'static>,
    input: R,
    /// Whether a frame has begun that has not ended.
    within: bool,
    /// Bytes of this frame.
    bytes: u64,
    empty: Empty,
}

fn zstd_context() -> io::Result<DCtx<'static>> {
    let mut context = DCtx::try_create().ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
    context
        .set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW))
        .map_err(|code| damaged(zstd_safe::get_error_name(code)))?;
    Ok(context)
}

impl<R> Zstd<R> {
    fn new(context: DCtx<'static>, input: R) -> Self {
        Self { context, input, within: false, bytes: 0, empty: Empty::default() }
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while !out.is_empty() {
            let bytes = self.input.fill_buf()?;
            if bytes.is_empty() && !self.within {
                return Ok(0);
            }
            let ended = bytes.is_empty();
            let (mut from, mut to) = (InBuffer::around(bytes), OutBuffer::around(out));
            let hint = self
                .context
                .decompress_stream(&mut to, &mut from)
                .map_err(|code| damaged(format!("zstd: {}", zstd_safe::get_error_name(code))))?;
            let (read, written) = (from.pos(), to.pos());
            self.input.consume(read);
            self.within = hint != 0;
            self.bytes += written as u64;
            if !self.within {
                self.empty.note(std::mem::take(&mut self.bytes))?;
            }
            if written > 0 {
                return Ok(written);
            }
            if ended && self.within {
                return Err(cut_off(Packing::Zstd.name()));
            }
        }
        Ok(0)
    }
}

/// The input from a member on whose first bytes were looked at.
type Rest<R> = io::Chain<Cursor<Vec<u8>>, R>;

/// Members of gzip. Something else behind them is ignored, as gunzip does: signed metadata, and what fills up a block.
struct Gzip<R, T> {
    /// Always there until the end.
    decoder: Option<GzDecoder<Rest<R>>>,
    /// Hears of what is ignored, unless that is zeroes and not much.
    on_tail: T,
    /// Bytes of this member.
    bytes: u64,
    empty: Empty,
}

impl<R: BufRead, T: FnMut()> Gzip<R, T> {
    fn new(input: R, on_tail: T) -> Self {
        let decoder = Some(GzDecoder::new(Cursor::new(Vec::<u8>::new()).chain(input)));
        Self { decoder, on_tail, bytes: 0, empty: Empty::default() }
    }

    /// The next member, if one begins here.
    fn next(&mut self, mut input: R) -> io::Result<Option<GzDecoder<Rest<R>>>> {
        let mut first = Vec::new();
        input.by_ref().take(GZIP_MAGIC.len() as u64).read_to_end(&mut first)?;
        if first == GZIP_MAGIC {
            return Ok(Some(GzDecoder::new(Cursor::new(first).chain(input))));
        }
        if !first.is_empty() && GZIP_MAGIC.starts_with(&first) {
            return Err(cut_off(Packing::Gzip.name()));
        }
        let seen = input.take(SEEN_TAIL).read_to_end(&mut first)?;
        if seen as u64 == SEEN_TAIL || first.iter().any(|byte| *byte != 0) {
            (self.on_tail)();
        }
        Ok(None)
    }
}

impl<R: BufRead, T: FnMut()> Read for Gzip<R, T> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.decoder {
            let read = decoder.read(out)?;
            self.bytes += read as u64;
            if read > 0 || out.is_empty() {
                return Ok(read);
            }
            self.empty.note(std::mem::take(&mut self.bytes))?;
            if let Some(ended) = self.decoder.take() {
                let (_, input) = ended.into_inner().into_inner();
                self.decoder = self.next(input)?;
            }
        }
        Ok(0)
    }
}

/// Streams of bzip2.
struct Bzip2<R: BufRead> {
    /// Always there between two reads.
    decoder: Option<BzDecoder<R>>,
    /// Bytes of this stream.
    bytes: u64,
    empty: Empty,
}

impl<R: BufRead> Bzip2<R> {
    fn new(input: R) -> Self {
        Self { decoder: Some(BzDecoder::new(input)), bytes: 0, empty: Empty::default() }
    }
}

impl<R: BufRead> Read for Bzip2<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.decoder {
            let read = decoder.read(out)?;
            self.bytes += read as u64;
            if read > 0 || out.is_empty() {
                return Ok(read);
            }
            if decoder.get_mut().fill_buf()?.is_empty() {
                break;
            }
            self.empty.note(std::mem::take(&mut self.bytes))?;
            self.decoder = self.decoder.take().map(|ended| BzDecoder::new(ended.into_inner()));
        }
        Ok(0)
    }
}

/// An input that remembers whether somebody read at its end.
struct Watched<R> {
    input: R,
    ended: bool,
}

impl<R: BufRead> Read for Watched<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(out)?;
        self.ended |= read == 0 && !out.is_empty();
        Ok(read)
    }
}

/// Frames of lz4. The decoder takes a file that ends before a frame does for whole, and stops behind each frame.
struct Lz4<R: BufRead> {
    /// Of this frame: another may have blocks of another size, at which the decoder panics. Always there between two reads.
    decoder: Option<FrameDecoder<Watched<R>>>,
    /// Whether what has no data was passed over in front of the first frame.
    has_begun: bool,
    empty: Empty,
}

impl<R: BufRead> Lz4<R> {
    fn new(input: R) -> Self {
        Self { decoder: Some(frame_decoder(input)), has_begun: false, empty: Empty::default() }
    }
}

/// Passes over frames that have no data.
fn skip_frames(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        // Frames begin where a block of the file does not; a part of a header is looked at with the rest of it.
        let bytes = input.fill_buf()?;
        if !matches!(bytes, [0x50..=0x5f, ..]) {
            return Ok(());
        }
        let mut header = [0; 8];
        input.read_exact(&mut header)?;
        let len = skippable_frame(&header)
            .ok_or_else(|| damaged("the lz4 stream is followed by something else"))?;
        let rest = len - 8;
        if io::copy(&mut input.take(rest), &mut io::sink())? < rest {
            return Err(cut_off(Packing::Lz4.name()));
        }
    }
}

fn frame_decoder<R: BufRead>(input: R) -> FrameDecoder<Watched<R>> {
    FrameDecoder::new(Watched { input, ended: false })
}

impl<R: BufRead> Read for Lz4<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.decoder {
            if !std::mem::replace(&mut self.has_begun, true) {
                skip_frames(&mut decoder.get_mut().input)?;
            }
            let read = decoder.read(out)?;
            if read > 0 || out.is_empty() {
                self.empty = Empty::default();
                return Ok(read);
            }
            self.empty.note(0)?;
            let input = decoder.get_mut();
            if input.ended {
                return Err(cut_off(Packing::Lz4.name()));
            }
            skip_frames(&mut input.input)?;
            if input.input.fill_buf()?.is_empty() {
                break;
            }
            self.decoder = self.decoder.take().map(|ended| frame_decoder(ended.into_inner().input));
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::samples::{content, cpu_time, pack};

    fn unpack(packed: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        Packing::of(packed).unwrap().decoder(packed, || {})?.read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn files_of_the_usual_programs_are_unpacked_and_cut_off_ones_refused() {
        let content = content(700_000);
        for line in [
            "gzip -c",
            "xz -c -T2 --block-size=100000",
            "xz -c -0 -T1",
            "zstd -c -q",
            "zstd -c -q --no-check -1",
            "bzip2 -c",
            "lz4 -c -q",
            "lz4 -c -q -BD -B4",
            "lz4 -c -q --no-frame-crc",
        ] {
            let packed = pack(line, &content);
            assert_eq!(unpack(&packed).unwrap(), content, "{line}");
            let mut two = packed.clone();
            two.extend(&packed);
            let twice: Vec<u8> = content.iter().chain(&content).copied().collect();
            assert_eq!(unpack(&two).unwrap(), twice, "{line}");
            for len in [20, packed.len() / 2, packed.len() - 9, packed.len() - 4, packed.len() - 1] {
                assert!(unpack(&packed[..len]).is_err(), "{line}: {len} of {} bytes", packed.len());
            }
            let mut damaged = packed.clone();
            let middle = packed.len() / 2;
            for byte in &mut damaged[middle..middle + 40] {
                *byte ^= 0x55;
            }
            // Without checksums, a changed byte may go unnoticed, but never ends in a panic.
            let changed = unpack(&damaged);
            assert!(changed.is_err() || line.contains("--no"), "{line}");
            assert!(unpack(&pack(line, b"")).unwrap().is_empty(), "{line}");
        }
    }

    #[test]
    fn frames_without_data_are_passed_over() {
        let content = content(100_000);
        let skipped = [&[0x53, 0x2a, 0x4d, 0x18, 5, 0, 0, 0][..], b"hello"].concat();
        for line in ["zstd -c -q", "lz4 -c -q"] {
            let packed = pack(line, &content);
            let all = [&skipped[..], &skipped, &packed, &skipped, &packed, &skipped].concat();
            assert_eq!(unpack(&all).unwrap(), [&content[..], &content].concat(), "{line}");
            assert!(unpack(&all[..all.len() - 3]).is_err() || line.starts_with("zstd"), "{line}");
        }
        let gzip = [&skipped[..], &pack("gzip -c", &content)].concat();
        assert_eq!(Packing::of(&gzip), None, "gzip has no such frames");
        assert_eq!(Packing::of(&skipped), None);
    }

    /// Smallest streams without end have nobody work for long.
    #[test]
    fn streams_without_end_that_are_empty_are_refused() {
        let content = content(5000);
        for line in ["gzip -c", "xz -c", "zstd -c -q", "bzip2 -c", "lz4 -c -q"] {
            let (empty, packed) = (pack(line, b""), pack(line, &content));
            let few = [&empty.repeat(500), &packed[..], &empty.repeat(500)].concat();
            assert_eq!(unpack(&few).unwrap(), content, "{line}");
            let many = [&packed[..], &empty.repeat((3 << 20) / empty.len())].concat();
            let refusal = unpack(&many).unwrap_err().to_string();
            assert!(refusal.contains("empty") || refusal.contains("hold nothing"), "{line}: {refusal}");
        }
        let skipped = [0x53, 0x2a, 0x4d, 0x18, 0, 0, 0, 0].repeat(2000);
        let zstd = [&pack("zstd -c -q", &content)[..], &skipped].concat();
        assert!(unpack(&zstd).unwrap_err().to_string().contains("empty"));
    }

    /// Within one stream, too.
    #[test]
    fn blocks_without_end_that_are_empty_are_refused() {
        let skipped =
            [&pack("lz4 -c -q", b"x")[..], &[0x53, 0x2a, 0x4d, 0x18, 0, 0, 0, 0].repeat(4 << 20)].concat();
        let mut block = vec![2, 0, 0x21, 1, 0, 0, 0, 0];
        let mut sum = flate2::Crc::new();
        sum.update(&block);
        block.extend(sum.sum().to_le_bytes());
        // The end of its data, and what fills it up.
        block.extend([0; 4]);
        let xz = [&pack("xz -c --check=none", b"")[..12], &block.repeat(1 << 20)].concat();
        // The same with its sizes: one byte, from which nothing comes.
        let mut block = vec![2, 0xc0, 1, 0, 0x21, 1, 0, 0];
        let mut sum = flate2::Crc::new();
        sum.update(&block);
        block.extend(sum.sum().to_le_bytes());
        block.extend([0; 4]);
        let sized = [&pack("xz -c --check=none", b"")[..12], &block.repeat(1 << 20)].concat();
        for (name, packed) in [("skipped lz4", skipped), ("xz", xz), ("xz with sizes", sized)] {
            let before = cpu_time();
            let refusal = unpack(&packed).unwrap_err().to_string();
            let is_refused = refusal.contains("hold nothing") || refusal.contains("are empty");
            assert!(is_refused, "{name}: {refusal}");
            let took = cpu_time().saturating_sub(before);
            assert!(took.as_secs_f64() < 1.0, "{name}: {took:?} of processor time");
        }
    }

    #[test]
    fn what_gunzip_ignores_is_ignored_and_told() {
        let content = content(300_000);
        let packed = pack("gzip -c", &content);
        let more = |tail: &[u8]| [&packed[..], tail].concat();
        // Another member behind zeroes is not looked for, and so its loss is told, as is that of what may follow many zeroes.
        let hidden = [&[0; 5000][..], &packed].concat();
        let zeroes = vec![0; 600_000];
        for (tail, is_told) in [
            (&[0; 5000][..], false),
            (&[0], false),
            (&zeroes, true),
            (b"FWx0", true),
            (b"\0\0\0{signed}", true),
            (b"x", true),
            (&hidden, true),
        ] {
            let (all, mut found, mut heard) = (more(tail), Vec::new(), 0);
            let packing = Packing::of(&all).unwrap();
            packing.decoder(&all[..], || heard += 1).unwrap().read_to_end(&mut found).unwrap();
            assert!(found == content, "{}", tail.len());
            assert_eq!(heard, i32::from(is_told), "{}", tail.len());
        }
        // The start of another member is no such thing.
        for cut in [1, 2, 3, 9, 18, packed.len() / 2] {
            assert!(unpack(&more(&packed[..cut])).is_err(), "{cut}");
        }
    }

    #[test]
    fn other_files_are_not_packed() {
        for first in [&b"QFI\xfb"[..], b"", b"\x1f\x8b\x08\xe0", b"BZh9 and text", b"(\xb5/"] {
            assert_eq!(Packing::of(first), None);
        }
    }
}
