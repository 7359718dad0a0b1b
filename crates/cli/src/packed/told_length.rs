//! The length of what is in a packed file, where the file tells it: from the indexes of xz, and from the headers of the frames
//! of zstd. Nothing is unpacked; whether it is true shows when something is.

use super::decode::Packing;
use super::decoding::Source;
use std::io;
use std::os::unix::fs::FileExt;
use zebu::skippable_frame;

/// Bytes of a header, and of a footer, of a stream of xz.
const XZ_EDGE: u64 = 12;
/// Bytes of an index of xz that are looked at: four million blocks.
const MOST_INDEX: u64 = 64 << 20;
/// Bytes by which the header of a zstd frame tells how long its content is.
const ZSTD_HEADER: usize = 18;

impl Source {
    /// Bytes of what is in it, if it tells.
    pub(super) fn told_length(&self) -> Option<u64> {
        match self.packing {
            Packing::Xz => self.told_by_indexes(),
            Packing::Zstd => self.told_by_frames(),
            Packing::Gzip | Packing::Bzip2 | Packing::Lz4 => None,
        }
    }

    /// Reads at an offset of the range, which all of `out` must lie in.
    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        if at.checked_add(out.len() as u64).is_none_or(|end| end > self.range.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.read_exact_at(out, self.range.start + at)
    }

    /// The sum over all streams, the last one first. Between streams there may be zeroes.
    fn told_by_indexes(&self) -> Option<u64> {
        let (mut end, mut total) = (self.range.len, 0u64);
        while end > 0 {
            let mut footer = [0; XZ_EDGE as usize];
            let footer_at = end.checked_sub(XZ_EDGE)?;
            self.read_at(&mut footer, footer_at).ok()?;
            if footer[8..] == [0; 4] {
                end -= 4;
                continue;
            }
            if footer[10..] != *b"YZ" {
                return None;
            }
            let backward: [u8; 4] = footer[4..8].try_into().ok()?;
            let index_len = (u64::from(u32::from_le_bytes(backward)) + 1) * 4;
            let index_at = footer_at.checked_sub(index_len).filter(|_| index_len <= MOST_INDEX)?;
            let mut index = vec![0; index_len as usize];
            self.read_at(&mut index, index_at).ok()?;
            let (packed, unpacked) = sums_of_index(&index)?;
            end = index_at.checked_sub(packed)?.checked_sub(XZ_EDGE)?;
            total = total.checked_add(unpacked)?;
        }
        Some(total)
    }

    /// The sum over all frames.
    fn told_by_frames(&self) -> Option<u64> {
        let (mut at, mut total) = (0u64, 0u64);
        while at < self.range.len {
            let mut header = [0; ZSTD_HEADER];
            let len = ZSTD_HEADER.min((self.range.len - at) as usize);
            self.read_at(&mut header[..len], at).ok()?;
            if let Some(skipped) = skippable_frame(&header[..len]) {
                at = at.checked_add(skipped)?;
                continue;
            }
            let content = zstd_safe::get_frame_content_size(&header[..len]).ok()??;
            total = total.checked_add(content)?;
            at = self.end_of_frame(at, header[4])?;
        }
        (at == self.range.len).then_some(total)
    }

    /// The end of the zstd frame at `at`, by the headers of its blocks (RFC 8878, section 3.1.1).
    fn end_of_frame(&self, at: u64, descriptor: u8) -> Option<u64> {
        let is_single = descriptor & 0x20 != 0;
        let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
        let content = match descriptor >> 6 {
            0 => u64::from(is_single),
            flag => 1 << flag,
        };
        let mut at = at + 5 + u64::from(!is_single) + dictionary + content;
        loop {
            let mut header = [0; 4];
            self.read_at(&mut header[..3], at).ok()?;
            let header = u32::from_le_bytes(header);
            let len = match header >> 1 & 3 {
                1 => 1,
                _ => u64::from(header >> 3),
            };
            at += 3 + len;
            if header & 1 != 0 {
                return Some(at + if descriptor & 4 != 0 { 4 } else { 0 });
            }
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

/// A number in groups of seven bits, the lowest first.
fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..63).step_by(7) {
        let byte;
        (byte, *bytes) = bytes.split_first()?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::decoding::Source;
    use crate::packed::samples::{content, pack, source};

    fn told(packed: &[u8]) -> Option<u64> {
        source(packed).told_length()
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

    #[test]
    fn a_part_of_a_file_is_looked_at_alone() {
        let packed = pack("xz -c -0", &content(5000));
        let whole = [&[7; 100][..], &packed, &[9; 100]].concat();
        let mut part: Source = source(&whole);
        part.packing = Packing::Xz;
        part.range.start = 100;
        part.range.len = packed.len() as u64;
        assert_eq!(part.told_length(), Some(5000));
    }
}
