//! `zebu ctl backup-start`: a disk into a new image, or disks into their stores.

use super::follow::follow;
use super::nbd_place::NbdPlace;
use super::server::Server;
use crate::arguments::EngineArgs;
use crate::backing;
use crate::commands::stores::shared::{KeepArgs, parse_whole_store};
use crate::failure::Failure;
use crate::local_argument::path_argument;
use crate::output::stderr;
use crate::sector_size::{unusual, warn_of_lost};
use crate::serve::control_request::{BackupStart, Command, CompressionName, OnError, TargetCache};
use crate::session::Session;
use crate::values::{OutputFormat, Rate, ReferenceRule, SpeedName, rate_argument, reference_argument};
use crate::watch::{ProgressArg, ProgressMode, Watch};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use zebu_disks::size::size_argument;
use zebu_disks::{errno_text, local_path, without_secrets};
use zebu_engine::jobs::backing_name;
use zebu_engine::{BackupId, Format};
use zebu_store::points::PointName;

/// Heading of options of backups to stores, in the help.
const STORES: &str = "Into stores";

/// Arguments of `zebu ctl backup-start`.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct BackupStartArgs {
    /// The export, which may be left out if there is one, and the new image, a qcow2 one. With --to: the exports
    #[arg(value_name = "EXPORT] [TARGET", num_args = 0..)]
    words: Vec<OsString>,

    /// Make the next point of each disk, all of one moment, in this store; of several disks in STORE/EXPORT
    #[arg(long, value_name = "STORE", help_heading = STORES, value_parser = parse_whole_store, conflicts_with_all = ["bitmap", "previous", "on_error", "cache"])]
    pub(super) to: Option<PointName>,

    /// Compress the clusters of the target [default: not; zstd in a store]
    #[arg(long, value_enum, value_name = "zlib|zstd", hide_possible_values = true)]
    pub(super) compression_type: Option<CompressionName>,

    /// Bytes of a cluster of the target [default: as in the image; 64k in a store]
    #[arg(long, value_name = "SIZE", value_parser = size_argument)]
    pub(super) cluster_size: Option<u64>,

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
    pub(super) rate: Option<Rate>,

    /// How fast it goes: as the disk's latency allows, so that others who use it wait little longer, or at full speed
    #[arg(long, value_enum, default_value_t, value_name = "adaptive|full", hide_possible_values = true)]
    pub(super) speed: SpeedName,

    /// Pages of the target in the page cache: none (O_DIRECT), none that are written already, or all
    /// [default: the first of these that its file system can do]
    #[arg(short = 't', value_enum, value_name = "none|dontcache|writeback", hide_possible_values = true)]
    cache: Option<TargetCache>,

    /// Wait until the backup is complete, as one into a store always does; SIGINT and SIGTERM cancel it
    #[arg(short, long)]
    wait: bool,

    #[command(flatten)]
    pub(super) progress: ProgressArg,

    /// The server's NBD socket: its URL, or as --nbd of `zebu serve` has it [default: as the server says]
    #[arg(long, value_name = "ADDRESS", help_heading = STORES, requires = "to", value_parser = NbdPlace::parse)]
    pub(super) nbd: Option<NbdPlace>,

    /// A new file for what guests overwrite meanwhile, once 64M of memory are full; its name is removed at once, its space at the end
    #[arg(long, value_name = "FILE", help_heading = STORES, requires = "to", value_parser = path_argument())]
    pub(super) spill: Option<PathBuf>,

    /// Most bytes of what is overwritten; then the backup fails, and the guests go on [default: 64M, with --spill no limit]
    #[arg(long, value_name = "SIZE", help_heading = STORES, requires = "to", value_parser = size_argument)]
    pub(super) limit: Option<u64>,

    /// Fail after so many seconds
    #[arg(long, value_name = "S", help_heading = STORES, requires = "to", value_parser = clap::value_parser!(u64).range(1..), default_value = "86400")]
    pub(super) timeout: u64,

    /// Make full points, which stand on no earlier ones
    #[arg(long, help_heading = STORES, requires = "to")]
    pub(super) full: bool,

    /// Format of the report
    #[arg(long, value_enum, default_value_t, help_heading = STORES, requires = "to", value_name = "human|json", hide_possible_values = true)]
    pub(super) output: OutputFormat,

    #[command(flatten)]
    pub(super) keep: KeepArgs,
}

