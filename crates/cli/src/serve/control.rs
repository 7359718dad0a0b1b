//! The control socket: a request per line, an answer per line, both JSON (docs/control.md).

use super::accept::{Reader, send};
use super::backups::{BackupStart, Backups};
use crate::output::info_json;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use zebu::storage::{Socket, Worker};
use zebu::{Access, Image, NewBitmap, NewSnapshot, Preallocation, Shrink, SnapshotRef};
use zebu_export::metrics::{KindTotals, RequestKind};
use zebu_export::{Export, Exports};

/// Bytes of a request.
const MAX_LINE: usize = 64 << 10;

/// A request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Given back with the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<Value>,
    #[serde(flatten)]
    pub(crate) command: Command,
}

/// What can be asked for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub(crate) enum Command {
    /// Counters.
    Stats {
        /// Of one export; of all if it is not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        export: Option<String>,
    },
    /// Makes a disk larger.
    Resize {
        /// The export.
        export: String,
        /// Bytes.
        size: u64,
    },
    /// Changes the memory of the mapping cache, for the whole chain.
    CacheSize {
        /// The export.
        export: String,
        /// Bytes.
        size: u64,
    },
    /// Makes what was written durable.
    Flush {
        /// The export.
        export: String,
    },
    /// Takes an internal snapshot.
    SnapshotCreate {
        /// The export.
        export: String,
        /// Its name.
        name: String,
    },
    /// Lists the internal snapshots.
    SnapshotList {
        /// The export.
        export: String,
    },
    /// Deletes an internal snapshot.
    SnapshotDelete {
        /// The export.
        export: String,
        /// Its name.
        name: String,
    },
    /// Begins to copy the disk as it is now into a new image, in the file whose descriptor comes with the request.
    BackupStart(BackupStart),
    /// How far a backup is.
    BackupQuery {
        /// The export.
        export: String,
    },
    /// Ends a backup; what there is of the target is given up.
    BackupCancel {
        /// The export.
        export: String,
    },
    /// Tells of the persistent dirty bitmaps.
    Bitmaps {
        /// The export.
        export: String,
    },
    /// Adds a bitmap that records writes from now on.
    BitmapAdd {
        /// The export.
        export: String,
        /// Its name.
        name: String,
        /// Bytes that a bit stands for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        granularity: Option<u64>,
    },
    /// Removes a bitmap.
    BitmapRemove {
        /// The export.
        export: String,
        /// Its name.
        name: String,
    },
    /// Clears a bitmap.
    BitmapClear {
        /// The export.
        export: String,
        /// Its name.
        name: String,
    },
}

/// What requests are about.
pub(crate) struct Controlled {
    pub(crate) exports: Exports,
    pub(crate) backups: Backups,
}

/// Answers requests until the other side leaves.
pub(crate) async fn converse(worker: &Worker, socket: Socket, controlled: &Controlled) {
    // A connection that breaks has nobody to be told.
    let _ = answer_all(worker, &socket, controlled).await;
}

async fn answer_all(worker: &Worker, socket: &Socket, controlled: &Controlled) -> io::Result<()> {
    let mut reader = Reader::with_descriptors(MAX_LINE);
    while let Some(line) = reader.until(worker, socket, b"\n").await? {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let descriptor = reader.take_descriptor();
        let mut answer = answer(worker, controlled, &line, descriptor).await.to_string();
        answer.push('\n');
        send(worker, socket, answer.as_bytes()).await?;
    }
    Ok(())
}

