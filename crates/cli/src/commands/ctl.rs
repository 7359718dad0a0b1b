//! `zebu ctl`: commands to a running `zebu serve`.

mod checkpoint;
mod exports;
mod fork;
mod server;

use crate::arguments::EngineArgs;
use crate::backing;
use crate::failure::Failure;
use crate::local_argument::{live_target_argument, path_argument};
use crate::output::{json, stderr, stdout};
use crate::sector_size::{unusual, warn_of_lost};
use crate::serve::control_request::{
    BackupStart, Command, CompressionName, HydrateStart, OnError, TargetCache,
};
use crate::serve::jobs;
use crate::session::Session;
use crate::values::{OutputFormat, Rate, ReferenceRule, SpeedName, rate_argument, reference_argument};
use crate::watch::{ProgressArg, ProgressMode, Watch};
use checkpoint::{CheckpointArgs, checkpoint};
use serde_json::Value;
use server::Server;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zebu_disks::size::{parse_size, size_argument};
use zebu_disks::{Context, errno_text, printable};
use zebu_engine::jobs::{NewFile, backing_name};
use zebu_engine::{BackupId, Format};

/// How often a backup that is waited for is asked about.
const POLL: Duration = Duration::from_millis(100);

/// Arguments of `zebu ctl`.
#[derive(Debug, clap::Args)]
pub(crate) struct CtlArgs {
    /// The socket given to `zebu serve` with --control
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,

