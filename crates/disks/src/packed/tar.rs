//! The members of a tar file, such as an OVA: their names, and where their bytes lie.

use super::pieces::{Pieces, Range};
use std::fs::File;
use std::io;

/// Bytes of a block.
const BLOCK: u64 = 512;
/// Headers that are looked at in one file.
const MOST_HEADERS: usize = 100_000;
/// Bytes of a long name or of extended attributes.
const MOST_ATTRIBUTES: u64 = 1 << 20;
/// Bytes of a name.
const MOST_NAME: usize = 4096;
/// Runs of data in the map of a sparse member, and of all members.
const MOST_RUNS: u64 = 1 << 20;

/// A regular file in a tar file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    /// Its name, which may be in any encoding.
    pub(crate) name: Vec<u8>,
    pub(crate) bytes: Pieces,
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

fn text(field: &[u8]) -> Vec<u8> {
    field.split(|byte| *byte == 0).next().unwrap_or_default().to_owned()
}

fn damaged(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Attributes of the next member, as extended headers tell them.
#[derive(Debug, Default)]
struct Attributes {
    name: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: Sparse,
}

/// Attributes about the holes in it (GNU tar's `--sparse`, versions 0.0 to 1.0).
#[derive(Debug, Default)]
struct Sparse {
    /// Whether there are any.
    is_told: bool,
    name: Option<Vec<u8>>,
    len: Option<u64>,
    /// Offset and length of each run of data, one after the other.
    map: Vec<u64>,
    /// The map stands before the data (version 1.0).
    is_map_in_data: bool,
}

/// The data of a sparse member: offsets and lengths, and the length of all.
struct Map {
    len: u64,
    runs: Vec<(u64, u64)>,
}

/// A tar file that is being read.
struct Archive<'a> {
    file: &'a File,
    bytes: &'a Pieces,
}

