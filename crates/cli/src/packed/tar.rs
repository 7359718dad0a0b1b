//! The members of a tar file, such as an OVA: their names, and where their bytes lie.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of a block.
const BLOCK: u64 = 512;
/// Headers that are looked at in one file.
const MOST_HEADERS: usize = 100_000;
/// Bytes of a long name or of extended attributes.
const MOST_ATTRIBUTES: u64 = 1 << 20;

const SPARSE: &str = "sparse members of tar files are not supported: unpack it first";

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// A regular file in a tar file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) range: Range,
}

fn has_checksum(block: &[u8]) -> bool {
    let counted = block.iter().enumerate().map(|(at, byte)| match at {
        148..156 => u64::from(b' '),
        _ => u64::from(*byte),
    });
    number(&block[148..156]) == Some(counted.sum())
}

/// An octal number, or one in base 256 (GNU).
fn number(field: &[u8]) -> Option<u64> {
    if let Some(first) = field.first().filter(|first| **first & 0x80 != 0) {
        let start = u64::from(first & 0x7f);
        return field[1..]
            .iter()
            .try_fold(start, |value, byte| value.checked_mul(256).map(|value| value | u64::from(*byte)));
    }
    let text = field.split(|byte| *byte == 0).next()?;
    let text = std::str::from_utf8(text).ok()?.trim();
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

fn damaged(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// The regular files in the tar file that lies in `range` of `file`.
pub(crate) fn members(file: &File, range: Range) -> io::Result<Vec<Member>> {
    let mut found = Vec::new();
    // What extended headers say of the next member.
    let (mut long_name, mut long_size) = (None, None);
    let mut at = 0u64;
    for _ in 0..MOST_HEADERS {
        if at.checked_add(BLOCK).is_none_or(|end| end > range.len) {
            return Ok(found);
        }
        let mut block = [0; BLOCK as usize];
        file.read_exact_at(&mut block, range.start + at)?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(found);
        }
        if !has_checksum(&block) {
            return Err(damaged(format!("the header of a member at {at} of the tar file is damaged")));
        }
        let size = number(&block[124..136]);
        let size = size.ok_or_else(|| damaged(format!("the size of a member at {at} is damaged")))?;
        let kind = block[156];
        let size = if matches!(kind, b'0' | 0 | b'7') { long_size.take().unwrap_or(size) } else { size };
        let start = at + BLOCK;
        let end = start.checked_add(size).filter(|end| *end <= range.len);
        let end = end.ok_or_else(|| damaged(format!("a member of {size} bytes at {at} is cut off")))?;
        match kind {
            b'x' | b'g' | b'L' => {
                let attributes = read(file, range.start + start, size)?;
                if kind != b'L' && has_sparse_map(&attributes) {
                    return Err(damaged(SPARSE));
                }
                if kind == b'L' {
                    long_name = Some(text(&attributes));
                } else if kind == b'x' {
                    (long_name, long_size) = parse_attributes(&attributes, long_name, long_size);
                }
            }
            b'0' | 0 | b'7' => {
                let name = long_name.take().unwrap_or_else(|| {
                    let (name, prefix) = (text(&block[..100]), text(&block[345..500]));
                    if prefix.is_empty() || block[257..263] != *b"ustar\0" {
                        name
                    } else {
                        format!("{prefix}/{name}")
                    }
                });
                let member = Range { start: range.start + start, len: size };
                found.push(Member { name, range: member });
            }
            b'S' => return Err(damaged(SPARSE)),
            _ => (long_name, long_size) = (None, None),
        }
        at = end.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
    }
    Err(damaged(format!("the tar file has more than {MOST_HEADERS} members")))
}

fn read(file: &File, start: u64, len: u64) -> io::Result<Vec<u8>> {
    if len > MOST_ATTRIBUTES {
        return Err(damaged(format!("the attributes of a member have {len} bytes")));
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, start)?;
    Ok(bytes)
}

/// Whether extended attributes tell that the next member holds a map of its holes and the rest (GNU tar's `--sparse`).
fn has_sparse_map(attributes: &[u8]) -> bool {
    attributes.windows(12).any(|key| key == b" GNU.sparse.")
}

/// Lines of `LEN KEY=VALUE` (POSIX).
fn parse_attributes(
    mut bytes: &[u8],
    mut name: Option<String>,
    mut size: Option<u64>,
) -> (Option<String>, Option<u64>) {
    while let Some(space) = bytes.iter().position(|byte| *byte == b' ') {
        let len = std::str::from_utf8(&bytes[..space]).ok().and_then(|len| len.parse::<usize>().ok());
        let Some(len) = len.filter(|len| (space + 1..=bytes.len()).contains(len)) else { break };
        let record = String::from_utf8_lossy(&bytes[space + 1..len]);
        match record.trim_end_matches('\n').split_once('=') {
            Some(("path", value)) => name = Some(value.to_owned()),
            Some(("size", value)) => size = value.parse().ok(),
            _ => {}
        }
        bytes = &bytes[len..];
    }
    (name, size)
}
