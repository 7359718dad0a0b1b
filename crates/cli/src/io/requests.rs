//! Commands that are one request each: `read`, `readv`, `write`, `writev`, `discard`, `flush`, `truncate`.

use super::call::{Call, Outcome, fail, tell_error, tell_failure};
use super::numbers::{MAX_REQUEST, lengths, offset, pattern};
use super::report::{ReportStyle, dump_text, request_text};
use super::state::{OpenImage, State};
use super::words::Parsed;
use crate::failure::Failure;
use crate::output::stdout;
use crate::values::{Discard, preallocation_argument};
use std::time::Instant;
use zebu_disks::errno_text;
use zebu_engine::storage::IoBufs;
use zebu_engine::{Durability, Error, Format, Shrink, ZeroMode};

/// The content of buffers before a read.
pub(crate) const READ_FILL: u8 = 0xab;
/// The content of buffers for a write, if not told otherwise.
pub(crate) const WRITE_FILL: u8 = 0xcd;

/// How a request is told.
pub(crate) fn style(parsed: &Parsed<'_>) -> ReportStyle {
    if parsed.has('q') {
        ReportStyle::Quiet
    } else if parsed.has('C') {
        ReportStyle::Machine
    } else {
        ReportStyle::Human
    }
}

/// Refuses options that qemu-io has and this command does not.
pub(crate) fn refuse(call: &Call<'_>, parsed: &Parsed<'_>, letters: &[(char, &str)]) -> bool {
    for (letter, reason) in letters {
        if parsed.has(*letter) {
            tell_error(&format!("{}: option -{letter} is not supported: {reason}", call.info.text));
            return true;
        }
    }
    false
}

fn failed(state: &State, verb: &str, error: &Error) -> Result<Outcome, Failure> {
    if verb != "read" {
        state.session.damage().tell(error);
    }
    fail(&format!("{verb} failed: {}", errno_text(error.errno())))
}

/// A buffer for each length, in one list.
fn buffers(state: &State, lengths: &[usize], byte: u8) -> IoBufs {
    let mut bufs = IoBufs::new();
    for &length in lengths {
        bufs.push_part(state.buffer(length, byte));
    }
    bufs
}

/// All bytes of a list of buffers.
pub(crate) fn bytes_of(bufs: &IoBufs) -> Vec<u8> {
    let mut bytes = vec![0; bufs.len()];
    bufs.copy_to(0, &mut bytes);
    bytes
}

/// A comparison after a read.
struct Verification {
    byte: u8,
    offset: u64,
    length: u64,
}

pub(crate) fn read(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("bCl:pP:qrs:v")? else { return Ok(Outcome::Failed) };
    let &[offset_text, length_text] = parsed.operands.as_slice() else { return call.usage() };
    if parsed.value('P').is_none() && (parsed.has('s') || parsed.has('l')) {
        return call.usage();
    }
    let (start, length) = match (offset(offset_text), offset(length_text)) {
        (Ok(start), Ok(length)) => (start, length),
        (Err(message), _) | (_, Err(message)) => return fail(&message),
    };
    if length > MAX_REQUEST {
        return fail(&format!("length cannot exceed {MAX_REQUEST}, given {length_text}"));
    }
    let verification = match verification(&parsed, length) {
        Ok(verification) => verification,
        Err(message) => return fail(&message),
    };
    if parsed.has('b')
        && let Err(message) = whole_sectors(start, length)
    {
        return fail(&message);
    }
    read_bufs(state, open, &parsed, start, &[length as usize], verification, "read")
}

/// Fails unless a range consists of whole sectors, as VM state and compressed data must.
fn whole_sectors(start: u64, length: u64) -> Result<(), String> {
    let is_whole = |value: u64, name: &str| match value % 512 {
        0 => Ok(()),
        _ => Err(format!("{value} is not a sector-aligned value for '{name}'")),
    };
    is_whole(start, "offset")?;
    is_whole(length, "count")
}

fn verification(parsed: &Parsed<'_>, length: u64) -> Result<Option<Verification>, String> {
    let Some(text) = parsed.value('P') else { return Ok(None) };
    let byte = pattern(text)?;
    let skip = parsed.value('s').map_or(Ok(0), offset)?;
    let count = match parsed.value('l') {
        Some(text) => offset(text)?,
        None => length.checked_sub(skip).ok_or("pattern verification range exceeds end of read data")?,
    };
    if skip.checked_add(count).is_none_or(|end| end > length) {
        return Err("pattern verification range exceeds end of read data".to_owned());
    }
    Ok(Some(Verification { byte, offset: skip, length: count }))
}