impl Archive<'_> {
    fn block(&self, at: u64) -> io::Result<[u8; BLOCK as usize]> {
        let mut block = [0; BLOCK as usize];
        self.bytes.read_exact_at(self.file, &mut block, at)?;
        Ok(block)
    }

    fn attributes(&self, place: Range) -> io::Result<Vec<u8>> {
        let Range { start, len } = place;
        if len > MOST_ATTRIBUTES {
            return Err(damaged(format!("the attributes of a member have {len} bytes")));
        }
        let mut bytes = vec![0; len as usize];
        self.bytes.read_exact_at(self.file, &mut bytes, start)?;
        Ok(bytes)
    }

    /// The map in the old header of GNU, which is at `at`, and how many blocks behind it go on with it.
    fn old_map(&self, header: &[u8], at: u64) -> io::Result<(Map, u64)> {
        let len = number(&header[483..495]).ok_or_else(|| bad_map(at))?;
        let mut runs = Vec::new();
        let mut take = |entries: &[u8]| {
            for entry in entries.as_chunks::<24>().0.iter().take_while(|entry| entry[12] != 0) {
                let run = number(&entry[..12]).zip(number(&entry[12..]));
                runs.push(run.ok_or_else(|| bad_map(at))?);
            }
            if runs.len() as u64 > MOST_RUNS { Err(too_many_runs()) } else { Ok(()) }
        };
        take(&header[386..482])?;
        let (mut goes_on, mut blocks) = (header[482] != 0, 0);
        while goes_on {
            blocks += 1;
            let block = self.block(at + blocks * BLOCK)?;
            take(&block[..504])?;
            goes_on = block[504] != 0;
        }
        Ok((Map { len, runs }, blocks))
    }

    /// The map of a member whose data are at `place`, and the rest of that.
    fn pax_map(&self, sparse: Sparse, mut place: Range) -> io::Result<(Map, Range)> {
        let bad = || bad_map(place.start);
        let len = sparse.len.ok_or_else(bad)?;
        let mut numbers = sparse.map;
        if sparse.is_map_in_data {
            let blocks = self.numbers(place, &mut numbers)?;
            place = Range { start: place.start + blocks * BLOCK, len: place.len - blocks * BLOCK };
        }
        let (pairs, rest) = numbers.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(bad_map(place.start));
        }
        Ok((Map { len, runs: pairs.iter().map(|&[at, len]| (at, len)).collect() }, place))
    }

    /// Reads how many runs there are, and then the offset and the length of each: decimal, a number a line. Returns how many
    /// blocks they take.
    fn numbers(&self, place: Range, found: &mut Vec<u64>) -> io::Result<u64> {
        let mut wanted = None;
        let mut digits: Option<u64> = None;
        for read in 0..place.len / BLOCK {
            for byte in self.block(place.start + read * BLOCK)? {
                match byte {
                    b'0'..=b'9' => {
                        let next = digits.unwrap_or(0).checked_mul(10);
                        let next = next.and_then(|value| value.checked_add(u64::from(byte - b'0')));
                        digits = Some(next.ok_or_else(|| bad_map(place.start))?);
                    }
                    b'\n' => {
                        let number = digits.take().ok_or_else(|| bad_map(place.start))?;
                        match wanted {
                            None if number > MOST_RUNS => return Err(too_many_runs()),
                            None => wanted = Some(number as usize * 2),
                            Some(_) => found.push(number),
                        }
                        if wanted == Some(found.len()) {
                            return Ok(read + 1);
                        }
                    }
                    _ => return Err(bad_map(place.start)),
                }
            }
        }
        Err(bad_map(place.start))
    }

    /// The bytes of a sparse member, whose data lie one behind the other at `place`.
    fn with_holes(&self, map: &Map, place: Range) -> io::Result<Pieces> {
        let bad = || bad_map(place.start);
        if i64::try_from(map.len).is_err() {
            return Err(bad());
        }
        let mut found = Pieces::default();
        let mut taken = 0;
        for &(at, len) in map.runs.iter().filter(|(_, len)| *len > 0) {
            let fits = at >= found.len()
                && at.checked_add(len).is_some_and(|end| end <= map.len)
                && len <= place.len - taken;
            if !fits {
                return Err(bad());
            }
            found.grow_to(at);
            found.append(&self.bytes.part(Range { start: place.start + taken, len }))?;
            taken += len;
        }
        if taken != place.len {
            return Err(bad());
        }
        found.grow_to(map.len);
        Ok(found)
    }
}

fn bad_map(at: u64) -> io::Error {
    damaged(format!("the map of the sparse member at {at} of the tar file is damaged"))
}

fn too_many_runs() -> io::Error {
    damaged(format!("sparse members have more than {MOST_RUNS} runs of data: unpack them first"))
}

