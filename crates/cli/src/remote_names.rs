//! Names of disks over the network on the command line: which there are, and who opens them.
//!
//! A name that is taken here is noted with its options, and called by a URL that has no secrets from then on. The engine
//! gets that URL, and asks back when it is to be opened.

use crate::failure::Failure;
use crate::graph::{Node, is_graph_name, open_node, plan_name, reference_node};
use crate::local_name::local_path;
use crate::output::stderr;
use crate::reference_defaults::remote_references;
use crate::values::ReferenceRule;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use zebu::storage::{File, IoError, IoErrorKind, Op, OpenFlags};
use zebu::{OpenRemote, Remote};
use zebu_remote::StatsSnapshot;
use zebu_remote::nbd::{Endpoint, NbdAddress, NbdDisk, NbdOptions};

/// A disk over the network, as the command line describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteName {
    pub(crate) address: NbdAddress,
    pub(crate) options: NbdOptions,
}

impl RemoteName {
    /// Notes it; the name by which it is opened.
    ///
    /// # Errors
    /// The same disk was noted with other options.
    pub(crate) fn note(self) -> Result<PathBuf, String> {
        note(PathBuf::from(self.address.to_string()), Named::Nbd(self))
    }
}

fn note(path: PathBuf, named: Named) -> Result<PathBuf, String> {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    match names.get_or_insert_default().insert(path.clone(), named.clone()) {
        // A configuration may have changed since a name was opened first; servers and their options may not.
        Some(before) if before != named && matches!(before, Named::Nbd(_)) => {
            Err(format!("'{}' is given twice, with different options", path.display()))
        }
        _ => Ok(path),
    }
}

/// Notes what lies below an image; the name by which it is opened.
///
/// # Errors
/// A disk over the network has this name.
pub(crate) fn note_node(path: PathBuf, node: Node) -> Result<PathBuf, String> {
    note(path, Named::Graph(node))
}

/// A disk that is no local file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Named {
    Nbd(RemoteName),
    Graph(Node),
    /// A file that is open already and has no name.
    Open(OpenedFile),
}

/// A descriptor, shared by all who open its file.
#[derive(Debug, Clone)]
struct OpenedFile(Arc<OwnedFd>);

impl PartialEq for OpenedFile {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OpenedFile {}

/// Names that the command line gave.
static NAMES: Mutex<Option<HashMap<PathBuf, Named>>> = Mutex::new(None);
/// Disks that were opened. They stay so: a server may take no second connection.
static OPENED: Mutex<Vec<(RemoteName, Arc<NbdDisk>)>> = Mutex::new(Vec::new());

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
            RemoteName { address, options: NbdOptions::default() }.note()
        }
    }
}

/// Notes a file without a name; `path` is what it is called from now on.
///
/// # Errors
/// A disk over the network has this name.
pub(crate) fn note_open(path: PathBuf, file: OwnedFd) -> Result<PathBuf, String> {
    note(path, Named::Open(OpenedFile(Arc::new(file))))
}

fn named(path: &Path) -> Option<Named> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(path).cloned()
}

/// Whether `path` is a disk that the command line named and that is no local file.
pub(crate) fn is_remote(path: &Path) -> bool {
    matches!(named(path), Some(Named::Nbd(_) | Named::Graph(_)))
}

/// QEMU's name for the driver of a disk that the command line named and that is no local file.
pub(crate) fn driver(path: &Path) -> Option<&'static str> {
    match named(path)? {
        Named::Nbd(_) => Some("nbd"),
        Named::Graph(node) => Some(node.driver()),
        Named::Open(_) => None,
    }
}

/// The server of a disk that the command line named: the path of its socket, or host and port.
pub(crate) fn server(path: &Path) -> Option<String> {
    match named(path)? {
        Named::Graph(_) | Named::Open(_) => None,
        Named::Nbd(name) => match &name.address.endpoint {
            Endpoint::Unix(path) => Some(path.display().to_string()),
            Endpoint::Tcp { host, port } => Some(format!("{host}:{port}")),
            _ => None,
        },
    }
}

/// The opener of names for the engine; `given` are the `--allow-refs` of the command line.
///
/// # Errors
/// As of the defaults of `--allow-refs`.
pub(crate) fn opener(given: &[ReferenceRule]) -> Result<Remote, Failure> {
    Ok(Remote::new(Arc::new(Opener), remote_references(given)?))
}

/// Opens what [`NAMES`] has.
struct Opener;

impl OpenRemote for Opener {
    fn open(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>> {
        Some(match named(name)? {
            Named::Nbd(found) => open(found, flags),
            Named::Graph(node) => open_node(&node, &name.to_string_lossy(), flags),
            Named::Open(file) => file
                .0
                .try_clone()
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

/// A disk on a server; one that is known stays connected.
pub(crate) fn nbd_disk(name: RemoteName) -> Result<Arc<NbdDisk>, IoError> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = opened.iter().find(|(known, _)| *known == name).map(|(_, disk)| Arc::clone(disk));
    if let Some(disk) = known {
        return Ok(disk);
    }
    let disk = Arc::new(NbdDisk::open(name.address.clone(), name.options.clone())?);
    opened.push((name, Arc::clone(&disk)));
    Ok(disk)
}

/// Figures of all disks over the network that this command opened, added up; `None` if there was none.
pub(crate) fn transfers() -> Option<StatsSnapshot> {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.iter().map(|(_, disk)| disk.stats()).reduce(|mut all, one| {
        all.requests += one.requests;
        all.read_bytes += one.read_bytes;
        all.written_bytes += one.written_bytes;
        all.retries += one.retries;
        all.reconnects += one.reconnects;
        all
    })
}

/// Says what went over the network (`-v`), if anything did.
pub(crate) fn tell_transfers() {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    for (_, disk) in opened.iter() {
        let StatsSnapshot { requests, read_bytes, written_bytes, retries, reconnects, .. } = disk.stats();
        let name = disk.name();
        stderr::tell(&format!(
            "{name}: {requests} requests, {read_bytes} bytes read, {written_bytes} bytes written, {retries} retries, \
             {reconnects} reconnections"
        ));
        if let Some(failure) = disk.last_failure() {
            stderr::tell(&format!("{name}: the connection broke: {failure}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