    #[command(subcommand)]
    command: CtlCommand,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum CtlCommand {
    /// Print the versions of the server and of its commands, as JSON
    Version,
    /// Print what clients did and how the images are doing, as JSON
    Stats {
        /// Only this export
        export: Option<String>,
    },
    /// Make a disk larger, while clients use it
    #[command(allow_missing_positional = true)]
    Resize {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// The new size, or what is added (+SIZE)
        #[arg(value_name = "[+]SIZE", value_parser = growth_argument)]
        size: Growth,
    },
    /// Change the memory of an image's mapping cache, its backing chain included
    #[command(allow_missing_positional = true)]
    CacheSize {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// The new size
        #[arg(value_name = "SIZE", value_parser = size_argument)]
        size: u64,
    },
    /// Make durable what clients have written
    Flush {
        /// The export; may be left out if there is one
        export: Option<String>,
    },
    /// Take a snapshot of a disk while clients use it: within the image, or as a file that shares its blocks
    SnapshotCreate {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// The name of an internal snapshot, if EXPORT is given as well; else a word alone is the name
        #[arg(conflicts_with = "to")]
        name: Option<String>,
        /// A new file on the same file system, which must be able to share blocks (XFS, btrfs)
        #[arg(long, value_name = "FILE", value_parser = path_argument())]
        to: Option<PathBuf>,
    },
    /// List the internal snapshots of a disk
    SnapshotList {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// How the list is printed
        #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
        output: OutputFormat,
    },
    /// Delete the first internal snapshot of a name
    #[command(allow_missing_positional = true)]
    SnapshotDelete {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// The name of the snapshot
        name: String,
    },
    /// Copy a disk as it is now into a new image, while clients go on to write
    ///
    /// The file is no image before the backup is complete. Without -w, the command returns when the backup has begun.
    #[command(allow_missing_positional = true)]
    BackupStart(BackupStartArgs),
    /// Print how far the last backup of a disk is, as JSON
    BackupQuery {
        /// The export; may be left out if there is one
        export: Option<String>,
    },
    /// End the backup of a disk; the target is emptied
    BackupCancel {
        /// The export; may be left out if there is one
        export: Option<String>,
    },
    /// Copy into an image what only its backing images have, while clients use it
    ///
    /// Without -w, the command returns when it has begun. What was copied before an end in between stays: the next one goes
    /// on from there.
    Hydrate(HydrateArgs),
    /// Print how far the last hydration of a disk is, as JSON
    HydrateQuery {
        /// The export; may be left out if there is one
        export: Option<String>,
    },
    /// End the hydration of a disk; what was copied stays
    HydrateCancel {
        /// The export; may be left out if there is one
        export: Option<String>,
    },
    /// Have a disk go on in a new overlay, while clients use it; the image becomes one that is only read
    ///
    /// The command returns when the image is durable and sealed. `zebu serve` of a sealed image serves the overlay.
    Fork(fork::ForkArgs),
    /// Throw away what a disk holds since its last fork
    Reset {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// Also while clients use the disk
        #[arg(long)]
        force: bool,
    },
    /// Export disks as they are at one moment, for NBD clients that pull them, while others go on to write
    ///
    /// Bytes that are overwritten meanwhile are kept aside, within a bound; beyond it the checkpoint ends with an error, and writes go on.
    /// A bitmap of both --bitmap and --from keeps its earlier bits unless `checkpoint-end` says that they were copied.
    Checkpoint(CheckpointArgs),
    /// Print how a checkpoint is, or all that are known, as JSON
    CheckpointQuery {
        /// The name of the checkpoint
        name: Option<String>,
    },
    /// End a checkpoint
    CheckpointEnd {
        /// The name of the checkpoint
        name: String,
        /// It was not copied as a whole: a bitmap of both --bitmap and --from gets its earlier bits back
        #[arg(long)]
        failed: bool,
    },
    /// Print or change the limits of requests and bytes per second, of an export or of a group of exports
    ///
    /// Without an export, those of all are printed. Limits that are not named stay as they are; they last until the server ends or
    /// reads its --config again. A flush is never held up.
    Limit(exports::LimitArgs),
    /// Export another image, on the NBD sockets of the server
    ///
    /// The file is opened by this command and handed to the server, which can open nothing in its sandbox. So it has no backing file,
    /// unless the server runs with --no-sandbox and opens it by itself.
    ExportAdd(exports::AddArgs),
    /// Remove an export: it is flushed and closed when this returns
    ExportRemove {
        /// The export, by its own name: it is never guessed
        export: String,
        /// Disconnect its clients and end its jobs
        #[arg(long)]
        force: bool,
    },
    /// List the background jobs of all exports: backups and hydrations, those that have ended as well
    Jobs {
        /// How the list is printed
        #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
        output: OutputFormat,
    },
    /// End the job of an export that runs
    Cancel {
        /// The export; may be left out if there is one
        export: Option<String>,
    },
    /// Print the persistent dirty bitmaps of an image, as JSON
    Bitmaps {
        /// The export; may be left out if there is one
        export: Option<String>,
    },
    /// Add a bitmap, which records what clients write from now on
    #[command(allow_missing_positional = true)]
    BitmapAdd {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// Its name
        name: String,
        /// Bytes that a bit stands for, a power of two from 512 [default: the cluster size, but 4k to 64k]
        #[arg(short, long, value_name = "SIZE", value_parser = size_argument)]
        granularity: Option<u64>,
    },
    /// Remove a bitmap
    #[command(allow_missing_positional = true)]
    BitmapRemove {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// Its name
        name: String,
    },
    /// Clear a bitmap
    #[command(allow_missing_positional = true)]
    BitmapClear {
        /// The export; may be left out if there is one
        export: Option<String>,
        /// Its name
        name: String,
    },
}

#[derive(Debug, Clone, clap::Args)]
struct BackupStartArgs {
    /// The export; may be left out if there is one
    export: Option<String>,

    /// The new image, a qcow2 one
    #[arg(value_name = "TARGET", value_parser = live_target_argument())]
    target: PathBuf,

    /// Compress the clusters of the target
    #[arg(long, value_enum, value_name = "zlib|zstd", hide_possible_values = true)]
    compression_type: Option<CompressionName>,

    /// Bytes of a cluster of the target [default: as in the image]
    #[arg(long, value_name = "SIZE", value_parser = size_argument)]
    cluster_size: Option<u64>,

    /// Have a bitmap record what is written from now on; it is added if there is none
    #[arg(long, value_name = "NAME")]
    bitmap: Option<String>,

    /// Copy only what the bitmap marks, on top of this backup, the last one that was made with it
    #[arg(long, value_name = "FILE", requires = "bitmap", value_parser = path_argument())]
    previous: Option<PathBuf>,

    /// Which files that --previous names may be opened; may be given more than once
    #[arg(long, value_name = "none|local|dir=PATH|prefix=URL|all", requires = "previous", value_parser = reference_argument)]
    allow_refs: Vec<ReferenceRule>,

    /// The side that fails if a chunk can't be copied before a client changes it: the backup, or the client's request
    #[arg(long, value_enum, default_value_t, value_name = "backup|request", hide_possible_values = true)]
    on_error: OnError,

