//! Names of stores and points: `store:DIR/NAME[@POINT]`, `store:s3://BUCKET/PREFIX/NAME[@POINT]`.

use crate::name::StoreName;
use std::fmt;
use std::path::PathBuf;

/// Beginning of the name of a store.
const PREFIX: &str = "store:";
/// The longest name of a point, in bytes.
const LONGEST_POINT: usize = 64;

/// The place of a store of points.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PointsPlace {
    /// A folder of this machine.
    Folder(PathBuf),
    /// A prefix of a bucket, as the name of an object.
    Objects(StoreName),
}

/// The name of a store of points, or of a point in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PointName {
    place: PointsPlace,
    point: Option<String>,
}

impl PointName {
    /// Whether `name` is of the kind that [`PointName::parse`] reads.
    pub fn is_name(name: &str) -> bool {
        name.starts_with(PREFIX)
    }

    /// Reads a name.
    ///
    /// # Errors
    /// The reason in words.
    pub fn parse(name: &str) -> Result<Self, String> {
        let rest = name.strip_prefix(PREFIX).ok_or("the name of a store begins with store:")?;
        let last = rest.rfind('/').map_or(0, |at| at + 1);
        let (place, point) = match rest[last..].find('@') {
            Some(at) => (&rest[..last + at], Some(&rest[last + at + 1..])),
            None => (rest, None),
        };
        if let Some(point) = point
            && !is_point(point)
        {
            return Err("the name of a point has letters, digits and '-' only, as 'zebu points' lists them"
                .to_owned());
        }
        let place = if StoreName::is_name(place) {
            let name = StoreName::parse(place)?;
            if name.version().is_some() {
                return Err("a store of points has no version".to_owned());
            }
            PointsPlace::Objects(name)
        } else if place.starts_with("oci:") {
            return Err("a registry is no store of points: a folder, s3://, gs:// or az:// can be".to_owned());
        } else if place.contains("://") {
            return Err("a store of points is a folder, or a prefix of s3://, gs:// or az://".to_owned());
        } else if matches!(place.rsplit('/').next(), None | Some("" | "." | "..")) || place.contains('\0') {
            return Err("the name of the store is missing: store:DIR/NAME".to_owned());
        } else {
            PointsPlace::Folder(PathBuf::from(place))
        };
        Ok(Self { place, point: point.map(str::to_owned) })
    }

    /// The place of the store.
    pub fn place(&self) -> &PointsPlace {
        &self.place
    }

    /// The point, if one is named.
    pub fn point(&self) -> Option<&str> {
        self.point.as_deref()
    }

    /// The name of a point of the same store.
    #[must_use]
    pub fn at(&self, point: &str) -> Self {
        Self { place: self.place.clone(), point: Some(point.to_owned()) }
    }

    /// The name of the store alone.
    #[must_use]
    pub fn store(&self) -> Self {
        Self { place: self.place.clone(), point: None }
    }
}

/// Whether a text can be the name of a point.
pub(super) fn is_point(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= LONGEST_POINT
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

impl fmt::Display for PointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            PointsPlace::Folder(path) => write!(f, "{PREFIX}{}", path.display())?,
            PointsPlace::Objects(name) => write!(f, "{PREFIX}{name}")?,
        }
        self.point.as_ref().map_or(Ok(()), |point| write!(f, "@{point}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_shown_as_they_are() {
        for (name, point) in [
            ("store:/backups/vm1", None),
            ("store:vm1", None),
            ("store:a@b/vm1@20261129T150102Z-7", Some("20261129T150102Z-7")),
            ("store:s3://b/nightly/vm1", None),
            ("store:s3://b/nightly/vm1@p-1", Some("p-1")),
        ] {
            let read = PointName::parse(name).unwrap();
            assert_eq!((read.to_string().as_str(), read.point()), (name, point));
        }
        let read = PointName::parse("store:d/n@p").unwrap();
        assert_eq!(read.store().at("q").to_string(), "store:d/n@q");
    }

    #[test]
    fn what_is_no_name_is_refused_with_the_reason() {
        for (name, word) in [
            ("vm1", "begins"),
            ("store:", "missing"),
            ("store:dir/", "missing"),
            ("store:dir/..", "missing"),
            ("store:d/n@", "letters"),
            ("store:d/n@a.b", "letters"),
            ("store:d/n@a@b", "letters"),
            ("store:s3://b", "key"),
            ("store:s3://b/n?versionId=x", "version"),
            ("store:oci://r/n", "registry"),
            ("store:http://h/n", "folder"),
        ] {
            let error = PointName::parse(name).unwrap_err();
            assert!(error.contains(word), "{name}: {error}");
        }
    }
}
