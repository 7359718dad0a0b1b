//! The files of a backup that is not complete, kept from other backups to the same target.

use crate::jobs::staging::{directory_of, from_io, reserve_temporary_name};
use crate::new_files::NewFiles;
use crate::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use zebu_storage::{Access, Create, File, FileId, IoErrorKind, LockMode, LockWait, OpenFlags};

/// Tries, after which a backup gives up that finds the manifest gone or made anew.
const MAX_ATTEMPTS: usize = 100;

/// The names of the partial image and its manifest. While there is this, no other backup touches either: the lock is on
/// the manifest, which is made if there is none, since it is there from the start to the end.
pub(super) struct Claim {
    pub(super) image: PathBuf,
    pub(super) manifest: PathBuf,
    lock: File,
}

/// The files that an earlier backup has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    Manifest,
    Nothing,
}

pub(super) fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

/// `.NAME.zebu-partial` and the manifest that belongs to it.
fn names(target: &Path) -> Result<(PathBuf, PathBuf)> {
    let Some(name) = target.file_name() else {
        return Err(Error::new(ErrorKind::InvalidArgument, "the backup needs a file name").on(target));
    };
    let mut partial = OsString::from(".");
    partial.push(name);
    partial.push(".zebu-partial");
    let mut manifest = partial.clone();
    manifest.push(".manifest");
    let directory = directory_of(target);
    Ok((directory.join(partial), directory.join(manifest)))
}

fn id_of(path: &Path) -> Option<FileId> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some(FileId { dev: found.dev(), ino: found.ino() })
}

/// The file was made, removed or renamed by somebody else at the same moment.
fn is_race(kind: IoErrorKind) -> bool {
    let IoErrorKind::Os(errno) = kind else { return false };
    let kind = io::Error::from_raw_os_error(errno).kind();
    matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
}

impl Claim {
    /// Takes the files for a backup to `target`.
    ///
    /// # Errors
    /// [`ErrorKind::Exists`]: another backup to it is under way.
    pub(super) fn take(target: &Path, wait: &LockWait) -> Result<(Self, Left)> {
        let (image, manifest) = names(target)?;
        let mut attempts = 0;
        loop {
            attempts += 1;
            let create = if exists(&manifest) { Create::No } else { Create::New };
            let access = Access::ReadWrite;
            let flags = OpenFlags::default()
                .access(access)
                .create(create)
                .lock(LockMode::Write)
                .lock_wait(wait.clone());
            match File::open(&manifest, &flags) {
                // Another backup may have removed it, or given it its name, before its lock ended.
                Ok(lock) if id_of(&manifest) == Some(lock.id()) => {
                    let left = if lock.is_empty() { Left::Nothing } else { Left::Manifest };
                    return Ok((Self { image, manifest, lock }, left));
                }
                Ok(_) if attempts < MAX_ATTEMPTS => {}
                Err(error) if is_race(error.kind) && attempts < MAX_ATTEMPTS => {}
                Ok(_) => {
                    let message = "the file is made anew again and again: is something else writing there?";
                    return Err(Error::new(ErrorKind::Locked, message).on(&manifest));
                }
                Err(error) if error.kind == IoErrorKind::Locked => {
                    let message = format!(
                        "another backup to this target is under way (it has locked '{}'): wait for it, or give another \
                         name",
                        manifest.display()
                    );
                    return Err(Error::new(ErrorKind::Exists, message).on(target));
                }
                Err(error) => return Err(Error::from(error).on(&manifest)),
            }
        }
    }

    /// Makes the manifest of an earlier backup empty, durably. Nobody else has its image open.
    pub(super) fn forget_earlier(&self, wait: &LockWait) -> Result<()> {
        let access = Access::ReadWrite;
        let flags = OpenFlags::default().access(access).lock(LockMode::Write).lock_wait(wait.clone());
        if exists(&self.image) {
            drop(File::open(&self.image, &flags).map_err(|e| Error::from(e).on(&self.image))?);
        }
        std::fs::File::create(&self.manifest)
            .and_then(|file| file.sync_all())
            .map_err(|e| from_io(&self.manifest, "can't make the manifest empty", &e))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // One that holds nothing was made for the lock.
        let is_empty = std::fs::symlink_metadata(&self.manifest).is_ok_and(|found| found.len() == 0);
        if is_empty && id_of(&self.manifest) == Some(self.lock.id()) {
            // There is nobody to tell, and an empty one does no harm.
            let _ = std::fs::remove_file(&self.manifest);
        }
    }
}

