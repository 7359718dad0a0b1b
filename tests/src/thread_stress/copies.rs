//! Copies of files as they were at one moment.
//!
//! The process that writes them stands still, or is dead; what it had handed to the kernel may still be on its way. A copy
//! is good if the file is the same when it is read again: then it was so at the moment between the two.

use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;
use zebu_engine::storage::IoBuf;

/// Whether files are read through the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Through {
    /// They are.
    PageCache,
    /// They are not: pages that somebody reads are in the way of a direct write that ends.
    Direct,
}

const PIECE: usize = 1 << 20;
const ATTEMPTS: u32 = 50;

/// Goes over a file; its length and what the hash of its content is.
fn scan(
    file: &File,
    buffer: &mut IoBuf,
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<(u64, u64)> {
    let mut hasher = DefaultHasher::new();
    let len = file.metadata()?.len();
    let mut at = 0;
    while at < len {
        let count = file.read_at(buffer.as_mut_slice(), at)?;
        if count == 0 {
            break;
        }
        let bytes = &buffer.as_slice()[..count];
        bytes.hash(&mut hasher);
        each(at, bytes)?;
        at += count as u64;
    }
    Ok((len, hasher.finish()))
}

fn attempt(from: &[File], to: &[std::path::PathBuf]) -> io::Result<bool> {
    let mut buffer = IoBuf::zeroed(PIECE);
    let mut first = Vec::new();
    for (file, path) in from.iter().zip(to) {
        let copy = File::create(path)?;
        let found = scan(file, &mut buffer, |at, bytes| {
            if bytes.iter().all(|byte| *byte == 0) { Ok(()) } else { copy.write_all_at(bytes, at) }
        })?;
        copy.set_len(found.0)?;
        first.push(found);
    }
    for (file, found) in from.iter().zip(first) {
        if scan(file, &mut buffer, |_, _| Ok(()))? != found {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Copies files of these names from one directory to another, all as they were at one moment. Files that are not there
/// are left out.
///
/// # Errors
/// A file can't be read or written, or never comes to rest.
pub fn take(from: &Path, to: &Path, names: &[&str], through: Through) -> io::Result<()> {
    std::fs::create_dir_all(to)?;
    let flags = if through == Through::Direct { libc::O_DIRECT } else { 0 };
    let (mut sources, mut targets) = (Vec::new(), Vec::new());
    for name in names {
        match OpenOptions::new().read(true).custom_flags(flags).open(from.join(name)) {
            Ok(file) => {
                sources.push(file);
                targets.push(to.join(name));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    for _ in 0..ATTEMPTS {
        if attempt(&sources, &targets)? {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(io::Error::other("the files change although nobody writes them"))
}
