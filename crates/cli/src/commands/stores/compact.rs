//! `zebu compact`: runs of layers that no point needs alone become one.

use super::shared::{open_layers, open_store, parse_whole_store};
use crate::arguments::{EngineArgs, NetworkArgs};
use crate::failure::Failure;
use crate::output::{json, stderr, stdout};
use crate::session::Session;
use crate::values::OutputFormat;
use crate::watch::{ProgressArg, Watch};
use serde::Serialize;
use std::collections::HashSet;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use zebu_disks::Context;
use zebu_engine::jobs::{BackupIdentity, BackupOptions, PreviousBackup, backup};
use zebu_engine::{CacheMode, Compression};
use zebu_store::points::{Claim, Layer, Point, PointName, PointStore, differences};

/// Arguments of `zebu compact`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompactArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Leave points alone that stand on at most so many layers
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    depth: u32,

    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    network: NetworkArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// store:DIR/NAME or store:s3://BUCKET/PREFIX/NAME
    #[arg(value_name = "STORE", value_parser = parse_whole_store)]
    store: PointName,
}

#[derive(Default, Serialize)]
struct Report {
    /// Layers that were made.
    made: usize,
    /// Layers that they take the place of.
    merged: usize,
    /// Bytes that were added; a prune frees the others.
    added: u64,
    /// Points that have other layers now.
    points: usize,
    /// Layers that were not merged, because one of them or one below them is damaged.
    damaged: usize,
}

/// The exit code for a store with damage, as that of `check`.
const DAMAGED: u8 = 2;

/// A run of layers of a point: the first shows the disk of a point, the others that of none.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    point: Point,
    start: usize,
    end: usize,
}

impl Run {
    fn layers(&self) -> &[Layer] {
        &self.point.layers[self.start..self.end]
    }
}

/// The first run that can be merged, of a point that stands on more than `depth` layers.
fn next_run(points: &[Point], depth: usize, done: &HashSet<String>) -> Option<Run> {
    let tops: HashSet<&str> = points.iter().filter_map(Point::top).map(|top| top.sha256.as_str()).collect();
    let is_top = |layer: &Layer| tops.contains(layer.sha256.as_str());
    for point in points.iter().filter(|point| point.layers.len() > depth) {
        let mut start = 0;
        while start < point.layers.len() {
            let below = point.layers[start + 1..].iter().take_while(|layer| !is_top(layer)).count();
            if below > 0 && !done.contains(&point.layers[start].sha256) {
                return Some(Run { point: point.clone(), start, end: start + 1 + below });
            }
            start += 1 + below;
        }
    }
    None
}

/// The layers with `new` in place of the run, if they have it.
fn replaced(layers: &[Layer], run: &[Layer], new: &Layer) -> Option<Vec<Layer>> {
    let at = layers.windows(run.len()).position(|some| some == run)?;
    let (above, rest) = layers.split_at(at);
    Some(above.iter().chain([new]).chain(&rest[run.len()..]).cloned().collect())
}

/// Runs the command.
pub(crate) fn run(args: &CompactArgs, context: &Context) -> Result<u8, Failure> {
    args.network.apply(&context.disks);
    let session = Session::start(context, &args.engine, None)?;
    let mut watch = Watch::start(args.progress.beside(args.output).mode(args.quiet))?;
    let store = open_store(context, &args.store)?;
    let mut report = Report::default();
    let mut done = HashSet::new();
    loop {
        let (points, damaged) = store.points()?;
        if let Some(error) = damaged.first() {
            let reason = format!("nothing is merged while a manifest is damaged: {error}");
            return Err(Failure::new(reason).with_exit(DAMAGED));
        }
        let Some(run) = next_run(&points, args.depth as usize, &done) else { break };
        done.insert(run.layers()[0].sha256.clone());
        if let Some(key) = store.known_damage()?.of(&run.point.layers[run.start..]) {
            report.damaged += run.layers().len();
            let (count, name) = (run.layers().len(), &run.point.name);
            let told = format!(
                "{}: {count} layers of point {name} are not merged: {key}: 'zebu verify' found it damaged",
                store.name()
            );
            stderr::tell(context.dialect, &told);
            continue;
        }
        let mut claim = store.claim(Some(&run.point))?;
        let merged = merge(&session, &store, &mut claim, &run, &watch);
        let published = merged.and_then(|new| publish(context, &store, &run, &new, &mut report));
        claim.end();
        published?;
    }
    watch.finish();
    let code = if report.damaged == 0 { 0 } else { DAMAGED };
    if !args.quiet {
        stdout::print(&match args.output {
            OutputFormat::Human if report.merged == 0 => {
                format!("no point has more than {} layers that can be merged\n", args.depth)
            }
            OutputFormat::Human => format!(
                "{} layers were merged into {} of {} bytes, on which {} points stand; 'zebu forget --prune' frees the others\n",
                report.merged, report.made, report.added, report.points
            ),
            OutputFormat::Json => json::to_text(context.dialect, &report)?,
        })?;
    }
    Ok(code)
}

