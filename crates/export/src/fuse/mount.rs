//! Mounting an image over a file.

use super::device::MAX_WRITE;
use super::filesystem::{Ended, ImageFile};
use super::mount_table::{MountedOver, mounted_over, unmount_unless_used};
use crate::error::ExportError;
use crate::export::Export;
use crate::log::{Level, Log};
use crate::memory_budget::{Due, MemoryBudget};
use crate::pool::WorkerPool;
use crate::stop::Stop;
use fuser::{Config, Filesystem, InitFlags, KernelConfig, MountOption, Session, SessionACL};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use zebu_engine::Access;
use zebu_storage::Socket;

/// Requests of one file that the kernel may have under way without anybody waiting for each.
const BACKGROUND: u16 = 256;
/// The name of the type of these mounts after `fuse.`.
const SUBTYPE: &str = "zebu";

/// How an image is mounted.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FuseConfig {
    /// Memory of all clients, in which the requests of those who use the file take part.
    pub memory: MemoryBudget,
    /// Where messages go.
    pub log: Log,
}

impl Default for FuseConfig {
    fn default() -> Self {
        Self { memory: MemoryBudget::default(), log: Log::none() }
    }
}

zebu_storage::option_setters!(FuseConfig { memory: MemoryBudget, log: Log });

/// The agreement with the kernel when the file is mounted; later requests are [`ImageFile`]'s.
#[derive(Debug)]
struct Handshake;

impl Filesystem for Handshake {
    fn init(&mut self, _request: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it (Linux before 3.10), what a program has in flight goes one by one.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        // Smaller limits of the kernel do as well.
        let _ = config.set_max_write(MAX_WRITE);
        let _ = config.set_max_background(BACKGROUND);
        Ok(())
    }
}

fn failure(export: &Export, path: &Path, source: io::Error) -> ExportError {
    let image = export.image();
    let image = image.path().display();
    ExportError::Socket { doing: format!("mount '{image}' over '{}'", path.display()), source }
}

fn has_helper(options: &Config) -> bool {
    options.mount_options.contains(&MountOption::AutoUnmount)
}

/// An image that is mounted as a file. Dropping it unmounts it.
pub struct FuseMount {
    export: Arc<Export>,
    session: Option<Session<Handshake>>,
    /// Tells the task that serves to end.
    stop: Stop,
    /// Thrown before it is unmounted.
    ending: Stop,
    /// Disconnected when it did.
    ended: Option<Receiver<()>>,
    path: PathBuf,
    /// The mount, as the system lists it.
    mounted: Option<MountedOver>,
    /// Whether the file below was made for this.
    is_ours: bool,
    memory: MemoryBudget,
    log: Log,
}

