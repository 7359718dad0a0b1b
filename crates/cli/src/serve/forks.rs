//! Forks of exports that are served, and their resets.

use super::control_request::{AlsoForked, ForkStart};
use super::controlled::{Controlled, writable};
use super::find_export::find;
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use zebu_engine::Image;
use zebu_engine::jobs::{ForkDisk, fork as fork_disks, reset as reset_disk};
use zebu_engine::storage::{Access, CacheChoice, File, FileKind, LockMode, OpenFlags, Worker};
use zebu_export::Export;

/// Forks the disks, at one moment.
pub(super) async fn fork(
    worker: &Worker,
    controlled: &Controlled<'_>,
    start: &ForkStart,
    descriptors: Vec<OwnedFd>,
) -> Result<Value, String> {
    let first = AlsoForked { export: start.export.clone(), to: start.to.clone() };
    let wanted: Vec<&AlsoForked> = std::iter::once(&first).chain(&start.also).collect();
    if descriptors.len() != wanted.len() {
        return Err(format!(
            "a fork needs the descriptor of a new file for each disk with the request, as `zebu ctl` sends them: {} disks, {} \
             descriptors",
            wanted.len(),
            descriptors.len()
        ));
    }
    let exports = wanted.iter().map(|disk| find(&controlled.exports, &disk.export));
    let exports: Vec<Arc<Export>> = exports.collect::<Result<_, _>>()?;
    for (at, export) in exports.iter().enumerate() {
        if exports[..at].iter().any(|other| other.name() == export.name()) {
            return Err(format!("the export '{}' is named twice", export.name()));
        }
    }
    let _forking = controlled.forking.lock().await;
    let mut turns = Vec::new();
    let mut in_order: Vec<&str> = exports.iter().map(|export| export.name()).collect();
    in_order.sort_unstable();
    for name in in_order {
        turns.push(controlled.turn_to_resize(name));
    }
    let mut alone = Vec::new();
    for turn in turns.iter().map(Rc::as_ref) {
        alone.push(turn.lock().await);
    }
    let mut disks = Vec::new();
    for ((export, disk), descriptor) in exports.iter().zip(&wanted).zip(descriptors) {
        let image = writable(export)?;
        refuse_jobs(controlled, export)?;
        let overlay = overlay_file(&image, &disk.to, descriptor)?;
        let options = controlled.served.images.options(export.name());
        disks.push(ForkDisk::new(&image, overlay, &disk.to, &options));
    }
    match fork_disks(worker, disks).await {
        Ok(report) => {
            let disks = exports.iter().zip(&wanted).map(
                |(export, disk)| json!({ "export": export.name(), "overlay": disk.to.to_string_lossy() }),
            );
            Ok(json!({ "disks": disks.collect::<Vec<_>>(), "gap-us": report.gap.as_micros() as u64 }))
        }
        Err(failed) if failed.named.is_empty() => Err(failed.to_string()),
        Err(failed) => {
            let named = failed.named.iter().map(|overlay| overlay.to_string_lossy());
            Ok(json!({ "failed": failed.to_string(), "named": named.collect::<Vec<_>>() }))
        }
    }
}

/// Refuses a disk on which a job is under way.
fn refuse_jobs(controlled: &Controlled<'_>, export: &Export) -> Result<(), String> {
    let job = if controlled.backups.is_running(export) {
        "a backup"
    } else if controlled.hydrations.is_running(export) {
        "a hydration"
    } else {
        return Ok(());
    };
    Err(format!("{job} of the export '{}' is under way: wait for its end, or cancel it", export.name()))
}

/// The file that the client has made. Its pages are kept as those of the image are.
fn overlay_file(image: &Image, to: &Path, descriptor: OwnedFd) -> Result<File, String> {
    let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::Write);
    let is_direct = image.data_file_at(0).is_some_and(File::is_direct);
    let opened = if is_direct {
        File::from_descriptor_past_cache(descriptor, to, &flags, CacheChoice::Direct).map(|(file, _)| file)
    } else {
        File::from_descriptor(descriptor, to, &flags)
    };
    let file = opened.map_err(|error| error.to_string())?;
    if file.kind() != FileKind::Regular || !file.is_empty() {
        return Err(format!("'{}' is no empty file: a fork needs a new one", to.display()));
    }
    Ok(file)
}

/// Throws away what an overlay holds.
pub(super) async fn reset(
    worker: &Worker,
    controlled: &Controlled<'_>,
    name: &str,
    force: bool,
) -> Result<Value, String> {
    let export = find(&controlled.exports, name)?;
    let _forking = controlled.forking.lock().await;
    let image = writable(&export)?;
    refuse_jobs(controlled, &export)?;
    let clients = export.metrics().clients();
    if clients > 0 && !force {
        return Err(format!(
            "the export '{}' is in use by {clients} clients, whose disk would change: let them leave first \
             (--force resets it all the same)",
            export.name()
        ));
    }
    reset_disk(worker, &image).await.map(|()| json!({})).map_err(|error| error.to_string())
}
