//! `zebu ctl checkpoint`: disks as they are at one moment, for clients that pull them.

use super::server::Server;
use crate::failure::Failure;
use crate::local_argument::path_argument;
use crate::serve::control_request::{CheckpointStart, Command};
use serde_json::Value;
use std::fs::OpenOptions;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use zebu_disks::errno_text;
use zebu_disks::size::size_argument;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CheckpointArgs {
    /// The exports; '' is the first one [default: the only one]
    exports: Vec<String>,

    /// The name of the checkpoint, and of its export; of several disks, each export is called NAME.EXPORT
    #[arg(long, value_name = "NAME")]
    serve: String,

    /// Have a bitmap record what is written from that moment on; it is added if there is none, else begun anew
    #[arg(long, value_name = "NEW")]
    bitmap: Option<String>,

    /// Show the clients of the checkpoint what a bitmap holds at that moment, as qemu:dirty-bitmap:BITMAP
    #[arg(long, value_name = "BITMAP")]
    from: Option<String>,

    /// A new file for what is overwritten, once memory for it is full; its name is removed at once, its space at the end
    #[arg(long, value_name = "FILE", value_parser = path_argument())]
    spill: Option<PathBuf>,

    /// Most bytes of what is overwritten; then the checkpoint ends with an error [default: 64M, with --spill no limit]
    #[arg(long, value_name = "SIZE", value_parser = size_argument)]
    limit: Option<u64>,

    /// End it after so many seconds
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,

    /// End it when each of its exports was used and no client is left
    #[arg(long)]
    until_idle: bool,
}

/// Makes the checkpoint that the arguments describe.
pub(super) fn checkpoint(server: &mut Server, args: &CheckpointArgs) -> Result<(), Failure> {
    let start = CheckpointStart {
        exports: args.exports.clone(),
        serve: args.serve.clone(),
        bitmap: args.bitmap.clone(),
        from: args.from.clone(),
        spill: None,
        limit: limit(args.limit)?,
        timeout: args.timeout.and_then(NonZeroU64::new),
        until_idle: args.until_idle,
    };
    begin(server, start, args.spill.as_deref()).map(drop)
}

/// The most bytes of what is overwritten.
pub(super) fn limit(bytes: Option<u64>) -> Result<Option<NonZeroU64>, Failure> {
    let at_least_one = |bytes| {
        NonZeroU64::new(bytes).ok_or_else(|| {
            Failure::usage(
                "a limit of 0 leaves no room for what is overwritten: give a size, such as --limit 1G",
            )
        })
    };
    bytes.map(at_least_one).transpose()
}

/// Makes a checkpoint; what the server tells of it. The spill is opened here: the server itself may not be able to open any file.
pub(super) fn begin(
    server: &mut Server,
    start: CheckpointStart,
    spill: Option<&Path>,
) -> Result<Value, Failure> {
    let Some(path) = spill else { return server.ask(Command::Checkpoint(start)) };
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let file = make(path)?;
    let start = CheckpointStart { spill: Some(absolute), ..start };
    let answer = server.ask_with(Command::Checkpoint(start), &[file.as_fd()]);
    // It was made here. The server has it without its name, and no crash leaves it behind.
    let removed = std::fs::remove_file(path);
    let answer = answer?;
    removed.map_err(|error| {
        Failure::new(format!(
            "the checkpoint is made, but '{}' could not be removed: {error}",
            path.display()
        ))
    })?;
    Ok(answer)
}

fn make(path: &Path) -> Result<std::fs::File, Failure> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    file.map_err(|error| {
        let reason = errno_text(error.raw_os_error().unwrap_or_default());
        Failure::new(format!("could not make '{}': {reason}", path.display()))
    })
}
