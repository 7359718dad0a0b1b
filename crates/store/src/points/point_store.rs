//! A store: its points, and the objects that they name.

use super::calendar::compact_time;
use super::claim::Claim;
use super::error::{PointsError, PointsErrorKind};
use super::manifest::{Layer, Point, VERSION};
use super::name::{PointName, PointsPlace};
use super::object::Wrote;
use super::place::Place;
use super::sha::{Hasher, is_hash};
use super::unique::now;
use crate::name::StoreName;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use zebu_remote::http::HttpOptions;

/// The object that says that there is a store.
const MARK: &str = "zebu-store.json";
/// How often a new point is published anew because another came first.
const TRIES: u32 = 64;

/// The image of a layer, as something that can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layered {
    /// A file.
    File(PathBuf),
    /// An object.
    Object(StoreName),
}

/// The state of an object that a point names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectState {
    /// It has the bytes that its name says.
    Whole,
    /// It is not there.
    Missing,
    /// It is a link, or something else that is no regular file.
    NoFile,
    /// It has another length: bytes.
    Length(u64),
    /// It has other bytes.
    Differs,
}

impl fmt::Display for ObjectState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("it is whole"),
            Self::Missing => f.write_str("it is missing, and a point names it"),
            Self::NoFile => f.write_str("it is a link or no regular file, and a store has neither"),
            Self::Length(found) => write!(f, "it has {found} bytes, not as many as a point says"),
            Self::Differs => f.write_str("its bytes are not those that its name says"),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Marked {
    version: u32,
    kind: String,
}

/// A store of points.
#[derive(Debug, Clone)]
pub struct PointStore {
    pub(super) place: Place,
}

/// A manifest that can't be read.
pub(super) struct DamagedPoint {
    pub(super) key: String,
    /// That of its name; none: no point's manifest has such a name.
    sequence: Option<u64>,
    pub(super) error: PointsError,
}

impl DamagedPoint {
    fn new(place: &Place, key: &str, sequence: Option<u64>, reason: &str) -> Self {
        let remedy = match sequence {
            Some(sequence) => format!("'zebu forget {}@{sequence:08}' gives that point up", place.name),
            None => "remove it".to_owned(),
        };
        let error = place.damaged(key, &format!("{reason} ({remedy})"));
        Self { key: key.to_owned(), sequence, error }
    }

    /// Whether `name` is the number in its key, or ends with its sequence as its own name did.
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.sequence.is_some_and(|sequence| {
            name == format!("{sequence:08}") || name.ends_with(&format!("Z-{sequence}"))
        })
    }
}

/// Points of a store, and what is wrong with others.
pub(super) struct Found {
    pub(super) points: Vec<Point>,
    pub(super) damaged: Vec<DamagedPoint>,
}

impl PointStore {
    /// Opens a store that is there.
    ///
    /// # Errors
    /// There is none, it is of a newer version, or it can't be read.
    pub fn open(name: &PointName, http: &HttpOptions) -> Result<Self, PointsError> {
        let place = Place::open(name, http)?;
        if Self::is_there(&place)? {
            return Ok(Self { place });
        }
        let reason = "there is no store of points: 'zebu backup' makes it".to_owned();
        Err(place.failed("", (PointsErrorKind::NotFound, reason)))
    }

    /// Opens a store; `None`: it is not there, and can be made.
    ///
    /// # Errors
    /// As of [`PointStore::open`]; the folder holds something else.
    pub fn find(name: &PointName, http: &HttpOptions) -> Result<Option<Self>, PointsError> {
        let place = Place::open(name, http)?;
        if Self::is_there(&place)? {
            return Ok(Some(Self { place }));
        }
        if let Some(folder) = place.folder()
            && std::fs::read_dir(folder).is_ok_and(|mut entries| {
                // A store that was being made when it was cut off has its folders alone.
                entries
                    .any(|entry| entry.is_ok_and(|entry| !entry.file_type().is_ok_and(|kind| kind.is_dir())))
            })
        {
            let reason = "the folder holds something else: give another name".to_owned();
            return Err(place.failed("", (PointsErrorKind::Refused, reason)));
        }
        Ok(None)
    }

    /// Opens a store, which is made if it is not there.
    ///
    /// # Errors
    /// As of [`PointStore::find`]; it can't be made.
    pub fn open_or_create(name: &PointName, http: &HttpOptions) -> Result<Self, PointsError> {
        if let Some(store) = Self::find(name, http)? {
            return Ok(store);
        }
        let place = Place::open(name, http)?;
        place.prepare()?;
        let mark = Marked { version: VERSION, kind: "points".to_owned() };
        // Another may have been faster.
        place.create(MARK, &serde_json::to_vec(&mark).unwrap_or_default())?;
        Ok(Self { place })
    }

