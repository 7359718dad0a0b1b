//! Backups of exports that are served: the disk as it was when the backup began, while clients write.

use super::control_request::{BackupStart, CompressionName, OnError};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use zebu::jobs::{
    Cancel, Copied, JobControl, LiveBackup, LiveBackupOptions, LiveBitmap, OnCopyError, Outcome,
    TargetClusters, UnfinishedImage,
};
use zebu::storage::{Access, Create, File, LockMode, OpenFlags, Worker};
use zebu::{Compression, CreateOptions, ErrorKind, Format, Image, OpenOptions};
use zebu_export::Export;

/// How often it is looked whether a cancelled backup has ended.
const LOOK: Duration = Duration::from_millis(5);

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
    cancel: Cancel,
    total: u64,
    done: Arc<AtomicU64>,
    for_guests: Cell<u64>,
    /// It holds the disk as it is to be.
    has_begun: Cell<bool>,
    state: RefCell<State>,
}

impl Running {
    fn is_over(&self) -> bool {
        !matches!(*self.state.borrow(), State::Starting | State::Running)
    }
}

/// The last backup of each export, by name. All of it belongs to one thread.
#[derive(Default)]
pub(crate) struct Backups(RefCell<BTreeMap<String, Rc<Running>>>);

impl Backups {
    /// Begins a backup: it holds the disk as it is before this returns.
    pub(crate) async fn start(
        &self,
        worker: &Worker,
        export: &Export,
        start: &BackupStart,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), String> {
        if self.0.borrow().get(export.name()).is_some_and(|last| !last.is_over()) {
            return Err(format!("a backup of the export '{}' is under way", export.name()));
        }
        let bitmap = start.bitmap.clone().map(|name| LiveBitmap {
            name,
            copied: if start.previous.is_some() { Copied::Marked } else { Copied::All },
        });
        if bitmap.is_none() && start.previous.is_some() {
            return Err(
                "an increment needs a bitmap: it tells what has changed since the previous backup".into()
            );
        }
        let was_made = descriptor.is_none();
        let file = target_file(&start.target, descriptor)?;
        let cancel = Cancel::new();
        let done = Arc::new(AtomicU64::new(0));
        let source = export.image();
        let total = source.virtual_size();
        let create = CreateOptions {
            size: Some(total),
            cluster_size: start.cluster_size.unwrap_or_else(|| source.cluster_size().max(64 << 10)),
            backing: start.previous.clone().map(|name| (name, Format::Qcow2)),
            compression: match start.compression {
                Some(CompressionName::Zstd) => Compression::Zstd,
                _ => Compression::Zlib,
            },
            ..CreateOptions::default()
        };
        let shared = done.clone();
        let options = LiveBackupOptions {
            clusters: match start.compression {
                Some(_) => TargetClusters::Compressed,
                None => TargetClusters::Plain,
            },
            on_copy_error: match start.on_error {
                OnError::Backup => OnCopyError::FailBackup,
                OnError::Request => OnCopyError::FailRequest,
            },
            bitmap,
            control: JobControl {
                cancel: cancel.clone(),
                progress: Some(Arc::new(move |progress| shared.store(progress.done, Relaxed))),
                rate_limit: start.rate_limit,
            },
            ..LiveBackupOptions::default()
        };
        // Noted at once: nobody else begins one while the target is made.
        let running = Rc::new(Running {
            cancel,
            total,
            done,
            for_guests: Cell::new(0),
            has_begun: Cell::new(false),
            state: RefCell::new(State::Starting),
        });
        self.0.borrow_mut().insert(export.name().to_owned(), running.clone());
        let job = Job {
            source: source.clone(),
            file,
            create,
            options,
            made: was_made.then(|| start.target.clone()),
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
            _ => Ok(()),
        }
    }

    /// How far the last backup of an export is.
    pub(crate) fn query(&self, export: &Export) -> Result<Value, String> {
        self.find(export).map(|running| describe(&running))
    }

    /// Ends the backup of an export, and waits until nothing of it goes on.
    pub(crate) async fn cancel(&self, worker: &Worker, export: &Export) -> Result<Value, String> {
        let running = self.find(export)?;
        end(worker, &running).await;
        Ok(describe(&running))
    }

    /// Ends all.
    pub(crate) async fn stop(&self, worker: &Worker) {
        let all: Vec<_> = self.0.borrow().values().cloned().collect();
        for running in all {
            end(worker, &running).await;
        }
    }

    fn find(&self, export: &Export) -> Result<Rc<Running>, String> {
        let backups = self.0.borrow();
        let found = backups.get(export.name()).cloned();
        found.ok_or_else(|| format!("no backup of the export '{}' was begun", export.name()))
    }
}

async fn end(worker: &Worker, running: &Running) {
    running.cancel.cancel();
    while !running.is_over() {
        worker.sleep(LOOK).await;
    }
}

/// One backup, from the file of its target to what became of it.
struct Job {
    source: Image,
    file: File,
    create: CreateOptions,
    options: LiveBackupOptions,
    /// A file that was made for it, which goes if it does not begin.
    made: Option<PathBuf>,
}

impl Job {
    async fn run(self, worker: &Worker, running: &Running) -> zebu::Result<()> {
        let begun = async {
            let target =
                UnfinishedImage::create(worker, self.file, &self.create, &OpenOptions::default()).await?;
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
                let _ = std::fs::remove_file(made);
            }
        })?;
        running.has_begun.set(true);
        *running.state.borrow_mut() = State::Running;
        let ended = match backup.run(worker).await {
            Ok(report) => {
                running.for_guests.set(report.copied_for_guests);
                target.finish(worker).await
            }
            Err(error) => {
                // That this fails, too, adds nothing: the file is no image.
                let _ = target.discard(worker).await;
                Err(error)
            }
        };
        backup.end(if ended.is_ok() { Outcome::Complete } else { Outcome::GivenUp }).await;
        ended
    }
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
    if status == "completed" {
        described["copied-for-clients"] = running.for_guests.get().into();
    }
    if let Some(error) = error {
        described["error"] = error.into();
    }
    described
}

/// The file that the client opened, or one that is made.
fn target_file(path: &Path, descriptor: Option<OwnedFd>) -> Result<File, String> {
    let flags = OpenFlags {
        access: Access::ReadWrite,
        create: Create::Truncate,
        lock: LockMode::Write,
        ..OpenFlags::default()
    };
    match descriptor {
        Some(descriptor) => File::from_descriptor(descriptor, path, &flags),
        None => File::open(path, &OpenFlags { create: Create::New, ..flags }),
    }
    .map_err(|error| error.to_string())
}
