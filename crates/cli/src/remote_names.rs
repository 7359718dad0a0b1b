//! Names of disks over the network on the command line: which there are, and who opens them.
//!
//! A name that is taken here is noted with its options, and called by a URL that has no secrets from then on. The engine
//! gets that URL, and asks back when it is to be opened.

use crate::failure::Failure;
use crate::local_name::local_path;
use crate::output::stderr;
use crate::reference_defaults::remote_references;
use crate::values::ReferenceRule;
use serde::Serialize;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use zebu::storage::{File, IoError, IoErrorKind, Op, OpenFlags, Storage};
use zebu::{OpenRemote, Remote, RemoteRefs};
use zebu_remote::http::{HttpDisk, HttpOptions, HttpUrl, Redirects, ServersWithoutRanges};
use zebu_remote::nbd::{NbdAddress, NbdDisk, NbdOptions};
use zebu_remote::{Network, RemoteError, StatsSnapshot};

/// A disk over the network, as the command line describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RemoteName {
    Nbd { address: NbdAddress, options: NbdOptions },
    Http { url: HttpUrl, options: Box<HttpOptions> },
}

impl RemoteName {
    /// Whether `name` has a protocol of these.
    fn is_name(name: &str) -> bool {
        NbdAddress::is_name(name) || HttpUrl::is_name(name)
    }

    /// Reads a name, with the options of the command line.
    fn parse(name: &str) -> Result<Self, String> {
        if NbdAddress::is_name(name) {
            return Ok(Self::Nbd { address: NbdAddress::parse(name)?, options: nbd_options() });
        }
        Ok(Self::Http { url: HttpUrl::parse(name)?, options: Box::new(http_options()) })
    }

    /// The URL without secrets.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Nbd { address, .. } => address.to_string(),
            Self::Http { url, .. } => url.to_string(),
        }
    }

    fn is_place_of(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nbd { address: a, .. }, Self::Nbd { address: b, .. }) => a == b,
            (Self::Http { url: a, .. }, Self::Http { url: b, .. }) => a == b,
            _ => false,
        }
    }

    /// Notes it; the name by which it is opened.
    ///
    /// # Errors
    /// The same disk was noted with other options.
    pub(crate) fn note(self) -> Result<PathBuf, String> {
        let shown = self.shown();
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        let names = names.get_or_insert_default();
        let mut path = PathBuf::from(&shown);
        // URLs that differ in what is not shown have a number each.
        let mut number = 1;
        while let Some(before) = names.get(&path) {
            if *before == self {
                return Ok(path);
            }
            if before.is_place_of(&self) {
                return Err(format!("'{shown}' is given twice, with different options"));
            }
            number += 1;
            path = PathBuf::from(format!("{shown}#{number}"));
        }
        names.insert(path.clone(), self);
        Ok(path)
    }

    fn connect(&self) -> Result<Disk, RemoteError> {
        Ok(match self {
            Self::Nbd { address, options } => {
                Disk::Nbd(Arc::new(NbdDisk::open(address.clone(), options.clone())?))
            }
            Self::Http { url, options } => {
                Disk::Http(Arc::new(HttpDisk::open(url.clone(), (**options).clone())?))
            }
        })
    }
}

/// An open disk over the network.
#[derive(Clone)]
enum Disk {
    Nbd(Arc<NbdDisk>),
    Http(Arc<HttpDisk>),
}

impl Disk {
    fn name(&self) -> String {
        match self {
            Self::Nbd(disk) => disk.name(),
            Self::Http(disk) => disk.name(),
        }
    }

    fn stats(&self) -> StatsSnapshot {
        match self {
            Self::Nbd(disk) => disk.stats(),
            Self::Http(disk) => disk.stats(),
        }
    }

    fn last_failure(&self) -> Option<String> {
        match self {
            Self::Nbd(disk) => disk.last_failure(),
            Self::Http(disk) => disk.last_failure(),
        }
    }
}

