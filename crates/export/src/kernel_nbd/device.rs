//! A device from its connecting to its end.

use super::client::{Agreed, choose};
use super::netlink::{Device, Netlink};
use crate::device_file::{WhenStopped, is_in_use, mark_of};
use crate::error::ExportError;
use crate::export::{Export, SizeWatcher};
use crate::log::{Level, Log};
use crate::nbd::{Entrance, NbdServer};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use zebu_storage::Socket;
use zebu_storage::sync::Mutex;

/// How long requests wait for the next server, in seconds: for ever, as far as a person sees.
const PATIENCE: u64 = 10 * 365 * 24 * 3600;
/// How long a request may take before the kernel sends it again over another connection, in seconds. Those of a server that was
/// killed wait for so long.
const TIMEOUT: u64 = 30;
/// How long the kernel may take to notice that a server has gone.
const NOTICE: Duration = Duration::from_secs(10);
/// Devices that the kernel has at most.
const MOST: u32 = 1 << 20;
/// How often is looked whether it has.
const STEP: Duration = Duration::from_millis(20);

/// How a device is connected.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NbdDeviceConfig {
    /// Connections, at least one; they are spread over the threads of the pool.
    pub connections: usize,
    /// Where messages go.
    pub log: Log,
}

zebu_storage::option_setters!(NbdDeviceConfig { connections: usize, log: Log });

impl Default for NbdDeviceConfig {
    fn default() -> Self {
        Self { connections: 1, log: Log::none() }
    }
}

/// State that a device shares with those who look after it.
struct Shared {
    index: u32,
    netlink: Mutex<Netlink>,
    export: Arc<Export>,
    /// Which image it is of, as the kernel keeps it.
    backend: String,
    is_connected: AtomicBool,
    log: Log,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("index", &self.index).finish_non_exhaustive()
    }
}

impl SizeWatcher for Shared {
    fn size_changed(&self) {
        let size = self.export.image().virtual_size();
        if let Err(errno) = self.netlink.lock().set_size(self.index, &self.backend, size) {
            let index = self.index;
            self.log.write(Level::Warning, format_args!("/dev/nbd{index} keeps its size: {errno}"));
        }
    }
}

/// A connection between the kernel and this process, ready for requests.
struct Line {
    /// The kernel's end.
    kernel: UnixStream,
    /// This process's end, to be looked at.
    watched: UnixStream,
    is_taken: Arc<AtomicBool>,
    agreed: Agreed,
}

/// Says that a connection is over that the kernel had taken, when it is dropped.
struct Over {
    told: Sender<()>,
    is_taken: Arc<AtomicBool>,
}

impl Drop for Over {
    fn drop(&mut self) {
        if self.is_taken.load(Ordering::SeqCst) {
            // Nobody may be there any more who brings another.
            let _ = self.told.send(());
        }
    }
}

impl Shared {
    fn line(&self, entrance: &Entrance, over: &Sender<()>) -> io::Result<Line> {
        let (mut kernel, ours) = UnixStream::pair()?;
        let watched = ours.try_clone()?;
        let is_taken = Arc::new(AtomicBool::new(false));
        let over = Over { told: over.clone(), is_taken: Arc::clone(&is_taken) };
        entrance.take_in(Socket::new(ours)?, over);
        let agreed = choose(&mut kernel, self.export.name())?;
        Ok(Line { kernel, watched, is_taken, agreed })
    }

    /// Brings a connection in the place of one that is broken; false if there is none within `patience`.
    ///
    /// # Errors
    /// EINVAL: the device is not connected, or to another image.
    fn bring_another(
        &self,
        entrance: &Entrance,
        over: &Sender<()>,
        patience: Duration,
    ) -> Result<bool, io::Error> {
        let begun = Instant::now();
        loop {
            let Line { kernel, watched, is_taken, .. } = self.line(entrance, over)?;
            self.netlink.lock().reconnect(self.index, &self.backend, &[kernel.as_fd()])?;
            drop(kernel);
            is_taken.store(true, Ordering::SeqCst);
            // Where no connection is broken, the kernel takes none, and says nothing of that.
            if !is_closed(&watched) {
                return Ok(true);
            }
            is_taken.store(false, Ordering::SeqCst);
            if begun.elapsed() >= patience {
                return Ok(false);
            }
            std::thread::sleep(STEP);
        }
    }

