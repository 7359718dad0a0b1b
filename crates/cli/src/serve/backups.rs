//! Backups of exports that are served: the disk as it was when the backup began, while clients write.

use super::control_request::{BackupStart, CompressionName, OnError, TargetCache};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use zebu_disks::errno_text;
use zebu_engine::jobs::{
    BackupEnd, Cancel, Copied, JobControl, LiveBackup, LiveBackupOptions, LiveBitmap, OnCopyError,
    TargetClusters, UnfinishedImage,
};
use zebu_engine::storage::{Access, CacheChoice, CacheUse, File, FileKind, LockMode, OpenFlags, Worker};
use zebu_engine::{
    BackupId, CompressOptions, Compression, CreateOptions, ErrorKind, Format, Image, OpenOptions,
};
use zebu_export::{Export, MemoryBudget, Reserved};

/// How often it is looked whether a cancelled backup has ended.
const LOOK: Duration = Duration::from_millis(5);
/// Bytes of buffers that a backup has if there is room for them.
const MEMORY: u64 = 40 << 20;
/// The least that it begins with, for clusters of up to 512 KiB.
const LEAST_MEMORY: u64 = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// The moment that is copied is still to come.
    Starting,
    Running,
    Completed,
    Cancelled,
    Failed(String),
}

struct Running {
    export: String,
    /// Tells it from the others of the server.
    number: u64,
    cancel: Cancel,
    total: u64,
    done: Arc<AtomicU64>,
    for_guests: Cell<u64>,
    /// It holds the disk as it is to be.
    has_begun: Cell<bool>,
    target_cache: CacheUse,
    source_cache: Cell<Option<CacheUse>>,
    /// Bytes of its buffers.
    memory: u64,
    /// Bytes of a logical sector of the disk, of which the target does not tell.
    logical_sector: u32,
    state: RefCell<State>,
}

impl Running {
    fn is_over(&self) -> bool {
        !matches!(*self.state.borrow(), State::Starting | State::Running)
    }
}

/// Ended backups that are remembered, so that whoever began one learns what became of it although others came after it.
const REMEMBERED: usize = 256;

/// The backups of all exports that run, and the last ones that have ended. All of it belongs to one thread.
#[derive(Default)]
pub(crate) struct Backups {
    /// In the order in which they were begun.
    all: RefCell<Vec<Rc<Running>>>,
    /// That of the one begun last.
    number: Cell<u64>,
}

impl Backups {
    /// Begins a backup: it holds the disk as it is before this returns.
    pub(crate) async fn start(
        &self,
        worker: &Worker,
        export: &Export,
        start: &BackupStart,
        descriptor: Option<OwnedFd>,
        memory: &MemoryBudget,
    ) -> Result<Value, String> {
        if self.is_running(export) {
            return Err(format!("a backup of the export '{}' is under way", export.name()));
        }
        let previous_id = start.previous_id.as_deref().map(str::parse::<BackupId>).transpose();
        let previous_id = previous_id.map_err(|error| format!("previous-id: {error}"))?;
        let bitmap = start.bitmap.clone().map(|name| {
            LiveBitmap::new(name, if start.previous.is_some() { Copied::Marked } else { Copied::All })
                .previous(previous_id)
        });
        if bitmap.is_none() && start.previous.is_some() {
            return Err(
                "an increment needs a bitmap: it shows what has changed since the previous backup".into()
            );
        }
        let cluster_size = start.cluster_size.unwrap_or_else(|| export.image().cluster_size().max(64 << 10));
        // Two chunks of copies, and as much that is packed.
        let least = LEAST_MEMORY.max(cluster_size.saturating_mul(8).min(MEMORY));
        let memory = memory.reserve(MEMORY, least).ok_or_else(|| {
            format!(
                "a backup needs {least} bytes of memory, and other backups and clients have it: wait for one to end, or \
                 start the server with a larger --max-memory"
            )
        })?;
        if let Some(descriptor) = &descriptor {
            check_target(&export.image(), &start.target, descriptor)?;
        }
        let was_made = descriptor.is_none();
        // Once the backup is complete, the name of a file that is made here has to last as its content does.
        let directory = was_made.then(|| directory_of(&start.target)).transpose()?;
        let (file, target_cache) = target_file(&start.target, descriptor, start.cache)?;
        let cancel = Cancel::new();
        let done = Arc::new(AtomicU64::new(0));
        let source = export.image();
        let total = source.virtual_size();
        let create = CreateOptions::default()
            .size(Some(total))
            .cluster_size(cluster_size)
            .backing(start.previous.clone().map(|name| (name, Format::Qcow2)))
            .compression(match start.compression {
                Some(CompressionName::Zstd) => Compression::Zstd,
                _ => Compression::Zlib,
            });
        let shared = done.clone();
        let options = LiveBackupOptions::default()
            .clusters(match start.compression {
                Some(_) => TargetClusters::Compressed,
                None => TargetClusters::Plain,
            })
            .on_copy_error(match start.on_error {
                OnError::Backup => OnCopyError::FailBackup,
                OnError::Request => OnCopyError::FailRequest,
            })
            .bitmap(bitmap)
            .speed(start.speed.speed())
            .buffer_memory(usize::try_from(memory.bytes() - memory.bytes() / 5).unwrap_or(usize::MAX))
            .control(
                JobControl::default()
                    .cancel(cancel.clone())
                    .progress(move |progress| shared.store(progress.done, Relaxed))
                    .rate_limit(start.rate_limit),
            );
        // Noted at once: nobody else begins one while the target is made.
        self.number.set(self.number.get() + 1);
        let running = Rc::new(Running {
            export: export.name().to_owned(),
            number: self.number.get(),
            cancel,
            total,
            done,
            for_guests: Cell::new(0),
            has_begun: Cell::new(false),
            target_cache,
            source_cache: Cell::new(None),
            memory: memory.bytes(),
            logical_sector: source.logical_sector_size(),
            state: RefCell::new(State::Starting),
        });
        self.remember(running.clone());
        let job = Job {
            source: source.clone(),
            file,
            create,
            options,
            made: directory.map(|directory| MadeFile { path: start.target.clone(), directory }),
            memory,
        };
        let (on, state) = (worker.clone(), running.clone());
        // It goes on to its end even if the client leaves, or the server stops, while it begins.
        drop(worker.spawn(async move {
            let ended = job.run(&on, &state).await;
            *state.state.borrow_mut() = match ended {
                Ok(()) => State::Completed,
                Err(error) if error.kind() == ErrorKind::Cancelled => State::Cancelled,
                Err(error) => State::Failed(error.to_string()),
            };
        }));
        while *running.state.borrow() == State::Starting {
            worker.sleep(LOOK).await;
        }
        match (running.has_begun.get(), &*running.state.borrow()) {
            (false, State::Failed(message)) => Err(message.clone()),
            _ => Ok(ways(&running)),
        }
    }