/// Names that the command line gave.
static NAMES: Mutex<Option<HashMap<PathBuf, RemoteName>>> = Mutex::new(None);
/// Disks that were opened. They stay so: a server may take no second connection.
static OPENED: Mutex<Vec<(RemoteName, Disk)>> = Mutex::new(Vec::new());
/// The way to all servers.
static NETWORK: LazyLock<Network> = LazyLock::new(Network::default);
/// Options of the command line for all names.
static GIVEN: Mutex<NetworkOptions> = Mutex::new(NetworkOptions::NONE);

/// Options of the command line for all disks over the network.
#[derive(Debug, Clone)]
pub(crate) struct NetworkOptions {
    pub(crate) authorities: Option<PathBuf>,
    pub(crate) memory: Option<u64>,
    pub(crate) redirects: Redirects,
}

impl NetworkOptions {
    const NONE: Self = Self { authorities: None, memory: None, redirects: Redirects::Safe };

    /// From now on, names are read with these.
    pub(crate) fn apply(self) {
        *GIVEN.lock().unwrap_or_else(PoisonError::into_inner) = self;
    }
}

/// Options of a disk on an NBD server that nothing else is said of.
pub(crate) fn nbd_options() -> NbdOptions {
    NbdOptions::default().network(NETWORK.clone())
}

/// Options of a file on a web server that nothing else is said of.
pub(crate) fn http_options() -> HttpOptions {
    let given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let options = HttpOptions::default()
        .authorities(given.authorities)
        .redirects(given.redirects)
        .network(NETWORK.clone());
    match given.memory {
        Some(memory) => options.memory(memory),
        None => options,
    }
}

/// The way to all servers.
pub(crate) fn network() -> &'static Network {
    &NETWORK
}

/// Lets files be read that were noted and whose servers have no ranges, once from the beginning to the end.
pub(crate) fn allow_streams() {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    for name in names.iter_mut().flat_map(HashMap::values_mut) {
        if let RemoteName::Http { options, .. } = name {
            options.without_ranges = ServersWithoutRanges::Stream;
        }
    }
}

/// The file that `name` on the command line leads to: a local path, or the URL of a disk over the network.
///
/// # Errors
/// The name has a protocol that is not known, or can't be read.
pub(crate) fn image_path(name: &OsStr) -> Result<PathBuf, String> {
    match name.to_str().filter(|name| RemoteName::is_name(name)) {
        None => local_path(name),
        Some(name) => RemoteName::parse(name)?.note(),
    }
}

/// The name of the driver of a disk over the network, as QEMU calls it; `None` if `path` is none that was named.
pub(crate) fn driver(path: &Path) -> Option<&'static str> {
    let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    Some(match names.as_ref()?.get(path)? {
        RemoteName::Nbd { .. } => "nbd",
        RemoteName::Http { url, .. } if url.is_secure() => "https",
        RemoteName::Http { .. } => "http",
    })
}

