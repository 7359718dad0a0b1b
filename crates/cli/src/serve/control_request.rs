//! Requests: lines of the control socket (docs/guide/serving.md).

use crate::values::SpeedName;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// The version of the commands: it rises when a program that knows an earlier one would misunderstand an answer.
pub(crate) const VERSION: u32 = 1;

/// A request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Given back with the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<Value>,
    #[serde(flatten)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub(crate) enum Command {
    /// The versions of the program and of these commands.
    Version,
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
    /// Makes a disk larger by so much, whatever others do meanwhile.
    Grow {
        /// The export.
        export: String,
        /// Bytes.
        by: u64,
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
    /// Takes a snapshot: one within the image by `name`, or a file that shares its blocks by `to`.
    SnapshotCreate {
        /// The export.
        export: String,
        /// Its name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// The name that the file is to have whose descriptor comes with the request.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<PathBuf>,
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
        /// The number that its start was answered with; the last one if it is not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        backup: Option<u64>,
    },
    /// Ends a backup; what there is of the target is given up.
    BackupCancel {
        /// The export.
        export: String,
        /// The number that its start was answered with; the last one if it is not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        backup: Option<u64>,
    },
    /// Begins to copy into an image what only its backing images have.
    Hydrate(HydrateStart),
    /// How far that is.
    HydrateQuery {
        /// The export.
        export: String,
    },
    /// Ends it; what was copied stays.
    HydrateCancel {
        /// The export.
        export: String,
    },
    /// Has disks go on in overlays, in the files whose descriptors come with the request, from one moment on.
    Fork(ForkStart),
    /// Throws away what the overlay of a fork holds.
    Reset {
        /// The export.
        export: String,
        /// Whether clients may be connected.
        #[serde(default)]
        force: bool,
    },
    /// Exports disks as they are at one moment, which is between this request and its answer.
    Checkpoint(CheckpointStart),
    /// How a checkpoint is, or all that are known.
    CheckpointQuery {
        /// Its name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// Ends a checkpoint.
    CheckpointEnd {
        /// Its name.
        name: String,
        /// Whether what it showed was not copied as a whole: a bitmap that it both shows and begins gets its bits back.
        #[serde(default)]
        failed: bool,
    },
    /// Tells of limits, or changes them: of an export, of a group, or of all.
    Limit {
        /// The export.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        export: Option<String>,
        /// A group in its stead.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
        /// Limits by their names: numbers, or `none`; `group` moves an export to another group.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        set: Option<Map<String, Value>>,
    },
    /// Adds an export; its file comes as a descriptor with the request.
    ExportAdd(ExportAdd),
    /// Removes an export.
    ExportRemove {
        /// The export.
        export: String,
        /// Whether clients are disconnected and jobs ended.
        #[serde(default)]
        force: bool,
    },
    /// Lists the background jobs of all exports.
    Jobs,
    /// Ends the job of an export that runs.
    Cancel {
        /// The export; it may be left out if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        export: Option<String>,
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

/// Arguments of a backup.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct BackupStart {
    /// The export.
    pub(crate) export: String,
    /// The name of the target in messages; without a descriptor, the path of a file to be made.
    pub(crate) target: PathBuf,
    /// `zlib` or `zstd`: clusters are compressed; plain ones if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) compression: Option<CompressionName>,
    /// Bytes of a cluster of the target; as in the image that is exported if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cluster_size: Option<u64>,
    /// A persistent bitmap, empty from the moment that is copied on; without `previous` it is added if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bitmap: Option<String>,
    /// The backing file that the target names, a qcow2 image: only what the bitmap marks is copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) previous: Option<String>,
    /// The id of that backup, as `zebu info` tells it: the bitmap must go on from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) previous_id: Option<String>,
    /// The side that fails if a chunk can't be copied before a client changes it.
    #[serde(default)]
    pub(crate) on_error: OnError,
    /// Bytes a second at most; what clients are about to change is copied at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_limit: Option<NonZeroU64>,
    /// How the target is written; past the page cache, in the best way that the file has, if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<TargetCache>,
    /// Whether it spares others who use the disk.
    #[serde(default)]
    pub(crate) speed: SpeedName,
}

/// Arguments of a fork.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ForkStart {
    /// The export.
    pub(crate) export: String,
    /// The absolute path of its overlay, whose descriptor comes first.
    pub(crate) to: PathBuf,
    /// Disks that are forked at the same moment, in the order of their descriptors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) also: Vec<AlsoForked>,
}

/// One more disk of a fork.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct AlsoForked {
    /// The export.
    pub(crate) export: String,
    /// The absolute path of its overlay.
    pub(crate) to: PathBuf,
}