/// The regular files in the tar file whose bytes are `bytes` of `file`.
pub(crate) fn members(file: &File, bytes: &Pieces) -> io::Result<Vec<Member>> {
    let archive = Archive { file, bytes };
    let mut found = Vec::new();
    let mut next = Attributes::default();
    let (mut at, mut runs) = (0u64, 0);
    for _ in 0..MOST_HEADERS {
        if at.checked_add(BLOCK).is_none_or(|end| end > bytes.len()) {
            return Ok(found);
        }
        let block = archive.block(at)?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(found);
        }
        if !has_checksum(&block) {
            return Err(damaged(format!("the header of a member at {at} of the tar file is damaged")));
        }
        let size = number(&block[124..136]);
        let size = size.ok_or_else(|| damaged(format!("the size of a member at {at} is damaged")))?;
        let kind = block[156];
        let is_file = matches!(kind, b'0' | 0 | b'7' | b'S');
        let size = if is_file { next.size.take().unwrap_or(size) } else { size };
        let (old_map, more) = match kind {
            b'S' => archive.old_map(&block, at).map(|(map, blocks)| (Some(map), blocks))?,
            _ => (None, 0),
        };
        let start = at + (1 + more) * BLOCK;
        let end = start.checked_add(size).filter(|end| *end <= bytes.len());
        let end = end.ok_or_else(|| damaged(format!("a member of {size} bytes at {at} is cut off")))?;
        let place = Range { start, len: size };
        match kind {
            b'x' => next.parse(&archive.attributes(place)?)?,
            b'g' => {
                let mut all = Attributes::default();
                all.parse(&archive.attributes(place)?)?;
                if all.sparse.is_told {
                    return Err(bad_map(at));
                }
            }
            b'L' => next.name = Some(text(&archive.attributes(place)?)),
            _ if is_file => {
                let said = std::mem::take(&mut next);
                let name = said.sparse.name.clone().or(said.name).unwrap_or_else(|| name_in(&block));
                let bytes = match old_map {
                    Some(map) => archive.with_holes(&map, place)?,
                    None if said.sparse.is_told => {
                        let (map, place) = archive.pax_map(said.sparse, place)?;
                        archive.with_holes(&map, place)?
                    }
                    None => bytes.part(place),
                };
                if name.len() > MOST_NAME {
                    return Err(damaged(format!("the name of the member at {at} has {} bytes", name.len())));
                }
                runs += bytes.count() as u64;
                if runs > MOST_RUNS {
                    return Err(too_many_runs());
                }
                found.push(Member { name, bytes });
            }
            _ => next = Attributes::default(),
        }
        at = end.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
    }
    Err(damaged(format!("the tar file has more than {MOST_HEADERS} members")))
}

/// The name that a header tells.
fn name_in(block: &[u8]) -> Vec<u8> {
    let (name, prefix) = (text(&block[..100]), text(&block[345..500]));
    if prefix.is_empty() || block[257..263] != *b"ustar\0" {
        name
    } else {
        [&prefix[..], b"/", &name].concat()
    }
}

impl Attributes {
    /// Takes lines of `LEN KEY=VALUE` (POSIX).
    fn parse(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while let Some(space) = bytes.iter().position(|byte| *byte == b' ') {
            let len = std::str::from_utf8(&bytes[..space]).ok().and_then(|len| len.parse::<usize>().ok());
            let Some(len) = len.filter(|len| (space + 1..=bytes.len()).contains(len)) else { break };
            let record = bytes[space + 1..len].strip_suffix(b"\n").unwrap_or(&bytes[space + 1..len]);
            if let Some(equals) = record.iter().position(|byte| *byte == b'=') {
                let (key, value) = (&record[..equals], &record[equals + 1..]);
                match key {
                    b"path" => self.name = Some(value.to_owned()),
                    b"size" => self.size = decimal(value),
                    _ => {
                        if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                            self.sparse.take(key, value)?;
                        }
                    }
                }
            }
            bytes = &bytes[len..];
        }
        Ok(())
    }
}

impl Sparse {
    /// Takes what one attribute says.
    fn take(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.is_told = true;
        let bad = || damaged("the attributes of a sparse member are damaged");
        let number = || decimal(value).ok_or_else(bad);
        match key {
            b"name" => self.name = Some(value.to_owned()),
            b"size" | b"realsize" => self.len = Some(number()?),
            b"major" => self.is_map_in_data = number()? == 1,
            b"offset" | b"numbytes" => self.map.push(number()?),
            b"map" => {
                for value in value.split(|byte| *byte == b',') {
                    self.map.push(decimal(value).ok_or_else(bad)?);
                }
            }
            b"minor" if number()? != 0 => {
                return Err(damaged("a sparse member is of an unknown version: unpack it first"));
            }
            _ => {}
        }
        Ok(())
    }
}

