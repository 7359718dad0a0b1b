//! Whether two names lead to one file, by hard links and symbolic links too.

use crate::{CreateOptions, Error, ErrorKind, Result, refs};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use zebu_storage::FileId;

/// Where a name leads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FilePlace {
    /// To a file.
    File(FileId),
    /// To none: this is where one would be made.
    Nothing(PathBuf),
}

impl FilePlace {
    /// Where `path` leads now.
    pub(crate) fn of(path: &Path) -> Self {
        if let Ok(found) = std::fs::metadata(path) {
            let is_device = found.file_type().is_block_device();
            return Self::File(if is_device {
                FileId { dev: found.rdev(), ino: found.rdev() }
            } else {
                FileId { dev: found.dev(), ino: found.ino() }
            });
        }
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = std::fs::canonicalize(directory.unwrap_or(Path::new(".")));
        match (directory, path.file_name()) {
            (Ok(directory), Some(name)) => Self::Nothing(directory.join(name)),
            _ => Self::Nothing(path.to_owned()),
        }
    }
}

/// Refuses a new image at `path` that would be its own data file or backing file, or whose data file would be its
/// backing file.
pub(crate) fn check_new(path: &Path, options: &CreateOptions) -> Result<()> {
    let image = FilePlace::of(path);
    let named = |name: &String| FilePlace::of(&refs::resolve(path, name));
    let data_file = options.data_file.as_ref().map(named);
    let backing = options.backing.as_ref().map(|(name, _)| named(name));
    let message = if data_file.as_ref() == Some(&image) {
        "the image can't be its own data file"
    } else if backing.as_ref() == Some(&image) {
        "the image can't be its own backing file"
    } else if backing.is_some() && backing == data_file {
        "the data file of the image can't be its backing file"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidArgument, message).on(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_file_are_told_from_names_of_two() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("a"), b"").unwrap();
        std::fs::write(at("b"), b"").unwrap();
        std::fs::hard_link(at("a"), at("hard")).unwrap();
        std::os::unix::fs::symlink("a", at("soft")).unwrap();
        std::fs::create_dir(at("sub")).unwrap();
        for same in ["a", "hard", "soft", "./a", "sub/../a"] {
            assert_eq!(FilePlace::of(&at(same)), FilePlace::of(&at("a")), "{same}");
        }
        assert_ne!(FilePlace::of(&at("b")), FilePlace::of(&at("a")));
        assert_eq!(FilePlace::of(&at("new")), FilePlace::of(&at("sub/../new")));
        assert_ne!(FilePlace::of(&at("new")), FilePlace::of(&at("newer")));
    }
}