/// Whether a name that is to be written into an image has a protocol that leads to a server.
///
/// # Errors
/// It can't be read, or has a password in it.
pub(crate) fn is_server_name(name: &str) -> Result<bool, String> {
    if !RemoteName::is_name(name) {
        return Ok(false);
    }
    if let RemoteName::Http { url, .. } = RemoteName::parse(name)?
        && url.has_credentials()
    {
        return Err("the password would be written into the image: a netrc file can have it".to_owned());
    }
    Ok(true)
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

/// An opener of names that the command line gave, and of no others.
pub(crate) fn given_only() -> Remote {
    Remote::new(Arc::new(Opener), RemoteRefs::None)
}

/// Opens what [`NAMES`] has.
struct Opener;

impl OpenRemote for Opener {
    fn open(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>> {
        let found = NAMES.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(name).cloned()?;
        Some(open(found, flags))
    }

    fn is_name(&self, name: &str) -> bool {
        RemoteName::is_name(name)
    }

    fn open_reference(&self, name: &str, flags: &OpenFlags) -> Result<File, IoError> {
        let name = RemoteName::parse(name).map_err(|reason| {
            let shown = HttpUrl::hide(name);
            IoError::of_file(Op::Open, IoErrorKind::Os(libc::EINVAL), shown).with_detail(reason)
        })?;
        open(name, flags)
    }
}

fn open(name: RemoteName, flags: &OpenFlags) -> Result<File, IoError> {
    let url = name.shown();
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = opened.iter().find(|(known, _)| *known == name).map(|(_, disk)| disk.clone());
    let disk = if let Some(disk) = known {
        disk
    } else {
        let disk = name.connect()?;
        opened.push((name, disk.clone()));
        disk
    };
    let storage: Arc<dyn Storage> = match disk {
        Disk::Nbd(disk) => disk,
        Disk::Http(disk) => disk,
    };
    File::from_storage(storage, &url, flags)
}

/// Figures of all disks over the network that this command opened, added up; `None` if there was none.
pub(crate) fn transfers() -> Option<RemoteTransfers> {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let all = opened.iter().map(|(_, disk)| disk.stats()).reduce(|mut all, one| {
        all.requests += one.requests;
        all.read_bytes += one.read_bytes;
        all.written_bytes += one.written_bytes;
        all.retries += one.retries;
        all.reconnects += one.reconnects;
        all
    });
    all.map(|all| RemoteTransfers {
        requests: all.requests,
        read_bytes: all.read_bytes,
        written_bytes: all.written_bytes,
        retries: all.retries,
        reconnections: all.reconnects,
    })
}

/// Transfers over the network, for reports in JSON.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RemoteTransfers {
    requests: u64,
    read_bytes: u64,
    written_bytes: u64,
    retries: u64,
    reconnections: u64,
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
        if let Disk::Http(disk) = disk
            && !disk.has_versions()
        {
            stderr::tell(&format!(
                "{name}: the server marks no versions (ETag, Last-Modified): a change of the object is seen by its length only"
            ));
        }
        if let Some(failure) = disk.last_failure() {
            let what = if matches!(disk, Disk::Nbd(_)) { "the connection broke" } else { "a request failed" };
            stderr::tell(&format!("{name}: {what}: {failure}"));
        }
    }
}

/// Says why reads over the network were given up, if any were: the errors of images say only that it was so.
pub(crate) fn tell_given_up() {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    for (_, disk) in opened.iter() {
        if let Disk::Http(disk) = disk
            && let Some(reason) = disk.given_up()
        {
            stderr::tell(&format!("{}: {reason}", disk.name()));
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

    #[test]
    fn urls_are_noted_without_their_secrets_and_told_apart() {
        let note = |name: &str| image_path(OsStr::new(name)).map(|path| path.to_string_lossy().into_owned());
        assert_eq!(note("https://u:p@h/d.raw?sig=1").as_deref(), Ok("https://h/d.raw?..."));
        assert_eq!(note("https://u:p@h/d.raw?sig=2").as_deref(), Ok("https://h/d.raw?...#2"));
        assert_eq!(note("https://u:p@h/d.raw?sig=1").as_deref(), Ok("https://h/d.raw?..."));
        assert_eq!(driver(Path::new("https://h/d.raw?...")), Some("https"));
        assert!(image_path(OsStr::new("http://h/secret d")).is_err_and(|error| !error.contains("secret")));
        assert_eq!(is_server_name("http://h/d.raw"), Ok(true));
        assert_eq!(is_server_name("d.raw"), Ok(false));
        assert!(is_server_name("http://u:secret@h/d.raw").is_err_and(|error| error.contains("netrc")));
        assert!(image_path(OsStr::new("./http://x")).is_ok_and(|path| !is_remote(&path)));
    }
}
