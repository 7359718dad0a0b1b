//! The control socket: a request per line, an answer per line, both JSON (docs/guide/serving.md).

use super::accept::{ConnectionSlot, Reader, send, within};
use super::checkpoints;
use super::come_and_go::{Clients, Turn};
use super::control_request::{Command, Request, VERSION};
use super::controlled::{Controlled, writable};
use super::find_export::{find, find_named};
use super::forks;
use super::limit_change::LimitChange;
use super::limits;
use crate::output::info_json;
use serde_json::{Map, Value, json};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use zebu_engine::jobs::BackupEnd;
use zebu_engine::storage::{File, FileKind, LockMode, OpenFlags};
use zebu_engine::{Access, Image, NewBitmap, NewSnapshot, Preallocation, Shrink, SnapshotRef};
use zebu_export::metrics::{KindTotals, RequestKind};
use zebu_export::{Export, Exports};
use zebu_storage::{LongWait, Socket, Worker};

/// Bytes of a request.
const MAX_LINE: usize = 64 << 10;
/// How long a connection may take to send a line, or to take the answer: it has one of few places.
const PATIENCE: Duration = Duration::from_secs(60);

/// Answers requests until the other side leaves.
pub(crate) async fn converse(
    worker: &Worker,
    socket: Socket,
    slot: Rc<ConnectionSlot>,
    controlled: &Controlled<'_>,
) {
    // A connection that breaks has nobody to be told.
    let _ = answer_all(worker, &socket, &slot, controlled).await;
}

async fn answer_all(
    worker: &Worker,
    socket: &Socket,
    slot: &ConnectionSlot,
    controlled: &Controlled<'_>,
) -> io::Result<()> {
    let mut reader = Reader::with_descriptors(MAX_LINE);
    while let Some(line) = within(worker, PATIENCE, reader.until(worker, socket, b"\n")).await? {
        if line.iter().all(u8::is_ascii_whitespace) {
            // It has said nothing, and its time goes on.
            continue;
        }
        let descriptors = reader.take_descriptors();
        slot.works();
        let mut answer = answer(worker, controlled, &line, descriptors).await.to_string();
        answer.push('\n');
        slot.waits();
        within(worker, PATIENCE, send(worker, socket, answer.as_bytes())).await?;
    }
    Ok(())
}

async fn answer(
    worker: &Worker,
    controlled: &Controlled<'_>,
    line: &[u8],
    descriptors: Vec<OwnedFd>,
) -> Value {
    let (id, result) = match Request::parse(line) {
        Ok(request) => (request.id, execute(worker, controlled, request.command, descriptors).await),
        Err(refusal) => (refusal.id, Err(refusal.message)),
    };
    let mut answer = match result {
        Ok(result) => json!({ "result": result }),
        Err(message) => json!({ "error": { "message": message } }),
    };
    if let Some(id) = id {
        answer["id"] = id;
    }
    answer
}

