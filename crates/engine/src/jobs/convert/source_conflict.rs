//! Refusing a target that is a file of the source: writing it would destroy the disk that it is made from.

use crate::node::Node;
use crate::same_file::FilePlace;
use crate::{Error, ErrorKind, Image, Result};
use std::path::Path;
use zebu_storage::FileId;

/// Refuses `target`, which is about to be written, if one of `sources` reads from it.
pub(super) fn check_target(sources: &[Image], name: &Path, target: &FilePlace) -> Result<()> {
    let FilePlace::File(target) = target else { return Ok(()) };
    let Some(source) = sources.iter().find(|source| reads_from(source, *target)) else { return Ok(()) };
    let message = format!(
        "it is a file of the source '{}', which writing it would destroy: give another target",
        source.path().display()
    );
    Err(Error::new(ErrorKind::InvalidArgument, message).on(name))
}

/// The same for an image that is open already.
pub(super) fn check_open_target(sources: &[Image], target: &Image) -> Result<()> {
    [target.0.image_file(), target.0.data_file()]
        .into_iter()
        .try_for_each(|file| check_target(sources, target.path(), &FilePlace::File(file.id())))
}

/// Whether `file` belongs to the image or to what it stands on.
fn reads_from(image: &Image, file: FileId) -> bool {
    let mut node: Option<&Node> = Some(&image.0);
    while let Some(this) = node {
        let mut files = [this.image_file(), this.data_file()].into_iter().chain(this.other_files());
        if files.any(|known| known.id() == file) {
            return true;
        }
        node = this.backing.as_deref();
    }
    false
}