    /// Most bytes a second (0: no limit); what clients are about to change is copied at once
    #[arg(short, long, value_name = "RATE", value_parser = rate_argument)]
    rate: Option<Rate>,

    /// How fast it goes: as the disk's latency allows, so that others who use it wait little longer, or at full speed
    #[arg(long, value_enum, default_value_t, value_name = "adaptive|full", hide_possible_values = true)]
    speed: SpeedName,

    /// Pages of the target in the page cache: none (O_DIRECT), none that are written already, or all
    /// [default: the first of these that its file system can do]
    #[arg(short = 't', value_enum, value_name = "none|dontcache|writeback", hide_possible_values = true)]
    cache: Option<TargetCache>,

    /// Wait until the backup is complete; SIGINT and SIGTERM cancel it
    #[arg(short, long)]
    wait: bool,

    #[command(flatten)]
    progress: ProgressArg,
}

#[derive(Debug, Clone, clap::Args)]
struct HydrateArgs {
    /// The export; may be left out if there is one
    export: Option<String>,

    /// Most bytes a second (0: no limit)
    #[arg(short, long, visible_alias = "rate-limit", value_name = "RATE", value_parser = rate_argument)]
    rate: Option<Rate>,

    /// At the end, remove the name of the backing file from the image
    #[arg(long)]
    drop_backing: bool,

    /// Wait until all is copied; SIGINT and SIGTERM end it
    #[arg(short, long)]
    wait: bool,

