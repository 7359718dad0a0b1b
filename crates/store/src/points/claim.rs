//! Claims: unfinished work says which layers it needs, so that nobody removes them.

use super::error::{PointsError, PointsErrorKind};
use super::manifest::{Layer, hashes_key, layer_key};
use super::object::{Held, Holder};
use super::place::Place;
use super::unique::{new_id, now};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The most objects that a claim names.
const MOST: usize = 100_000;

/// Text of a claim or a mark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) version: u32,
    /// The host and the process that made it, for people.
    pub(super) by: String,
    /// Seconds after the beginning of 1970.
    pub(super) time: u64,
    /// Keys of objects.
    pub(super) objects: Vec<String>,
}

impl Listed {
    pub(super) fn new(objects: Vec<String>) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let by = format!("process {} on {}", std::process::id(), host.trim());
        Self { version: super::manifest::VERSION, by, time: now(), objects }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Objects that are held in a part of the store, `claims` or `marks`: those that are not certainly stale, and their names.
pub(super) fn listed(place: &Place, part: &str) -> Result<Vec<(String, Listed)>, PointsError> {
    let mut found = Vec::new();
    for (name, _) in place.list(part)? {
        let key = format!("{part}/{name}");
        if place.holder(&key)? == Holder::Gone {
            continue;
        }
        let Some(document) = place.get(&key)? else { continue };
        match serde_json::from_slice::<Listed>(&document.bytes) {
            Ok(listed) if listed.objects.len() <= MOST => found.push((key, listed)),
            _ => {
                return Err(place.damaged(
                    &key,
                    "it is not what an unfinished command leaves: 'zebu forget --break-lock' removes it",
                ));
            }
        }
    }
    Ok(found)
}

/// The claim of work that is under way: its layers stay. Dropped before [`Claim::end`], it stays as that of work that was cut off,
/// in a folder for nobody.
#[derive(Debug)]
pub struct Claim {
    place: Place,
    id: String,
    held: Vec<Held>,
    directory: PathBuf,
}

impl Claim {
    /// Claims these layers.
    ///
    /// # Errors
    /// A prune that is under way is about to remove one of them; the store's.
    pub(super) fn begin(place: &Place, layers: &[Layer]) -> Result<Self, PointsError> {
        let id = new_id();
        let key = format!("claims/{id}.json");
        let held = place.hold(&key, &Listed::new(keys_of(layers)).to_bytes())?;
        let mut claim = Self { place: place.clone(), id, held: vec![held], directory: PathBuf::new() };
        if let Err(error) = claim.check_marks(&keys_of(layers)) {
            claim.give_up();
            return Err(error);
        }
        match place.work_directory(&claim.id) {
            Ok(directory) => claim.directory = directory,
            Err(error) => {
                claim.give_up();
                return Err(error);
            }
        }
        Ok(claim)
    }

    /// A directory of this claim alone, for files that become objects.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Makes a layer of an image and its hashes, two files in the claim's directory, which are gone then.
    ///
    /// # Errors
    /// The files can't be read; the store's.
    pub fn add(&mut self, image: &Path, hashes: &Path) -> Result<Layer, PointsError> {
        let of = |path: &Path| {
            let read = std::fs::File::open(path).and_then(super::sha::of_reader);
            read.map_err(|error| {
                self.place.failed(&path.display().to_string(), (PointsErrorKind::Io, error.to_string()))
            })
        };
        let ((size, sha256), (hashes_size, of_hashes)) = (of(image)?, of(hashes)?);
        let layer = Layer { sha256, size, hashes: of_hashes, hashes_size };
        let keys = keys_of(std::slice::from_ref(&layer));
        let key = format!("claims/{}-{}.json", self.id, self.held.len());
        self.held.push(self.place.hold(&key, &Listed::new(keys.clone()).to_bytes())?);
        self.check_marks(&keys)?;
        self.place.take_in(&layer.key(), image)?;
        self.place.take_in(&layer.hashes_key(), hashes)?;
        Ok(layer)
    }

    /// Fails if a prune is about to remove one of these: the claim came too late for it.
    fn check_marks(&self, keys: &[String]) -> Result<(), PointsError> {
        let keys: HashSet<&String> = keys.iter().collect();
        for (mark, listed) in listed(&self.place, "marks")? {
            if listed.objects.iter().any(|key| keys.contains(key)) {
                let reason = format!(
                    "a prune by {} is about to remove a layer that this needs: try again when it has ended ('zebu forget \
                     --break-lock' ends one that was cut off)",
                    listed.by
                );
                return Err(self.place.failed(&mark, (PointsErrorKind::Busy, reason)));
            }
        }
        Ok(())
    }

    fn give_up(&mut self) {
        if !self.directory.as_os_str().is_empty() {
            let _ = std::fs::remove_dir_all(&self.directory);
        }
        for held in self.held.drain(..).rev() {
            // It is stale then.
            let _ = self.place.delete(&held.key);
        }
    }

    /// Ends it: the work is done, or failed.
    pub fn end(mut self) {
        self.give_up();
    }
}

/// The keys of the objects of these layers.
pub(super) fn keys_of(layers: &[Layer]) -> Vec<String> {
    layers.iter().flat_map(|layer| [layer_key(&layer.sha256), hashes_key(&layer.hashes)]).collect()
}
