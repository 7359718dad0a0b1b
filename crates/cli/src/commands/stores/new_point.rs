//! The next point of a store: made, and published.

mod base;

use self::base::{Base, Choice, Marks, choose, marks, stand_on};
use super::point_options::PointOptions;
use super::shared::{tell_damaged, texts};
use crate::failure::Failure;
use crate::output::stderr;
use crate::session::Session;
use serde::Serialize;
use zebu_disks::Program;
use zebu_engine::jobs::{BackupIdentity, BackupReport, BitmapUse, backup};
use zebu_engine::{CacheMode, ErrorKind, Image};
use zebu_store::points::{Claim, Keep, Layer, Point, PointMoment, PointStore, PointsErrorKind};

/// How often a point is begun anew because its base went meanwhile.
const TRIES: u32 = 5;

/// The file of hashes of a layer that is being made.
const HASHES: &str = "layer.hashes";

/// How a point came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    /// All of the disk was read and stored.
    Full,
    /// Only marks of the bitmap were read.
    Bitmap,
    /// All of the disk was read, and what differs from the last point stored.
    Scan,
}

impl Way {
    /// The file of a layer that is being made so. One that was begun another way is none to go on with.
    fn file(self) -> &'static str {
        match self {
            Self::Full => "full.qcow2",
            Self::Bitmap => "increment.qcow2",
            Self::Scan => "compared.qcow2",
        }
    }
}

/// A point whose layer is in the store, and that is not published yet.
pub(crate) struct Unpublished {
    made: Made,
    claim: Claim,
}

/// A point that was made.
pub(crate) struct Made {
    pub(crate) report: BackupReport,
    pub(crate) point: Point,
    pub(crate) way: Way,
    /// Why it is not by the bitmap, or not on the last point.
    pub(crate) reason: Option<String>,
    /// Manifests of other points that can't be read.
    pub(crate) damaged: Vec<String>,
}

/// The end of what was to follow a point that is published.
#[derive(Default)]
pub(crate) struct Followed {
    pub(crate) forgotten: Vec<String>,
    /// Manifests of other points that can't be read, if it was looked for them.
    pub(crate) damaged: Option<Vec<String>>,
    /// Why not all is done.
    pub(crate) failed: Option<String>,
}

impl Unpublished {
    /// Makes the layer of the next point of a store.
    pub(crate) fn make(
        options: &PointOptions,
        session: &Session,
        store: &PointStore,
        image: &Image,
    ) -> Result<Self, Failure> {
        store.limit_sending(options.layer.control.rate_limit);
        let mut tries = 1;
        loop {
            let (points, damaged) = store.points()?;
            if tries == 1 {
                tell_damaged(session.context(), &damaged);
            }
            let choice = choose(options, session, store, image, points)?;
            let bitmap = options.layer.bitmap.as_deref();
            let bitmap = bitmap.map(|bitmap| marks(options, image, bitmap, &choice)).transpose()?;
            let mut claim = match store.claim(choice.base.as_ref().map(|base| &base.point)) {
                Err(error) if error.kind() == PointsErrorKind::Busy && tries < TRIES => {
                    tries += 1;
                    continue;
                }
                claim => claim?,
            };
            let making = Making { options, session, store, image };
            return match making.run(choice, bitmap, &mut claim) {
                Ok(made) => Ok(Self { made: Made { damaged: texts(&damaged), ..made }, claim }),
                Err(failure) => {
                    claim.end();
                    Err(failure)
                }
            };
        }
    }

    /// Publishes the point.
    pub(crate) fn publish(self, dialect: Program, store: &PointStore) -> Result<Made, Failure> {
        let Self { mut made, claim } = self;
        let lost = |key: &str| {
            let came_first = "another backup came first; this one is published after it";
            stderr::tell(dialect, &format!("{}: {key}: {came_first}", store.name()));
        };
        let published = store.publish(made.point.clone(), lost);
        claim.end();
        made.point = published?;
        Ok(made)
    }

    /// Leaves it unpublished: the next prune removes its layer.
    pub(crate) fn give_up(self) {
        self.claim.end();
    }
}

/// Forgets other points by rules, if there are any.
pub(crate) fn follow(store: &PointStore, keep: &Keep) -> Followed {
    if keep.is_empty() {
        return Followed::default();
    }
    match store.forget(keep, None) {
        Ok(forgotten) => {
            let damaged = texts(&forgotten.damaged);
            let failed = damaged
                .first()
                .map(|first| format!("the rules do not count a point that can't be read: {first}"));
            Followed { forgotten: forgotten.removed, damaged: Some(damaged), failed }
        }
        Err(error) => {
            Followed { failed: Some(format!("points were not forgotten: {error}")), ..Followed::default() }
        }
    }
}