async fn execute(
    worker: &Worker,
    controlled: &Controlled<'_>,
    command: Command,
    mut descriptors: Vec<OwnedFd>,
) -> Result<Value, String> {
    let Controlled { served, disks, exports, backups, checkpoints, listens, hydrations, memory, .. } =
        controlled;
    match command {
        Command::Version => {
            Ok(json!({ "version": env!("CARGO_PKG_VERSION"), "control": VERSION, "nbd": listens }))
        }
        Command::Stats { export: None } => {
            let mut all = json!({ "exports": exports.iter().map(|e| stats(&e)).collect::<Vec<_>>() });
            let cache = disks.remote.cache.counters();
            if !cache.is_null() {
                all["remote-cache"] = cache;
            }
            let verified = disks.verified.counters();
            if !verified.is_empty() {
                all["verified"] = verified.into();
            }
            let running = checkpoints.running();
            if !running.is_empty() {
                let told = |(name, report)| json!({ "name": name, "spill": checkpoints::spill(&report) });
                all["checkpoints"] = running.into_iter().map(told).collect();
            }
            Ok(all)
        }
        Command::Stats { export: Some(name) } => Ok(stats(&*find(exports, &name)?)),
        Command::Resize { export, size } => {
            let export = find(exports, &export)?;
            let alone = controlled.turn_to_resize(export.name());
            let _alone = alone.lock().await;
            resize(worker, &export, size).await
        }
        Command::Grow { export, by } => {
            let export = find(exports, &export)?;
            // The size that it grows from is that at which the ones before have left it.
            let alone = controlled.turn_to_resize(export.name());
            let _alone = alone.lock().await;
            let size = export.image().virtual_size().checked_add(by);
            resize(worker, &export, size.ok_or("the new size is too large")?).await
        }
        Command::CacheSize { export, size } => {
            let export = find(exports, &export)?;
            let image = export.image();
            image.set_cache_size(size).map_err(|error| error.to_string())?;
            Ok(json!({}))
        }
        Command::Flush { export } => {
            let export = find(exports, &export)?;
            export.flush(worker).await.map_err(|error| error.to_string())?;
            Ok(json!({}))
        }
        Command::SnapshotCreate { export, name: None, to: Some(to) } => {
            let descriptor = descriptors
                .pop()
                .ok_or("a snapshot in a file needs the descriptor of a new file with the request, as `zebu ctl` sends it")?;
            file_snapshot(worker, &find(exports, &export)?.image(), descriptor, &to).await
        }
        Command::SnapshotCreate { name, to, .. } if name.is_some() == to.is_some() => {
            Err("a snapshot has either a name or a file that it goes to".into())
        }
        Command::SnapshotCreate { export, name, .. } => {
            let name = name.unwrap_or_default();
            let export = find(exports, &export)?;
            let image = writable(&export)?;
            let taken = image.create_snapshot(worker, NewSnapshot::named(name)).await;
            let taken = taken.map_err(|error| error.to_string())?;
            Ok(json!({ "id": taken.id, "name": taken.name }))
        }
        Command::SnapshotList { export } => {
            let snapshots = find(exports, &export)?.image().snapshots();
            Ok(json!({ "snapshots": info_json::snapshot_list(&snapshots) }))
        }
        Command::SnapshotDelete { export, name } => {
            let export = find(exports, &export)?;
            let image = writable(&export)?;
            image
                .delete_snapshot(worker, &SnapshotRef::Name(name))
                .await
                .map_err(|error| error.to_string())?;
            Ok(json!({}))
        }
        Command::BackupStart(start) => {
            backups.start(worker, &*find(exports, &start.export)?, &start, descriptors.pop(), memory).await
        }
        Command::BackupQuery { export, backup } => backups.query(&*find(exports, &export)?, backup),
        Command::BackupCancel { export, backup } => {
            backups.cancel(worker, &*find(exports, &export)?, backup).await
        }
        Command::Hydrate(start) => {
            // The image that a fork is about to leave must not be filled.
            let _forking = controlled.forking.lock().await;
            hydrations.start(worker, &*find(exports, &start.export)?, &start)
        }
        Command::HydrateQuery { export } => hydrations.query(&*find(exports, &export)?),
        Command::HydrateCancel { export } => hydrations.cancel(worker, &*find(exports, &export)?).await,
        Command::Limit { export, group, set } => limit(controlled, export, group, set),
        Command::ExportAdd(request) => {
            let turn = Turn::wait(worker, &served.is_changing).await;
            served.add(worker, &request, descriptors.pop(), &turn).await
        }
        Command::ExportRemove { export, force } => {
            let _turn = Turn::wait(worker, &served.is_changing).await;
            let export = find_named(exports, &export)?;
            let clients = if force { Clients::Disconnected } else { Clients::Kept };
            served.remove(worker, export, clients, controlled.jobs()).await.map(|()| json!({}))
        }
        Command::Jobs => Ok(controlled.jobs().list()),
        Command::Cancel { export } => controlled.jobs().cancel(worker, &*the_export(exports, export)?).await,
        Command::Checkpoint(_) if listens.is_empty() => Err(
            "nothing listens for NBD clients, so nobody could pull a checkpoint: start the server with --nbd"
                .into(),
        ),
        Command::Checkpoint(start) => {
            checkpoints.start(worker, exports, start, descriptors.pop(), memory).await
        }
        Command::CheckpointQuery { name: None } => Ok(checkpoints.list()),
        Command::CheckpointQuery { name: Some(name) } => checkpoints.query(&name),
        Command::CheckpointEnd { name, failed } => {
            let outcome = if failed { BackupEnd::GivenUp } else { BackupEnd::Complete };
            checkpoints.end(exports, &name, outcome).await
        }
        Command::Fork(start) => forks::fork(worker, controlled, &start, descriptors).await,
        Command::Reset { export, force } => forks::reset(worker, controlled, &export, force).await,
        Command::Bitmaps { export } => bitmaps(worker, &find(exports, &export)?.image()).await,
        Command::BitmapAdd { export, name, granularity } => {
            let new = NewBitmap::named(name).granularity(granularity);
            let added = find(exports, &export)?.image().add_bitmap(worker, &new).await;
            added.map(|()| json!({})).map_err(|error| error.to_string())
        }
        Command::BitmapRemove { export, name } => {
            let removed = find(exports, &export)?.image().remove_bitmap(worker, &name).await;
            removed.map(|()| json!({})).map_err(|error| error.to_string())
        }
        Command::BitmapClear { export, name } => {
            let cleared = find(exports, &export)?.image().clear_bitmap(worker, &name).await;
            cleared.map(|()| json!({})).map_err(|error| error.to_string())
        }
    }
}

