//! `zebu forget`: points that go by rules, and objects that no point needs.

use super::shared::{KeepArgs, open_store, parse_store, tell_damaged, texts};
use crate::arguments::NetworkArgs;
use crate::failure::Failure;
use crate::output::{json, stderr, stdout};
use crate::values::OutputFormat;
use serde::Serialize;
use zebu_disks::Context;
use zebu_store::points::{Locks, PointName, Pruned};

/// The exit code for a store with damaged manifests, as that of `check`.
const DAMAGED: u8 = 2;

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
    /// Manifests that can't be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    damaged: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pruned: Option<PrunedReport>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct PrunedReport {
    objects: u64,
    bytes: u64,
    unfinished: Vec<String>,
    /// Objects that nothing names but perhaps a manifest that can't be read.
    spared_objects: u64,
    spared_bytes: u64,
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
            &format!("objects of an unfinished backup by {by} stay (--break-lock, if it was interrupted)"),
        );
    }
    tell_damaged(context, &forgotten.damaged);
    if let Some(Pruned { spared_objects: objects @ 1.., spared_bytes: bytes, .. }) = &pruned {
        stderr::tell(
            context.dialect,
            &format!(
                "{objects} objects of {bytes} bytes that no readable point names stay: a manifest that can't be read may name \
                 them"
            ),
        );
    }
    let code = if forgotten.damaged.is_empty() { 0 } else { DAMAGED };
    if args.quiet {
        return Ok(code);
    }
    let report = Report {
        removed: forgotten.removed,
        kept: forgotten.kept,
        damaged: texts(&forgotten.damaged),
        pruned: pruned.map(|pruned| PrunedReport {
            objects: pruned.objects,
            bytes: pruned.bytes,
            unfinished: pruned.unfinished,
            spared_objects: pruned.spared_objects,
            spared_bytes: pruned.spared_bytes,
        }),
    };
    stdout::print(&match args.output {
        OutputFormat::Human => human_text(&report),
        OutputFormat::Json => json::to_text(context.dialect, &report)?,
    })?;
    Ok(code)
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
