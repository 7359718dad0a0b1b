//! `zebu ctl`: commands to a running `zebu serve`.

mod backup;
mod checkpoint;
mod exports;
mod follow;
mod fork;
mod nbd_place;
mod points;
mod server;
pub(crate) mod upload;

use crate::examples;
use crate::failure::Failure;
use crate::local_argument::path_argument;
use crate::output::{json, stdout};
use crate::serve::control_request::{Command, HydrateStart};
use crate::serve::jobs;
use crate::values::{OutputFormat, Rate, rate_argument};
use crate::watch::{ProgressArg, ProgressMode, Watch};
use backup::{BackupStartArgs, backup};
use checkpoint::{CheckpointArgs, checkpoint};
use follow::follow;
use serde_json::Value;
use server::Server;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use zebu_disks::size::{parse_size, size_argument};
use zebu_disks::{Context, printable};
use zebu_engine::jobs::NewFile;

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
    /// Copy a disk as it is now into a new image, or disks into their stores, while clients go on to write
    ///
    /// The file is no image before the backup is complete. Without -w, the command returns when the backup has begun.
    ///
    /// With --to, a checkpoint shows all disks as they are at one moment, and the next point of each store is made of it by this
    /// command, which has the credentials of the store and waits. Exit codes: 0 done, 1 no point is published, 3 points are published and
    /// something that was to follow failed.
    #[command(
        override_usage = "zebu ctl SOCKET backup-start [OPTIONS] [EXPORT] TARGET\n       zebu ctl SOCKET backup-start [OPTIONS] [EXPORT]... --to STORE",
        after_help = examples::CTL_BACKUP_START
    )]
    BackupStart(Box<BackupStartArgs>),
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
    #[command(after_help = examples::CTL_FORK)]
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
    if let CtlCommand::BackupStart(start) = &args.command
        && start.to.is_none()
    {
        // A mistake is told without a server, too.
        start.export_and_image()?;
    }
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
        CtlCommand::BackupStart(start) => {
            return match &start.to {
                Some(to) => points::back_up(&mut server, &start, to),
                None => backup(&mut server, &start),
            };
        }
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

/// A line for each snapshot: its id and its name.
fn snapshot_lines(list: &Value) -> String {
    let text = |value: &Value| printable(value.as_str().unwrap_or_default()).into_owned();
    let snapshots = list.as_array().map(Vec::as_slice).unwrap_or_default();
    let line = |s: &Value| format!("{:<9} {}\n", text(&s["id"]), text(&s["name"]));
    snapshots.iter().map(line).collect::<Vec<_>>().concat()
}
