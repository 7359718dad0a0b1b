//! The point that a new one stands on, and whether a bitmap shows what changed since.

use super::super::point_options::{BaseChoice, MissingBitmap, PointOptions};
use super::super::shared::open_layers;
use crate::failure::Failure;
use crate::session::Session;
use std::path::{Path, PathBuf};
use zebu_engine::jobs::{BackupOptions, PreviousBackup};
use zebu_engine::{Access, BackupId, ErrorKind, Image};
use zebu_store::points::{LAYERS_AT_MOST, Point, PointStore, PointsErrorKind, PointsPlace};

/// The point that the next one stands on.
pub(super) struct Base {
    pub(super) point: Point,
    id: Option<BackupId>,
}

/// The choice of a base.
#[derive(Default)]
pub(super) struct Choice {
    pub(super) base: Option<Base>,
    /// Why there is none.
    pub(super) reason: Option<String>,
    /// Backups of which the newest point is made.
    ids: Vec<BackupId>,
}

/// Looks for the point to go on from, among `points` from the oldest on.
pub(super) fn choose(
    options: &PointOptions,
    session: &Session,
    store: &PointStore,
    image: &Image,
    mut points: Vec<Point>,
) -> Result<Choice, Failure> {
    let Some(point) = points.pop() else { return Ok(Choice::default()) };
    let name = point.name.clone();
    let unfit = |reason: String| {
        Some(format!(
            "a new point can't stand on point {name}: {reason} ('zebu verify' lists the points that need it)"
        ))
    };
    let without = |reason| Ok(Choice { reason, ..Choice::default() });
    if let Some(reason) = store.unfit(&point)? {
        return without(unfit(reason));
    }
    let (found, _) = match open_layers(session.context(), session.worker(), store, &point.layers) {
        Ok(opened) => opened,
        Err(error) => return without(unfit(error.to_string())),
    };
    let id = found.backup_id();
    let ids = std::iter::successors(Some(found.clone()), Image::backing);
    let ids = ids.filter_map(|image| image.backup_id()).collect();
    // Nothing was written.
    let _ = session.close(&found, Access::ReadOnly);
    let (size, clusters) = (image.virtual_size(), point.cluster_size);
    let reason = if options.base == BaseChoice::None {
        Some("--full asks for it".to_owned())
    } else if point.disk_size != size {
        Some(format!("the disk has {size} bytes, that of point {name} {}", point.disk_size))
    } else if clusters != options.layer.cluster_size {
        Some(format!("point {name} has clusters of {clusters} bytes"))
    } else if point.layers.len() >= LAYERS_AT_MOST {
        let count = point.layers.len();
        Some(format!("point {name} stands on {count} layers ('zebu compact' merges them)"))
    } else {
        None
    };
    let base = reason.is_none().then_some(Base { point, id });
    Ok(Choice { base, reason, ids })
}

/// The use of a bitmap for a point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Marks {
    /// It tells what changed since the base.
    Tell,
    /// It begins anew with the point; the reason, where it could have told.
    BeginAnew(String),
    /// It is left as it is; the reason.
    LeftAlone(String),
}

/// Whether the bitmap tells what changed since the base.
///
/// # Errors
/// There is none of that name, and another one goes on from this store: probably that is meant.
pub(super) fn marks(
    options: &PointOptions,
    image: &Image,
    bitmap: &str,
    choice: &Choice,
) -> Result<Marks, Failure> {
    let all = image.bitmaps();
    let Some(found) = all.iter().find(|found| found.name == bitmap) else {
        let other = all.iter().find(|other| other.base.is_some_and(|base| choice.ids.contains(&base)));
        return match other {
            Some(other) if options.missing_bitmap == MissingBitmap::Refuse => Err(Failure::new(format!(
                "'{}' has no bitmap '{bitmap}', but bitmap '{}' goes on from the last point: give that name, or --create-bitmap for \
                 another one",
                image.path().display(),
                other.name
            ))),
            _ => Ok(Marks::BeginAnew(format!("there was no bitmap '{bitmap}', which begins now"))),
        };
    };
    if found.in_use {
        let reason = format!("bitmap '{bitmap}' was inconsistent (after a crash), and begins anew");
        return Ok(Marks::BeginAnew(reason));
    }
    if !found.auto {
        return Ok(Marks::LeftAlone(format!(
            "bitmap '{bitmap}' does not record writes (it is disabled), and is left alone: 'zebu bitmap --enable' has it record"
        )));
    }
    match &choice.base {
        Some(base) if found.base.is_some() && found.base == base.id => Ok(Marks::Tell),
        Some(base) => Ok(Marks::BeginAnew(format!(
            "bitmap '{bitmap}' does not go on from point {}, and begins anew",
            base.point.name
        ))),
        None => Ok(Marks::BeginAnew(format!("bitmap '{bitmap}' begins anew"))),
    }
}

/// The files of the base, by which errors are told to be about it.
pub(super) struct BaseFiles(Vec<PathBuf>);

impl BaseFiles {
    /// Whether the base can't be used because of this error. An object store may answer another time.
    pub(super) fn are_why(&self, store: &PointStore, error: &zebu_engine::Error) -> bool {
        let is_here = matches!(store.name().place(), PointsPlace::Folder(_));
        let is_lasting = match error.kind() {
            ErrorKind::Cancelled | ErrorKind::Locked | ErrorKind::NoSpace => false,
            ErrorKind::Io => is_here,
            _ => true,
        };
        is_lasting && error.image().is_some_and(|image| self.0.iter().any(|file| file.as_path() == image))
    }
}

/// Has the backup be an increment on a point, or says why it can't be.
pub(super) fn stand_on(
    session: &Session,
    store: &PointStore,
    scratch: &Path,
    point: &Point,
    options: &mut BackupOptions,
) -> Result<Result<BaseFiles, String>, Failure> {
    let Some(top) = point.top() else { return Ok(Err("it has no layers".to_owned())) };
    let hashes = match store.hashes_file(top, scratch) {
        Ok(hashes) => hashes,
        Err(error) if error.kind() == PointsErrorKind::Damaged => return Ok(Err(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let chain = session.context().disks.remote.point_chain(store, &point.layers)?;
    let mut files = vec![hashes.clone(), chain.top.clone()];
    files.extend(chain.below.iter().cloned());
    let previous = PreviousBackup::new(chain.top)
        .below(chain.below)
        .remote(chain.remote)
        .name(top.file_name())
        .manifest(hashes);
    options.previous = Some(previous);
    Ok(Ok(BaseFiles(files)))
}