/// The previous backup, as the target and the server know it.
struct Previous {
    /// The name by which the target finds it.
    name: String,
    id: Option<BackupId>,
}

impl BackupStartArgs {
    /// The exports, where all words are names of some.
    pub(super) fn exports(&self) -> Result<Vec<String>, Failure> {
        let name = |word: &OsString| {
            let name = word.to_str().map(str::to_owned);
            name.ok_or_else(|| {
                Failure::usage(format!("'{}': the name of an export is UTF-8", word.display()))
            })
        };
        self.words.iter().map(name).collect()
    }

    /// The export, where one is named, and the new image.
    pub(super) fn export_and_image(&self) -> Result<(Option<String>, PathBuf), Failure> {
        if self.keep.is_given() {
            return Err(Failure::usage("--keep-last and its kin are for stores (--to store:DIR/NAME)"));
        }
        let (export, target) = match &self.words[..] {
            [target] => (None, target),
            [export, target] => (Some(export.to_string_lossy().into_owned()), target),
            [] => {
                return Err(Failure::usage("where to? Give the new image, or stores (--to store:DIR/NAME)"));
            }
            _ => return Err(Failure::usage("several disks go into stores: give --to store:DIR/NAME")),
        };
        if target.to_str().is_some_and(PointName::is_name) {
            return Err(Failure::usage(format!("a store is given by --to: --to {}", target.display())));
        }
        let path = local_path(target)
            .map_err(|reason| Failure::usage(format!("'{}': {reason}", without_secrets(target))))?;
        Ok((export, path))
    }
}

/// Begins a backup into a new image.
pub(super) fn backup(server: &mut Server, args: &BackupStartArgs) -> Result<u8, Failure> {
    let (export, path) = args.export_and_image()?;
    into_file(server, args, export, &path)
}

/// Finds the previous backup, which must be an image of a disk that is not larger.
fn find_previous(
    server: &mut Server,
    export: &str,
    args: &BackupStartArgs,
    target: &Path,
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
    let name = backing_name(previous, target).map_err(|error| Failure::new(error.to_string()))?;
    Ok(Previous { name, id: image.backup_id() })
}

/// Begins a backup into a file that is made here: the server itself may not be able to open any.
fn into_file(
    server: &mut Server,
    args: &BackupStartArgs,
    export: Option<String>,
    to: &Path,
) -> Result<u8, Failure> {
    let target = to.display();
    let name = server.export(export)?;
    let find = |previous: &PathBuf| find_previous(server, &name, args, to, previous);
    let previous = args.previous.as_ref().map(find).transpose()?;
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(to);
    let file = file.map_err(|error| {
        let reason = errno_text(error.raw_os_error().unwrap_or_default());
        Failure::new(format!("could not make '{target}': {reason}"))
    })?;
    let remove = |failure: Failure| {
        // It was made here, and nothing is in it.
        let _ = std::fs::remove_file(to);
        failure
    };
    // Once the backup is complete, its name has to last as its content does.
    let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))
        .and_then(|directory| directory.sync_all())
        .map_err(|error| Failure::new(format!("could not make the name '{target}' durable: {error}")))
        .map_err(remove)?;
    let mut watch = Watch::start(if args.wait { args.progress.mode(false) } else { ProgressMode::None })?;
    let path = std::path::absolute(to).unwrap_or_else(|_| to.to_owned());
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
    warn_of_lost(sector.and_then(unusual), to.as_os_str());
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