    /// Brings another connection for each that is over, as long as the device is connected.
    fn look_after(&self, entrance: &Entrance, over: &Sender<()>, ends: &Receiver<()>) {
        while ends.recv().is_ok() && self.is_connected.load(Ordering::SeqCst) {
            match self.bring_another(entrance, over, NOTICE) {
                Ok(_) => {}
                // Somebody has disconnected it.
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                    self.is_connected.store(false, Ordering::SeqCst);
                    return;
                }
                Err(error) => {
                    let index = self.index;
                    self.log.write(
                        Level::Warning,
                        format_args!("/dev/nbd{index} has a connection less: {error}"),
                    );
                }
            }
        }
    }
}

/// A device of the kernel's NBD client with the bytes of an image. Dropping it stops it.
pub struct NbdDevice {
    shared: Arc<Shared>,
    connections: usize,
    path: PathBuf,
}

impl NbdDevice {
    /// Prepares a device for an export. Nothing is connected yet.
    ///
    /// # Errors
    /// The kernel has no NBD client, or the device is not there.
    pub fn new(export: &Arc<Export>, index: u32, config: NbdDeviceConfig) -> Result<Self, ExportError> {
        let path = PathBuf::from(format!("/dev/nbd{index}"));
        let fail = |source| failure(&path, source);
        let netlink = Netlink::open().map_err(fail)?;
        if !path.exists() {
            let why = format!("there is no {} (modprobe nbd nbds_max=N makes more)", path.display());
            return Err(fail(io::Error::new(io::ErrorKind::NotFound, why)));
        }
        let shared = Arc::new(Shared {
            index,
            netlink: Mutex::new(netlink),
            export: Arc::clone(export),
            backend: format!("zebu-{:016x}", mark_of(&export.first_image())),
            is_connected: AtomicBool::new(false),
            log: config.log,
        });
        export.watch_size(Arc::downgrade(&shared) as Weak<dyn SizeWatcher>);
        export.keep_answers();
        Ok(Self { shared, connections: config.connections.max(1), path })
    }

    /// Connects the device to `server`, which has the export.
    ///
    /// # Errors
    /// Somebody else has the device, or the kernel refuses it.
    pub fn connect(&mut self, server: &NbdServer) -> Result<(), ExportError> {
        let (entrance, (over, ends)) = (server.entrance(), channel());
        let lines = (0..self.connections).map(|_| self.shared.line(&entrance, &over));
        let lines = lines.collect::<io::Result<Vec<_>>>().map_err(|error| self.fail(error))?;
        let sockets: Vec<_> = lines.iter().map(|line| line.kernel.as_fd()).collect();
        let Agreed { size, flags } = lines[0].agreed;
        let device = Device {
            size,
            block: self.shared.export.image().logical_block_size(),
            flags,
            timeout: TIMEOUT,
            patience: PATIENCE,
            backend: &self.shared.backend,
        };
        let connected = self.shared.netlink.lock().connect(self.shared.index, &device, &sockets);
        connected.map_err(|errno| match errno {
            Errno::BUSY => self.fail(io::Error::other("it is connected to another server")),
            errno => self.refused(errno.into()),
        })?;
        for line in &lines {
            line.is_taken.store(true, Ordering::SeqCst);
        }
        self.is_connected(entrance, over, ends)?;
        // The kernel looks for partitions when somebody opens it.
        let _ = File::open(&self.path);
        Ok(())
    }

