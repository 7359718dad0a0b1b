//! Requests to bytes, and bytes of replies to values. Nothing here does I/O, and no input makes it panic.

use super::protocol::{
    EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
    chunk,
};
use super::request::StatusRun;

/// The form of requests and replies that both sides agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// An error number; what was read follows.
    Simple,
    /// Chunks with lengths of 32 bits.
    Structured,
    /// Chunks and requests with lengths of 64 bits.
    Extended,
}

/// The most bytes of a chunk that is no data: what a block status may list, and an error say.
pub(super) const MOST_RUNS: u64 = 1 << 15;
/// The longest text that the protocol allows.
const LONGEST_TEXT: u64 = 4096;

/// A breach of the protocol. There is no going on with such a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Breach(pub(super) &'static str);

/// The head of a reply or of one of its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    /// The request that it answers.
    pub(super) cookie: u64,
    pub(super) kind: HeadKind,
}

/// The two kinds of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadKind {
    /// A whole reply, with an NBD error number or 0.
    Simple { error: u32 },
    /// A chunk with `len` bytes of payload.
    Chunk { kind: u16, is_last: bool, len: u64 },
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes)
}
fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes)
}
fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_be_bytes)
}

/// The head at the beginning of `bytes`, and its length; `None` if more bytes are needed.
pub(super) fn parse_head(style: Style, bytes: &[u8]) -> Result<Option<(Head, usize)>, Breach> {
    let Some(magic) = be32(bytes, 0) else { return Ok(None) };
    let parsed = match (magic, style) {
        (SIMPLE_REPLY_MAGIC, Style::Simple | Style::Structured) => {
            be32(bytes, 4).zip(be64(bytes, 8)).map(|(error, cookie)| {
                let head = Head { cookie, kind: HeadKind::Simple { error } };
                (head, 16)
            })
        }
        (STRUCTURED_REPLY_MAGIC, Style::Structured) => {
            let fields = be16(bytes, 4).zip(be16(bytes, 6)).zip(be64(bytes, 8)).zip(be32(bytes, 16));
            fields.map(|(((flags, kind), cookie), len)| (chunk_head(flags, kind, cookie, len.into()), 20))
        }
        (EXTENDED_REPLY_MAGIC, Style::Extended) => {
            let fields = be16(bytes, 4).zip(be16(bytes, 6)).zip(be64(bytes, 8)).zip(be64(bytes, 24));
            fields.map(|(((flags, kind), cookie), len)| (chunk_head(flags, kind, cookie, len), 32))
        }
        _ => return Err(Breach("a reply with a wrong magic number")),
    };
    Ok(parsed)
}

fn chunk_head(flags: u16, kind: u16, cookie: u64, len: u64) -> Head {
    Head { cookie, kind: HeadKind::Chunk { kind, is_last: flags & chunk::DONE != 0, len } }
}

/// The content of a chunk, as far as it is not the data of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    /// Success.
    Nothing,
    /// A part of a read that is zero, at an offset of the disk.
    Hole { offset: u64, len: u64 },
    /// The runs of one context.
    Status { context: u32, runs: Vec<StatusRun> },
    /// An NBD error number.
    Error(u32),
}

/// Checks the length of a chunk that is no data, before memory is set aside for it.
pub(super) fn check_content_len(style: Style, kind: u16, len: u64) -> Result<usize, Breach> {
    let fits = match kind {
        chunk::NONE => len == 0,
        chunk::OFFSET_HOLE => len == 12,
        chunk::BLOCK_STATUS => {
            style == Style::Structured
                && len >= 12
                && (len - 4).is_multiple_of(8)
                && (len - 4) / 8 <= MOST_RUNS
        }
        chunk::BLOCK_STATUS_EXTENDED => {
            style == Style::Extended
                && len >= 24
                && (len - 8).is_multiple_of(16)
                && (len - 8) / 16 <= MOST_RUNS
        }
        _ if kind & chunk::ERROR_BIT != 0 => (6..=6 + LONGEST_TEXT + 8).contains(&len),
        _ => return Err(Breach("a chunk of an unknown type")),
    };
    if fits { Ok(len as usize) } else { Err(Breach("a chunk of a wrong length")) }
}

/// The content of a chunk whose length was checked.
pub(super) fn parse_content(kind: u16, bytes: &[u8]) -> Result<Content, Breach> {
    let short = Breach("a chunk that is cut short");
    match kind {
        chunk::NONE => Ok(Content::Nothing),
        chunk::OFFSET_HOLE => {
            let (offset, len) = be64(bytes, 0).zip(be32(bytes, 8)).ok_or(short)?;
            Ok(Content::Hole { offset, len: len.into() })
        }
        chunk::BLOCK_STATUS => {
            let context = be32(bytes, 0).ok_or(short)?;
            let run = |run: &[u8]| Some(StatusRun { len: be32(run, 0)?.into(), flags: be32(run, 4)?.into() });
            let runs = bytes[4..].chunks_exact(8).map(run).collect::<Option<Vec<_>>>().ok_or(short)?;
            Ok(Content::Status { context, runs })
        }
        chunk::BLOCK_STATUS_EXTENDED => {
            let (context, count) = be32(bytes, 0).zip(be32(bytes, 4)).ok_or(short)?;
            let run = |run: &[u8]| Some(StatusRun { len: be64(run, 0)?, flags: be64(run, 8)? });
            let runs = bytes[8..].chunks_exact(16).map(run).collect::<Option<Vec<_>>>().ok_or(short)?;
            if runs.len() != count as usize {
                return Err(Breach("a block status with a wrong count"));
            }
            Ok(Content::Status { context, runs })
        }
        _ => {
            let (error, text) = be32(bytes, 0).zip(be16(bytes, 4)).ok_or(short)?;
            if error == 0 || usize::from(text) > bytes.len() - 6 {
                return Err(Breach("an error chunk that does not fit together"));
            }
            Ok(Content::Error(error))
        }
    }
}

