//! Names of objects: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `az://CONTAINER/KEY`.

use object_store::path::Path;
use std::fmt;

/// The longest key of any of these stores, in bytes.
const LONGEST_KEY: usize = 1024;
/// The longest name of a bucket.
const LONGEST_BUCKET: usize = 222;
/// The word that a version stands behind.
const VERSION: &str = "?versionId=";

/// A kind of store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// Amazon S3, and whatever speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
}

impl StoreKind {
    const ALL: [Self; 3] = [Self::S3, Self::Gs, Self::Az];

    /// The scheme of its names.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Gs => "gs",
            Self::Az => "az",
        }
    }

    fn of(name: &str) -> Option<(Self, &str)> {
        let (scheme, rest) = name.split_once("://")?;
        Self::ALL.into_iter().find(|kind| scheme.eq_ignore_ascii_case(kind.scheme())).map(|kind| (kind, rest))
    }
}

/// The name of an object. It holds no secrets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StoreName {
    kind: StoreKind,
    bucket: String,
    key: Path,
    version: Option<String>,
}

impl StoreName {
    /// Whether `name` is of a kind that [`StoreName::parse`] reads.
    pub fn is_name(name: &str) -> bool {
        StoreKind::of(name).is_some()
    }

    /// Reads a name. A key stands in it as it is: `%` and `?` are characters like others, but for `?versionId=` at the end.
    ///
    /// # Errors
    /// The reason in words: no bucket, no key, a key that can't be asked for.
    pub fn parse(name: &str) -> Result<Self, String> {
        let (kind, rest) =
            StoreKind::of(name).ok_or("a name of an object begins with s3://, gs:// or az://")?;
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'$');
        if bucket.is_empty() {
            return Err("the bucket is missing".to_owned());
        }
        // As parts of a path, '.' and '..' lead to another bucket.
        if bucket.len() > LONGEST_BUCKET || !bucket.bytes().all(fits) || matches!(bucket, "." | "..") {
            return Err("the bucket has characters that no bucket has, or is too long".to_owned());
        }
        let (key, version) = match key.rsplit_once(VERSION) {
            Some((key, version)) => (key, Some(version)),
            None => (key, None),
        };
        if key.is_empty() {
            return Err(format!("the key is missing: {}://{bucket}/KEY", kind.scheme()));
        }
        if key.len() > LONGEST_KEY {
            return Err(format!("the key is longer than {LONGEST_KEY} bytes"));
        }
        let path = Path::parse(key).ok().filter(|path| path.as_ref() == key).ok_or(
            "the key can't be asked for: it has an empty part between two slashes, a part '.' or '..', or a control \
             character",
        )?;
        if let Some(version) = version {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
            if version.is_empty() || version.len() > LONGEST_KEY || !version.bytes().all(fits) {
                return Err("the version of the object can't be one".to_owned());
            }
            if kind != StoreKind::S3 {
                return Err(format!(
                    "versions (?versionId=) are those of s3://, not of {}://",
                    kind.scheme()
                ));
            }
        }
        Ok(Self { kind, bucket: bucket.to_owned(), key: path, version: version.map(str::to_owned) })
    }

    /// The kind of its store.
    pub fn kind(&self) -> StoreKind {
        self.kind
    }

    /// The bucket, or container.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The version, if one is named.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    pub(crate) fn key(&self) -> &Path {
        &self.key
    }
}

impl fmt::Display for StoreName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}/{}", self.kind.scheme(), self.bucket, self.key)?;
        self.version.as_ref().map_or(Ok(()), |version| write!(f, "{VERSION}{version}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_shown_as_they_are() {
        for name in [
            "s3://b/k",
            "gs://b.c/a/b/c.qcow2",
            "az://con/k?x=1",
            "s3://b/a%20b ä",
            "s3://b/k?versionId=3.L_x-4",
        ] {
            assert_eq!(StoreName::parse(name).map(|found| found.to_string()).as_deref(), Ok(name));
        }
        let pinned = StoreName::parse("S3://b/k?versionId=v1").unwrap();
        assert_eq!((pinned.kind(), pinned.bucket(), pinned.version()), (StoreKind::S3, "b", Some("v1")));
        assert!(
            StoreName::is_name("GS://x") && !StoreName::is_name("s3:x") && !StoreName::is_name("http://x")
        );
    }

    #[test]
    fn what_is_no_name_is_refused_with_the_reason() {
        for (name, word) in [
            ("s3://", "bucket"),
            ("s3:///k", "bucket"),
            ("s3://b@evil/k", "bucket"),
            ("s3://../b/k", "bucket"),
            ("s3://./k", "bucket"),
            ("s3://b", "key"),
            ("s3://b/", "key"),
            ("s3://b/a//b", "empty part"),
            ("s3://b/a/../b", "'..'"),
            ("s3://b/a\nb", "control"),
            ("s3://b/a/", "empty part"),
            ("s3://b/k?versionId=", "version"),
            ("s3://b/k?versionId=a&b", "version"),
            ("gs://b/k?versionId=1", "s3://"),
            ("file://b/k", "begins"),
        ] {
            let error = StoreName::parse(name).unwrap_err();
            assert!(error.contains(word), "{name}: {error}");
        }
        assert!(StoreName::parse(&format!("s3://b/{}", "k".repeat(2000))).unwrap_err().contains("longer"));
    }
}