/// Refuses a name for the manifest that it could not get when the backup is complete, after hours.
pub(super) fn check_place(target: &Path, manifest: Option<&Path>) -> Result<()> {
    let target_place = place_of(target)?;
    let Some(manifest) = manifest else { return Ok(()) };
    let manifest_place = place_of(manifest)?;
    if target_place != manifest_place {
        return try_to_rename(target, manifest);
    }
    let (partial, partial_manifest) = names(target)?;
    for taken in [target, &partial, &partial_manifest] {
        if taken.file_name() == manifest.file_name() {
            let message =
                format!("'{}' is a name of the backup itself: give the manifest another", taken.display());
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(manifest));
        }
    }
    Ok(())
}

/// The directory that a file is to be in, by the one name that does not lead through links.
fn place_of(path: &Path) -> Result<PathBuf> {
    let directory = directory_of(path);
    match std::fs::canonicalize(directory) {
        Ok(place) if place.is_dir() => Ok(place),
        Ok(_) => {
            let message = format!("'{}' is not a directory: give another name", directory.display());
            Err(Error::new(ErrorKind::InvalidArgument, message).on(path))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let message = format!("there is no directory '{}': make it first", directory.display());
            Err(Error::new(ErrorKind::InvalidArgument, message).on(path))
        }
        Err(error) => Err(from_io(directory, "can't find the directory", &error)),
    }
}

/// Does with empty files what is done with the manifest in the end. (Device numbers do not tell: a file can't be renamed
/// between two mounts of one file system either.)
fn try_to_rename(target: &Path, manifest: &Path) -> Result<()> {
    let make = |beside: &Path| {
        reserve_temporary_name(beside, 0o600)
            .map_err(|e| from_io(directory_of(beside), "can't make a file in the directory", &e))
    };
    let from = make(target)?;
    let mut made = NewFiles::default();
    made.add(&from);
    let to = make(manifest)?;
    made.add(&to);
    match std::fs::rename(from, to) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            let message = format!(
                "the manifest has to be on the file system of the backup, that of '{}': give a name there, and move \
                 it afterwards",
                directory_of(target).display()
            );
            Err(Error::new(ErrorKind::InvalidArgument, message).on(manifest))
        }
        Err(error) => Err(from_io(manifest, "the manifest could not get its name", &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_claim_at_a_time_that_leaves_nothing_empty() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("a.qcow2");
        let (claim, left) = Claim::take(&target, &LockWait::default()).unwrap();
        assert_eq!(left, Left::Nothing);
        let refused = Claim::take(&target, &LockWait::default()).err().unwrap();
        assert_eq!((refused.kind(), refused.image()), (ErrorKind::Exists, Some(&*target)));
        drop(claim);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        // What was written stays for the next one, unless that wants to begin anew.
        let (claim, _) = Claim::take(&target, &LockWait::default()).unwrap();
        std::fs::write(&claim.manifest, b"something").unwrap();
        drop(claim);
        let (claim, left) = Claim::take(&target, &LockWait::default()).unwrap();
        assert_eq!(left, Left::Manifest);
        claim.forget_earlier(&LockWait::default()).unwrap();
        drop(claim);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        // One that gets its name while somebody waits for the lock is not taken for the next one's.
        let (claim, _) = Claim::take(&target, &LockWait::default()).unwrap();
        std::fs::rename(&claim.manifest, directory.path().join("a.manifest")).unwrap();
        let (next, left) = Claim::take(&target, &LockWait::default()).unwrap();
        assert_eq!(left, Left::Nothing);
        drop(claim);
        assert!(exists(&next.manifest));
    }
}
