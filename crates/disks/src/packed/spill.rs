//! Unpacked bytes in a file without a name: what is in a packed file is read at any place, and several times.

use super::decoding::Source;
use rustix::fs::{CWD, Mode, OFlags};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes that are unpacked at once.
const OUTPUT: usize = 1 << 20;
/// Blocks of zeroes are not written.
const BLOCK: usize = 64 << 10;

/// An empty file without a name in a directory. Where the file system has none, one whose name is taken away at once.
pub(crate) fn unnamed_file(directory: &Path) -> io::Result<File> {
    let how = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::openat(CWD, directory, how, Mode::RUSR | Mode::WUSR) {
        return Ok(File::from(fd));
    }
    for attempt in 0..100 {
        let path = directory.join(format!(".zebu-unpacked-{}-{attempt}", std::process::id()));
        let mut options = std::fs::OpenOptions::new();
        match options.read(true).write(true).create_new(true).open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// How unpacking ended early.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// It was cancelled.
    Cancelled,
    /// There are more bytes than are allowed.
    TooLarge,
    /// The packed file can't be read, or is damaged.
    Source(io::Error),
    /// The file can't be written.
    Target(io::Error),
}

/// Unpacks `source` into `out`, at most `limit` bytes. `on` hears how many bytes were unpacked. Returns the length.
pub(super) fn unpack(source: &Source, out: &File, limit: u64, on: impl Fn(u64)) -> Result<u64, Stopped> {
    let failed =
        |error| if source.cancel.is_cancelled() { Stopped::Cancelled } else { Stopped::Source(error) };
    let mut decoder = source.decoder(Arc::default()).map_err(failed)?;
    let mut buffer = vec![0; OUTPUT];
    let mut len = 0u64;
    loop {
        let filled = fill(&mut *decoder, &mut buffer).map_err(failed)?;
        let bytes = &buffer[..filled];
        if len.saturating_add(filled as u64) > limit {
            return Err(Stopped::TooLarge);
        }
        for (block, at) in bytes.chunks(BLOCK).zip((len..).step_by(BLOCK)) {
            if !is_zero(block) {
                out.write_all_at(block, at).map_err(Stopped::Target)?;
            }
        }
        len += filled as u64;
        on(len);
        if source.cancel.is_cancelled() {
            return Err(Stopped::Cancelled);
        }
        if filled < buffer.len() {
            out.set_len(len).map_err(Stopped::Target)?;
            return Ok(len);
        }
    }
}

/// Fills a buffer, unless the stream ends before.
fn fill(decoder: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match decoder.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}
