//! Making images: their files, and hints to file systems about them.

use crate::crypt::new_header::NewEncryption;
use crate::new_files::NewFiles;
use crate::node::Driver;
use crate::open::{open_made, size_lookup};
use crate::options::*;
use crate::progress::JobControl;
use crate::qcow2::life::create;
use crate::qcow2::space::free::SpaceContent;
use crate::reservation::{check_mode, no_room};
use crate::{Error, ErrorKind, Image, Result, luks_create, new_foreign, over_chain, raw, refs, same_file};
use std::path::Path;
use zebu_storage::{Create, File, FileKind, FsKind, IoErrorKind, LockMode, OpenFlags, Worker};

impl Image {
    /// Makes an empty image, of the format qcow2 or luks, in a file that the caller has opened; what is in it is lost. `size` must be given;
    /// no preallocation.
    ///
    /// # Errors
    /// As [`Image::create`].
    pub async fn create_in(worker: &Worker, file: &File, options: &CreateOptions) -> Result<()> {
        let worker = &worker.uncounted();
        if options.format == Format::Luks {
            let size = options.size.and_then(|size| size.checked_next_multiple_of(512)).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, "Image creation needs a size parameter")
                    .on(file.path())
            })?;
            let encryption = options.encryption.clone().unwrap_or_default();
            let control = JobControl::default();
            return luks_create::create(worker, file, size, &encryption, options.preallocation, &control)
                .await;
        }
        create::in_file(worker, file, options, create::Magic::Written).await
    }

    /// Creates an image (a file that exists is cut to nothing first). Does not leave it open. If the future is dropped,
    /// no file is left that was not there before.
    ///
    /// # Errors
    /// No file is left then that was not there before. Options that contradict each other, no space, or the file system
    /// can't do what `preallocation` asks.
    pub async fn create(worker: &Worker, path: &Path, options: &CreateOptions) -> Result<()> {
        Self::create_controlled(worker, path, options, &JobControl::default()).await
    }

    /// The same, watched and stopped by `control`: setting space aside takes long ([`Phase::Reserving`]).
    ///
    /// [`Phase::Reserving`]: crate::jobs::Phase::Reserving
    ///
    /// # Errors
    /// As [`Image::create`], or [`ErrorKind::Cancelled`].
    pub async fn create_controlled(
        worker: &Worker,
        path: &Path,
        options: &CreateOptions,
        control: &JobControl,
    ) -> Result<()> {
        same_file::check_new(path, options)?;
        over_chain::check(worker, path, options).await?;
        let size = match (options.size, &options.backing) {
            (Some(size), _) => size,
            (None, Some((name, format))) => {
                let backing_path = refs::resolve(path, name);
                let backing = Self::open(worker, &backing_path, &size_lookup(&options.refs, *format)).await?;
                backing.virtual_size()
            }
            (None, None) => {
                return Err(
                    Error::new(ErrorKind::InvalidArgument, "Image creation needs a size parameter").on(path)
                );
            }
        };
        let size = size
            .checked_next_multiple_of(512)
            .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "the image size is too large").on(path))?;
        let header = match options.format {
            Format::Raw | Format::Foreign(_) if options.encryption.is_some() => {
                let message = "images in this format can't be encrypted; use the format luks or qcow2";
                return Err(Error::new(ErrorKind::InvalidArgument, message).on(path));
            }
            Format::Raw | Format::Luks | Format::Foreign(_) => None,
            Format::Qcow2 => Some(create::new_header(options, size).map_err(|e| e.on(path))?),
        };
        // What is left of an image that is not complete would look like one.
        let mut new = Vec::new();
        let created = Self::create_files(worker, path, options, size, header, control, &mut new).await;
        created.map_err(|e| no_room(e, options.preallocation, options.format))?;
        new.into_iter().for_each(NewFile::keep);
        Ok(())
    }

    /// Makes the files of a new image; those that were not there before are noted in `new`.
    async fn create_files(
        worker: &Worker,
        path: &Path,
        options: &CreateOptions,
        size: u64,
        header: Option<zebu_qcow2::Header>,
        control: &JobControl,
        new: &mut Vec<NewFile>,
    ) -> Result<()> {
        let foreign = new_foreign::wanted(options, path)?;
        let mut new_file = |path: &Path| {
            let place = same_file::new_file_place(path);
            let opened = open_new(path, options);
            // What lies on a server was there. A file that another program has locked is that program's.
            let is_ours = match &opened {
                Ok(file) => !file.is_foreign(),
                Err(error) => error.kind() == ErrorKind::Unsupported,
            };
            let mut name = NewFiles::default();
            if let Some(place) = place.filter(|_| is_ours) {
                name.add(&place);
            }
            let file = opened?;
            new.push(NewFile { name, file: file.clone() });
            set_attributes(&file, options).map(|()| file)
        };
        let file = new_file(path)?;
        if let Some(new) = foreign {
            let flat = new_foreign::flat_path(Some(&new), path);
            let flat = flat.map(|path| new_file(&path)).transpose()?;
            let files = new_foreign::NewFiles { image: file.clone(), flat: flat.clone() };
            new_foreign::make_empty(worker, files, &new, size, &new_foreign::last_part(path)).await?;
            flat.as_ref().map_or(Ok(()), unlock)?;
            return unlock(&file);
        }
        let encryption = options.encryption.as_ref();
        let Some(header) = header else {
            if options.format == Format::Luks {
                let none = NewEncryption::default();
                let encryption = encryption.unwrap_or(&none);
                luks_create::create(worker, &file, size, encryption, options.preallocation, control).await?;
                return unlock(&file);
            }
            raw::create(worker, &file, size, options.preallocation, control).await?;
            return unlock(&file);
        };
        let data_file = match &options.data_file {
            Some(name) => Some(new_file(&refs::resolve(path, name))?),
            None => None,
        };
        check_mode(data_file.as_ref().unwrap_or(&file), Format::Qcow2, options.preallocation)?;
        if let Some(data_file) = &data_file {
            raw::create(worker, data_file, size, Preallocation::Off, control).await?;
        }
        if create::is_preallocated_by_formula(&file, options) {
            create::write_preallocated(worker, &file, header, options.preallocation, control).await?;
            return unlock(&file);
        }
        create::write_empty(worker, &file, header, encryption, create::Magic::Written).await?;
        let preallocation = match options.preallocation {
            // A raw data file has every cluster at its own place from the start.
            Preallocation::Off if options.data_file_raw => Preallocation::Metadata,
            other => other,
        };
        if preallocation == Preallocation::Off {
            data_file.as_ref().map_or(Ok(()), unlock)?;
            return unlock(&file);
        }
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            access: Access::ReadWrite,
            cache: options.cache,
            refs: RefPolicy::All,
            remote: options.remote.clone(),
            keys: encryption.map(NewEncryption::keys).unwrap_or_default(),
            ..OpenOptions::default()
        };
        let image = Self(open_made(&worker.uncounted(), path, file, data_file, &open).await?);
        let Driver::Qcow2(qcow2) = &image.0.driver else { return Ok(()) };
        qcow2.prepare_write(worker).await?;
        // A data file was cut to nothing above; a device can't be.
        let external = match qcow2.data().kind() {
            FileKind::BlockDevice => SpaceContent::Recycled,
            _ => SpaceContent::Fresh,
        };
        qcow2.preallocate(&image.0, worker, 0..size, preallocation, external, control).await?;
        image.close(worker).await
    }
}