/// Arguments of a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct CheckpointStart {
    /// The exports whose disks are meant; if none is named, the only one.
    #[serde(default)]
    pub(crate) exports: Vec<String>,
    /// The name of the checkpoint, and of its export; of several disks, each export is called NAME.EXPORT.
    pub(crate) serve: String,
    /// A persistent bitmap, empty from the moment on; it is added if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bitmap: Option<String>,
    /// A persistent bitmap whose bits at the moment clients may look at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<String>,
    /// The name in messages of the file whose descriptor comes with the request: what memory does not hold is kept there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) spill: Option<PathBuf>,
    /// Most bytes of what clients of the disks overwrite, zeroes not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limit: Option<NonZeroU64>,
    /// Seconds after which it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) timeout: Option<NonZeroU64>,
    /// Whether it ends when each of its exports was used and no client is left.
    #[serde(default)]
    pub(crate) until_idle: bool,
}

/// A new export.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ExportAdd {
    /// Its name.
    pub(crate) name: String,
    /// The path or name of the image, whose file comes as a descriptor unless the server may open it.
    pub(crate) file: PathBuf,
    /// Its format; probed if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) format: Option<String>,
    /// Whether clients can't write.
    #[serde(default)]
    pub(crate) read_only: bool,
}

/// Arguments of a hydration.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct HydrateStart {
    /// The export.
    pub(crate) export: String,
    /// Bytes a second at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_limit: Option<NonZeroU64>,
    /// Whether the image names no backing file any more in the end.
    #[serde(default)]
    pub(crate) drop_backing: bool,
}

/// Pages of the target of a backup that stay in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub(crate) enum TargetCache {
    /// None: O_DIRECT.
    None,
    /// None that are written already.
    #[serde(rename = "dontcache")]
    #[value(name = "dontcache")]
    DontCache,
    /// All.
    Writeback,
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

/// The side that fails if a chunk can't be copied before a client changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnError {
    /// The backup; clients do not notice.
    #[default]
    Backup,
    /// The client's request; the backup goes on.
    Request,
}

/// Why a line is not a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// Given back with the answer, if it can be told.
    pub(crate) id: Option<Value>,
    pub(crate) message: String,
}

impl Refusal {
    fn of(id: Option<Value>, error: &serde_json::Error) -> Self {
        Self { id, message: format!("not a request: {error}") }
    }
}

impl Request {
    /// Reads a line. A field that means nothing is refused: whoever wrote it expects something of it.
    ///
    /// # Errors
    /// Why it is not a request.
    pub(crate) fn parse(line: &[u8]) -> Result<Self, Refusal> {
        let fields: Map<String, Value> = serde_json::from_slice(line).map_err(|e| Refusal::of(None, &e))?;
        let id = fields.get("id").filter(|id| !id.is_null());
        let because = |error| Refusal::of(id.cloned(), &error);
        // From the line: of a field that comes twice, the map has one.
        let request: Self = serde_json::from_slice(line).map_err(because)?;
        let known = serde_json::to_value(&request).map_err(because)?;
        let is_known = |name: &str, value: &Value| value.is_null() || known.get(name).is_some();
        match fields.iter().find(|(name, value)| !is_known(name, value)) {
            Some((name, _)) => {
                let message = format!("not a request: this command has no field '{name}'");
                Err(Refusal { id: request.id, message })
            }
            None => Ok(request),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_strict() {
        let parse =
            |text: &str| Request::parse(text.as_bytes()).map(|request| format!("{:?}", request.command));
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
            r#"{"command":"resize","export":"a","by":1}"#,
            r#"{"command":"grow","export":"a","size":1}"#,
            r#"{"command":"resize","export":"a","size":"1G"}"#,
            r#"{"command":"resize","export":"a","size":1,"shrink":true}"#,
            r#"{"command":"resize","export":"a","size":1,"size":2}"#,
            r#"{"command":"flush","export":"a"} {}"#,
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_misspelt_field_is_named() {
        let line = br#"{"id":4,"command":"bitmap-add","export":"a","name":"b","granulariti":512}"#;
        let message = "not a request: this command has no field 'granulariti'".to_owned();
        assert_eq!(Request::parse(line).unwrap_err(), Refusal { id: Some(Value::from(4)), message });
        let line = br#"{"id":null,"command":"bitmap-add","export":"a","name":"b","granularity":null}"#;
        assert!(Request::parse(line).is_ok());
    }

    #[test]
    fn what_ctl_sends_is_understood() {
        let request = Request {
            id: Some(Value::from(1)),
            command: Command::BackupStart(BackupStart {
                export: "a".into(),
                target: "b.qcow2".into(),
                compression: Some(CompressionName::Zstd),
                cluster_size: Some(65536),
                bitmap: Some("c".into()),
                previous: Some("d.qcow2".into()),
                previous_id: Some("0123456789abcdef0123456789abcdef".into()),
                on_error: OnError::Request,
                rate_limit: NonZeroU64::new(5),
                cache: Some(TargetCache::DontCache),
                speed: SpeedName::Full,
            }),
        };
        let line = serde_json::to_vec(&request).unwrap();
        assert_eq!(format!("{:?}", Request::parse(&line).unwrap()), format!("{request:?}"));
    }
}