    /// How far a backup of an export is: the one of a number, or the last.
    pub(crate) fn query(&self, export: &Export, number: Option<u64>) -> Result<Value, String> {
        self.find(export, number).map(|running| describe(&running))
    }

    /// All that are remembered, with the names of their exports, in the order in which they were begun.
    pub(crate) fn list(&self) -> Vec<(String, Value)> {
        self.all.borrow().iter().map(|one| (one.export.clone(), describe(one))).collect()
    }

    /// Ends a backup of an export, the one of a number or the last, and waits until nothing of it goes on.
    pub(crate) async fn cancel(
        &self,
        worker: &Worker,
        export: &Export,
        number: Option<u64>,
    ) -> Result<Value, String> {
        let running = self.find(export, number)?;
        end(worker, &running).await;
        Ok(describe(&running))
    }

    /// Whether one of an export is under way.
    pub(crate) fn is_running(&self, export: &Export) -> bool {
        self.last(export).is_some_and(|last| !last.is_over())
    }

    /// Ends all.
    pub(crate) async fn stop(&self, worker: &Worker) {
        let all = self.all.borrow().clone();
        for running in all {
            end(worker, &running).await;
        }
    }

    fn remember(&self, running: Rc<Running>) {
        let mut all = self.all.borrow_mut();
        if all.len() >= REMEMBERED
            && let Some(oldest) = all.iter().position(|one| one.is_over())
        {
            all.remove(oldest);
        }
        all.push(running);
    }

    fn last(&self, export: &Export) -> Option<Rc<Running>> {
        self.all.borrow().iter().rev().find(|one| one.export == export.name()).cloned()
    }

    fn find(&self, export: &Export, number: Option<u64>) -> Result<Rc<Running>, String> {
        let Some(number) = number else {
            return self
                .last(export)
                .ok_or_else(|| format!("no backup of the export '{}' was begun", export.name()));
        };
        let all = self.all.borrow();
        let found = all.iter().find(|one| one.number == number && one.export == export.name()).cloned();
        found.ok_or_else(|| format!("there is no backup {number} of the export '{}'", export.name()))
    }
}

async fn end(worker: &Worker, running: &Running) {
    running.cancel.cancel();
    while !running.is_over() {
        worker.sleep(LOOK).await;
    }
}

/// A file that the server made.
struct MadeFile {
    path: PathBuf,
    directory: std::fs::File,
}

impl MadeFile {
    async fn make_name_durable(self, worker: &Worker) -> zebu_engine::Result<()> {
        let synced =
            worker.run_blocking(move || self.directory.sync_all().map_err(|error| (error, self.path))).await;
        synced.map_err(|(error, path)| {
            let message = format!("could not make the name durable: {error}");
            zebu_engine::Error::new(ErrorKind::Io, message).on(&path)
        })
    }
}

/// The directory of a file.
fn directory_of(path: &Path) -> Result<std::fs::File, String> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::File::open(directory)
        .map_err(|error| format!("could not open the directory '{}': {error}", directory.display()))
}

/// One backup, from the file of its target to what became of it.
struct Job {
    source: Image,
    file: File,
    create: CreateOptions,
    options: LiveBackupOptions,
    /// A file that was made for it, which goes if it does not begin.
    made: Option<MadeFile>,
    /// Held to its end.
    memory: Reserved,
}

