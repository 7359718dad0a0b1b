//! Points that are forgotten, and objects that nothing names any more.
//!
//! A prune marks its candidates, then looks again at claims and points, and removes what none of them names. Work that needs a
//! layer claims it, then looks at the marks. Whichever came second sees the other.

use super::claim::{Listed, keys_of, listed};
use super::error::{PointsError, PointsErrorKind};
use super::keep::{Keep, kept};
use super::manifest::{Point, hashes_key, layer_key};
use super::object::Holder;
use super::point_store::{DamagedPoint, Found, PointStore};
use super::sha::is_hash;
use super::unique::new_id;
use super::verified::note_of;
use std::collections::HashSet;

/// The most objects that a mark names.
const MARKED_AT_ONCE: usize = 4096;

/// Points that were forgotten, and those that stay.
#[derive(Debug, Clone, Default)]
pub struct Forgotten {
    /// Names of those that are gone, the oldest first.
    pub removed: Vec<String>,
    /// Names of those that stay.
    pub kept: Vec<String>,
    /// The reasons why manifests can't be read, which stay, too.
    pub damaged: Vec<PointsError>,
}

/// Claims and marks of work that may be cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locks {
    /// They count, but in a folder for those of processes that are gone.
    Respect,
    /// They are removed, but in a folder for those of processes that live.
    Break,
}

/// The result of a prune.
#[derive(Debug, Clone, Default)]
pub struct Pruned {
    /// Objects that were removed.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Processes whose unfinished work kept objects, with their hosts.
    pub unfinished: Vec<String>,
    /// Objects that no point names, and that stay because a manifest that can't be read may name them.
    pub spared_objects: u64,
    /// Their bytes.
    pub spared_bytes: u64,
}

impl PointStore {
    /// Forgets the points that no rule keeps; if `only` is given, that point instead. Their layers stay until a prune.
    ///
    /// Rules count the points that can be read. One whose manifest is damaged goes by its number alone, as `00000007`.
    ///
    /// # Errors
    /// There is no such point; the store's.
    pub fn forget(&self, keep: &Keep, only: Option<&str>) -> Result<Forgotten, PointsError> {
        let Found { points, mut damaged } = self.found()?;
        let mut forgotten = Forgotten::default();
        if let Some(only) = only
            && points.iter().all(|point| point.name != only)
        {
            let Some(at) = damaged.iter().position(|damaged| damaged.is_called(only)) else {
                return self.point(Some(only)).map(|_| forgotten);
            };
            self.place.delete(&damaged.remove(at).key)?;
            forgotten.removed.push(only.to_owned());
        }
        let times: Vec<u64> = points.iter().map(|point| point.time).collect();
        let stays = match only {
            Some(only) => points.iter().map(|point| point.name != only).collect(),
            None if keep.is_empty() => vec![true; points.len()],
            None => kept(&times, keep),
        };
        for (point, stays) in points.into_iter().zip(stays) {
            if stays {
                forgotten.kept.push(point.name);
                continue;
            }
            self.place.delete(&point.key())?;
            self.forget_verified(&point)?;
            forgotten.removed.push(point.name);
        }
        forgotten.damaged = errors_of(damaged);
        Ok(forgotten)
    }

    /// All points, of which none is damaged.
    fn whole(&self) -> Result<Vec<Point>, PointsError> {
        let Found { points, mut damaged } = self.found()?;
        match damaged.pop().map(|damaged| damaged.error) {
            None => Ok(points),
            Some(error) => Err(PointsError::new(
                PointsErrorKind::Damaged,
                &self.place.name,
                "",
                &format!("nothing is removed, because it is not known which layers a point needs: {error}"),
            )),
        }
    }

    /// Keys that points name.
    fn named(&self) -> Result<HashSet<String>, PointsError> {
        Ok(self.whole()?.iter().flat_map(|point| keys_of(&point.layers)).collect())
    }

    /// Removes objects that no point and no unfinished work names, and what cut off work has left. While a manifest is damaged,
    /// no object goes.
    ///
    /// # Errors
    /// The store's.
    pub fn prune(&self, locks: Locks) -> Result<Pruned, PointsError> {
        self.remove_stale(locks)?;
        // Objects first: what comes later is no candidate.
        let mut objects = Vec::new();
        for (part, key_of) in [("layers", layer_key as fn(&str) -> String), ("hashes", hashes_key)] {
            for (name, size) in self.place.list(part)? {
                let key = format!("{part}/{name}");
                let sha = name.split('.').next().filter(|sha| is_hash(sha));
                if sha.is_some_and(|sha| key_of(sha) == key) {
                    objects.push((key, size));
                }
            }
        }
        let Found { points, damaged } = self.found()?;
        let named: HashSet<String> = points.iter().flat_map(|point| keys_of(&point.layers)).collect();
        let claims = listed(&self.place, "claims")?;
        self.place.tidy()?;
        let claimed: HashSet<&String> = claims.iter().flat_map(|(_, claim)| &claim.objects).collect();
        objects.retain(|(key, _)| !named.contains(key) && !claimed.contains(key));
        let mut pruned = Pruned::default();
        for (_, claim) in claims.iter().filter(|(key, _)| !key.contains('-')) {
            pruned.unfinished.push(claim.by.clone());
        }
        if !damaged.is_empty() {
            pruned.spared_objects = objects.len() as u64;
            pruned.spared_bytes = objects.iter().map(|(_, size)| size).sum();
            return Ok(pruned);
        }
        let notes: HashSet<String> = named.iter().filter_map(|key| note_of(key)).collect();
        for note in self.known_damage()?.notes().difference(&notes) {
            self.place.delete(note)?;
        }
        for some in objects.chunks(MARKED_AT_ONCE) {
            self.sweep(some, &mut pruned)?;
        }
        Ok(pruned)
    }

    fn sweep(&self, candidates: &[(String, u64)], pruned: &mut Pruned) -> Result<(), PointsError> {
        let keys = candidates.iter().map(|(key, _)| key.clone()).collect();
        let mark = self.place.hold(&format!("marks/{}.json", new_id()), &Listed::new(keys).to_bytes())?;
        let swept = (|| {
            // Claims first: one that has ended meanwhile has published its point before.
            let claims = listed(&self.place, "claims")?;
            let mut stays: HashSet<String> =
                claims.into_iter().flat_map(|(_, claim)| claim.objects).collect();
            stays.extend(self.named()?);
            for (key, size) in candidates.iter().filter(|(key, _)| !stays.contains(key)) {
                self.place.delete(key)?;
                pruned.objects += 1;
                pruned.bytes += size;
            }
            Ok(())
        })();
        let ended = self.place.delete(&mark.key);
        swept.and(ended)
    }

    fn remove_stale(&self, locks: Locks) -> Result<(), PointsError> {
        for part in ["claims", "marks"] {
            for (name, _) in self.place.list(part)? {
                let key = format!("{part}/{name}");
                let goes = match self.place.holder(&key)? {
                    Holder::Gone => true,
                    Holder::Alive => false,
                    Holder::Unknown => locks == Locks::Break,
                };
                if goes {
                    self.place.delete(&key)?;
                }
            }
        }
        Ok(())
    }
}

fn errors_of(damaged: Vec<DamagedPoint>) -> Vec<PointsError> {
    damaged.into_iter().map(|damaged| damaged.error).collect()
}
