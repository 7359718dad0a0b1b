//! The length of what is in a packed file, where the file records it: from the indexes of xz, and from the headers of the frames
//! of zstd. Nothing is unpacked; whether it is true shows when something is.

use super::decode::Packing;
use super::decoding::Source;
use super::parts::take_number;
use std::io;
use zebu_engine::skippable_frame;

/// Bytes of a header, and of a footer, of a stream of xz.
const XZ_EDGE: u64 = 12;
/// Bytes of an index of xz that are looked at: four million blocks.
const MOST_INDEX: u64 = 64 << 20;
/// Bytes that hold nothing and are stepped over: zeroes between streams of xz, headers of empty blocks and of skippable frames
/// of zstd. Packers write fewer than these by far. Where there are more, the length shows when all is unpacked.
const MOST_PADDING: u64 = 1 << 20;
/// Bytes that are read at once. The headers of blocks of the usual size are further apart.
const PIECE: u64 = 4 << 10;
/// Bytes by which the header of a zstd frame tells how long its content is.
const ZSTD_HEADER: usize = 18;

/// Reads of a few bytes each, which lie side by side in most files: a piece around them is kept.
struct Nearby<'a> {
    source: &'a Source,
    at: u64,
    piece: Vec<u8>,
}

impl<'a> Nearby<'a> {
    fn new(source: &'a Source) -> Self {
        Self { source, at: 0, piece: Vec::new() }
    }

    /// So many bytes at an offset of the range, if it has them; at most [`PIECE`].
    fn get(&mut self, at: u64, len: usize) -> Option<&[u8]> {
        let end = at.checked_add(len as u64).filter(|end| *end <= self.source.bytes.len())?;
        let piece_end = self.at + self.piece.len() as u64;
        if at < self.at || end > piece_end {
            // Forward or backward, the next reads are near.
            self.at = if at < self.at { end.saturating_sub(PIECE) } else { at };
            self.piece.resize(PIECE.min(self.source.bytes.len() - self.at) as usize, 0);
            self.source.read_at(&mut self.piece, self.at).ok()?;
        }
        self.piece.get((at - self.at) as usize..)?.get(..len)
    }
}

impl Source {
    /// Bytes of what is in it, if it tells.
    pub(super) fn recorded_length(&self) -> Option<u64> {
        match self.packing {
            Packing::Xz => self.told_by_indexes(),
            Packing::Zstd => self.told_by_frames(),
            Packing::Gzip | Packing::Bzip2 | Packing::Lz4 => None,
        }
    }

    /// Reads at an offset of the range, which all of `out` must lie in.
    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other("given up"));
        }
        self.bytes.read_exact_at(&self.file, out, at)
    }

    /// The sum over all streams, the last one first. Between streams there may be zeroes.
    fn told_by_indexes(&self) -> Option<u64> {
        let mut nearby = Nearby::new(self);
        let (mut end, mut total, mut padding) = (self.bytes.len(), 0u64, 0);
        while end > 0 {
            let footer_at = end.checked_sub(XZ_EDGE)?;
            let footer = nearby.get(footer_at, XZ_EDGE as usize)?;
            if footer[8..] == [0; 4] {
                end -= 4;
                padding += 4;
                if padding > MOST_PADDING {
                    return None;
                }
                continue;
            }
            if footer[10..] != *b"YZ" {
                return None;
            }
            let backward: [u8; 4] = footer[4..8].try_into().ok()?;
            let index_len = (u64::from(u32::from_le_bytes(backward)) + 1) * 4;
            let index_at = footer_at.checked_sub(index_len).filter(|_| index_len <= MOST_INDEX)?;
            let (packed, unpacked) = if index_len <= PIECE {
                sums_of_index(nearby.get(index_at, index_len as usize)?)?
            } else {
                let mut index = vec![0; index_len as usize];
                self.read_at(&mut index, index_at).ok()?;
                sums_of_index(&index)?
            };
            end = index_at.checked_sub(packed)?.checked_sub(XZ_EDGE)?;
            total = total.checked_add(unpacked)?;
        }
        Some(total)
    }

    /// The sum over all frames.
    fn told_by_frames(&self) -> Option<u64> {
        let mut nearby = Nearby::new(self);
        let (mut at, mut total, mut padding) = (0u64, 0u64, 0);
        while at < self.bytes.len() {
            if padding > MOST_PADDING {
                return None;
            }
            let len = ZSTD_HEADER.min((self.bytes.len() - at) as usize);
            let header = nearby.get(at, len)?;
            if let Some(skipped) = skippable_frame(header) {
                padding += 8;
                at = at.checked_add(skipped)?;
                continue;
            }
            let descriptor = *header.get(4)?;
            let content = zstd_safe::get_frame_content_size(header).ok()??;
            total = total.checked_add(content)?;
            at = end_of_frame(&mut nearby, at, descriptor, &mut padding)?;
        }
        (at == self.bytes.len()).then_some(total)
    }
}

