//! Files without a name that images are unpacked into.

use crate::failure::Failure;
use rustix::fs::{CWD, Mode, OFlags};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that are copied at once. Pieces of zeroes are not written.
const PIECE: usize = 64 << 10;

/// An empty file without a name.
///
/// # Errors
/// The directory's file system has none, or the directory can't be written.
pub(crate) fn unnamed(directory: &Path) -> Result<File, Failure> {
    let how = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let made = rustix::fs::openat(CWD, directory, how, Mode::RUSR | Mode::WUSR).map(File::from);
    made.map_err(|error| {
        let what = format!("the image needs a file without a name in '{}' (TMPDIR)", directory.display());
        Failure::of_file(&what, &error.into())
    })
}

/// Copies all of `reader` to `file` from `at` on, `most` bytes at most; the end. `on` hears of each piece where it ends.
pub(crate) fn copy(
    reader: &mut dyn Read,
    file: &File,
    at: u64,
    most: u64,
    on: &mut dyn FnMut(u64) -> Result<(), Failure>,
) -> Result<u64, Failure> {
    let cant_write =
        |error: &std::io::Error| Failure::of_file("the bytes of the image can't be written", error);
    let mut piece = vec![0; PIECE];
    let mut end = at;
    loop {
        let mut filled = 0;
        while filled < PIECE {
            match reader.read(&mut piece[filled..])? {
                0 => break,
                read => filled += read,
            }
        }
        if filled == 0 {
            // What was skipped at the end is there, too.
            file.set_len(end).map_err(|error| cant_write(&error))?;
            return Ok(end);
        }
        if end + filled as u64 > most {
            return Err(Failure::new(libc::EFBIG, format!("it unpacks to more than {most} bytes")));
        }
        if piece[..filled].iter().any(|byte| *byte != 0) {
            file.write_all_at(&piece[..filled], end).map_err(|error| cant_write(&error))?;
        }
        end += filled as u64;
        on(end)?;
    }
}
