//! Which disk a backup was made of, as far as that is known without reading it.

use crate::Remedy;
use crate::node::Driver;
use crate::{Error, ErrorKind, Image, Result};
use std::fmt;
use std::path::Path;

/// Digits of each part in a manifest.
const DIGITS: usize = 16;

/// The source of a backup, in hashes: a manifest says of whom it is without telling names.
///
/// Neither the time of the last change nor the length of the file counts: an image whose snapshot is backed up may be
/// written meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin {
    /// The absolute path as it was given.
    name: String,
    /// Device and inode number. The device number is another after some restarts.
    file: String,
    /// Id and time of the internal snapshot; "-" for the active state.
    snapshot: String,
}

fn short_hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..DIGITS].to_owned()
}

impl Origin {
    /// Of an open image.
    pub(super) fn of(source: &Image) -> Self {
        let path = std::path::absolute(source.path()).unwrap_or_else(|_| source.path().to_owned());
        let id = source.file_ids().first().copied();
        Self {
            name: short_hash(path.as_os_str().as_encoded_bytes()),
            file: short_hash(format!("{:?}", id.map(|id| (id.dev, id.ino))).as_bytes()),
            snapshot: snapshot_of(source).map_or_else(|| "-".to_owned(), |text| short_hash(text.as_bytes())),
        }
    }

    /// Reads the line of a manifest, if it is one.
    pub(super) fn parse(name: &str, file: &str, snapshot: &str) -> Option<Self> {
        let is_hash = |text: &str| text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let fits = is_hash(name) && is_hash(file) && (snapshot == "-" || is_hash(snapshot));
        fits.then(|| Self { name: name.to_owned(), file: file.to_owned(), snapshot: snapshot.to_owned() })
    }

    /// Refuses to go on with a backup of `self` from `now`, an image of path `path`. A file that was renamed is the same,
    /// and so is one of the same name on a device whose number has changed.
    pub(super) fn check(&self, now: &Self, path: &Path) -> Result<()> {
        let refuse = |message: &str| {
            Err(Error::new(ErrorKind::InvalidArgument, message).on(path).with_remedy(Remedy::RestartBackup))
        };
        if self.snapshot != now.snapshot {
            return refuse(
                "the interrupted backup is of another snapshot, or of none: name that one, or begin it anew",
            );
        }
        if self.name != now.name && self.file != now.file {
            return refuse("the interrupted backup is of another image: name that one, or begin it anew");
        }
        Ok(())
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.file, self.snapshot)
    }
}

/// The snapshot that the image was opened at: the one whose L1 table is in use.
fn snapshot_of(source: &Image) -> Option<String> {
    let Driver::Qcow2(qcow2) = &source.0.driver else { return None };
    let table = qcow2.active_map().l1().offset();
    let snapshots = qcow2.snapshots();
    let entry = snapshots.entries().iter().find(|entry| entry.l1_table_offset.0 == table)?;
    let id = String::from_utf8_lossy(&entry.id);
    Some(format!("{id} {} {}", entry.date_sec, entry.date_nsec))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_image_or_snapshot_is_refused_and_a_renamed_one_is_not() {
        let origin = |name: u8, file: u8, snapshot: Option<u8>| {
            let part = |of: u8| short_hash(&[of]);
            let snapshot = snapshot.map_or("-".to_owned(), part);
            Origin::parse(&part(name), &part(file), &snapshot).unwrap()
        };
        let before = origin(1, 2, Some(3));
        for (now, fits) in [
            (origin(1, 2, Some(3)), true),
            (origin(9, 2, Some(3)), true),
            (origin(1, 9, Some(3)), true),
            (origin(8, 9, Some(3)), false),
            (origin(1, 2, Some(4)), false),
            (origin(1, 2, None), false),
        ] {
            assert_eq!(before.check(&now, Path::new("disk")).is_ok(), fits, "{now:?}");
            let text = now.to_string();
            let words: Vec<&str> = text.split(' ').collect();
            assert_eq!(Origin::parse(words[0], words[1], words[2]), Some(now));
        }
        assert_eq!(Origin::parse("", "", "-"), None);
    }
}
