//! A target that the job makes: under a temporary name until it is complete, removed if it does not get there.

use super::options::{NewTarget, TargetContent};
use crate::{
    Access, Chain, CreateOptions, Error, ErrorKind, Format, Image, OpenOptions, Preallocation, Purpose,
    Result,
};
use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use zebu_storage::Worker;

/// A target that was made, up to its end.
pub(super) struct Made {
    /// Removed when this value is dropped before the end.
    files: NewFiles,
    /// The temporary name and the final one, if there are two.
    names: Option<(PathBuf, PathBuf)>,
    /// The external data file, if it has one.
    data_file: Option<PathBuf>,
}

/// Makes the target for `total` bytes and opens it for writing.
pub(super) async fn make(
    worker: &Worker,
    target: NewTarget,
    total: u64,
) -> Result<(Image, TargetContent, Made)> {
    let NewTarget { path, mut create, open } = target;
    match create.size {
        Some(size) if size < total => {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "output file is smaller than input file").on(&path)
            );
        }
        Some(_) => {}
        None => create.size = Some(total),
    }
    let data_file = create.data_file.as_ref().map(|name| directory_of(&path).join(name));
    let storage = data_file.as_ref().unwrap_or(&path).clone();
    let content = if create.backing.is_some() {
        TargetContent::SharedBacking
    } else if is_device(&storage) && shows_its_storage(&create) {
        TargetContent::Unknown
    } else {
        TargetContent::Zero
    };

    let mut files = NewFiles(Vec::new());
    let (work_path, names) = if std::fs::symlink_metadata(&path).is_ok() {
        (path, None)
    } else {
        let temporary = reserve_temporary_name(&path)
            .map_err(|error| from_io(&path, "can't make a file in the target's directory", &error))?;
        files.0.push(temporary.clone());
        (temporary.clone(), Some((temporary, path)))
    };
    if let Some(data_file) = &data_file
        && std::fs::symlink_metadata(data_file).is_err()
    {
        files.0.push(data_file.clone());
    }

    let format = create.format;
    Image::create(worker, &work_path, &create).await?;
    let options = OpenOptions {
        format: Some(format),
        access: Access::ReadWrite,
        chain: Chain::Follow,
        purpose: Purpose::Io,
        snapshot: None,
        ..open
    };
    let image = Image::open(worker, &work_path, &options).await?;
    Ok((image, content, Made { files, names, data_file }))
}

impl Made {
    /// Ends the job: a target that is complete is closed, made durable and given its name; of one that is not, nothing
    /// stays but what was there before. Gives the job's own error back, if it had one.
    pub(super) async fn finish(mut self, worker: &Worker, image: &Image, copied: Result<()>) -> Result<()> {
        if let Err(error) = copied {
            if self.names.is_none() {
                // A file or device that was there before stays, so its tables are left in order as far as they go.
                // That this fails, too, adds nothing to the error there is.
                let _ = image.close(worker).await;
            }
            return Err(error);
        }
        image.close(worker).await?;
        if let Some((temporary, path)) = self.names.take() {
            let data_file = self.data_file.take();
            worker.run_blocking(move || publish(&temporary, &path, data_file.as_deref())).await?;
        }
        self.files.0.clear();
        Ok(())
    }
}

/// Files that were made and are not wanted unless the job succeeds.
struct NewFiles(Vec<PathBuf>);

impl Drop for NewFiles {
    fn drop(&mut self) {
        for path in &self.0 {
            // There is nobody to tell, and nothing to do about it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Gives a complete image its name. The files are synced here, whatever the cache mode was: a name that appears must
/// never lead to a file whose content a power failure could still take away.
fn publish(temporary: &Path, path: &Path, data_file: Option<&Path>) -> Result<()> {
    for file in [Some(temporary), data_file].into_iter().flatten() {
        std::fs::File::open(file)
            .and_then(|file| file.sync_all())
            .map_err(|error| from_io(file, "can't make the file durable", &error))?;
    }
    if std::fs::symlink_metadata(path).is_ok() {
        let message = "another program made a file of this name meanwhile";
        return Err(Error::new(ErrorKind::Io, message).on(path));
    }
    std::fs::rename(temporary, path)
        .map_err(|error| from_io(path, "can't rename the complete image", &error))?;
    let directory = directory_of(path);
    std::fs::File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| from_io(directory, "can't make the new name durable", &error))
}

/// Whether what lies in the target's storage before the job shows in ranges that the job does not write.
fn shows_its_storage(create: &CreateOptions) -> bool {
    create.format == Format::Raw || create.data_file_raw || create.preallocation != Preallocation::Off
}

fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Longest part of the target's name that goes into the temporary one: names have at most 255 bytes.
const MAX_NAME: usize = 200;

/// Makes an empty file beside `path`: `.NAME.zebu-XXXXXX`.
fn reserve_temporary_name(path: &Path) -> io::Result<PathBuf> {
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
        match std::fs::File::create_new(&temporary) {
            Ok(_) => return Ok(temporary),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempts < 100 => attempts += 1,
            Err(error) => return Err(error),
        }
    }
}

fn from_io(path: &Path, what: &str, error: &io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    };
    let errno = error.raw_os_error();
    let error = Error::new(kind, format!("{what}: {error}")).on(path);
    match errno {
        Some(errno) => error.with_errno(errno),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_are_new_hidden_and_beside_the_target() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("disk.qcow2");
        let a = reserve_temporary_name(&target).unwrap();
        let b = reserve_temporary_name(&target).unwrap();
        assert_ne!(a, b);
        for name in [&a, &b] {
            assert_eq!(name.parent(), target.parent());
            assert!(name.file_name().unwrap().to_str().unwrap().starts_with(".disk.qcow2.zebu-"));
            assert_eq!(name.metadata().unwrap().len(), 0);
        }
        let long = directory.path().join("x".repeat(255));
        assert!(reserve_temporary_name(&long).is_ok());
        assert!(reserve_temporary_name(Path::new("/")).is_err());
    }

    #[test]
    fn publishing_never_replaces_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&from, b"new").unwrap();
        std::fs::write(&to, b"old").unwrap();
        assert!(publish(&from, &to, None).is_err());
        assert_eq!(std::fs::read(&to).unwrap(), b"old");
        std::fs::remove_file(&to).unwrap();
        publish(&from, &to, None).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"new");
        assert!(!from.exists());
    }

    #[test]
    fn files_that_are_not_wanted_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a");
        std::fs::write(&file, b"").unwrap();
        drop(NewFiles(vec![file.clone(), directory.path().join("never made")]));
        assert!(!file.exists());
    }
}
