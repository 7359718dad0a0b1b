//! A device from its making to its end, and devices that are there.

use super::control::Control;
use super::descriptions::Descriptions;
use super::queue::{Queue, QueueSetup, QueueState};
use super::uapi::{DeviceState, Disk, Info, SECTOR, feature};
use crate::device_file::{WhenStopped, is_in_use, mark_of};
use crate::error::ExportError;
use crate::export::{Export, SizeWatcher};
use crate::log::{Level, Log};
use crate::memory_budget::{Account, Due, MemoryBudget};
use crate::pool::WorkerPool;
use crate::stop::Stop;
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use zebu_engine::{Access, Image};
use zebu_storage::Socket;
use zebu_storage::sync::Mutex;

/// Requests of a queue that may be under way.
const DEPTH: u16 = 64;
/// Bytes of a request. Larger ones come in parts.
const BUFFER: u32 = 256 << 10;
/// How long the kernel may take to let go of a device whose server has ended, or to make its file.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a server that was killed may still look like one that is alive.
const END: Duration = Duration::from_secs(2);
/// How often is looked whether it has.
const STEP: Duration = Duration::from_millis(10);

/// How a device is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UblkConfig {
    /// Queues, at least one; each is served by one thread of the pool. The kernel makes no more than it has processors.
    pub queues: u16,
    /// Memory of all clients, in which the buffers of the device take part.
    pub memory: MemoryBudget,
    /// Where messages go.
    pub log: Log,
}

zebu_storage::option_setters!(UblkConfig { queues: u16, memory: MemoryBudget, log: Log });

impl Default for UblkConfig {
    fn default() -> Self {
        Self { queues: 1, memory: MemoryBudget::default(), log: Log::none() }
    }
}

/// A device that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelDevice {
    /// Its number.
    pub id: u32,
    /// Its file, which is there unless it is stopped.
    pub path: PathBuf,
    /// Its state.
    pub state: DeviceState,
    /// Bytes of the disk.
    pub size: u64,
    /// Whether it can only be read.
    pub is_read_only: bool,
    /// Whether something has it as its own: a mount, swap, a device above it.
    pub is_in_use: bool,
    /// The process that serves it, or served it last.
    pub server: Option<u32>,
}

/// State that a device shares with those who tell it of a new size.
struct Shared {
    id: u32,
    control: Mutex<Control>,
    export: Arc<Export>,
    log: Log,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("id", &self.id).finish_non_exhaustive()
    }
}

impl SizeWatcher for Shared {
    fn size_changed(&self) {
        let sectors = sectors(&self.export.image());
        let mut control = self.control.lock();
        let done =
            if control.can_resize() { control.set_size(self.id, sectors) } else { Err(Errno::OPNOTSUPP) };
        let path = disk_path(self.id);
        let path = path.display();
        match done {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => self.log.write(
                Level::Warning,
                format_args!(
                    "{path} keeps its size until it is made anew: the kernel can't change it (Linux 6.16)"
                ),
            ),
            Err(errno) => self.log.write(Level::Warning, format_args!("{path} keeps its size: {errno}")),
        }
    }
}

/// How far a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It is new, and nobody can use it.
    New,
    /// Its requests wait.
    TakenOver,
    Running,
}

/// A block device of this machine's kernel with the bytes of an image. Dropping it stops it.
pub struct UblkDevice {
    shared: Arc<Shared>,
    info: Info,
    stage: Stage,
    path: PathBuf,
    /// `/dev/ublkcN`, until it is stopped.
    device: Option<Socket>,
    stop: Stop,
    state: Arc<QueueState>,
    /// Disconnected when all queues have ended; `None` before it is started.
    ended: Option<Receiver<()>>,
    _account: Account,
}

