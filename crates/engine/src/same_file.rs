//! Whether two names lead to one file, by hard links and symbolic links too.

use crate::{CreateOptions, Error, ErrorKind, Result, new_foreign, refs};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, readlinkat, statat};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
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

    /// The file there.
    pub(crate) fn file(self) -> Option<FileId> {
        match self {
            Self::File(file) => Some(file),
            Self::Nothing(_) => None,
        }
    }
}

/// Symbolic links one behind the other that the kernel follows.
const MOST_LINKS: usize = 40;

/// The name of the file that would be made at `path`: behind symbolic links, which lead to nothing. `None`: something is
/// there, or the links can't be followed, as opening `path` tells.
pub(crate) fn new_file_place(path: &Path) -> Option<PathBuf> {
    if std::fs::metadata(path).is_ok() {
        return None;
    }
    let mut place = path.to_owned();
    for _ in 0..MOST_LINKS {
        if std::fs::symlink_metadata(&place).is_err() {
            return Some(place);
        }
        let directory = place.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        let behind = read_link(directory, &place)?;
        place = directory.join(behind);
    }
    None
}

/// Reads a link where the kernel would follow it: none of a stranger in a directory like /tmp (fs.protected_symlinks).
fn read_link(directory: &Path, path: &Path) -> Option<PathBuf> {
    const STICKY_FOR_ALL: u32 = 0o1002;
    // One descriptor for both, so that nobody puts another link in its place between them.
    let how = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = openat(CWD, path, how, Mode::empty()).ok()?;
    let owner = statat(&link, c"", AtFlags::EMPTY_PATH).ok()?.st_uid;
    let above = std::fs::metadata(directory).ok()?;
    let is_strange = above.mode() & STICKY_FOR_ALL == STICKY_FOR_ALL
        && owner != rustix::process::geteuid().as_raw()
        && owner != above.uid();
    if is_strange {
        return None;
    }
    let behind = readlinkat(&link, c"", Vec::new()).ok()?;
    Some(PathBuf::from(OsStr::from_bytes(behind.as_bytes())))
}

/// Refuses a new image at `path` that would be its own data file or backing file, or whose data file would be its
/// backing file.
pub(crate) fn check_new(path: &Path, options: &CreateOptions) -> Result<()> {
    let image = FilePlace::of(path);
    let named = |name: &String| FilePlace::of(&refs::resolve(path, name));
    let flat = new_foreign::flat_path(options.foreign.as_ref(), path);
    let data_file = options.data_file.as_ref().map(named).or(flat.as_deref().map(FilePlace::of));
    let backing = options.backing.as_ref().map(|(name, _)| named(name));
    let message = if data_file.as_ref() == Some(&image) {
        "the image can't be its own data file".to_owned()
    } else if backing.as_ref() == Some(&image) {
        "the image can't be its own backing file".to_owned()
    } else if backing.is_some() && backing == data_file {
        let name = options.data_file.clone().unwrap_or_default();
        format!("the data file of the image can't be its backing file, and '{name}' is both")
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidArgument, message).on(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_files_are_made_where_links_lead() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
        std::fs::create_dir(at("sub")).unwrap();
        std::fs::write(at("old"), b"").unwrap();
        link("sub/new", "link");
        link("link", "link of a link");
        link("../sub/new", "sub/back");
        link("old", "to old");
        link("round", "round");
        assert_eq!(new_file_place(&at("new")), Some(at("new")));
        assert_eq!(new_file_place(&at("link")), Some(at("sub/new")));
        assert_eq!(new_file_place(&at("link of a link")), Some(at("sub/new")));
        assert_eq!(new_file_place(&at("sub/back")), Some(at("sub/../sub/new")));
        for none in ["old", "to old", "round", "sub"] {
            assert_eq!(new_file_place(&at(none)), None, "{none}");
        }
    }

    #[test]
    fn links_of_strangers_in_shared_directories_are_not_followed() {
        use std::os::unix::fs::{PermissionsExt, lchown};
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("new", &link).unwrap();
        // Only root can give files away.
        if lchown(&link, Some(12345), None).is_err() {
            return;
        }
        assert_eq!(new_file_place(&link), Some(dir.path().join("new")));
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(new_file_place(&link), None);
    }

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