    /// Gives the device, whose server has gone, connections to `server`. Requests that waited go on.
    ///
    /// # Errors
    /// It is not connected, of another image, or still served.
    pub fn recover(&mut self, server: &NbdServer) -> Result<(), ExportError> {
        let (entrance, (over, ends)) = (server.entrance(), channel());
        let mut patience = NOTICE;
        for number in 0..self.connections {
            let is_taken = self.shared.bring_another(&entrance, &over, patience);
            let is_taken = is_taken.map_err(|error| match error.raw_os_error() {
                Some(errno) if errno == Errno::INVAL.raw_os_error() => {
                    self.fail(io::Error::other("it is not connected, or to another image than this"))
                }
                _ => self.refused(error),
            })?;
            match (is_taken, number) {
                (true, _) => patience = STEP,
                (false, 0) => return Err(self.fail(io::Error::other("its server is still there"))),
                // It had fewer.
                (false, _) => break,
            }
        }
        self.is_connected(entrance, over, ends)
    }

    /// From now on, connections that break are replaced.
    fn is_connected(
        &self,
        entrance: Entrance,
        over: Sender<()>,
        ends: Receiver<()>,
    ) -> Result<(), ExportError> {
        self.shared.is_connected.store(true, Ordering::SeqCst);
        let shared = Arc::clone(&self.shared);
        // A thread of its own: it waits in handshakes, which the threads of the pool serve.
        let work = move || shared.look_after(&entrance, &over, &ends);
        let started = std::thread::Builder::new().name("zebu-nbd-device".to_owned()).spawn(work);
        started.map(drop).map_err(|error| ExportError::Thread(error.to_string()))
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Disconnects it, unless it is in use: then whoever uses it waits for the next server. To be called before the server is stopped.
    pub fn stop(mut self) -> WhenStopped {
        self.end()
    }

    fn refused(&self, error: io::Error) -> ExportError {
        match error.kind() {
            io::ErrorKind::PermissionDenied => {
                self.fail(io::Error::other("only root (CAP_SYS_ADMIN) may connect devices"))
            }
            _ => self.fail(error),
        }
    }

    fn fail(&self, source: io::Error) -> ExportError {
        failure(&self.path, source)
    }

    fn end(&mut self) -> WhenStopped {
        if !self.shared.is_connected.swap(false, Ordering::SeqCst) {
            return WhenStopped::WasGone;
        }
        if is_in_use(&self.path) {
            return WhenStopped::Stays;
        }
        if let Err(errno) = self.shared.netlink.lock().disconnect(self.shared.index) {
            let path = self.path.display();
            self.shared.log.write(Level::Warning, format_args!("could not disconnect {path}: {errno}"));
        }
        WhenStopped::Removed
    }
}

impl Drop for NbdDevice {
    fn drop(&mut self) {
        self.end();
    }
}

/// Disconnects a device, whoever uses or serves it: requests of those who use it fail.
///
/// # Errors
/// The kernel has no NBD client, or no such device, or this process may not do that.
pub fn disconnect_device(index: u32) -> Result<(), ExportError> {
    let doing = || format!("disconnect /dev/nbd{index}");
    let mut netlink = Netlink::open().map_err(|source| ExportError::Socket { doing: doing(), source })?;
    let done = netlink.disconnect(index);
    done.map_err(|errno| {
        let source = match errno {
            Errno::INVAL => io::Error::new(io::ErrorKind::NotFound, "there is no such device"),
            errno => errno.into(),
        };
        ExportError::Socket { doing: doing(), source }
    })
}

/// A device that nobody has connected, if there is one.
///
/// # Errors
/// The kernel has no NBD client.
pub fn free_device() -> Result<Option<u32>, ExportError> {
    let doing = || "look for a free /dev/nbdN".to_owned();
    Netlink::open().map_err(|source| ExportError::Socket { doing: doing(), source })?;
    let of = |index: u32| PathBuf::from(format!("/sys/block/nbd{index}"));
    // One that is connected says by which process.
    let is_there = |index: &u32| of(*index).exists();
    Ok((0..MOST).take_while(is_there).find(|index| !of(*index).join("pid").exists()))
}

fn failure(path: &Path, source: io::Error) -> ExportError {
    ExportError::Socket { doing: format!("connect {}", path.display()), source }
}

/// Whether nobody has the other end.
fn is_closed(stream: &UnixStream) -> bool {
    recv(stream, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok_and(|(bytes, _)| bytes == 0)
}
