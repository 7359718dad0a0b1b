//! `zebu points`: the points in time of a store.

use super::shared::{open_store, parse_whole_store, tell_damaged, texts};
use crate::arguments::NetworkArgs;
use crate::failure::Failure;
use crate::output::units::size_short;
use crate::output::{json, stdout};
use crate::values::OutputFormat;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write as _;
use zebu_disks::Context;
use zebu_store::points::{KnownDamage, Point, PointName, readable_time};

/// The exit code for a store with damage, as that of `check`.
const DAMAGED: u8 = 2;

/// Arguments of `zebu points`.
#[derive(Debug, clap::Args)]
pub(crate) struct PointsArgs {
    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    network: NetworkArgs,

    /// store:DIR/NAME or store:s3://BUCKET/PREFIX/NAME
    #[arg(value_name = "STORE", value_parser = parse_whole_store)]
    store: PointName,
}

#[derive(Serialize)]
struct Report {
    points: Vec<Line>,
    /// Manifests that can't be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    manifests: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Line {
    name: String,
    sequence: u64,
    time: String,
    /// The id of the moment that it shares with points of other disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    moment: Option<String>,
    disk_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    layers: usize,
    added: u64,
    total: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<String>,
    /// The object that the last verification found damaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    damaged: Option<String>,
}

/// The findings of verifications.
struct Verified {
    times: HashMap<String, u64>,
    damage: KnownDamage,
}

/// Runs the command.
pub(crate) fn run(args: &PointsArgs, context: &Context) -> Result<u8, Failure> {
    args.network.apply(&context.disks);
    let store = open_store(context, &args.store)?;
    let (points, damaged) = store.points()?;
    let verified = Verified { times: store.verified()?, damage: store.known_damage()? };
    tell_damaged(context, &damaged);
    let is_whole =
        damaged.is_empty() && points.iter().all(|point| verified.damage.of(&point.layers).is_none());
    stdout::print(&match args.output {
        OutputFormat::Human => human_text(&points, &verified),
        OutputFormat::Json => {
            let points = points.iter().map(|point| line(point, &verified)).collect();
            json::to_text(context.dialect, &Report { points, manifests: texts(&damaged) })?
        }
    })?;
    Ok(if is_whole { 0 } else { DAMAGED })
}

fn line(point: &Point, verified: &Verified) -> Line {
    Line {
        name: point.name.clone(),
        sequence: point.sequence,
        time: readable_time(point.time),
        moment: point.moment.clone(),
        disk_size: point.disk_size,
        parent: point.parent.clone(),
        layers: point.layers.len(),
        added: point.added,
        total: point.total(),
        verified: verified.times.get(&point.name).map(|time| readable_time(*time)),
        damaged: verified.damage.of(&point.layers),
    }
}

fn human_text(points: &[Point], verified: &Verified) -> String {
    let mut text = format!(
        "{:<24} {:<20} {:>10} {:>10} {:>10} {:>6} {}\n",
        "POINT", "TIME", "DISK", "ADDED", "TOTAL", "LAYERS", "VERIFIED"
    );
    for point in points {
        let time =
            verified.times.get(&point.name).map_or_else(|| "-".to_owned(), |time| readable_time(*time));
        let verified = verified.damage.of(&point.layers).map_or(time, |key| format!("damaged: {key}"));
        let (disk, added, total) =
            (size_short(point.disk_size), size_short(point.added), size_short(point.total()));
        let _ = writeln!(
            text,
            "{:<24} {:<20} {disk:>10} {added:>10} {total:>10} {:>6} {verified}",
            point.name,
            readable_time(point.time),
            point.layers.len(),
        );
    }
    text
}
