//! The place of a store: a folder or a prefix of a bucket, with the few things that points ask of it.

use super::error::{PointsError, PointsErrorKind};
use super::folder::Folder;
use super::name::{PointName, PointsPlace};
use super::object::{Document, Failed, Held, Holder, Wrote};
use super::objects::Objects;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_remote::http::HttpOptions;

/// The most objects of one kind.
pub(super) const MOST_OBJECTS: usize = 1_000_000;

/// The place of a store.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) name: PointName,
    kind: Arc<Kind>,
}

#[derive(Debug)]
enum Kind {
    Folder(Folder),
    Objects(Box<Objects>),
}

macro_rules! both {
    ($self:ident, $key:expr, $place:ident => $call:expr) => {
        match &*$self.kind {
            Kind::Folder($place) => $call,
            Kind::Objects($place) => $call,
        }
        .map_err(|failed: Failed| $self.failed($key, failed))
    };
}

impl Place {
    pub(super) fn open(name: &PointName, http: &HttpOptions) -> Result<Self, PointsError> {
        let name = name.store();
        let kind = match name.place() {
            PointsPlace::Folder(path) => {
                let folder = Folder::new(path);
                folder.check().map_err(|(kind, reason)| PointsError::new(kind, &name, "", &reason))?;
                Kind::Folder(folder)
            }
            PointsPlace::Objects(prefix) => Kind::Objects(Box::new(
                Objects::new(prefix, http)
                    .map_err(|(kind, reason)| PointsError::new(kind, &name, "", &reason))?,
            )),
        };
        Ok(Self { name, kind: Arc::new(kind) })
    }

    pub(super) fn failed(&self, key: &str, (kind, reason): Failed) -> PointsError {
        PointsError::new(kind, &self.name, key, &reason)
    }

    pub(super) fn damaged(&self, key: &str, reason: &str) -> PointsError {
        self.failed(key, (PointsErrorKind::Damaged, reason.to_owned()))
    }

    /// The folder, if it is one.
    pub(super) fn folder(&self) -> Option<&Path> {
        match &*self.kind {
            Kind::Folder(folder) => Some(folder.path()),
            Kind::Objects(_) => None,
        }
    }

    /// Has bytes that are sent away keep to a rate. In a folder none are.
    pub(super) fn limit_sending(&self, rate: Option<NonZeroU64>) {
        if let Kind::Objects(objects) = &*self.kind {
            objects.pace.limit(rate);
        }
    }

    /// Makes what a new store needs.
    pub(super) fn prepare(&self) -> Result<(), PointsError> {
        match &*self.kind {
            Kind::Folder(folder) => folder.prepare().map_err(|failed| self.failed("", failed)),
            Kind::Objects(_) => Ok(()),
        }
    }

    pub(super) fn get(&self, key: &str) -> Result<Option<Document>, PointsError> {
        both!(self, key, place => place.get(key))
    }

    /// The same, with the reason where the object is there and is none that can be read.
    pub(super) fn document(&self, key: &str) -> Result<Result<Option<Document>, String>, PointsError> {
        let found = match &*self.kind {
            Kind::Folder(folder) => folder.get(key),
            Kind::Objects(objects) => objects.get(key),
        };
        match found {
            Ok(document) => Ok(Ok(document)),
            Err((PointsErrorKind::Damaged, reason)) => Ok(Err(reason)),
            Err(failed) => Err(self.failed(key, failed)),
        }
    }

    pub(super) fn create(&self, key: &str, bytes: &[u8]) -> Result<Wrote, PointsError> {
        both!(self, key, place => place.create(key, bytes))
    }

    pub(super) fn put(&self, key: &str, bytes: &[u8]) -> Result<(), PointsError> {
        both!(self, key, place => place.put(key, bytes))
    }

    pub(super) fn replace(&self, key: &str, version: &str, bytes: &[u8]) -> Result<Wrote, PointsError> {
        both!(self, key, place => place.replace(key, version, bytes))
    }

    pub(super) fn delete(&self, key: &str) -> Result<(), PointsError> {
        both!(self, key, place => place.delete(key))
    }

    /// Names and lengths of the objects in a part of the store.
    pub(super) fn list(&self, part: &str) -> Result<Vec<(String, u64)>, PointsError> {
        let found = both!(self, part, place => place.list(part))?;
        if found.len() > MOST_OBJECTS {
            return Err(self.damaged(part, &format!("there are more than {MOST_OBJECTS} objects")));
        }
        Ok(found)
    }

    /// The length of an object; none if it is missing.
    pub(super) fn length(&self, key: &str) -> Result<Option<u64>, PointsError> {
        both!(self, key, place => place.length(key))
    }

    /// Makes an object of a whole file; in a folder, the file is moved there.
    pub(super) fn take_in(&self, key: &str, file: &Path) -> Result<(), PointsError> {
        both!(self, key, place => place.take_in(key, file))
    }

    /// Gives the bytes of an object, piece by piece; `false`: it is missing.
    pub(super) fn read(
        &self,
        key: &str,
        mut tell: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<bool, PointsError> {
        both!(self, key, place => place.read(key, &mut tell))
    }

    pub(super) fn hold(&self, key: &str, bytes: &[u8]) -> Result<Held, PointsError> {
        both!(self, key, place => place.hold(key, bytes))
    }

    pub(super) fn holder(&self, key: &str) -> Result<Holder, PointsError> {
        both!(self, key, place => place.holder(key))
    }

    /// A new directory on this machine for files that become objects.
    pub(super) fn work_directory(&self, id: &str) -> Result<PathBuf, PointsError> {
        both!(self, id, place => place.work_directory(id))
    }

    /// Removes what work that was cut off has left beside the objects.
    pub(super) fn tidy(&self) -> Result<(), PointsError> {
        match &*self.kind {
            Kind::Folder(folder) => folder.tidy().map_err(|failed| self.failed("tmp", failed)),
            Kind::Objects(_) => Ok(()),
        }
    }
}