pub(crate) fn readv(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("CP:qrv")? else { return Ok(Outcome::Failed) };
    let Some((offset_text, length_texts)) =
        parsed.operands.split_first().filter(|(_, rest)| !rest.is_empty())
    else {
        return call.usage();
    };
    let (start, lengths) = match (offset(offset_text), lengths(length_texts)) {
        (Ok(start), Ok(lengths)) => (start, lengths),
        (Err(message), _) | (_, Err(message)) => return fail(&message),
    };
    let verification = match verification(&parsed, lengths.iter().map(|&length| length as u64).sum()) {
        Ok(verification) => verification,
        Err(message) => return fail(&message),
    };
    read_bufs(state, open, &parsed, start, &lengths, verification, "readv")
}

fn read_bufs(
    state: &State,
    open: &OpenImage,
    parsed: &Parsed<'_>,
    start: u64,
    lengths: &[usize],
    verification: Option<Verification>,
    verb: &str,
) -> Result<Outcome, Failure> {
    let bufs = buffers(state, lengths, READ_FILL);
    let worker = state.session.worker();
    let begun = Instant::now();
    let (result, bufs) = if parsed.has('b') {
        match worker.block_on(open.below.read_vm_state(worker, start, bufs)) {
            Ok(bufs) => (Ok(()), bufs),
            Err(error) => (Err(error), IoBufs::new()),
        }
    } else {
        worker.block_on(open.image.read(worker, start, bufs))
    };
    let elapsed = begun.elapsed();
    if let Err(error) = result {
        return failed(state, verb, &error);
    }
    let mut outcome = Outcome::Done;
    let mut text = String::new();
    let style = style(parsed);
    if verification.is_some() || parsed.has('v') {
        let bytes = bytes_of(&bufs);
        if let Some(Verification { byte, offset, length }) = verification {
            let range = &bytes[offset as usize..(offset + length) as usize];
            if range.iter().any(|&read| read != byte) {
                text = format!("Pattern verification failed at offset {}, {length} bytes\n", start + offset);
                outcome = Outcome::Failed;
            }
        }
        if parsed.has('v') && style != ReportStyle::Quiet {
            text.push_str(&dump_text(start, &bytes));
        }
    }
    text.push_str(&request_text("read", start, bufs.len() as u64, elapsed, style));
    stdout::print(&text)?;
    Ok(outcome)
}

pub(crate) fn write(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("bcCfnpP:qrs:uz")? else { return Ok(Outcome::Failed) };
    let &[offset_text, length_text] = parsed.operands.as_slice() else { return call.usage() };
    if parsed.has('n') && !parsed.has('z') {
        return fail("-n requires -z to be specified");
    }
    if parsed.has('u') && !parsed.has('z') {
        return fail("-u requires -z to be specified");
    }
    if parsed.has('b') && parsed.has('c') {
        return fail("-b and -c cannot be specified at the same time");
    }
    if parsed.has('b') && parsed.has('z') {
        return fail("-b and -z cannot be specified at the same time");
    }
    if parsed.has('f') && (parsed.has('b') || parsed.has('c')) {
        return fail("-f and -b or -c cannot be specified at the same time");
    }
    if ['z', 'P', 's'].iter().filter(|letter| parsed.has(**letter)).count() > 1 {
        return fail("Only one of -z, -P, and -s can be specified at the same time");
    }
    let (start, length) = match (offset(offset_text), offset(length_text)) {
        (Ok(start), Ok(length)) => (start, length),
        (Err(message), _) | (_, Err(message)) => return fail(&message),
    };
    if length > MAX_REQUEST && !parsed.has('n') {
        return fail(&format!("length cannot exceed {MAX_REQUEST} without -n, given {length_text}"));
    }
    if (parsed.has('b') || parsed.has('c'))
        && let Err(message) = whole_sectors(start, length)
    {
        return fail(&message);
    }
    if parsed.has('z') {
        return write_zeroes(state, open, &parsed, start, length);
    }
    let byte = match parsed.value('P').map_or(Ok(WRITE_FILL), pattern) {
        Ok(byte) => byte,
        Err(message) => return fail(&message),
    };
    let mut bufs = buffers(state, &[length as usize], byte);
    if let Some(file) = parsed.value('s') {
        match std::fs::read(file) {
            Ok(content) if content.is_empty() => {
                tell_error(&format!("{file}: file is empty"));
                return Ok(Outcome::Failed);
            }
            Ok(content) => {
                if let Some(buf) = bufs.parts_mut().first_mut() {
                    fill_with(buf.as_mut_slice(), &content);
                }
            }
            Err(error) => {
                let words = error.raw_os_error().map_or_else(|| error.to_string(), errno_text);
                tell_error(&format!("{file}: {words}"));
                return Ok(Outcome::Failed);
            }
        }
    }
    write_bufs(state, open, &parsed, start, bufs, "write")
}