/// Shares the blocks of an image with a file that the client has made.
async fn file_snapshot(
    worker: &Worker,
    image: &Image,
    descriptor: OwnedFd,
    to: &Path,
) -> Result<Value, String> {
    let flags = OpenFlags::default().access(zebu_engine::storage::Access::ReadWrite).lock(LockMode::Write);
    let copy = File::from_descriptor(descriptor, to, &flags).map_err(|error| error.to_string())?;
    if copy.kind() != FileKind::Regular || !copy.is_empty() {
        return Err(format!("'{}' is no empty file: a snapshot needs a new one", to.display()));
    }
    let taken = zebu_engine::jobs::file_snapshot(worker, image, copy, to).await;
    taken.map(|()| json!({})).map_err(|error| error.to_string())
}

/// The bitmaps of an image, with what is dirty in those that can be used.
async fn bitmaps(worker: &Worker, image: &Image) -> Result<Value, String> {
    let mut list = Vec::new();
    for info in image.bitmaps() {
        let mut bitmap = json!({
            "name": info.name,
            "granularity": info.granularity,
            "recording": info.auto,
            "inconsistent": info.in_use,
        });
        if let Some(granularity) = info.recovered {
            bitmap["recovered-granularity"] = granularity.into();
        }
        if let Some(base) = info.base {
            bitmap["base"] = base.to_string().into();
        }
        if info.lent {
            bitmap["in-backup"] = true.into();
        } else if !info.in_use {
            let bits = image.bitmap_bits(worker, &info.name).await.map_err(|error| error.to_string())?;
            bitmap["dirty-bytes"] = bits.dirty_bytes().into();
        }
        list.push(bitmap);
    }
    Ok(json!({ "bitmaps": list }))
}

/// The export of a name, or the only one if none is given.
fn the_export(exports: &Exports, name: Option<String>) -> Result<Arc<Export>, String> {
    match (name, exports.len()) {
        (Some(name), _) => find(exports, &name),
        (None, 1) => exports.iter().next().ok_or_else(|| "there is no export".to_owned()),
        (None, number) => Err(format!("there are {number} exports: say which")),
    }
}