    #[command(flatten)]
    progress: ProgressArg,
}

/// A change of the size.
#[derive(Debug, Clone, Copy)]
enum Growth {
    To(u64),
    By(u64),
}

fn growth_argument(text: &str) -> Result<Growth, String> {
    match text.strip_prefix('+') {
        Some(by) => parse_size(by).map(Growth::By).map_err(|error| error.to_string()),
        None => size_argument(text).map(Growth::To).map_err(|error| error.to_string()),
    }
}

/// Runs the command.
pub(crate) fn run(args: &CtlArgs, context: &Context) -> Result<u8, Failure> {
    let mut server = Server::connect(&args.socket, context)?;
    let (command, is_told) = match args.command.clone() {
        CtlCommand::Version => (Command::Version, true),
        CtlCommand::Stats { export } => (Command::Stats { export }, true),
        CtlCommand::Resize { export, size } => {
            let export = server.export(export)?;
            drop(server.ask(match size {
                Growth::To(size) => Command::Resize { export, size },
                Growth::By(by) => Command::Grow { export, by },
            })?);
            stdout::print("Image resized.\n")?;
            return Ok(0);
        }
        CtlCommand::CacheSize { export, size } => {
            (Command::CacheSize { export: server.export(export)?, size }, false)
        }
        CtlCommand::Flush { export } => (Command::Flush { export: server.export(export)? }, false),
        CtlCommand::SnapshotCreate { export, to: Some(to), .. } => {
            let export = server.export(export)?;
            return snapshot_to(&mut server, export, &to).map(|()| 0);
        }
        CtlCommand::SnapshotCreate { export, name, .. } => {
            let (export, name) = if name.is_some() { (export, name) } else { (None, export) };
            let name =
                name.ok_or_else(|| Failure::usage("a snapshot needs a NAME, or a file (--to FILE)"))?;
            (Command::SnapshotCreate { export: server.export(export)?, name: Some(name), to: None }, false)
        }
        CtlCommand::SnapshotList { export, output } => {
            let export = server.export(export)?;
            let list = server.ask(Command::SnapshotList { export })?;
            stdout::print(&match output {
                OutputFormat::Json => json::to_text(server.context.dialect, &list["snapshots"])?,
                OutputFormat::Human => snapshot_lines(&list["snapshots"]),
            })?;
            return Ok(0);
        }
        CtlCommand::SnapshotDelete { export, name } => {
            (Command::SnapshotDelete { export: server.export(export)?, name }, false)
        }
        CtlCommand::BackupStart(start) => return backup(&mut server, &start),
        CtlCommand::BackupQuery { export } => {
            (Command::BackupQuery { export: server.export(export)?, backup: None }, true)
        }
        CtlCommand::BackupCancel { export } => {
            (Command::BackupCancel { export: server.export(export)?, backup: None }, false)
        }
        CtlCommand::Hydrate(start) => return hydrate(&mut server, &start),
        CtlCommand::HydrateQuery { export } => {
            (Command::HydrateQuery { export: server.export(export)? }, true)
        }
        CtlCommand::HydrateCancel { export } => {
            (Command::HydrateCancel { export: server.export(export)? }, false)
        }
        CtlCommand::Limit(args) => return exports::limit(&mut server, &args),
        CtlCommand::ExportAdd(args) => return exports::add(&mut server, &args),
        CtlCommand::ExportRemove { export, force } => (Command::ExportRemove { export, force }, false),
        CtlCommand::Jobs { output } => {
            let told = server.ask(Command::Jobs)?;
            stdout::print(&match output {
                OutputFormat::Json => json::to_text(server.context.dialect, &told)?,
                OutputFormat::Human => jobs::lines(&told),
            })?;
            return Ok(0);
        }
        CtlCommand::Cancel { export } => (Command::Cancel { export }, false),
        CtlCommand::Fork(args) => return fork::fork(&mut server, &args),
        CtlCommand::Reset { export, force } => {
            (Command::Reset { export: server.export(export)?, force }, false)
        }
        CtlCommand::Checkpoint(args) => return checkpoint(&mut server, &args).map(|()| 0),
        CtlCommand::CheckpointQuery { name } => (Command::CheckpointQuery { name }, true),
        CtlCommand::CheckpointEnd { name, failed } => (Command::CheckpointEnd { name, failed }, false),
        CtlCommand::Bitmaps { export } => (Command::Bitmaps { export: server.export(export)? }, true),
        CtlCommand::BitmapAdd { export, name, granularity } => {
            (Command::BitmapAdd { export: server.export(export)?, name, granularity }, false)
        }
        CtlCommand::BitmapRemove { export, name } => {
            (Command::BitmapRemove { export: server.export(export)?, name }, false)
        }
        CtlCommand::BitmapClear { export, name } => {
            (Command::BitmapClear { export: server.export(export)?, name }, false)
        }
    };
    let answer = server.ask(command)?;
    if is_told {
        stdout::print(&json::to_text(server.context.dialect, &answer)?)?;
    }
    Ok(0)
}

/// Takes a snapshot into a file that is made here, and that gets its name when it is complete and durable.
fn snapshot_to(server: &mut Server, export: String, to: &Path) -> Result<(), Failure> {
    let fail = |error: zebu_engine::Error| Failure::new(error.to_string());
    let (new, file) = NewFile::reserve(to).map_err(fail)?;
    let path = std::path::absolute(to).unwrap_or_else(|_| to.to_owned());
    let command = Command::SnapshotCreate { export, name: None, to: Some(path) };
    server.ask_with(command, &[file.as_fd()])?;
    drop(file);
    new.publish().map_err(fail)
}

/// Begins a hydration, and waits for it if that is asked for.
fn hydrate(server: &mut Server, args: &HydrateArgs) -> Result<u8, Failure> {
    let mut watch = Watch::start(if args.wait { args.progress.mode(false) } else { ProgressMode::None })?;
    let name = server.export(args.export.clone())?;
    let export = || name.clone();
    drop(server.ask(Command::Hydrate(HydrateStart {
        export: export(),
        rate_limit: args.rate.and_then(|rate| rate.0),
        drop_backing: args.drop_backing,
    }))?);
    if !args.wait {
        return Ok(0);
    }
    let query = || Command::HydrateQuery { export: export() };
    let cancel = || Command::HydrateCancel { export: export() };
    follow(server, &mut watch, query, cancel, &format!("the hydration of '{name}'"))?
}

/// Waits until work of the server is over. The outer error: it could not be asked.
fn follow(
    server: &mut Server,
    watch: &mut Watch,
    query: impl Fn() -> Command,
    cancel: impl Fn() -> Command,
    what: &str,
) -> Result<Result<u8, Failure>, Failure> {
    loop {
        if watch.cancel().is_cancelled() {
            drop(server.ask(cancel())?);
        }
        let state = server.ask(query())?;
        let bytes = |key: &str| state[key].as_u64().unwrap_or_default();
        watch.note("copying", bytes("done"), bytes("total"));
        return Ok(match state["status"].as_str() {
            Some("running") => {
                std::thread::sleep(POLL);
                continue;
            }
            Some("completed") => {
                watch.finish();
                Ok(0)
            }
            Some("cancelled") => Err(Failure::interrupted()),
            _ => {
                let reason = state["error"].as_str().unwrap_or("for an unknown reason");
                Err(Failure::new(format!("{what} failed: {reason}")))
            }
        });
    }
}

/// A line for each snapshot: its id and its name.
fn snapshot_lines(list: &Value) -> String {
    let text = |value: &Value| printable(value.as_str().unwrap_or_default()).into_owned();
    let snapshots = list.as_array().map(Vec::as_slice).unwrap_or_default();
    let line = |s: &Value| format!("{:<9} {}\n", text(&s["id"]), text(&s["name"]));
    snapshots.iter().map(line).collect::<Vec<_>>().concat()
}

/// The previous backup, as the target and the server know it.
struct Previous {
    /// The name by which the target finds it.
    name: String,
    id: Option<BackupId>,
}

/// Finds the previous backup, which must be an image of a disk that is not larger.
fn find_previous(
    server: &mut Server,
    export: &str,
    args: &BackupStartArgs,
    previous: &Path,
) -> Result<Previous, Failure> {
    let session = Session::start(&server.context, &EngineArgs { aio: None, verbose: false }, None)?;
    let image = backing::opened_chain(&session, previous, Format::Qcow2, &args.allow_refs)?;
    let size = image.virtual_size();
    let export = server.ask(Command::Stats { export: Some(export.to_owned()) })?;
    let now = export["virtual-size"].as_u64().unwrap_or_default();
    if size > now {
        let previous = previous.display();
        return Err(Failure::new(format!(
            "the disk has {now} bytes, that of the previous backup '{previous}' {size}: make a full backup"
        )));
    }
    let name = backing_name(previous, &args.target).map_err(|error| Failure::new(error.to_string()))?;
    Ok(Previous { name, id: image.backup_id() })
}

/// Begins a backup into a file that is made here: the server itself may not be able to open any.
fn backup(server: &mut Server, args: &BackupStartArgs) -> Result<u8, Failure> {
    let target = args.target.display();
    let name = server.export(args.export.clone())?;
    let previous = args.previous.as_deref().map(|previous| find_previous(server, &name, args, previous));
    let previous = previous.transpose()?;
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&args.target);
    let file = file.map_err(|error| {
        let reason = errno_text(error.raw_os_error().unwrap_or_default());
        Failure::new(format!("could not make '{target}': {reason}"))
    })?;
    let remove = |failure: Failure| {
        // It was made here, and nothing is in it.
        let _ = std::fs::remove_file(&args.target);
        failure
    };
    // Once the backup is complete, its name has to last as its content does.
    let directory = args.target.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))
        .and_then(|directory| directory.sync_all())
        .map_err(|error| Failure::new(format!("could not make the name '{target}' durable: {error}")))
        .map_err(remove)?;
    let mut watch = Watch::start(if args.wait { args.progress.mode(false) } else { ProgressMode::None })?;
    let path = std::path::absolute(&args.target).unwrap_or_else(|_| args.target.clone());
    let start = Command::BackupStart(BackupStart {
        export: name.clone(),
        target: path,
        compression: args.compression_type,
        cluster_size: args.cluster_size,
        bitmap: args.bitmap.clone(),
        previous_id: previous.as_ref().and_then(|previous| previous.id).map(|id| id.to_string()),
        previous: previous.map(|previous| previous.name),
        on_error: args.on_error,
        rate_limit: args.rate.and_then(|rate| rate.0),
        cache: args.cache,
        speed: args.speed,
    });
    let begun = server.ask_with(start, &[file.as_fd()]).map_err(remove)?;
    drop(file);
    if begun["target-cache"] == "memory" && args.cache.is_none() {
        stderr::tell(
            server.context.dialect,
            &format!("'{target}' is on a file system in memory: its pages stay in the page cache"),
        );
    }
    let sector = begun["logical-sector-size"].as_u64().and_then(|bytes| u32::try_from(bytes).ok());
    warn_of_lost(sector.and_then(unusual), args.target.as_os_str());
    if !args.wait {
        return Ok(0);
    }
    // Others may begin backups of the same disk once this one is over.
    let number = begun["backup"].as_u64();
    let export = || name.clone();
    let query = || Command::BackupQuery { export: export(), backup: number };
    let cancel = || Command::BackupCancel { export: export(), backup: number };
    follow(server, &mut watch, query, cancel, &format!("the backup to '{target}'"))?.map_err(remove)
}
