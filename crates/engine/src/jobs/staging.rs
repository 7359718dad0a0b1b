//! Files under a temporary name until they are complete.

use crate::new_files::NewFiles;
use crate::{Error, ErrorKind, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use zebu_storage::File;

/// Gives a complete image its name ([`publish_with`]).
pub(super) fn publish(temporary: &Path, path: &Path) -> Result<()> {
    publish_with(NewFiles::default(), temporary, path, None)
}

/// Gives a complete image its name. From then on its new `files` stay. The image and its data file are synced here, whatever the
/// cache mode was: a name that appears must never lead to a file whose content or name a power failure could still take away.
pub(super) fn publish_with(
    mut files: NewFiles,
    temporary: &Path,
    path: &Path,
    data_file: Option<&Path>,
) -> Result<()> {
    sync_files(temporary, data_file)?;
    files.names().filter(|name| *name != temporary).try_for_each(sync_directory_of)?;
    match files.keep_if(|| rename_to_new(temporary, path)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let message = "another program made a file of this name meanwhile";
            return Err(Error::new(ErrorKind::Io, message).on(path));
        }
        renamed => renamed.map_err(|error| from_io(path, "can't rename the complete image", &error))?,
    }
    sync_directory_of(path)
}

/// Makes the name of a file durable.
pub(super) fn sync_directory_of(path: &Path) -> Result<()> {
    let directory = directory_of(path);
    std::fs::File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| from_io(directory, "can't make the new name durable", &error))
}

/// Bytes that are set aside at once when a copy by reflink is written for the first time.
const COW_EXTENT: u32 = 1 << 20;

/// Has writes to an empty file that is to share the blocks of `source` leave it in few pieces, where the file system takes such
/// hints: the first ones to shared blocks, and those to new ones. Where it does not, the copy is as good as any.
pub(super) fn expect_copies(file: &File, source: &File) {
    let _ = file.set_cow_extent_size_hint(COW_EXTENT);
    // A file that has blocks takes no such hint.
    if let Some(hint) = source.extent_size_hint() {
        let _ = file.set_extent_size_hint(hint);
    }
}

/// Makes an image's files durable.
pub(super) fn sync_files(path: &Path, data_file: Option<&Path>) -> Result<()> {
    for file in [Some(path), data_file].into_iter().flatten() {
        std::fs::File::open(file)
            .and_then(|file| file.sync_all())
            .map_err(|error| from_io(file, "can't make the file durable", &error))?;
    }
    Ok(())
}

/// Renames a file to a name that nothing has. Two programs that do so at a time don't both succeed, unless the file system
/// can't say so (NFS).
fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        renamed => return Ok(renamed?),
    }
    if std::fs::symlink_metadata(to).is_ok() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    std::fs::rename(from, to)
}

pub(super) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Longest part of the target's name that goes into the temporary one: names have at most 255 bytes.
const MAX_NAME: usize = 200;

/// Makes an empty file of `mode` beside `path`: `.NAME.zebu-XXXXXX`.
pub(super) fn reserve_temporary_name(path: &Path, mode: u32) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let name = &name.as_bytes()[..name.len().min(MAX_NAME)];
    let mut attempts = 0;
    loop {
        // The standard library's hash keys are random, which is random enough for a name that O_EXCL guards.
        let suffix = RandomState::new().build_hasher().finish() & 0xff_ffff;
        let mut temporary = OsString::from(".");
        temporary.push(OsStr::from_bytes(name));
        temporary.push(format!(".zebu-{suffix:06x}"));
        let temporary = directory_of(path).join(temporary);
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary) {
            Ok(_) => return Ok(temporary),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempts < 100 => attempts += 1,
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn from_io(path: &Path, what: &str, error: &io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    };
    let errno = error.raw_os_error();
    let text = error.to_string();
    let reason = text.split(" (os error").next().unwrap_or_default();
    let error = Error::new(kind, format!("{what}: {reason}")).on(path);
    match errno {
        Some(errno) => error.with_errno(errno),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn temporary_names_are_new_hidden_and_beside_the_target() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("disk.qcow2");
        let a = reserve_temporary_name(&target, 0o600).unwrap();
        let b = reserve_temporary_name(&target, 0o600).unwrap();
        assert_ne!(a, b);
        for name in [&a, &b] {
            assert_eq!(name.parent(), target.parent());
            assert!(name.file_name().unwrap().to_str().unwrap().starts_with(".disk.qcow2.zebu-"));
            assert_eq!(name.metadata().unwrap().len(), 0);
            assert_eq!(name.metadata().unwrap().mode() & 0o777, 0o600);
        }
        let long = directory.path().join("x".repeat(255));
        assert!(reserve_temporary_name(&long, 0o600).is_ok());
        assert!(reserve_temporary_name(Path::new("/"), 0o600).is_err());
    }

    #[test]
    fn publishing_never_replaces_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&from, b"new").unwrap();
        std::fs::write(&to, b"old").unwrap();
        assert!(publish(&from, &to).is_err());
        assert_eq!(std::fs::read(&to).unwrap(), b"old");
        std::fs::remove_file(&to).unwrap();
        publish(&from, &to).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"new");
        assert!(!from.exists());
    }

    /// The other files of an image stay from the moment on at which it has its name, and not before.
    #[test]
    fn the_files_of_an_image_stay_once_it_has_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let [from, to, data] = ["a", "b", "data"].map(|name| directory.path().join(name));
        let make = || {
            let mut files = NewFiles::default();
            for file in [&from, &data] {
                std::fs::write(file, b"new").unwrap();
                files.add(file);
            }
            files
        };
        std::fs::write(&to, b"old").unwrap();
        assert!(publish_with(make(), &from, &to, Some(&data)).is_err());
        assert!(!from.exists() && !data.exists() && std::fs::read(&to).unwrap() == b"old");
        std::fs::remove_file(&to).unwrap();
        let mut files = make();
        files.keep_if(|| rename_to_new(&from, &to)).unwrap();
        assert!(files.names().next().is_none(), "a program that ends now removes it");
        drop(files);
        assert!(data.exists());
    }

    #[test]
    fn of_many_at_a_time_one_gets_the_name() {
        const MANY: usize = 4;
        for round in 0..200 {
            let directory = tempfile::tempdir().unwrap();
            let start = std::sync::Barrier::new(MANY);
            let (to, start) = (&directory.path().join("name"), &start);
            let published = std::thread::scope(|scope| {
                let threads = [0; MANY].map(|_| {
                    scope.spawn(move || {
                        let from = reserve_temporary_name(to, 0o600).unwrap();
                        start.wait();
                        publish(&from, to).is_ok()
                    })
                });
                threads
                    .map(|thread| thread.join().unwrap())
                    .into_iter()
                    .filter(|published| *published)
                    .count()
            });
            assert_eq!(published, 1, "round {round}");
        }
    }
}
