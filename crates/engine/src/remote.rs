//! Names that lead to no local file: who opens them, and which of them an image may name.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_storage::{File, IoError, OpenFlags};

/// Opens names of a kind of its own, such as URLs.
pub trait OpenRemote: Send + Sync {
    /// Opens a name that the caller gave; `None` if it is not of this kind, and so a local path.
    fn open(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>>;

    /// The local file that a name the caller gave ends at, below whatever lies above it: names in the image are relative to
    /// it. None for disks that are elsewhere.
    fn local_file(&self, name: &Path) -> Option<PathBuf> {
        let _ = name;
        None
    }

    /// Whether a name that stands in an image is of this kind.
    fn is_name(&self, name: &str) -> bool;

    /// Opens a name that stands in an image, and that [`RemoteRefs`] allowed.
    ///
    /// # Errors
    /// The file's, and that the name can't be read.
    fn open_reference(&self, name: &str, flags: &OpenFlags) -> Result<File, IoError>;
}

/// Which names with a protocol an image may name. Plain paths are [`crate::RefPolicy`]'s.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RemoteRefs {
    /// None.
    #[default]
    None,
    /// Names that begin with one of these, up to a `/` or `?`.
    Prefixes(Vec<String>),
    /// All.
    All,
}

impl RemoteRefs {
    /// Whether an image may name `name`.
    fn allow(&self, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Prefixes(prefixes) => {
                prefixes.iter().any(|prefix| is_below(prefix, name)) && !leaves_directory(name)
            }
        }
    }
}

/// Whether `name` begins with `prefix` as a URL does: the host of one is no beginning of a longer one.
fn is_below(prefix: &str, name: &str) -> bool {
    match name.strip_prefix(prefix) {
        None => false,
        Some(rest) => {
            rest.is_empty() || prefix.ends_with(['/', '?']) || rest.starts_with('/') || rest.starts_with('?')
        }
    }
}

/// Whether the name has `..` in it, plain or encoded: it may lead elsewhere than it begins.
fn leaves_directory(name: &str) -> bool {
    let plain = name.to_ascii_lowercase().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/");
    plain.split(['/', '\\', '?', '&', '=', ':']).any(|part| part == "..")
}

/// The opener of names that lead to no local file. By default there is none.
#[derive(Clone, Default)]
pub struct Remote {
    opener: Option<Arc<dyn OpenRemote>>,
    refs: RemoteRefs,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("refs", &self.refs).finish_non_exhaustive()
    }
}

/// The fate of a name that stands in an image.
pub(crate) enum RemoteReference {
    /// It is no name of the opener's.
    NotRemote,
    /// It may not be opened.
    Refused,
    Opened(Result<File, IoError>),
}

impl Remote {
    /// `opener` opens names that the caller gives, and of those that stand in images the ones that `refs` allow.
    pub fn new(opener: Arc<dyn OpenRemote>, refs: RemoteRefs) -> Self {
        Self { opener: Some(opener), refs }
    }

    /// Opens a name that the caller gave.
    ///
    /// # Errors
    /// The file's.
    pub fn open(&self, name: &Path, flags: &OpenFlags) -> Result<File, IoError> {
        self.open_elsewhere(name, flags).unwrap_or_else(|| File::open(name, flags))
    }

    /// The same; `None` for a local path, which is not opened.
    pub(crate) fn open_elsewhere(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>> {
        self.opener.as_ref()?.open(name, flags)
    }

    /// The local file that a name of the opener's ends at.
    pub(crate) fn local_file(&self, name: &Path) -> Option<PathBuf> {
        self.opener.as_ref()?.local_file(name)
    }

    /// Whether a name is one of the opener's.
    pub(crate) fn is_name(&self, name: &str) -> bool {
        self.opener.as_ref().is_some_and(|opener| opener.is_name(name))
    }

    /// Opens a name that stands in an image, if it is the opener's and allowed.
    pub(crate) fn open_reference(&self, name: &str, flags: &OpenFlags) -> RemoteReference {
        match &self.opener {
            Some(opener) if opener.is_name(name) => {
                if self.refs.allow(name) {
                    RemoteReference::Opened(opener.open_reference(name, flags))
                } else {
                    RemoteReference::Refused
                }
            }
            _ => RemoteReference::NotRemote,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_where_a_part_of_the_name_does() {
        let refs = RemoteRefs::Prefixes(vec!["nbd://host/dir".to_owned(), "http://h:80/".to_owned()]);
        for allowed in ["nbd://host/dir", "nbd://host/dir/a", "nbd://host/dir?x=1", "http://h:80/a..b/c"] {
            assert!(refs.allow(allowed), "{allowed}");
        }
        for refused in [
            "nbd://host/directory",
            "nbd://host",
            "nbd://host/dir/../a",
            "nbd://host/dir/%2E%2e/a",
            "nbd://host/dir%2f..%2fa",
            "nbd://host/dir/..",
            "http://h:80@evil/a",
            "http://h:8080/a",
            "xnbd://host/dir",
        ] {
            assert!(!refs.allow(refused), "{refused}");
        }
        assert!(!RemoteRefs::None.allow("nbd://host/dir") && RemoteRefs::All.allow("nbd://host/.."));
    }
}