fn disk_path(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

fn failure(doing: String, source: impl Into<io::Error>) -> ExportError {
    ExportError::Socket { doing, source: source.into() }
}

fn refused(doing: String, why: String) -> ExportError {
    failure(doing, io::Error::other(why))
}

/// Whole logical blocks of a disk, in sectors.
fn sectors(image: &Image) -> u64 {
    let block = u64::from(image.logical_block_size());
    image.virtual_size() / block * block / SECTOR
}

impl UblkDevice {
    /// Makes a device of an export. Programs find it when it is started ([`UblkDevice::start`]). Without an `id`, the kernel
    /// chooses one.
    ///
    /// # Errors
    /// The kernel has no ublk or does not let this process use it, the number is taken, or memory lacks.
    pub fn add(export: &Arc<Export>, id: Option<u32>, config: UblkConfig) -> Result<Self, ExportError> {
        let name = export.image().path().display().to_string();
        let doing = || format!("make a block device of '{name}'");
        let mut control = Control::open().map_err(|error| failure(doing(), error))?;
        let wanted = Info {
            queues: config.queues.max(1),
            depth: DEPTH,
            state: DeviceState::Stopped,
            buffer: BUFFER,
            id: id.unwrap_or(u32::MAX),
            server: -1,
            flags: feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE | feature::CMD_IOCTL_ENCODE,
            image: mark_of(&export.first_image()),
        };
        let info = control.add(&wanted).map_err(|errno| match (errno, id) {
            (Errno::EXIST, Some(id)) => refused(doing(), taken(&mut control, id)),
            (Errno::PERM | Errno::ACCESS, _) => {
                refused(doing(), "only root (CAP_SYS_ADMIN) may make ublk devices".to_owned())
            }
            _ => failure(doing(), errno),
        })?;
        let disk = Disk {
            sectors: sectors(&export.image()),
            is_read_only: export.access() == Access::ReadOnly,
            logical_block: export.image().logical_block_size(),
            cluster: export.image().cluster_size(),
            buffer: info.buffer,
        };
        let prepared = control.set_parameters(info.id, &disk).map_err(|errno| failure(doing(), errno));
        let prepared = prepared.and_then(|()| open(info.id).map_err(|error| failure(doing(), error)));
        let prepared = prepared.and_then(|device| Ok((device, account(&info, &config, doing)?)));
        match prepared {
            Ok((device, account)) => {
                Ok(Self::with(export, config, control, info, device, account, Stage::New))
            }
            Err(error) => {
                // Nobody has seen it yet.
                let _ = control.remove(info.id);
                Err(error)
            }
        }
    }

    /// Takes over a device whose server has ended. The image must be the same.
    ///
    /// # Errors
    /// There is no such device, it is served or of another image, or it can't be taken over.
    pub fn recover(export: &Arc<Export>, id: u32, config: UblkConfig) -> Result<Self, ExportError> {
        let name = disk_path(id).display().to_string();
        let doing = || format!("take over {name}");
        let mut control = Control::open().map_err(|error| failure(doing(), error))?;
        let info = control.info(id).map_err(|errno| match errno {
            Errno::NODEV => refused(doing(), format!("there is no ublk device {id}")),
            errno => failure(doing(), errno),
        })?;
        let gone = "remove it, and make it anew";
        if info.flags & feature::USER_RECOVERY == 0 || info.state == DeviceState::Failing {
            return Err(refused(doing(), format!("its server did not make it for that: {gone}")));
        }
        if info.state == DeviceState::Stopped {
            return Err(refused(doing(), format!("it was stopped, or never started: {gone}")));
        }
        let mark = mark_of(&export.first_image());
        if info.image != mark && info.image != 0 && mark != 0 {
            let image = export.image();
            let image = image.path().display();
            return Err(refused(doing(), format!("it was made of another file than '{image}'")));
        }
        let (is, is_read_only) = control.size(id).map_err(|errno| failure(doing(), errno))?;
        let wanted = sectors(&export.image());
        if wanted < is || is_read_only != (export.access() == Access::ReadOnly) {
            let of = |sectors: u64, is_read_only: bool| {
                format!("{} bytes{}", sectors * SECTOR, if is_read_only { ", read-only" } else { "" })
            };
            let (device, image) = (of(is, is_read_only), of(wanted, export.access() == Access::ReadOnly));
            return Err(refused(doing(), format!("it is another disk: {device}; the image has {image}")));
        }
        let account = account(&info, &config, doing)?;
        begin_recovery(&mut control, id).map_err(|errno| match errno {
            Errno::BUSY => refused(doing(), taken(&mut control, id)),
            errno => failure(doing(), errno),
        })?;
        let device = open(id).map_err(|error| match error.raw_os_error() {
            Some(errno) if errno == Errno::BUSY.raw_os_error() => {
                refused(doing(), "another process takes it over at this moment".to_owned())
            }
            _ => failure(doing(), error),
        })?;
        let device = Self::with(export, config, control, info, device, account, Stage::TakenOver);
        if wanted > is {
            device.shared.size_changed();
        }
        Ok(device)
    }

    fn with(
        export: &Arc<Export>,
        config: UblkConfig,
        control: Control,
        info: Info,
        device: Socket,
        account: Account,
        stage: Stage,
    ) -> Self {
        let (control, log) = (Mutex::new(control), config.log);
        let shared = Arc::new(Shared { id: info.id, control, export: Arc::clone(export), log });
        export.watch_size(Arc::downgrade(&shared) as Weak<dyn SizeWatcher>);
        export.keep_answers();
        Self {
            shared,
            info,
            stage,
            path: disk_path(info.id),
            device: Some(device),
            stop: Stop::default(),
            state: Arc::default(),
            ended: None,
            _account: account,
        }
    }

    /// Has the workers of `pool` do what programs ask of the device, which is there when this returns. The pool's workers must
    /// have rings that take commands ([`Commands::Taken`](zebu_engine::storage::Commands)).
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn start(&mut self, pool: &WorkerPool) -> Result<(), ExportError> {
        let Some(device) = self.device.clone() else { return Ok(()) };
        let (path, info) = (self.path.display().to_string(), self.info);
        let doing = || format!("start {path}");
        let maps = (0..info.queues).map(|number| Descriptions::map(&device, number, info.depth));
        let maps = maps.collect::<io::Result<Vec<_>>>().map_err(|error| failure(doing(), error))?;
        let (running, ended) = channel();
        self.ended = Some(ended);
        let handle = pool.handle();
        for (number, descriptions) in maps.into_iter().enumerate() {
            let setup = QueueSetup {
                export: Arc::clone(&self.shared.export),
                device: device.clone(),
                descriptions,
                number: number as u16,
                depth: info.depth,
                buffer: info.buffer as usize,
                stop: self.stop.clone(),
                state: Arc::clone(&self.state),
                log: self.shared.log.clone(),
                _running: running.clone(),
            };
            handle.spawn_on(number, move |seat| Queue::run(seat, setup));
        }
        drop(running);
        let state = Arc::clone(&self.state);
        let is_hopeless = move || state.is_refused.load(Ordering::SeqCst);
        let mut control = self.shared.control.lock();
        let started = match self.stage {
            Stage::New => control.start(info.id, is_hopeless),
            _ => control.end_recovery(info.id, is_hopeless),
        };
        drop(control);
        started.map_err(|errno| match errno {
            Errno::INTR => refused(doing(), "the kernel takes no requests for it from a ring".to_owned()),
            errno => failure(doing(), errno),
        })?;
        self.stage = Stage::Running;
        Ok(())
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.info.id
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Stops serving it. Requests under way are finished and answered when this returns. A device that nobody uses is removed; one
    /// in use stays, and whoever uses it waits for the next server.
    pub fn stop(mut self) -> WhenStopped {
        self.end()
    }

    fn end(&mut self) -> WhenStopped {
        if self.device.is_none() {
            return WhenStopped::WasGone;
        }
        let (id, path) = (self.info.id, self.path.display().to_string());
        let was_gone = self.state.is_gone.load(Ordering::SeqCst);
        self.state.is_ending.store(true, Ordering::SeqCst);
        let goes = match self.stage {
            Stage::New => true,
            Stage::TakenOver => false,
            Stage::Running => !was_gone && !is_in_use(&self.path),
        };
        if goes && let Err(errno) = self.shared.control.lock().stop(id) {
            self.shared.log.write(Level::Warning, format_args!("could not stop {path}: {errno}"));
        }
        self.stop.throw();
        if let Some(ended) = self.ended.take() {
            // Nothing is sent: it ends with the queues.
            let _ = ended.recv();
        }
        self.device = None;
        if goes && let Err(errno) = self.shared.control.lock().remove(id) {
            self.shared.log.write(Level::Warning, format_args!("could not remove {path}: {errno}"));
        }
        match (was_gone, goes) {
            (true, _) => WhenStopped::WasGone,
            (_, true) => WhenStopped::Removed,
            _ => WhenStopped::Stays,
        }
    }
}

impl Drop for UblkDevice {
    fn drop(&mut self) {
        self.end();
    }
}

/// Why a number is not to be had.
fn taken(control: &mut Control, id: u32) -> String {
    let path = disk_path(id);
    let path = path.display();
    match control.info(id) {
        Ok(Info { state: DeviceState::Served, server, .. }) => {
            format!("{path} is there already, and process {server} serves it")
        }
        Ok(Info { state: DeviceState::Stopped, .. }) => {
            format!("a device {id} is there already that was not started: remove it first")
        }
        _ => format!("{path} is there already and waits for a server: take it over, or remove it"),
    }
}

/// Memory for the buffers of a device.
fn account(info: &Info, config: &UblkConfig, doing: impl Fn() -> String) -> Result<Account, ExportError> {
    let fixed = u64::from(info.queues) * u64::from(info.depth) * u64::from(info.buffer);
    config.memory.admit(Due { fixed, reserve: 0 }, Arc::default()).ok_or_else(|| {
        let why = format!(
            "its buffers need {} MiB, and clients have half of the memory by being there: give more, or have fewer queues",
            fixed >> 20
        );
        refused(doing(), why)
    })
}

/// Opens the file of a device's requests, which the kernel makes at its own time.
fn open(id: u32) -> io::Result<Socket> {
    let path = format!("/dev/ublkc{id}");
    let begun = Instant::now();
    loop {
        match File::options().read(true).write(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && begun.elapsed() < PATIENCE => {
                std::thread::sleep(STEP);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(io::Error::new(
                    error.kind(),
                    format!("there is no {path} (is /dev a devtmpfs?)"),
                ));
            }
            opened => return Socket::new(opened?),
        }
    }
}

/// Waits until the kernel has let go of a server that was killed.
fn begin_recovery(control: &mut Control, id: u32) -> Result<(), Errno> {
    let begun = Instant::now();
    loop {
        match control.begin_recovery(id) {
            Err(Errno::BUSY) => {
                let info = control.info(id)?;
                let is_alive = info.state == DeviceState::Served && is_running(info.server);
                if begun.elapsed() > if is_alive { END } else { PATIENCE } {
                    return Err(Errno::BUSY);
                }
                std::thread::sleep(STEP);
            }
            // One that was killed between this step and its first request has done it already.
            Err(Errno::INVAL) if control.info(id)?.state == DeviceState::Waiting => return Ok(()),
            result => return result,
        }
    }
}

/// Whether a process is there, and at no end.
fn is_running(process: i32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{process}/stat")) else { return false };
    // After its name, which may have any characters.
    let state = status.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X' | 'x'))
}

/// The ublk devices that are there, by number.
///
/// # Errors
/// The kernel has no ublk, or does not let this process use it.
pub fn kernel_devices() -> Result<Vec<KernelDevice>, ExportError> {
    let doing = || "list ublk devices".to_owned();
    let mut control = Control::open().map_err(|error| failure(doing(), error))?;
    let mut ids = Vec::new();
    match fs::read_dir("/sys/class/ublk-char") {
        Ok(entries) => {
            for entry in entries {
                let name = entry.map_err(|error| failure(doing(), error))?.file_name();
                ids.extend(
                    name.to_string_lossy().strip_prefix("ublkc").and_then(|id| id.parse::<u32>().ok()),
                );
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failure(doing(), error)),
    }
    ids.sort_unstable();
    let mut devices = Vec::new();
    for id in ids {
        // One that goes meanwhile is not there.
        let (Ok(info), Ok((sectors, is_read_only))) = (control.info(id), control.size(id)) else { continue };
        let server = u32::try_from(info.server).ok().filter(|server| *server > 0);
        let (path, size, state) = (disk_path(id), sectors * SECTOR, info.state);
        let is_in_use = state != DeviceState::Stopped && is_in_use(&path);
        devices.push(KernelDevice { id, path, state, size, is_read_only, is_in_use, server });
    }
    Ok(devices)
}

/// Removes a device, whoever uses or serves it: requests of those who use it fail.
///
/// # Errors
/// There is no such device, or this process may not remove it.
pub fn remove_device(id: u32) -> Result<(), ExportError> {
    let path = disk_path(id).display().to_string();
    let doing = || format!("remove {path}");
    let mut control = Control::open().map_err(|error| failure(doing(), error))?;
    let result = control.stop(id).and_then(|()| control.remove(id));
    result.map_err(|errno| match errno {
        Errno::NODEV => refused(doing(), format!("there is no ublk device {id}")),
        errno => failure(doing(), errno),
    })
}