/// Tells of limits, or changes them.
fn limit(
    controlled: &Controlled<'_>,
    export: Option<String>,
    group: Option<String>,
    set: Option<Map<String, Value>>,
) -> Result<Value, String> {
    let (exports, groups) = (&controlled.exports, &controlled.served.groups);
    let change = set.map(|set| LimitChange::of_object(&set)).transpose()?;
    match (group, export, change) {
        (Some(_), Some(_), _) => {
            Err("limits are those of an export or of a group: give one of them".to_owned())
        }
        (Some(name), None, change) => {
            if let Some(change) = &change {
                limits::change_group(groups, &name, change)?;
            }
            match groups.find(&name) {
                Ok(group) => Ok(limits::of_group(&group, exports)),
                // It went with its last limit.
                Err(_) if change.is_some() => {
                    Ok(json!({ "group": name, "limits": {}, "exports": [], "waiting": 0 }))
                }
                Err(why) => Err(why),
            }
        }
        (None, None, None) => Ok(limits::of_all(groups, exports)),
        (None, export, change) => {
            let export = the_export(exports, export)?;
            if let Some(change) = &change {
                limits::change_export(groups, &export, change)?;
            }
            Ok(limits::of_export(&export))
        }
    }
}

async fn resize(worker: &Worker, export: &Export, size: u64) -> Result<Value, String> {
    let image = writable(export)?;
    if size < image.virtual_size() {
        let now = image.virtual_size();
        return Err(format!("a disk in use can't become smaller: it has {now} bytes, {size} are asked for"));
    }
    image
        .resize(worker, size, Shrink::Refuse, Preallocation::Off)
        .await
        .map_err(|error| error.to_string())?;
    export.announce_size();
    Ok(json!({ "virtual-size": image.virtual_size() }))
}

fn stats(export: &Export) -> Value {
    let image = export.image();
    let counters = image.stats();
    let mut requests = json!({});
    for kind in RequestKind::ALL {
        requests[kind.name().replace('_', "-")] = kind_stats(&export.metrics().totals(kind));
    }
    json!({
        "name": export.name(),
        "filename": image.path().to_string_lossy(),
        "virtual-size": image.virtual_size(),
        "read-only": export.access() == Access::ReadOnly,
        "encrypted": image.is_chain_encrypted(),
        "clients": export.metrics().clients(),
        "in-flight": export.metrics().in_flight(),
        "limit": limits::of_export(export),
        "waits": image.long_waits().iter().map(wait).collect::<Vec<_>>(),
        "failed-copies-on-read": export.failed_copies(),
        "requests": requests,
        "image": {
            "cache-hits": counters.cache_hits,
            "cache-misses": counters.cache_misses,
            "cache-loads": counters.cache_loads,
            "cache-read-ahead": counters.cache_read_ahead,
            "cache-evictions": counters.cache_evictions,
            "cache-bytes": counters.cache_bytes,
            "cache-limit": counters.cache_limit,
            "cache-miscounts": counters.cache_miscounts,
            "table-bytes": counters.table_bytes,
            "index-hits": counters.index_hits,
            "index-bytes": counters.index_bytes,
            "commits": counters.commits,
            "clusters-allocated": counters.clusters_allocated,
            "clusters-freed": counters.clusters_freed,
            "clusters-released": counters.clusters_released,
        },
    })
}

fn wait(wait: &LongWait) -> Value {
    json!({
        "for": wait.what,
        "file": wait.file.to_string_lossy(),
        "worker": wait.worker,
        "seconds": wait.took.as_secs(),
    })
}

fn kind_stats(totals: &KindTotals) -> Value {
    let mean = totals.nanoseconds.checked_div(totals.requests).unwrap_or(0);
    json!({
        "requests": totals.requests,
        "bytes": totals.bytes,
        "errors": totals.errors,
        "latency-mean-ns": mean,
        "latency-p99-us": percentile(totals, 99),
    })
}

/// A bound, in microseconds, that so many of a hundred requests kept to.
fn percentile(totals: &KindTotals, percent: u64) -> u64 {
    let wanted = (totals.requests * percent).div_ceil(100);
    let mut sum = 0;
    for (index, count) in totals.buckets.iter().enumerate() {
        sum += count;
        if sum >= wanted {
            return if sum == 0 { 0 } else { 1 << index };
        }
    }
    0
}