    fn is_there(place: &Place) -> Result<bool, PointsError> {
        let Some(found) = place.get(MARK)? else { return Ok(false) };
        match serde_json::from_slice::<Marked>(&found.bytes) {
            Ok(Marked { version: VERSION, .. }) => Ok(true),
            Ok(Marked { version, .. }) => {
                let reason =
                    format!("the store is of version {version} of the layout, and {VERSION} is known");
                Err(place.failed(MARK, (PointsErrorKind::Refused, reason)))
            }
            Err(_) => Err(place.damaged(MARK, "it is not what a store of points begins with")),
        }
    }

    /// Has bytes that are sent to a bucket keep to a rate, in bytes a second.
    pub fn limit_sending(&self, rate: Option<NonZeroU64>) {
        self.place.limit_sending(rate);
    }

    /// Its name.
    pub fn name(&self) -> &PointName {
        &self.place.name
    }

    pub(super) fn found(&self) -> Result<Found, PointsError> {
        let mut found = Found { points: Vec::new(), damaged: Vec::new() };
        for (name, _) in self.place.list("points")? {
            let key = format!("points/{name}");
            let sequence = name.strip_suffix(".json").and_then(|number| number.parse::<u64>().ok());
            let Some(sequence) = sequence.filter(|sequence| Point::key_of(*sequence) == key) else {
                let reason = "it is not the name of a point's manifest";
                found.damaged.push(DamagedPoint::new(&self.place, &key, None, reason));
                continue;
            };
            let point = match self.place.document(&key)? {
                Ok(Some(document)) => Point::parse(&document.bytes, sequence),
                // It was forgotten meanwhile.
                Ok(None) => continue,
                Err(reason) => Err(reason),
            };
            match point {
                Ok(point) => found.points.push(point),
                Err(reason) => {
                    found.damaged.push(DamagedPoint::new(&self.place, &key, Some(sequence), &reason));
                }
            }
        }
        found.points.sort_by_key(|point| point.sequence);
        Ok(found)
    }

    /// Its points, the oldest first, and what is wrong with manifests of others.
    ///
    /// # Errors
    /// The store can't be read.
    pub fn points(&self) -> Result<(Vec<Point>, Vec<PointsError>), PointsError> {
        let found = self.found()?;
        Ok((found.points, found.damaged.into_iter().map(|damaged| damaged.error).collect()))
    }

    /// The point of that name; `None` is the newest.
    ///
    /// # Errors
    /// There is none, or the store can't be read.
    pub fn point(&self, name: Option<&str>) -> Result<Point, PointsError> {
        let Found { points, damaged } = self.found()?;
        let count = points.len();
        let found = match name {
            Some(name) => points.into_iter().find(|point| point.name == name),
            // One that can't be read may be newer.
            None if !damaged.is_empty() => return Err(damaged[0].error.clone()),
            None => points.into_iter().next_back(),
        };
        found.ok_or_else(|| {
            let hint = damaged.first().map_or_else(String::new, |damaged| format!("; {}", damaged.error));
            let reason = match name {
                Some(name) => {
                    format!("there is no point '{name}' among its {count} ('zebu points' lists them){hint}")
                }
                None => "there are no points in it".to_owned(),
            };
            self.place.failed("", (PointsErrorKind::NotFound, reason))
        })
    }

    /// Claims the layers of a point, so that nobody removes them.
    ///
    /// # Errors
    /// The point was forgotten meanwhile, or a prune is about to remove a layer of it; the store's.
    pub fn claim(&self, point: Option<&Point>) -> Result<Claim, PointsError> {
        let claim = Claim::begin(&self.place, point.map_or(&[], |point| &point.layers))?;
        let Some(point) = point else { return Ok(claim) };
        let stays = match self.place.get(&point.key()) {
            Ok(Some(found)) => {
                Point::parse(&found.bytes, point.sequence).is_ok_and(|found| found.layers == point.layers)
            }
            Ok(None) => false,
            Err(error) => {
                claim.end();
                return Err(error);
            }
        };
        if stays {
            return Ok(claim);
        }
        claim.end();
        let reason = "it was forgotten or compacted meanwhile: try again".to_owned();
        Err(self.place.failed(&point.key(), (PointsErrorKind::Busy, reason)))
    }

    /// Publishes a point, whose sequence and name are given here, and its time unless it is of a [moment](Point::moment). `lost`
    /// is told of each other point that came first.
    ///
    /// # Errors
    /// The store's.
    pub fn publish(&self, mut point: Point, mut lost: impl FnMut(&str)) -> Result<Point, PointsError> {
        let mut sequence = self.last_sequence()? + 1;
        for _ in 0..TRIES {
            point.version = VERSION;
            point.sequence = sequence;
            if point.moment.is_none() {
                point.time = now();
            }
            point.name = format!("{}-{sequence}", compact_time(point.time));
            match self.place.create(&point.key(), &point.to_bytes())? {
                Wrote::Done => return Ok(point),
                Wrote::Lost => lost(&point.key()),
            }
            sequence = self.last_sequence()?.max(sequence) + 1;
        }
        let reason = "others publish points all the time: try again".to_owned();
        Err(self.place.failed(&point.key(), (PointsErrorKind::Busy, reason)))
    }

