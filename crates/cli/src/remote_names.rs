//! Names of disks over the network on the command line: which there are, and who opens them.
//!
//! A name that is taken here is noted with its options, and called by a URL that has no secrets from then on. The engine
//! gets that URL, and asks back when it is to be opened.

use crate::failure::Failure;
use crate::graph::{is_graph_name, open_node, plan_name, reference_node};
use crate::local_name::local_path;
use crate::named_disks::{Named, named, note_nbd};
use crate::reference_defaults::remote_references;
use crate::remote_disk::{RemoteName, nbd_disk};
use crate::values::ReferenceRule;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu::storage::{File, IoError, IoErrorKind, Op, OpenFlags};
use zebu::{OpenRemote, Remote};
use zebu_remote::nbd::{NbdAddress, NbdOptions};

/// The file that `name` on the command line leads to: a local path, or the URL of a disk over the network.
///
/// # Errors
/// The name has a protocol that is not known, or can't be read.
pub(crate) fn image_path(name: &OsStr) -> Result<PathBuf, String> {
    if named(Path::new(name)).is_some() {
        return Ok(PathBuf::from(name));
    }
    if let Some(name) = name.to_str().filter(|name| is_graph_name(name)) {
        return plan_name(name);
    }
    match name.to_str().filter(|name| NbdAddress::is_name(name)) {
        None => local_path(name),
        Some(name) => {
            let address = NbdAddress::parse(name)?;
            note_nbd(RemoteName { address, options: NbdOptions::default() })
        }
    }
}

/// The opener of names for the engine; `given` are the `--allow-refs` of the command line.
///
/// # Errors
/// As of the defaults of `--allow-refs`.
pub(crate) fn opener(given: &[ReferenceRule]) -> Result<Remote, Failure> {
    Ok(Remote::new(Arc::new(Opener), remote_references(given)?))
}

/// Opens what the command line named.
struct Opener;

impl OpenRemote for Opener {
    fn open(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>> {
        Some(match named(name)? {
            Named::Nbd(found) => open(found, flags),
            Named::Graph(node) => open_node(&node, &name.to_string_lossy(), flags),
            Named::Open(file) => file
                .descriptor()
                .try_clone_to_owned()
                .map_err(|error| {
                    let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
                    IoError::of_file(Op::Open, IoErrorKind::Os(errno), name)
                })
                .and_then(|file| File::from_descriptor(file, name, flags)),
        })
    }

    fn local_file(&self, name: &Path) -> Option<PathBuf> {
        match named(name)? {
            Named::Nbd(_) | Named::Open(_) => None,
            Named::Graph(node) => node.local_file().map(Path::to_owned),
        }
    }

    fn is_name(&self, name: &str) -> bool {
        NbdAddress::is_name(name) || is_graph_name(name) || name.starts_with("json:")
    }

    fn open_reference(&self, name: &str, flags: &OpenFlags) -> Result<File, IoError> {
        let invalid = |reason: String| {
            IoError::of_file(Op::Open, IoErrorKind::Os(libc::EINVAL), name).with_detail(reason)
        };
        if !NbdAddress::is_name(name) {
            return open_node(&reference_node(name).map_err(invalid)?, name, flags);
        }
        let address = NbdAddress::parse(name).map_err(invalid)?;
        open(RemoteName { address, options: NbdOptions::default() }, flags)
    }
}

fn open(name: RemoteName, flags: &OpenFlags) -> Result<File, IoError> {
    let url = name.address.to_string();
    File::from_storage(nbd_disk(name)?, &url, flags)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::named_disks::is_remote;

    #[test]
    fn names_of_nbd_are_noted_and_others_are_paths() {
        let path = image_path(OsStr::new("nbd:localhost:10809:exportname=a b")).unwrap();
        assert_eq!(path, PathBuf::from("nbd://localhost/a%20b"));
        assert!(is_remote(&path) && !is_remote(Path::new("nbd://localhost/other")));
        assert_eq!(image_path(OsStr::new("./nbd:x")), Ok(PathBuf::from("./nbd:x")));
        assert!(image_path(OsStr::new("rbd:x")).unwrap_err().contains("rbd"));
        assert!(image_path(OsStr::new("nbd://h:0")).unwrap_err().contains("port"));
        assert_eq!(image_path(OsStr::new("nbd://localhost/a%20b")), Ok(path));
    }
}