impl FuseMount {
    /// Mounts an export over the regular file `path`, which is made if it is not there. Programs that use the file wait until
    /// it is served ([`FuseMount::serve`]).
    ///
    /// # Errors
    /// The file can't be made or mounted over, or another image is mounted there, or about to be.
    pub fn over(path: &Path, export: &Arc<Export>, config: FuseConfig) -> Result<Self, ExportError> {
        let fail = |source: io::Error| failure(export, path, source);
        let taken = || {
            let why =
                "an image is mounted there already: give another file, or end the server that serves it";
            fail(io::Error::new(io::ErrorKind::AlreadyExists, why))
        };
        let is_ours = match File::create_new(path) {
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(fail(error)),
        };
        let is_zebu = |path: PathBuf| {
            mounted_over(&path).is_some_and(|over| over.file_system == format!("fuse.{SUBTYPE}"))
        };
        // Before anything else is asked of it, which could wait for it to be served.
        if !is_ours && fs::canonicalize(path).is_ok_and(is_zebu) {
            return Err(taken());
        }
        if !fs::metadata(path).map_err(fail)?.is_file() {
            return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
        }
        // Of two at the same moment, one has the file below, and the other finds it locked or mounted over.
        let below = File::open(path).map_err(fail)?;
        if flock(&below, FlockOperation::NonBlockingLockExclusive).is_err()
            || fs::canonicalize(path).is_ok_and(is_zebu)
        {
            return Err(taken());
        }
        let mut mount = Self {
            export: Arc::clone(export),
            session: None,
            stop: Stop::default(),
            ending: Stop::default(),
            ended: None,
            path: path.to_owned(),
            mounted: None,
            is_ours,
            memory: config.memory,
            log: config.log,
        };
        mount.path = fs::canonicalize(path).map_err(fail)?;
        let mut options = Config::default();
        options.mount_options = vec![
            MountOption::FSName(export.image().path().display().to_string()),
            MountOption::Subtype(SUBTYPE.to_owned()),
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
        let mounted = Session::new(Handshake, &mount.path, &options);
        let mounted = match mounted {
            // The helper is not installed, which root can do without.
            Err(error) if error.kind() == io::ErrorKind::NotFound && has_helper(&options) => {
                options.mount_options.retain(|option| *option != MountOption::AutoUnmount);
                let what = "without fusermount3 (of the package fuse3) a killed server stays mounted outside of the sandbox";
                mount.log.write(Level::Info, format_args!("'{}': {what}", mount.path.display()));
                Session::new(Handshake, &mount.path, &options)
            }
            mounted => mounted,
        };
        mount.session = Some(mounted.map_err(fail)?);
        mount.mounted = mounted_over(&mount.path);
        Ok(mount)
    }

    /// Has the workers of `pool` do what programs ask of the file.
    ///
    /// # Errors
    /// There is no descriptor left for it.
    pub fn serve(&mut self, pool: &WorkerPool) -> Result<(), ExportError> {
        let Some(session) = &self.session else { return Ok(()) };
        let device = session.as_fd().try_clone_to_owned().and_then(Socket::new);
        let device = device.map_err(|error| failure(&self.export, &self.path, error))?;
        // A buffer for the next write, and the largest request.
        let due = Due { fixed: MAX_WRITE.into(), reserve: MAX_WRITE.into() };
        let account = self.memory.admit(due, Arc::default()).ok_or_else(|| {
            let full =
                io::Error::new(io::ErrorKind::OutOfMemory, "clients have half of the memory by being there");
            failure(&self.export, &self.path, full)
        })?;
        let file = ImageFile::new(&self.export, &pool.handle(), pool.threads(), &self.log);
        let (stop, ending) = (self.stop.clone(), self.ending.clone());
        let (path, log) = (self.path.clone(), self.log.clone());
        // Whatever ends the task drops the sender.
        let (running, ended) = channel();
        self.ended = Some(ended);
        let handle = pool.handle();
        handle.spawn_on(handle.least_loaded(), move |seat| async move {
            let _running: std::sync::mpsc::Sender<()> = running;
            let ended = file.serve(seat, device, account, stop).await;
            if ended == Ended::Unmounted && !ending.is_thrown() {
                let what =
                    "was unmounted by somebody else: its image is no longer served there, but stays open";
                log.write(Level::Warning, format_args!("'{}' {what}", path.display()));
            }
        });
        Ok(())
    }

    /// The file, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file that it is mounted over was made for it, and goes with it.
    pub fn made_its_file(&self) -> bool {
        self.is_ours
    }

    /// Unmounts it. What uses the file still (a loop device, an open descriptor) gets errors from now on.
    pub fn stop(mut self) {
        self.end();
    }

    /// Notes that another process is about to unmount it, on behalf of this one.
    pub fn expect_unmount(&self) {
        self.ending.throw();
    }

    /// Ends what another process has unmounted, for one that has given up the right to. The file below stays.
    pub fn stop_unmounted(mut self) {
        self.is_ours = false;
        self.stop_serving();
        // Looks whether it is mounted still.
        self.session = None;
    }

    fn stop_serving(&mut self) {
        self.stop.throw();
        if let Some(ended) = self.ended.take() {
            // Nothing is sent: it ends with the task.
            let _ = ended.recv();
        }
    }

    fn unmount(&self, session: &mut Session<Handshake>) {
        self.ending.throw();
        let path = self.path.display();
        // The helper that unmounts after a crash is not relied on: it may be gone.
        match unmount_unless_used(&self.path) {
            Err(Errno::BUSY) => {
                self.log.write(Level::Warning, format_args!("'{path}' is in use: unmounted all the same"));
                // Its users get errors when the device is closed.
                let _ = unmount(&self.path, UnmountFlags::DETACH);
            }
            // Lets go of the helper, if there is one; nothing is left to be done.
            Ok(()) => drop(session.unmount()),
            // Done by somebody else, or not for us to do: then fusermount does it.
            Err(_) => {
                if let Err(error) = session.unmount() {
                    self.log.write(Level::Warning, format_args!("could not unmount '{path}': {error}"));
                }
            }
        }
    }

    fn end(&mut self) {
        if let Some(mut session) = self.session.take() {
            let now = mounted_over(&self.path);
            if now.is_none() || now == self.mounted {
                self.unmount(&mut session);
            } else {
                // Somebody has unmounted it, and what is there now belongs to another.
                self.is_ours = false;
            }
        }
        self.stop_serving();
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
