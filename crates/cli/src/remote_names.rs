//! Names of disks over the network on the command line: which there are, and who opens them.
//!
//! A name that is taken here is noted with its options, and called by a URL that has no secrets from then on. The engine
//! gets that URL, and asks back when it is to be opened.

use crate::failure::Failure;
use crate::local_name::local_path;
use crate::output::stderr;
use crate::packed::registry;
use crate::reference_defaults::remote_references;
use crate::values::ReferenceRule;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use zebu::storage::{File, IoError, IoErrorKind, Op, OpenFlags};
use zebu::{OpenRemote, Remote};
use zebu_remote::StatsSnapshot;
use zebu_remote::nbd::{NbdAddress, NbdDisk, NbdOptions};

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
        let path = PathBuf::from(self.address.to_string());
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        match names.get_or_insert_default().insert(path.clone(), self.clone()) {
            Some(before) if before != self => {
                Err(format!("'{}' is given twice, with different options", path.display()))
            }
            _ => Ok(path),
        }
    }
}

/// Names that the command line gave.
static NAMES: Mutex<Option<HashMap<PathBuf, RemoteName>>> = Mutex::new(None);
/// Disks that were opened. They stay so: a server may take no second connection.
static OPENED: Mutex<Vec<(RemoteName, Arc<NbdDisk>)>> = Mutex::new(Vec::new());

/// The file that `name` on the command line leads to: a local path, or the URL of a disk over the network.
///
/// # Errors
/// The name has a protocol that is not known, or can't be read.
pub(crate) fn image_path(name: &OsStr) -> Result<PathBuf, String> {
    match name.to_str().filter(|name| NbdAddress::is_name(name)) {
        None => local_path(name),
        Some(name) => {
            let address = NbdAddress::parse(name)?;
            RemoteName { address, options: NbdOptions::default() }.note()
        }
    }
}

/// Whether `path` is a disk over the network that the command line named.
pub(crate) fn is_remote(path: &Path) -> bool {
    let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    names.as_ref().is_some_and(|names| names.contains_key(path))
}

/// The opener of names for the engine; `given` are the `--allow-refs` of the command line.
///
/// # Errors
/// As of the defaults of `--allow-refs`.
pub(crate) fn opener(given: &[ReferenceRule]) -> Result<Remote, Failure> {
    Ok(Remote::new(Arc::new(Opener), remote_references(given)?))
}

/// Opens what [`NAMES`] has, and what was unpacked.
struct Opener;

impl OpenRemote for Opener {
    fn open(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>> {
        if let Some(unpacked) = registry::open(name, flags) {
            return Some(unpacked);
        }
        let found = NAMES.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(name).cloned()?;
        Some(open(found, flags))
    }

    fn is_name(&self, name: &str) -> bool {
        NbdAddress::is_name(name)
    }

    fn open_reference(&self, name: &str, flags: &OpenFlags) -> Result<File, IoError> {
        let address = NbdAddress::parse(name).map_err(|reason| {
            IoError::of_file(Op::Open, IoErrorKind::Os(libc::EINVAL), name).with_detail(reason)
        })?;
        open(RemoteName { address, options: NbdOptions::default() }, flags)
    }
}

fn open(name: RemoteName, flags: &OpenFlags) -> Result<File, IoError> {
    let url = name.address.to_string();
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = opened.iter().find(|(known, _)| *known == name).map(|(_, disk)| Arc::clone(disk));
    let disk = if let Some(disk) = known {
        disk
    } else {
        let disk = Arc::new(NbdDisk::open(name.address.clone(), name.options.clone())?);
        opened.push((name, Arc::clone(&disk)));
        disk
    };
    File::from_storage(disk, &url, flags)
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
