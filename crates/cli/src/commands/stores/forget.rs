//! `zebu forget`: points that go by rules, and objects that no point needs.

use super::shared::{KeepArgs, open_store, parse_store};
use crate::arguments::NetworkArgs;
use crate::failure::Failure;
use crate::output::{json, stderr, stdout};
use crate::values::OutputFormat;
use serde::Serialize;
use zebu_disks::Context;
use zebu_store::points::{Locks, PointName};

/// Arguments of `zebu forget`.
#[derive(Debug, clap::Args)]
pub(crate) struct ForgetArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    /// Remove layers, too, that no point and no unfinished backup needs
    #[arg(long)]
    prune: bool,

    /// Take unfinished backups and prunes for cut off: what they claim goes. In a folder this is known without the option
    #[arg(long, requires = "prune")]
    break_lock: bool,

    #[command(flatten)]
    keep: KeepArgs,

    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    network: NetworkArgs,

    /// The store; with @POINT, that point is forgotten
    #[arg(value_name = "STORE", value_parser = parse_store)]
    store: PointName,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    removed: Vec<String>,
    kept: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pruned: Option<PrunedReport>,
}

#[derive(Serialize)]
struct PrunedReport {
    objects: u64,
    bytes: u64,
    unfinished: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &ForgetArgs, context: &Context) -> Result<u8, Failure> {
    if args.store.point().is_some() && args.keep.is_given() {
        return Err(Failure::usage("a point is forgotten by its name or by rules (--keep-...), not by both"));
    }
    if args.store.point().is_none() && !args.keep.is_given() && !args.prune {
        return Err(Failure::usage(
            "nothing to do: give rules (--keep-...), a point (STORE@POINT) or --prune",
        ));
    }
    args.network.apply(&context.disks);
    let store = open_store(context, &args.store)?;
    let forgotten = store.forget(&args.keep.rules(), args.store.point())?;
    let locks = if args.break_lock { Locks::Break } else { Locks::Respect };
    let pruned = args.prune.then(|| store.prune(locks)).transpose()?;
    for by in pruned.iter().flat_map(|pruned| &pruned.unfinished) {
        stderr::tell(
            context.dialect,
            &format!("what an unfinished backup by {by} needs stays (--break-lock, if that was cut off)"),
        );
    }
    if args.quiet {
        return Ok(0);
    }
    let report = Report {
        removed: forgotten.removed,
        kept: forgotten.kept,
        pruned: pruned.map(|pruned| PrunedReport {
            objects: pruned.objects,
            bytes: pruned.bytes,
            unfinished: pruned.unfinished,
        }),
    };
    stdout::print(&match args.output {
        OutputFormat::Human => human_text(&report),
        OutputFormat::Json => json::to_text(context.dialect, &report)?,
    })?;
    Ok(0)
}

fn human_text(report: &Report) -> String {
    let mut text = String::new();
    text.extend(report.removed.iter().map(|name| format!("forgotten: {name}\n")));
    text += &format!("{} points stay", report.kept.len());
    if let Some(pruned) = &report.pruned {
        text += &format!("; {} objects of {} bytes were removed", pruned.objects, pruned.bytes);
    }
    text + "\n"
}