/// A file of an image that is being made. Its name, if it is new, is removed while the file is locked: what has the name
/// afterwards is another program's.
struct NewFile {
    name: NewFiles,
    file: File,
}

impl NewFile {
    fn keep(mut self) {
        self.name.keep();
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.name.names().next().is_none() {
            return;
        }
        // A close that failed has unlocked it.
        if self.file.set_lock(LockMode::Write).is_err() {
            self.name.keep();
        } else if let Some(open) = self.file.descriptors().next() {
            // The kernel gives up the files of a ring late. Their space is to be free when this program ends.
            let _ = rustix::fs::ftruncate(open, 0);
        }
    }
}

/// Makes a file, or cuts one that exists to nothing. A disk that is no local file stays as long as it is.
fn open_new(path: &Path, options: &CreateOptions) -> Result<File> {
    let flags = OpenFlags::default()
        .access(zebu_storage::Access::ReadWrite)
        .direct(options.cache.is_direct())
        .create(Create::Truncate)
        .lock(LockMode::Write)
        .lock_wait(options.lock_wait.clone())
        .no_flush(options.cache == CacheMode::Unsafe);
    options.remote.open(path, &flags).map_err(|e| Error::from(e).on(path))
}

/// The same with the attributes that options ask for.
pub(crate) fn new_file(path: &Path, options: &CreateOptions) -> Result<File> {
    let file = open_new(path, options)?;
    set_attributes(&file, options).map(|()| file)
}

fn unlock(file: &File) -> Result<()> {
    file.unlock().map_err(|e| Error::from(e).on(file.path()))
}

/// Sets what file systems know of a file and the image does not.
fn set_attributes(file: &File, options: &CreateOptions) -> Result<()> {
    const DEFAULT_HINT: u32 = 1 << 20;
    match (options.extent_size_hint, file.fs()) {
        // Where it can't be had, the image is as good as any.
        (None, _) => drop(file.set_extent_size_hint(DEFAULT_HINT)),
        (Some(0), fs) if fs != FsKind::Xfs => {}
        (Some(hint), _) => file.set_extent_size_hint(hint).map_err(|e| {
            if e.kind == IoErrorKind::Unsupported {
                let message = "there is no extent size hint but on XFS; leave it out";
                return Error::new(ErrorKind::Unsupported, message).on(file.path());
            }
            let message = format!(
                "XFS takes no extent size hint of {hint} bytes ({}); it must be a multiple of the file system's block \
                 size and fit into half an allocation group",
                e.reason()
            );
            Error::new(ErrorKind::InvalidArgument, message).on(file.path())
        })?,
    }
    // As QEMU has it, nocow asks for nothing where no file is copied on write.
    if options.nocow && file.fs() == FsKind::Btrfs {
        file.set_nocow().map_err(|e| {
            let message = format!("could not turn copy-on-write off ({}); leave nocow out", e.reason());
            Error::new(ErrorKind::Io, message).on(file.path())
        })?;
    }
    Ok(())
}