/// Repeats `content` until the buffer is full.
fn fill_with(buffer: &mut [u8], content: &[u8]) {
    for piece in buffer.chunks_mut(content.len()) {
        piece.copy_from_slice(&content[..piece.len()]);
    }
}

fn write_zeroes(
    state: &State,
    open: &OpenImage,
    parsed: &Parsed<'_>,
    start: u64,
    length: u64,
) -> Result<Outcome, Failure> {
    if parsed.has('n') && !zeroes_quickly(open, start, length) {
        return fail("write failed: Operation not supported");
    }
    let mode = if parsed.has('u') && open.discard(&state.defaults) == Discard::Unmap {
        ZeroMode::Unmap
    } else {
        ZeroMode::Keep
    };
    let worker = state.session.worker();
    let begun = Instant::now();
    let result = worker.block_on(async {
        open.image.write_zeroes(worker, start, length, mode).await?;
        if parsed.has('f') { open.image.flush(worker).await } else { Ok(()) }
    });
    let elapsed = begun.elapsed();
    match result {
        Ok(()) => {
            stdout::print(&request_text("wrote", start, length, elapsed, style(parsed)))?;
            Ok(Outcome::Done)
        }
        Err(error) => failed(state, "write", &error),
    }
}

/// Whether zeroes take no longer than changing the mapping: whole clusters of a format that has zero clusters, or a
/// file system that zeroes ranges by itself.
fn zeroes_quickly(open: &OpenImage, start: u64, length: u64) -> bool {
    match open.image.format() {
        Format::Raw => {
            open.image.data_file_at(0).is_some_and(|file| file.can_zero_range() || file.can_punch())
        }
        Format::Qcow2 => {
            let cluster = open.image.cluster_size().max(1);
            let end = start.saturating_add(length);
            let has_zero_clusters =
                open.image.info().is_ok_and(|info| info.qcow2.is_some_and(|qcow2| qcow2.version >= 3));
            has_zero_clusters
                && start.is_multiple_of(cluster)
                && (end.is_multiple_of(cluster) || end == open.image.virtual_size())
        }
        _ => false,
    }
}

pub(crate) fn writev(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("CfqP:r")? else { return Ok(Outcome::Failed) };
    let Some((offset_text, length_texts)) =
        parsed.operands.split_first().filter(|(_, rest)| !rest.is_empty())
    else {
        return call.usage();
    };
    let byte = match parsed.value('P').map_or(Ok(WRITE_FILL), pattern) {
        Ok(byte) => byte,
        Err(message) => return fail(&message),
    };
    let (start, lengths) = match (offset(offset_text), lengths(length_texts)) {
        (Ok(start), Ok(lengths)) => (start, lengths),
        (Err(message), _) | (_, Err(message)) => return fail(&message),
    };
    let bufs = buffers(state, &lengths, byte);
    write_bufs(state, open, &parsed, start, bufs, "writev")
}

fn write_bufs(
    state: &State,
    open: &OpenImage,
    parsed: &Parsed<'_>,
    start: u64,
    bufs: IoBufs,
    verb: &str,
) -> Result<Outcome, Failure> {
    let length = bufs.len() as u64;
    let durability = if parsed.has('f') { Durability::Durable } else { Durability::Volatile };
    let worker = state.session.worker();
    let begun = Instant::now();
    let (result, _bufs) = worker.block_on(async {
        let zeroing = open.spec.detect_zeroes.filter(|_| bytes_of(&bufs).iter().all(|&byte| byte == 0));
        if parsed.has('b') {
            (open.below.write_vm_state(worker, start, bufs).await, IoBufs::new())
        } else if parsed.has('c') {
            open.image.write_compressed(worker, start, bufs, durability).await
        } else if let Some(mode) = zeroing {
            match (open.image.write_zeroes(worker, start, length, mode).await, durability) {
                (Ok(()), Durability::Durable) => (open.image.flush(worker).await, bufs),
                (result, _) => (result, bufs),
            }
        } else {
            open.image.write(worker, start, bufs, durability).await
        }
    });
    let elapsed = begun.elapsed();
    match result {
        Ok(()) => {
            stdout::print(&request_text("wrote", start, length, elapsed, style(parsed)))?;
            Ok(Outcome::Done)
        }
        Err(error) => failed(state, verb, &error),
    }
}

