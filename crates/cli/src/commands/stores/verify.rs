//! `zebu verify` of a store: every object, every point.

use super::shared::{open_layers, open_store};
use crate::arguments::InspectArgs;
use crate::failure::Failure;
use crate::output::{json, stderr, stdout};
use crate::session::Session;
use crate::temporary_directory::TemporaryDirectory;
use crate::values::OutputFormat;
use crate::watch::{ProgressArg, Watch};
use serde::Serialize;
use std::collections::HashMap;
use zebu_disks::Context;
use zebu_engine::jobs::{VerifyOptions, verify};
use zebu_store::points::{KnownDamage, ObjectState, Point, PointName, PointStore, PointsError};

/// The exit code for a store that is damaged, as that of `check`.
const DAMAGED: u8 = 2;
/// Errors of a point that are told one by one.
const MOST_TOLD: usize = 16;

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    points: Vec<Verdict>,
    /// Manifests that can't be read.
    manifests: Vec<String>,
    objects: usize,
    bytes: u64,
    damaged: usize,
    /// Why the result could not be noted in the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_noted: Option<String>,
}

#[derive(Serialize)]
struct Verdict {
    name: String,
    status: &'static str,
    errors: Vec<String>,
}

/// Objects that were looked at, by their keys.
#[derive(Default)]
struct Objects {
    states: HashMap<String, ObjectState>,
    bytes: u64,
}

impl Objects {
    fn state(&mut self, store: &PointStore, key: &str, size: u64) -> Result<ObjectState, Failure> {
        if let Some(state) = self.states.get(key) {
            return Ok(*state);
        }
        let state = store.examine(key, size)?;
        self.states.insert(key.to_owned(), state);
        self.bytes += size;
        Ok(state)
    }
}

/// Verifies the store, or one point of it.
pub(crate) fn run(
    name: &PointName,
    args: &InspectArgs,
    progress: ProgressArg,
    quiet: bool,
    context: &Context,
) -> Result<u8, Failure> {
    args.image.network.apply(&context.disks);
    let session = Session::start(context, &args.engine, None)?;
    let mut watch = Watch::start(progress.beside(args.output).mode(quiet))?;
    let store = open_store(context, name)?;
    let (mut points, damaged) = store.points()?;
    if let Some(only) = name.point() {
        store.point(Some(only))?;
        points.retain(|point| point.name == only);
    }
    let mut objects = Objects::default();
    let mut report = Report {
        points: Vec::new(),
        manifests: damaged.iter().map(ToString::to_string).collect(),
        objects: 0,
        bytes: 0,
        damaged: damaged.len(),
        not_noted: None,
    };
    let known = store.known_damage()?;
    for point in &points {
        let errors = errors_of(&session, &store, point, &mut objects, &watch)?;
        report.damaged += usize::from(!errors.is_empty());
        // A store that can only be read is verified all the same.
        if report.not_noted.is_none()
            && let Err(error) = note(&store, point, &objects, &known, errors.is_empty())
        {
            report.not_noted = Some(error.to_string());
        }
        let status = if errors.is_empty() { "clean" } else { "damaged" };
        report.points.push(Verdict { name: point.name.clone(), status, errors });
    }
    watch.finish();
    (report.objects, report.bytes) = (objects.states.len(), objects.bytes);
    tell(context, args.output, quiet, &report)?;
    Ok(if report.damaged == 0 { 0 } else { DAMAGED })
}

/// Notes the result for a point: what is damaged, no new point stands on.
fn note(
    store: &PointStore,
    point: &Point,
    objects: &Objects,
    known: &KnownDamage,
    is_whole: bool,
) -> Result<(), PointsError> {
    let (mut has_damage, was_damaged) = (false, known.of(&point.layers).is_some());
    for key in point.layers.iter().flat_map(|layer| [layer.key(), layer.hashes_key()]) {
        match objects.states.get(&key) {
            Some(ObjectState::Whole) if was_damaged && is_whole => store.note_whole(&key)?,
            None | Some(ObjectState::Whole) => {}
            Some(_) => {
                has_damage = true;
                store.note_damaged(&key)?;
            }
        }
    }
    if is_whole {
        return store.note_verified(point);
    }
    // Each object is what its name says, and together they are not the disk.
    if let (Some(top), false) = (point.top(), has_damage) {
        store.note_damaged(&top.key())?;
    }
    store.forget_verified(point)
}

/// Errors of a point.
fn errors_of(
    session: &Session,
    store: &PointStore,
    point: &Point,
    objects: &mut Objects,
    watch: &Watch,
) -> Result<Vec<String>, Failure> {
    let mut errors = Vec::new();
    for layer in &point.layers {
        for (key, size) in [(layer.key(), layer.size), (layer.hashes_key(), layer.hashes_size)] {
            if watch.cancel().is_cancelled() {
                return Err(Failure::interrupted());
            }
            let state = objects.state(store, &key, size)?;
            if state != ObjectState::Whole && errors.len() < MOST_TOLD {
                errors.push(format!("{}: point {}: {key}: {state}", store.name(), point.name));
            }
        }
    }
    let Some(top) = point.top().filter(|_| errors.is_empty()) else { return Ok(errors) };
    let context = session.context();
    let worker = session.worker();
    let told = |reason: String| format!("{}: point {}: {reason}", store.name(), point.name);
    let scratch = TemporaryDirectory::new()?;
    let hashes = store.hashes_file(top, scratch.path())?;
    let image = match open_layers(context, worker, store, &point.layers) {
        Ok((image, _)) => image,
        Err(error) => return Ok(vec![told(error.to_string())]),
    };
    let size = image.virtual_size();
    let options = VerifyOptions::default().manifest(hashes).control(watch.control());
    let verified = worker.block_on(async {
        let verified = verify(worker, &image, &options).await;
        // Nothing was written.
        let _ = image.close(worker).await;
        verified
    });
    match verified {
        Ok(report) => {
            let ranges = report.bad_ranges.iter().take(MOST_TOLD);
            errors.extend(ranges.map(|range| {
                told(format!("{} bytes at offset {}: {}", range.len, range.offset, range.error))
            }));
        }
        Err(error) if error.kind() == zebu_engine::ErrorKind::Cancelled => return Err(Failure::interrupted()),
        Err(error) => errors.push(told(error.to_string())),
    }
    if size != point.disk_size {
        errors.push(told(format!("its disk has {size} bytes, and its manifest says {}", point.disk_size)));
    }
    Ok(errors)
}

fn tell(context: &Context, output: OutputFormat, quiet: bool, report: &Report) -> Result<(), Failure> {
    for error in report.manifests.iter().chain(report.points.iter().flat_map(|point| &point.errors)) {
        stderr::tell(context.dialect, error);
    }
    if let Some(reason) = &report.not_noted {
        stderr::tell(
            context.dialect,
            &format!("the time of this verification could not be written to the store: {reason}"),
        );
    }
    if quiet {
        return Ok(());
    }
    stdout::print(&match output {
        OutputFormat::Human => {
            let mut text = String::new();
            text.extend(report.points.iter().map(|point| format!("{}: {}\n", point.name, point.status)));
            text += &format!(
                "{} objects of {} bytes; {} points or manifests are damaged\n",
                report.objects, report.bytes, report.damaged
            );
            text
        }
        OutputFormat::Json => json::to_text(context.dialect, report)?,
    })
}
