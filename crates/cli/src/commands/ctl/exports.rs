//! `zebu ctl`: exports that come and go, and their limits.

use super::server::Server;
use crate::failure::Failure;
use crate::local_argument::path_argument;
use crate::output::{json, stdout};
use crate::serve::control_request::{Command, ExportAdd};
use crate::serve::limit_change::LimitChange;
use crate::serve::limits;
use crate::values::{NamedFormat, OutputFormat, formats};
use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::path::PathBuf;
use zebu_disks::errno_text;

#[derive(Debug, Clone, clap::Args)]
pub(super) struct LimitArgs {
    /// The export, '' for the first one, and its limits: iops=N, bps=SIZE, burst=N (requests), bps-burst=SIZE, also iops-read,
    /// iops-write, bps-read and bps-write, and group=NAME; `none` takes a limit, or all, away
    #[arg(value_name = "EXPORT] [LIMIT=N,...", num_args = 0..=2)]
    words: Vec<String>,

    /// A group in the export's stead, which is made by its first limits: its exports share one budget, fairly
    #[arg(long, value_name = "NAME")]
    group: Option<String>,

    /// How they are printed
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,
}

impl LimitArgs {
    /// The export and the limits. A single word with `=` in it is the limits of the only export.
    fn words(&self) -> Result<(Option<String>, Option<&str>), Failure> {
        match (&self.words[..], &self.group) {
            ([], _) => Ok((None, None)),
            ([limits], Some(_)) => Ok((None, Some(limits))),
            ([limits], None) if limits.contains('=') => Ok((None, Some(limits))),
            ([export], None) => Ok((Some(export.clone()), None)),
            ([export, limits], None) => Ok((Some(export.clone()), Some(limits))),
            _ => {
                Err(Failure::usage("limits are those of an export or of a group: give an export, or --group"))
            }
        }
    }
}

/// Changes limits, or prints them.
pub(super) fn limit(server: &mut Server, args: &LimitArgs) -> Result<u8, Failure> {
    let (export, limits) = args.words()?;
    let change = limits.map(LimitChange::parse).transpose().map_err(Failure::usage)?;
    let set = change.map(|change| change.to_object());
    let is_told = set.is_none() || args.output == OutputFormat::Json;
    let told = server.ask(Command::Limit { export, group: args.group.clone(), set })?;
    if is_told {
        stdout::print(&match args.output {
            OutputFormat::Json => json::to_text(server.context.dialect, &told)?,
            OutputFormat::Human => limits::lines(&told),
        })?;
    }
    Ok(0)
}

#[derive(Debug, Clone, clap::Args)]
pub(super) struct AddArgs {
    /// Its name for clients
    name: String,

    /// The image
    #[arg(value_name = "FILE", value_parser = path_argument())]
    file: PathBuf,

    /// Format of the image [default: probed; writing to a raw image needs it]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Clients can't write
    #[arg(short, long)]
    read_only: bool,
}

/// Opens a file, and has it exported.
pub(super) fn add(server: &mut Server, args: &AddArgs) -> Result<u8, Failure> {
    let is_file = std::fs::symlink_metadata(&args.file).is_ok();
    // Another name than that of a file is for the server to open, if it may.
    let looks_local = !args.file.to_string_lossy().contains(':');
    let mut handed = None;
    if is_file || looks_local {
        let opened = OpenOptions::new().read(true).write(!args.read_only).open(&args.file);
        handed = Some(opened.map_err(|error| {
            let reason = errno_text(error.raw_os_error().unwrap_or_default());
            Failure::new(format!("could not open '{}': {reason}", args.file.display()))
        })?);
    }
    let file = match &handed {
        Some(_) => std::path::absolute(&args.file).unwrap_or_else(|_| args.file.clone()),
        None => args.file.clone(),
    };
    let request = Command::ExportAdd(ExportAdd {
        name: args.name.clone(),
        file,
        format: args.format.as_ref().map(|named| named.name.clone()),
        read_only: args.read_only,
    });
    drop(server.ask_with(request, handed.as_ref().map(AsFd::as_fd).as_slice())?);
    Ok(0)
}