async fn answer(worker: &Worker, controlled: &Controlled, line: &[u8], descriptor: Option<OwnedFd>) -> Value {
    let (id, result) = match serde_json::from_slice::<Request>(line) {
        Ok(request) => (request.id, execute(worker, controlled, request.command, descriptor).await),
        Err(error) => (None, Err(format!("not a request: {error}"))),
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
    Controlled { exports, backups }: &Controlled,
    command: Command,
    descriptor: Option<OwnedFd>,
) -> Result<Value, String> {
    match command {
        Command::Stats { export: None } => {
            Ok(json!({ "exports": exports.iter().map(|e| stats(e)).collect::<Vec<_>>() }))
        }
        Command::Stats { export: Some(name) } => Ok(stats(find(exports, &name)?)),
        Command::Resize { export, size } => resize(worker, find(exports, &export)?, size).await,
        Command::CacheSize { export, size } => {
            let image = find(exports, &export)?.image();
            image.set_cache_size(size).map_err(|error| error.to_string())?;
            Ok(json!({}))
        }
        Command::Flush { export } => {
            let export = find(exports, &export)?;
            export.image().flush(worker).await.map_err(|error| error.to_string())?;
            Ok(json!({}))
        }
        Command::SnapshotCreate { export, name } => {
            let image = writable(find(exports, &export)?)?;
            let taken = image.create_snapshot(worker, NewSnapshot::named(name)).await;
            let taken = taken.map_err(|error| error.to_string())?;
            Ok(json!({ "id": taken.id, "name": taken.name }))
        }
        Command::SnapshotList { export } => {
            let snapshots = find(exports, &export)?.image().snapshots();
            Ok(json!({ "snapshots": info_json::snapshot_list(&snapshots) }))
        }
        Command::SnapshotDelete { export, name } => {
            let image = writable(find(exports, &export)?)?;
            image
                .delete_snapshot(worker, &SnapshotRef::Name(name))
                .await
                .map_err(|error| error.to_string())?;
            Ok(json!({}))
        }
        Command::BackupStart(start) => {
            backups.start(worker, find(exports, &start.export)?, &start, descriptor).await?;
            Ok(json!({}))
        }
        Command::BackupQuery { export } => backups.query(find(exports, &export)?),
        Command::BackupCancel { export } => backups.cancel(worker, find(exports, &export)?).await,
        Command::Bitmaps { export } => bitmaps(worker, find(exports, &export)?.image()).await,
        Command::BitmapAdd { export, name, granularity } => {
            let new = NewBitmap { granularity, ..NewBitmap::named(name) };
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

fn writable(export: &Export) -> Result<&Image, String> {
    match export.access() {
        Access::ReadWrite => Ok(export.image()),
        Access::ReadOnly => Err(format!("the export '{}' is read-only", export.name())),
    }
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
        if !info.in_use {
            let bits = image.bitmap_bits(worker, &info.name).await.map_err(|error| error.to_string())?;
            bitmap["dirty-bytes"] = bits.dirty_bytes().into();
        }
        list.push(bitmap);
    }
    Ok(json!({ "bitmaps": list }))
}

fn find<'a>(exports: &'a Exports, name: &str) -> Result<&'a Arc<Export>, String> {
    exports.find(name).ok_or_else(|| format!("there is no export '{name}'"))
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
        "clients": export.metrics().clients(),
        "in-flight": export.metrics().in_flight(),
        "requests": requests,
        "image": {
            "cache-hits": counters.cache_hits,
            "cache-misses": counters.cache_misses,
            "cache-loads": counters.cache_loads,
            "cache-evictions": counters.cache_evictions,
            "cache-bytes": counters.cache_bytes,
            "commits": counters.commits,
            "clusters-allocated": counters.clusters_allocated,
            "clusters-freed": counters.clusters_freed,
            "clusters-released": counters.clusters_released,
        },
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_strict() {
        let parse = |text: &str| {
            serde_json::from_str::<Request>(text).map(|request| format!("{:?}", request.command))
        };
        assert_eq!(parse(r#"{"command":"stats"}"#).unwrap(), "Stats { export: None }");
        assert_eq!(
            parse(r#"{"id":7,"command":"resize","export":"a","size":512}"#).unwrap(),
            r#"Resize { export: "a", size: 512 }"#
        );
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"command":"nosuch"}"#,
            r#"{"command":"resize","export":"a"}"#,
            r#"{"command":"resize","export":"a","size":-1}"#,
            r#"{"command":"resize","export":"a","size":"1G"}"#,
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