/// Makes the layer that takes the place of a run.
fn merge(
    session: &Session,
    store: &PointStore,
    claim: &mut Claim,
    run: &Run,
    watch: &Watch,
) -> Result<Layer, Failure> {
    let (context, worker) = (session.context(), session.worker());
    let failed = |error: &zebu_engine::Error| {
        Failure::during(&format!("error while merging layers of '{}'", store.name()), error)
    };
    let (image, _) = open_layers(context, worker, store, &run.point.layers[run.start..])
        .map_err(|error| failed(&error))?;
    let target = claim.directory().join("merged.qcow2");
    let hashes = claim.directory().join("merged.hashes");
    let mut options = BackupOptions::new(&target)
        .cache(CacheMode::Writeback)
        .cluster_size(run.point.cluster_size)
        .compression(Compression::Zstd)
        .manifest(hashes.clone())
        .identity(image.backup_id().map_or(BackupIdentity::New, BackupIdentity::Same))
        .control(watch.control());
    let below = &run.point.layers[run.end..];
    if let Some(base) = below.first() {
        let chain = context.disks.remote.point_chain(store, below)?;
        options = options.previous(
            PreviousBackup::new(chain.top)
                .below(chain.below)
                .remote(chain.remote)
                .name(base.file_name())
                .manifest(store.hashes_file(base, claim.directory())?),
        );
    }
    let made = worker.block_on(async {
        let made = Box::pin(backup(worker, &image, &options)).await;
        // Nothing was written to it.
        let _ = image.close(worker).await;
        made
    });
    made.map_err(|error| failed(&error))?;
    check_same(store, claim.directory(), &run.layers()[0], &hashes)?;
    Ok(claim.add(&target, &hashes)?)
}

/// Refuses layers that no longer show what their hashes say: merged, they would look whole.
fn check_same(store: &PointStore, scratch: &Path, top: &Layer, hashes: &Path) -> Result<(), Failure> {
    let before = store.hashes_file(top, scratch)?;
    let open = |path: &Path| {
        let file = File::open(path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        Ok::<_, Failure>(BufReader::new(file))
    };
    let mut first = None;
    differences(open(&before)?, open(hashes)?, |range| {
        first.get_or_insert(range.offset);
    })
    .map_err(|reason| Failure::new(format!("{}: {}: {reason}", store.name(), top.hashes_key())))?;
    match first {
        None => Ok(()),
        Some(offset) => Err(Failure::new(format!(
            "{}: {}: its data at offset {offset} does not match its hashes: nothing was merged ('zebu \
             verify' lists the damaged points)",
            store.name(),
            top.key()
        ))),
    }
}

/// Has all points that stand on the run stand on the new layer.
fn publish(
    context: &Context,
    store: &PointStore,
    run: &Run,
    new: &Layer,
    report: &mut Report,
) -> Result<(), Failure> {
    report.made += 1;
    report.merged += run.layers().len();
    report.added += new.size + new.hashes_size;
    for point in store.points()?.0 {
        let Some(layers) = replaced(&point.layers, run.layers(), new) else { continue };
        if store.replace_layers(&point, layers)? {
            report.points += 1;
        } else {
            stderr::tell(
                context.dialect,
                &format!(
                    "{}: point {} was changed or forgotten meanwhile, and is left alone",
                    store.name(),
                    point.name
                ),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(name: char) -> Layer {
        Layer { sha256: name.to_string(), size: 1, hashes: name.to_string(), hashes_size: 1 }
    }

    fn point(sequence: u64, layers: &str) -> Point {
        Point {
            version: 2,
            sequence,
            name: format!("p-{sequence}"),
            time: 0,
            disk_size: 512,
            cluster_size: 512,
            parent: None,
            moment: None,
            added: 0,
            layers: layers.chars().map(layer).collect(),
        }
    }

    fn run_of(points: &[Point], depth: usize) -> Option<(u64, usize, usize)> {
        next_run(points, depth, &HashSet::new()).map(|run| (run.point.sequence, run.start, run.end))
    }

    #[test]
    fn runs_are_found_between_the_tops_of_points() {
        assert_eq!(run_of(&[point(1, "a"), point(2, "ba"), point(3, "cba")], 1), None);
        // 2 and 3 were forgotten.
        assert_eq!(run_of(&[point(1, "a"), point(4, "dcba")], 1), Some((4, 0, 3)));
        assert_eq!(run_of(&[point(1, "a"), point(4, "dcba")], 4), None);
        // The oldest ones were.
        assert_eq!(run_of(&[point(3, "cba"), point(4, "dcba")], 1), Some((3, 0, 3)));
        assert_eq!(run_of(&[point(3, "cba"), point(4, "dcba")], 3), Some((4, 1, 4)));
        assert_eq!(next_run(&[point(3, "cba")], 1, &HashSet::from(["c".to_owned()])), None);
    }

    #[test]
    fn a_run_is_replaced_wherever_it_stands() {
        let run: Vec<_> = "cb".chars().map(layer).collect();
        let names = |layers: &str| {
            let layers: Vec<_> = layers.chars().map(layer).collect();
            replaced(&layers, &run, &layer('N'))
                .map(|new| new.iter().map(|layer| layer.sha256.clone()).collect::<String>())
        };
        assert_eq!(names("dcba").as_deref(), Some("dNa"));
        assert_eq!(names("cb").as_deref(), Some("N"));
        assert_eq!(names("cab"), None);
        assert_eq!(names("c"), None);
    }
}
