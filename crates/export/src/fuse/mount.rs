//! Mounting an image over a file.

use super::filesystem::ImageFile;
use crate::error::ExportError;
use crate::export::Export;
use crate::log::{Level, Log};
use crate::pool::WorkerPool;
use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu::Access;

/// How an image is mounted.
#[derive(Debug, Clone)]
pub struct FuseConfig {
    /// Where messages go.
    pub log: Log,
}

/// An image that is mounted as a file. Dropping it unmounts it.
pub struct FuseMount {
    session: Option<BackgroundSession>,
    path: PathBuf,
    /// Whether the file below was made for this.
    is_ours: bool,
    log: Log,
}

impl FuseMount {
    /// Mounts an export over the regular file `path`, which is made if it is not there.
    ///
    /// # Errors
    /// The file can't be made or mounted over.
    pub fn start(
        pool: &WorkerPool,
        export: &Arc<Export>,
        path: &Path,
        config: FuseConfig,
    ) -> Result<Self, ExportError> {
        let doing = || format!("mount '{}' over '{}'", export.name(), path.display());
        let fail = |source: io::Error| ExportError::Socket { doing: doing(), source };
        let is_ours = match File::create_new(path) {
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(fail(error)),
        };
        let mut mount = Self { session: None, path: path.to_owned(), is_ours, log: config.log.clone() };
        let metadata = fs::metadata(path).map_err(fail)?;
        if !metadata.is_file() {
            return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
        }
        let path = fs::canonicalize(path).map_err(fail)?;
        mount.path.clone_from(&path);
        let mut options = Config::default();
        options.mount_options = vec![
            MountOption::FSName(export.image().path().display().to_string()),
            MountOption::Subtype("zebu".to_owned()),
            MountOption::NoSuid,
            MountOption::NoDev,
            MountOption::DefaultPermissions,
            if export.access() == Access::ReadOnly { MountOption::RO } else { MountOption::RW },
        ];
        if rustix::process::geteuid().is_root() {
            // A helper unmounts it if this process is killed. It needs to let others in, whom permissions keep out.
            options.acl = SessionACL::All;
            options.mount_options.push(MountOption::AutoUnmount);
        }
        options.n_threads = Some(1);
        let file = ImageFile::new(export, &pool.handle(), pool.threads());
        let session = Session::new(file, &path, &options).and_then(Session::spawn).map_err(fail)?;
        mount.session = Some(session);
        Ok(mount)
    }

    /// Unmounts it. What uses the file still (a loop device, an open descriptor) gets errors from now on.
    pub fn stop(mut self) {
        self.end();
    }

    fn unmount(&self, session: BackgroundSession) {
        let path = self.path.display();
        // The helper that unmounts after a crash is not relied on: it may be gone.
        match unmount(&self.path, UnmountFlags::empty()) {
            Err(Errno::BUSY) => {
                self.log.write(Level::Warning, format_args!("'{path}' is in use: taken away nevertheless"));
                // Its users get errors when this process is gone; its thread serves them until then.
                let _ = unmount(&self.path, UnmountFlags::DETACH);
                drop(session);
            }
            // Done, done by somebody else, or not for us to do: then fusermount does it.
            Ok(()) | Err(_) => {
                if let Err(error) = session.umount_and_join() {
                    self.log.write(Level::Warning, format_args!("could not unmount '{path}': {error}"));
                }
            }
        }
    }

    fn end(&mut self) {
        if let Some(session) = self.session.take() {
            self.unmount(session);
        }
        if std::mem::take(&mut self.is_ours) {
            // It is empty; if it stays, nothing is lost.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        self.end();
    }
}