pub(crate) fn discard(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("Cq")? else { return Ok(Outcome::Failed) };
    let &[offset_text, length_text] = parsed.operands.as_slice() else { return call.usage() };
    let (start, length) = match (offset(offset_text), offset(length_text)) {
        (Ok(start), Ok(length)) => (start, length),
        (Err(message), _) | (_, Err(message)) => return fail(&message),
    };
    if length > MAX_REQUEST {
        return fail(&format!("length cannot exceed {MAX_REQUEST}, given {length_text}"));
    }
    let worker = state.session.worker();
    let begun = Instant::now();
    let result = match open.discard(&state.defaults) {
        Discard::Unmap => worker.block_on(open.image.discard(worker, start, length)),
        Discard::Ignore => check_range(open, start, length),
    };
    let elapsed = begun.elapsed();
    match result {
        Ok(()) => {
            stdout::print(&request_text("discard", start, length, elapsed, style(&parsed)))?;
            Ok(Outcome::Done)
        }
        Err(error) => failed(state, "discard", &error),
    }
}

/// A discard that is ignored still has to lie on the disk.
fn check_range(open: &OpenImage, start: u64, length: u64) -> zebu_engine::Result<()> {
    match start.checked_add(length) {
        Some(end) if end <= open.image.virtual_size() => Ok(()),
        _ => {
            Err(Error::new(zebu_engine::ErrorKind::OutOfRange, "the range reaches past the end of the disk"))
        }
    }
}

pub(crate) fn flush(state: &State, open: &OpenImage) -> Result<Outcome, Failure> {
    let worker = state.session.worker();
    match worker.block_on(open.image.flush(worker)) {
        Ok(()) => Ok(Outcome::Done),
        Err(error) => failed(state, "flush", &error),
    }
}

pub(crate) fn truncate(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("m:")? else { return Ok(Outcome::Failed) };
    let &[size_text] = parsed.operands.as_slice() else { return call.usage() };
    let mode_text = parsed.value('m').unwrap_or("off");
    let Ok(preallocation) = preallocation_argument(mode_text) else {
        return Ok(tell_failure(
            state.session.dialect(),
            &Failure::new(format!("Invalid preallocation mode '{mode_text}'")),
        ));
    };
    let size = match offset(size_text) {
        Ok(size) => size,
        Err(message) => return fail(&message),
    };
    let worker = state.session.worker();
    match worker.block_on(open.image.resize(worker, size, Shrink::Allow, preallocation)) {
        Ok(()) => Ok(Outcome::Done),
        Err(error) => Ok(tell_failure(state.session.dialect(), &Failure::from(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::words::parse_options;

    fn verify(words: &[&str], length: u64) -> Result<Option<(u8, u64, u64)>, String> {
        let parsed = parse_options(words, "P:s:l:").unwrap();
        verification(&parsed, length).map(|found| found.map(|v| (v.byte, v.offset, v.length)))
    }

    #[test]
    fn verification_covers_what_is_left_after_its_start() {
        assert_eq!(verify(&[], 512), Ok(None));
        assert_eq!(verify(&["-P", "7"], 512), Ok(Some((7, 0, 512))));
        assert_eq!(verify(&["-P", "7", "-s", "100"], 512), Ok(Some((7, 100, 412))));
        assert_eq!(verify(&["-P", "7", "-s", "4", "-l", "2"], 512), Ok(Some((7, 4, 2))));
    }

    #[test]
    fn verification_past_the_read_is_refused() {
        for words in [["-P", "7", "-s", "513"], ["-P", "7", "-l", "1k"]] {
            assert!(verify(&words, 512).is_err(), "{words:?}");
        }
        assert!(verify(&["-P", "7", "-s", "1", "-l", "512"], 512).is_err());
    }

    #[test]
    fn files_are_repeated_into_buffers() {
        let mut buffer = [0; 7];
        fill_with(&mut buffer, b"abc");
        assert_eq!(&buffer, b"abcabca");
    }
}
