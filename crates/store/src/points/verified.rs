//! Notes of verifications: when a point was found whole, and which objects are damaged.

use super::error::PointsError;
use super::manifest::{Layer, Point};
use super::point_store::PointStore;
use super::unique::now;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// The part of the store that notes damaged objects.
const DAMAGED: &str = "damaged";

#[derive(Serialize, Deserialize)]
struct Note {
    time: u64,
}

impl Note {
    fn now() -> Vec<u8> {
        serde_json::to_vec(&Self { time: now() }).unwrap_or_default()
    }
}

/// The key of the note that an object is damaged.
pub(super) fn note_of(object: &str) -> Option<String> {
    object.rsplit_once('/').map(|(_, name)| format!("{DAMAGED}/{name}.json"))
}

/// Objects of layers that were found damaged, and not whole again since.
#[derive(Debug, Clone, Default)]
pub struct KnownDamage(HashSet<String>);

impl KnownDamage {
    /// The first damaged object among those of these layers.
    pub fn of(&self, layers: &[Layer]) -> Option<String> {
        let mut keys = layers.iter().flat_map(|layer| [layer.key(), layer.hashes_key()]);
        keys.find(|key| note_of(key).is_some_and(|note| self.0.contains(&note)))
    }

    /// Keys of the notes.
    pub(super) fn notes(&self) -> &HashSet<String> {
        &self.0
    }
}

impl PointStore {
    /// Notes that a point was found whole now.
    ///
    /// # Errors
    /// The store's, as of one that can't be written.
    pub fn note_verified(&self, point: &Point) -> Result<(), PointsError> {
        self.place.put(&format!("verified/{}.json", point.name), &Note::now())
    }

    /// Notes that a point is no longer known to be whole.
    ///
    /// # Errors
    /// As of [`PointStore::note_verified`].
    pub fn forget_verified(&self, point: &Point) -> Result<(), PointsError> {
        self.place.delete(&format!("verified/{}.json", point.name))
    }

    /// Times of the last verification that found a point whole, by the names of points: seconds after the beginning of 1970.
    ///
    /// # Errors
    /// The store's.
    pub fn verified(&self) -> Result<HashMap<String, u64>, PointsError> {
        let mut all = HashMap::new();
        for (name, _) in self.place.list("verified")? {
            let Some(point) = name.strip_suffix(".json") else { continue };
            // A note that can't be read is none.
            let Ok(Some(document)) = self.place.document(&format!("verified/{name}"))? else { continue };
            if let Ok(Note { time }) = serde_json::from_slice(&document.bytes) {
                all.insert(point.to_owned(), time);
            }
        }
        Ok(all)
    }

    /// Notes that an object is damaged. No new point stands on it until it is found whole.
    ///
    /// # Errors
    /// As of [`PointStore::note_verified`].
    pub fn note_damaged(&self, object: &str) -> Result<(), PointsError> {
        note_of(object).map_or(Ok(()), |note| self.place.put(&note, &Note::now()))
    }

    /// Takes the note back that an object is damaged.
    ///
    /// # Errors
    /// As of [`PointStore::note_verified`].
    pub fn note_whole(&self, object: &str) -> Result<(), PointsError> {
        note_of(object).map_or(Ok(()), |note| self.place.delete(&note))
    }

    /// The parts that were found damaged.
    ///
    /// # Errors
    /// The store's.
    pub fn known_damage(&self) -> Result<KnownDamage, PointsError> {
        let notes = self.place.list(DAMAGED)?;
        Ok(KnownDamage(notes.into_iter().map(|(name, _)| format!("{DAMAGED}/{name}")).collect()))
    }

    /// Why nothing can stand on a point, as far as names and lengths of its objects tell; `None`: nothing speaks against it.
    ///
    /// # Errors
    /// The store's.
    pub fn unfit(&self, point: &Point) -> Result<Option<String>, PointsError> {
        if let Some(key) = self.known_damage()?.of(&point.layers) {
            return Ok(Some(format!("{key}: 'zebu verify' found it damaged")));
        }
        for part in ["layers", "hashes"] {
            let lengths: HashMap<String, u64> = self.place.list(part)?.into_iter().collect();
            for layer in &point.layers {
                let (key, size) = match part {
                    "layers" => (layer.key(), layer.size),
                    _ => (layer.hashes_key(), layer.hashes_size),
                };
                let name = key.rsplit('/').next().unwrap_or_default();
                match lengths.get(name) {
                    None => return Ok(Some(format!("{key}: it is missing"))),
                    Some(found) if *found != size => {
                        return Ok(Some(format!("{key}: it has {found} bytes, not {size}")));
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(None)
    }
}
