//! New images of other programs: their files, written block by block. [`zebu_foreign::write`] says what stands where.
//!
//! The bytes by which the file is taken for an image are written last, when all else is durable.

mod appender;
mod blocks;
mod file;
mod stream;

pub(crate) use appender::{FileAppender, WritesUnderWay};
pub(crate) use blocks::BlockWriter;
pub(crate) use file::{FilePlace, GrowingFile};
pub(crate) use stream::{Packed, StreamWriter};

use crate::options::{CreateOptions, Format};
use crate::{Error, ErrorKind, Result};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use zebu_foreign::write::{Birth, NewImage};
use zebu_storage::{File, FileKind, Worker};

/// The image that options ask for; `None` if it is one of our own formats.
///
/// # Errors
/// The format is only read, or an option does not apply to it.
pub(crate) fn wanted(options: &CreateOptions, path: &Path) -> Result<Option<NewImage>> {
    let Format::Foreign(format) = options.format else { return Ok(None) };
    let refuse = |what: &str| {
        let message = format!("{what} not supported for file format '{}'", format.name());
        Err(Error::new(ErrorKind::Unsupported, message).on(path))
    };
    if options.backing.is_some() {
        return refuse("Backing file");
    }
    if options.data_file.is_some() {
        return refuse("External data file");
    }
    if options.preallocation != crate::Preallocation::Off {
        return refuse("Preallocation");
    }
    let new = options.foreign.clone().or_else(|| NewImage::of(format));
    let new = new.filter(|new| new.format() == format);
    let new = new.ok_or_else(|| {
        let message = format!("images in the format {} can be read, not made", format.name());
        Error::new(ErrorKind::Unsupported, message).on(path)
    })?;
    Ok(Some(new))
}

/// The empty files of a new image.
#[derive(Debug)]
pub(crate) struct NewFiles {
    pub(crate) image: File,
    /// The file with the bytes of the disk, if that is another.
    pub(crate) flat: Option<File>,
}

/// The path of the file with the bytes of the disk of an image at `path`, if that is another.
pub(crate) fn flat_path(new: Option<&NewImage>, path: &Path) -> Option<PathBuf> {
    Some(path.with_file_name(new?.flat_name(&last_part(path))?))
}

/// Makes an image of a disk that is all zero, in files that are empty. `name` is the last part of its final name.
pub(crate) async fn make_empty(
    worker: &Worker,
    files: NewFiles,
    new: &NewImage,
    size: u64,
    name: &str,
) -> Result<()> {
    match new {
        NewImage::Vmdk(vmdk) if new.is_stream() => {
            StreamWriter::new(files.image, vmdk, size, name, &birth())?.finish(worker).await
        }
        _ => BlockWriter::new(worker, files, new, size, name, &birth()).await?.finish(worker).await,
    }
}

/// The last part of a path, as text.
pub(crate) fn last_part(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Refuses what can't become longer and shorter, and does not read as zero at first.
pub(crate) fn check_regular(file: &File) -> Result<()> {
    if file.kind() == FileKind::Regular {
        return Ok(());
    }
    let message = "such an image can only be made in a regular file: convert to a file, then copy that";
    Err(Error::new(ErrorKind::Unsupported, message).on(file.path()))
}

/// Identities that nobody has drawn before.
pub(crate) fn birth() -> Birth {
    // The standard library's hash keys are random; nothing secret depends on them.
    let half = || RandomState::new().build_hasher().finish();
    let id = || (u128::from(half()) << 64 | u128::from(half())).to_le_bytes();
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Birth { random: [id(), id(), id()], time }
}

/// The identities that belong to these bytes, at no time: the same every time.
pub(crate) fn birth_from(bytes: &[u8]) -> Birth {
    let mut random = [[0; 16]; 3];
    let mut derived = blake3::Hasher::new_derive_key("zebu 2026 identities of new images");
    derived.update(bytes).finalize_xof().fill(random.as_flattened_mut());
    Birth { random, time: 0 }
}

/// The engine's error for a choice that a format has not.
fn layout_error(file: &File, error: &zebu_foreign::Error) -> Error {
    Error::new(ErrorKind::InvalidArgument, error.to_string()).on(file.path())
}
