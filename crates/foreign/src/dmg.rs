//! DMG, the disk image of macOS: chunks that are stored, zero or compressed, listed in a property list near the end.
//!
//! Integers are big endian. Chunks in zlib, bzip2 and without compression are read; ADC, LZFSE and LZMA are refused by
//! name. The rules are those of QEMU's `block/dmg.c`, with smaller limits.

use crate::bytes::{be32, be64};
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::limits::{MAX_PACKED_UNIT, MAX_PROPERTY_LIST};
use crate::opened::Opened;
use crate::run::{Kind, Packed, Packing, Run};

/// The first bytes of the last 512 of the file.
pub const TRAILER: &[u8; 4] = b"koly";
const TRAILER_BYTES: u64 = 512;
/// A table of chunks: its first bytes, the bytes before its entries, and those of an entry.
const TABLE_MAGIC: &[u8; 4] = b"mish";
const TABLE_HEADER: usize = 204;
const ENTRY: usize = 40;

/// A chunk of the disk.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    /// First guest byte, and bytes.
    start: u64,
    len: u64,
    content: Content,
}

#[derive(Debug, Clone, Copy)]
enum Content {
    Zero,
    Stored { offset: u64 },
    Packed { offset: u64, len: u64, packing: Packing },
}

/// The chunks of a DMG, in order.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    chunks: Vec<Chunk>,
    size: u64,
}

pub(crate) fn open(files: &dyn Files) -> Result<Opened<Map>> {
    let source = Source::image(files);
    let trailer_at = source.len().saturating_sub(TRAILER_BYTES);
    let trailer: [u8; TRAILER_BYTES as usize] = source.array(trailer_at, "the DMG trailer")?;
    ensure!(trailer.starts_with(TRAILER), "Could not locate UDIF trailer in dmg file");
    let data_fork = be64(&trailer, 24);
    let (segment, segments) = (be32(&trailer, 56), be32(&trailer, 60));
    require!(
        segments <= 1,
        "it is part {segment} of a DMG of {segments} parts, and no disk: join them on macOS first (by hdiutil convert)"
    );
    let (list_at, list_len) = (be64(&trailer, 216), be64(&trailer, 224));
    require!(
        list_len > 0,
        "the DMG has no property list; images with a resource fork alone are not supported"
    );
    require!(list_len <= MAX_PROPERTY_LIST, "the property list of the DMG has {list_len} bytes");
    let sectors = be64(&trailer, 492);
    let size = sectors.checked_mul(512).ok_or_else(|| Error::damaged("the DMG disk is too large"))?;
    let list = source.vec(list_at, list_len, "the property list of the DMG")?;
    let mut chunks = Vec::new();
    for table in tables(&String::from_utf8_lossy(&list)) {
        add_table(source, &table?, data_fork, &mut chunks)?;
    }
    chunks.sort_by_key(|chunk| chunk.start);
    let mut end = 0;
    for chunk in &chunks {
        ensure!(chunk.start >= end, "two chunks of the DMG overlap at {} of the disk", chunk.start);
        end = chunk.start.saturating_add(chunk.len);
    }
    ensure!(end <= size, "the chunks of the DMG reach past the end of the disk at {size}");
    let unit = chunks.iter().map(|chunk| chunk.len).max().unwrap_or_default().min(MAX_PACKED_UNIT);
    let map = Map { chunks, size };
    Ok(Opened { size, unit, variant: "dmg", parent: None, identity: None, map })
}

/// The tables of chunks in the property list.
fn tables(list: &str) -> impl Iterator<Item = Result<Vec<u8>>> {
    let tables = list.split_once("<key>blkx</key>").map_or("", |(_, rest)| rest);
    let tables = tables.split_once("</array>").map_or(tables, |(array, _)| array);
    tables.split("<data>").skip(1).map(|data| {
        let text = data.split_once("</data>").map(|(text, _)| text);
        text.and_then(from_base64).ok_or_else(|| Error::damaged("the property list of the DMG is damaged"))
    })
}

/// The bytes that base64 stands for (RFC 4648); blanks are left out.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let (mut out, mut bits, mut held) = (Vec::with_capacity(text.len()), 0u32, 0u32);
    for byte in text.bytes().filter(|byte| !byte.is_ascii_whitespace() && *byte != b'=') {
        let value = match byte {
            b'A'..=b'Z' => byte.wrapping_sub(b'A'),
            b'a'..=b'z' => byte.wrapping_sub(b'a').wrapping_add(26),
            b'0'..=b'9' => byte.wrapping_sub(b'0').wrapping_add(52),
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held = held.wrapping_add(6);
        if held >= 8 {
            held = held.wrapping_sub(8);
            out.push(bits.wrapping_shr(held).to_le_bytes().first().copied()?);
        }
    }
    Some(out)
}