fn decimal(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::process::Command;

    /// Every way in which GNU tar tells of holes, with many and few runs of data, at the start and the end and nowhere.
    #[test]
    fn sparse_members_are_read_as_tar_unpacks_them() {
        let dir = tempfile::tempdir().unwrap();
        for runs in [0usize, 1, 3, 5, 30, 100] {
            std::fs::write(dir.path().join("other"), "behind it").unwrap();
            let disk = std::fs::File::create(dir.path().join("disk.raw")).unwrap();
            disk.set_len(64 << 20).unwrap();
            let mut expected = vec![0; 64 << 20];
            for run in 0..runs {
                let at = (run * (64 << 20) / runs) & !4095;
                let bytes = vec![run as u8 + 1; 3000];
                disk.write_all_at(&bytes, at as u64).unwrap();
                expected[at..at + 3000].copy_from_slice(&bytes);
            }
            for format in [
                "--format=oldgnu",
                "--format=gnu",
                "--format=posix",
                "--sparse-version=0.0 --format=posix",
                "--sparse-version=0.1 --format=posix",
            ] {
                let status = Command::new("tar")
                    .args(format.split(' '))
                    .args(["-Scf", "x.tar", "disk.raw", "other"])
                    .current_dir(dir.path())
                    .status()
                    .unwrap();
                assert!(status.success());
                let file = std::fs::File::open(dir.path().join("x.tar")).unwrap();
                let len = file.metadata().unwrap().len();
                let found = members(&file, &Pieces::of(Range { start: 0, len })).unwrap();
                let [member, other] = &found[..] else { panic!("{found:?}") };
                assert_eq!(other.name, b"other", "{format}");
                assert_eq!(member.name, b"disk.raw", "{format}");
                assert!(member.bytes.has_holes() && member.bytes.len() == 64 << 20, "{format}");
                let mut out = vec![1; 64 << 20];
                member.bytes.read_exact_at(&file, &mut out, 0).unwrap();
                assert!(out == expected, "{format}, {runs}");
            }
        }
    }

    /// A tar file with one sparse member, whose map is this text.
    fn with_map(map: &str, real: &str) -> io::Result<Vec<Member>> {
        let mut file = Vec::new();
        let mut add = |kind: u8, data: &[u8]| {
            let mut header = [0; 512];
            header[0] = b'd';
            header[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
            header[156] = kind;
            header[148..156].fill(b' ');
            let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            file.extend_from_slice(&header);
            file.extend_from_slice(data);
            file.resize(file.len().next_multiple_of(512), 0);
        };
        let record = |key: &str, value: &str| {
            let rest = format!(" GNU.sparse.{key}={value}\n");
            let len = rest.len() + 2;
            assert!((10..100).contains(&len));
            format!("{len}{rest}")
        };
        let said =
            [("major", "1"), ("minor", "0"), ("realsize", real)].map(|(key, value)| record(key, value));
        add(b'x', said.concat().as_bytes());
        let mut data = map.as_bytes().to_owned();
        data.resize(data.len().next_multiple_of(512), 0);
        data.extend_from_slice(&[7; 1024]);
        add(b'0', &data);
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(path.path(), &file).unwrap();
        members(path.as_file(), &Pieces::of(Range { start: 0, len: file.len() as u64 }))
    }

    #[test]
    fn maps_that_lie_are_errors() {
        assert_eq!(with_map("1\n0\n1024\n", "4096").unwrap()[0].bytes.len(), 4096);
        for (map, real) in [
            ("1\n0\n1024\n", "100"),
            ("1\n0\n1000\n", "4096"),
            ("1\n0\n2048\n", "4096"),
            ("2\n512\n512\n0\n512\n", "4096"),
            ("1\n18446744073709551615\n1024\n", "18446744073709551615"),
            ("1\n0\n1024\n", "18446744073709551615"),
            ("99999999\n0\n1\n", "4096"),
            ("1\n0\n", "4096"),
            ("", "4096"),
            ("-1\n", "4096"),
            ("1\n0\n1024\n", "x"),
            ("99999999999999999999999\n", "4096"),
        ] {
            assert!(with_map(map, real).is_err(), "{map:?} {real}");
        }
    }
}
