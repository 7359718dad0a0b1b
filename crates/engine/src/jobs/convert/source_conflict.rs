//! Refusing a target that is a file of the source: writing it would destroy the disk that it is made from.

use crate::same_file::FilePlace;
use crate::{Error, ErrorKind, Image, Result};
use std::path::Path;
use zebu_storage::{File, FileId};

/// Refuses `target`, which is about to be written, if one of `sources` reads from it.
pub(super) fn check_target(sources: &[Image], name: &Path, target: &FilePlace) -> Result<()> {
    match target {
        FilePlace::File(target) => check_files(sources, name, &[*target]),
        FilePlace::Nothing(_) => Ok(()),
    }
}

/// The same for a file that is open already.
pub(super) fn check_open_file(sources: &[Image], target: &File) -> Result<()> {
    check_files(sources, target.path(), &target.files())
}

/// The same for an image that is open already.
pub(super) fn check_open_target(sources: &[Image], target: &Image) -> Result<()> {
    [target.0.image_file(), target.0.data_file()]
        .into_iter()
        .try_for_each(|file| check_files(sources, target.path(), &file.files()))
}

fn check_files(sources: &[Image], name: &Path, targets: &[FileId]) -> Result<()> {
    let reads_them = |source: &&Image| source.files().iter().any(|file| targets.contains(file));
    let Some(source) = sources.iter().find(reads_them) else { return Ok(()) };
    let message = format!(
        "it is a file of the source '{}', which writing it would destroy: give another target",
        source.path().display()
    );
    Err(Error::new(ErrorKind::InvalidArgument, message).on(name))
}
