//! Streams of gzip and zstd.

use crate::kind::Packing;
use flate2::read::MultiGzDecoder;
use std::io::{self, Read};
use zstd_safe::{DCtx, InBuffer, OutBuffer};

/// Bytes that are taken from below at once.
const INPUT: usize = 128 << 10;

/// The content of a packed stream.
pub(crate) fn unpacked<'a>(packing: Packing, reader: impl Read + 'a) -> Box<dyn Read + 'a> {
    match packing {
        Packing::None => Box::new(reader),
        Packing::Gzip => Box::new(MultiGzDecoder::new(reader)),
        Packing::Zstd => Box::new(Zstd {
            reader,
            context: DCtx::create(),
            input: vec![0; INPUT],
            start: 0,
            end: 0,
            is_between_frames: true,
        }),
    }
}

/// Frames of zstd, one after the other.
struct Zstd<R> {
    reader: R,
    context: DCtx<'static>,
    input: Vec<u8>,
    start: usize,
    end: usize,
    is_between_frames: bool,
}

impl<R: Read> Read for Zstd<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        let mut is_over = false;
        loop {
            if self.start == self.end && !is_over {
                (self.start, self.end) = (0, self.reader.read(&mut self.input)?);
                is_over = self.end == 0;
            }
            if is_over && self.is_between_frames {
                return Ok(0);
            }
            let mut input = InBuffer::around(&self.input[self.start..self.end]);
            let mut output = OutBuffer::around(&mut *out);
            let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("zstd: {what}"));
            let left = self
                .context
                .decompress_stream(&mut output, &mut input)
                .map_err(|code| damaged(zstd_safe::get_error_name(code)))?;
            let (used, written) = (input.pos(), output.pos());
            self.start += used;
            self.is_between_frames = left == 0;
            if written > 0 {
                return Ok(written);
            }
            if is_over && used == 0 && !self.is_between_frames {
                return Err(damaged("the stream ends within a frame"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![0; zstd_safe::compress_bound(bytes.len())];
        let len = zstd_safe::compress(&mut out[..], bytes, 3).unwrap();
        out.truncate(len);
        out
    }

    #[test]
    fn frames_follow_each_other_and_cut_ones_are_told() {
        let content: Vec<u8> = (0..500_000u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        let mut both = packed(&content);
        let one = both.len();
        both.extend(packed(b"tail"));
        let mut found = Vec::new();
        unpacked(Packing::Zstd, &both[..]).read_to_end(&mut found).unwrap();
        assert!(found[..content.len()] == content && &found[content.len()..] == b"tail");
        for cut in [1, 5, one / 2, one - 1, one + 3] {
            let error = unpacked(Packing::Zstd, &both[..cut]).read_to_end(&mut Vec::new()).unwrap_err();
            assert!(error.to_string().contains("zstd"), "{cut}: {error}");
        }
        assert!(unpacked(Packing::Zstd, &b"no zstd at all"[..]).read_to_end(&mut Vec::new()).is_err());
        assert_eq!(
            unpacked(Packing::Zstd, &both[..one]).read_to_end(&mut Vec::new()).unwrap(),
            content.len()
        );
    }
}
