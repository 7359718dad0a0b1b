//! Backups of exports that are served: the disk as it was when the backup began, while clients write.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use zebu::jobs::{Cancel, JobControl, LiveBackup, LiveBackupOptions, TargetClusters, UnfinishedImage};
use zebu::storage::{Access, Create, File, LockMode, OpenFlags, Worker};
use zebu::{Compression, CreateOptions, ErrorKind, OnCopyError, OpenOptions};
use zebu_export::Export;

/// How often it is looked whether a cancelled backup has ended.
const LOOK: Duration = Duration::from_millis(5);

/// What a backup is asked to be.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct BackupStart {
    /// The export.
    pub(crate) export: String,
    /// What the target is called in messages; without a descriptor, the path of a file to be made.
    pub(crate) target: PathBuf,
    /// `zlib` or `zstd`: clusters are compressed; plain ones if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) compression: Option<CompressionName>,
    /// Bytes of a cluster of the target; as in the image that is exported if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cluster_size: Option<u64>,
    /// What fails when something can't be copied that a client is about to change.
    #[serde(default)]
    pub(crate) on_error: OnError,
    /// Bytes a second at most; what clients are about to change is copied at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_limit: Option<NonZeroU64>,
}

/// How clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CompressionName {
    /// Deflate.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// What fails when something can't be copied that a client is about to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnError {
    /// The backup; clients do not notice.
    #[default]
    Backup,
    /// The client's request; the backup goes on.
    Request,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
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
    state: RefCell<State>,
}

impl Running {
    fn is_over(&self) -> bool {
        *self.state.borrow() != State::Running
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
        let was_made = descriptor.is_none();
        let file = target_file(&start.target, descriptor)?;
        let cancel = Cancel::new();
        let done = Arc::new(AtomicU64::new(0));
        let source = export.image();
        let total = source.virtual_size();
        let create = CreateOptions {
            size: Some(total),
            cluster_size: start.cluster_size.unwrap_or_else(|| source.cluster_size().max(64 << 10)),
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
            state: RefCell::new(State::Running),
        });
        self.0.borrow_mut().insert(export.name().to_owned(), running.clone());
        let begun = async {
            let target = UnfinishedImage::create(worker, file, &create, &OpenOptions::default()).await?;
            match LiveBackup::start(source, target.image(), options).await {
                Ok(backup) => Ok((target, backup)),
                Err(error) => {
                    let _ = target.discard(worker).await;
                    Err(error)
                }
            }
        };
        let (target, backup) = match begun.await {
            Ok(begun) => begun,
            Err(error) => {
                if was_made {
                    let _ = std::fs::remove_file(&start.target);
                }
                *running.state.borrow_mut() = State::Failed(error.to_string());
                return Err(error.to_string());
            }
        };
        let on = worker.clone();
        drop(worker.spawn(async move {
            let ended = finish(&on, target, backup, &running).await;
            *running.state.borrow_mut() = match ended {
                Ok(()) => State::Completed,
                Err(error) if error.kind() == ErrorKind::Cancelled => State::Cancelled,
                Err(error) => State::Failed(error.to_string()),
            };
        }));
        Ok(())
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

async fn finish(
    worker: &Worker,
    target: UnfinishedImage,
    backup: LiveBackup,
    running: &Running,
) -> zebu::Result<()> {
    match backup.run(worker).await {
        Ok(report) => {
            running.for_guests.set(report.copied_for_guests);
            target.finish(worker).await
        }
        Err(error) => {
            // That this fails, too, adds nothing: the file is no image.
            let _ = target.discard(worker).await;
            Err(error)
        }
    }
}

fn describe(running: &Running) -> Value {
    let (status, error) = match &*running.state.borrow() {
        State::Running => ("running", None),
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