    /// The highest sequence that there is.
    fn last_sequence(&self) -> Result<u64, PointsError> {
        let names = self.place.list("points")?;
        let sequences = names.iter().filter_map(|(name, _)| name.strip_suffix(".json")?.parse::<u64>().ok());
        Ok(sequences.max().unwrap_or(0).min(u64::from(u32::MAX)))
    }

    /// Gives a point other layers that show the same disk. `false`: it was changed or forgotten meanwhile.
    ///
    /// # Errors
    /// The store's.
    pub fn replace_layers(&self, point: &Point, layers: Vec<Layer>) -> Result<bool, PointsError> {
        let key = point.key();
        let Some(found) = self.place.get(&key)? else { return Ok(false) };
        if Point::parse(&found.bytes, point.sequence).as_ref() != Ok(point) {
            return Ok(false);
        }
        let new = Point { layers, ..point.clone() };
        let wrote = self.place.replace(&key, &found.version, &new.to_bytes())?;
        Ok(wrote == Wrote::Done)
    }

    /// The image of a layer.
    pub fn image(&self, layer: &Layer) -> Layered {
        match self.place.name.place() {
            PointsPlace::Folder(path) => Layered::File(path.join(layer.key())),
            PointsPlace::Objects(prefix) => {
                let name = StoreName::parse(&format!("{prefix}/{}", layer.key()));
                Layered::Object(name.unwrap_or_else(|_| prefix.clone()))
            }
        }
    }

    /// Copies the hashes of a layer into a new file, and compares them with their name.
    ///
    /// # Errors
    /// They are missing or damaged, or the file can't be written.
    pub fn fetch_hashes(&self, layer: &Layer, target: &Path) -> Result<(), PointsError> {
        let key = layer.hashes_key();
        let mut file = File::create_new(target).map_err(|error| {
            self.place.failed(&target.display().to_string(), (PointsErrorKind::Io, error.to_string()))
        })?;
        let (mut hasher, mut len) = (Hasher::default(), 0u64);
        let found = self.place.read(&key, |piece| {
            len += piece.len() as u64;
            if len > layer.hashes_size {
                return Err(format!("it has more than {} bytes", layer.hashes_size));
            }
            hasher.add(piece);
            file.write_all(piece).map_err(|error| error.to_string())
        })?;
        if !found {
            return Err(self.place.damaged(&key, "it is missing, and a point names it"));
        }
        if hasher.finish() != layer.hashes {
            return Err(self.place.damaged(&key, "its bytes are not those that its name says"));
        }
        Ok(())
    }

    /// A file with the hashes of a layer, which were compared with their name: that of the store, if it is a folder, else a new one
    /// in `scratch`.
    ///
    /// # Errors
    /// As of [`PointStore::fetch_hashes`].
    pub fn hashes_file(&self, layer: &Layer, scratch: &Path) -> Result<PathBuf, PointsError> {
        let key = layer.hashes_key();
        let Some(folder) = self.place.folder() else {
            let target = scratch.join(format!("{}.hashes", layer.hashes));
            self.fetch_hashes(layer, &target)?;
            return Ok(target);
        };
        match self.examine(&key, layer.hashes_size)? {
            ObjectState::Whole => Ok(folder.join(key)),
            state => Err(self.place.damaged(&key, &state.to_string())),
        }
    }

    /// Reads an object and compares it with its name.
    ///
    /// # Errors
    /// The store can't be read.
    pub fn examine(&self, key: &str, size: u64) -> Result<ObjectState, PointsError> {
        let length = match self.place.length(key) {
            Ok(Some(length)) => length,
            Ok(None) => return Ok(ObjectState::Missing),
            Err(error) if error.kind() == PointsErrorKind::Damaged => return Ok(ObjectState::NoFile),
            Err(error) => return Err(error),
        };
        if length != size {
            return Ok(ObjectState::Length(length));
        }
        let mut hasher = Hasher::default();
        if !self.place.read(key, |piece| {
            hasher.add(piece);
            Ok(())
        })? {
            return Ok(ObjectState::Missing);
        }
        let name = key.rsplit('/').next().and_then(|name| name.split('.').next()).unwrap_or_default();
        let is_that = is_hash(name) && hasher.finish() == name;
        Ok(if is_that { ObjectState::Whole } else { ObjectState::Differs })
    }
}