fn add_table(source: Source<'_>, table: &[u8], data_fork: u64, chunks: &mut Vec<Chunk>) -> Result<()> {
    if !table.starts_with(TABLE_MAGIC) {
        return Ok(());
    }
    let first_sector = be64(table, 8);
    let base = be64(table, 24).checked_add(data_fork);
    let entries = table.get(TABLE_HEADER..).unwrap_or_default().as_chunks::<ENTRY>().0;
    for entry in entries.iter().take(be32(table, 200) as usize) {
        let bytes = |sectors: Option<u64>| sectors.and_then(|sectors| sectors.checked_mul(512));
        let (Some(start), Some(len)) =
            (bytes(be64(entry, 8).checked_add(first_sector)), bytes(Some(be64(entry, 16))))
        else {
            return Err(Error::damaged("a chunk of the DMG lies past 2^64"));
        };
        let offset = base.and_then(|base| base.checked_add(be64(entry, 24)));
        let offset = offset.ok_or_else(|| Error::damaged("a chunk of the DMG lies past 2^64"))?;
        let stored = be64(entry, 32);
        let packed = |packing| Content::Packed { offset, len: stored, packing };
        let content = match be32(entry, 0) {
            0 | 2 => Content::Zero,
            1 => Content::Stored { offset },
            0x8000_0005 => packed(Packing::Zlib),
            0x8000_0006 => packed(Packing::Bzip2),
            0x8000_0004 => return Err(unsupported("ADC")),
            0x8000_0007 => return Err(unsupported("LZFSE")),
            0x8000_0008 => return Err(unsupported("LZMA")),
            0x7fff_fffe => continue,
            0xffff_ffff => break,
            other => {
                return Err(Error::unsupported(format!("the DMG has chunks of the unknown type {other:#x}")));
            }
        };
        if len == 0 {
            continue;
        }
        match content {
            Content::Zero => {}
            Content::Stored { offset } => source.check(offset, len.min(stored), "a chunk of the DMG")?,
            Content::Packed { offset, len: stored, .. } => {
                require!(
                    len <= MAX_PACKED_UNIT && stored <= MAX_PACKED_UNIT.saturating_mul(2),
                    "a chunk of the DMG with {len} bytes in {stored} is too large"
                );
                ensure!(stored > 0, "a chunk of the DMG is empty");
                source.check(offset, stored, "a chunk of the DMG")?;
            }
        }
        if let Content::Stored { .. } = content {
            ensure!(stored == len, "a stored chunk of the DMG has {stored} bytes for {len}");
        }
        chunks.push(Chunk { start, len, content });
    }
    Ok(())
}

fn unsupported(method: &str) -> Error {
    Error::unsupported(format!(
        "the DMG is compressed with {method}, which is not supported; convert it by `hdiutil convert -format UDZO`"
    ))
}

impl Map {
    pub(crate) fn run(&self, guest: u64, max_len: u64) -> Run {
        let after = self.chunks.partition_point(|chunk| chunk.start <= guest);
        let found = after.checked_sub(1).and_then(|at| self.chunks.get(at));
        let within = |chunk: &&Chunk| guest.checked_sub(chunk.start).is_some_and(|within| within < chunk.len);
        let Some(chunk) = found.filter(within) else {
            let next = self.chunks.get(after).map_or(self.size, |chunk| chunk.start);
            return Run { kind: Kind::Hole, len: next.saturating_sub(guest).min(max_len) };
        };
        let within = guest.saturating_sub(chunk.start);
        let kind = match chunk.content {
            Content::Zero => Kind::Zero,
            Content::Stored { offset } => {
                Kind::Data { file: FileIndex::IMAGE, offset: offset.saturating_add(within) }
            }
            Content::Packed { offset, len, packing } => Kind::Packed(Packed {
                file: FileIndex::IMAGE,
                offset,
                len,
                packing,
                start: chunk.start,
                unit: chunk.len,
            }),
        };
        Run { kind, len: chunk.len.saturating_sub(within).min(max_len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4648, 10.
    #[test]
    fn base64_is_decoded() {
        assert_eq!(from_base64("Zm9v\n\tYmFy").unwrap(), b"foobar");
        assert_eq!(from_base64("Zm9vYg==").unwrap(), b"foob");
        assert_eq!(from_base64(""), Some(Vec::new()));
        assert_eq!(from_base64("Zm-v"), None);
    }
}
