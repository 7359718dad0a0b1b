//! Disks of Parallels that are directories: a descriptor, and the image that it names.

use crate::{Error, ErrorKind, Format, Result};
use std::io::Read;
use std::path::{Path, PathBuf};
use zebu_foreign::parallels_bundle::{DESCRIPTOR, MOST, disk_file, files_with_snapshots};

/// The image in a directory, as its descriptor names it.
pub(crate) struct Named {
    /// The path of the descriptor.
    pub(crate) by: PathBuf,
    pub(crate) name: String,
    pub(crate) format: Format,
    /// Bytes of the disk, as the descriptor tells.
    pub(crate) size: Option<u64>,
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
    let found = disk_file(&text_of(&by)?);
    let found = found.map_err(|error| Error::new(ErrorKind::Unsupported, error.to_string()).on(&by))?;
    let format = found.format.map_or(Format::Raw, Format::Foreign);
    Ok(Some(Named { by, name: found.name, format, size: found.size }))
}

/// Refuses one image of a disk with snapshots by itself: it may hold a part of the disk only.
///
/// # Errors
/// The descriptor beside it says so, or can't be read.
pub(crate) fn refuse_part(path: &Path) -> Result<()> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let by = directory.join(DESCRIPTOR);
    if path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("hds")) || !by.is_file() {
        return Ok(());
    }
    if !files_with_snapshots(&text_of(&by)?).iter().any(|file| Path::new(file).file_name() == Some(name)) {
        return Ok(());
    }
    let message = format!(
        "it is one of the images of a Parallels disk with snapshots ('{}'), and may be a part of the disk: merge them in \
         Parallels (prl_disk_tool merge), or say that this image is the disk",
        by.display()
    );
    Err(Error::new(ErrorKind::ForeignFormat, message).on(path))
}

/// Refuses a disk that is not as large as its descriptor tells.
pub(crate) fn check_size(told: Option<(u64, PathBuf)>, found: u64, path: &Path) -> Result<()> {
    let Some((told, by)) = told.filter(|(told, _)| *told != found) else { return Ok(()) };
    let message = format!(
        "its disk has {found} bytes, and '{}' tells {told}: a part may be missing; open the .hds file itself to read what is there",
        by.display()
    );
    Err(Error::new(ErrorKind::Corrupt, message).on(path))
}

/// The text of a descriptor.
fn text_of(by: &Path) -> Result<String> {
    let failed = |error: std::io::Error| {
        let told = Error::new(ErrorKind::Io, error.to_string()).on(by);
        error.raw_os_error().map_or(told.clone(), |errno| told.with_errno(errno))
    };
    let mut text = Vec::new();
    let file = std::fs::File::open(by).map_err(failed)?;
    file.take(MOST + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() as u64 > MOST {
        let message = format!("the descriptor of the Parallels disk has more than {MOST} bytes");
        return Err(Error::new(ErrorKind::Unsupported, message).on(by));
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}
