//! Disks of Parallels that are directories: a descriptor, and the image that it names.

use crate::{Error, ErrorKind, Format, Result};
use std::io::Read;
use std::path::{Path, PathBuf};
use zebu_foreign::parallels_bundle::{DESCRIPTOR, MOST, disk_file};

/// The image in a directory, as its descriptor names it.
pub(crate) struct Named {
    /// The path of the descriptor.
    pub(crate) by: PathBuf,
    pub(crate) name: String,
    pub(crate) format: Format,
}

/// The image that the directory at `path` is; `None` if there is no directory with a descriptor.
///
/// # Errors
/// The descriptor can't be read, or names several images.
pub(crate) fn image_in(path: &Path) -> Result<Option<Named>> {
    // A file is not opened here: a pipe would block.
    let by = path.join(DESCRIPTOR);
    if !path.is_dir() || !by.is_file() {
        return Ok(None);
    }
    let failed = |error: std::io::Error| {
        let told = Error::new(ErrorKind::Io, error.to_string()).on(&by);
        error.raw_os_error().map_or(told.clone(), |errno| told.with_errno(errno))
    };
    let mut text = Vec::new();
    let file = std::fs::File::open(&by).map_err(failed)?;
    file.take(MOST).read_to_end(&mut text).map_err(failed)?;
    let found = disk_file(&String::from_utf8_lossy(&text));
    let found = found.map_err(|error| Error::new(ErrorKind::Unsupported, error.to_string()).on(&by))?;
    Ok(Some(Named { by, name: found.name, format: found.format.map_or(Format::Raw, Format::Foreign) }))
}