/// The end of the zstd frame at `at`, by the headers of its blocks (RFC 8878, section 3.1.1). Headers of empty blocks are added
/// to `padding`.
fn end_of_frame(nearby: &mut Nearby<'_>, at: u64, descriptor: u8, padding: &mut u64) -> Option<u64> {
    let is_single = descriptor & 0x20 != 0;
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let content = match descriptor >> 6 {
        0 => u64::from(is_single),
        flag => 1 << flag,
    };
    let mut at = at + 5 + u64::from(!is_single) + dictionary + content;
    loop {
        let header = nearby.get(at, 3)?;
        let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let len = match header >> 1 & 3 {
            1 => 1,
            _ => u64::from(header >> 3),
        };
        at += 3 + len;
        *padding += if len == 0 { 3 } else { 0 };
        if *padding > MOST_PADDING {
            return None;
        }
        if header & 1 != 0 {
            return Some(at + if descriptor & 4 != 0 { 4 } else { 0 });
        }
    }
}

/// Bytes of all blocks that an index of xz lists, packed and unpacked.
fn sums_of_index(index: &[u8]) -> Option<(u64, u64)> {
    let mut rest = index.strip_prefix(&[0])?;
    let blocks = take_number(&mut rest)?;
    let (mut packed, mut unpacked) = (0u64, 0u64);
    for _ in 0..blocks {
        packed = packed.checked_add(take_number(&mut rest)?.checked_next_multiple_of(4)?)?;
        unpacked = unpacked.checked_add(take_number(&mut rest)?)?;
    }
    Some((packed, unpacked))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::decoding::Source;
    use crate::packed::pieces::{Pieces, Range};
    use crate::packed::samples::{content, cpu_time, pack, source};
    use std::sync::Arc;
    use std::time::Duration;

    fn told(packed: &[u8]) -> Option<u64> {
        source(packed).recorded_length()
    }

    #[test]
    fn lengths_are_those_that_the_packers_wrote() {
        let content = content(700_000);
        let len = Some(700_000);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &content).unwrap();
        let of_file = |line: &str| pack(&format!("{line} {}", file.path().display()), b"");
        for line in ["xz -c -0 -T1", "xz -c -T2 --block-size=100000", "xz -c --check=none"] {
            let packed = pack(line, &content);
            assert_eq!(told(&packed), len, "{line}");
            let streams = [&packed[..], &[0; 8], &packed, &[0; 4]].concat();
            assert_eq!(told(&streams), Some(1_400_000), "{line}");
            for cut in [1, 4, 12, packed.len() / 2, packed.len() - 12] {
                assert_eq!(told(&packed[..packed.len() - cut]), None, "{line} {cut}");
            }
            assert_eq!(told(&[&packed[..], b"garbage!"].concat()), None, "{line}");
            assert_eq!(told(&[b"garbage!", &packed[..]].concat()), None, "{line}");
        }
        for line in ["zstd -c -q -1", "zstd -c -q --no-check", "zstd -c -q -19 --long=27"] {
            let packed = of_file(line);
            assert_eq!(told(&packed), len, "{line}");
            let skipped = [0x53, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 1, 2];
            let frames = [&skipped[..], &packed, &skipped, &packed, &skipped].concat();
            assert_eq!(told(&frames), Some(1_400_000), "{line}");
            for cut in [1, 3, packed.len() / 2, packed.len() - 4] {
                assert_eq!(told(&packed[..packed.len() - cut]), None, "{line} {cut}");
            }
            assert_eq!(told(&[&packed[..], b"garbage!"].concat()), None, "{line}");
        }
        assert_eq!(told(&pack("zstd -c -q", b"")), Some(0));
        // What comes from a pipe has no length that the packer could tell.
        assert_eq!(told(&pack("zstd -c -q", &content)), None);
        for line in ["gzip -c", "bzip2 -c", "lz4 -c -q"] {
            assert_eq!(told(&of_file(line)), None, "{line}");
        }
    }

    #[test]
    fn blocks_of_zeroes_in_zstd_are_short() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(5 << 20).unwrap();
        let packed = pack(&format!("zstd -c -q {}", file.path().display()), b"");
        assert_eq!(told(&packed), Some(5 << 20));
    }

    #[test]
    fn numbers_that_never_end_are_none() {
        assert_eq!(take_number(&mut &[0x81, 1][..]), Some(129));
        assert_eq!(take_number(&mut &[0xff; 12][..]), None);
        assert_eq!(sums_of_index(&[0, 1]), None);
    }

    /// A file of 1 TiB that has almost nothing in it, and one of the smallest streams and blocks.
    #[test]
    fn what_yields_nothing_is_looked_at_quickly() {
        let packed = pack("xz -c -0", &content(5000));
        let hole = source(&packed);
        hole.file.set_len(1 << 40).unwrap();
        let bytes = Arc::new(Pieces::of(Range { start: 0, len: 1 << 40 }));
        let hole = Source { bytes, ..hole };
        let padded = [&packed[..], &vec![0; 1 << 20]].concat();
        let empty = pack("xz -c", b"").repeat(50_000);
        let first = pack("zstd -c -q", b"");
        // A frame of one byte of content, in a block, and many without any.
        let blocks = |empty| {
            let begin = [0x28, 0xb5, 0x2f, 0xfd, 0x20, 1, 8, 0, 0, 7];
            [&begin[..], &[0; 3].repeat(empty), &[1, 0, 0]].concat()
        };
        let (some, many) = (blocks(300_000), blocks(500_000));
        let began = cpu_time();
        assert_eq!(hole.recorded_length(), None);
        assert_eq!(told(&padded), Some(5000));
        assert_eq!(told(&empty), Some(0));
        assert_eq!(told(&first.repeat(50_000)), Some(0));
        assert_eq!((told(&some), told(&many)), (Some(1), None));
        assert!(cpu_time() < began + Duration::from_secs(2), "{began:?} to {:?}", cpu_time());
    }

    #[test]
    fn whoever_gives_up_is_not_held_up() {
        let source = source(&pack("xz -c -0", &content(5000)));
        source.cancel.cancel();
        assert_eq!(source.recorded_length(), None);
        assert!(source.first_bytes(100).is_err());
    }

    #[test]
    fn a_part_of_a_file_is_looked_at_alone() {
        let packed = pack("xz -c -0", &content(5000));
        let whole = [&[7; 100][..], &packed, &[9; 100]].concat();
        let mut part: Source = source(&whole);
        part.packing = Packing::Xz;
        part.bytes = Arc::new(Pieces::of(Range { start: 100, len: packed.len() as u64 }));
        assert_eq!(part.recorded_length(), Some(5000));
    }
}