/// A layer that was made, or why it has to be made another way.
enum Tried {
    Made(BackupReport),
    /// The bitmap does not tell the truth.
    NotByBitmap(String),
    /// The base can't be used.
    NotOnBase(String),
}

/// The making of a point.
struct Making<'a> {
    options: &'a PointOptions,
    session: &'a Session,
    store: &'a PointStore,
    image: &'a Image,
}

impl Making<'_> {
    /// Makes the point, by the bitmap if that tells, else on the base if that can be, else a full one.
    fn run(&self, choice: Choice, bitmap: Option<Marks>, claim: &mut Claim) -> Result<Made, Failure> {
        let Choice { mut base, mut reason, .. } = choice;
        let mut way = if base.is_some() { Way::Scan } else { Way::Full };
        match &bitmap {
            Some(Marks::Tell) => way = Way::Bitmap,
            Some(Marks::BeginAnew(why) | Marks::LeftAlone(why)) if way == Way::Scan => {
                reason = Some(why.clone());
            }
            Some(Marks::LeftAlone(why)) => stderr::tell(self.session.dialect(), why),
            _ => {}
        }
        let is_left_alone = matches!(bitmap, Some(Marks::LeftAlone(_)));
        let bitmap = self.options.layer.bitmap.clone().filter(|_| !is_left_alone);
        loop {
            match self.attempt(way, base.as_ref(), bitmap.clone(), claim)? {
                Tried::Made(report) => {
                    let layer =
                        claim.add(&claim.directory().join(way.file()), &claim.directory().join(HASHES))?;
                    return Ok(self.point(report, layer, way, reason, base));
                }
                Tried::NotByBitmap(why) => {
                    reason = Some(format!("{why}; it begins anew"));
                    way = Way::Scan;
                }
                Tried::NotOnBase(why) => {
                    let name = base.take().map(|base| base.point.name).unwrap_or_default();
                    reason = Some(format!("a new point can't stand on point {name}: {why}"));
                    way = Way::Full;
                }
            }
        }
    }

    fn attempt(
        &self,
        way: Way,
        base: Option<&Base>,
        bitmap: Option<String>,
        claim: &Claim,
    ) -> Result<Tried, Failure> {
        let (session, image) = (self.session, self.image);
        let mut options = self
            .options
            .layer
            .clone()
            .target(claim.directory().join(way.file()))
            .cache(CacheMode::Writeback)
            .manifest(claim.directory().join(HASHES))
            .identity(BackupIdentity::New)
            .bitmap(bitmap);
        let mut files = None;
        if let Some(base) = base {
            match stand_on(session, self.store, claim.directory(), &base.point, &mut options)? {
                Ok(found) => files = Some(found),
                Err(reason) => return Ok(Tried::NotOnBase(reason)),
            }
        }
        options.bitmap_use = if way == Way::Bitmap { BitmapUse::Believe } else { BitmapUse::Restart };
        let worker = session.worker();
        let error = match worker.block_on(backup(worker, image, &options)) {
            Ok(report) => return Ok(Tried::Made(report)),
            Err(error) => error,
        };
        let is_source = error.image() == Some(image.path());
        if way == Way::Bitmap && is_source && error.kind() == ErrorKind::InvalidArgument {
            return Ok(Tried::NotByBitmap(error.message().to_owned()));
        }
        if files.is_some_and(|files| files.are_why(self.store, &error)) {
            return Ok(Tried::NotOnBase(error.to_string()));
        }
        Err(if is_source {
            Failure::during("error while reading the source", &error)
        } else {
            Failure::during(&format!("error while making a point of '{}'", self.store.name()), &error)
        })
    }

    fn point(
        &self,
        report: BackupReport,
        layer: Layer,
        way: Way,
        reason: Option<String>,
        base: Option<Base>,
    ) -> Made {
        let (parent, mut layers) = match base {
            Some(base) => (Some(base.point.name), base.point.layers),
            None => (None, Vec::new()),
        };
        let added = if layers.contains(&layer) { 0 } else { layer.size + layer.hashes_size };
        if added > 0 {
            layers.insert(0, layer);
        }
        let moment = self.options.moment.as_ref();
        let point = Point {
            version: 0,
            sequence: 0,
            name: String::new(),
            time: moment.map_or(0, PointMoment::time),
            moment: moment.map(|moment| moment.id().to_owned()),
            disk_size: self.image.virtual_size(),
            cluster_size: self.options.layer.cluster_size,
            parent,
            added,
            layers,
        };
        Made { report, point, way, reason, damaged: Vec::new() }
    }
}