impl Job {
    async fn run(self, worker: &Worker, running: &Running) -> zebu_engine::Result<()> {
        let begun = async {
            let open = OpenOptions::default().compress(
                CompressOptions::default()
                    .gather_memory(usize::try_from(self.memory.bytes() / 5).unwrap_or(usize::MAX)),
            );
            let target = UnfinishedImage::create(worker, self.file, &self.create, &open).await?;
            match LiveBackup::start(worker, &self.source, target.image(), self.options).await {
                Ok(backup) => Ok((target, backup)),
                Err(error) => {
                    let _ = target.discard(worker).await;
                    Err(error)
                }
            }
        };
        let (target, backup) = begun.await.inspect_err(|_| {
            if let Some(made) = &self.made {
                let _ = std::fs::remove_file(&made.path);
            }
        })?;
        running.source_cache.set(Some(backup.source_cache_use()));
        running.has_begun.set(true);
        *running.state.borrow_mut() = State::Running;
        let ended = match backup.run(worker).await {
            Ok(report) => {
                running.for_guests.set(report.copied_for_guests);
                match (target.finish(worker).await, self.made) {
                    (Ok(()), Some(made)) => made.make_name_durable(worker).await,
                    (finished, _) => finished,
                }
            }
            Err(error) => {
                // That this fails, too, adds nothing: the file is no image.
                let _ = target.discard(worker).await;
                Err(error)
            }
        };
        backup.end(if ended.is_ok() { BackupEnd::Complete } else { BackupEnd::GivenUp }).await;
        if ended.is_ok() {
            // Should this fail, a crash finds the bitmap as it goes on from the backup before.
            let _ = self.source.renew_bitmap_record(worker).await;
        }
        ended
    }
}

/// The backup's number, and how its data moves.
fn ways(running: &Running) -> Value {
    let mut ways = json!({
        "backup": running.number,
        "target-cache": running.target_cache.name(),
        "memory": running.memory,
        "logical-sector-size": running.logical_sector,
    });
    if let Some(source) = running.source_cache.get() {
        ways["source-cache"] = source.name().into();
    }
    ways
}

fn describe(running: &Running) -> Value {
    let (status, error) = match &*running.state.borrow() {
        State::Starting | State::Running => ("running", None),
        State::Completed => ("completed", None),
        State::Cancelled => ("cancelled", None),
        State::Failed(message) => ("failed", Some(message.clone())),
    };
    let mut described = json!({
        "status": status,
        "total": running.total,
        "done": running.done.load(Relaxed),
    });
    if let (Value::Object(described), Value::Object(ways)) = (&mut described, ways(running)) {
        described.extend(ways);
    }
    if status == "completed" {
        described["copied-for-clients"] = running.for_guests.get().into();
    }
    if let Some(error) = error {
        described["error"] = error.into();
    }
    described
}

/// The file that the client opened, or one that is made; how it is written.
fn target_file(
    path: &Path,
    descriptor: Option<OwnedFd>,
    cache: Option<TargetCache>,
) -> Result<(File, CacheUse), String> {
    let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::Write);
    let choice = match cache {
        None => CacheChoice::Past,
        Some(TargetCache::None) => CacheChoice::Direct,
        Some(TargetCache::DontCache) => CacheChoice::DontCache,
        Some(TargetCache::Writeback) => CacheChoice::Kept,
    };
    let (descriptor, made) = match descriptor {
        Some(descriptor) => (descriptor, false),
        None => (make(path)?, true),
    };
    let opened = File::from_descriptor_past_cache(descriptor, path, &flags, choice).map_err(|error| {
        if made {
            let _ = std::fs::remove_file(path);
        }
        error.to_string()
    })?;
    if opened.0.kind() == FileKind::Regular && !opened.0.is_empty() {
        return Err(format!("'{}' is no empty file: a backup needs a new one", path.display()));
    }
    Ok(opened)
}

/// Refuses a target that is a file of what is copied, which making a backup there would destroy.
fn check_target(source: &Image, path: &Path, descriptor: &OwnedFd) -> Result<(), String> {
    let opened = descriptor.try_clone().map_err(|error| format!("'{}': {error}", path.display()))?;
    let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::None);
    let target = File::from_descriptor(opened, path, &flags).map_err(|error| error.to_string())?;
    if source.files().contains(&target.id()) {
        let (target, source) = (path.display(), source.path().display());
        return Err(format!(
            "'{target}' is a file of the disk '{source}', which the backup would destroy: give another target"
        ));
    }
    Ok(())
}

fn make(path: &Path) -> Result<OwnedFd, String> {
    let made = std::fs::OpenOptions::new().read(true).write(true).create_new(true).mode(0o644).open(path);
    made.map(OwnedFd::from).map_err(|error| {
        let reason = error.raw_os_error().map_or_else(|| error.to_string(), errno_text);
        format!("could not make '{}': {reason}", path.display())
    })
}