/// The offset at the beginning of a data chunk.
pub(super) fn data_offset(bytes: &[u8]) -> Option<u64> {
    be64(bytes, 0)
}

/// The head of a request, on the stack.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestHead {
    bytes: [u8; 32],
    len: usize,
}

impl RequestHead {
    pub(super) fn new(style: Style, flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[4..6].copy_from_slice(&flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&command.to_be_bytes());
        bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&offset.to_be_bytes());
        if style == Style::Extended {
            bytes[..4].copy_from_slice(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
            bytes[24..].copy_from_slice(&len.to_be_bytes());
            return Self { bytes, len: 32 };
        }
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        // Parts of requests are cut so that they fit.
        bytes[24..28].copy_from_slice(&(len as u32).to_be_bytes());
        Self { bytes, len: 28 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(|byte| *byte != b' ').collect();
        digits
            .chunks(2)
            .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
            .collect()
    }

    // The bytes are put together from the protocol's description, field by field.
    #[test]
    fn heads_of_all_styles_are_understood() {
        let simple = bytes("67446698 0000001c 0102030405060708");
        let structured = bytes("668e33ef 0001 0001 0102030405060708 00000208");
        let extended = bytes("6e8a278c 0000 8001 0102030405060708 0000000000001000 0000000000000006");
        let cookie = 0x0102_0304_0506_0708;
        let chunk = |kind, is_last, len| Head { cookie, kind: HeadKind::Chunk { kind, is_last, len } };
        let error = Head { cookie, kind: HeadKind::Simple { error: 28 } };
        assert_eq!(parse_head(Style::Simple, &simple), Ok(Some((error, 16))));
        assert_eq!(parse_head(Style::Structured, &simple), Ok(Some((error, 16))));
        assert_eq!(parse_head(Style::Structured, &structured), Ok(Some((chunk(1, true, 0x208), 20))));
        assert_eq!(parse_head(Style::Extended, &extended), Ok(Some((chunk(0x8001, false, 6), 32))));
        for (style, whole) in
            [(Style::Simple, &simple), (Style::Structured, &structured), (Style::Extended, &extended)]
        {
            for len in 0..whole.len() {
                assert_eq!(parse_head(style, &whole[..len]), Ok(None), "{style:?} {len}");
            }
        }
        for (style, whole) in
            [(Style::Simple, &structured), (Style::Extended, &simple), (Style::Structured, &extended)]
        {
            assert!(parse_head(style, whole).is_err(), "{style:?}");
        }
    }

    #[test]
    fn lengths_of_chunks_are_checked_before_they_are_believed() {
        for (style, kind, len) in [
            (Style::Structured, chunk::NONE, 1),
            (Style::Structured, chunk::OFFSET_HOLE, 11),
            (Style::Structured, chunk::BLOCK_STATUS, 4),
            (Style::Structured, chunk::BLOCK_STATUS, 13),
            (Style::Structured, chunk::BLOCK_STATUS, 4 + 8 * (MOST_RUNS + 1)),
            (Style::Extended, chunk::BLOCK_STATUS, 12),
            (Style::Structured, chunk::BLOCK_STATUS_EXTENDED, 24),
            (Style::Structured, 0x8001, 5),
            (Style::Structured, 0x8001, u64::from(u32::MAX)),
            (Style::Structured, 77, 0),
        ] {
            assert!(check_content_len(style, kind, len).is_err(), "{style:?} {kind} {len}");
        }
        assert_eq!(check_content_len(Style::Structured, chunk::BLOCK_STATUS, 12), Ok(12));
    }

    #[test]
    fn contents_are_understood() {
        let status = bytes("00000007 00010000 00000003 00000200 00000000");
        let runs = vec![StatusRun { len: 0x10000, flags: 3 }, StatusRun { len: 0x200, flags: 0 }];
        assert_eq!(parse_content(chunk::BLOCK_STATUS, &status), Ok(Content::Status { context: 7, runs }));
        let extended = bytes("00000007 00000001 0000000100000000 0000000000000003");
        let runs = vec![StatusRun { len: 1 << 32, flags: 3 }];
        assert_eq!(
            parse_content(chunk::BLOCK_STATUS_EXTENDED, &extended),
            Ok(Content::Status { context: 7, runs })
        );
        let wrong = bytes("00000007 00000002 0000000100000000 0000000000000003");
        assert!(parse_content(chunk::BLOCK_STATUS_EXTENDED, &wrong).is_err());
        assert_eq!(parse_content(0x8001, &bytes("0000001c 0004 66756c6c")), Ok(Content::Error(28)));
        assert!(parse_content(0x8001, &bytes("0000001c 0005 66756c6c")).is_err());
        assert!(parse_content(0x8001, &bytes("00000000 0000")).is_err());
    }

    #[test]
    fn requests_have_their_fields_in_place() {
        let head = RequestHead::new(Style::Structured, 1, 3, 0x0102_0304_0506_0708, 0x1000, 0x200);
        assert_eq!(head.bytes(), bytes("25609513 0001 0003 0102030405060708 0000000000001000 00000200"));
        let head = RequestHead::new(Style::Extended, 0, 6, 9, 0x1000, 1 << 32);
        assert_eq!(
            head.bytes(),
            bytes("21e41c71 0000 0006 0000000000000009 0000000000001000 0000000100000000")
        );
    }
}
